//! `oscar serve --store` and `oscar store`: conversations survive restarts and kills.

use crate::families;
use crate::server::{PATIENCE, Server, read_answer};
use crate::support::{fail, json_lines, succeed};
use oscar_models::Family;
use oscar_store::PageKind;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

fn serve(folder: &Path) -> Server {
    let folder = folder.to_str().unwrap();
    let flags = ["--port", "0", "--context", "2048", "--threads", "1", "--exact-hits", "--store", folder];
    Server::start_with(None, &flags)
}

/// A prompt of many tokens, different for each number.
fn prompt(number: usize) -> Value {
    let text: Vec<String> =
        (0..60).map(|i| format!("Line {i} of text {number} says {}.", i * number + 7)).collect();
    json!({"model": "oscar-15m", "prompt": text.join("\n"), "temperature": 0, "max_tokens": 12})
}

/// Text and usage of an answer.
fn ask(server: &Server, number: usize) -> (String, Value) {
    let answer = server.send("POST", "/v1/completions", None, Some(&prompt(number)));
    assert_eq!(answer.status, 200, "{}", answer.body);
    let answer = answer.json();
    (answer["choices"][0]["text"].as_str().unwrap().to_owned(), answer["usage"].clone())
}

#[test]
fn a_restart_keeps_conversations_and_the_store_can_be_looked_at() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let mut server = serve(folder.path());
    let (cold, usage) = ask(&server, 1);
    assert_eq!(usage["prompt_tokens_details"], json!({"cached_tokens": 0}));
    server.signal("-TERM");
    server.wait();

    let server = serve(folder.path());
    assert!(server.seen.contains("page store: "), "{}", server.seen);
    let (again, usage) = ask(&server, 1);
    assert_eq!(again, cold);
    let details = &usage["prompt_tokens_details"];
    let cached = details["cached_tokens"].as_u64().unwrap();
    assert!(cached > usage["prompt_tokens"].as_u64().unwrap() - 65, "{usage}");
    assert_eq!(details["cached_tokens_by_tier"], json!({"tree": 0, "ram": 0, "disk": cached}));
    let metrics = server.get("/metrics").body;
    let hits = format!("oscar_prefix_cache_hits_by_tier_total{{tier=\"disk\"}} {cached}\n");
    assert!(metrics.contains(&hits), "{metrics}");
    assert_eq!(server.metric("oscar_kv_store_corrupt_total"), 0.0);
    let state = server.get("/internal/state").json();
    assert_eq!(state["stats"]["cached_disk_tokens"], cached);
    drop(server);

    let listed = json_lines(&["store", "ls", path, "--json"]);
    assert_eq!(
        (listed.len(), &listed[0]["model"], &listed[0]["device"]),
        (1, &json!("oscar-15m"), &json!("cpu"))
    );
    assert!(listed[0]["coded_pages"].as_u64().unwrap() > 0 && listed[0]["full_pages"].as_u64().unwrap() > 0);
    assert!(succeed(&["store", "ls", path]).contains("oscar-15m"));
    let sound = json_lines(&["store", "verify", path, "--json"]);
    assert_eq!((&sound[0]["corrupt"], &sound[0]["unfinished"]), (&json!(0), &json!(0)));

    let page = &oscar_store::list(folder.path()).unwrap().pages[0];
    let mut bytes = std::fs::read(&page.path).unwrap();
    *bytes.last_mut().unwrap() ^= 4;
    std::fs::write(&page.path, bytes).unwrap();
    let (code, message) = fail(&["store", "verify", path]);
    assert!(code == 1 && message.contains("wrong checksum"), "{message}");
    assert_eq!(json_lines(&["store", "verify", path, "--remove", "--json"])[0]["removed"], 1);
    let (code, message) = fail(&["store", "prune", path]);
    assert!(code == 1 && message.contains("--age"), "{message}");
    assert_eq!(json_lines(&["store", "prune", path, "--age", "1h", "--json"])[0]["too_old"], 0);
    assert_eq!(json_lines(&["store", "prune", path, "--all", "--json"])[0]["left_bytes"], 0);
    let (code, message) = fail(&["store", "ls", "/nonexistent/folder"]);
    assert!(code == 1 && message.contains("/nonexistent/folder"), "{message}");
}

/// Recurrent states come back with the other pages. One that is damaged costs a hit and no answer.
#[test]
fn a_restart_keeps_recurrent_states() {
    let (dir, folder) = (families::folder(Family::Qwen3Next), tempfile::tempdir().unwrap());
    let (model, path) = (dir.path().to_str().unwrap(), folder.path().to_str().unwrap());
    let on = ["--model", model, "--served-model-name", "oscar-15m", "--device", "cpu", "--port", "0"];
    let flags =
        [&on[..], &["--kv", "oscar2", "--context", "2048", "--threads", "1", "--store", path]].concat();
    let serve = || Server::start_with(None, &flags);
    let mut server = serve();
    let (cold, _) = ask(&server, 1);
    server.signal("-TERM");
    server.wait();

    let mut server = serve();
    let (again, usage) = ask(&server, 1);
    let details = &usage["prompt_tokens_details"];
    let cached = details["cached_tokens"].as_u64().unwrap();
    assert!(again == cold && cached > usage["prompt_tokens"].as_u64().unwrap() - 65, "{usage}");
    assert_eq!(details["cached_tokens_by_tier"], json!({"tree": 0, "ram": 0, "disk": cached}));
    assert_eq!(server.metric("oscar_kv_store_missing_states_total"), 0.0);
    server.signal("-TERM");
    server.wait();

    let listed = json_lines(&["store", "ls", path, "--json"]);
    assert_eq!(listed[0]["states"], 2, "the ends of the prompt and of the answer: {listed:?}");
    assert_eq!(json_lines(&["store", "verify", path, "--json"])[0]["corrupt"], 0);
    let pages = oscar_store::list(folder.path()).unwrap().pages;
    for state in pages.iter().filter(|page| page.kind == PageKind::State) {
        let mut bytes = std::fs::read(&state.path).unwrap();
        *bytes.last_mut().unwrap() ^= 4;
        std::fs::write(&state.path, bytes).unwrap();
    }
    assert_eq!(fail(&["store", "verify", path]).0, 1);
    let server = serve();
    let (again, usage) = ask(&server, 1);
    assert_eq!((again, &usage["prompt_tokens_details"]["cached_tokens"]), (cold, &json!(0)));
    assert_eq!(server.metric("oscar_kv_store_corrupt_total"), 1.0);
    drop(server);

    let message = fail(&[&["serve", "--store-ram", "1K"], &on[..]].concat()).1;
    assert!(message.contains("--store-ram") && message.contains("recurrent state"), "{message}");
    let message = fail(&[&["serve", "--kv-budget", "512"], &on[..]].concat()).1;
    assert!(message.contains("--kv-budget") && message.contains("gated delta nets"), "{message}");
}

/// Killed in the middle of writing, again and again: no page is damaged, every answer is the same.
#[test]
fn a_server_that_is_killed_while_it_writes_leaves_a_sound_store() {
    let folder = tempfile::tempdir().unwrap();
    let numbers = 1..5;
    let expected: Vec<String> = {
        let server =
            Server::start_with(None, &["--port", "0", "--context", "2048", "--threads", "1", "--exact-hits"]);
        numbers.clone().map(|number| ask(&server, number).0).collect()
    };
    // A prompt has ended and its window is stored as soon as there is a BF16 page beyond the sink.
    let windows = || {
        let pages = oscar_store::list(folder.path()).map_or(Vec::new(), |listing| listing.pages);
        pages.iter().filter(|page| page.kind == PageKind::Full && page.block > 0).count()
    };
    for round in 1..3 {
        let mut server = serve(folder.path());
        let waiting: Vec<_> = numbers
            .clone()
            .map(|number| server.open("POST", "/v1/completions", None, Some(&prompt(number))))
            .collect();
        let begun = Instant::now();
        while windows() < 3 * round && begun.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
        server.signal("-KILL");
        server.wait();
        drop(waiting);
    }
    assert_eq!(json_lines(&["store", "verify", folder.path().to_str().unwrap(), "--json"])[0]["corrupt"], 0);
    // Two servers at once on what is left.
    let servers = [serve(folder.path()), serve(folder.path())];
    let mut cached = 0;
    for (number, expected) in numbers.zip(&expected) {
        let waiting = servers
            .each_ref()
            .map(|server| server.open("POST", "/v1/completions", None, Some(&prompt(number))));
        for stream in waiting {
            let answer = read_answer(stream).json();
            assert_eq!(answer["choices"][0]["text"], expected.as_str(), "{number}");
            cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        }
    }
    assert!(cached > 0, "something was written before the kill");
    for server in &servers {
        assert_eq!(server.metric("oscar_kv_store_corrupt_total"), 0.0);
    }
}

#[test]
fn a_store_that_cannot_be_used_is_refused_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let refused = |flags: &[&str]| fail(&[&["serve", "--port", "0", "--device", "cpu"], flags].concat()).1;
    let message = refused(&["--store", path, "--no-prefix-cache"]);
    assert!(message.contains("--no-prefix-cache"), "{message}");
    let file = folder.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let message = refused(&["--store", file.to_str().unwrap()]);
    assert!(message.contains("--store") && message.contains("file"), "{message}");
    let message = refused(&["--store-age", "7", "--store", path]);
    assert!(message.contains("not an age"), "{message}");
    let message = refused(&["--store-size", "1G"]);
    assert!(message.contains("--store"), "{message}");
}
