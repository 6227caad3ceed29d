//! `GET /openapi.json`, written from the declarations that the bodies are parsed by.

use axum::Json;
use axum::extract::State;
use serde_json::{Map, Value, json};

use super::{chat_completions, completions, control, messages, responses, tokenize};
use crate::app::Shared;
use crate::schema::{Field, RequestBody};

/// A route as it is documented.
pub struct Described {
    pub method: &'static str,
    pub path: &'static str,
    about: &'static str,
    fields: &'static [&'static [Field]],
}

const fn get(path: &'static str, about: &'static str) -> Described {
    Described { method: "get", path, about, fields: &[] }
}

const fn post(path: &'static str, about: &'static str, fields: &'static [&'static [Field]]) -> Described {
    Described { method: "post", path, about, fields }
}

pub const ROUTES: &[Described] = &[
    post("/v1/chat/completions", "Answer a conversation", chat_completions::types::ChatBody::TABLES),
    post("/v1/completions", "Continue text or tokens", completions::types::CompletionBody::TABLES),
    post(
        "/v1/messages",
        "Answer a conversation, as Anthropic has it",
        messages::convert::MessagesBody::TABLES,
    ),
    post(
        "/v1/messages/count_tokens",
        "Tokens of such a conversation",
        messages::convert::MessagesBody::TABLES,
    ),
    post(
        "/v1/responses",
        "Answer a conversation, as OpenAI's Responses have it",
        responses::convert::ResponsesBody::TABLES,
    ),
    get("/v1/models", "The model and its aliases"),
    get("/v1/models/{id}", "One of them"),
    post("/tokenize", "Text or messages to token ids", tokenize::TokenizeBody::TABLES),
    post("/detokenize", "Token ids to text", tokenize::DetokenizeBody::TABLES),
    get("/health", "Alive; needs no key"),
    get("/ready", "200 while requests are taken, 503 while draining"),
    get("/metrics", "Numbers for Prometheus"),
    get("/version", "The server's version"),
    get("/server_info", "What is running"),
    get("/get_server_info", "Another name for /server_info"),
    get("/model_info", "The model"),
    get("/get_model_info", "Another name for /model_info"),
    get("/v1/loads", "The load, for routers"),
    get("/loads", "Another name for /v1/loads"),
    get("/internal/state", "What the web page draws; may change without notice"),
    post("/flush_cache", "Forget cached prefixes that nothing uses", &[]),
    post("/abort_request", "End a request", control::AbortBody::TABLES),
    get("/openapi.json", "This document"),
    get("/docs", "This document, to read"),
    get("/", "The web page"),
];

pub async fn document(State(app): State<Shared>) -> Json<Value> {
    let mut paths = Map::new();
    for route in ROUTES {
        let entry = paths.entry(route.path).or_insert_with(|| json!({}));
        entry[route.method] = operation(route);
    }
    Json(json!({
        "openapi": "3.1.0",
        "info": {
            "title": "OSCAR",
            "version": env!("CARGO_PKG_VERSION"),
            "description": format!(
                "The OpenAI API of {}, whose key-value cache is {}.", app.engine.info().model,
                app.engine.info().kv_format
            ),
        },
        "paths": paths,
        "security": [{"key": []}],
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": error_schema()},
        },
    }))
}

fn operation(route: &Described) -> Value {
    let refused = json!({
        "description": "Refused; the error says what is wrong and where",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    });
    let mut operation = json!({
        "summary": route.about,
        "responses": {"200": {"description": "Done"}, "4XX": refused},
    });
    if route.path.ends_with("{id}") {
        let schema = json!({"type": "string"});
        operation["parameters"] = json!([{"name": "id", "in": "path", "required": true, "schema": schema}]);
    }
    if route.path == "/health" {
        operation["security"] = json!([]);
    }
    let fields: Vec<&Field> = route.fields.iter().copied().flatten().collect();
    if !fields.is_empty() {
        operation["requestBody"] = json!({
            "required": true,
            "content": {"application/json": {"schema": body_schema(&fields)}},
        });
    }
    operation
}

fn body_schema(fields: &[&Field]) -> Value {
    let mut properties = Map::new();
    for field in fields {
        let mut schema = field.kind.json_schema();
        schema["description"] = json!(field.about);
        properties.insert(field.name.to_owned(), schema);
    }
    let required: Vec<&str> = fields.iter().filter(|field| field.required).map(|field| field.name).collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": true})
}

fn error_schema() -> Value {
    let nullable = json!({"type": ["string", "null"]});
    json!({"type": "object", "properties": {"error": {"type": "object", "properties": {
        "message": {"type": "string"}, "type": {"type": "string"}, "param": nullable, "code": nullable}}}})
}
