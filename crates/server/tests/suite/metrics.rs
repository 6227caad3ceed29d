//! `/metrics` as its readers parse it.

use axum::body::Body;
use axum::http::Request;
use oscar_server::ServerConfig;
use serde_json::json;

use crate::client::{Answer, Client};
use crate::fake::Script;
use crate::prometheus::parse;

async fn scrape(client: &Client, accept: &str) -> Answer {
    client.send(Request::get("/metrics").header("accept", accept).body(Body::empty()).unwrap()).await
}

/// What the Go scraper of Prometheus 3 and those of llm-d and GAIE send.
const PROMETHEUS: &str =
    "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";

async fn busy() -> Client {
    let client = Client::new();
    client.chat(&json!({"messages": [{"role": "user", "content": "Hi"}]})).await.ok();
    client.chat(&json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2})).await.ok();
    client.get("/made/up/path").await.error(404);
    client
}

#[tokio::test]
async fn a_strict_reader_accepts_the_classic_text() {
    let client = busy().await;
    let answer = client.get("/metrics").await;
    assert_eq!(answer.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let families = parse(&answer.text()).unwrap();
    assert!(families.len() > 50, "{}", families.len());
    let build = &families["oscar_build_info"];
    assert_eq!(build.kind, "gauge");
    assert_eq!(build.samples.values().copied().collect::<Vec<_>>(), [1.0]);
    // A name that needs escapes.
    let odd = Script { model: "a\\b\"c\nd".to_owned(), ..Script::default() };
    let client = Client::with(ServerConfig::default(), odd);
    let families = parse(&client.get("/metrics").await.text()).unwrap();
    let ((_, labels), _) = families["vllm:num_requests_running"].samples.first_key_value().unwrap();
    assert!(labels.contains(&("model_name".to_owned(), "a\\b\"c\nd".to_owned())), "{labels:?}");
}

#[tokio::test]
async fn openmetrics_is_sent_to_those_who_ask_for_it() {
    let client = busy().await;
    let answer = scrape(&client, PROMETHEUS).await;
    let kind = answer.headers["content-type"].to_str().unwrap().to_owned();
    assert!(kind.starts_with("application/openmetrics-text; version=1.0.0"), "{kind}");
    let text = answer.text();
    assert!(text.ends_with("# EOF\n") && text.matches("# EOF").count() == 1);
    assert!(text.contains("# TYPE oscar_prompt_tokens counter\n"), "{text}");
    // The same samples in both.
    let samples = |text: &str| {
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.contains("/metrics"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(samples(&text), samples(&client.get("/metrics").await.text()));
}

/// Names, types and labels that Gateway API Inference Extension, llm-d, production-stack and vLLM's
/// dashboards read. DO NOT CHANGE: they are other projects' contracts.
const VLLM: &str = "\
vllm:cache_config_info gauge block_size cache_dtype engine model_name num_gpu_blocks
vllm:e2e_request_latency_seconds histogram engine model_name
vllm:generation_tokens_total counter engine model_name
vllm:gpu_cache_usage_perc gauge engine model_name
vllm:gpu_prefix_cache_hits_total counter engine model_name
vllm:gpu_prefix_cache_queries_total counter engine model_name
vllm:inter_token_latency_seconds histogram engine model_name
vllm:kv_cache_usage_perc gauge engine model_name
vllm:num_preemptions_total counter engine model_name
vllm:num_requests_running gauge engine model_name
vllm:num_requests_waiting gauge engine model_name
vllm:prefix_cache_hits_total counter engine model_name
vllm:prefix_cache_queries_total counter engine model_name
vllm:prompt_tokens_total counter engine model_name
vllm:request_generation_tokens histogram engine model_name
vllm:request_prompt_tokens histogram engine model_name
vllm:request_success_total counter engine finished_reason model_name
vllm:request_time_per_output_token_seconds histogram engine model_name
vllm:time_to_first_token_seconds histogram engine model_name
";

#[tokio::test]
async fn the_vllm_names_are_those_that_others_read() {
    let client = busy().await;
    let families = parse(&client.get("/metrics").await.text()).unwrap();
    let mut found = String::new();
    for (name, family) in families.iter().filter(|(name, _)| name.starts_with("vllm:")) {
        let ((_, labels), _) = family.samples.first_key_value().unwrap();
        let labels: Vec<_> = labels.iter().map(|(label, _)| label.as_str()).filter(|l| *l != "le").collect();
        found += &format!("{name} {} {}\n", family.kind, labels.join(" "));
    }
    assert_eq!(found, VLLM);
    let value = |name: &str, label: Option<(&str, &str)>| {
        let family = &families[name];
        let has = |labels: &[(String, String)], (key, value): (&str, &str)| {
            labels.iter().any(|(k, v)| k == key && v == value)
        };
        let found = family.samples.iter().find(|((sample, labels), _)| {
            !sample.ends_with("_bucket") && !sample.ends_with("_sum") && label.is_none_or(|l| has(labels, l))
        });
        *found.unwrap().1
    };
    // The aliases say the same as our names.
    for (ours, theirs) in [
        ("oscar_num_requests_running", "vllm:num_requests_running"),
        ("oscar_num_requests_waiting", "vllm:num_requests_waiting"),
        ("oscar_kv_cache_usage_perc", "vllm:kv_cache_usage_perc"),
        ("oscar_kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        ("oscar_prompt_tokens_total", "vllm:prompt_tokens_total"),
        ("oscar_generation_tokens_total", "vllm:generation_tokens_total"),
        ("oscar_prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        ("oscar_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"),
    ] {
        assert_eq!(value(ours, None), value(theirs, None), "{ours}");
    }
    assert_eq!(value("vllm:time_to_first_token_seconds", None), 2.0);
    let ended = |reason| value("vllm:request_success_total", Some(("finished_reason", reason)));
    assert_eq!((ended("stop"), ended("length"), ended("abort"), ended("error")), (1.0, 1.0, 0.0, 0.0));
    let ((_, labels), one) = families["vllm:cache_config_info"].samples.first_key_value().unwrap();
    assert_eq!(*one, 1.0);
    // As many blocks as `/v1/loads` counts tokens for.
    let loads = client.get("/v1/loads").await.ok();
    let tokens = loads["loads"][0]["max_total_num_tokens"].as_u64().unwrap();
    assert!(labels.contains(&("num_gpu_blocks".to_owned(), (tokens / 64).to_string())), "{labels:?}");
    assert!(labels.contains(&("block_size".to_owned(), "64".to_owned())), "{labels:?}");
}
