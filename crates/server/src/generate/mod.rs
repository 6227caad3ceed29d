//! From valid requests to text: submits them to the engine, turns its events into pieces of text,
//! cancels.
//!
//! Each prompt has a task that reads the engine's events as they come, so that neither a slow
//! client nor a full socket ever holds the engine back, and a stop string ends the work at once.
//! Outputs that a slow client has not read wait in a queue no longer than the tokens it asked for.
//!
//! **Invariant:** a request that is not finished is cancelled when its receiver goes away, whatever
//! the reason.

mod assemble;
mod logprobs;
mod prepared;

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use oscar_engine::{Event, EventSink, FinishReason, Request, RequestError, RequestId, TokenLogprobs, Usage};
use oscar_text::{Dialect, ReplyEvent};
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tracing::Instrument;

pub use assemble::{Assembler, TextEnd, TextOptions};
pub use logprobs::{ChatEntry, MAX_LOGPROBS, PromptLogprobs, TokenTexts, TopLogprobs, finite};
pub use prepared::{Prepared, requests};

use crate::app::App;
use crate::error::ApiError;
use crate::keys::Admission;
use crate::routes::transfer;

/// A piece of a generation. `prompt` counts prompts, `choice` counts all choices of all prompts.
#[derive(Debug)]
pub enum Output {
    Started {
        prompt: usize,
        /// The counts of the prompt.
        usage: Usage,
        prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    },
    /// The hidden state of the prompt's last token.
    Embedding {
        prompt: usize,
        values: Vec<f32>,
    },
    /// The `kv_transfer_params` of the answer.
    Kept(Value),
    Delta {
        choice: usize,
        /// The token behind the events; none where held-back text ends a choice.
        token: Option<u32>,
        /// Text, reasoning and tool calls. Calls have ids.
        events: Vec<ReplyEvent>,
        logprobs: Vec<TokenLogprobs>,
    },
    Finished {
        choice: usize,
        finish: Finish,
    },
    /// A prompt and all its choices are done.
    Done(Totals),
    Failed(RequestError),
}

/// How a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    pub reason: &'static str,
    /// The stop string, if one was found.
    pub stop: Option<String>,
    /// The stop token, if one ended it.
    pub stop_token: Option<u32>,
}

/// Token counts of a prompt or of a whole response.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    pub usage: Usage,
    pub reasoning_tokens: usize,
}

impl std::ops::AddAssign for Totals {
    fn add_assign(&mut self, other: Self) {
        self.usage += other.usage;
        self.reasoning_tokens += other.reasoning_tokens;
    }
}

/// The outputs of an HTTP request. Dropping it cancels the prompts that are not finished.
#[derive(Debug)]
pub struct Generation {
    outputs: UnboundedReceiver<Output>,
    prompts_left: usize,
}

impl Generation {
    /// Submits the prompts to the engine. If one is refused, those before it are cancelled.
    pub fn start(app: &Arc<App>, prepared: Prepared) -> Result<Self, ApiError> {
        let admission = prepared.admit(app)?;
        Self::admitted(app, prepared, &Arc::new(admission))
    }

    /// The same for prompts that already count against the tenant's quota.
    pub fn admitted(
        app: &Arc<App>,
        prepared: Prepared,
        admission: &Arc<Admission>,
    ) -> Result<Self, ApiError> {
        let (sender, outputs) = unbounded_channel();
        let count = prepared.requests.len();
        let Prepared { name, caller, requests, text, .. } = prepared;
        for (prompt, request) in requests.into_iter().enumerate() {
            let ticket = Ticket {
                app: app.clone(),
                id: request.id(),
                name: name.clone(),
                finished: true,
                _admission: admission.clone(),
            };
            app.running.insert(&name, request.id(), &caller);
            Answer::new(ticket, &request, &text, prompt, sender.clone())?.submit(request)?;
        }
        Ok(Self { outputs, prompts_left: count })
    }

    /// The next output; none after the last.
    pub async fn next(&mut self) -> Option<Output> {
        poll_fn(|context| self.poll_next(context)).await
    }

    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Output>> {
        if self.prompts_left == 0 {
            return Poll::Ready(None);
        }
        let Poll::Ready(output) = self.outputs.poll_recv(context) else { return Poll::Pending };
        let output = output.unwrap_or_else(|| {
            Output::Failed(RequestError::Engine("the engine stopped answering".to_owned()))
        });
        match output {
            Output::Done(_) => self.prompts_left -= 1,
            Output::Failed(_) => self.prompts_left = 0,
            _ => {}
        }
        Poll::Ready(Some(output))
    }
}

/// Carries events from the engine's thread.
struct Channel(UnboundedSender<Event>);

impl EventSink for Channel {
    fn send(&self, event: Event) -> bool {
        self.0.send(event).is_ok()
    }
}

/// Cancels its request and forgets its name when dropped; a finished one cannot be cancelled.
struct Ticket {
    app: Arc<App>,
    id: RequestId,
    name: String,
    finished: bool,
    /// Counts against the tenant's quota until all prompts of the HTTP request have ended.
    _admission: Arc<Admission>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.app.running.remove(&self.name, self.id);
        if !self.finished {
            self.app.engine.cancel(self.id);
        }
    }
}

/// The answer to one prompt while it is generated: a task that turns the engine's events into
/// outputs.
struct Answer {
    ticket: Ticket,
    outputs: UnboundedSender<Output>,
    prompt: usize,
    choices: Vec<ChoiceText>,
    stops: Vec<String>,
    dialect: Option<Dialect>,
    max_tokens: usize,
    /// The counts of the prompt.
    usage: Usage,
    /// The engine's counts, once it is done.
    done: Option<Usage>,
    submitted: Instant,
    first_token: Option<Instant>,
}

/// The text of one choice.
struct ChoiceText {
    assembler: Assembler,
    /// Text may still come.
    open: bool,
    /// The engine has ended it.
    ended: bool,
    /// A stop string has ended it before the engine did.
    cut: bool,
    /// It ended with a stop token, which is counted though it is not delivered.
    stop_token: bool,
    last_token: Option<Instant>,
}

impl ChoiceText {
    fn tokens(&self) -> usize {
        self.assembler.tokens + usize::from(self.stop_token)
    }
}

impl Answer {
    fn new(
        ticket: Ticket,
        request: &Request,
        text: &TextOptions,
        prompt: usize,
        outputs: UnboundedSender<Output>,
    ) -> Result<Self, ApiError> {
        let choice = |_| {
            let assembler = Assembler::new(&ticket.app.text.tokenizer, text)?;
            Ok(ChoiceText {
                assembler,
                open: true,
                ended: false,
                cut: false,
                stop_token: false,
                last_token: None,
            })
        };
        let choices: Result<_, _> = (0..request.params().choices).map(choice).collect();
        Ok(Self {
            choices: choices.map_err(|error| ApiError::text("stop", &error))?,
            ticket,
            outputs,
            prompt,
            stops: text.stop.clone(),
            dialect: text.reply.dialect,
            max_tokens: request.params().max_tokens,
            usage: Usage { prompt_tokens: request.prompt().len(), ..Usage::default() },
            done: None,
            submitted: Instant::now(),
            first_token: None,
        })
    }

    fn submit(mut self, request: Request) -> Result<(), ApiError> {
        let (sender, events) = unbounded_channel();
        let app = self.ticket.app.clone();
        let submitted = app.engine.submit(request, Box::new(Channel(sender)));
        submitted.map_err(|error| app.engine_error(error))?;
        self.ticket.finished = false;
        tokio::spawn(self.run(events).in_current_span());
        Ok(())
    }

    async fn run(mut self, mut events: UnboundedReceiver<Event>) {
        let listener = self.outputs.clone();
        loop {
            let event = tokio::select! {
                biased;
                () = listener.closed(), if !self.ticket.finished => break,
                event = events.recv() => event,
            };
            match event {
                Some(event) => {
                    if self.take(event) {
                        break;
                    }
                }
                None => {
                    if !self.ticket.finished {
                        self.fail(RequestError::Engine("the engine stopped answering".to_owned()));
                    }
                    break;
                }
            }
        }
        self.observe();
    }

    /// Handles an event; true if no further event is expected or wanted.
    fn take(&mut self, event: Event) -> bool {
        match event {
            Event::Started { cached_tokens, approximate, by_tier, prompt_logprobs } => {
                self.usage = Usage { cached_tokens, approximate, by_tier, ..self.usage };
                self.send(Output::Started { prompt: self.prompt, usage: self.usage, prompt_logprobs });
                false
            }
            Event::Embedding(values) => {
                self.send(Output::Embedding { prompt: self.prompt, values });
                false
            }
            Event::Kept(ticket) => {
                self.send(Output::Kept(transfer::answer(&self.ticket.app, ticket)));
                false
            }
            Event::Token { choice, token, logprobs } => self.token(choice, token, logprobs),
            Event::Finished { choice, reason } => {
                self.engine_finished(choice, reason);
                !self.ticket.finished && self.end_if_closed()
            }
            Event::Done(usage) => {
                self.ticket.finished = true;
                for index in 0..self.choices.len() {
                    let full = self.choices[index].assembler.tokens >= self.max_tokens;
                    let reason = if full { FinishReason::Length } else { FinishReason::Cancelled };
                    self.engine_finished(index, reason);
                }
                self.done = Some(usage);
                self.end_if_closed()
            }
            Event::Failed(error) => {
                self.ticket.finished = true;
                self.fail(error);
                true
            }
        }
    }

    /// Sends the totals if all choices are closed, and tells whether they are.
    fn end_if_closed(&self) -> bool {
        let closed = self.choices.iter().all(|choice| !choice.open);
        if closed {
            self.send(Output::Done(self.totals()));
        }
        closed
    }

    /// The token counts: the engine's, unless a stop string or a client that went away has ended
    /// the answer before the engine did. Then the tokens that reached the text count, and none that
    /// the engine generated after them.
    fn totals(&self) -> Totals {
        let usage = match self.done {
            Some(usage) if !self.choices.iter().any(|choice| choice.cut) => usage,
            _ => Usage { completion_tokens: self.choices.iter().map(ChoiceText::tokens).sum(), ..self.usage },
        };
        let reasoning_tokens = self.choices.iter().map(|choice| choice.assembler.reasoning_tokens).sum();
        Totals { usage, reasoning_tokens }
    }

    fn token(&mut self, index: usize, token: u32, logprobs: Option<TokenLogprobs>) -> bool {
        let number = self.number(index);
        let Some(choice) = self.choices.get_mut(index).filter(|choice| choice.open) else { return false };
        let now = Instant::now();
        let metrics = &self.ticket.app.metrics;
        if let Some(last) = choice.last_token.replace(now) {
            metrics.inter_token(now - last);
        }
        if self.first_token.is_none() {
            self.first_token = Some(now);
            metrics.first_token(now - self.submitted);
        }
        let mut piece = choice.assembler.push(token);
        let ended = piece.ended;
        if ended.is_some() {
            choice.cut = true;
            piece.events.extend(choice.assembler.finish().events);
        }
        let events = self.with_ids(piece.events);
        let (token, logprobs) = (Some(token), logprobs.into_iter().collect());
        self.send(Output::Delta { choice: number, token, events, logprobs });
        let Some(end) = ended else { return false };
        let stop = self.stop_string(end);
        self.close(index, Finish { reason: "stop", stop, stop_token: None });
        self.end_if_closed()
    }

    /// The engine has ended a choice, which a stop string may have closed before.
    fn engine_finished(&mut self, index: usize, reason: FinishReason) {
        let Some(choice) = self.choices.get_mut(index) else { return };
        choice.ended = true;
        if choice.open {
            let piece = choice.assembler.finish();
            let stop_token = match reason {
                FinishReason::Stop(token) => Some(token),
                FinishReason::Length | FinishReason::Cancelled => None,
            };
            choice.stop_token = stop_token.is_some();
            let reason = match reason {
                FinishReason::Stop(_) => "stop",
                FinishReason::Length => "length",
                FinishReason::Cancelled => "abort",
            };
            // The last held-back characters may have completed a stop string.
            let reason = if piece.ended.is_some() { "stop" } else { reason };
            let stop = piece.ended.and_then(|end| self.stop_string(end));
            let events = self.with_ids(piece.events);
            let choice = self.number(index);
            self.send(Output::Delta { choice, token: None, events, logprobs: Vec::new() });
            self.close(index, Finish { reason, stop, stop_token });
        }
        self.ticket.finished |= self.choices.iter().all(|choice| choice.ended);
    }

    /// The stop string behind an end.
    fn stop_string(&self, end: TextEnd) -> Option<String> {
        match end {
            TextEnd::Stop(index) => self.stops.get(index).cloned(),
            TextEnd::Call => None,
        }
    }

    /// Gives every call an id. Templates of Mistral models take only nine letters and digits.
    fn with_ids(&self, mut events: Vec<ReplyEvent>) -> Vec<ReplyEvent> {
        for event in &mut events {
            let ReplyEvent::CallStarted { id, .. } = event else { continue };
            let name = self.ticket.app.ids.name();
            match self.dialect {
                Some(Dialect::Mistral) if id.as_ref().is_some_and(|id| id.len() == 9) => {}
                Some(Dialect::Mistral) => *id = Some(name[name.len() - 9..].to_owned()),
                _ => *id = Some(format!("call_{}", &name[name.len() - 24..])),
            }
        }
        events
    }

    /// Ends a choice. One that stopped after complete tool calls says so.
    fn close(&mut self, index: usize, mut finish: Finish) {
        self.choices[index].open = false;
        let (calls, malformed) = self.choices[index].assembler.calls();
        if calls > 0 && finish.reason == "stop" && finish.stop.is_none() {
            finish.reason = "tool_calls";
        }
        self.ticket.app.metrics.tool_calls(calls, malformed);
        self.ticket.app.metrics.finished(finish.reason);
        self.send(Output::Finished { choice: self.number(index), finish });
    }

    fn fail(&mut self, error: RequestError) {
        self.ticket.app.metrics.finished("error");
        self.send(Output::Failed(error));
    }

    fn send(&self, output: Output) {
        // A listener that has gone is noticed by `run`.
        let _ = self.outputs.send(output);
    }

    fn number(&self, index: usize) -> usize {
        self.prompt * self.choices.len() + index
    }

    fn observe(&self) {
        let metrics = &self.ticket.app.metrics;
        let elapsed = self.submitted.elapsed();
        let decode = self.first_token.map(|first| first.elapsed());
        let totals = self.totals();
        let per_choice = totals.usage.completion_tokens / self.choices.len().max(1);
        metrics.request_done(totals, elapsed, decode.filter(|_| per_choice > 1), per_choice);
        tracing::debug!(usage = ?totals.usage, ms = elapsed.as_millis() as u64, "generated");
    }
}
