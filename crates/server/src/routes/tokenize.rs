//! `POST /tokenize` and `/detokenize`, in the words of vLLM (`prompt`, `messages`) and of llama.cpp
//! (`content`).

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::chat_completions::template::{TemplateFields, conversation};
use super::sampling::check_tokens;
use crate::app::{App, Shared};
use crate::body::{RawBody, json_answer, off_thread};
use crate::error::ApiError;
use crate::limits::{context_exceeded, encode};
use crate::schema::{RequestBody, request_fields};

pub type TokenizeBody = (TokenizeFields, TemplateFields);
pub type DetokenizeBody = (DetokenizeFields,);

request_fields! {
    /// Fields that only `/tokenize` has.
    pub struct TokenizeFields {
        /// Name of the model; the served one if absent
        model: Option<String>,
        /// Text to tokenize
        prompt: Option<String>,
        /// Another name for prompt
        content: Option<String>,
        /// A conversation to render with the chat template and tokenize
        messages: Option<Vec<Map<String, Value>>>,
        /// Apply the tokenizer's frame; true if absent, but for messages and content
        add_special_tokens: Option<bool>,
        /// Another name for add_special_tokens
        add_special: Option<bool>,
        /// Also list the tokens as text
        return_token_strs: Option<bool>,
        /// Tokens as objects with `id` and `piece`
        with_pieces: Option<bool>,
    }
}

request_fields! {
    /// The fields of `/detokenize`.
    pub struct DetokenizeFields {
        /// Name of the model; the served one if absent
        model: Option<String>,
        /// Token ids
        tokens: Vec<u32>,
        /// Leave special tokens out; false if absent
        skip_special_tokens: Option<bool>,
    }
}

pub async fn tokenize(State(app): State<Shared>, body: RawBody) -> Result<Response, ApiError> {
    let size = body.bytes().len();
    let answer = off_thread(&app, body, tokenized).await?;
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
    let (fields, template) = TokenizeBody::parse(body, app.limits.value_bytes)?;
    app.served_model(fields.model.as_deref())?;
    let framed = fields.add_special_tokens.or(fields.add_special);
    let (param, source, add_special) = match (fields.prompt, fields.content, fields.messages) {
        (Some(prompt), _, _) => ("prompt", prompt, framed.unwrap_or(true)),
        (None, Some(content), _) => ("content", content, framed.unwrap_or(false)),
        (None, None, Some(messages)) => {
            let prompt = conversation(app, &template, messages)?.prompt;
            ("messages", prompt, framed.unwrap_or(false))
        }
        (None, None, None) => {
            return Err(ApiError::param("prompt", "is missing: send prompt, content or messages"));
        }
    };
    let tokenizer = &app.text.tokenizer;
    let ids = encode(app, param, &source, add_special)?;
    let piece = |id: &u32| Piece { id: *id, piece: tokenizer.decode(&[*id], false).unwrap_or_default() };
    let spelled = |id: &u32| tokenizer.id_to_token(*id).unwrap_or_default();
    Ok(Tokenized {
        count: ids.len(),
        max_model_len: app.engine.info().context,
        token_strs: (fields.return_token_strs == Some(true)).then(|| ids.iter().map(spelled).collect()),
        tokens: match fields.with_pieces {
            Some(true) => TokenList::Pieces(ids.iter().map(piece).collect()),
            _ => TokenList::Ids(ids),
        },
    })
}

pub async fn detokenize(State(app): State<Shared>, body: RawBody) -> Result<Json<Value>, ApiError> {
    off_thread(&app, body, detokenized).await.map(Json)
}

fn detokenized(app: &App, body: &[u8]) -> Result<Value, ApiError> {
    let (DetokenizeFields { model, tokens: ids, skip_special_tokens },) =
        DetokenizeBody::parse(body, app.limits.value_bytes)?;
    app.served_model(model.as_deref())?;
    check_tokens("tokens", &ids, app.engine.info().vocab_size)?;
    if ids.len() > app.engine.info().context {
        return Err(context_exceeded(app, ids.len(), 0));
    }
    let skip = skip_special_tokens.unwrap_or(false);
    let text = app.text.tokenizer.decode(&ids, skip).map_err(|error| ApiError::text("tokens", &error))?;
    Ok(json!({"prompt": text, "content": text}))
}
