//! `GET /v1/models`: the model under its name and its aliases.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::app::{App, Shared};
use crate::error::ApiError;
use crate::routes::info::kv_bits;

pub async fn list(State(app): State<Shared>) -> Json<Value> {
    let own = &app.engine.info().model;
    let mut names = vec![own];
    names.extend(app.config.model_aliases.iter().filter(|alias| *alias != own));
    let data: Vec<Value> = names.into_iter().map(|name| describe(&app, name)).collect();
    Json(json!({"object": "list", "data": data}))
}

pub async fn one(
    State(app): State<Shared>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(id) = id.map_err(|error| ApiError::param("id", error))?;
    let name = app.served_model(Some(&id))?;
    Ok(Json(describe(&app, &name)))
}

fn describe(app: &App, name: &str) -> Value {
    let info = app.engine.info();
    json!({
        "id": name, "object": "model", "created": app.started_at, "owned_by": "oscar",
        "root": info.model, "parent": null, "max_model_len": info.context, "context_length": info.context,
        "kv_format": info.kv_format, "kv_bits": kv_bits(info),
    })
}
