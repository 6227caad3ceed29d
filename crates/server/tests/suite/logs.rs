//! What the server writes to its log.

use std::io::Write;
use std::sync::{Arc, Mutex};

use axum::body::Body;
use axum::http::Request;
use serde_json::json;
use tracing::Level;

use crate::client::Client;
use crate::fake::Script;

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Collects the lines that this thread logs until the guard is dropped.
fn collect(level: Level) -> (Lines, tracing::subscriber::DefaultGuard) {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    (lines, tracing::subscriber::set_default(subscriber))
}

impl Lines {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

#[tokio::test]
async fn polling_does_not_fill_the_log_at_the_default_level() {
    let client = Client::new();
    let poll = async || {
        for path in ["/internal/state", "/metrics", "/health", "/ready"] {
            assert_eq!(client.get(path).await.status, 200, "{path}");
        }
    };
    let (lines, guard) = collect(Level::INFO);
    poll().await;
    client.get("/v1/models").await.ok();
    drop(guard);
    let text = lines.text();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("/v1/models"), "{text}");
    let (lines, _guard) = collect(Level::DEBUG);
    poll().await;
    assert_eq!(lines.text().lines().count(), 4, "they are there for those who ask: {}", lines.text());
}

#[tokio::test]
async fn lines_about_a_request_name_it() {
    let client = Client::with(Default::default(), Script { fail_after: Some(2), ..Script::default() });
    for stream in [false, true] {
        let (lines, _guard) = collect(Level::INFO);
        let name = format!("client-{stream}");
        let body = json!({"messages": [{"role": "user", "content": "Hi"}], "stream": stream});
        let request = Request::post("/v1/chat/completions")
            .header("content-type", "application/json")
            .header("x-request-id", &name)
            .body(Body::from(body.to_string()));
        client.send(request.unwrap()).await;
        let text = lines.text();
        let failed: Vec<&str> = text.lines().filter(|line| line.contains("scripted")).collect();
        assert!(!failed.is_empty() && failed.iter().all(|line| line.contains(&name)), "{text}");
    }
}
