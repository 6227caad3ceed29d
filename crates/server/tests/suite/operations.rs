//! Keys, origins, request ids, metrics.

use axum::body::Body;
use axum::http::Request;
use oscar_server::{ApiKey, Keys, Role, ServerConfig};
use serde_json::{Value, json};

use crate::client::Client;
use crate::fake::Script;

fn operators(list: &str) -> Keys {
    Keys::new(ApiKey::parse_list(list, Role::Operator, "test").unwrap())
}

fn locked() -> Client {
    let config = ServerConfig { keys: operators("alpha,beta"), ..Default::default() };
    Client::with(config, Script::default())
}

#[tokio::test]
async fn every_route_but_probes_asks_for_a_key() {
    let client = locked();
    let document = Client::new().get("/openapi.json").await.ok();
    let mut asked = 0;
    for (path, operations) in document["paths"].as_object().unwrap() {
        for method in operations.as_object().unwrap().keys() {
            let request = |header: Option<(&str, &str)>| {
                let builder = Request::builder()
                    .method(method.to_uppercase().as_str())
                    .uri(path.replace("{id}", "x"))
                    .header("content-type", "application/json");
                let builder = match header {
                    Some((name, value)) => builder.header(name, value),
                    None => builder,
                };
                builder.body(Body::from("{}")).unwrap()
            };
            let open = ["/health", "/ready"].contains(&path.as_str());
            for header in [None, Some(("authorization", "Bearer alph")), Some(("x-api-key", "betaa"))] {
                assert_eq!(client.send(request(header)).await.status == 401, !open, "{method} {path}");
            }
            for header in [("authorization", "Bearer beta"), ("x-api-key", "alpha")] {
                assert_ne!(client.send(request(Some(header))).await.status, 401, "{method} {path}");
            }
            asked += 1;
        }
    }
    assert!(asked >= 20);
    let error = client.get("/v1/nothing").await.error(401);
    assert_eq!(error["code"], "invalid_api_key");
    // A browser gets the page, where the key can be entered, and still the status.
    assert!(client.get("/").await.text().starts_with("<!doctype html>"));
}

#[tokio::test]
async fn request_ids_are_echoed_or_made() {
    let client = Client::new();
    let made = client.get("/health").await;
    assert_eq!(made.headers["x-request-id"].len(), 32);
    let body = json!({"messages": [{"role": "user", "content": "Hi"}]}).to_string();
    let request = Request::post("/v1/chat/completions")
        .header("content-type", "application/json")
        .header("x-request-id", "router-7")
        .header("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        .body(Body::from(body))
        .unwrap();
    let answer = client.send(request).await;
    assert_eq!(answer.headers["x-request-id"], "router-7");
    assert_eq!(answer.ok()["id"], "chatcmpl-router-7");
    let hostile = Request::get("/health").header("x-request-id", "a b\"<").body(Body::empty()).unwrap();
    assert_eq!(client.send(hostile).await.headers["x-request-id"].len(), 32);
}

#[tokio::test]
async fn origins_are_allowed_by_configuration_only() {
    let preflight = || {
        Request::options("/v1/chat/completions")
            .header("origin", "https://app.example")
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization")
            .body(Body::empty())
            .unwrap()
    };
    let closed = Client::new().send(preflight()).await;
    assert!(!closed.headers.contains_key("access-control-allow-origin"));
    for allowed in ["*", "https://app.example"] {
        let config =
            ServerConfig { cors_origins: vec![allowed.into()], keys: operators("key"), ..Default::default() };
        let client = Client::with(config, Script::default());
        let answer = client.send(preflight()).await;
        assert_eq!(answer.status, 204, "a preflight carries no key");
        assert_eq!(answer.headers["access-control-allow-origin"], "https://app.example");
        assert_eq!(answer.headers["access-control-allow-headers"], "authorization");
        let refused =
            Request::get("/v1/models").header("origin", "https://app.example").body(Body::empty()).unwrap();
        let refused = client.send(refused).await;
        assert_eq!(refused.status, 401);
        assert!(refused.headers.contains_key("access-control-allow-origin"), "the page may read the refusal");
    }
}

#[tokio::test]
async fn metrics_have_the_names_and_edges_people_know() {
    let client = Client::new();
    client.chat(&json!({"messages": [{"role": "user", "content": "Hi"}]})).await.ok();
    client.chat(&json!({"messages": []})).await.error(400);
    client.get("/made/up/path").await.error(404);
    let answer = client.get("/metrics").await;
    let text = answer.text();
    for line in [
        "oscar_time_to_first_token_seconds_bucket{le=\"0.001\"}",
        "oscar_time_to_first_token_seconds_count 1",
        "oscar_inter_token_latency_seconds_bucket{le=\"0.025\"}",
        "oscar_request_time_per_output_token_seconds_count 1",
        "oscar_e2e_request_latency_seconds_bucket{le=\"7680.0\"} 1",
        "oscar_request_prompt_tokens_count 1",
        "oscar_request_generation_tokens_bucket{le=\"500.0\"} 1",
        "oscar_request_success_total{finished_reason=\"stop\"} 1",
        "oscar_http_requests_total{method=\"POST\",route=\"/v1/chat/completions\",status=\"200\"} 1",
        "oscar_http_requests_total{method=\"POST\",route=\"/v1/chat/completions\",status=\"400\"} 1",
        "oscar_http_requests_total{method=\"GET\",route=\"unknown\",status=\"404\"} 1",
        "oscar_prompt_tokens_total",
        "oscar_generation_tokens_total",
        "oscar_prefix_cache_hits_total 0",
        "oscar_prefix_cache_queries_total",
        "oscar_num_preemptions_total 0",
        "oscar_kv_demoted_tokens_total 1234",
        "oscar_kv_approximate_hits_total 0",
        "oscar_num_requests_running 0",
        "oscar_num_requests_waiting 0",
        "oscar_kv_cache_usage_perc",
        "oscar_kv_cache_bytes",
        "oscar_kv_cache_bf16_bytes",
        "oscar_kv_bits_per_element 2.2504",
        "oscar_kv_effective_bits_per_element",
        "oscar_kv_pages{format=\"coded\",holder=\"all\"} 20",
        "oscar_kv_pages{format=\"bf16\",holder=\"prefix_cache\"} 2",
        "oscar_engine_busy_seconds_total",
        "oscar_build_info{",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

#[tokio::test]
async fn seeds_are_kept_and_fresh_ones_differ() {
    let client = Client::new();
    let mut seeds = Vec::new();
    for _ in 0..2 {
        client.complete(&json!({"prompt": "a", "seed": Value::Null})).await.ok();
        seeds.push(client.engine.last_params().sampling.seed);
    }
    assert_ne!(seeds[0], seeds[1]);
}
