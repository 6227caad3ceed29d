//! Tool calls that break off inside their arguments: text in whole answers, never a call to run.

use serde_json::{Value, json};

use crate::client::{Answer, Client};
use crate::fake::text;

const BROKEN: &str = "Now.\n<tool_call>\n{\"name\": \"now\", \"arguments\": {bad}}\n</tool_call>";
const CALL: &str = "\n<tool_call>\n{\"name\": \"now\", \"arguments\": {\"a\": 1}}\n</tool_call>";

fn chat(fields: Value) -> Value {
    with(
        json!({"messages": [{"role": "user", "content": "Time?"}],
        "tools": [{"type": "function", "function": {"name": "now"}}]}),
        fields,
    )
}

fn messages(fields: Value) -> Value {
    with(
        json!({"messages": [{"role": "user", "content": "Time?"}], "max_tokens": 300,
        "tools": [{"name": "now", "input_schema": {"type": "object"}}]}),
        fields,
    )
}

fn responses(fields: Value) -> Value {
    with(json!({"input": "Time?", "tools": [{"type": "function", "name": "now"}]}), fields)
}

fn with(mut body: Value, fields: Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn data(answer: &Answer) -> Vec<Value> {
    let text = answer.text();
    text.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok()).collect()
}

/// The tokens of the broken reply up to the middle of a good call's arguments.
fn cut() -> (String, usize) {
    let reply = format!("Now.{}", CALL.split_once(" 1").unwrap().0);
    let tokens = text().tokenizer.encode(&reply, false).unwrap().len();
    (reply, tokens)
}

#[tokio::test]
async fn a_whole_chat_answer_gives_the_call_back_as_text() {
    let client = Client::saying(BROKEN);
    let choice = client.chat(&chat(json!({}))).await.ok()["choices"][0].clone();
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(BROKEN), &json!("stop")));
    assert!(choice["message"].get("tool_calls").is_none());
    let metrics = client.get("/metrics").await.text();
    assert!(metrics.contains("oscar_tool_calls_total 0"), "{metrics}");
    assert!(metrics.contains("oscar_tool_calls_malformed_total 1"), "{metrics}");

    let both = format!("{BROKEN}{CALL}");
    let client = Client::saying(&both);
    let choice = client.chat(&chat(json!({}))).await.ok()["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], BROKEN);
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!((calls.len(), &calls[0]["function"]["arguments"]), (1, &json!("{\"a\": 1}")));

    let (reply, tokens) = cut();
    let client = Client::saying(&reply);
    let choice = client.chat(&chat(json!({"max_tokens": tokens}))).await.ok()["choices"][0].clone();
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(reply), &json!("length")));
}

#[tokio::test]
async fn a_stream_says_tool_calls_only_of_complete_ones() {
    for (reply, reason) in [(BROKEN.to_owned(), "stop"), (format!("{BROKEN}{CALL}"), "tool_calls")] {
        let chunks = Client::saying(&reply).chat(&chat(json!({"stream": true}))).await.chunks();
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], reason, "{reply}");
    }
}

#[tokio::test]
async fn messages_never_hand_out_a_call_with_invented_input() {
    let (cut_reply, tokens) = cut();
    for (reply, most, reason) in [(BROKEN, 300, "end_turn"), (cut_reply.as_str(), tokens, "max_tokens")] {
        let client = Client::saying(reply);
        let body = client.post("/v1/messages", &messages(json!({"max_tokens": most}))).await.ok();
        assert_eq!(body["stop_reason"], reason);
        assert_eq!(body["content"], json!([{"type": "text", "text": reply}]));

        let body = messages(json!({"max_tokens": most, "stream": true}));
        let events = data(&client.post("/v1/messages", &body).await);
        assert!(events.iter().all(|event| event["content_block"]["type"] != "tool_use"), "{events:?}");
        let text: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
        assert_eq!(text, reply);
        assert_eq!(events[events.len() - 2]["delta"]["stop_reason"], reason);
    }
    let both = format!("{BROKEN}{CALL}");
    let body = Client::saying(&both).post("/v1/messages", &messages(json!({}))).await.ok();
    assert_eq!(body["stop_reason"], "tool_use");
    assert_eq!(body["content"][0], json!({"type": "text", "text": BROKEN}));
    assert_eq!(body["content"][1]["input"], json!({"a": 1}));
}

#[tokio::test]
async fn responses_show_the_call_as_text_or_as_incomplete() {
    let client = Client::saying(BROKEN);
    let body = client.post("/v1/responses", &responses(json!({}))).await.ok();
    let output = body["output"].as_array().unwrap();
    assert_eq!((output.len(), &output[0]["content"][0]["text"]), (1, &json!(BROKEN)));

    let events = data(&client.post("/v1/responses", &responses(json!({"stream": true}))).await);
    let items: Vec<(&Value, &Value)> = events
        .iter()
        .filter(|event| event["type"] == "response.output_item.done")
        .map(|event| (&event["item"]["type"], &event["item"]["status"]))
        .collect();
    let (call, message, done) = (json!("function_call"), json!("message"), json!("completed"));
    assert_eq!(items, [(&message, &done), (&call, &json!("incomplete")), (&message, &done)]);
}
