//! What an operator may tell the engine.

use axum::Json;
use axum::extract::{Extension, State};
use serde_json::{Value, json};

use crate::app::Shared;
use crate::body::{RawBody, parse_object};
use crate::error::ApiError;
use crate::keys::Caller;
use crate::middleware::forbidden;
use crate::schema::{self, Field, Kind};

pub const ABORT_FIELDS: &[Field] = &[
    Field::new("rid", Kind::Text, "The request's `id` or its x-request-id"),
    Field::new("request_id", Kind::Text, "Another name for rid"),
    Field::new("abort_all", Kind::Boolean, "Abort every request"),
];

/// Forgets every cached prefix that no running request uses.
pub async fn flush_cache(State(app): State<Shared>) -> Json<Value> {
    // The engine answers between two steps.
    let engine = app.engine.clone();
    let freed = tokio::task::spawn_blocking(move || engine.flush_cache()).await.unwrap_or(0);
    Json(json!({"success": true, "freed_pages": freed, "message": format!("{freed} pages freed")}))
}

/// Ends requests that the caller's tenant started; an operator ends those of all. Unknown names end nothing, which is
/// not an error: the request may just have finished.
pub async fn abort_request(
    State(app): State<Shared>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Json<Value>, ApiError> {
    let body = parse_object(body.bytes(), &[ABORT_FIELDS])?;
    schema::check(&[ABORT_FIELDS], &body)?;
    let name = ["rid", "request_id"].iter().find_map(|field| body.get(*field).and_then(Value::as_str));
    let all = body.get("abort_all").and_then(Value::as_bool).unwrap_or(false);
    let ids = match (all, name) {
        (true, _) if !caller.is_operator() => {
            return Err(forbidden(&caller, "abort_all ends the requests of all tenants"));
        }
        (true, _) => app.running.all(),
        (false, Some(name)) => app.running.find(name, &caller),
        (false, None) => return Err(ApiError::param("rid", "is missing: name a request, or set abort_all")),
    };
    ids.iter().for_each(|id| app.engine.cancel(*id));
    Ok(Json(json!({"success": true, "aborted": ids.len()})))
}
