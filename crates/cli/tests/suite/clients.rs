//! `oscar serve` as its clients see it: plain HTTP, the official `openai` client, real routers, a real browser.
//!
//! What comes from outside (packages of PyPI, Chromium) must be there in CI; elsewhere its absence is a printed note.

use crate::python;
use crate::server::{Answer, Server, chat_body, read_answer, stream_data};
use serde_json::{Value, json};
use std::path::Path;

const KEY: &str = "a-key-for-tests";

#[test]
fn plain_http_gets_answers_streams_hits_and_numbers() {
    let server = Server::start(None);
    assert_eq!(server.get("/health").status, 200);

    let answer = server.chat(&json!({}));
    assert_eq!(answer.status, 200, "{}", answer.body);
    let content = answer.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert!(content.starts_with("I am a small language model"), "{content}");

    let stream = server.chat(&json!({"stream": true}));
    let data = stream_data(&stream.body);
    assert_eq!(data.last(), Some(&"[DONE]"), "{}", stream.body);
    let pieces: Vec<Value> =
        data[..data.len() - 1].iter().map(|piece| serde_json::from_str(piece).unwrap()).collect();
    let streamed: String =
        pieces.iter().filter_map(|p| p["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(streamed, content);

    let long = json!({"max_tokens": 4, "messages": [
        {"role": "user", "content": "The harbour lay still in the morning. ".repeat(20)}]});
    let cached =
        |answer: &Answer| answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let (cold, hit) = (server.chat(&long), server.chat(&long));
    assert!(cached(&cold) < cached(&hit) && cached(&hit) >= 64, "{} then {}", cold.body, hit.body);
    assert_eq!(cold.json()["choices"], hit.json()["choices"], "a hit changes nothing");

    let metrics = server.get("/metrics");
    assert_eq!(metrics.status, 200);
    for line in ["# TYPE oscar_build_info gauge", "# TYPE vllm:prompt_tokens_total counter"] {
        assert!(metrics.body.contains(line), "{}", metrics.body);
    }
    let refused = server.chat(&json!({"temperature": -1}));
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("temperature")));
}

#[test]
fn keys_of_the_environment_guard_everything_but_health() {
    let server = Server::start(Some(&format!("another,{KEY}")));
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.get("/v1/models").status, 401);
    assert_eq!(server.send("GET", "/v1/models", Some("wrong"), None).status, 401);
    let models = server.send("GET", "/v1/models", Some(KEY), None);
    assert_eq!((models.status, &models.json()["data"][0]["id"]), (200, &json!("oscar-15m")));
}

#[cfg(unix)]
#[test]
fn sigterm_lets_running_answers_finish() {
    let mut server = Server::start(None);
    let body = chat_body(&json!({"stream": true, "ignore_eos": true, "max_tokens": 300}));
    let stream = server.open("POST", "/v1/chat/completions", None, Some(&body));
    // The first bytes say that the answer is on its way.
    assert!(stream.peek(&mut [0; 16]).unwrap() > 0);
    server.signal("-TERM");
    let answer = read_answer(stream);
    let data = stream_data(&answer.body);
    assert_eq!(data.last(), Some(&"[DONE]"), "{}", answer.body);
    let last: Value = serde_json::from_str(data[data.len() - 2]).unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "length", "{last}");
    assert_eq!(server.wait().code(), Some(0));
}

#[cfg(unix)]
#[test]
fn after_kill_9_the_same_command_starts_clean() {
    let mut server = Server::start(None);
    let port = server.address.rsplit(':').next().unwrap().to_owned();
    let body = chat_body(&json!({"stream": true, "ignore_eos": true, "max_tokens": 800}));
    let stream = server.open("POST", "/v1/chat/completions", None, Some(&body));
    assert!(stream.peek(&mut [0; 16]).unwrap() > 0);
    server.signal("-KILL");
    assert_eq!(server.wait().code(), None, "killed, not ended");
    drop(stream);
    // The same port, at once, with nothing left of the first life.
    let server = Server::start_with(None, &["--port", &port, "--context", "2048", "--threads", "1"]);
    assert_eq!(server.metric("oscar_engine_steps_total"), 0.0);
    let answer = server.chat(&json!({}));
    assert_eq!(answer.status, 200, "{}", answer.body);
    let content = answer.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert!(content.starts_with("I am a small language model"), "{content}");
}

#[cfg(unix)]
#[test]
fn the_official_openai_client_accepts_every_answer() {
    let Some(python) = python::with(&["openai"]) else { return };
    let server = Server::start(Some(KEY));
    python::run_script(&python, "openai_client.py", &[&format!("http://{}", server.address), KEY]);
}

#[cfg(unix)]
#[test]
fn the_official_openai_client_gets_tools_and_structured_output() {
    let Some(python) = python::with(&["openai"]) else { return };
    let server = Server::start(Some(KEY));
    python::run_script(&python, "openai_tools.py", &[&format!("http://{}", server.address), KEY]);
}

#[cfg(unix)]
#[test]
fn the_official_anthropic_client_accepts_every_answer() {
    let Some(python) = python::with(&["anthropic"]) else { return };
    let server = Server::start(Some(KEY));
    python::run_script(&python, "anthropic_client.py", &[&format!("http://{}", server.address), KEY]);
}

/// The packages of agent frameworks and of the validator, in one environment. litellm needs `mcp` for tools;
/// version 2 of it, which newer versions of litellm need, conflicts with the HTTP client of the others.
#[cfg(unix)]
const FRAMEWORKS: [&str; 5] =
    ["litellm~=1.95.0", "langchain-openai", "instructor", "jsonschema", "mcp~=1.30"];

#[cfg(unix)]
#[test]
fn agent_frameworks_work_unchanged() {
    let Some(python) = python::with(&FRAMEWORKS) else { return };
    let server = Server::start(Some(KEY));
    python::run_script(&python, "frameworks.py", &[&format!("http://{}", server.address), KEY]);
}

#[cfg(unix)]
#[test]
fn two_hundred_generated_schemas_are_followed() {
    let Some(python) = python::with(&FRAMEWORKS) else { return };
    let server = Server::start(Some(KEY));
    python::run_script(&python, "schemas.py", &[&format!("http://{}", server.address), KEY, "200"]);
}

/// Run it with `cargo test -p oscar-cli --features otel traces_reach`.
#[cfg(all(unix, feature = "otel"))]
#[test]
fn traces_reach_a_collector() {
    let Some(python) = python::with(&["opentelemetry-proto"]) else { return };
    python::run_script(&python, "traces.py", &[env!("CARGO_BIN_EXE_oscar")]);
}

#[cfg(unix)]
#[test]
fn sglang_router_works_with_two_replicas() {
    let Some(python) = python::with(&["sglang-router==0.3.2"]) else { return };
    python::run_script(&python, "routers.py", &["sglang_router.launch_router", env!("CARGO_BIN_EXE_oscar")]);
}

#[cfg(unix)]
#[test]
fn smg_works_with_two_replicas() {
    let Some(python) = python::with(&["smg==1.13.0"]) else { return };
    python::run_script(&python, "routers.py", &["smg.launch_router", env!("CARGO_BIN_EXE_oscar")]);
}

#[cfg(unix)]
#[test]
fn the_indexer_of_dynamo_counts_the_pages_that_a_server_holds() {
    let Some(python) = python::dynamo() else { return };
    for encoding in ["map", "array"] {
        python::run_script(&python, "kv_events.py", &[env!("CARGO_BIN_EXE_oscar"), encoding]);
    }
}

/// The order of an end and the kill of a replica rest on Linux.
#[cfg(target_os = "linux")]
#[test]
fn dynamo_routes_by_prefix_and_continues_streams_of_a_killed_replica() {
    let Some(python) = python::dynamo() else { return };
    let root = tempfile::tempdir().unwrap();
    let model = root.path().join("oscar-15m");
    std::fs::create_dir(&model).unwrap();
    for (name, bytes) in oscar_embedded::FILES {
        std::fs::write(model.join(name), bytes).unwrap();
    }
    python::run_script(&python, "dynamo.py", &[env!("CARGO_BIN_EXE_oscar"), model.to_str().unwrap()]);
}

#[cfg(unix)]
#[test]
fn the_web_page_works_in_chromium() {
    let Some(chromium) = python::chromium() else { return };
    let server = Server::start(None);
    python::run_script(Path::new("python3"), "page.py", &[chromium, &format!("http://{}", server.address)]);
}
