//! Wrong requests: 4xx, the parameter's name, words that help.

use oscar_server::ServerConfig;
use oscar_text::ModelText;
use serde_json::{Value, json};

use crate::client::Client;
use crate::fake::{Script, text_file};

/// What is refused, and the parameter that is named.
#[tokio::test]
async fn the_wrong_parameter_is_named() {
    let client = Client::new();
    let good = json!([{"role": "user", "content": "Hi"}]);
    let cases = [
        (json!({}), "messages"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": "Hi"}), "messages"),
        (json!({"messages": ["Hi"]}), "messages[0]"),
        (json!({"messages": [{"role": "user", "content": "Hi", "name": 5}]}), "messages[0].name"),
        (json!({"messages": [{}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages[0].content[0]",
        ),
        (json!({"messages": good, "temperature": -1}), "temperature"),
        (json!({"messages": good, "temperature": 1e30}), "temperature"),
        (json!({"messages": good, "temperature": "hot"}), "temperature"),
        (json!({"messages": good, "top_p": 0}), "top_p"),
        (json!({"messages": good, "top_p": 1e-60}), "top_p"),
        (json!({"messages": good, "top_k": -2}), "top_k"),
        (json!({"messages": good, "top_k": 1.5}), "top_k"),
        (json!({"messages": good, "min_p": 2}), "min_p"),
        (json!({"messages": good, "repetition_penalty": 0}), "repetition_penalty"),
        (json!({"messages": good, "presence_penalty": 3}), "presence_penalty"),
        (json!({"messages": good, "frequency_penalty": -3}), "frequency_penalty"),
        (json!({"messages": good, "logit_bias": {"x": 1}}), "logit_bias"),
        (json!({"messages": good, "logit_bias": {"999999": 1}}), "logit_bias"),
        (json!({"messages": good, "logit_bias": {"1": 101}}), "logit_bias"),
        (json!({"messages": good, "logit_bias": []}), "logit_bias"),
        (json!({"messages": good, "seed": 1.5}), "seed"),
        (json!({"messages": good, "seed": 1e30}), "seed"),
        (json!({"messages": good, "stop": 5}), "stop"),
        (json!({"messages": good, "stop": ""}), "stop"),
        (json!({"messages": good, "stop": vec!["x"; 100]}), "stop"),
        (json!({"messages": good, "stop": "x".repeat(5000)}), "stop"),
        (json!({"messages": good, "stop": ["a", 5]}), "stop[1]"),
        (json!({"messages": good, "stop_token_ids": [-1]}), "stop_token_ids[0]"),
        (json!({"messages": good, "stop_token_ids": [6144]}), "stop_token_ids"),
        (json!({"messages": good, "max_tokens": 0}), "max_tokens"),
        (json!({"messages": good, "max_tokens": -5}), "max_tokens"),
        (json!({"messages": good, "max_tokens": u64::MAX}), "max_tokens"),
        (json!({"messages": good, "max_tokens": 100000}), "max_tokens"),
        (json!({"messages": good, "max_completion_tokens": i64::MAX}), "max_tokens"),
        (json!({"messages": good, "n": 0}), "n"),
        (json!({"messages": good, "n": i64::MAX}), "n"),
        (json!({"messages": good, "stream": "yes"}), "stream"),
        (json!({"messages": good, "stream_options": true}), "stream_options"),
        (json!({"messages": good, "logprobs": 5}), "logprobs"),
        (json!({"messages": good, "top_logprobs": 5}), "top_logprobs"),
        (json!({"messages": good, "logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"messages": good, "prompt_logprobs": -1}), "prompt_logprobs"),
        (json!({"messages": good, "tools": {}}), "tools"),
        (json!({"messages": good, "tools": [5]}), "tools[0]"),
        (json!({"messages": good, "tool_choice": "required"}), "tool_choice"),
        (json!({"messages": good, "response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"messages": good, "guided_json": {"type": "object", "not": {}}}), "guided_json"),
        (json!({"messages": good, "guided_json": {}, "guided_regex": "a"}), "guided_regex"),
        (json!({"messages": good, "guided_regex": "("}), "guided_regex"),
        (json!({"messages": good, "functions": [{"name": "f"}]}), "functions"),
        (json!({"messages": good, "allowed_token_ids": [5]}), "allowed_token_ids"),
        (json!({"messages": good, "xtc_probability": 0.5}), "xtc_probability"),
        (json!({"messages": good, "regex": "a+", "ignore_eos": true}), "ignore_eos"),
        (json!({"messages": good, "tools": [{"type": "function"}]}), "tools[0].function"),
        (json!({"messages": good, "chat_template_kwargs": []}), "chat_template_kwargs"),
        (
            json!({"messages": good, "continue_final_message": true, "add_generation_prompt": true}),
            "continue_final_message",
        ),
        (
            json!({"messages": [{"role": "user", "content": " "}], "continue_final_message": true}),
            "continue_final_message",
        ),
    ];
    for (body, param) in cases {
        let error = client.chat(&body).await.error(400);
        assert_eq!(error["param"], param, "{body} gave {error}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    let cases = [
        (json!({}), "prompt"),
        (json!({"prompt": ""}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [[]]}), "prompt"),
        (json!({"prompt": ["a", 1]}), "prompt[1]"),
        (json!({"prompt": [[1, 2], [3, "a"]]}), "prompt[1][1]"),
        (json!({"prompt": [6144]}), "prompt"),
        (json!({"prompt": [-1]}), "prompt[0]"),
        (json!({"prompt": {"text": "a"}}), "prompt"),
        (json!({"prompt": "a", "logprobs": true}), "logprobs"),
        (json!({"prompt": "a", "logprobs": 21}), "logprobs"),
        (json!({"prompt": "a", "best_of": 3}), "best_of"),
        (json!({"prompt": "a", "suffix": "b"}), "suffix"),
        (json!({"prompt": vec!["a"; 200]}), "prompt"),
        (json!({"prompt": vec!["a"; 20], "n": 20}), "n"),
        (json!({"prompt": "a", "kv": {"budget": 64}}), "kv"),
        (json!({"prompt": "word ".repeat(1000)}), "max_tokens"),
        (json!({"prompt": "word ".repeat(2000)}), "prompt"),
    ];
    for (body, param) in cases {
        let error = client.complete(&body).await.error(400);
        assert_eq!(error["param"], param, "{body} gave {error}");
    }
}

#[tokio::test]
async fn refusals_read_once() {
    let client = Client::new();
    let good = json!([{"role": "user", "content": "Hi"}]);
    for (body, message) in [
        (
            json!({"messages": good, "n": 1u64 << 63}),
            "n: must be an integer from 1 to 9223372036854775807, not 9223372036854775808",
        ),
        (json!({"messages": good, "n": 129}), "n: must be at most 128, not 129"),
        (json!({"messages": good, "stop": ["a", 5]}), "stop[1]: must be a string, not 5"),
        (json!({"messages": good, "tools": [{}]}), "tools[0].type: is missing; use \"function\""),
        (
            json!({"messages": [{"role": "user", "content": "word ".repeat(2000)}]}),
            "messages: the text has 10000 bytes, but a context of 512 tokens holds at most 7680: shorten it",
        ),
    ] {
        assert_eq!(client.chat(&body).await.error(400)["message"], message);
    }
    // A text that the bytes alone do not refuse.
    let larger = Client::with(ServerConfig::default(), Script { context: 8192, ..Default::default() });
    assert_eq!(
        larger.complete(&json!({"prompt": "word ".repeat(20_000)})).await.error(400)["message"],
        "prompt: the text of 100000 bytes has more than the 8192 tokens of the context: shorten it"
    );
    let many = client.complete(&json!({"prompt": vec!["a"; 20], "n": 20})).await.error(400);
    assert_eq!(
        many["message"],
        "n: 20 answers to each of 20 prompts are more than the 128 allowed in one request"
    );
}

/// A model without a chat template says how to give it one.
#[tokio::test]
async fn a_missing_chat_template_is_named() {
    let text = ModelText::from_files(text_file("tokenizer.json"), None, None).unwrap();
    let client = Client::with_text(ServerConfig::default(), Script::default(), text);
    let error = client.chat(&json!({"messages": [{"role": "user", "content": "Hi"}]})).await.error(400);
    assert!(error["message"].as_str().unwrap().contains("--chat-template FILE"), "{error}");
}

#[tokio::test]
async fn an_unknown_model_is_404_and_aliases_are_known() {
    let config = ServerConfig { model_aliases: vec!["gpt-4o".into()], ..Default::default() };
    let client = Client::with(config, Script::default());
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let error = client.chat(&json!({"model": "other", "messages": messages})).await.error(404);
    assert_eq!((&error["param"], &error["code"]), (&json!("model"), &json!("model_not_found")));
    let body = client.chat(&json!({"model": "gpt-4o", "messages": messages})).await.ok();
    assert_eq!(body["model"], "gpt-4o");
    client.chat(&json!({"messages": messages})).await.ok();
}

#[tokio::test]
async fn an_overlong_prompt_says_how_long_it_is() {
    let client = Client::new();
    let content = "word ".repeat(2000);
    let error = client.chat(&json!({"messages": [{"role": "user", "content": content}]})).await.error(400);
    assert_eq!(error["code"], "context_length_exceeded");
    assert!(error["message"].as_str().unwrap().contains("512"), "{error}");
}

#[tokio::test]
async fn bodies_that_are_no_json_are_400() {
    let client = Client::new();
    let bodies: [&[u8]; 8] = [
        b"",
        b"{",
        b"null",
        b"[1]",
        b"\"x\"",
        b"\xff\xfe\x00",
        b"{\"messages\": \"\xc3\x28\"}",
        b"{\"a\":1e999}",
    ];
    for path in ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/abort_request"] {
        for body in bodies {
            client.post_raw(path, body.to_vec()).await.error(400);
        }
        client.post_raw(path, "[".repeat(1 << 20)).await.error(400);
    }
    // A lone surrogate is JSON, but no text.
    let escaped = r#"{"prompt": "\ud800"}"#;
    client.post_raw("/v1/completions", escaped).await.error(400);
}

#[tokio::test]
async fn large_bodies_are_413() {
    let config = ServerConfig { max_body_bytes: Some(1 << 20), ..Default::default() };
    let client = Client::with(config, Script::default());
    let error = client.post_raw("/v1/chat/completions", vec![b' '; 100 << 20]).await.error(413);
    assert!(error["message"].as_str().unwrap().contains("1048576"), "{error}");
    client.post_raw("/tokenize", vec![b'{'; (1 << 20) + 1]).await.error(413);
    client.chat(&json!({"messages": [{"role": "user", "content": "still there?"}]})).await.ok();
}

#[tokio::test]
async fn a_full_queue_is_429_with_retry_after() {
    let config = ServerConfig { retry_after_seconds: 5, ..Default::default() };
    let client = Client::with(config, Script::default());
    client.engine.set_full(true);
    let bodies = [
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "Hi"}], "stream": true})),
        ("/v1/completions", json!({"prompt": ["a", "b"]})),
    ];
    for (path, body) in bodies {
        let answer = client.post(path, &body).await;
        assert_eq!(answer.error(429)["code"], "queue_full");
        assert_eq!(answer.headers["retry-after"], "5");
    }
    client.engine.set_full(false);
    client.complete(&json!({"prompt": "a"})).await.ok();
}

#[tokio::test]
async fn unknown_routes_and_methods_answer_in_json() {
    let client = Client::new();
    assert_eq!(client.get("/v1/nothing").await.error(404)["code"], "unknown_route");
    assert_eq!(client.get("/v1/chat/completions").await.error(405)["code"], "method_not_allowed");
    assert_eq!(client.post("/health", &Value::Null).await.error(405)["code"], "method_not_allowed");
    client.get("/v1/models/%ff").await.error(400);
}
