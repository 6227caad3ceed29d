//! Is it alive, does it take work, how is it doing.

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use oscar_engine::Health;
use serde_json::json;

use crate::app::Shared;
use crate::error::ApiError;

/// 200 while the engine works, 503 once its thread has ended or is stuck; needs no key, and says
/// no more than that.
pub async fn live(State(app): State<Shared>) -> Response {
    match app.engine.health() {
        Health::Alive => status(StatusCode::OK, "ok"),
        failed => unhealthy(&failed),
    }
}

/// 200 while new requests are taken, 503 while draining and when the engine does not work.
pub async fn ready(State(app): State<Shared>) -> Response {
    match app.engine.health() {
        Health::Alive if app.is_draining() => status(StatusCode::SERVICE_UNAVAILABLE, "draining"),
        Health::Alive => status(StatusCode::OK, "ready"),
        failed => unhealthy(&failed),
    }
}

fn unhealthy(health: &Health) -> Response {
    let name = if matches!(health, Health::Stuck { .. }) { "stuck" } else { "dead" };
    status(StatusCode::SERVICE_UNAVAILABLE, name)
}

fn status(code: StatusCode, status: &str) -> Response {
    (code, axum::Json(json!({"status": status}))).into_response()
}

pub async fn metrics(State(app): State<Shared>) -> Result<Response, ApiError> {
    let text =
        app.metrics.encode().map_err(|error| ApiError::Internal(format!("writing metrics: {error}")))?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}
