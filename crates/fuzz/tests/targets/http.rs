//! Bodies of requests, and key files.

#[path = "../../../server/tests/suite/fake.rs"]
#[allow(dead_code)]
mod fake;

use crate::corpus;
use axum::Router;
use axum::body::Body;
use axum::http::Request;
use fake::{END_OF_TURN, FakeEngine, Script};
use http_body_util::BodyExt;
use oscar_fuzz::fuzz;
use oscar_server::{ApiKey, GenerationDefaults, ServerConfig, router};
use std::sync::Arc;
use tower::ServiceExt;

const ROUTES: [&str; 10] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/abort_request",
    "/flush_cache",
];

fn server() -> Router {
    let text = fake::text();
    let engine = FakeEngine::new(Script::default(), &text.tokenizer);
    let defaults = GenerationDefaults { stop_tokens: vec![END_OF_TURN], ..Default::default() };
    let config = ServerConfig { allow_request_template: true, ..Default::default() };
    router(config, Arc::new(engine), Arc::new(text), defaults)
}

#[test]
fn requests() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let server = server();
    fuzz("requests", &corpus("corpus/request", ".json"), 1500, |body| {
        for route in ROUTES {
            let request = Request::post(route).header("content-type", "application/json");
            let request = request.body(Body::from(body.to_vec())).unwrap();
            let answer = runtime.block_on(async {
                let (parts, body) = server.clone().oneshot(request).await.unwrap().into_parts();
                (parts.status, body.collect().await.unwrap().to_bytes())
            });
            assert!(!answer.0.is_server_error(), "{route} {}: {:?}", answer.0, answer.1);
            assert!(answer.0.is_success() || answer.1.starts_with(b"{"), "{route}: {:?}", answer.1);
        }
    });
}

#[test]
fn key_files() {
    fuzz("key_files", &corpus("corpus/keys", ".txt"), 20_000, |bytes| {
        let text = String::from_utf8_lossy(bytes);
        if let Ok(keys) = ApiKey::parse_file(&text, "keys") {
            assert!(!keys.is_empty());
        }
    });
}
