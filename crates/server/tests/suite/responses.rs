//! `POST /v1/responses`, without any state.

use serde_json::{Value, json};

use crate::client::Client;
use crate::fake::text;

fn ask(fields: Value) -> Value {
    let mut body = json!({"model": "fake-15m", "input": "Weather?", "instructions": "Be brief.",
        "tools": [{"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}]});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

const REPLY: &str = "<think>hm</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"now\", \"arguments\": {\"a\": 1}}\n</tool_call>";

#[tokio::test]
async fn answers_are_items() {
    let client = Client::saying(REPLY);
    let body = client.post("/v1/responses", &ask(json!({}))).await.ok();
    assert_eq!((&body["object"], &body["status"]), (&json!("response"), &json!("completed")));
    let output = body["output"].as_array().unwrap();
    assert_eq!(
        output.iter().map(|item| &item["type"]).collect::<Vec<_>>(),
        ["reasoning", "message", "function_call"]
    );
    assert_eq!(output[0]["content"][0]["text"], "hm");
    assert_eq!(output[1]["content"][0]["text"], "Let me see.");
    assert_eq!((&output[2]["name"], &output[2]["arguments"]), (&json!("now"), &json!("{\"a\": 1}")));
    assert!(output[2]["call_id"].as_str().unwrap().starts_with("call_"));
    let usage = &body["usage"];
    let sum = usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"], sum);
    assert_eq!(usage["input_tokens_details"]["cached_tokens"], 0);
    assert!(usage["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 0);
    let cut = client.post("/v1/responses", &ask(json!({"max_output_tokens": 6}))).await.ok();
    assert_eq!(cut["status"], "incomplete");
    assert_eq!(cut["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(cut["output"].as_array().unwrap().last().unwrap()["status"], "incomplete");
    // The call breaks off in its arguments; the items before it are whole.
    let begun = REPLY.split_once("1}").unwrap().0;
    let tokens = text().tokenizer.encode(begun, false).unwrap().len();
    for stream in [false, true] {
        let body = ask(json!({"max_output_tokens": tokens, "stream": stream}));
        let answer = client.post("/v1/responses", &body).await;
        let (response, done) = match stream {
            false => (answer.ok(), None),
            true => {
                let mut events: Vec<Value> = answer
                    .text()
                    .lines()
                    .filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok())
                    .collect();
                let last = events.pop().unwrap();
                assert_eq!(last["type"], "response.incomplete");
                (last["response"].clone(), events.pop())
            }
        };
        let statuses: Vec<&Value> =
            response["output"].as_array().unwrap().iter().map(|item| &item["status"]).collect();
        // A stream has shown the call; a whole answer has it in its text.
        match stream {
            true => assert_eq!(statuses, ["completed", "completed", "incomplete"], "{response}"),
            false => assert_eq!(statuses, ["completed", "incomplete"], "{response}"),
        }
        assert!(done.is_none_or(|done| done["item"]["status"] == "incomplete"));
    }
}

#[tokio::test]
async fn streams_have_the_published_order() {
    let client = Client::saying(REPLY);
    let answer = client.post("/v1/responses", &ask(json!({"stream": true}))).await;
    let text = answer.text();
    let events: Vec<Value> = text
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    let mut names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    names.dedup();
    assert_eq!(
        names,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    assert!(events.iter().enumerate().all(|(number, event)| event["sequence_number"] == number));
    let last = &events[events.len() - 1]["response"];
    assert_eq!(last["output"].as_array().unwrap().len(), 3);
    assert!(last["usage"]["output_tokens"].as_u64().unwrap() > 0);
    assert!(text.contains("event: response.created\n"));
}

#[tokio::test]
async fn items_become_a_prompt() {
    let client = Client::new();
    let input = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "Time?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{\"zone\": \"CET\"}"},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
    ]);
    let format = json!({"format": {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {}}}});
    client.post("/v1/responses", &ask(json!({"input": input, "text": format}))).await.ok();
    let prompt = text().tokenizer.decode(&client.engine.last_prompt(), false).unwrap();
    for part in
        ["Be brief.", "user\nTime?", "I look.\n\n<tool_call>", "{\"zone\":\"CET\"}", "<tool_response>\nnoon"]
    {
        assert!(prompt.contains(part), "{part} is not in {prompt}");
    }
    assert!(client.engine.last_params().constraint.is_some());
}

/// Agents send a comment and the final text as two items.
#[tokio::test]
async fn messages_of_the_assistant_in_a_row_are_all_kept() {
    let client = Client::new();
    let parts = |text: &str| json!([{"type": "output_text", "text": text}]);
    for (first, second) in [
        (json!("alpha beta"), json!("omega")),
        (parts("alpha beta"), json!("omega")),
        (json!("alpha beta"), parts("omega")),
        (parts("alpha beta"), parts("omega")),
    ] {
        let input = json!([
            {"role": "user", "content": "Time?"},
            {"role": "assistant", "content": first},
            {"type": "message", "role": "assistant", "content": second},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "Thanks."},
        ]);
        client.post("/v1/responses", &ask(json!({"input": input}))).await.ok();
        let prompt = text().tokenizer.decode(&client.engine.last_prompt(), false).unwrap();
        assert!(prompt.contains("assistant\nalpha beta\nomega<|im_end|>"), "{prompt}");
    }
}

#[tokio::test]
async fn state_and_foreign_tools_are_refused_by_name() {
    let client = Client::new();
    for (fields, param) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"conversation": "c"}), "conversation"),
        (json!({"background": true}), "background"),
        (json!({"tools": [{"type": "web_search"}], "tool_choice": "required"}), "tools[0].type"),
        (json!({"tools": [{"type": "image_generation"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "namespace", "name": "n"}]}), "tools[0].tools"),
        (
            json!({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}]}),
            "tools[0].tools[0].type",
        ),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type"),
        (json!({"input": 5}), "input"),
        (json!({"input": []}), "input"),
        (json!({"kv": {"budget": 64}}), "kv"),
        (json!({"tools": [{"name": "now"}]}), "tools[0].type"),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"typical_p": 0.5}), "typical_p"),
        // Fields that the chat knows under other names, or at other places.
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
        (json!({"text": {"format": {"type": "json_schema"}}}), "text.format.schema"),
        (json!({"text": {"format": {"type": "json_schema", "schema": {"type": "wrong"}}}}), "text.format"),
        (json!({"reasoning": {"effort": 5}}), "reasoning.effort"),
        (json!({"tool_choice": {"type": "function"}}), "tool_choice.name"),
        (json!({"tools": [{"type": "web_search"}, {"type": "function"}]}), "tools[1].name"),
        (
            json!({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "a b"}]}]}),
            "tools[0].tools[0].name",
        ),
        (json!({"input": [{"role": "robot", "content": "x"}]}), "input[0].role"),
        (json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}), "input[0].content[0]"),
        (
            json!({"input": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"},
                {"role": "assistant", "content": [{"type": "output_text", "text": "b"}, {"type": "x"}]}]}),
            "input[2].content[1]",
        ),
        (json!({"input": [{"type": "function_call_output", "call_id": "c"}]}), "input[0].output"),
        (
            json!({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]}),
            "input[0].output",
        ),
    ] {
        assert_eq!(client.post("/v1/responses", &ask(fields)).await.error(400)["param"], param);
    }
    client
        .post("/v1/responses", &ask(json!({"store": true, "truncation": "disabled", "include": []})))
        .await
        .ok();
}

/// Codex offers OpenAI's search unasked.
#[tokio::test]
async fn a_search_that_is_only_offered_is_left_out() {
    let client = Client::new();
    let now = json!({"type": "function", "name": "now", "parameters": {"type": "object"}});
    let body = ask(json!({"tools": [{"type": "web_search", "external_web_access": true}, now]}));
    let response = client.post("/v1/responses", &body).await.ok();
    assert_eq!(response["tools"], json!([now]));
    let prompt = text().tokenizer.decode(&client.engine.last_prompt(), false).unwrap();
    assert!(prompt.contains("\"name\":\"now\"") && !prompt.contains("web_search"), "{prompt}");
    client.post("/v1/responses", &ask(json!({"tools": [{"type": "web_search_preview"}]}))).await.ok();
}

#[tokio::test]
async fn tokens_are_counted_and_settings_repeated() {
    let client = Client::new();
    let counted = client.post("/v1/responses/input_tokens", &ask(json!({}))).await.ok();
    let body = ask(json!({"metadata": {"a": "b"}, "user": "me"}));
    let response = client.post("/v1/responses", &body).await.ok();
    assert_eq!(counted["object"], "response.input_tokens");
    assert_eq!(counted["input_tokens"], response["usage"]["input_tokens"]);
    assert_eq!((&response["metadata"], &response["user"]), (&json!({"a": "b"}), &json!("me")));
}

/// Codex groups functions; the model sees them with the name of the group in front.
#[tokio::test]
async fn functions_may_stand_in_a_namespace() {
    let client = Client::saying(
        "<tool_call>\n{\"name\": \"agents.close\", \"arguments\": {\"id\": \"a\"}}\n</tool_call>",
    );
    let input = json!([
        {"role": "user", "content": "Close them."},
        {"type": "function_call", "call_id": "c1", "namespace": "agents", "name": "list", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a"},
    ]);
    let tools = json!([{"type": "namespace", "name": "agents", "description": "x", "tools": [
        {"type": "function", "name": "close", "parameters": {"type": "object", "properties": {"id": {"type": "string"}}}},
        {"type": "function", "name": "list"}]}]);
    let body = ask(json!({"input": input, "tools": tools}));
    let call = client.post("/v1/responses", &body).await.ok()["output"][0].clone();
    assert_eq!((&call["namespace"], &call["name"]), (&json!("agents"), &json!("close")));
    let prompt = text().tokenizer.decode(&client.engine.last_prompt(), false).unwrap();
    assert!(
        prompt.contains("\"name\":\"agents.close\"") && prompt.contains("\"name\":\"agents.list\""),
        "{prompt}"
    );
}
