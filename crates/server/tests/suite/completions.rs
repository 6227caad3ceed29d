//! `POST /v1/completions`: prompts of all kinds, echo, log-probabilities, streams.

use serde_json::{Value, json};

use crate::client::Client;
use crate::fake::text;

const REPLY: &str = "Hello, world! How are you?";

#[tokio::test]
async fn every_kind_of_prompt_is_taken() {
    let client = Client::new();
    let ids = text().tokenizer.encode("once upon", false).unwrap();
    for prompt in [json!("once upon"), json!(["once upon"]), json!(ids), json!([ids])] {
        let body = client.complete(&json!({"prompt": prompt, "max_tokens": 100})).await.ok();
        assert!(body["id"].as_str().unwrap().starts_with("cmpl-"));
        assert_eq!(body["object"], "text_completion");
        assert_eq!(body["choices"][0]["text"], REPLY, "{prompt}");
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
        assert_eq!(body["usage"]["prompt_tokens"], ids.len());
        assert_eq!(client.engine.last_prompt(), ids);
    }
    let default = client.complete(&json!({"prompt": "x", "ignore_eos": true})).await.ok();
    assert_eq!(default["usage"]["completion_tokens"], 16);
}

#[tokio::test]
async fn several_prompts_and_choices_are_numbered_through() {
    let client = Client::new();
    let body =
        client.complete(&json!({"prompt": ["a", "b"], "n": 2, "echo": true, "max_tokens": 100})).await.ok();
    let texts: Vec<&str> =
        body["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    let expected = [format!("a{REPLY}"), format!("a{REPLY}"), format!("b{REPLY}"), format!("b{REPLY}")];
    assert_eq!(texts, expected);
    assert_eq!(body["choices"][3]["index"], 3);
    assert_eq!(body["usage"]["prompt_tokens"], 2);
}

#[tokio::test]
async fn logprobs_have_the_form_of_completions() {
    let client = Client::new();
    let body =
        client.complete(&json!({"prompt": "a b", "logprobs": 2, "echo": true, "max_tokens": 100})).await.ok();
    let logprobs = &body["choices"][0]["logprobs"];
    let tokens: Vec<&str> =
        logprobs["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(tokens.concat(), format!("a b{REPLY}"));
    assert!(logprobs["token_logprobs"][0].is_null(), "nothing comes before the first token");
    assert_eq!(logprobs["token_logprobs"][1], -0.5);
    assert!(logprobs["top_logprobs"][1].as_object().unwrap().len() >= 2);
    let offsets: Vec<usize> =
        logprobs["text_offset"].as_array().unwrap().iter().map(|o| o.as_u64().unwrap() as usize).collect();
    for (token, offset) in tokens.iter().zip(offsets) {
        assert!(format!("a b{REPLY}")[offset..].starts_with(token));
    }
    let plain = client.complete(&json!({"prompt": "a b", "logprobs": 0, "max_tokens": 3})).await.ok();
    assert_eq!(plain["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), 3);
    assert!(plain["choices"][0].get("prompt_logprobs").is_none());
}

#[tokio::test]
async fn a_prompt_alone_can_be_scored() {
    let client = Client::new();
    let asked =
        json!({"prompt": "one two", "max_tokens": 0, "echo": true, "logprobs": 1, "prompt_logprobs": 3});
    let body = client.complete(&asked).await.ok();
    let choice = &body["choices"][0];
    assert_eq!(choice["text"], "one two");
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(body["usage"]["completion_tokens"], 0);
    let scored = choice["prompt_logprobs"].as_array().unwrap();
    assert!(scored[0].is_null());
    let entry = scored[1].as_object().unwrap();
    assert_eq!(entry.len(), 3);
    let first = entry.values().next().unwrap();
    assert_eq!((&first["rank"], &first["logprob"]), (&json!(1), &json!(-0.5)));
    assert!(first["decoded_token"].is_string());
}

#[tokio::test]
async fn a_stream_equals_the_whole() {
    let client = Client::new();
    let asked = json!({"prompt": ["a", "b"], "stream": true, "echo": true, "logprobs": 1, "max_tokens": 100,
        "stop": "are", "stream_options": {"include_usage": true}});
    let chunks = client.complete(&asked).await.chunks();
    for (index, prompt) in ["a", "b"].iter().enumerate() {
        let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
        let pieces: Vec<&Value> = choices.filter(|choice| choice["index"] == index).collect();
        let text: String = pieces.iter().map(|piece| piece["text"].as_str().unwrap()).collect();
        assert_eq!(text, format!("{prompt}Hello, world! How "));
        assert_eq!(pieces.last().unwrap()["finish_reason"], "stop");
        assert_eq!(pieces.last().unwrap()["stop_reason"], "are");
        assert_eq!(pieces[0]["logprobs"]["text_offset"][0], 0);
        assert_eq!(pieces[1]["logprobs"]["text_offset"][0], 1);
    }
    let (last, before) = chunks.split_last().unwrap();
    assert_eq!(last["usage"]["prompt_tokens"], 2);
    assert!(before.iter().all(|chunk| chunk["usage"].is_null()));
}
