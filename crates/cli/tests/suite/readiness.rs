//! The real server from its first line to a failed engine. Faults are injected into the device of
//! debug builds; release builds have no such hook.

use crate::server::{PATIENCE, Server, read_answer};
use serde_json::json;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const FLAGS: [&str; 6] = ["--port", "0", "--context", "1024", "--threads", "1"];

/// Health as soon as the engine is broken, and the end of the process.
fn check(fault: &str, flags: &[&str], status: &str) {
    let flags = [&FLAGS[..], flags].concat();
    let mut server = Server::start_in(None, &flags, &[("OSCAR_TEST_FAULT", fault)]);
    assert_eq!((server.get("/health").status, server.get("/ready").status), (200, 200));
    // Nobody waits for the answer of a hanging step.
    let _stream =
        server.open("POST", "/v1/chat/completions", None, Some(&crate::server::chat_body(&json!({}))));
    let begun = Instant::now();
    while server.get("/health").status == 200 {
        assert!(begun.elapsed() < PATIENCE, "{fault}: still healthy");
        std::thread::sleep(Duration::from_millis(10));
    }
    for path in ["/health", "/ready"] {
        let answer = server.get(path);
        assert_eq!((answer.status, answer.json()), (503, json!({"status": status})), "{fault}");
    }
    assert_eq!(server.wait().code(), Some(1), "{fault}");
}

#[test]
fn a_lost_device_fails_health_and_ends_the_process() {
    check("device:2", &[], "dead");
}

#[test]
fn a_step_that_hangs_fails_health_and_ends_the_process() {
    check("hang:2", &["--stuck-after", "1"], "stuck");
}

#[test]
fn the_socket_answers_before_the_model_is_loaded() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_oscar"))
        .arg("serve")
        .args(FLAGS)
        .env_remove("OSCAR_API_KEYS")
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    log.read_line(&mut line).unwrap();
    let address = line.split_once("http://").unwrap().1.split(';').next().unwrap().to_owned();
    std::thread::spawn(move || log.read_to_end(&mut Vec::new()));
    let (begun, mut seen) = (Instant::now(), Vec::new());
    loop {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let answer = read_answer(stream);
        seen.push(answer.status);
        match answer.status {
            200 => break,
            503 => assert_eq!(answer.json()["status"], "starting"),
            other => panic!("{other}: {}", answer.body),
        }
        assert!(begun.elapsed() < PATIENCE, "{seen:?}");
    }
    assert!(seen.contains(&503), "loading a model takes longer than a request");
    child.kill().unwrap();
    child.wait().unwrap();
}
