//! Requests whose work is refused before it is done.

use oscar_server::ServerConfig;
use serde_json::{Value, json};

use crate::client::Client;
use crate::fake::Script;

/// The context of the embedded model.
fn long() -> Client {
    Client::with(ServerConfig::default(), Script { context: 32_768, ..Default::default() })
}

#[tokio::test]
async fn log_probabilities_are_bounded_by_tokens_choices_and_alternatives() {
    let client = long();
    let prompt: Vec<u32> = (0..5000).map(|token| token % 6000).collect();
    let body = json!({"prompt": prompt, "max_tokens": 0, "prompt_logprobs": 20, "n": 128});
    let error = client.complete(&body).await.error(400);
    assert_eq!(error["param"], "prompt_logprobs");
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "logprobs": true, "top_logprobs": 20,
        "max_tokens": 30_000, "n": 3});
    assert_eq!(client.chat(&chat).await.error(400)["param"], "logprobs");
    let echo = json!({"prompt": prompt, "max_tokens": 1, "logprobs": 20, "echo": true, "n": 64});
    client.complete(&echo).await.error(400);
    let streamed = json!({"prompt": prompt, "max_tokens": 0, "prompt_logprobs": 20, "stream": true});
    client.complete(&streamed).await.error(400);
}

#[tokio::test]
async fn prompt_log_probabilities_come_once() {
    let client = long();
    let body = json!({"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 1, "prompt_logprobs": 2, "n": 3});
    let answer = client.complete(&body).await.ok();
    let choices = answer["choices"].as_array().unwrap();
    let with: Vec<usize> = (0..6).filter(|i| choices[*i].get("prompt_logprobs").is_some()).collect();
    assert_eq!(with, [0, 3]);
    assert_eq!(choices[0]["prompt_logprobs"].as_array().unwrap().len(), 3);
    assert_eq!(choices[0]["prompt_logprobs"][0], Value::Null);
    assert_eq!(choices[0]["prompt_logprobs"][1]["6"]["rank"], 1);
    assert_eq!(choices[3]["prompt_logprobs"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn texts_that_cannot_fit_are_not_tokenized() {
    let client = Client::with(
        ServerConfig { max_body_bytes: Some(40 << 20), ..Default::default() },
        Script { context: 32_768, ..Default::default() },
    );
    for (text, bytes) in [("7", 31_000_000), ("a", 31_000_000), (" ", 10_100_000), ("7", 1 << 20)] {
        let text = text.repeat(bytes);
        let bodies = [
            ("/v1/completions", json!({"prompt": text})),
            ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": text}]})),
            ("/tokenize", json!({"prompt": text, "with_pieces": true})),
        ];
        for (path, body) in bodies {
            let error = client.post(path, &body).await.error(400);
            assert_eq!(error["code"], "context_length_exceeded", "{path} {bytes}");
        }
    }
    // Short enough in bytes, but every digit is a token.
    let digits = json!({"prompt": "7".repeat(400_000)});
    assert_eq!(client.complete(&digits).await.error(400)["code"], "context_length_exceeded");
    client.post("/detokenize", &json!({"tokens": vec![7; 40_000]})).await.error(400);
    let fits = client.post("/tokenize", &json!({"prompt": "7".repeat(30_000)})).await.ok();
    assert_eq!(fits["count"], 30_000);
}

#[tokio::test]
async fn prompts_are_counted_before_any_is_tokenized() {
    let config = ServerConfig { max_body_bytes: Some(40 << 20), ..Default::default() };
    let client = Client::with(config, Script::default());
    let body = json!({"prompt": vec!["some text"; 100_000]});
    assert_eq!(client.complete(&body).await.error(400)["param"], "prompt");
}

/// Values take many times the memory of their text: 31 MB of small objects took 3.6 GB.
#[tokio::test]
async fn values_are_bounded_by_their_memory() {
    let config = ServerConfig { max_body_bytes: Some(32 << 20), ..Default::default() };
    let client = Client::with(config, Script::default());
    let objects = format!("[{}0]", "{\"a\":0},".repeat(1_000_000));
    let ids = format!("[{}1]", "1,".repeat(1_000_000));
    for body in [
        format!(
            r#"{{"messages":[{{"role":"user","content":"Hi"}}],"chat_template_kwargs":{{"a":{objects}}}}}"#
        ),
        format!(r#"{{"messages":[{{"role":"user","content":"Hi"}}],"tools":{objects}}}"#),
        format!(r#"{{"messages":{objects}}}"#),
    ] {
        let error = client.post_raw("/v1/chat/completions", body.into_bytes()).await.error(400);
        assert!(error["message"].as_str().unwrap().contains("memory"), "{error}");
    }
    let error = client.post_raw("/v1/completions", format!(r#"{{"prompt":{ids}}}"#).into_bytes()).await;
    assert!(error.error(400)["message"].as_str().unwrap().contains("memory"));
    // Fields that are skipped take none.
    let ignored = format!(r#"{{"prompt":"a","metadata":{objects}}}"#);
    client.post_raw("/v1/completions", ignored.into_bytes()).await.ok();
}

#[tokio::test]
async fn template_variables_are_bounded() {
    let client = long();
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
    body["chat_template_kwargs"] = json!({"list": vec![json!({"a": 0}); 10_000]});
    assert_eq!(client.chat(&body).await.error(400)["param"], "chat_template_kwargs");
    assert_eq!(client.post("/tokenize", &body).await.error(400)["param"], "chat_template_kwargs");
    body["chat_template_kwargs"] = json!({"enable_thinking": false});
    client.chat(&body).await.ok();
}

#[tokio::test]
async fn the_body_limit_follows_the_context() {
    let body = |bytes: usize| json!({"prompt": "a", "metadata": "x".repeat(bytes)});
    let client = Client::new();
    client.complete(&body(1_000_000)).await.ok();
    client.complete(&body(1_200_000)).await.error(413);
    long().complete(&body(1_200_000)).await.ok();
    long().complete(&body(5_000_000)).await.error(413);
}
