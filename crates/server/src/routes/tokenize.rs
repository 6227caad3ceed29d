//! `POST /tokenize` and `/detokenize`, in the words of vLLM (`prompt`, `messages`) and of llama.cpp (`content`).

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use serde::Serialize;
use serde_json::{Value, json};

use super::chat_completions::convert::{render, typed};
use super::chat_completions::types::ChatFields;
use super::chat_completions::validate;
use super::sampling::check_tokens;
use crate::app::{App, Shared};
use crate::body::{RawBody, json_answer, off_thread, parse_object};
use crate::error::ApiError;
use crate::limits::{context_exceeded, encode};
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

pub async fn tokenize(State(app): State<Shared>, body: RawBody) -> Result<Response, ApiError> {
    let (worker, size) = (app.clone(), body.bytes().len());
    let answer = off_thread(&app, body, move |body| tokenized(&worker, body)).await?;
    json_answer(&app, size, answer).await
}

#[derive(Serialize)]
struct Tokenized {
    count: usize,
    max_model_len: usize,
    tokens: TokenList,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_strs: Option<Vec<String>>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum TokenList {
    Ids(Vec<u32>),
    Pieces(Vec<Piece>),
}

#[derive(Serialize)]
struct Piece {
    id: u32,
    piece: String,
}

fn tokenized(app: &App, body: &[u8]) -> Result<Tokenized, ApiError> {
    let body = parse_object(body, &[TOKENIZE_FIELDS])?;
    schema::check(&[TOKENIZE_FIELDS], &body)?;
    let text = |name: &str| body.get(name).and_then(Value::as_str);
    let flag = |name: &str| body.get(name).and_then(Value::as_bool);
    app.served_model(text("model"))?;
    let framed = flag("add_special_tokens").or(flag("add_special"));
    let rendered;
    let (param, source, add_special) = match (text("prompt"), text("content")) {
        (Some(prompt), _) => ("prompt", prompt, framed.unwrap_or(true)),
        (None, Some(content)) => ("content", content, framed.unwrap_or(false)),
        (None, None) if body.get("messages").is_some_and(Value::is_array) => {
            let whole = Value::Object(body.clone());
            let mut fields = typed::<ChatFields>(&whole)?;
            validate::combinations(&fields)?;
            let messages = Value::Array(validate::messages(std::mem::take(&mut fields.messages))?);
            rendered = render(app, &fields, &messages)?;
            ("messages", rendered.as_str(), framed.unwrap_or(false))
        }
        (None, None) => {
            return Err(ApiError::param("prompt", "is missing: send prompt, content or messages"));
        }
    };
    let tokenizer = &app.text.tokenizer;
    let ids = encode(app, param, source, add_special)?;
    let piece = |id: &u32| Piece { id: *id, piece: tokenizer.decode(&[*id], false).unwrap_or_default() };
    let spelled = |id: &u32| tokenizer.id_to_token(*id).unwrap_or_default();
    Ok(Tokenized {
        count: ids.len(),
        max_model_len: app.engine.info().context,
        token_strs: (flag("return_token_strs") == Some(true)).then(|| ids.iter().map(spelled).collect()),
        tokens: match flag("with_pieces") {
            Some(true) => TokenList::Pieces(ids.iter().map(piece).collect()),
            _ => TokenList::Ids(ids),
        },
    })
}

pub async fn detokenize(State(app): State<Shared>, body: RawBody) -> Result<Json<Value>, ApiError> {
    let worker = app.clone();
    off_thread(&app, body, move |body| detokenized(&worker, body)).await.map(Json)
}

fn detokenized(app: &App, body: &[u8]) -> Result<Value, ApiError> {
    let body = parse_object(body, &[DETOKENIZE_FIELDS])?;
    schema::check(&[DETOKENIZE_FIELDS], &body)?;
    app.served_model(body.get("model").and_then(Value::as_str))?;
    let listed = body.get("tokens").and_then(Value::as_array).into_iter().flatten();
    let ids: Vec<u32> = listed.filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect();
    check_tokens("tokens", &ids, app.engine.info().vocab_size)?;
    if ids.len() > app.engine.info().context {
        return Err(context_exceeded(app, ids.len(), 0));
    }
    let skip = body.get("skip_special_tokens").and_then(Value::as_bool).unwrap_or(false);
    let text = app.text.tokenizer.decode(&ids, skip).map_err(|error| ApiError::text("tokens", &error))?;
    Ok(json!({"prompt": text, "content": text}))
}
