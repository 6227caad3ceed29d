//! gpt-oss: messages in channels, with its template and its special tokens.

use oscar_server::{ServerConfig, ToolCallParser};
use oscar_text::{Dialect, ModelText};
use serde_json::{Value, json};

use crate::client::Client;
use crate::fake::{Script, text_file};

/// The embedded tokenizer with the special tokens of gpt-oss, and a template in its manner.
fn text() -> ModelText {
    let mut tokenizer: Value = serde_json::from_slice(text_file("tokenizer.json")).unwrap();
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    for (id, token) in (6144..).zip(Dialect::Harmony.special_tokens()) {
        added
            .push(json!({"id": id, "content": token, "special": true, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false}));
    }
    let template = include_str!("../../../text/tests/fixtures/chat/harmony_style.jinja");
    let config = json!({"chat_template": template}).to_string();
    ModelText::from_files(tokenizer.to_string().as_bytes(), Some(config.as_bytes()), None).unwrap()
}

fn client(reply: &str, config: ServerConfig) -> Client {
    let text = text();
    assert!(text.tokenizer.is_special(text.tokenizer.token_to_id("<|channel|>").unwrap()));
    Client::with_text(config, Script { replies: vec![reply.to_owned()], ..Script::default() }, text)
}

fn ask(fields: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Weather?"}], "tools": [
        {"type": "function", "function": {"name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}},
        {"type": "function", "function": {"name": "now"}}]});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

const THOUGHT: &str = "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant";
const CALL: &str =
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"Zürich\"}";

#[tokio::test]
async fn channels_become_reasoning_calls_and_content() {
    let client = client(&format!("{THOUGHT}{CALL}"), ServerConfig::default());
    let body = client.chat(&ask(json!({}))).await.ok();
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], Value::Null);
    assert_eq!(choice["message"]["reasoning_content"], "Look it up.");
    let function = &choice["message"]["tool_calls"][0]["function"];
    assert_eq!(*function, json!({"name": "get_weather", "arguments": "{\"city\": \"Zürich\"}"}));
    assert!(body["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 0, "{body}");

    let chunks = client.chat(&ask(json!({"stream": true}))).await.chunks();
    let deltas: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    let reasoning: String = deltas.iter().filter_map(|delta| delta["reasoning_content"].as_str()).collect();
    let arguments: String =
        deltas.iter().filter_map(|delta| delta["tool_calls"][0]["function"]["arguments"].as_str()).collect();
    assert_eq!((reasoning.as_str(), arguments.as_str()), ("Look it up.", "{\"city\": \"Zürich\"}"));
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
}

/// The markup belongs to every answer, so it is read without tools too.
#[tokio::test]
async fn answers_without_tools_have_channels_too() {
    let client = client(&format!("{THOUGHT}<|channel|>final<|message|>Rain."), ServerConfig::default());
    let plain = json!({"messages": [{"role": "user", "content": "Weather?"}]});
    for body in [plain.clone(), ask(json!({})), ask(json!({"tool_choice": "none"}))] {
        let message = client.chat(&body).await.ok()["choices"][0]["message"].clone();
        assert_eq!(
            (&message["content"], &message["reasoning_content"]),
            (&json!("Rain."), &json!("Look it up."))
        );
    }
    let mut whole = plain;
    whole["separate_reasoning"] = json!(false);
    let message = client.chat(&whole).await.ok()["choices"][0]["message"].clone();
    assert_eq!(message["content"], "<|channel|>analysis<|message|>Look it up.<|end|>Rain.");
    let response = client.post("/v1/responses", &json!({"input": "Weather?"})).await.ok();
    let kinds: Vec<&str> =
        response["output"].as_array().unwrap().iter().filter_map(|item| item["type"].as_str()).collect();
    assert_eq!(kinds, ["reasoning", "message"]);
}

#[tokio::test]
async fn malformed_calls_are_text_and_counted() {
    let broken = "<|channel|>commentary to=functions.now<|message|>at noon";
    let client = client(broken, ServerConfig::default());
    let choice = client.chat(&ask(json!({}))).await.ok()["choices"][0].clone();
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(broken), &json!("stop")));
    let metrics = client.get("/metrics").await.text();
    assert!(metrics.contains("oscar_tool_calls_malformed_total 1"), "{metrics}");
}

#[tokio::test]
async fn the_template_shows_reasoning_calls_and_results() {
    let client = client("", ServerConfig::default());
    let call = |id: &str, name: &str, arguments: &str| {
        json!({"id": id, "type": "function",
        "function": {"name": name, "arguments": arguments}})
    };
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather and time?"},
        {"role": "assistant", "content": null, "reasoning_content": "Both.", "tool_calls": [
            call("1", "get_weather", "{\"city\": \"Bern\"}"), call("2", "now", "{}")]},
        {"role": "tool", "tool_call_id": "2", "content": "noon"},
        {"role": "tool", "tool_call_id": "1", "content": "Rain."},
    ]);
    client.chat(&ask(json!({"messages": messages, "reasoning_effort": "low"}))).await.ok();
    let prompt = text().tokenizer.decode(&client.engine.last_prompt(), false).unwrap();
    let turns = "<|start|>assistant<|channel|>analysis<|message|>Both.<|end|>\
        <|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{\"city\": \"Bern\"}<|call|>\
        <|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>\"Rain.\"<|end|>\
        <|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>\
        <|start|>functions.now to=assistant<|channel|>commentary<|message|>\"noon\"<|end|><|start|>assistant";
    assert!(prompt.ends_with(turns), "{prompt}");
    assert!(prompt.contains("Reasoning: low") && prompt.contains("type now = () => any;"), "{prompt}");
}

/// Demanded forms are grammars over the special tokens of the channels.
#[tokio::test]
async fn demanded_forms_stand_in_their_channel() {
    let client = client("", ServerConfig::default());
    for (fields, first) in [
        (json!({"tool_choice": "required"}), "<|channel|>"),
        (json!({"response_format": {"type": "json_object"}}), "<|channel|>"),
    ] {
        client.chat(&ask(fields.clone())).await.ok();
        let constraint = client.engine.last_params().constraint.expect("a constraint");
        let mask = constraint.0.start().allowed().unwrap();
        let allowed: Vec<u32> = (0..6200)
            .filter(|&id| mask.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1))
            .collect();
        assert_eq!(allowed, [text().tokenizer.token_to_id(first).unwrap()], "{fields}");
    }
}

#[tokio::test]
async fn the_parser_can_be_named() {
    let parser = ToolCallParser::from_name("openai").unwrap();
    let config = ServerConfig { tool_call_parser: parser, ..ServerConfig::default() };
    let script = Script { replies: vec![format!("{THOUGHT}{CALL}")], ..Script::default() };
    let client = Client::with(config, script);
    let message = client.chat(&ask(json!({}))).await.ok()["choices"][0]["message"].clone();
    assert_eq!(message["reasoning_content"], "Look it up.");
    assert_eq!(message["tool_calls"][0]["function"]["name"], "get_weather");
}
