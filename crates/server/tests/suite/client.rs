//! Talks to a router in process.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use http_body_util::BodyExt;
use oscar_server::{GenerationDefaults, ServerConfig, router};
use oscar_text::ModelText;
use serde_json::Value;
use tower::ServiceExt;

use crate::fake::{END_OF_TURN, FakeEngine, Script, text};

pub struct Client {
    pub engine: FakeEngine,
    router: Router,
}

pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
}

pub fn defaults() -> GenerationDefaults {
    GenerationDefaults { stop_tokens: vec![END_OF_TURN], ..Default::default() }
}

impl Client {
    pub fn new() -> Self {
        Self::with(ServerConfig::default(), Script::default())
    }

    pub fn saying(reply: &str) -> Self {
        Self::with(ServerConfig::default(), Script { replies: vec![reply.to_owned()], ..Default::default() })
    }

    pub fn with(config: ServerConfig, script: Script) -> Self {
        Self::with_text(config, script, text())
    }

    pub fn with_text(config: ServerConfig, script: Script, text: ModelText) -> Self {
        let engine = FakeEngine::new(script, &text.tokenizer);
        let router = router(config, Arc::new(engine.clone()), Arc::new(text), defaults());
        Self { engine, router }
    }

    /// The paths of all registered routes, as OpenAPI writes them. The router lists them only in its
    /// debug output.
    pub fn registered_paths(&self) -> BTreeSet<String> {
        let debug = format!("{:?}", self.router);
        let (_, paths) = debug.split_once("Node { paths: {").expect("the router's paths");
        let (paths, _) = paths.split_once("fallback_router").expect("the end of the router's paths");
        paths.split('"').skip(1).step_by(2).map(|path| path.replace("{*", "{")).collect()
    }

    pub async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes().to_vec();
        Answer { status: parts.status, headers: parts.headers, body }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(Request::get(path).body(Body::empty()).unwrap()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_raw(path, body.to_string()).await
    }

    pub async fn post_raw(&self, path: &str, body: impl Into<Body>) -> Answer {
        self.send(Request::post(path).header("content-type", "application/json").body(body.into()).unwrap())
            .await
    }

    pub async fn chat(&self, body: &Value) -> Answer {
        self.post("/v1/chat/completions", body).await
    }

    pub async fn complete(&self, body: &Value) -> Answer {
        self.post("/v1/completions", body).await
    }
}

impl Answer {
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The body of a success.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        self.json()
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Checks the status and the form of an error, and returns its object.
    #[track_caller]
    pub fn error(&self, status: u16) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.text());
        let error = self.json()["error"].clone();
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{error}");
        assert!(error["type"].is_string(), "{error}");
        assert!(error.as_object().unwrap().contains_key("param"), "{error}");
        assert!(error.as_object().unwrap().contains_key("code"), "{error}");
        error
    }

    /// The JSON chunks of a stream, which must end with `[DONE]`.
    #[track_caller]
    pub fn chunks(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.text());
        assert_eq!(self.headers["content-type"], "text/event-stream");
        chunks(&self.text())
    }
}

#[track_caller]
pub fn chunks(stream: &str) -> Vec<Value> {
    let mut events: Vec<&str> =
        stream.split("\n\n").filter_map(|event| event.trim().strip_prefix("data: ")).collect();
    assert_eq!(events.pop(), Some("[DONE]"), "{stream}");
    events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
}
