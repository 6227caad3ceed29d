//! `oscar batch` as a user runs it: a file of requests, a file of results, and a kill in between.

use crate::server::PATIENCE;
use crate::support::{fail, oscar, succeed};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

const FLAGS: [&str; 6] = ["--context", "1024", "--threads", "2", "--device", "cpu"];

fn chat(id: &str, fields: Value) -> Value {
    let mut body = json!({"model": "oscar-15m", "temperature": 0, "max_tokens": 4,
        "messages": [{"role": "user", "content": format!("Who are you? {id}")}]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    json!({"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body})
}

fn write(path: &Path, lines: &[Value]) {
    std::fs::write(path, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
}

/// Results by custom_id, each exactly once.
fn results(path: &Path) -> BTreeMap<String, Value> {
    let text = std::fs::read_to_string(path).unwrap();
    let mut all = BTreeMap::new();
    for line in text.lines() {
        let result: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
        let id = result["custom_id"].as_str().unwrap().to_owned();
        assert!(all.insert(id.clone(), result).is_none(), "{id} twice");
    }
    all
}

#[test]
fn every_request_gets_its_answer_or_its_error() {
    let dir = tempfile::tempdir().unwrap();
    let (input, output) = (dir.path().join("in.jsonl"), dir.path().join("out.jsonl"));
    let completion = json!({"custom_id": "plain", "method": "POST", "url": "/v1/completions",
        "body": {"model": "oscar-15m", "prompt": "One two", "max_tokens": 3}});
    let embeddings = json!({"custom_id": "other", "method": "POST", "url": "/v1/embeddings", "body": {}});
    write(
        &input,
        &[
            chat("chat", json!({})),
            completion,
            chat("bad", json!({"temperature": -1})),
            chat("model", json!({"model": "gpt-9"})),
            embeddings,
            chat("streamed", json!({"stream": true})),
        ],
    );
    let (input, output_text) = (input.to_str().unwrap(), output.to_str().unwrap());
    let args = [&["batch", input, output_text], &FLAGS[..]].concat();
    let (code, message) = fail(&args);
    assert!(message.contains("6 requests: 2 answered now, 0 before, 4 failed"), "{message}");
    assert!(code == 1 && message.contains("4 of 6 requests failed"), "{message}");
    let all = results(&output);
    assert_eq!(all.len(), 6);
    for (id, object) in [("chat", "chat.completion"), ("plain", "text_completion")] {
        let response = &all[id]["response"];
        assert_eq!((&response["status_code"], &all[id]["error"]), (&json!(200), &Value::Null));
        assert_eq!(response["body"]["object"], object);
        assert!(response["request_id"].as_str().is_some_and(|id| !id.is_empty()));
    }
    for (id, status, code) in [("bad", 400, Value::Null), ("model", 404, json!("model_not_found"))] {
        let response = &all[id]["response"];
        assert_eq!((&response["status_code"], &response["body"]["error"]["code"]), (&json!(status), &code));
    }
    for (id, code) in [("other", "invalid_url"), ("streamed", "invalid_request")] {
        assert_eq!((&all[id]["response"], &all[id]["error"]["code"]), (&Value::Null, &json!(code)));
    }
    // Nothing is left to do, and the failures are still told.
    let (code, message) = fail(&args);
    assert!(code == 1 && message.contains("0 answered now, 2 before, 4 failed"), "{message}");
    assert_eq!(results(&output), all);
    // A file of something else is not overwritten.
    std::fs::write(&output, "my notes\n").unwrap();
    assert!(fail(&args).1.contains("out.jsonl"));
    assert_eq!(std::fs::read_to_string(&output).unwrap(), "my notes\n");
}

#[test]
fn a_batch_that_was_killed_continues() {
    let dir = tempfile::tempdir().unwrap();
    let (input, output) = (dir.path().join("in.jsonl"), dir.path().join("out.jsonl"));
    let lines: Vec<Value> =
        (0..40).map(|i| chat(&format!("r{i}"), json!({"max_tokens": 60, "ignore_eos": true}))).collect();
    write(&input, &lines);
    let (input, output_text) = (input.to_str().unwrap(), output.to_str().unwrap());
    let args = [&["batch", input, output_text, "--max-batch", "2"], &FLAGS[..]].concat();
    let mut child = Command::new(env!("CARGO_BIN_EXE_oscar"))
        .args(&args)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    while std::fs::read_to_string(&output).unwrap_or_default().lines().count() < 3 {
        assert!(begun.elapsed() < PATIENCE && child.try_wait().unwrap().is_none(), "no results");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let before = results(&output);
    assert!((3..40).contains(&before.len()), "{}", before.len());
    // What a kill in the middle of a line leaves.
    let mut file = std::fs::OpenOptions::new().append(true).open(&output).unwrap();
    write!(file, "{{\"id\":\"batch_req_9\",\"custom_id\":\"r39\",\"resp").unwrap();
    drop(file);
    let output_of_rest = oscar(&args);
    assert!(output_of_rest.status.success(), "every request is answered");
    let message = String::from_utf8(output_of_rest.stderr).unwrap();
    assert!(message.contains(&format!("{} before", before.len())), "{message}");
    let after = results(&output);
    assert_eq!(after.len(), 40);
    assert!(before.iter().all(|(id, result)| after[id] == *result), "finished answers stay as they were");
}

#[test]
fn bad_input_is_refused_before_the_model_loads() {
    let dir = tempfile::tempdir().unwrap();
    let (input, output) = (dir.path().join("in.jsonl"), dir.path().join("out.jsonl"));
    write(&input, &[chat("a", json!({})), chat("a", json!({}))]);
    let (code, message) = fail(&["batch", input.to_str().unwrap(), output.to_str().unwrap()]);
    assert!(code == 1 && message.contains("line 2") && message.contains("'a'"), "{message}");
    assert!(!output.exists());
}

#[test]
fn completions_and_man_pages_name_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let text = succeed(&["completions", shell]);
        assert!(text.contains("kv-memory-share") && text.contains("batch"), "{shell}");
    }
    let dir = tempfile::tempdir().unwrap();
    succeed(&["man", dir.path().to_str().unwrap()]);
    let page = std::fs::read_to_string(dir.path().join("oscar-serve.1")).unwrap();
    assert!(page.contains("gpu") && page.contains("Longest sequence"), "{page}");
    assert!(dir.path().join("oscar.1").exists() && dir.path().join("oscar-batch.1").exists());
}
