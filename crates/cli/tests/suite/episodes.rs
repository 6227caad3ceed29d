//! `oscar serve --evict episodes`: turns read views of a history that stays whole.

use crate::server::{PATIENCE, Server};
use crate::support::fail;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const FLAGS: [&str; 12] = [
    "--port",
    "0",
    "--context",
    "4096",
    "--threads",
    "1",
    "--kv-budget",
    "64",
    "--evict",
    "episodes",
    "--evict-block",
    "64",
];

/// A conversation of three topics, and a question about one of them.
fn conversation(question: &str) -> Vec<Value> {
    let told = ["Ada lives in Oslo", "Hugo keeps a box with code 4711", "Mona has a pet parrot"];
    let mut messages = vec![json!({"role": "system", "content": "Answer in one word."})];
    for i in 0..18 {
        messages.push(json!({"role": "user", "content": format!("My friend {}.", told[i % 3])}));
        messages.push(json!({"role": "assistant", "content": format!("Noted, for the time number {i}: {}.", told[i % 3])}));
    }
    messages.push(json!({"role": "user", "content": question}));
    messages
}

/// What became of the rows of a turn, and its answer.
fn ask(server: &Server, question: &str, kv: Value) -> (Value, String) {
    let mut body =
        json!({"model": "oscar-15m", "messages": conversation(question), "temperature": 0, "max_tokens": 6});
    if !kv.is_null() {
        body["kv"] = kv;
    }
    let answer = server.send("POST", "/v1/chat/completions", None, Some(&body));
    assert_eq!(answer.status, 200, "{}", answer.body);
    let answer = answer.json();
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned();
    (answer["usage"]["kv_details"].clone(), text)
}

/// The engine's numbers once the background work is done.
fn settled(server: &Server) -> Value {
    let begun = Instant::now();
    loop {
        let stats = server.send("GET", "/internal/state", None, None).json()["stats"].clone();
        if stats["view_jobs"] == 0 {
            return stats;
        }
        assert!(begun.elapsed() < PATIENCE, "{stats}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn turns_are_routed_to_views() {
    let server = Server::start_with(None, &FLAGS);
    let (details, _) = ask(&server, "Where does Ada live?", Value::Null);
    assert_eq!(
        (&details["policy"], &details["route"], &details["view"]),
        (&json!("episodes"), &json!("full"), &json!(null))
    );
    let stats = settled(&server);
    assert!(stats["views"].as_u64().unwrap() >= 2 && stats["view_jobs_failed"] == 0, "{stats}");
    let (details, first) = ask(&server, "Where does Ada live?", Value::Null);
    assert!(["episode", "union", "global"].contains(&details["route"].as_str().unwrap()), "{details}");
    assert!(details["similarity"].is_f64() && details["view"].is_u64(), "{details}");
    let count = |name: &str| details[name].as_u64().unwrap();
    assert!(count("kept") < count("history") && count("history") < count("logical"), "{details}");
    // The same question of the same view has the same answer; the whole history is still there.
    assert_eq!(ask(&server, "Where does Ada live?", Value::Null), (details, first));
    assert_eq!(ask(&server, "Where does Ada live?", json!({"view": "none"})).0, json!(null));
    let metrics = server.send("GET", "/metrics", None, None).body;
    assert!(metrics.contains("oscar_kv_routes_total{kind=\"full\"} 1"), "{metrics}");
    // Messages are not asked of a raw prompt: it reads everything.
    let raw = json!({"model": "oscar-15m", "prompt": "Once", "max_tokens": 2});
    let raw = server.send("POST", "/v1/completions", None, Some(&raw)).json();
    assert!(raw["usage"].get("kv_details").is_none(), "{raw}");
}

#[test]
fn flags_that_cannot_work_are_refused_by_name() {
    let base = ["serve", "--port", "0", "--kv-budget", "512"];
    for (flags, named) in [
        (&["--evict", "h2o"][..], "h2o is not served"),
        (&["--evict", "episodes", "--no-prefix-cache"], "--no-prefix-cache"),
        (&["--evict", "kvzip", "--kv", "kivi2"], "groups tokens"),
        (&["--evict", "episodes", "--episodes", "0"], "--episodes"),
        (&["--evict", "lru"], "episodes"),
    ] {
        let (_, message) = fail(&[&base[..], flags].concat());
        assert!(message.contains(named), "{flags:?}: {message}");
    }
}
