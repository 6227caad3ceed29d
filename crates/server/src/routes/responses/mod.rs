//! `POST /v1/responses`: OpenAI's Responses API over the chat. Nothing is kept between requests.

pub mod convert;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use oscar_engine::Usage;
use serde_json::{Map, Value, json};

use self::convert::{ResponsesBody, ResponsesFields};
use super::blocks::{Block, BlockEvent, Blocks};
use super::chat_completions::prepare::{prepare, prompt_tokens};
use super::chat_completions::types::ChatBody;
use super::stream::{Chunks, respond};
use crate::app::Shared;
use crate::body::{Asked, RawBody, off_thread};
use crate::error::ApiError;
use crate::generate::{Generation, Output};
use crate::ids::unix_seconds;
use crate::schema::RequestBody;

pub async fn create(Asked { app, name, caller, body }: Asked) -> Result<Response, ApiError> {
    let id = name.clone();
    let (prepared, settings) = off_thread(&app, body, move |app, body| {
        let (fields, passed) = ResponsesBody::parse(body, app.limits.value_bytes)?;
        let (chat, names) = fields.to_chat()?.finish(passed)?;
        let prepared =
            ChatBody::from_object(chat).and_then(|chat| prepare(app, &name, caller, chat, Some(&names)));
        let namespaces = fields.namespaces();
        Ok((prepared.map_err(|error| names.rename(error))?, (settings(fields), namespaces)))
    })
    .await?;
    let (settings, namespaces) = settings;
    let stream = prepared.stream;
    let mut reply = Reply {
        id,
        created: unix_seconds(),
        model: prepared.model.clone(),
        settings,
        namespaces,
        // A stream has already shown what it knows of a call that breaks off.
        blocks: if stream { Blocks::default() } else { Blocks::of_complete_calls() },
        output: Vec::new(),
        sequence: 0,
    };
    let mut generation = Generation::start(&app, prepared)?;
    if stream {
        return Ok(respond(app, generation, reply));
    }
    while let Some(output) = generation.next().await {
        if let Output::Failed(error) = output {
            return Err(app.engine_error(error));
        }
        reply.take(output);
    }
    Ok(Json(reply.response(reply.status())).into_response())
}

pub async fn input_tokens(State(app): State<Shared>, body: RawBody) -> Result<Json<Value>, ApiError> {
    let count = off_thread(&app, body, move |app, body| {
        let (fields, passed) = ResponsesBody::parse(body, app.limits.value_bytes)?;
        let (chat, names) = fields.to_chat()?.finish(passed)?;
        prompt_tokens(app, chat).map_err(|error| names.rename(error))
    })
    .await?;
    Ok(Json(json!({"object": "response.input_tokens", "input_tokens": count})))
}

/// The settings that a response repeats.
fn settings(fields: ResponsesFields) -> Map<String, Value> {
    let settings = json!({
        "tools": fields.offered(),
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "parallel_tool_calls": fields.parallel_tool_calls.unwrap_or(true),
        "previous_response_id": null,
        "reasoning": {"effort": fields.reasoning.and_then(|mut given| given.remove("effort")), "summary": null},
        "store": false,
        "temperature": fields.temperature,
        "text": fields.text.map_or_else(|| json!({"format": {"type": "text"}}), Value::Object),
        "tool_choice": fields.tool_choice.unwrap_or_else(|| json!("auto")),
        "top_p": fields.top_p,
        "truncation": "disabled",
        "user": fields.user,
        "metadata": fields.metadata.unwrap_or_else(|| json!({})),
    });
    match settings {
        Value::Object(settings) => settings,
        _ => Map::new(),
    }
}

/// A response under way.
struct Reply {
    id: String,
    created: u64,
    model: String,
    settings: Map<String, Value>,
    /// Of functions: a name with one of them in front is taken apart again.
    namespaces: Vec<String>,
    blocks: Blocks,
    /// Complete items.
    output: Vec<Value>,
    /// Number of the next event of the stream.
    sequence: usize,
}

impl Reply {
    fn take(&mut self, output: Output) -> Vec<BlockEvent> {
        let events = self.blocks.take_output(output);
        for event in &events {
            if let BlockEvent::Close { index, block, text, complete } = event {
                self.output.push(self.item(*index, block, Some((text, *complete))));
            }
        }
        events
    }

    fn status(&self) -> &'static str {
        match self.blocks.finish.as_ref().map(|finish| finish.reason) {
            Some("length") => "incomplete",
            Some("abort") => "cancelled",
            _ => "completed",
        }
    }

    fn response(&self, status: &str) -> Value {
        let Usage { prompt_tokens, cached_tokens, completion_tokens, .. } = self.blocks.totals.usage;
        let usage = json!({
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached_tokens},
            "output_tokens": completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.blocks.totals.reasoning_tokens},
            "total_tokens": prompt_tokens + completion_tokens,
        });
        let mut response = json!({
            "id": format!("resp_{}", self.id),
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": null,
            "incomplete_details": (status == "incomplete").then(|| json!({"reason": "max_output_tokens"})),
            "model": self.model,
            "output": self.output,
            "usage": (status != "in_progress").then_some(usage),
        });
        for (name, value) in &self.settings {
            response[name] = value.clone();
        }
        response
    }

    fn item_id(&self, index: usize, block: &Block) -> String {
        let kind = match block {
            Block::Reasoning => "rs",
            Block::Text => "msg",
            Block::Call { .. } => "fc",
        };
        format!("{kind}_{}_{index}", self.id)
    }

    /// The namespace of a function and its name in it.
    fn split<'a>(&'a self, name: &'a str) -> (Option<&'a str>, &'a str) {
        let inner =
            |space: &'a String| Some((space.as_str(), name.strip_prefix(space.as_str())?.strip_prefix('.')?));
        match self.namespaces.iter().find_map(inner) {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, name),
        }
    }

    /// An item of the output. Once it is closed, it has a text and tells whether that is complete. The
    /// end of the answer closes its last item, which is as complete as the answer.
    fn item(&self, index: usize, block: &Block, closed: Option<(&str, bool)>) -> Value {
        let id = self.item_id(index, block);
        let status = match (closed, self.status()) {
            (None, _) => "in_progress",
            (Some((_, true)), "completed") => "completed",
            (Some(_), _) => "incomplete",
        };
        let text = closed.map(|(text, _)| text);
        match block {
            Block::Reasoning => {
                let content: Vec<Value> = text.map(|text| part(block, text)).into_iter().collect();
                json!({"type": "reasoning", "id": id, "summary": [], "content": content, "status": status})
            }
            Block::Text => {
                let content: Vec<Value> = text.map(|text| part(block, text)).into_iter().collect();
                json!({"type": "message", "id": id, "status": status, "role": "assistant", "content": content})
            }
            Block::Call { id: call, name } => {
                let (namespace, name) = self.split(name);
                let mut item = json!({"type": "function_call", "id": id, "call_id": call, "name": name,
                    "arguments": text.unwrap_or_default(), "status": status});
                if let Some(namespace) = namespace {
                    item["namespace"] = json!(namespace);
                }
                item
            }
        }
    }

    /// The events of the stream for a change of a block.
    fn block_chunks(&self, event: BlockEvent) -> Vec<Value> {
        match event {
            BlockEvent::Open { index, block } => {
                let added = json!({"type": "response.output_item.added", "output_index": index,
                    "item": self.item(index, &block, None)});
                let mut chunks = vec![added];
                if block == Block::Text {
                    chunks.push(json!({"type": "response.content_part.added", "content_index": 0,
                        "item_id": self.item_id(index, &block), "output_index": index, "part": part(&block, "")}));
                }
                chunks
            }
            BlockEvent::Delta { index, block, text } => {
                let mut chunk = json!({"type": format!("{}.delta", event_kind(&block)), "delta": text,
                    "item_id": self.item_id(index, &block), "output_index": index});
                self.finish_chunk(&block, &mut chunk);
                vec![chunk]
            }
            BlockEvent::Close { index, block, text, complete } => {
                let id = self.item_id(index, &block);
                let mut done = json!({"type": format!("{}.done", event_kind(&block)), "item_id": id,
                    "output_index": index});
                self.finish_chunk(&block, &mut done);
                match &block {
                    Block::Call { name, .. } => {
                        done["arguments"] = json!(text);
                        done["name"] = json!(self.split(name).1);
                    }
                    _ => done["text"] = json!(text),
                }
                let mut chunks = vec![done];
                if block == Block::Text {
                    chunks.push(json!({"type": "response.content_part.done", "content_index": 0,
                        "item_id": id, "output_index": index, "part": part(&block, &text)}));
                }
                chunks.push(json!({"type": "response.output_item.done", "output_index": index,
                    "item": self.item(index, &block, Some((&text, complete)))}));
                chunks
            }
        }
    }

    /// Fields that only text and reasoning have.
    fn finish_chunk(&self, block: &Block, chunk: &mut Value) {
        if !matches!(block, Block::Call { .. }) {
            chunk["content_index"] = json!(0);
        }
        if *block == Block::Text {
            chunk["logprobs"] = json!([]);
        }
    }

    fn numbered(&mut self, mut chunks: Vec<Value>) -> Vec<Value> {
        for chunk in &mut chunks {
            chunk["sequence_number"] = json!(self.sequence);
            self.sequence += 1;
        }
        chunks
    }
}

fn part(block: &Block, text: &str) -> Value {
    match block {
        Block::Text => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
        _ => json!({"type": "reasoning_text", "text": text}),
    }
}

fn event_kind(block: &Block) -> &'static str {
    match block {
        Block::Text => "response.output_text",
        Block::Reasoning => "response.reasoning_text",
        Block::Call { .. } => "response.function_call_arguments",
    }
}

impl Chunks for Reply {
    type Chunk = Value;
    const ENDS_WITH_DONE: bool = false;

    fn name(chunk: &Value) -> Option<&str> {
        chunk["type"].as_str()
    }

    fn chunks(&mut self, output: Output) -> Vec<Value> {
        let mut chunks = Vec::new();
        if matches!(output, Output::Started { .. }) {
            let response = self.response("in_progress");
            chunks.push(json!({"type": "response.created", "response": response}));
            chunks.push(json!({"type": "response.in_progress", "response": response}));
        }
        let events = self.take(output);
        chunks.extend(events.into_iter().flat_map(|event| self.block_chunks(event)));
        self.numbered(chunks)
    }

    fn last(&mut self) -> Vec<Value> {
        let status = self.status();
        let kind = if status == "incomplete" { "response.incomplete" } else { "response.completed" };
        let last = json!({"type": kind, "response": self.response(status)});
        self.numbered(vec![last])
    }

    fn error(&mut self, error: &ApiError) -> (Option<&'static str>, Value) {
        let mut response = self.response("failed");
        response["error"] = json!({"code": "server_error", "message": error.to_string()});
        let failed = json!({"type": "response.failed", "response": response});
        (Some("response.failed"), self.numbered(vec![failed]).pop().unwrap_or_default())
    }
}
