//! `POST /v1/messages` and `/v1/messages/count_tokens`, in the words of Anthropic.

use axum::http::Request;
use oscar_server::{ApiKey, Keys, Role, ServerConfig};
use serde_json::{Value, json};

use crate::client::{Answer, Client};
use crate::fake::{Script, text};

fn ask(fields: Value) -> Value {
    let mut body = json!({"model": "fake-15m", "max_tokens": 200,
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [{"name": "now", "description": "Tells the time", "input_schema": {"type": "object", "properties": {}}}]});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

const REPLY: &str = "<think>hm</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"now\", \"arguments\": {\"a\": 1}}\n</tool_call>";

/// The named events of a stream.
fn events(answer: &Answer) -> Vec<(String, Value)> {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let text = answer.text();
    text.split("\n\n")
        .filter(|event| !event.trim().is_empty())
        .map(|event| {
            let (name, data) = event.trim().split_once('\n').unwrap();
            let data = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            (name.strip_prefix("event: ").unwrap().to_owned(), data)
        })
        .collect()
}

#[tokio::test]
async fn answers_are_blocks() {
    let client = Client::saying(REPLY);
    let body = client.post("/v1/messages", &ask(json!({}))).await.ok();
    assert!(body["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!((&body["type"], &body["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!((&body["stop_reason"], &body["stop_sequence"]), (&json!("tool_use"), &Value::Null));
    let content = body["content"].as_array().unwrap();
    assert_eq!(content[0], json!({"type": "thinking", "thinking": "hm", "signature": ""}));
    assert_eq!(content[1], json!({"type": "text", "text": "Let me see."}));
    assert_eq!((&content[2]["type"], &content[2]["input"]), (&json!("tool_use"), &json!({"a": 1})));
    let usage = &body["usage"];
    let counted = client.post("/v1/messages/count_tokens", &ask(json!({}))).await.ok();
    assert_eq!(usage["input_tokens"], counted["input_tokens"]);
    assert_eq!(usage["cache_read_input_tokens"], 0);
    let again = client.post("/v1/messages", &ask(json!({}))).await.ok()["usage"].clone();
    assert!(again["cache_read_input_tokens"].as_u64().unwrap() > 0);
    let total = again["input_tokens"].as_u64().unwrap() + again["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(counted["input_tokens"], total);
}

#[tokio::test]
async fn streams_have_the_published_order() {
    let client = Client::saying(REPLY);
    let events = events(&client.post("/v1/messages", &ask(json!({"stream": true}))).await);
    assert!(events.iter().all(|(name, data)| data["type"] == name.as_str()));
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[..2], ["message_start", "content_block_start"]);
    assert_eq!(names[names.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let start = &events[0].1["message"];
    assert_eq!((&start["content"], &start["stop_reason"]), (&json!([]), &Value::Null));
    assert!(start["usage"]["input_tokens"].as_u64().unwrap() > 0);
    let starts: Vec<&Value> =
        events.iter().filter(|(name, _)| name == "content_block_start").map(|(_, data)| data).collect();
    assert_eq!(starts.iter().map(|data| data["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(starts[2]["content_block"]["input"], json!({}));
    let joined = |kind: &str, field: &str| -> String {
        let deltas = events.iter().map(|(_, data)| &data["delta"]).filter(|delta| delta["type"] == kind);
        deltas.filter_map(|delta| delta[field].as_str()).collect()
    };
    assert_eq!(joined("thinking_delta", "thinking"), "hm");
    assert_eq!(joined("text_delta", "text"), "Let me see.");
    assert_eq!(joined("input_json_delta", "partial_json"), "{\"a\": 1}");
    let end = &events[events.len() - 2].1;
    assert_eq!(end["delta"]["stop_reason"], "tool_use");
    assert!(end["usage"]["output_tokens"].as_u64().unwrap() > 5);
}

#[tokio::test]
async fn conversations_become_prompts() {
    let client = Client::new();
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "Time?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {"zone": "CET"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "noon"}]},
            {"type": "text", "text": "Thanks."}]},
    ]);
    let prompt = |header: &str| {
        let system = json!([{"type": "text", "text": header}, {"type": "text", "text": "Be brief."}]);
        ask(json!({"messages": messages, "system": system, "stop_sequences": ["world"], "temperature": 0}))
    };
    let body = client.post("/v1/messages", &prompt("x-anthropic-billing-header: cch=1;")).await.ok();
    assert_eq!((&body["stop_reason"], &body["stop_sequence"]), (&json!("stop_sequence"), &json!("world")));
    let first = client.engine.last_prompt();
    let text = text().tokenizer.decode(&first, false).unwrap();
    for part in
        ["Be brief.", "{\"zone\":\"CET\"}", "<tool_response>\nnoon\n</tool_response>", "user\nThanks."]
    {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    assert!(!text.contains("billing"));
    client.post("/v1/messages", &prompt("x-anthropic-billing-header: cch=2;")).await.ok();
    assert_eq!(client.engine.last_prompt(), first, "the changing header is not part of the prompt");
    // More tokens than the context has room for are cut, as Anthropic's clients ask for as many as
    // they can get.
    client.post("/v1/messages", &ask(json!({"max_tokens": 32_000}))).await.ok();
    assert!(client.engine.last_params().max_tokens < 512);
    for choice in [json!({"type": "any"}), json!({"type": "tool", "name": "now"})] {
        client.post("/v1/messages", &ask(json!({"tool_choice": choice}))).await.ok();
        assert!(client.engine.last_params().constraint.is_some());
    }
}

/// Gateways join the billing line and the prompt into one text.
#[tokio::test]
async fn only_the_billing_line_is_dropped() {
    let client = Client::new();
    let prompt = async |system: Value| {
        client.post("/v1/messages", &ask(json!({"system": system}))).await.ok();
        client.engine.last_prompt()
    };
    let header = "x-anthropic-billing-header: cc_version=2.1; cch=1;";
    let block = |text: &str| json!({"type": "text", "text": text});
    let (plain, none) = (prompt(json!("Be brief.\nBe kind.")).await, prompt(json!("")).await);
    assert_ne!(plain, none);
    let joined = format!("{header}\nBe brief.\nBe kind.");
    for system in [
        json!(joined),
        json!([block(&joined)]),
        json!([block(header), block("Be brief.\nBe kind.")]),
        json!([block(&format!("{header}\n")), block("Be brief."), block("Be kind.")]),
    ] {
        assert_eq!(prompt(system.clone()).await, plain, "{system}");
    }
    assert_eq!(prompt(json!(header)).await, none);
    assert_eq!(prompt(json!([block(header)])).await, none);
}

#[tokio::test]
async fn errors_have_anthropics_form() {
    let client = Client::new();
    for (fields, word) in [
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}), "messages[0].content[0]"),
        (json!({"messages": [{"role": "robot", "content": "x"}]}), "messages[0].role"),
        (json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "tools[0].type"),
        (json!({"tool_choice": {"type": "sometimes"}}), "tool_choice.type"),
        (json!({"system": 5}), "system"),
        (json!({"mcp_servers": [{}]}), "mcp_servers"),
        (json!({"thinking": {"type": "maybe"}}), "thinking.type"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": "all"}}), "thinking.budget_tokens"),
        (json!({"kv": {"budget": 64}}), "kv"),
        // Fields that the chat knows under other names, or at other places.
        (json!({"stop_sequences": 5}), "stop_sequences: "),
        (json!({"stop_sequences": ["a", 5]}), "stop_sequences[1]: "),
        (json!({"output_config": {"format": {"type": "xml"}}}), "output_config.format.type: "),
        (json!({"output_config": {"format": {"type": "json_schema"}}}), "output_config.format.schema: "),
        (json!({"output_format": {"type": "json_schema", "schema": {"type": "wrong"}}}), "output_format: "),
        (json!({"tool_choice": {"type": "tool"}}), "tool_choice.name: "),
        (json!({"tools": [{"input_schema": {}}]}), "tools[0].name: "),
        (json!({"tools": [{"name": "f", "input_schema": []}]}), "tools[0].input_schema: "),
        (
            json!({"system": "x", "messages": [{"role": "user", "content": [
                {"type": "text", "text": "a"},
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}]}]}),
            "messages[0].content[1].content[0]: ",
        ),
    ] {
        let answer = client.post("/v1/messages", &ask(fields)).await;
        assert_eq!(answer.status, 400);
        let body = answer.json();
        assert_eq!(
            (&body["type"], &body["error"]["type"]),
            (&json!("error"), &json!("invalid_request_error"))
        );
        assert!(body["error"]["message"].as_str().unwrap().starts_with(word), "{body}");
    }
    client
        .post("/v1/messages", &ask(json!({"thinking": {"type": "enabled", "budget_tokens": 1024}})))
        .await
        .ok();
    let unknown = client.post("/v1/messages", &ask(json!({"model": "claude"}))).await;
    assert_eq!((unknown.status.as_u16(), &unknown.json()["error"]["type"]), (404, &json!("not_found_error")));
    client.engine.set_full(true);
    let full = client.post("/v1/messages", &ask(json!({}))).await;
    assert_eq!((full.status.as_u16(), &full.json()["error"]["type"]), (429, &json!("rate_limit_error")));
    assert!(full.headers.contains_key("retry-after"));
}

/// Also errors that no handler of these routes has made.
#[tokio::test]
async fn errors_of_layers_have_anthropics_form() {
    let keys = Keys::new(ApiKey::parse_list("k", Role::User, "keys").unwrap());
    let config = ServerConfig { keys, max_body_bytes: Some(1000), ..ServerConfig::default() };
    let client = Client::with(config, Script::default());
    for path in ["/v1/messages", "/v1/messages/count_tokens"] {
        for (status, kind, key, content, body) in [
            (401, "authentication_error", "wrong", "application/json", "{}".to_owned()),
            (413, "request_too_large", "k", "application/json", " ".repeat(2000)),
            (415, "invalid_request_error", "k", "text/plain", "{}".to_owned()),
        ] {
            let request = Request::post(path).header("x-api-key", key).header("content-type", content);
            let answer = client.send(request.body(body.into()).unwrap()).await;
            let found = answer.json();
            assert_eq!(answer.status.as_u16(), status, "{found}");
            assert_eq!((&found["type"], &found["error"]["type"]), (&json!("error"), &json!(kind)));
            assert_eq!(answer.headers["content-type"], "application/json");
            let id = answer.headers["x-request-id"].to_str().unwrap();
            assert_eq!(answer.headers["request-id"], format!("req_{id}"));
            let length =
                answer.headers.get("content-length").map(|length| length.to_str().unwrap().to_owned());
            assert!(length.is_none_or(|length| length == answer.body.len().to_string()));
        }
    }
    let other = Request::post("/v1/chat/completions").header("content-type", "application/json");
    assert_eq!(client.send(other.body("{}".into()).unwrap()).await.error(401)["code"], "invalid_api_key");
}

#[tokio::test]
async fn a_last_message_of_the_assistant_is_continued() {
    let client = Client::new();
    let prompt = async |content: Value| {
        let messages =
            json!([{"role": "user", "content": "Time?"}, {"role": "assistant", "content": content}]);
        client.post("/v1/messages", &ask(json!({"messages": messages}))).await.ok();
        let counted =
            client.post("/v1/messages/count_tokens", &ask(json!({"messages": messages}))).await.ok();
        assert_eq!(counted["input_tokens"], client.engine.last_prompt().len());
        text().tokenizer.decode(&client.engine.last_prompt(), false).unwrap()
    };
    assert!(prompt(json!("It is {")).await.ends_with("<|im_start|>assistant\nIt is {"));
    let blocks = json!([{"type": "text", "text": "It is {"}]);
    assert!(prompt(blocks).await.ends_with("<|im_start|>assistant\nIt is {"));
    // An empty beginning is none.
    assert!(prompt(json!("")).await.ends_with("Time?<|im_end|>\n<|im_start|>assistant\n"));
}
