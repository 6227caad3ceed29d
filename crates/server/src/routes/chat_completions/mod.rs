//! `POST /v1/chat/completions`.

mod kv;
pub mod prepare;
pub mod template;
pub mod types;
pub mod validate;

use axum::response::Response;
use oscar_engine::TokenLogprobs;
use oscar_text::ReplyEvent;

use self::types::{
    ChatBody, ChatChoice, ChatChunk, ChatLogprobs, ChatResponse, ChunkChoice, Delta, FunctionCall, Message,
    ToolCall,
};
use crate::app::Shared;
use crate::body::{Asked, json_answer, off_thread};
use crate::error::ApiError;
use crate::generate::{ChatEntry, Finish, Generation, Output, Totals};
use crate::routes::frame::Frame;
use crate::routes::stream::{Chunks, respond};
use crate::schema::RequestBody;

pub async fn create(Asked { app, name, caller, body }: Asked) -> Result<Response, ApiError> {
    let id = format!("chatcmpl-{name}");
    let prepared = off_thread(&app, body, move |app, body| {
        prepare::prepare(app, &name, caller, ChatBody::parse(body, app.limits.value_bytes)?, None)
    })
    .await?;
    let (size, choices) = (prepared.answer_size(), prepared.params().choices);
    let stream = prepared.stream;
    let frame = Frame::new(&app, id, "chat.completion.chunk", &prepared);
    let generation = Generation::start(&app, prepared)?;
    if stream {
        let chunks = ChatChunks { frame, choices, totals: Totals::default() };
        return Ok(respond(app, generation, chunks));
    }
    let response = collect(&app, generation, frame, choices).await?;
    json_answer(&app, size, response).await
}

#[derive(Default)]
struct Collected {
    content: String,
    reasoning: String,
    calls: Vec<ToolCall>,
    logprobs: Vec<ChatEntry>,
    finish: Option<Finish>,
}

impl Collected {
    fn take(&mut self, event: ReplyEvent) {
        match event {
            ReplyEvent::Text(text) => self.content += &text,
            ReplyEvent::Reasoning(text) => self.reasoning += &text,
            ReplyEvent::CallStarted { id, name, .. } => {
                let function = FunctionCall { name: Some(name), arguments: String::new() };
                self.calls.push(ToolCall { index: None, id, kind: Some("function"), function });
            }
            ReplyEvent::Arguments { delta, .. } => {
                if let Some(call) = self.calls.last_mut() {
                    call.function.arguments += &delta;
                }
            }
            ReplyEvent::CallFinished { .. } => {}
            ReplyEvent::CallBroken { text, .. } => {
                self.calls.pop();
                self.content += &text;
            }
        }
    }

    /// The content; null beside calls, if there is none.
    fn content(&mut self) -> Option<String> {
        let content = std::mem::take(&mut self.content);
        (!content.is_empty() || self.calls.is_empty()).then_some(content)
    }
}

async fn collect(
    app: &Shared,
    mut generation: Generation,
    frame: Frame,
    choices: usize,
) -> Result<ChatResponse, ApiError> {
    let mut collected: Vec<Collected> = (0..choices).map(|_| Collected::default()).collect();
    let mut totals = Totals::default();
    let (mut prompt_logprobs, mut kv_transfer_params) = (None, None);
    while let Some(output) = generation.next().await {
        match output {
            Output::Started { prompt_logprobs: found, .. } => {
                prompt_logprobs = found.map(|tokens| frame.texts.prompt_logprobs(tokens));
            }
            Output::Delta { choice, events, logprobs, .. } => {
                let choice = &mut collected[choice];
                events.into_iter().for_each(|event| choice.take(event));
                choice.logprobs.extend(logprobs.into_iter().map(|token| frame.texts.chat_entry(token)));
            }
            Output::Finished { choice, finish } => collected[choice].finish = Some(finish),
            Output::Done(done) => totals += done,
            Output::Kept(params) => kv_transfer_params = Some(params),
            Output::Embedding { .. } => {}
            Output::Failed(error) => return Err(app.engine_error(error)),
        }
    }
    let choice = |(index, mut choice): (usize, Collected)| {
        let finish = choice.finish.take().unwrap_or(Finish { reason: "abort", stop: None, stop_token: None });
        ChatChoice {
            index,
            message: Message {
                role: "assistant",
                content: choice.content(),
                reasoning_content: (!choice.reasoning.is_empty()).then_some(choice.reasoning),
                refusal: None,
                tool_calls: choice.calls,
            },
            logprobs: frame.logprobs.then_some(ChatLogprobs { content: choice.logprobs, refusal: None }),
            finish_reason: finish.reason,
            stop_reason: finish.stop,
        }
    };
    Ok(ChatResponse {
        choices: collected.into_iter().enumerate().map(choice).collect(),
        id: frame.id,
        object: "chat.completion",
        created: frame.created,
        model: frame.model,
        usage: totals.into(),
        system_fingerprint: frame.fingerprint,
        prompt_logprobs,
        kv_transfer_params,
    })
}

/// The piece of a message that an event brings.
fn delta(event: ReplyEvent) -> Option<Delta> {
    let call = |call| Delta { tool_calls: vec![call], ..Delta::default() };
    Some(match event {
        ReplyEvent::Text(text) => Delta { content: Some(text), ..Delta::default() },
        ReplyEvent::Reasoning(text) => Delta { reasoning_content: Some(text), ..Delta::default() },
        ReplyEvent::CallStarted { index, id, name } => {
            let function = FunctionCall { name: Some(name), arguments: String::new() };
            call(ToolCall { index: Some(index), id, kind: Some("function"), function })
        }
        ReplyEvent::Arguments { index, delta } => {
            let function = FunctionCall { name: None, arguments: delta };
            call(ToolCall { index: Some(index), id: None, kind: None, function })
        }
        // What went out of a broken call cannot be called back; the finish reason tells it.
        ReplyEvent::CallFinished { .. } | ReplyEvent::CallBroken { .. } => return None,
    })
}

/// The chunks of a streamed chat: for each choice its role, its text, its end; then the usage if
/// asked for.
struct ChatChunks {
    frame: Frame,
    choices: usize,
    totals: Totals,
}

impl ChatChunks {
    fn logprobs(&self, tokens: Vec<TokenLogprobs>) -> Option<ChatLogprobs> {
        let entries = || tokens.into_iter().map(|token| self.frame.texts.chat_entry(token)).collect();
        self.frame.logprobs.then(|| ChatLogprobs { content: entries(), refusal: None })
    }

    fn role(&self, index: usize) -> ChatChunk {
        let delta = Delta { role: Some("assistant"), content: Some(String::new()), ..Delta::default() };
        self.frame.chunk(vec![ChunkChoice {
            index,
            delta,
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
        }])
    }
}

impl Chunks for ChatChunks {
    type Chunk = ChatChunk;

    fn chunks(&mut self, output: Output) -> Vec<ChatChunk> {
        match output {
            Output::Started { prompt_logprobs, .. } => {
                let mut roles: Vec<ChatChunk> = (0..self.choices).map(|index| self.role(index)).collect();
                if let Some(first) = roles.first_mut() {
                    let texts = &self.frame.texts;
                    first.prompt_logprobs = prompt_logprobs.map(|tokens| texts.prompt_logprobs(tokens));
                }
                roles
            }
            Output::Delta { choice, events, logprobs, .. } => {
                let mut deltas: Vec<Delta> = events.into_iter().filter_map(delta).collect();
                if deltas.is_empty() && !logprobs.is_empty() {
                    deltas.push(Delta { content: Some(String::new()), ..Delta::default() });
                }
                let mut logprobs = Some(logprobs);
                let chunk = |delta| {
                    // The log-probabilities belong to all events of the token; the first one
                    // carries them.
                    let logprobs = logprobs.take().and_then(|logprobs| self.logprobs(logprobs));
                    let choice = ChunkChoice {
                        index: choice,
                        delta,
                        logprobs,
                        finish_reason: None,
                        stop_reason: None,
                    };
                    self.frame.chunk(vec![choice])
                };
                deltas.into_iter().map(chunk).collect()
            }
            Output::Finished { choice, finish } => {
                let end = ChunkChoice {
                    index: choice,
                    delta: Delta::default(),
                    logprobs: None,
                    finish_reason: Some(finish.reason),
                    stop_reason: finish.stop,
                };
                vec![self.frame.chunk(vec![end])]
            }
            Output::Done(totals) => {
                self.totals += totals;
                Vec::new()
            }
            Output::Kept(_) | Output::Embedding { .. } | Output::Failed(_) => Vec::new(),
        }
    }

    fn last(&mut self) -> Vec<ChatChunk> {
        self.frame.last(self.totals)
    }
}
