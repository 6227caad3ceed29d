//! The smaller routes.

use std::collections::BTreeSet;

use oscar_server::{KvEvents, ServerConfig};
use serde_json::json;

use crate::client::Client;
use crate::fake::{Script, text};

#[tokio::test]
async fn models_are_listed_with_their_length() {
    let config = ServerConfig { model_aliases: vec!["org/alias".into()], ..Default::default() };
    let client = Client::with(config, Script::default());
    let body = client.get("/v1/models").await.ok();
    assert_eq!(body["object"], "list");
    assert_eq!(body["data"][0]["id"], "fake-15m");
    assert_eq!(body["data"][0]["max_model_len"], 512);
    assert_eq!(body["data"][0]["context_length"], 512);
    assert_eq!(body["data"][0]["kv_format"], "oscar2");
    assert_eq!(body["data"][0]["kv_bits"], 2.25);
    assert_eq!(body["data"][1]["id"], "org/alias");
    assert_eq!(client.get("/v1/models/org/alias").await.ok()["object"], "model");
    client.get("/v1/models/other").await.error(404);
}

#[tokio::test]
async fn tokenize_speaks_both_dialects() {
    let client = Client::new();
    let ids = text().tokenizer.encode("hello there", false).unwrap();
    let vllm =
        client.post("/tokenize", &json!({"prompt": "hello there", "return_token_strs": true})).await.ok();
    assert_eq!(vllm["tokens"], json!(ids));
    assert_eq!(vllm["count"], ids.len());
    assert_eq!(vllm["max_model_len"], 512);
    assert_eq!(vllm["token_strs"].as_array().unwrap().len(), ids.len());
    let llama = client.post("/tokenize", &json!({"content": "hello there", "with_pieces": true})).await.ok();
    assert_eq!(llama["tokens"][0]["id"], ids[0]);
    let pieces: String =
        llama["tokens"].as_array().unwrap().iter().map(|token| token["piece"].as_str().unwrap()).collect();
    assert_eq!(pieces, "hello there");
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let chat = client.post("/tokenize", &json!({"messages": messages})).await.ok();
    let back = client.post("/detokenize", &json!({"tokens": chat["tokens"]})).await.ok();
    assert_eq!(back["prompt"], "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    assert_eq!(back["content"], back["prompt"]);
    let none = client.post("/tokenize", &json!({})).await.error(400);
    assert_eq!(none["param"], "prompt");
    assert_eq!(
        client.post("/detokenize", &json!({"tokens": [1, -2]})).await.error(400)["param"],
        "tokens[1]"
    );
    assert_eq!(client.post("/detokenize", &json!({"tokens": [9999]})).await.error(400)["param"], "tokens");
    client.post("/tokenize", &json!({"model": "other", "prompt": "x"})).await.error(404);
    assert_eq!(client.post("/tokenize", &json!({"prompt": ""})).await.ok()["count"], 0);
    assert_eq!(client.post("/detokenize", &json!({"tokens": []})).await.ok()["prompt"], "");
}

#[tokio::test]
async fn routers_find_what_they_read() {
    let client = Client::new();
    for path in ["/server_info", "/get_server_info"] {
        let body = client.get(path).await.ok();
        assert_eq!(body["kv_cache_dtype"], "oscar2");
        assert_eq!(body["calibration"], "none");
        assert_eq!((&body["tp_size"], &body["kv_approximate_hits"]), (&json!(1), &json!(true)));
        assert_eq!(body["served_model_name"], "fake-15m");
        assert!(body["max_total_num_tokens"].as_u64().unwrap() > 0);
    }
    for path in ["/model_info", "/get_model_info"] {
        assert_eq!(client.get(path).await.ok()["is_generation"], true);
    }
    for path in ["/v1/loads?include=core,disagg,queues,memory", "/loads?model=x"] {
        let body = client.get(path).await.ok();
        assert_eq!(body["dp_rank_count"], 1);
        assert_eq!(body["loads"][0]["num_running_reqs"], 0);
        assert!(body["loads"][0]["token_usage"].as_f64().unwrap() >= 0.0);
    }
    assert!(client.get("/version").await.ok()["version"].is_string());
    assert_eq!(client.get("/health").await.ok()["status"], "ok");
    assert_eq!(client.get("/ready").await.ok()["status"], "ready");
}

#[tokio::test]
async fn the_page_state_tells_everything_it_draws() {
    let body = Client::new().get("/internal/state").await.ok();
    for field in ["coded_pages", "full_pages", "cache_bytes", "bf16_bytes", "hit_rate", "generated_tokens"] {
        assert!(body["stats"][field].is_number(), "{field}");
    }
    assert_eq!(body["info"]["kv_bits"], 2.25);
    assert_eq!(body["requests"], json!([]));
}

#[tokio::test]
async fn the_cache_is_flushed_and_requests_are_aborted() {
    let client = Client::new();
    client.complete(&json!({"prompt": "a"})).await.ok();
    assert_eq!(client.post("/flush_cache", &json!({})).await.ok()["freed_pages"], 1);
    assert_eq!(client.post_raw("/flush_cache", "").await.ok()["freed_pages"], 0);
    assert_eq!(client.post("/abort_request", &json!({"rid": "unknown"})).await.ok()["aborted"], 0);
    assert_eq!(client.post("/abort_request", &json!({"abort_all": true})).await.ok()["aborted"], 0);
    assert_eq!(client.post("/abort_request", &json!({})).await.error(400)["param"], "rid");
}

#[tokio::test]
async fn the_document_describes_the_routes_that_exist() {
    let client = Client::new();
    let document = client.get("/openapi.json").await.ok();
    assert_eq!(document["openapi"], "3.1.0");
    let paths = document["paths"].as_object().unwrap();
    let described: BTreeSet<String> = paths.keys().cloned().collect();
    assert_eq!(client.registered_paths(), described, "a route is registered outside of the table");
    for (path, operations) in paths {
        for (method, _) in operations.as_object().unwrap() {
            let path = path.replace("{id}", "fake-15m");
            let answer = match method.as_str() {
                "get" => client.get(&path).await,
                _ => client.post(&path, &json!({})).await,
            };
            assert!(![404, 405].contains(&answer.status.as_u16()), "{method} {path}");
            assert!(!answer.status.is_server_error(), "{method} {path}");
        }
    }
    let chat =
        &document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"];
    assert_eq!(chat["schema"]["required"], json!(["messages"]));
    assert_eq!(chat["schema"]["properties"]["temperature"]["maximum"], 100.0);
    assert_eq!(chat["schema"]["properties"]["user"]["x-ignored"], true);
    let text = document.to_string();
    assert!(!text.contains("\\\\"), "a description holds a backslash");
    for policy in ["keydiff", "snapkv", "tova", "recent", "keydiff-post", "kvzip", "episodes"] {
        let about = chat["schema"]["properties"]["kv"]["description"].as_str().unwrap();
        assert!(about.contains(&format!("`{policy}`")) && about.contains("\"64M\""), "{about}");
    }
    assert_eq!(paths["/ready"]["get"]["security"], json!([]));
    let refused: Vec<_> = chat["schema"]["properties"]
        .as_object()
        .unwrap()
        .iter()
        .filter(|(_, field)| field["x-refused"] == true)
        .collect();
    assert!(refused.len() > 40, "{refused:?}");
    // What the document says is what the server does: harmless values pass, any other is refused by name.
    for (name, field) in refused {
        let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
        for value in field["enum"].as_array().unwrap() {
            body[name] = value.clone();
            client.chat(&body).await.ok();
        }
        body[name] = json!({"other": "value"});
        assert_eq!(client.chat(&body).await.error(400)["param"], name.as_str());
    }
}

#[tokio::test]
async fn the_pages_load_nothing_from_elsewhere() {
    let client = Client::new();
    for path in ["/", "/docs"] {
        let answer = client.get(path).await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.headers["content-type"], "text/html; charset=utf-8");
        assert!(answer.headers["content-security-policy"].to_str().unwrap().contains("default-src 'none'"));
        let page = answer.text();
        for outside in ["src=\"http", "href=\"http", "@import", "innerHTML", "url("] {
            assert!(!page.contains(outside), "{path} has {outside}");
        }
    }
}

#[tokio::test]
async fn routers_find_the_publisher_of_cache_events() {
    assert!(Client::new().get("/server_info").await.ok().get("kv_events").is_none());
    let events = KvEvents {
        publisher: "zmq",
        endpoint_host: "*".to_owned(),
        endpoint_port_base: 5557,
        replay_endpoint_port_base: Some(5558),
        topic: String::new(),
        block_size: 64,
        dp_size: 1,
    };
    let config = ServerConfig { kv_events: Some(events), ..ServerConfig::default() };
    let info = Client::with(config, Script::default()).get("/server_info").await.ok();
    let expected = json!({"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "",
        "block_size": 64, "dp_size": 1, "replay_endpoint_port_base": 5558});
    assert_eq!(info["kv_events"], expected);
}
