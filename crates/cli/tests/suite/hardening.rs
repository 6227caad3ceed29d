//! What an operator relies on when the server is exposed: logs that cannot be written, keys, signals, addresses.

use crate::server::{PATIENCE, Server, chat_body};
use crate::support::fail;
use serde_json::json;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const FLAGS: [&str; 6] = ["--port", "0", "--context", "1024", "--threads", "1"];

#[test]
fn a_closed_log_does_not_stop_the_server() {
    // Health checks are logged at this level.
    let mut server = Server::start_with(None, &[&FLAGS[..], &["--log", "debug"]].concat());
    server.close_log();
    for _ in 0..50 {
        assert_eq!(server.get("/health").status, 200);
    }
    assert_eq!(server.chat(&json!({"max_tokens": 4})).status, 200);
    assert!(server.metric("oscar_log_lines_dropped_total") > 0.0);
    assert_eq!(server.metric("oscar_panics_total"), 0.0);
    server.signal("-TERM");
    assert_eq!(server.wait().code(), Some(0));
}

/// 455 requests once filled the pipe and stopped everything.
#[test]
fn a_log_that_nobody_reads_does_not_stop_the_server() {
    let mut server = Server::start_with(None, &[&FLAGS[..], &["--log", "debug"]].concat());
    for _ in 0..1500 {
        assert_eq!(server.get("/health").status, 200);
    }
    server.signal("-TERM");
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn a_full_log_does_not_stop_the_server() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_oscar"));
    command.args(["serve", "--context", "1024", "--threads", "1", "--port", &port]);
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    command.env_remove("OSCAR_API_KEYS").stdin(Stdio::null()).stdout(Stdio::null()).stderr(full);
    let child = command.spawn().unwrap();
    let mut server = Server::of(child, format!("127.0.0.1:{port}"));
    let begun = Instant::now();
    while std::net::TcpStream::connect(&server.address).is_err() || server.get("/health").status == 503 {
        assert!(begun.elapsed() < PATIENCE, "the server does not start");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.chat(&json!({"max_tokens": 4})).status, 200);
    server.signal("-TERM");
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn keys_are_read_again_on_sighup() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys");
    std::fs::write(&file, "operator ops root\nuser ann first\n").unwrap();
    let server =
        Server::start_with(None, &[&FLAGS[..], &["--api-key-file", file.to_str().unwrap()]].concat());
    let models = |key| server.send("GET", "/v1/models", Some(key), None).status;
    assert_eq!((models("root"), models("first"), models("second")), (200, 200, 401));
    assert_eq!(server.send("GET", "/metrics", Some("first"), None).status, 403);
    let reload = |text: &str| {
        std::fs::write(&file, text).unwrap();
        server.signal("-HUP");
    };
    let wait = |key, status| {
        let begun = Instant::now();
        while models(key) != status {
            assert!(begun.elapsed() < PATIENCE, "{key} is not {status}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    reload("operator ops root\nuser ann second\n");
    wait("second", 200);
    assert_eq!(models("first"), 401);
    // A file without a key changes nothing.
    reload("# nothing\n");
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!((models("second"), models("first")), (200, 401));
}

#[test]
fn a_second_interrupt_ends_at_once() {
    let mut server = Server::start_with(None, &[&FLAGS[..], &["--drain-timeout", "600"]].concat());
    let body = chat_body(&json!({"stream": true, "ignore_eos": true, "max_tokens": 900}));
    let stream = server.open("POST", "/v1/chat/completions", None, Some(&body));
    assert!(stream.peek(&mut [0; 16]).unwrap() > 0);
    server.signal("-INT");
    server.signal("-INT");
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn open_servers_have_to_be_asked_for() {
    let (_, message) = fail(&["serve", "--host", "0.0.0.0", "--port", "0", "--context", "1024"]);
    assert!(message.contains("--allow-anonymous"), "{message}");
    for variable in ["OSCAR_API_KEYS", "OSCAR_OPERATOR_KEYS"] {
        for value in ["", " , ,"] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_oscar"));
            command
                .args(["serve", "--port", "0", "--context", "1024"])
                .env(variable, value)
                .stdin(Stdio::null());
            let output = command.output().unwrap();
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && message.contains(variable), "{message}");
        }
    }
}
