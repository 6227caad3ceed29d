//! The same engine behind the HTTP server, as the driver sees it: what `--http` measures against the bare engine.
//!
//! **Invariant:** every request is a streamed completion on a connection of its own over the loopback, so the time
//! holds everything a client pays for: connection, JSON, text, one event a token.

use anyhow::{Context, Result};
use oscar_engine::{
    EngineApi, EngineInfo, EngineStats, Event, EventSink, FinishReason, Health, Request, RequestError,
    RequestId, Usage,
};
use oscar_server::{GenerationDefaults, ServerConfig, serve_on};
use oscar_text::ModelText;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use tokio::sync::oneshot;

/// A server in this process. Ends when dropped.
pub struct HttpEngine {
    engine: Arc<dyn EngineApi>,
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    server: Option<std::thread::JoinHandle<()>>,
}

impl HttpEngine {
    pub fn start(engine: Arc<dyn EngineApi>, text: Arc<ModelText>) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let listener = runtime.block_on(tokio::net::TcpListener::bind(("127.0.0.1", 0)))?;
        let address = listener.local_addr()?;
        let (stop, stopped) = oneshot::channel::<()>();
        let theirs = engine.clone();
        let server = std::thread::spawn(move || {
            let config = ServerConfig { access_log: false, ..ServerConfig::default() };
            let ended = async {
                // Told to stop, or nobody is left to tell.
                let _ = stopped.await;
            };
            let served = serve_on(
                listener,
                config,
                theirs,
                text,
                GenerationDefaults::default(),
                ended,
                std::future::pending(),
            );
            if let Err(error) = runtime.block_on(served) {
                eprintln!("the HTTP server failed: {error}");
            }
        });
        Ok(Self { engine, address, stop: Some(stop), server: Some(server) })
    }
}

impl Drop for HttpEngine {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(server) = self.server.take() {
            // Its failure has been printed.
            let _ = server.join();
        }
    }
}

impl EngineApi for HttpEngine {
    fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<(), RequestError> {
        let address = self.address;
        std::thread::spawn(move || {
            if let Err(error) = complete(address, &request, &*sink) {
                sink.send(Event::Failed(RequestError::Engine(format!("over HTTP: {error:#}"))));
            }
        });
        Ok(())
    }

    fn cancel(&self, id: RequestId) {
        self.engine.cancel(id);
    }

    fn flush_cache(&self) -> usize {
        self.engine.flush_cache()
    }

    fn stats(&self) -> EngineStats {
        self.engine.stats()
    }

    fn drain(&self) {
        self.engine.drain();
    }

    fn info(&self) -> &EngineInfo {
        self.engine.info()
    }

    fn health(&self) -> Health {
        self.engine.health()
    }
}

/// Sends one request and turns what comes back into events; token ids are not in the answer.
fn complete(address: SocketAddr, request: &Request, sink: &dyn EventSink) -> Result<()> {
    let body =
        json!({"prompt": request.prompt(), "max_tokens": request.params().max_tokens, "temperature": 0,
        "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true}})
        .to_string();
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    let mut answer = BufReader::new(stream);
    let mut status = String::new();
    answer.read_line(&mut status)?;
    anyhow::ensure!(status.contains(" 200 "), "{}", status.trim());
    let (mut sent, mut usage) = (0, Usage::default());
    let token = || sink.send(Event::Token { choice: 0, token: 0, logprobs: None });
    for line in answer.lines() {
        let line = line?;
        let Some(data) = line.strip_prefix("data: ").filter(|data| *data != "[DONE]") else { continue };
        let chunk: Value = serde_json::from_str(data).with_context(|| data.to_owned())?;
        if chunk["choices"].as_array().is_some_and(|c| !c.is_empty()) {
            // The last chunk carries the end, not a token.
            if chunk["choices"][0]["finish_reason"].is_null() {
                sent += 1;
                token();
            }
        } else {
            let count = |field: &Value| field.as_u64().unwrap_or_default() as usize;
            usage.prompt_tokens = count(&chunk["usage"]["prompt_tokens"]);
            usage.completion_tokens = count(&chunk["usage"]["completion_tokens"]);
            usage.cached_tokens = count(&chunk["usage"]["prompt_tokens_details"]["cached_tokens"]);
        }
    }
    // Tokens whose text had to wait for the next one came in its chunk.
    for _ in sent..usage.completion_tokens {
        token();
    }
    sink.send(Event::Finished { choice: 0, reason: FinishReason::Length });
    sink.send(Event::Done(usage));
    Ok(())
}
