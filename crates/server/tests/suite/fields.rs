//! No silent fields: what changes an answer in another server works here or is refused by its name.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::client::Client;
use crate::fake::text;

/// The names in `peers.txt`: all of them, and those without effect.
fn peers() -> (BTreeSet<&'static str>, BTreeSet<&'static str>) {
    let (mut all, mut harmless, mut section) = (BTreeSet::new(), BTreeSet::new(), "");
    for line in include_str!("peers.txt").lines().filter(|line| !line.starts_with('#')) {
        match line.strip_prefix('[') {
            Some(name) => section = name.trim_end_matches(']'),
            None if section == "without effect" => harmless.extend(line.split_whitespace()),
            None => all.extend(line.split_whitespace()),
        }
    }
    assert!(harmless.is_subset(&all), "{:?}", harmless.difference(&all).collect::<Vec<_>>());
    (all, harmless)
}

/// A request that each route answers.
fn good(path: &str) -> Value {
    let chat = json!([{"role": "user", "content": "Hi"}]);
    match path {
        "/v1/completions" | "/v1/completions/render" => json!({"prompt": "Hi"}),
        "/v1/messages" | "/v1/messages/count_tokens" => json!({"messages": chat, "max_tokens": 5}),
        "/v1/responses" | "/v1/responses/input_tokens" => json!({"input": "Hi"}),
        "/v1/embeddings" => json!({"input": "Hi"}),
        _ => json!({"messages": chat}),
    }
}

fn with(path: &str, name: &str, value: Value) -> Value {
    let mut body = good(path);
    body[name] = value;
    body
}

/// The fields of every route that gives answers, as the document has them.
async fn documented(client: &Client) -> BTreeMap<String, Map<String, Value>> {
    let document = client.get("/openapi.json").await.ok();
    let fields = |(path, item): (&String, &Value)| {
        let schema = &item["post"]["requestBody"]["content"]["application/json"]["schema"];
        let fields = schema["properties"].as_object()?;
        fields.contains_key("temperature").then(|| (path.clone(), fields.clone()))
    };
    document["paths"].as_object().unwrap().iter().filter_map(fields).collect()
}

#[tokio::test]
async fn every_field_of_a_peer_works_or_is_refused() {
    let client = Client::new();
    let (all, harmless) = peers();
    let routes = documented(&client).await;
    assert_eq!(routes.len(), 8, "{:?}", routes.keys());
    for (path, fields) in &routes {
        for &name in &all {
            let silent = fields.get(name).is_none_or(|field| field["x-ignored"] == true);
            assert!(!silent || harmless.contains(name), "{path} takes no notice of {name}");
        }
        // The document is true: what it says is refused is refused, and what it allows is not.
        for (name, field) in fields.iter().filter(|(_, field)| field["x-refused"] == true) {
            let error = client.post(path, &with(path, name, json!({"asks": "for it"}))).await;
            assert_eq!(error.status, 400, "{path} {name}");
            let message = error.json()["error"]["message"].as_str().unwrap().to_owned();
            assert!(message.starts_with(&format!("{name}: is not supported here; ")), "{path}: {message}");
            for value in field["enum"].as_array().unwrap() {
                let answer = client.post(path, &with(path, name, value.clone())).await;
                assert_eq!(answer.status, 200, "{path} {name} {value}: {}", answer.text());
            }
        }
        for name in &harmless {
            let answer = client.post(path, &with(path, name, json!(1))).await;
            assert_eq!(answer.status, 200, "{path} {name}: {}", answer.text());
        }
    }
}

#[tokio::test]
async fn a_field_of_another_route_is_refused_with_the_route() {
    let client = Client::new();
    for (path, name, value, words) in [
        ("/v1/chat/completions", "mcp_servers", json!([{}]), "/v1/messages"),
        ("/v1/chat/completions", "input", json!("x"), "/v1/responses"),
        ("/v1/chat/completions", "prompt", json!("x"), "/v1/completions"),
        ("/v1/chat/completions", "echo", json!(true), "/v1/completions"),
        ("/v1/completions", "tools", json!([{}]), "/v1/chat/completions"),
        ("/v1/completions", "messages", json!([{}]), "/v1/chat/completions"),
        ("/v1/completions", "chat_template_kwargs", json!({"a": 1}), "/v1/chat/completions"),
        ("/v1/responses", "n", json!(2), "/v1/chat/completions"),
        ("/v1/responses", "max_tokens", json!(5), "max_output_tokens"),
        ("/v1/messages", "max_completion_tokens", json!(5), "max_tokens"),
        ("/v1/messages", "logprobs", json!(true), "/v1/chat/completions"),
    ] {
        let answer = client.post(path, &with(path, name, value)).await;
        assert_eq!(answer.status, 400, "{path} {name}");
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with(name) && message.contains(words), "{path}: {message}");
    }
}

#[tokio::test]
async fn messages_and_responses_take_the_sampling_fields_of_the_chat() {
    let client = Client::new();
    for path in ["/v1/messages", "/v1/responses"] {
        let mut body = good(path);
        body.as_object_mut().unwrap().extend(
            json!({"min_p": 0.25, "top_k": 7, "seed": 11, "repetition_penalty": 1.5, "presence_penalty": 0.5,
                "frequency_penalty": -0.5, "logit_bias": {"300": 100}, "stop_token_ids": [9], "min_tokens": 1,
                "guided_choice": ["a"], "cache_salt": "x", "chat_template_kwargs": {"a": 1}})
            .as_object()
            .unwrap()
            .clone(),
        );
        client.post(path, &body).await.ok();
        let params = client.engine.last_params();
        let sampling = &params.sampling;
        assert_eq!((sampling.min_p, sampling.top_k, sampling.seed), (0.25, 7, 11), "{path}");
        assert_eq!((sampling.repetition_penalty, sampling.logit_bias.as_slice()), (1.5, &[(300, 100.0)][..]));
        assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (0.5, -0.5));
        assert!(
            params.constraint.is_some() && params.cache_salt.is_some() && params.stop_tokens.contains(&9)
        );
        let stopped = client.post(path, &with(path, "stop", json!(["world"]))).await;
        assert!(
            stopped.text().contains("Hello, ") && !stopped.text().contains("How are"),
            "{}",
            stopped.text()
        );
        let error = client.post(path, &with(path, "min_p", json!(2))).await;
        assert!(error.json()["error"]["message"].as_str().unwrap().starts_with("min_p: "), "{path}");
    }
    // One meaning, said twice.
    for (path, one, other, name) in [
        ("/v1/messages", json!({"stop_sequences": ["a"]}), json!({"stop": ["b"]}), "stop"),
        (
            "/v1/messages",
            json!({"thinking": {"type": "enabled"}}),
            json!({"enable_thinking": false}),
            "enable_thinking",
        ),
        (
            "/v1/responses",
            json!({"text": {"format": {"type": "json_object"}}}),
            json!({"response_format": {"type": "json_object"}}),
            "response_format",
        ),
    ] {
        let mut body = good(path);
        for fields in [one, other] {
            body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        }
        let message = client.post(path, &body).await.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with(&format!("{name}: says the same as ")), "{message}");
    }
}

#[tokio::test]
async fn members_of_fields_are_not_silent_either() {
    let client = Client::new();
    for (path, fields, param) in [
        (
            "/v1/chat/completions",
            json!({"stream_options": {"continuous_usage_stats": true}}),
            "stream_options.continuous_usage_stats",
        ),
        (
            "/v1/completions",
            json!({"stream_options": {"continuous_usage_stats": true}}),
            "stream_options.continuous_usage_stats",
        ),
        (
            "/v1/chat/completions",
            json!({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}),
            "structured_outputs.whitespace_pattern",
        ),
        ("/v1/responses", json!({"text": {"verbosity": "low"}}), "text.verbosity"),
        ("/v1/responses", json!({"include": ["message.output_text.logprobs"]}), "include[0]"),
        ("/v1/messages", json!({"thinking": {"type": "enabled", "display": "loud"}}), "thinking.display"),
    ] {
        let mut body = good(path);
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let answer = client.post(path, &body).await;
        assert_eq!(answer.status, 400, "{body}");
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with(&format!("{param}: ")), "{message}");
    }
    for (path, fields) in [
        (
            "/v1/chat/completions",
            json!({"stream_options": {"continuous_usage_stats": false, "include_obfuscation": true}}),
        ),
        (
            "/v1/responses",
            json!({"text": {"verbosity": "medium"}, "include": ["reasoning.encrypted_content"]}),
        ),
        ("/v1/messages", json!({"output_config": {"effort": "low"}})),
    ] {
        let mut body = good(path);
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        client.post(path, &body).await.ok();
    }
}

#[tokio::test]
async fn thinking_can_be_shown_without_its_text() {
    let client = Client::saying("<think>secret</think>\n\nHi.");
    for stream in [false, true] {
        let mut body = with("/v1/messages", "thinking", json!({"type": "enabled", "display": "omitted"}));
        (body["max_tokens"], body["stream"]) = (json!(100), json!(stream));
        let answer = client.post("/v1/messages", &body).await.text();
        assert!(answer.contains("\"type\":\"thinking\"") && answer.contains("\"thinking\":\"\""), "{answer}");
        assert!(!answer.contains("secret") && !answer.contains("thinking_delta"), "{answer}");
    }
}

/// As vLLM and SGLang have it.
#[tokio::test]
async fn no_effort_means_no_thinking() {
    let template =
        "{{ messages[-1].content }} {{ enable_thinking if enable_thinking is defined else 'unset' }}";
    let config = json!({"chat_template": template}).to_string();
    let model = oscar_text::ModelText::from_files(
        crate::fake::text_file("tokenizer.json"),
        Some(config.as_bytes()),
        None,
    );
    let client = Client::with_text(Default::default(), Default::default(), model.unwrap());
    let prompt = async |path: &str, fields: Value| {
        let mut body = good(path);
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        client.post(path, &body).await.ok();
        text().tokenizer.decode(&client.engine.last_prompt(), false).unwrap()
    };
    let chat = "/v1/chat/completions";
    assert_eq!(prompt(chat, json!({"reasoning_effort": "none"})).await, "Hi False");
    assert_eq!(prompt(chat, json!({"reasoning_effort": "low"})).await, "Hi unset");
    assert_eq!(prompt(chat, json!({"reasoning_effort": "none", "enable_thinking": true})).await, "Hi True");
    let kwargs = json!({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": true}});
    assert_eq!(prompt(chat, kwargs).await, "Hi True");
    assert_eq!(prompt("/v1/responses", json!({"reasoning": {"effort": "none"}})).await, "Hi False");
    assert_eq!(prompt("/v1/messages", json!({"thinking": {"type": "disabled"}})).await, "Hi False");
}

#[tokio::test]
async fn embeddings_refuse_what_they_cannot_follow() {
    let client = Client::new();
    let document = client.get("/openapi.json").await.ok();
    let schema =
        &document["paths"]["/v1/embeddings"]["post"]["requestBody"]["content"]["application/json"]["schema"];
    let fields = schema["properties"].as_object().unwrap();
    for name in [
        "truncate_prompt_tokens",
        "normalize",
        "pooling",
        "embd_normalize",
        "embed_dtype",
        "input_type",
        "messages",
    ] {
        assert_eq!(fields[name]["x-refused"], true, "{name}");
    }
    for (name, field) in fields.iter().filter(|(_, field)| field["x-refused"] == true) {
        let error =
            client.post("/v1/embeddings", &with("/v1/embeddings", name, json!({"a": 1}))).await.error(400);
        assert_eq!(error["param"], name.as_str());
        for value in field["enum"].as_array().unwrap() {
            client.post("/v1/embeddings", &with("/v1/embeddings", name, value.clone())).await.ok();
        }
    }
}
