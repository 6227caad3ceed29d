//! `oscar serve --store-redis` against a real redis-server or valkey-server, healthy, full, stopped and killed.
//!
//! The server must be there in CI; elsewhere its absence is a printed note.

use crate::families;
use crate::python;
use crate::server::{PATIENCE, Server};
use crate::support::fail;
use oscar_models::Family;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Waits for something that may take a minute on a busy machine.
pub fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A server on a free port, with a password.
struct Redis {
    child: Child,
    port: u16,
}

impl Drop for Redis {
    fn drop(&mut self) {
        // Already gone is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Redis {
    /// `None` with a note if none is installed.
    fn start(port: Option<u16>) -> Option<Self> {
        let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let port = port.unwrap_or_else(free);
        let start = |program: &str| {
            let mut command = Command::new(program);
            command.args([
                "--bind",
                "127.0.0.1",
                "--port",
                &port.to_string(),
                "--save",
                "",
                "--requirepass",
                "pw",
            ]);
            command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().ok()
        };
        let Some(child) = ["valkey-server", "redis-server"].into_iter().find_map(start) else {
            python::missing("neither valkey-server nor redis-server is installed");
            return None;
        };
        let redis = Self { child, port };
        wait_until("the server comes up", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        Some(redis)
    }

    fn url(&self) -> String {
        format!("redis://:pw@127.0.0.1:{}/1", self.port)
    }

    /// The answer to commands of one line each.
    fn tell(&self, commands: &[&str]) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let lines = [&["AUTH pw", "SELECT 1"], commands, &["QUIT"]].concat().join("\r\n") + "\r\n";
        stream.write_all(lines.as_bytes()).unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap().success());
    }
}

fn serve(url: &str) -> Server {
    let flags = ["--port", "0", "--context", "2048", "--threads", "1", "--exact-hits", "--store-redis", url];
    Server::start_with(None, &flags)
}

/// Text of an answer, and the prompt's tokens that came from the server.
pub fn ask(server: &Server, number: usize) -> (String, u64) {
    let text: Vec<String> =
        (0..50).map(|i| format!("Line {i} of text {number} says {}.", i * number + 7)).collect();
    let body = json!({"model": "oscar-15m", "prompt": text.join("\n"), "temperature": 0, "max_tokens": 12});
    let answer = server.send("POST", "/v1/completions", None, Some(&body));
    assert_eq!(answer.status, 200, "{}", answer.body);
    let answer: Value = answer.json();
    let tiers = &answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"];
    (answer["choices"][0]["text"].as_str().unwrap().to_owned(), tiers["shared"].as_u64().unwrap_or(0))
}

pub fn flush(server: &Server) {
    assert_eq!(server.send("POST", "/flush_cache", None, Some(&json!({}))).status, 200);
}

/// Recurrent states are shared too, and one that is gone costs the hit.
#[test]
fn a_server_of_pages_shares_recurrent_states() {
    let Some(redis) = Redis::start(None) else { return };
    let (dir, url) = (families::folder(Family::Qwen3_5Moe), redis.url());
    let model =
        ["--model", dir.path().to_str().unwrap(), "--served-model-name", "oscar-15m", "--kv", "oscar2"];
    let flags =
        ["--device", "cpu", "--port", "0", "--context", "2048", "--threads", "1", "--store-redis", &url];
    let serve = || Server::start_with(None, &[&model[..], &flags].concat());
    let first = serve();
    let expected = ask(&first, 1).0;
    wait_until("pages are written", || first.metric("oscar_kv_store_queued_bytes") == 0.0);
    let second = serve();
    let (text, shared) = ask(&second, 1);
    assert!(text == expected && shared > 400, "{shared}");
    assert_eq!(second.metric("oscar_kv_store_missing_states_total"), 0.0);
    let keys = redis.tell(&["KEYS oscar:*"]);
    let states: Vec<&str> = keys.lines().filter(|line| line.ends_with(".state")).collect();
    assert!(!states.is_empty(), "{keys}");
    redis.tell(&[format!("DEL {}", states.join(" ")).as_str()]);
    let third = serve();
    assert_eq!(ask(&third, 1), (expected, 0));
    assert_eq!(third.metric("oscar_kv_store_missing_states_total"), 1.0);
}

#[test]
fn a_server_of_pages_is_shared_and_may_be_slow_or_gone() {
    let Some(redis) = Redis::start(None) else { return };
    let first = serve(&redis.url());
    let expected: Vec<String> = (1..4).map(|number| ask(&first, number).0).collect();
    let written = || first.metric("oscar_kv_store_shared_written_pages_total");
    wait_until("pages are written", || {
        first.metric("oscar_kv_store_queued_bytes") == 0.0 && written() >= 30.0
    });
    // Another process finds what the first one computed.
    let second = serve(&redis.url());
    let (text, shared) = ask(&second, 1);
    assert_eq!(text, expected[0]);
    assert!(shared > 400, "{shared}");
    // Damaged pages are seen, counted and removed.
    let keys = redis.tell(&["KEYS oscar:*"]);
    let keys: Vec<&str> = keys.lines().filter(|line| line.starts_with("oscar:")).collect();
    assert!(keys.len() >= 30, "{keys:?}");
    let damage: Vec<String> = keys.iter().map(|key| format!("SETRANGE {key} 2000 xyzzy")).collect();
    redis.tell(&damage.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(ask(&second, 2), (expected[1].clone(), 0));
    assert!(second.metric("oscar_kv_store_corrupt_total") > 0.0);
    // A full server takes no page and costs no answer.
    redis.tell(&["CONFIG SET maxmemory-policy noeviction", "CONFIG SET maxmemory 1"]);
    assert_eq!(ask(&second, 3).0, expected[2]);
    wait_until("a full server is counted", || second.metric("oscar_kv_store_shared_full_total") > 0.0);
    assert_eq!(second.metric("oscar_kv_store_shared_errors_total"), 0.0);
    // It hangs: requests go on without it, and the next ones do not wait for it.
    redis.signal("-STOP");
    for server in [&first, &second] {
        flush(server);
        for number in 1..4 {
            assert_eq!(ask(server, number), (expected[number - 1].clone(), 0));
        }
        assert!(server.metric("oscar_kv_store_shared_errors_total") > 0.0);
        assert_eq!(server.metric("oscar_kv_store_timeouts_total"), 0.0, "the engine did not wait in vain");
    }
    // It is gone.
    redis.signal("-CONT");
    let (port, url) = (redis.port, redis.url());
    drop(redis);
    flush(&first);
    assert_eq!(ask(&first, 1), (expected[0].clone(), 0));
    drop((first, second));
    // Servers start without it, and not with a wrong password.
    let alone = serve(&url);
    assert_eq!(ask(&alone, 1), (expected[0].clone(), 0));
    assert!(alone.metric("oscar_kv_store_shared_errors_total") > 0.0);
    drop(alone);
    let Some(_redis) = Redis::start(Some(port)) else { return };
    let refused = |url: &str| fail(&["serve", "--port", "0", "--device", "cpu", "--store-redis", url]).1;
    let message = refused(&url.replace(":pw@", ":wrong@"));
    assert!(message.contains("--store-redis") && message.contains("WRONGPASS"), "{message}");
    let message = refused("rediss://127.0.0.1");
    assert!(message.contains("TLS"), "{message}");
}
