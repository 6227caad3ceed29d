//! Is it alive, does it take work, how is it doing.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use oscar_engine::Health;
use serde_json::json;

use crate::app::Shared;
use crate::error::ApiError;
use crate::metrics::{MEDIA_TYPE, OPENMETRICS_MEDIA_TYPE, wants_openmetrics};

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

/// The classic Prometheus text, or OpenMetrics where `Accept` prefers it.
pub async fn metrics(State(app): State<Shared>, headers: HeaderMap) -> Result<Response, ApiError> {
    let accepts = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let (kind, text) = match wants_openmetrics(&accepts.collect::<Vec<_>>().join(",")) {
        true => (OPENMETRICS_MEDIA_TYPE, app.metrics.openmetrics()),
        false => (MEDIA_TYPE, app.metrics.classic()),
    };
    let text = text.map_err(|error| ApiError::Internal(format!("writing metrics: {error}")))?;
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}
