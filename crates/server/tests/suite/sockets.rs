//! Over a real socket: what only a connection can show.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use oscar_engine::EngineApi;
use oscar_server::{ServerConfig, serve_on};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::client::{chunks, defaults};
use crate::fake::{FakeEngine, Script, text};

pub const PATIENCE: Duration = Duration::from_secs(20);

pub struct Server {
    pub engine: FakeEngine,
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    abandon: Option<oneshot::Sender<()>>,
    pub task: JoinHandle<std::io::Result<()>>,
}

impl Server {
    pub async fn start(config: ServerConfig, script: Script) -> Self {
        let text = text();
        let engine = FakeEngine::new(script, &text.tokenizer);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let (abandon, abandoned) = oneshot::channel::<()>();
        let shutdown = async {
            let _ = stopped.await;
        };
        let abandoned = async {
            if abandoned.await.is_err() {
                std::future::pending().await
            }
        };
        let task = tokio::spawn(serve_on(
            listener,
            config,
            Arc::new(engine.clone()),
            Arc::new(text),
            defaults(),
            shutdown,
            abandoned,
        ));
        Self { engine, address, stop: Some(stop), abandon: Some(abandon), task }
    }

    pub async fn connect(&self, path: &str, body: &Value) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nx-request-id: mine\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all((head + &body).as_bytes()).await.unwrap();
        stream
    }

    pub async fn post(&self, path: &str, body: &Value) -> String {
        read_all(self.connect(path, body).await).await
    }

    pub fn stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
    }

    pub fn abandon(&mut self) {
        self.abandon.take().unwrap().send(()).unwrap();
    }

    pub async fn wait_until_idle(&self) {
        let idle = async {
            while !self.engine.is_idle() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(PATIENCE, idle).await.expect("the engine still runs");
    }
}

pub async fn read_all(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    timeout(PATIENCE, stream.read_to_end(&mut bytes)).await.expect("no end").unwrap();
    String::from_utf8(bytes).unwrap()
}

pub async fn read_until(stream: &mut TcpStream, text: &str) -> String {
    let mut seen = String::new();
    let mut buffer = [0; 4096];
    while !seen.contains(text) {
        let count = timeout(PATIENCE, stream.read(&mut buffer)).await.expect("no answer").unwrap();
        assert_ne!(count, 0, "closed after {seen}");
        seen += &String::from_utf8_lossy(&buffer[..count]);
    }
    seen
}

/// Undoes chunked transfer coding, as far as our streams use it.
fn unchunked(response: &str) -> String {
    let (head, mut rest) = response.split_once("\r\n\r\n").unwrap();
    assert!(head.to_lowercase().contains("transfer-encoding: chunked"), "{head}");
    let mut body = String::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        body += &after[..size];
        rest = after[size..].strip_prefix("\r\n").unwrap_or_default();
    }
    body
}

pub fn endless() -> Value {
    json!({"messages": [{"role": "user", "content": "Hi"}], "stream": true, "ignore_eos": true, "max_tokens": 400})
}

pub fn slow() -> Script {
    Script { pace: Some(Duration::from_millis(10)), ..Default::default() }
}

#[tokio::test]
async fn a_stream_arrives_over_the_wire() {
    let server = Server::start(ServerConfig::default(), slow()).await;
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "stream": true});
    let chunks = chunks(&unchunked(&server.post("/v1/chat/completions", &body).await));
    let text: String =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "Hello, world! How are you?");
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request() {
    let server = Server::start(ServerConfig::default(), slow()).await;
    let mut stream = server.connect("/v1/chat/completions", &endless()).await;
    read_until(&mut stream, "chatcmpl-mine").await;
    drop(stream);
    server.wait_until_idle().await;
    assert_eq!(server.engine.cancelled().len(), 1);
    // The same for an answer that is not streamed.
    let mut whole = endless();
    whole["stream"] = json!(false);
    let stream = server.connect("/v1/chat/completions", &whole).await;
    while server.engine.is_idle() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(stream);
    server.wait_until_idle().await;
    assert_eq!(server.engine.cancelled().len(), 2);
}

#[tokio::test]
async fn a_reader_that_does_not_read_does_not_stop_the_engine() {
    let script = Script { pace: Some(Duration::ZERO), context: 20_000, ..Default::default() };
    let server = Server::start(ServerConfig::default(), script).await;
    let mut body = endless();
    body["max_tokens"] = json!(15_000);
    let idle = server.connect("/v1/chat/completions", &body).await;
    let finished = async {
        while server.engine.stats().finished == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, finished).await.expect("the engine still runs");
    assert_eq!(server.engine.cancelled(), [], "the engine ran to the end");
    // Everything is still there for when the client wakes up.
    let chunks = chunks(&unchunked(&read_all(idle).await));
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn silence_is_filled_with_comments() {
    let config = ServerConfig { keep_alive: Duration::from_millis(20), ..Default::default() };
    let script = Script { pace: Some(Duration::from_millis(120)), ..Default::default() };
    let server = Server::start(config, script).await;
    let mut stream = server.connect("/v1/chat/completions", &endless()).await;
    read_until(&mut stream, ": keep-alive").await;
}

#[tokio::test]
async fn a_request_is_aborted_by_its_name() {
    let server = Server::start(ServerConfig::default(), slow()).await;
    let mut stream = server.connect("/v1/chat/completions", &endless()).await;
    read_until(&mut stream, "chatcmpl-mine").await;
    let answer = server.post("/abort_request", &json!({"rid": "chatcmpl-mine"})).await;
    assert!(answer.contains("\"aborted\":1"), "{answer}");
    let rest = read_all(stream).await;
    assert!(rest.contains("\"finish_reason\":\"abort\"") && rest.contains("[DONE]"), "{rest}");
}

#[tokio::test]
async fn draining_lets_running_requests_finish() {
    let mut server = Server::start(ServerConfig::default(), slow()).await;
    let mut body = endless();
    body["max_tokens"] = json!(40);
    let mut stream = server.connect("/v1/chat/completions", &body).await;
    let begun = read_until(&mut stream, "chatcmpl-mine").await;
    let address = server.address;
    server.stop();
    let rest = read_all(stream).await;
    let chunks = chunks(&unchunked(&(begun + &rest)));
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
    timeout(PATIENCE, server.task).await.expect("no end").unwrap().unwrap();
    assert!(TcpStream::connect(address).await.is_err(), "nobody listens any more");
}

#[tokio::test]
async fn draining_gives_up_after_its_time() {
    let config = ServerConfig { drain_timeout: Duration::from_millis(100), ..Default::default() };
    let mut server = Server::start(config, slow()).await;
    let mut stream = server.connect("/v1/chat/completions", &endless()).await;
    read_until(&mut stream, "chatcmpl-mine").await;
    server.stop();
    let rest = read_all(stream).await;
    assert!(rest.contains("\"finish_reason\":\"abort\""), "{rest}");
    assert_eq!(server.engine.cancelled().len(), 1);
    timeout(PATIENCE, server.task).await.expect("no end").unwrap().unwrap();
}

#[tokio::test]
async fn a_body_far_too_large_still_gets_its_answer() {
    let config = ServerConfig { max_body_bytes: Some(1 << 20), ..Default::default() };
    let server = Server::start(config, Script::default()).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let size = 100 << 20;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {size}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let block = vec![b' '; 1 << 20];
    for _ in 0..100 {
        stream.write_all(&block).await.unwrap();
    }
    let answer = read_all(stream).await;
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    assert!(answer.contains("body_too_large"), "{answer}");
}

/// Clients send the head first. A refusal that needs no body must not cost them the connection.
#[tokio::test]
async fn a_refusal_before_the_body_keeps_the_connection() {
    let keys = oscar_server::Keys::new(
        oscar_server::ApiKey::parse_list("k", oscar_server::Role::User, "keys").unwrap(),
    );
    let server = Server::start(ServerConfig { keys, ..ServerConfig::default() }, Script::default()).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let body = "{\"a\": \"some text\"}";
    for (path, key, kind, status) in [
        ("/v1/nothing", "k", "application/json", "404"),
        ("/health", "k", "application/json", "405"),
        ("/v1/completions", "wrong", "application/json", "401"),
        ("/v1/completions", "k", "text/plain", "415"),
        ("/v1/completions", "k", "application/json", "400"),
    ] {
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        // The server has the head before it gets the body.
        tokio::time::sleep(Duration::from_millis(20)).await;
        stream.write_all(body.as_bytes()).await.unwrap();
        let answer = read_until(&mut stream, "}}").await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{path}: {answer}");
        assert!(!answer.to_lowercase().contains("connection: close"), "{path}: {answer}");
    }
    // A long body is not waited for: the answer says that the connection ends.
    let head =
        "POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\nx-api-key: k\r\ncontent-length: 1000000\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let answer = read_until(&mut stream, "}}").await;
    assert!(answer.to_lowercase().contains("connection: close"), "{answer}");
}
