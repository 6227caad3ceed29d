//! Health while the model loads and after the engine has failed.

use oscar_engine::Health;
use oscar_server::{ServerConfig, StartProgress, Starting};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::fake::Script;
use crate::sockets::{PATIENCE, Server, read_all};

async fn ask(address: SocketAddr, method: &str, path: &str) -> (String, Value) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let answer = read_all(stream).await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer:?}"));
    (head.to_owned(), serde_json::from_str(body).unwrap())
}

#[tokio::test]
async fn every_route_tells_the_progress_of_the_start() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let progress = StartProgress::default();
    progress.begin("loading weights", 7);
    progress.set(3);
    let starting = Starting::new(listener, progress.clone(), &ServerConfig::default());
    for (method, path) in
        [("GET", "/health"), ("GET", "/ready"), ("POST", "/v1/chat/completions"), ("GET", "/")]
    {
        let (head, body) = ask(address, method, path).await;
        assert!(head.starts_with("HTTP/1.1 503") && head.contains("retry-after: 1"), "{path}: {head}");
        assert_eq!((&body["status"], &body["stage"]), (&json!("starting"), &json!("loading weights")));
        assert_eq!(body["error"]["message"], "the server is starting: loading weights 43 %");
        assert_eq!(body["error"]["code"], "starting");
    }
    progress.begin("starting the engine", 0);
    let (_, body) = ask(address, "GET", "/health").await;
    assert_eq!((&body["stage"], &body["progress"]), (&json!("starting the engine"), &Value::Null));
    // Clients that say nothing do not keep the socket.
    let _silent = TcpStream::connect(address).await.unwrap();
    let listener = timeout(PATIENCE, starting.finish()).await.unwrap().unwrap();
    assert_eq!(listener.local_addr().unwrap(), address);
}

#[tokio::test]
async fn a_failed_engine_is_told_at_once_and_ends_the_server() {
    for (health, name) in [
        (Health::Dead { reason: "the GPU fell off the bus".into() }, "dead"),
        (Health::Stuck { seconds: 9 }, "stuck"),
    ] {
        let config = ServerConfig { fault_grace: Duration::from_millis(300), ..Default::default() };
        let server = Server::start(config, Script::default()).await;
        assert!(ask(server.address, "GET", "/health").await.0.starts_with("HTTP/1.1 200"));
        server.engine.set_health(health);
        for path in ["/health", "/ready"] {
            let (head, body) = ask(server.address, "GET", path).await;
            assert!(head.starts_with("HTTP/1.1 503"), "{head}");
            // No more than that: the route needs no key.
            assert_eq!(body, json!({"status": name}));
        }
        let ended = timeout(PATIENCE, server.task).await.expect("the server goes on").unwrap();
        assert!(ended.unwrap_err().to_string().contains("the engine"));
    }
}

#[tokio::test]
async fn an_engine_that_was_only_slow_goes_on() {
    let config = ServerConfig { fault_grace: Duration::from_millis(300), ..Default::default() };
    let server = Server::start(config, Script::default()).await;
    server.engine.set_health(Health::Stuck { seconds: 9 });
    assert!(ask(server.address, "GET", "/ready").await.0.starts_with("HTTP/1.1 503"));
    server.engine.set_health(Health::Alive);
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert!(!server.task.is_finished());
    assert!(ask(server.address, "GET", "/ready").await.0.starts_with("HTTP/1.1 200"));
}
