//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API over the chat.

pub mod convert;

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use oscar_engine::Usage;
use serde_json::{Value, json};

use self::convert::MessagesBody;
use super::blocks::{Block, BlockEvent, Blocks};
use super::chat_completions::prepare::{prepare, prompt_tokens};
use super::chat_completions::types::ChatBody;
use super::stream::{Chunks, respond};
use crate::app::Shared;
use crate::body::{Asked, RawBody, off_thread};
use crate::error::ApiError;
use crate::generate::{Generation, Output};
use crate::middleware::RequestName;
use crate::schema::RequestBody;

/// Names the request in Anthropic's header and writes the errors of these routes in Anthropic's form,
/// wherever they come from.
pub async fn in_anthropics_form(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if path != "/v1/messages" && !path.starts_with("/v1/messages/") {
        return next.run(request).await;
    }
    let name = request.extensions().get::<RequestName>().map(|RequestName(name)| format!("req_{name}"));
    let mut response = next.run(request).await;
    if let Some(name) = name.and_then(|name| HeaderValue::try_from(name).ok()) {
        response.headers_mut().insert("request-id", name);
    }
    let Some(error) = response.extensions().get::<ApiError>() else { return response };
    let body = error_body(error).to_string();
    let (mut parts, _) = response.into_parts();
    parts.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(parts, Body::from(body))
}

fn error_body(error: &ApiError) -> Value {
    let kind = match error.status().as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.to_string()}})
}

pub async fn create(Asked { app, name, caller, body }: Asked) -> Result<Response, ApiError> {
    let id = format!("msg_{name}");
    let prepared = off_thread(&app, body, move |app, body| {
        let (fields, passed) = MessagesBody::parse(body, app.limits.value_bytes)?;
        let omits_thinking = fields.omits_thinking();
        let (chat, names) = fields.into_chat(false)?.finish(passed)?;
        let prepared =
            ChatBody::from_object(chat).and_then(|chat| prepare(app, &name, caller, chat, Some(&names)));
        Ok((prepared.map_err(|error| names.rename(error))?, omits_thinking))
    })
    .await?;
    let (prepared, omits_thinking) = prepared;
    let (stream, model) = (prepared.stream, prepared.model.clone());
    let mut generation = Generation::start(&app, prepared)?;
    // Agents run what a `tool_use` block says: none is sent before its input is complete.
    let mut reply = Reply { id, model, blocks: Blocks::of_complete_calls(), omits_thinking };
    if stream {
        return Ok(respond(app, generation, reply));
    }
    let mut content = Vec::new();
    while let Some(output) = generation.next().await {
        if let Output::Failed(error) = output {
            return Err(app.engine_error(error));
        }
        content.extend(reply.take(output).into_iter().filter_map(|event| match event {
            BlockEvent::Close { block: Block::Reasoning, .. } if omits_thinking => {
                Some(block_json(&Block::Reasoning, ""))
            }
            BlockEvent::Close { block, text, .. } => Some(block_json(&block, &text)),
            _ => None,
        }));
    }
    Ok(Json(reply.message(content)).into_response())
}

pub async fn count_tokens(State(app): State<Shared>, body: RawBody) -> Result<Json<Value>, ApiError> {
    let count = off_thread(&app, body, move |app, body| {
        let (fields, passed) = MessagesBody::parse(body, app.limits.value_bytes)?;
        let (chat, names) = fields.into_chat(true)?.finish(passed)?;
        prompt_tokens(app, chat).map_err(|error| names.rename(error))
    })
    .await?;
    Ok(Json(json!({"input_tokens": count})))
}

/// An answer under way.
struct Reply {
    id: String,
    model: String,
    blocks: Blocks,
    /// Thinking blocks have no text.
    omits_thinking: bool,
}

impl Reply {
    /// What an output does to the blocks.
    fn take(&mut self, output: Output) -> Vec<BlockEvent> {
        let mut events = self.blocks.take_output(output);
        if self.omits_thinking {
            events.retain(|event| !matches!(event, BlockEvent::Delta { block: Block::Reasoning, .. }));
        }
        events
    }

    fn stop_reason(&self) -> (&'static str, Option<&str>) {
        let Some(finish) = &self.blocks.finish else { return ("end_turn", None) };
        let reason = match finish.reason {
            _ if finish.stop.is_some() => "stop_sequence",
            "length" => "max_tokens",
            "tool_calls" => "tool_use",
            _ => "end_turn",
        };
        (reason, finish.stop.as_deref())
    }

    /// Tokens read from the cache are not among `input_tokens`.
    fn usage(&self) -> Value {
        let Usage { prompt_tokens, cached_tokens, completion_tokens, .. } = self.blocks.totals.usage;
        json!({"input_tokens": prompt_tokens - cached_tokens.min(prompt_tokens), "output_tokens": completion_tokens,
            "cache_read_input_tokens": cached_tokens, "cache_creation_input_tokens": 0})
    }

    fn message(&self, content: Vec<Value>) -> Value {
        let end = self.blocks.finish.as_ref().map(|_| self.stop_reason());
        let (reason, stop) = (end.map(|(reason, _)| reason), end.and_then(|(_, stop)| stop));
        json!({"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": reason, "stop_sequence": stop, "usage": self.usage()})
    }
}

/// A whole block. Arguments of a complete call are a JSON object.
fn block_json(block: &Block, text: &str) -> Value {
    match block {
        Block::Text => json!({"type": "text", "text": text}),
        Block::Reasoning => json!({"type": "thinking", "thinking": text, "signature": ""}),
        Block::Call { id, name } => {
            let input: Value = serde_json::from_str(text).unwrap_or_default();
            json!({"type": "tool_use", "id": id, "name": name, "input": input})
        }
    }
}

impl Chunks for Reply {
    type Chunk = Value;
    const ENDS_WITH_DONE: bool = false;

    fn name(chunk: &Value) -> Option<&str> {
        chunk["type"].as_str()
    }

    fn chunks(&mut self, output: Output) -> Vec<Value> {
        if let Output::Started { usage, .. } = output {
            self.blocks.totals.usage = usage;
            return vec![json!({"type": "message_start", "message": self.message(Vec::new())})];
        }
        self.take(output).into_iter().flat_map(block_chunks).collect()
    }

    fn last(&mut self) -> Vec<Value> {
        let (reason, stop) = self.stop_reason();
        let delta = json!({"stop_reason": reason, "stop_sequence": stop});
        vec![
            json!({"type": "message_delta", "delta": delta, "usage": self.usage()}),
            json!({"type": "message_stop"}),
        ]
    }

    fn error(&mut self, error: &ApiError) -> (Option<&'static str>, Value) {
        (Some("error"), error_body(error))
    }
}

fn block_chunks(event: BlockEvent) -> Vec<Value> {
    let delta =
        |index: usize, delta: Value| json!({"type": "content_block_delta", "index": index, "delta": delta});
    match event {
        BlockEvent::Open { index, block } => {
            let empty = if matches!(block, Block::Call { .. }) { "{}" } else { "" };
            let block = block_json(&block, empty);
            vec![json!({"type": "content_block_start", "index": index, "content_block": block})]
        }
        BlockEvent::Delta { index, block, text } => vec![delta(
            index,
            match block {
                Block::Text => json!({"type": "text_delta", "text": text}),
                Block::Reasoning => json!({"type": "thinking_delta", "thinking": text}),
                Block::Call { .. } => json!({"type": "input_json_delta", "partial_json": text}),
            },
        )],
        BlockEvent::Close { index, block, .. } => {
            let stop = json!({"type": "content_block_stop", "index": index});
            match block {
                Block::Reasoning => {
                    vec![delta(index, json!({"type": "signature_delta", "signature": ""})), stop]
                }
                _ => vec![stop],
            }
        }
    }
}
