//! Keys as tenants: what one may see, stop and use of another's.

use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use oscar_server::{ApiKey, Keys, ServerConfig};
use serde_json::{Value, json};

use crate::client::{Answer, Client};
use crate::fake::Script;

const FILE: &str = "operator ops root\nuser ann a\nuser bob b\nuser cat c requests=1 tokens=200\n";

fn tenants(isolate_keys: bool, script: Script) -> Client {
    let keys = Keys::new(ApiKey::parse_file(FILE, "keys").unwrap());
    Client::with(ServerConfig { keys, isolate_keys, ..Default::default() }, script)
}

async fn call(client: &Client, key: &str, path: &str, body: Option<&Value>) -> Answer {
    let request = Request::builder().uri(path).header("authorization", format!("Bearer {key}"));
    let request = match body {
        Some(body) => request
            .method("POST")
            .header("content-type", "application/json")
            .header("x-request-id", format!("of-{key}"))
            .body(Body::from(body.to_string())),
        None => request.body(Body::empty()),
    };
    client.send(request.unwrap()).await
}

fn chat(fields: &Value) -> Value {
    let content = "The same long beginning. ".repeat(20);
    let mut body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 4});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn cached(answer: &Answer) -> u64 {
    answer.ok()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[tokio::test]
async fn operators_alone_see_and_change_what_belongs_to_all() {
    let client = tenants(false, Script::default());
    let routes = [
        ("/metrics", None),
        ("/internal/state", None),
        ("/server_info", None),
        ("/v1/loads", None),
        ("/flush_cache", Some(json!({}))),
        ("/abort_request", Some(json!({"abort_all": true}))),
    ];
    for (path, body) in &routes {
        let error = call(&client, "a", path, body.as_ref()).await.error(403);
        assert_eq!(error["code"], "operators_only", "{path}");
        let what = if body.as_ref().is_some_and(|body| body["abort_all"] == true) {
            "abort_all"
        } else {
            "this route"
        };
        let message =
            format!("{what} is only for operators: send the key of an operator, not that of the user `ann`");
        assert_eq!(error["message"], message);
        assert_eq!(call(&client, "root", path, body.as_ref()).await.status, 200, "{path}");
    }
    for path in ["/v1/models", "/version", "/ready", "/"] {
        assert_eq!(call(&client, "a", path, None).await.status, 200, "{path}");
    }
}

#[tokio::test]
async fn users_abort_their_own_requests_only() {
    let script = Script { pace: Some(Duration::from_millis(10)), ..Default::default() };
    let client = tenants(false, script);
    let endless = chat(&json!({"ignore_eos": true, "max_tokens": 300}));
    let running = call(&client, "a", "/v1/chat/completions", Some(&endless));
    let others = async {
        while client.engine.is_idle() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let abort = json!({"rid": "of-a"});
        assert_eq!(call(&client, "b", "/abort_request", Some(&abort)).await.ok()["aborted"], 0);
        assert_eq!(client.engine.cancelled(), []);
        assert_eq!(call(&client, "a", "/abort_request", Some(&abort)).await.ok()["aborted"], 1);
    };
    let (answer, ()) = tokio::join!(running, others);
    assert_eq!(answer.ok()["choices"][0]["finish_reason"], "abort");
}

#[tokio::test]
async fn salts_and_isolated_keys_divide_the_prefix_cache() {
    let shared = tenants(false, Script::default());
    assert_eq!(cached(&call(&shared, "a", "/v1/chat/completions", Some(&chat(&json!({})))).await), 0);
    assert!(cached(&call(&shared, "b", "/v1/chat/completions", Some(&chat(&json!({})))).await) > 0);
    let salted = chat(&json!({"cache_salt": "mine"}));
    assert_eq!(cached(&call(&shared, "a", "/v1/chat/completions", Some(&salted)).await), 0);
    assert!(cached(&call(&shared, "b", "/v1/chat/completions", Some(&salted)).await) > 0, "one salt, shared");

    let isolated = tenants(true, Script::default());
    for key in ["a", "b", "root"] {
        for fields in [json!({}), json!({"cache_salt": "x"}), json!({"cache_salt": "y"})] {
            let body = chat(&fields);
            assert_eq!(
                cached(&call(&isolated, key, "/v1/chat/completions", Some(&body)).await),
                0,
                "{key} {fields}"
            );
            assert!(
                cached(&call(&isolated, key, "/v1/chat/completions", Some(&body)).await) > 0,
                "{key} {fields}"
            );
        }
    }
}

#[tokio::test]
async fn a_quota_is_429_until_there_is_room_again() {
    let script = Script { pace: Some(Duration::from_millis(10)), ..Default::default() };
    let client = tenants(false, script);
    let endless = chat(&json!({"ignore_eos": true, "max_tokens": 50}));
    let running = call(&client, "c", "/v1/chat/completions", Some(&endless));
    let another = async {
        while client.engine.is_idle() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let second = call(&client, "c", "/v1/chat/completions", Some(&chat(&json!({})))).await;
        assert_eq!(second.error(429)["code"], "quota_exceeded");
        assert_eq!(second.headers["retry-after"], "1");
    };
    tokio::join!(running, another).0.ok();
    tokio::time::sleep(Duration::from_millis(20)).await;
    // What never fits is no matter of time.
    for (fields, quota) in [(json!({"n": 2}), "requests=1"), (json!({"max_tokens": 300}), "tokens=200")] {
        let refused = call(&client, "c", "/v1/chat/completions", Some(&chat(&fields))).await;
        let error = refused.error(400);
        assert_eq!(error["code"], "quota_exceeded");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(quota) && !message.contains("later"), "{message}");
        assert!(!refused.headers.contains_key("retry-after"));
    }
    for _ in 0..3 {
        call(&client, "c", "/v1/chat/completions", Some(&chat(&json!({})))).await.ok();
        // The answer may be here before the task behind it has ended.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
