//! The server without a socket, for programs that answer requests from files.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::header;
use http_body_util::BodyExt;
use oscar_engine::EngineApi;
use oscar_text::ModelText;
use serde_json::Value;
use tower::ServiceExt;

use crate::error::ApiError;
use crate::{GenerationDefaults, ServerConfig, router};

/// All routes of a server. Clones share it.
#[derive(Clone)]
pub struct InProcess(Router);

/// An answer as a client would have received it.
#[derive(Clone, Debug, PartialEq)]
pub struct InProcessAnswer {
    pub status: u16,
    pub request_id: String,
    pub body: Value,
}

impl InProcess {
    pub fn new(
        config: ServerConfig,
        engine: Arc<dyn EngineApi>,
        text: Arc<ModelText>,
        defaults: GenerationDefaults,
    ) -> Self {
        Self(router(config, engine, text, defaults))
    }

    /// Answers a POST request whose answer is JSON.
    pub async fn post(&self, path: &str, body: &Value) -> InProcessAnswer {
        let request = Request::post(path)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::HOST, "localhost")
            .body(Body::from(body.to_string()));
        let request = match request {
            Ok(request) => request,
            Err(error) => return failed(&ApiError::Internal(error.to_string())),
        };
        let response = match self.0.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        let status = response.status().as_u16();
        let id = response.headers().get("x-request-id").and_then(|id| id.to_str().ok());
        let request_id = id.unwrap_or_default().to_owned();
        let bytes = response.into_body().collect().await.map(|body| body.to_bytes());
        match bytes.map_err(|error| error.to_string()).and_then(|bytes| {
            serde_json::from_slice(&bytes).map_err(|error| format!("the answer is no JSON: {error}"))
        }) {
            Ok(body) => InProcessAnswer { status, request_id, body },
            Err(problem) => failed(&ApiError::Internal(problem)),
        }
    }
}

fn failed(error: &ApiError) -> InProcessAnswer {
    InProcessAnswer { status: error.status().as_u16(), request_id: String::new(), body: error.to_json() }
}
