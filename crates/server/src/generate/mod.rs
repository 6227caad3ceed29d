//! From prepared prompts to text: submits to the engine, turns its events into pieces of text, cancels.
//!
//! Each prompt has a task that reads the engine's events as they come, so that neither a slow client nor a full
//! socket ever holds the engine back, and a stop string ends the work at once. What a slow client has not read
//! waits in a queue no longer than the tokens it asked for.
//!
//! **Invariant:** a request that is not finished is cancelled when its receiver goes away, whatever the reason.

mod assemble;
mod logprobs;
mod reasoning;

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use oscar_engine::{
    Event, EventSink, FinishReason, GenerationParams, Request, RequestError, RequestId, TokenLogprobs,
};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tracing::Instrument;

pub use assemble::{Assembler, TextOptions};
pub use logprobs::{ChatEntry, MAX_LOGPROBS, PromptLogprobs, TokenTexts, TopLogprobs, finite};

use crate::app::App;
use crate::error::ApiError;
use crate::keys::{Admission, Caller};
use crate::limits;
use reasoning::Split;

/// What an endpoint asks for, in tokens.
#[derive(Clone, Debug)]
pub struct Job {
    /// The name by which `/abort_request` and the logs know it.
    pub name: String,
    pub caller: Caller,
    pub prompts: Vec<Vec<u32>>,
    pub params: GenerationParams,
    pub text: TextOptions,
}

impl Job {
    fn prompt_tokens(&self) -> usize {
        self.prompts.iter().map(Vec::len).sum()
    }

    /// About how many bytes the answer can have.
    pub fn answer_size(&self) -> usize {
        const TOKEN: usize = 8;
        const LOGPROB: usize = 64;
        let tokens = limits::tokens_in_flight(&self.params, 0, self.prompts.len());
        let logprobs = limits::logprobs(&self.params, self.prompt_tokens(), self.prompts.len());
        tokens.saturating_mul(TOKEN).saturating_add(logprobs.saturating_mul(LOGPROB))
    }
}

/// A step of a generation. `prompt` counts prompts, `choice` counts all choices of all prompts.
#[derive(Debug)]
pub enum Output {
    Started {
        prompt: usize,
        prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    },
    Delta {
        choice: usize,
        content: String,
        reasoning: String,
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
}

/// Token counts of a prompt or of a whole response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub prompt: usize,
    pub cached: usize,
    pub completion: usize,
    pub reasoning: usize,
    /// The cached tokens ended in a demoted tail, in any of the prompts.
    pub demoted_tail: bool,
}

impl std::ops::AddAssign for Totals {
    fn add_assign(&mut self, other: Self) {
        self.prompt += other.prompt;
        self.cached += other.cached;
        self.completion += other.completion;
        self.reasoning += other.reasoning;
        self.demoted_tail |= other.demoted_tail;
    }
}

/// The outputs of a job. Dropping it cancels what is not finished.
#[derive(Debug)]
pub struct Generation {
    outputs: UnboundedReceiver<Output>,
    prompts_left: usize,
}

impl Generation {
    /// Hands the job's prompts to the engine. If one is refused, those before it are cancelled.
    pub fn start(app: &Arc<App>, job: &Job) -> Result<Self, ApiError> {
        let (sender, outputs) = unbounded_channel();
        let (count, tokens) = (job.prompts.len(), job.prompt_tokens());
        let admission = job.caller.admit(
            count.saturating_mul(job.params.choices),
            limits::tokens_in_flight(&job.params, tokens, count),
            app.config.retry_after_seconds,
        )?;
        let admission = Arc::new(admission);
        for (index, prompt) in job.prompts.iter().enumerate() {
            let worker = Worker::new(app, job, index, prompt.len(), sender.clone(), admission.clone())?;
            worker.submit(prompt.clone(), job.params.clone())?;
        }
        Ok(Self { outputs, prompts_left: job.prompts.len() })
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

/// Cancels its request and forgets its name when dropped; cancelling a finished request does nothing.
struct Ticket {
    app: Arc<App>,
    id: RequestId,
    name: String,
    finished: bool,
    /// Counts against the tenant's quota until all prompts of the job have ended.
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

/// The task behind one prompt.
struct Worker {
    ticket: Ticket,
    outputs: UnboundedSender<Output>,
    prompt: usize,
    choices: Vec<Choice>,
    stops: Vec<String>,
    max_tokens: usize,
    totals: Totals,
    submitted: Instant,
    first_token: Option<Instant>,
}

struct Choice {
    assembler: Assembler,
    /// Text may still come.
    open: bool,
    /// The engine has ended it.
    ended: bool,
    last_token: Option<Instant>,
}

impl Worker {
    fn new(
        app: &Arc<App>,
        job: &Job,
        prompt: usize,
        prompt_tokens: usize,
        outputs: UnboundedSender<Output>,
        admission: Arc<Admission>,
    ) -> Result<Self, ApiError> {
        let choices = (0..job.params.choices)
            .map(|_| {
                let assembler = Assembler::new(&app.text.tokenizer, &job.text)?;
                Ok(Choice { assembler, open: true, ended: false, last_token: None })
            })
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| ApiError::text("stop", &error))?;
        let ticket = Ticket {
            app: app.clone(),
            id: app.next_request_id(),
            name: job.name.clone(),
            finished: true,
            _admission: admission,
        };
        app.running.insert(&ticket.name, ticket.id, &job.caller);
        Ok(Self {
            ticket,
            outputs,
            prompt,
            choices,
            stops: job.text.stop.clone(),
            max_tokens: job.params.max_tokens,
            totals: Totals { prompt: prompt_tokens, ..Totals::default() },
            submitted: Instant::now(),
            first_token: None,
        })
    }

    fn submit(mut self, prompt: Vec<u32>, params: GenerationParams) -> Result<(), ApiError> {
        let (sender, events) = unbounded_channel();
        let app = self.ticket.app.clone();
        Request::new(app.engine.info(), self.ticket.id, prompt, params)
            .and_then(|request| app.engine.submit(request, Box::new(Channel(sender))))
            .map_err(|error| app.engine_error(error))?;
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

    /// Handles an event; true if nothing more is to be expected or wanted.
    fn take(&mut self, event: Event) -> bool {
        match event {
            Event::Started { cached_tokens, demoted_tail, prompt_logprobs } => {
                self.totals.cached = cached_tokens;
                self.totals.demoted_tail = demoted_tail;
                self.send(Output::Started { prompt: self.prompt, prompt_logprobs });
                false
            }
            Event::Token { choice, token, logprobs } => self.token(choice, token, logprobs),
            Event::Finished { choice, reason } => {
                self.engine_finished(choice, reason);
                let all_closed = self.choices.iter().all(|choice| !choice.open);
                all_closed && !self.ticket.finished
            }
            Event::Done(_) => {
                self.ticket.finished = true;
                for index in 0..self.choices.len() {
                    let full = self.choices[index].assembler.tokens >= self.max_tokens;
                    let reason = if full { FinishReason::Length } else { FinishReason::Cancelled };
                    self.engine_finished(index, reason);
                }
                true
            }
            Event::Failed(error) => {
                self.ticket.finished = true;
                self.fail(error);
                true
            }
        }
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
        self.totals.completion += 1;
        let stopped = piece.stopped;
        if stopped.is_some() {
            let rest = choice.assembler.finish();
            piece.text.content += &rest.text.content;
            piece.text.reasoning += &rest.text.reasoning;
        }
        self.send(Output::Delta {
            choice: number,
            content: piece.text.content,
            reasoning: piece.text.reasoning,
            logprobs: logprobs.into_iter().collect(),
        });
        match stopped {
            Some(stop) => {
                let stop = self.stops.get(stop).cloned();
                self.close(index, Finish { reason: "stop", stop })
            }
            None => false,
        }
    }

    /// The engine has ended a choice, which a stop string may have closed before.
    fn engine_finished(&mut self, index: usize, reason: FinishReason) {
        let Some(choice) = self.choices.get_mut(index) else { return };
        choice.ended = true;
        if choice.open {
            let piece = choice.assembler.finish();
            let reason = match reason {
                FinishReason::Stop => {
                    // The stop token is counted, though it is not delivered.
                    self.totals.completion += 1;
                    "stop"
                }
                FinishReason::Length => "length",
                FinishReason::Cancelled => "abort",
            };
            // The last held-back characters may have completed a stop string.
            let stop = piece.stopped.and_then(|stop| self.stops.get(stop).cloned());
            let reason = if stop.is_some() { "stop" } else { reason };
            let Split { content, reasoning } = piece.text;
            let choice = self.number(index);
            self.send(Output::Delta { choice, content, reasoning, logprobs: Vec::new() });
            self.close(index, Finish { reason, stop });
        }
        self.ticket.finished |= self.choices.iter().all(|choice| choice.ended);
    }

    /// Ends a choice; true if it was the last one, whose end brings the totals.
    fn close(&mut self, index: usize, finish: Finish) -> bool {
        self.choices[index].open = false;
        self.totals.reasoning += self.choices[index].assembler.reasoning_tokens;
        self.ticket.app.metrics.finished(finish.reason);
        self.send(Output::Finished { choice: self.number(index), finish });
        let last = self.choices.iter().all(|choice| !choice.open);
        if last {
            self.send(Output::Done(self.totals));
        }
        last
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
        let per_choice = self.totals.completion / self.choices.len().max(1);
        metrics.request_done(self.totals, elapsed, decode.filter(|_| per_choice > 1), per_choice);
        tracing::debug!(
            prompt_tokens = self.totals.prompt,
            cached_tokens = self.totals.cached,
            completion_tokens = self.totals.completion,
            ms = elapsed.as_millis() as u64,
            "generated"
        );
    }
}
