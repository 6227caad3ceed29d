//! `POST /tokenize` and `/detokenize`, in the words of vLLM (`prompt`, `messages`) and of llama.cpp (`content`).

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use super::chat_completions::convert::{render, typed};
use super::chat_completions::types::ChatFields;
use super::chat_completions::validate;
use super::sampling::check_tokens;
use crate::app::{App, Shared};
use crate::body::{RawBody, off_thread, parse_object};
use crate::error::ApiError;
use crate::schema::{self, Field, Kind};

pub const TOKENIZE_FIELDS: &[Field] = &[
    Field::new("model", Kind::Text, "Name of the model; the served one if absent"),
    Field::new("prompt", Kind::Text, "Text to tokenize"),
    Field::new("content", Kind::Text, "Another name for prompt"),
    Field::new("messages", Kind::Objects, "A conversation to render with the chat template and tokenize"),
    Field::new(
        "add_special_tokens",
        Kind::Boolean,
        "Apply the tokenizer's frame; true if absent, but for messages and content",
    ),
    Field::new("add_special", Kind::Boolean, "Another name for add_special_tokens"),
    Field::new("return_token_strs", Kind::Boolean, "Also list the tokens as text"),
    Field::new("with_pieces", Kind::Boolean, "Tokens as objects with `id` and `piece`"),
    Field::new("add_generation_prompt", Kind::Boolean, "Open the assistant's turn; true if absent"),
    Field::new("continue_final_message", Kind::Boolean, "End inside of the last message"),
    Field::new("tools", Kind::Objects, "Tool descriptions for the template"),
    Field::new("documents", Kind::Objects, "Documents for the template"),
    Field::new("chat_template", Kind::Text, "As in a chat"),
    Field::new("chat_template_kwargs", Kind::Object, "As in a chat"),
    Field::new("enable_thinking", Kind::Boolean, "As in a chat"),
];

pub const DETOKENIZE_FIELDS: &[Field] = &[
    Field::new("model", Kind::Text, "Name of the model; the served one if absent"),
    Field::new("tokens", Kind::Tokens, "Token ids").required(),
    Field::new("skip_special_tokens", Kind::Boolean, "Leave special tokens out; false if absent"),
];

pub async fn tokenize(State(app): State<Shared>, RawBody(body): RawBody) -> Result<Json<Value>, ApiError> {
    let worker = app.clone();
    off_thread(&app, body.len(), move || tokenized(&worker, &body)).await.map(Json)
}

fn tokenized(app: &App, body: &[u8]) -> Result<Value, ApiError> {
    let body = parse_object(body)?;
    schema::check(&[TOKENIZE_FIELDS], &body)?;
    let text = |name: &str| body.get(name).and_then(Value::as_str);
    let flag = |name: &str| body.get(name).and_then(Value::as_bool);
    app.served_model(text("model"))?;
    let framed = flag("add_special_tokens").or(flag("add_special"));
    let (param, source, add_special) = match (text("prompt"), text("content")) {
        (Some(prompt), _) => ("prompt", prompt.to_owned(), framed.unwrap_or(true)),
        (None, Some(content)) => ("content", content.to_owned(), framed.unwrap_or(false)),
        (None, None) if body.get("messages").is_some_and(Value::is_array) => {
            let whole = Value::Object(body.clone());
            let mut fields = typed::<ChatFields>(&whole)?;
            validate::combinations(&fields)?;
            let messages = Value::Array(validate::messages(std::mem::take(&mut fields.messages))?);
            ("messages", render(app, &fields, &messages)?, framed.unwrap_or(false))
        }
        (None, None) => {
            return Err(ApiError::param("prompt", "is missing: send prompt, content or messages"));
        }
    };
    let tokenizer = &app.text.tokenizer;
    let ids = tokenizer.encode(&source, add_special).map_err(|error| ApiError::text(param, &error))?;
    let piece = |id: &u32| tokenizer.decode(&[*id], false).unwrap_or_default();
    let tokens: Value = match flag("with_pieces") {
        Some(true) => ids.iter().map(|id| json!({"id": id, "piece": piece(id)})).collect(),
        _ => json!(ids),
    };
    let mut answer =
        json!({"count": ids.len(), "max_model_len": app.engine.info().context, "tokens": tokens});
    if flag("return_token_strs") == Some(true) {
        answer["token_strs"] = ids.iter().map(|id| tokenizer.id_to_token(*id).unwrap_or_default()).collect();
    }
    Ok(answer)
}

pub async fn detokenize(State(app): State<Shared>, RawBody(body): RawBody) -> Result<Json<Value>, ApiError> {
    let worker = app.clone();
    off_thread(&app, body.len(), move || detokenized(&worker, &body)).await.map(Json)
}

fn detokenized(app: &App, body: &[u8]) -> Result<Value, ApiError> {
    let body = parse_object(body)?;
    schema::check(&[DETOKENIZE_FIELDS], &body)?;
    app.served_model(body.get("model").and_then(Value::as_str))?;
    let listed = body.get("tokens").and_then(Value::as_array).into_iter().flatten();
    let ids: Vec<u32> = listed.filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect();
    check_tokens("tokens", &ids, app.engine.info().vocab_size)?;
    let skip = body.get("skip_special_tokens").and_then(Value::as_bool).unwrap_or(false);
    let text = app.text.tokenizer.decode(&ids, skip).map_err(|error| ApiError::text("tokens", &error))?;
    Ok(json!({"prompt": text, "content": text}))
}
