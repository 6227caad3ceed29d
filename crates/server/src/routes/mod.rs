//! The routes. An endpoint that generates is a folder: `types` (the declared fields and the wire),
//! `validate` (refusals), `prepare` (from the body to engine requests) and the handler in `mod`.

mod blocks;
mod chat_completions;
pub mod completions;
mod control;
mod embeddings;
mod frame;
mod health;
mod info;
mod lowered;
mod messages;
mod models;
mod openapi;
pub mod pages;
mod render;
mod responses;
mod sampling;
mod stream;
mod tokenize;
pub mod transfer;
mod usage;

pub use messages::in_anthropics_form;

use axum::Router;
use axum::middleware::from_fn;
use axum::routing::{self, MethodRouter};

use crate::app::Shared;
use crate::middleware::mark_route;
use crate::refused;
use crate::schema::{Field, RequestBody};

/// Who may call a route once keys are configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Anyone,
    /// Callers with a key.
    Users,
    /// Callers whose key has the operator's role: the route shows or changes the state of all
    /// tenants.
    Operators,
}

/// A route: the router, the checks of keys and the OpenAPI document are made from it.
pub struct Route {
    /// In lower case, as OpenAPI has it.
    method: &'static str,
    path: &'static str,
    handler: fn() -> MethodRouter<Shared>,
    access: Access,
    about: &'static str,
    /// The fields of the body.
    fields: &'static [&'static [Field]],
}

macro_rules! route {
    ($method:ident $path:literal, $handler:path, $access:ident, $about:literal) => {
        route!(@fields $method $path, $handler, $access, $about, &[])
    };
    ($method:ident $path:literal, $handler:path, $access:ident, $about:literal, $body:ty) => {
        route!(@fields $method $path, $handler, $access, $about, <$body>::TABLES)
    };
    (@fields $method:ident $path:literal, $handler:path, $access:ident, $about:literal, $fields:expr) => {
        Route {
            method: stringify!($method),
            path: $path,
            handler: || routing::$method($handler),
            access: Access::$access,
            about: $about,
            fields: $fields,
        }
    };
}

/// Every route of the server: method, path, handler, access, description and, where there is one,
/// the type of the body.
#[rustfmt::skip]
const ROUTES: &[Route] = &[
    route!(post "/v1/chat/completions", chat_completions::create, Users,
        "Answer a conversation", chat_completions::types::ChatBody),
    route!(post "/v1/completions", completions::create, Users,
        "Continue text or tokens", completions::types::CompletionBody),
    route!(post "/v1/chat/completions/render", render::chat, Users,
        "The tokens of a conversation, without an answer", chat_completions::types::ChatBody),
    route!(post "/v1/completions/render", render::completion, Users,
        "The tokens of each prompt, without an answer", completions::types::CompletionBody),
    route!(post "/v1/messages", messages::create, Users,
        "Answer a conversation, as Anthropic has it", messages::convert::MessagesBody),
    route!(post "/v1/messages/count_tokens", messages::count_tokens, Users,
        "Tokens of such a conversation", messages::convert::MessagesBody),
    route!(post "/v1/responses", responses::create, Users,
        "Answer a conversation, as OpenAI's Responses have it", responses::convert::ResponsesBody),
    route!(post "/v1/responses/input_tokens", responses::input_tokens, Users,
        "Tokens of such a conversation", responses::convert::ResponsesBody),
    route!(post "/v1/embeddings", embeddings::create, Users,
        "Vectors of texts: the last token's hidden state, of length 1", embeddings::EmbeddingsBody),
    route!(get "/v1/models", models::list, Users, "The model and its aliases"),
    route!(get "/v1/models/{*id}", models::one, Users, "One of them"),
    route!(post "/tokenize", tokenize::tokenize, Users,
        "Text or messages to token ids", tokenize::TokenizeBody),
    route!(post "/detokenize", tokenize::detokenize, Users,
        "Token ids to text", tokenize::DetokenizeBody),
    route!(get "/health", health::live, Anyone, "200 while the engine works, else 503; needs no key"),
    route!(get "/ready", health::ready, Anyone, "200 while requests are taken, else 503; needs no key"),
    route!(get "/metrics", health::metrics, Operators, "Numbers for Prometheus"),
    route!(get "/version", info::version, Users, "The server's version"),
    route!(get "/server_info", info::server, Operators, "What is running"),
    route!(get "/get_server_info", info::server, Operators, "Another name for /server_info"),
    route!(get "/model_info", info::model, Users, "The model"),
    route!(get "/get_model_info", info::model, Users, "Another name for /model_info"),
    route!(get "/v1/loads", info::loads, Operators, "The load, for routers"),
    route!(get "/loads", info::loads, Operators, "Another name for /v1/loads"),
    route!(get "/internal/state", info::state, Operators,
        "What the web page draws; may change without notice"),
    route!(post "/flush_cache", control::flush_cache, Operators,
        "Forget cached prefixes that nothing uses"),
    route!(post "/abort_request", control::abort_request, Users, "End a request", control::AbortBody),
    route!(get "/openapi.json", openapi::document, Users, "This document"),
    route!(get "/docs", pages::docs, Users, "This document, to read"),
    route!(get "/", pages::chat, Users, "The web page"),
];

/// The router of all routes.
pub fn all() -> Router<Shared> {
    let add = |router: Router<Shared>, route: &Route| router.route(route.path, (route.handler)());
    ROUTES.iter().fold(Router::new(), add).route_layer(from_fn(mark_route))
}

/// Path and fields of the routes that give answers of the model.
pub fn generating() -> impl Iterator<Item = (&'static str, &'static [&'static [Field]])> {
    ROUTES.iter().filter(|route| refused::generates(route.fields)).map(|route| (route.path, route.fields))
}

/// Who may ask for a path; an unknown one needs a key as well.
pub fn access(path: &str) -> Access {
    ROUTES.iter().find(|route| route.path == path).map_or(Access::Users, |route| route.access)
}
