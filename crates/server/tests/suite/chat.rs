//! `POST /v1/chat/completions`: shapes, streams, stops, choices, log-probabilities, templates, reasoning.

use oscar_server::ServerConfig;
use serde_json::{Value, json};

use crate::client::Client;
use crate::fake::{Script, text};

fn hello() -> Value {
    json!({"model": "fake-15m", "messages": [{"role": "user", "content": "Hi"}]})
}

/// `hello` with more fields.
fn with(fields: Value) -> Value {
    let mut body = hello();
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// All text of one choice in a stream.
fn streamed(chunks: &[Value], choice: u64, field: &str) -> String {
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
    let of_choice = choices.filter(|piece| piece["index"] == choice);
    of_choice.filter_map(|piece| piece["delta"][field].as_str()).collect()
}

#[tokio::test]
async fn a_whole_answer_has_the_shape_of_openai() {
    let client = Client::new();
    let body = client.chat(&hello()).await.ok();
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["model"], "fake-15m");
    assert!(body["created"].as_u64().unwrap() > 1_700_000_000);
    assert!(body["system_fingerprint"].as_str().unwrap().contains("oscar2"));
    let choice = &body["choices"][0];
    assert_eq!(choice["index"], 0);
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["message"]["content"], "Hello, world! How are you?");
    assert_eq!(choice["finish_reason"], "stop");
    assert!(choice["logprobs"].is_null());
    let tokens = text().tokenizer.encode("Hello, world! How are you?", false).unwrap().len();
    let usage = &body["usage"];
    assert_eq!(usage["completion_tokens"], tokens + 1, "the end-of-turn token is counted");
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    let total = usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"], total);
}

#[tokio::test]
async fn cached_tokens_are_reported_on_a_hit() {
    let client = Client::new();
    let long = with(json!({"messages": [{"role": "user", "content": "one two three four ".repeat(20)}]}));
    assert_eq!(client.chat(&long).await.ok()["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let hit = client.chat(&long).await.ok();
    assert!(hit["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() >= 16);
}

#[tokio::test]
async fn a_stream_brings_role_then_text_then_end() {
    let client = Client::new();
    let answer = client.chat(&with(json!({"stream": true}))).await;
    let chunks = answer.chunks();
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    assert!(chunks.iter().all(|chunk| chunk["object"] == "chat.completion.chunk"));
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"]));
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
    assert_eq!(streamed(&chunks, 0, "content"), "Hello, world! How are you?");
    let ends: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["finish_reason"]).collect();
    let (last, before) = ends.split_last().unwrap();
    assert_eq!(*last, "stop");
    assert!(before.iter().all(|end| end.is_null()));
    assert_eq!(answer.headers["x-accel-buffering"], "no");
}

#[tokio::test]
async fn include_usage_adds_one_last_chunk() {
    let client = Client::new();
    let asked = with(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let chunks = client.chat(&asked).await.chunks();
    let (last, before) = chunks.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert!(last["usage"]["completion_tokens"].as_u64().unwrap() > 0);
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert!(before.iter().all(|chunk| chunk.get("usage").is_some_and(Value::is_null)));
}

#[tokio::test]
async fn stop_strings_are_found_across_tokens_and_end_the_engine_too() {
    let client = Client::new();
    for stream in [false, true] {
        // " world! H" covers several tokens and ends inside of one.
        let asked = with(
            json!({"stop": ["nothing", "rld! H"], "stream": stream, "ignore_eos": true, "max_tokens": 100}),
        );
        let answer = client.chat(&asked).await;
        let (content, reason, stop) = match stream {
            false => {
                let choice = answer.ok()["choices"][0].clone();
                let content = choice["message"]["content"].as_str().unwrap().to_owned();
                (content, choice["finish_reason"].clone(), choice["stop_reason"].clone())
            }
            true => {
                let chunks = answer.chunks();
                let end = chunks.last().unwrap()["choices"][0].clone();
                (streamed(&chunks, 0, "content"), end["finish_reason"].clone(), end["stop_reason"].clone())
            }
        };
        assert_eq!(content, "Hello, wo");
        assert_eq!(reason, "stop");
        assert_eq!(stop, "rld! H");
    }
    assert_eq!(client.engine.cancelled().len(), 2, "the engine is told to stop");
    let kept = client.chat(&with(json!({"stop": "world", "include_stop_str_in_output": true}))).await.ok();
    assert_eq!(kept["choices"][0]["message"]["content"], "Hello, world");
}

#[tokio::test]
async fn min_tokens_holds_stop_strings_off() {
    let client = Client::new();
    let asked = with(json!({"stop": "Hello", "min_tokens": 3, "max_tokens": 5}));
    let body = client.chat(&asked).await.ok();
    assert!(body["choices"][0]["message"]["content"].as_str().unwrap().starts_with("Hello"));
    assert_eq!(client.engine.last_params().min_tokens, 3);
}

#[tokio::test]
async fn length_ends_an_answer() {
    let client = Client::new();
    for field in ["max_tokens", "max_completion_tokens"] {
        let mut body = hello();
        body[field] = json!(2);
        let body = client.chat(&body).await.ok();
        assert_eq!(body["choices"][0]["finish_reason"], "length");
        assert_eq!(body["usage"]["completion_tokens"], 2);
    }
}

#[tokio::test]
async fn several_choices_are_told_apart() {
    let replies = vec!["First answer".to_owned(), "The second one, longer".to_owned()];
    let client = Client::with(ServerConfig::default(), Script { replies, ..Default::default() });
    let body = client.chat(&with(json!({"n": 2}))).await.ok();
    assert_eq!(body["choices"][0]["message"]["content"], "First answer");
    assert_eq!(body["choices"][1]["message"]["content"], "The second one, longer");
    assert_eq!(body["choices"][1]["index"], 1);
    let chunks = client.chat(&with(json!({"n": 2, "stream": true}))).await.chunks();
    assert_eq!(chunks[1]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(streamed(&chunks, 0, "content"), "First answer");
    assert_eq!(streamed(&chunks, 1, "content"), "The second one, longer");
    // One choice stopped by a string, the other by the engine: both end, the request is cancelled.
    let body = client.chat(&with(json!({"n": 2, "stop": "First"}))).await.ok();
    assert_eq!(body["choices"][0]["message"]["content"], "");
    assert_eq!(body["choices"][1]["message"]["content"], "The second one, longer");
    assert_eq!(body["choices"][1]["finish_reason"], "stop");
}

#[tokio::test]
async fn logprobs_come_with_bytes_and_alternatives() {
    let client = Client::new();
    let body = client.chat(&with(json!({"logprobs": true, "top_logprobs": 2}))).await.ok();
    let content = body["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    let joined: String = content.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
    assert_eq!(joined, "Hello, world! How are you?");
    assert_eq!(content[0]["logprob"], -0.5);
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(content[0]["top_logprobs"][0]["token"], content[0]["token"]);
    let bytes: Vec<u8> =
        content[0]["bytes"].as_array().unwrap().iter().map(|b| b.as_u64().unwrap() as u8).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), content[0]["token"].as_str().unwrap());
    let chunks = client.chat(&with(json!({"logprobs": true, "stream": true}))).await.chunks();
    let entries = chunks.iter().filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array());
    assert_eq!(entries.flatten().count(), content.len());
    let prompt = client.chat(&with(json!({"prompt_logprobs": 1}))).await.ok();
    assert!(prompt["prompt_logprobs"][0].is_null());
    assert!(prompt["prompt_logprobs"][1].is_object());
}

#[tokio::test]
async fn sampling_fields_reach_the_engine() {
    let client = Client::new();
    let asked = with(json!({
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"5": 2, "7": -100}, "seed": 42,
        "stop_token_ids": [9, 9], "ignore_eos": true, "min_tokens": 1, "max_tokens": 3, "n": 2,
    }));
    client.chat(&asked).await.ok();
    let params = client.engine.last_params();
    let sampling = &params.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p), (0.7, 0.9, 40, 0.05));
    assert_eq!(sampling.repetition_penalty, 1.1);
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (0.5, -0.5));
    assert_eq!(sampling.logit_bias, [(5, 2.0), (7, -100.0)]);
    assert_eq!((sampling.seed, params.choices, params.min_tokens, params.max_tokens), (42, 2, 1, 3));
    assert_eq!(params.stop_tokens, [9]);
    client.chat(&with(json!({"top_k": -1, "seed": -1}))).await.ok();
    assert_eq!(client.engine.last_params().sampling.top_k, 0);
    assert_eq!(client.engine.last_params().stop_tokens, [2]);
    // Without a limit the rest of the context may be used.
    assert_eq!(client.engine.last_params().max_tokens, 512 - client.engine.last_prompt().len());
}

#[tokio::test]
async fn templates_are_rendered_as_asked() {
    let tokenizer = text().tokenizer;
    let client = Client::new();
    let prompt = |client: &Client| tokenizer.decode(&client.engine.last_prompt(), false).unwrap();
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    client.chat(&with(json!({"messages": [{"role": "user", "content": parts}]}))).await.ok();
    assert_eq!(prompt(&client), "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n");
    client.chat(&with(json!({"add_generation_prompt": false}))).await.ok();
    assert_eq!(prompt(&client), "<|im_start|>user\nHi<|im_end|>\n");
    let open = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]);
    client.chat(&with(json!({"messages": open, "continue_final_message": true}))).await.ok();
    assert_eq!(prompt(&client), "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell, ");
    client.chat(&with(json!({"chat_template": "default"}))).await.ok();
    let refused = client.chat(&with(json!({"chat_template": "{{ messages }}"}))).await.error(400);
    assert_eq!(refused["param"], "chat_template");
}

#[tokio::test]
async fn a_template_in_a_request_needs_permission() {
    let config = ServerConfig { allow_request_template: true, ..Default::default() };
    let client = Client::with(config, Script::default());
    let asked = with(json!({
        "chat_template": "{{ mood }} {{ enable_thinking }} {{ tools[0].function.name }} {{ messages[0].content }}",
        "chat_template_kwargs": {"mood": "calm"}, "enable_thinking": false,
        "tools": [{"type": "function", "function": {"name": "clock"}}],
    }));
    client.chat(&asked).await.ok();
    let prompt = text().tokenizer.decode(&client.engine.last_prompt(), false).unwrap();
    assert_eq!(prompt, "calm False clock Hi");
    let wrong = client.chat(&with(json!({"chat_template": "{% if"}))).await.error(400);
    assert_eq!(wrong["param"], "chat_template");
    let reserved = client.chat(&with(json!({"chat_template_kwargs": {"messages": []}}))).await.error(400);
    assert_eq!(reserved["param"], "chat_template_kwargs");
}

#[tokio::test]
async fn reasoning_is_split_off() {
    let client = Client::saying("<think>\nhmm</think>\n\nYes.");
    let body = client.chat(&hello()).await.ok();
    assert_eq!(body["choices"][0]["message"]["reasoning_content"], "hmm");
    assert_eq!(body["choices"][0]["message"]["content"], "Yes.");
    assert!(body["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 0);
    let chunks = client.chat(&with(json!({"stream": true}))).await.chunks();
    assert_eq!(streamed(&chunks, 0, "reasoning_content"), "hmm");
    assert_eq!(streamed(&chunks, 0, "content"), "Yes.");
    let whole = client.chat(&with(json!({"separate_reasoning": false}))).await.ok();
    assert_eq!(whole["choices"][0]["message"]["content"], "<think>\nhmm</think>\n\nYes.");
}

#[tokio::test]
async fn what_routers_add_is_tolerated() {
    let client = Client::new();
    let asked = with(json!({
        "no_stop_trim": false, "ignore_eos": false, "continue_final_message": false, "user": "x", "metadata": {"a": 1},
        "lora_path": null, "stream_reasoning": true, "something_new": [1, {"deep": null}], "logprobs": false,
        "store": true, "service_tier": "auto", "tool_choice": "auto", "response_format": {"type": "text"},
        "stream_options": null, "temperature": null,
    }));
    client.chat(&asked).await.ok();
}

#[tokio::test]
async fn a_failing_engine_is_reported_in_the_stream_and_as_a_status() {
    let script = || Script { fail_after: Some(2), ..Default::default() };
    let client = Client::with(ServerConfig::default(), script());
    let error = client.chat(&hello()).await.error(500);
    assert_eq!(error["code"], "engine_error");
    let chunks = client.chat(&with(json!({"stream": true}))).await.chunks();
    assert!(chunks.last().unwrap()["error"]["message"].as_str().unwrap().contains("scripted"));
}

#[tokio::test]
async fn tokens_behind_a_stop_string_are_not_counted() {
    let replies = ["One two stop three four five", "A longer reply goes on and on while the other is over."];
    let count = async |replies: &[&str]| {
        let script = Script { replies: replies.iter().map(|r| r.to_string()).collect(), ..Script::default() };
        let client = Client::with(ServerConfig::default(), script);
        let body = client.chat(&with(json!({"n": replies.len(), "stop": "stop"}))).await.ok();
        body["usage"]["completion_tokens"].as_u64().unwrap()
    };
    let (first, second) = (count(&replies[..1]).await, count(&replies[1..]).await);
    let whole = text().tokenizer.encode(replies[0], false).unwrap().len() as u64;
    assert!(first < whole, "{first} of {whole}");
    // The engine generates for the first choice as long as the second goes on.
    assert_eq!(count(&replies).await, first + second);
}

#[tokio::test]
async fn rows_to_keep_reach_the_engine_and_others_are_refused_by_name() {
    let client = Client::new();
    let messages = json!([
        {"role": "developer", "content": "Answer in one word."},
        {"role": "user", "content": "Hi"},
    ]);
    let asked = |kv: Value| with(json!({"messages": messages.clone(), "kv": kv}));
    client.chat(&asked(json!({"budget": 512, "evict": "snapkv"}))).await.ok();
    let kv = client.engine.last_params().kv;
    assert_eq!(
        (kv.budget, kv.evict.map(|evict| evict.name()), kv.whole),
        ("512".parse().ok(), Some("snapkv"), false)
    );
    // The developer's message is protected, from the first token to the words of the user.
    let [protected] = &kv.protected[..] else { panic!("{:?}", kv.protected) };
    let prompt = client.engine.last_prompt();
    let kept = text().tokenizer.decode(&prompt[protected.clone()], true).unwrap();
    assert!(protected.start == 0 && kept.contains("Answer in one word.") && !kept.contains("Hi"), "{kept}");
    client.chat(&asked(json!({"budget": 512, "protect": []}))).await.ok();
    assert!(client.engine.last_params().kv.protected.is_empty());
    client.chat(&asked(json!({"view": "none"}))).await.ok();
    assert!(client.engine.last_params().kv.whole);
    // Policies that choose from the whole history are told where the messages stand.
    assert_eq!(kv.turn, None);
    client.chat(&asked(json!({"budget": 512, "evict": "episodes"}))).await.ok();
    let turn = client.engine.last_params().kv.turn.unwrap();
    let decode = |tokens: &[u32]| text().tokenizer.decode(tokens, true).unwrap();
    assert_eq!((decode(&turn.question).trim(), turn.utterances.len()), ("Hi", 1));
    assert_eq!((turn.utterances[0].start, turn.utterances[0].end), (0, turn.start));
    assert!(decode(&prompt[..turn.start]).ends_with("Answer in one word."), "{turn:?}");
    for (kv, named) in [
        (json!({"budget": "much"}), "kv.budget"),
        (json!({"evict": "lru", "budget": 512}), "kv.evict"),
        (json!({"budget": 512, "protect": [{"messages": [2]}]}), "kv.protect"),
        (json!({"size": 512}), "kv"),
    ] {
        assert_eq!(client.chat(&asked(kv)).await.error(400)["param"], named);
    }
}
