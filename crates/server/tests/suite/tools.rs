//! Tool calls and answers of a demanded form in `/v1/chat/completions`.

use oscar_server::{ServerConfig, ToolCallParser};
use oscar_text::{Dialect, ModelText};
use serde_json::{Value, json};

use crate::client::Client;
use crate::fake::{Script, text, text_file};

fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "get_weather", "description": "Tells the weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}},
        {"type": "function", "function": {"name": "now"}},
    ])
}

fn ask(fields: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Weather?"}], "tools": tools()});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn call(name: &str, arguments: &str) -> String {
    format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
}

#[tokio::test]
async fn calls_are_told_from_text_and_reasoning() {
    let weather = call("get_weather", "{\"city\": \"Zürich\"}");
    let now = call("now", "{}");
    let reply = format!("<think>hm</think>\n\nLet me see.\n{weather}\n<think>and</think>\n{now}");
    let client = Client::saying(&reply);
    let body = client.chat(&ask(json!({}))).await.ok();
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "Let me see.");
    assert_eq!(choice["message"]["reasoning_content"], "hmand");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2);
    assert_eq!(calls[0]["function"], json!({"name": "get_weather", "arguments": "{\"city\": \"Zürich\"}"}));
    assert_eq!(calls[1]["function"], json!({"name": "now", "arguments": "{}"}));
    assert_eq!(calls[0]["type"], "function");
    assert!(calls[0]["id"].as_str().unwrap().starts_with("call_"));
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    assert!(calls[0].get("index").is_none());

    let chunks = client.chat(&ask(json!({"stream": true}))).await.chunks();
    let deltas: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    let joined = |field: &str| deltas.iter().filter_map(|delta| delta[field].as_str()).collect::<String>();
    assert_eq!((joined("content"), joined("reasoning_content")), ("Let me see.".into(), "hmand".into()));
    let pieces: Vec<&Value> =
        deltas.iter().filter_map(|delta| delta["tool_calls"].as_array()).flatten().collect();
    let first: Vec<&&Value> = pieces.iter().filter(|piece| piece["index"] == 0).collect();
    assert_eq!(first[0]["function"]["name"], "get_weather");
    assert_eq!((&first[0]["type"], &first[0]["function"]["arguments"]), (&json!("function"), &json!("")));
    assert!(first[1..].iter().all(|piece| piece.get("id").is_none()));
    let arguments: String =
        first.iter().filter_map(|piece| piece["function"]["arguments"].as_str()).collect();
    assert_eq!(arguments, "{\"city\": \"Zürich\"}");
    assert!(first.len() > 3, "arguments come in pieces");
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");

    let metrics = client.get("/metrics").await.text();
    assert!(metrics.contains("oscar_tool_calls_total 4"), "{metrics}");
    assert!(metrics.contains("oscar_tool_calls_malformed_total 0"), "{metrics}");
}

#[tokio::test]
async fn text_stays_text() {
    let now = call("now", "{}");
    let client = Client::saying(&now);
    // Without tools, or where none are wanted, nothing is looked for.
    let mut without = ask(json!({}));
    without.as_object_mut().unwrap().remove("tools");
    for body in [without, ask(json!({"tool_choice": "none"}))] {
        let choice = client.chat(&body).await.ok()["choices"][0].clone();
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(now), &json!("stop")));
        assert!(choice["message"].get("tool_calls").is_none());
    }
    let broken = "<tool_call>\n{\"name\": now}\n</tool_call>";
    let client = Client::saying(broken);
    let choice = client.chat(&ask(json!({}))).await.ok()["choices"][0].clone();
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(broken), &json!("stop")));
    let metrics = client.get("/metrics").await.text();
    assert!(metrics.contains("oscar_tool_calls_malformed_total 1"), "{metrics}");
}

#[tokio::test]
async fn one_call_ends_the_answer_where_only_one_is_wanted() {
    let reply = format!("{}\n{}", call("now", "{}"), call("now", "{}"));
    let client = Client::saying(&reply);
    let body = client.chat(&ask(json!({"parallel_tool_calls": false}))).await.ok();
    assert_eq!(body["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
    assert_eq!(body["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(body["choices"][0]["message"]["content"], Value::Null);
    let both = client.chat(&ask(json!({}))).await.ok();
    assert!(both["usage"]["completion_tokens"].as_u64() > body["usage"]["completion_tokens"].as_u64());
    // A call that the limit cuts off stays incomplete, and the reason says why.
    let cut = client.chat(&ask(json!({"max_tokens": 20, "stream": true}))).await.chunks();
    assert_eq!(cut.last().unwrap()["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn the_prompt_shows_tools_calls_and_results() {
    let client = Client::new();
    let messages = json!([
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", "type": "function",
            "function": {"name": "get_weather", "arguments": "{\"city\": \"Bern\"}"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ]);
    client.chat(&ask(json!({"messages": messages}))).await.ok();
    let prompt = text().tokenizer.decode(&client.engine.last_prompt(), false).unwrap();
    for part in [
        "\"name\":\"get_weather\"",
        "<tool_call>\n{\"name\":\"get_weather\",\"arguments\":{\"city\":\"Bern\"}}\n</tool_call>",
        "<tool_response>\nRain.\n</tool_response>",
    ] {
        assert!(prompt.contains(part), "{part} is not in {prompt}");
    }
    let tokens = client.post("/tokenize", &ask(json!({"messages": messages}))).await.ok();
    assert_eq!(tokens["count"].as_u64().unwrap() as usize, client.engine.last_prompt().len());
}

#[tokio::test]
async fn demanded_forms_reach_the_engine() {
    let client = Client::new();
    for fields in [
        json!({"tool_choice": "required"}),
        json!({"tool_choice": {"type": "function", "function": {"name": "now"}}}),
        json!({"response_format": {"type": "json_object"}}),
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": true,
            "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}}}),
        json!({"guided_choice": ["yes", "no"]}),
    ] {
        client.chat(&ask(fields.clone())).await.ok();
        assert!(client.engine.last_params().constraint.is_some(), "{fields}");
    }
    client.chat(&ask(json!({"response_format": {"type": "text"}}))).await.ok();
    assert!(client.engine.last_params().constraint.is_none());
    let completion = json!({"prompt": "a", "guided_regex": "[0-9]+"});
    client.complete(&completion).await.ok();
    assert!(client.engine.last_params().constraint.is_some());
    let error = client
        .chat(&ask(json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x",
            "schema": {"type": "array", "uniqueItems": true}}}})))
        .await
        .error(400);
    assert_eq!(error["param"], "response_format");
    assert!(error["message"].as_str().unwrap().contains("uniqueItems"), "{error}");
    // What fails later fails under the name that the client used.
    let format = json!({"type": "json_schema", "schema": {"type": "object", "properties": {}}});
    for (path, fields, param) in [
        ("/v1/chat/completions", json!({"response_format": format}), "response_format"),
        (
            "/v1/messages",
            json!({"max_tokens": 9, "output_config": {"format": format}}),
            "output_config.format",
        ),
        ("/v1/responses", json!({"input": "Hi", "text": {"format": format}}), "text.format"),
    ] {
        let mut body = fields;
        if path != "/v1/responses" {
            body["messages"] = json!([{"role": "user", "content": "Hi"}]);
        }
        client.post(path, &body).await.ok();
        assert_eq!(client.engine.last_params().constraint.unwrap().0.parameter(), param);
    }
    let many: serde_json::Map<String, Value> = (0..2001).map(|i| (format!("f{i}"), json!({}))).collect();
    let body = json!({"input": "Hi", "stream": true, "text": {"format": {"type": "json_schema", "schema":
        {"type": "object", "properties": many}}}});
    let error = client.post("/v1/responses", &body).await.error(400);
    assert_eq!(error["param"], "text.format");
    assert!(error["message"].as_str().unwrap().contains("`properties`"), "{error}");
}

#[tokio::test]
async fn strict_tools_are_held_to_their_schemas() {
    let client = Client::new();
    let tools = |strict: Value, parameters: Value| json!({"tools": [{"type": "function", "function": {"name": "f", "strict": strict, "parameters": parameters}}]});
    let good = json!({"type": "object", "properties": {}});
    client.chat(&ask(tools(json!(true), good.clone()))).await.ok();
    assert!(client.engine.last_params().constraint.is_some());
    for strict in [json!(false), json!(null)] {
        client.chat(&ask(tools(strict, good.clone()))).await.ok();
        assert!(client.engine.last_params().constraint.is_none());
    }
    let mut forbidden = tools(json!(true), good);
    forbidden["tool_choice"] = json!("none");
    client.chat(&ask(forbidden)).await.ok();
    assert!(client.engine.last_params().constraint.is_none());
    for parameters in [json!({"type": "nonsense"}), json!({"type": "object", "not": {}})] {
        let error = client.chat(&ask(tools(json!(true), parameters.clone()))).await.error(400);
        assert_eq!(error["param"], "tools", "{parameters}");
        let mut forbidden = tools(json!(true), parameters);
        forbidden["tool_choice"] = json!("none");
        client.chat(&ask(forbidden)).await.ok();
    }
}

/// A call in reasoning that is left in the content is a call, so the grammar must not let it pass.
#[tokio::test]
async fn strict_calls_in_unseparated_reasoning_are_held_too() {
    let template = include_str!("../../../text/tests/fixtures/chat/qwen_style.jinja");
    let config = json!({"chat_template": template}).to_string();
    let model = ModelText::from_files(text_file("tokenizer.json"), Some(config.as_bytes()), None).unwrap();
    let thought = format!("<think>Perhaps {} hm.</think>\n\nIt rains.", call("f", "{\"wrong\": 1}"));
    let ids = model.tokenizer.encode(&thought, false).unwrap();
    let client = Client::with_text(ServerConfig::default(), Script::default(), model);
    let tool = json!({"type": "function", "function": {"name": "f", "strict": true,
        "parameters": {"type": "object", "properties": {}, "additionalProperties": false}}});
    for separate in [true, false] {
        client.chat(&ask(json!({"tools": [tool], "separate_reasoning": separate}))).await.ok();
        let mut state = client.engine.last_params().constraint.unwrap().0.start();
        let mut fits = |&id: &u32| {
            let allowed = state.allowed().unwrap()[id as usize / 32] >> (id % 32) & 1 == 1;
            allowed && state.accept(id).is_ok()
        };
        assert_eq!(ids.iter().all(&mut fits), separate);
    }
}

#[tokio::test]
async fn strict_without_a_parser_is_refused() {
    let config = ServerConfig { tool_call_parser: ToolCallParser::Off, ..ServerConfig::default() };
    let client = Client::with(config, Script::default());
    let tool = |strict: bool| json!({"type": "function", "function": {"name": "f", "strict": strict}});
    client.chat(&ask(json!({"tools": [tool(false)]}))).await.ok();
    client.chat(&ask(json!({"tools": [tool(true)], "tool_choice": "none"}))).await.ok();
    let error = client.chat(&ask(json!({"tools": [tool(true)]}))).await.error(400);
    assert_eq!(error["param"], "tools");
    assert!(error["message"].as_str().unwrap().contains("strict"), "{error}");
}

#[tokio::test]
async fn the_parser_can_be_named_or_switched_off() {
    let config = |parser| ServerConfig { tool_call_parser: parser, ..ServerConfig::default() };
    let script = |reply: &str| Script { replies: vec![reply.to_owned()], ..Script::default() };
    let mistral = ToolCallParser::Dialect(Dialect::Mistral);
    let client = Client::with(config(mistral), script("[TOOL_CALLS]now{}"));
    let call = client.chat(&ask(json!({}))).await.ok()["choices"][0]["message"]["tool_calls"][0].clone();
    assert_eq!(call["function"]["name"], "now");
    assert_eq!(call["id"].as_str().unwrap().len(), 9, "the length that Mistral's templates demand");
    let client = Client::with(config(ToolCallParser::Off), script("[TOOL_CALLS]now{}"));
    let message = client.chat(&ask(json!({}))).await.ok()["choices"][0]["message"].clone();
    assert_eq!(message["content"], "[TOOL_CALLS]now{}");
    let error = client.chat(&ask(json!({"tool_choice": "required"}))).await.error(400);
    assert_eq!(error["param"], "tool_choice");
}
