//! `/v1/embeddings`. The engine's vector of an input of n tokens is (0, 3, 0, n).

use axum::http::Request;
use oscar_server::{ApiKey, Keys, ServerConfig};
use serde_json::{Value, json};

use crate::client::Client;
use crate::fake::Script;

const PATH: &str = "/v1/embeddings";

fn floats(vector: &Value) -> Vec<f64> {
    vector.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

#[tokio::test]
async fn a_batch_comes_back_in_order_with_usage() {
    let client = Client::new();
    let inputs = json!([[5, 6, 7, 8], [9]]);
    let answer = client.post(PATH, &json!({"model": "fake-15m", "input": inputs})).await.ok();
    assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("fake-15m")));
    let data = answer["data"].as_array().unwrap();
    assert_eq!(data.len(), 2);
    for (index, tokens) in [(0, 4.0), (1, 1.0)] {
        assert_eq!((&data[index]["object"], &data[index]["index"]), (&json!("embedding"), &json!(index)));
        let length = (9.0f64 + tokens * tokens).sqrt();
        let expected = [0.0, 3.0 / length, 0.0, tokens / length];
        for (found, expected) in floats(&data[index]["embedding"]).iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6, "{data:?}");
        }
    }
    assert_eq!(answer["usage"]["prompt_tokens"], 5);
    assert_eq!(answer["usage"]["total_tokens"], 5);
    let one = client.post(PATH, &json!({"input": "hello there"})).await.ok();
    assert_eq!(one["data"].as_array().unwrap().len(), 1);
}

/// The engine gets them in groups, which the quota of the key shows.
#[tokio::test]
async fn long_lists_are_answered_in_order() {
    let keys = Keys::new(ApiKey::parse_file("user ann a requests=128 tokens=640", "keys").unwrap());
    let client = Client::with(ServerConfig { keys, ..Default::default() }, Script::default());
    let inputs: Vec<Vec<u32>> = (0..2048).map(|index| vec![7; 1 + index % 5]).collect();
    let request = Request::post(PATH).header("content-type", "application/json").header("x-api-key", "a");
    let answer = client.send(request.body(json!({"input": inputs}).to_string().into()).unwrap()).await.ok();
    let data = answer["data"].as_array().unwrap();
    assert_eq!(data.len(), 2048);
    for (index, item) in data.iter().enumerate() {
        let vector = floats(&item["embedding"]);
        let ratio = vector[3] / vector[1] * 3.0;
        assert!((ratio - (1 + index % 5) as f64).abs() < 1e-3, "{index}: {item}");
        assert_eq!(item["index"], index);
    }
    assert_eq!(answer["usage"]["prompt_tokens"], inputs.iter().map(Vec::len).sum::<usize>());
}

#[tokio::test]
async fn base64_holds_the_same_numbers() {
    let client = Client::new();
    let answer = client.post(PATH, &json!({"input": [5, 6, 7, 8], "encoding_format": "base64"})).await.ok();
    // 0, 0.6, 0, 0.8 as little-endian f32.
    assert_eq!(answer["data"][0]["embedding"], "AAAAAJqZGT8AAAAAzcxMPw==");
}

#[tokio::test]
async fn what_cannot_be_done_is_refused_by_name() {
    let client = Client::new();
    let refused = [
        (json!({"input": "a", "encoding_format": "int8"}), "encoding_format"),
        (json!({"input": "a", "dimensions": 2}), "dimensions"),
        (json!({"input": ""}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": ["a", ""]}), "input"),
        (json!({}), "input"),
        (json!({"input": vec!["a"; 2049]}), "input"),
        (json!({"input": ["a", 5]}), "input[1]"),
    ];
    for (body, param) in refused {
        assert_eq!(client.post(PATH, &body).await.error(400)["param"], param, "{body}");
    }
    for input in [json!(vec![7; 600]), json!(["a", "word ".repeat(1000)]), json!("word ".repeat(10_000))] {
        let long = client.post(PATH, &json!({"input": input})).await.error(400);
        assert_eq!((&long["code"], &long["param"]), (&json!("context_length_exceeded"), &json!("input")));
        assert!(!long["message"].as_str().unwrap().contains("max_tokens"), "{long}");
    }
    client.post(PATH, &json!({"input": "a", "dimensions": 4})).await.ok();
    client.post(PATH, &json!({"input": "a", "model": "other"})).await.error(404);
}
