//! Random bodies: whatever is sent, the answer is a success or names what is wrong.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::client::Client;

/// Field names the server knows, so that random values land where they matter.
fn known_fields() -> Vec<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let document = runtime.block_on(async { Client::new().get("/openapi.json").await.ok() });
    let paths = document["paths"].as_object().unwrap().values();
    let bodies = paths.filter_map(|path| {
        path["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"].as_object()
    });
    bodies.flat_map(Map::keys).cloned().collect()
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-5i64..20).prop_map(Value::from),
        any::<f64>()
            .prop_filter_map("finite", |number| serde_json::Number::from_f64(number).map(Value::Number)),
        "\\PC{0,12}".prop_map(Value::from),
        Just(json!({"role": "user", "content": "Hi"})),
        Just(json!({"role": "assistant", "content": [{"type": "text", "text": "x"}]})),
        Just(json!([{"role": "user", "content": "Hi"}])),
    ];
    leaf.prop_recursive(3, 24, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::Array),
            prop::collection::vec(
                ("[a-z_]{1,8}|role|content|type|text|tool_calls|function|arguments|[0-9]{1,4}", inner),
                0..5
            )
            .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

/// A body that is right, with some fields replaced by anything.
fn any_body() -> impl Strategy<Value = Value> {
    let fields = prop::collection::vec((prop::sample::select(known_fields()), any_json()), 0..4);
    (fields, any::<bool>()).prop_map(|(fields, sound)| {
        let mut body = match sound {
            true => {
                json!({"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "tokens": [1, 2]})
            }
            false => json!({}),
        };
        for (name, value) in fields {
            body[name] = value;
        }
        body
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn no_body_gives_5xx(body in any_body()) {
        thread_local! {
            static CLIENT: Client = Client::new();
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        CLIENT.with(|client| runtime.block_on(async {
            for path in ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/abort_request"] {
                let answer = client.post(path, &body).await;
                let status = answer.status.as_u16();
                assert!([200, 400, 404].contains(&status), "{path} {body} gave {status}: {}", answer.text());
                if status != 200 {
                    answer.error(status);
                }
            }
        }));
    }

    #[test]
    fn no_bytes_give_5xx(body in prop::collection::vec(any::<u8>(), 0..200)) {
        let client = Client::new();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let status = runtime.block_on(client.post_raw("/v1/chat/completions", body)).status;
        prop_assert_eq!(status.as_u16(), 400);
    }
}
