//! Connections that say nothing, too little or too much, and the end of a server.

use std::time::Duration;

use oscar_server::ServerConfig;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::fake::Script;
use crate::sockets::{PATIENCE, Server, endless, read_all, read_until, slow};

const SOON: Duration = Duration::from_millis(300);

async fn send(server: &Server, text: &str) -> TcpStream {
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
    stream
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
}

#[tokio::test]
async fn heads_have_to_come_in_time() {
    let config = ServerConfig { header_timeout: SOON, idle_timeout: PATIENCE, ..Default::default() };
    let server = Server::start(config, Script::default()).await;
    for text in ["", "GET /health HTTP/1.1\r\nhost: local"] {
        assert_eq!(read_all(send(&server, text).await).await, "", "{text:?}");
    }
    // Bytes that trickle in do not help.
    let mut stream = send(&server, "GET /health HTTP/1.1\r\n").await;
    let trickle = async {
        while stream.write_all(b"x: y\r\n").await.is_ok() {
            tokio::time::sleep(SOON / 10).await;
        }
    };
    timeout(PATIENCE, trickle).await.expect("the connection stays open");
}

#[tokio::test]
async fn idle_connections_are_closed_and_busy_ones_are_not() {
    let config = ServerConfig { header_timeout: SOON, idle_timeout: SOON, ..Default::default() };
    let server = Server::start(config, slow()).await;
    let mut stream = send(&server, "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    read_until(&mut stream, "{\"status\":\"ok\"}").await;
    assert_eq!(read_all(stream).await, "");
    // An answer that takes longer than all of these times arrives.
    let mut body = endless();
    body["stream"] = json!(false);
    body["max_tokens"] = json!(100);
    let answer = server.post("/v1/chat/completions", &body).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn a_request_may_be_limited_in_time() {
    let config = ServerConfig { request_timeout: Some(SOON), ..Default::default() };
    let server = Server::start(config, slow()).await;
    let mut whole = endless();
    whole["stream"] = json!(false);
    let answer = server.post("/v1/chat/completions", &whole).await;
    assert!(answer.starts_with("HTTP/1.1 504") && answer.contains("request_timeout"), "{answer}");
    let stream = server.post("/v1/chat/completions", &endless()).await;
    assert!(stream.starts_with("HTTP/1.1 200") && !stream.contains("[DONE]"), "{stream}");
    server.wait_until_idle().await;
    assert_eq!(server.engine.cancelled().len(), 2);
}

#[tokio::test]
async fn health_checks_are_answered_when_all_connections_are_taken() {
    let config = ServerConfig { max_connections: 3, header_timeout: PATIENCE, ..Default::default() };
    let server = Server::start(config, Script::default()).await;
    let mut silent = Vec::new();
    for _ in 0..3 {
        silent.push(send(&server, "GET ").await);
    }
    // The server may not have accepted the last one yet.
    let refused = async {
        loop {
            let answer = read_all(send(&server, &get("/v1/models")).await).await;
            if answer.starts_with("HTTP/1.1 503") {
                return answer;
            }
        }
    };
    let answer = timeout(PATIENCE, refused).await.unwrap();
    assert!(answer.contains("too_many_connections") && answer.contains("retry-after"), "{answer}");
    assert!(read_all(send(&server, &get("/health")).await).await.starts_with("HTTP/1.1 200"));
    drop(silent);
    let served = async {
        while !read_all(send(&server, &get("/v1/models")).await).await.starts_with("HTTP/1.1 200") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, served).await.expect("nothing is served after the others have left");
}

#[tokio::test]
async fn a_stated_length_is_refused_before_the_body_comes() {
    let server = Server::start(ServerConfig::default(), Script::default()).await;
    for expect in ["", "expect: 100-continue\r\n"] {
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             {expect}content-length: 1000000000\r\n\r\n{{"
        );
        let mut stream = send(&server, &head).await;
        let answer = read_until(&mut stream, "body_too_large").await;
        assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    }
}

#[tokio::test]
async fn large_bodies_share_a_budget_and_small_ones_need_none() {
    let config = ServerConfig { max_body_bytes: Some(16 << 20), ..Default::default() };
    let server = Server::start(config, Script::default()).await;
    let size = 15 << 20;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {size}\r\n\r\n"
    );
    let mut held = Vec::new();
    // Four bodies fit with their last byte missing, a fifth does not.
    for _ in 0..4 {
        let mut stream = send(&server, &head).await;
        stream.write_all(&vec![b' '; size - 1]).await.unwrap();
        held.push(stream);
    }
    let refused = async {
        loop {
            let mut stream = send(&server, &head).await;
            // The answer may come before everything is sent.
            let _ = stream.write_all(&vec![b' '; size - 1]).await;
            let mut start = [0; 12];
            match timeout(SOON, stream.read_exact(&mut start)).await {
                Ok(Ok(_)) => return String::from_utf8_lossy(&start).into_owned(),
                _ => held.push(stream),
            }
        }
    };
    assert_eq!(timeout(PATIENCE, refused).await.unwrap(), "HTTP/1.1 429");
    let small = server.post("/v1/completions", &json!({"prompt": "a"})).await;
    assert!(small.starts_with("HTTP/1.1 200"), "{small}");
}

#[tokio::test]
async fn while_draining_health_is_told_and_work_refused() {
    let mut server = Server::start(ServerConfig::default(), slow()).await;
    let mut stream = server.connect("/v1/chat/completions", &endless()).await;
    read_until(&mut stream, "chatcmpl-mine").await;
    server.stop();
    let ready = async {
        loop {
            let answer = read_all(send(&server, &get("/ready")).await).await;
            if answer.starts_with("HTTP/1.1 503") {
                return answer;
            }
        }
    };
    assert!(timeout(PATIENCE, ready).await.unwrap().contains("draining"));
    assert!(read_all(send(&server, &get("/health")).await).await.starts_with("HTTP/1.1 200"));
    let refused = server.post("/v1/completions", &json!({"prompt": "a"})).await;
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("shutting_down"), "{refused}");
}

#[tokio::test]
async fn a_second_signal_ends_draining() {
    let mut server = Server::start(ServerConfig::default(), slow()).await;
    let mut stream = server.connect("/v1/chat/completions", &endless()).await;
    read_until(&mut stream, "chatcmpl-mine").await;
    server.stop();
    server.abandon();
    timeout(PATIENCE, server.task).await.expect("the server still drains").unwrap().unwrap();
}
