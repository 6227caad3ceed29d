//! Commands of an operator to the engine.

use axum::Json;
use axum::extract::{Extension, State};
use serde_json::{Value, json};

use crate::app::Shared;
use crate::body::RawBody;
use crate::error::ApiError;
use crate::keys::Caller;
use crate::middleware::forbidden;
use crate::schema::{RequestBody, request_fields};

pub type AbortBody = (AbortFields,);

request_fields! {
    /// The fields of `/abort_request`.
    pub struct AbortFields {
        /// The request's `id` or its x-request-id
        rid: Option<String>,
        /// Another name for rid
        request_id: Option<String>,
        /// Abort every request
        abort_all: Option<bool>,
    }
}

/// Forgets every cached prefix that no running request uses.
pub async fn flush_cache(State(app): State<Shared>) -> Json<Value> {
    // The engine answers between two steps.
    let engine = app.engine.clone();
    let freed = tokio::task::spawn_blocking(move || engine.flush_cache()).await.unwrap_or(0);
    Json(json!({"success": true, "freed_pages": freed, "message": format!("{freed} pages freed")}))
}

/// Ends requests that the caller's tenant started; an operator ends those of all. Unknown names end
/// nothing, which is not an error: the request may just have finished.
pub async fn abort_request(
    State(app): State<Shared>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Json<Value>, ApiError> {
    let (AbortFields { rid, request_id, abort_all },) =
        AbortBody::parse(body.bytes(), app.limits.value_bytes)?;
    let (all, name) = (abort_all.unwrap_or(false), rid.or(request_id));
    let ids = match (all, name) {
        (true, _) if !caller.is_operator() => {
            return Err(forbidden(&caller, "abort_all"));
        }
        (true, _) => app.running.all(),
        (false, Some(name)) => app.running.find(&name, &caller),
        (false, None) => return Err(ApiError::param("rid", "is missing: name a request, or set abort_all")),
    };
    ids.iter().for_each(|id| app.engine.cancel(*id));
    Ok(Json(json!({"success": true, "aborted": ids.len()})))
}
