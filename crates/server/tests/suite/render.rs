//! `/v1/chat/completions/render` and `/v1/completions/render`.

use serde_json::{Value, json};

use crate::client::Client;

#[tokio::test]
async fn a_rendered_chat_has_the_tokens_that_would_run() {
    let client = Client::new();
    let body = json!({"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 7,
                      "temperature": 0.5, "stop": ["x"], "stream": true});
    let rendered = client.post("/v1/chat/completions/render", &body).await.ok();
    assert_eq!(client.engine.last_prompt(), [0u32; 0], "nothing runs");
    let tokens = client.post("/tokenize", &body).await.ok()["tokens"].clone();
    assert_eq!(rendered["token_ids"], tokens);
    client.chat(&body).await;
    assert_eq!(rendered["token_ids"], json!(client.engine.last_prompt()));
    assert_eq!((rendered["model"].as_str(), rendered["stream"].as_bool()), (Some("fake-15m"), Some(true)));
    assert_eq!(rendered["request_id"].as_str().map(str::len), Some(32));
    let params = &rendered["sampling_params"];
    assert_eq!((params["max_tokens"].as_u64(), params["temperature"].as_f64()), (Some(7), Some(0.5)));
    assert_eq!((&params["stop"], params["n"].as_u64()), (&json!(["x"]), Some(1)));
}

#[tokio::test]
async fn rendered_completions_are_a_list() {
    let client = Client::new();
    let send = |prompt: Value| {
        let client = &client;
        async move { client.post("/v1/completions/render", &json!({"prompt": prompt})).await.ok() }
    };
    assert_eq!(send(json!([1, 2, 3])).await[0]["token_ids"], json!([1, 2, 3]));
    let two = send(json!(["Hello", "Hello there"])).await;
    let lengths: Vec<_> =
        two.as_array().unwrap().iter().map(|one| one["token_ids"].as_array().unwrap().len()).collect();
    assert!(lengths.len() == 2 && lengths[0] < lengths[1], "{two}");
    assert_eq!(two[0]["sampling_params"]["max_tokens"], 16);
}

#[tokio::test]
async fn what_cannot_run_cannot_be_rendered() {
    let client = Client::new();
    let error = client.post("/v1/chat/completions/render", &json!({"messages": []})).await.error(400);
    assert_eq!(error["param"], "messages");
    let error = client.post("/v1/completions/render", &json!({"prompt": [9_999_999]})).await.error(400);
    assert!(error["message"].as_str().unwrap().contains("9999999"), "{error}");
    client.post("/v1/completions/render", &json!({"prompt": "a", "model": "other"})).await.error(404);
}
