//! The routes. An endpoint that generates is a folder: `types` (the declared fields and the wire),
//! `validate` (refusals), `prepare` (from the body to engine requests) and the handler in `mod`.

mod blocks;
mod chat_completions;
mod completions;
mod control;
mod health;
mod info;
mod messages;
mod models;
mod openapi;
pub mod pages;
mod responses;
mod sampling;
mod stream;
mod tokenize;
mod usage;

use axum::Router;
use axum::middleware::from_fn;
use axum::routing::{get, post};

use crate::app::Shared;
use crate::middleware::mark_route;

/// Every route of the server. `openapi::ROUTES` describes them; a test holds the two together.
pub fn all() -> Router<Shared> {
    Router::new()
        .route("/", get(pages::chat))
        .route("/docs", get(pages::docs))
        .route("/openapi.json", get(openapi::document))
        .route("/health", get(health::live))
        .route("/ready", get(health::ready))
        .route("/metrics", get(health::metrics))
        .route("/version", get(info::version))
        .route("/server_info", get(info::server))
        .route("/get_server_info", get(info::server))
        .route("/model_info", get(info::model))
        .route("/get_model_info", get(info::model))
        .route("/v1/loads", get(info::loads))
        .route("/loads", get(info::loads))
        .route("/internal/state", get(info::state))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/v1/chat/completions", post(chat_completions::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/messages", post(messages::create))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/responses", post(responses::create))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/flush_cache", post(control::flush_cache))
        .route("/abort_request", post(control::abort_request))
        .route_layer(from_fn(mark_route))
}
