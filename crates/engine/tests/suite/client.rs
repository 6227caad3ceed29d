//! A client of the engine that collects what it is sent.

use oscar_engine::{
    EngineApi, EngineHandle, Event, EventSink, FinishReason, GenerationParams, Request, RequestError,
    RequestId, Ticket, TokenLogprobs, Usage,
};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

struct ChannelSink(Sender<Event>);

impl EventSink for ChannelSink {
    fn send(&self, event: Event) -> bool {
        self.0.send(event).is_ok()
    }
}

/// A request under way.
pub struct Call {
    pub id: RequestId,
    pub events: Receiver<Event>,
}

#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub logprobs: Vec<TokenLogprobs>,
    pub reason: Option<FinishReason>,
}

#[derive(Debug, Default)]
pub struct Outcome {
    pub answers: BTreeMap<usize, Answer>,
    pub cached: usize,
    pub approximate: bool,
    pub prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    pub embedding: Option<Vec<f32>>,
    pub kept: Option<Ticket>,
    pub usage: Usage,
    pub failed: Option<RequestError>,
}

pub fn submit(engine: &EngineHandle, prompt: &[u32], params: GenerationParams) -> Result<Call, RequestError> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let id = RequestId(NEXT.fetch_add(1, Ordering::Relaxed));
    let (sender, events) = channel();
    let request = Request::new(engine.info(), id, prompt.to_vec(), params)?;
    engine.submit(request, Box::new(ChannelSink(sender)))?;
    Ok(Call { id, events })
}

impl Call {
    /// Collects everything to the end; checks the order of events. Cancels after `cancel_after` tokens.
    pub fn finish(self, engine: &EngineHandle, cancel_after: Option<usize>) -> Outcome {
        let mut outcome = Outcome::default();
        let (mut started, mut seen) = (false, 0);
        if cancel_after == Some(0) {
            engine.cancel(self.id);
        }
        loop {
            let event = match self.events.recv_timeout(Duration::from_secs(60)) {
                Ok(event) => event,
                Err(error) => panic!("no answer ({error}) from the engine at {:#?}", engine.stats()),
            };
            match event {
                Event::Started { cached_tokens, approximate, prompt_logprobs, .. } => {
                    assert!(!started, "Started comes once");
                    started = true;
                    outcome.cached = cached_tokens;
                    outcome.approximate = approximate;
                    outcome.prompt_logprobs = prompt_logprobs;
                }
                Event::Embedding(values) => {
                    assert!(started, "the vector follows Started");
                    assert_eq!(outcome.embedding.replace(values), None, "it comes once");
                }
                Event::Kept(ticket) => {
                    assert!(started && outcome.kept.is_none(), "a ticket follows Started and comes once");
                    outcome.kept = ticket;
                }
                Event::Token { choice, token, logprobs } => {
                    assert!(started, "tokens follow Started");
                    let answer = outcome.answers.entry(choice).or_default();
                    assert_eq!(answer.reason, None, "no token after the end of a choice");
                    answer.tokens.push(token);
                    answer.logprobs.extend(logprobs);
                    seen += 1;
                    if cancel_after == Some(seen) {
                        engine.cancel(self.id);
                    }
                }
                Event::Finished { choice, reason } => {
                    let answer = outcome.answers.entry(choice).or_default();
                    assert_eq!(answer.reason.replace(reason), None, "a choice ends once");
                }
                Event::Done(usage) => {
                    outcome.usage = usage;
                    assert!(outcome.answers.values().all(|a| a.reason.is_some()));
                    break;
                }
                Event::Failed(error) => {
                    outcome.failed = Some(error);
                    break;
                }
            }
        }
        // The engine drops the sink after the last event.
        assert!(self.events.recv_timeout(Duration::from_secs(10)).is_err(), "nothing follows the last event");
        outcome
    }
}
