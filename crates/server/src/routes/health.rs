//! Is it alive, does it take work, how is it doing.

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::app::Shared;
use crate::error::ApiError;

/// Alive as long as it answers; needs no key.
pub async fn live() -> Response {
    axum::Json(json!({"status": "ok"})).into_response()
}

/// 200 while new requests are taken, 503 while draining.
pub async fn ready(State(app): State<Shared>) -> Response {
    match app.is_draining() {
        false => axum::Json(json!({"status": "ready"})).into_response(),
        true => (StatusCode::SERVICE_UNAVAILABLE, axum::Json(json!({"status": "draining"}))).into_response(),
    }
}

pub async fn metrics(State(app): State<Shared>) -> Result<Response, ApiError> {
    let text =
        app.metrics.encode().map_err(|error| ApiError::Internal(format!("writing metrics: {error}")))?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}
