//! One greedy request to an engine in this process, and when its tokens came.

use anyhow::{Context, Result, ensure};
use oscar_engine::{
    EngineApi, EngineHandle, Event, EventSink, GenerationParams, KvRequest, Request, RequestId,
    SamplingParams, Usage,
};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

/// A whole answer.
pub struct Answer {
    pub tokens: Vec<u32>,
    /// From the request to each token; there is at least one.
    pub times: Vec<Duration>,
    /// Tokens of the prompt that the cache held.
    pub cached: usize,
    pub usage: Usage,
}

impl Answer {
    /// From the request to the first token.
    pub fn first_token(&self) -> Duration {
        self.times[0]
    }

    /// Mean time between two tokens.
    pub fn between_tokens(&self) -> Duration {
        let gaps = (self.times.len() - 1).max(1) as u32;
        (self.times[self.times.len() - 1] - self.times[0]) / gaps
    }
}

/// Sends the engine's events with their times.
struct TimedSink(Sender<(Instant, Event)>);

impl EventSink for TimedSink {
    fn send(&self, event: Event) -> bool {
        self.0.send((Instant::now(), event)).is_ok()
    }
}

/// Sends a prompt and waits for the whole answer.
pub fn ask(
    engine: &EngineHandle,
    id: RequestId,
    prompt: Vec<u32>,
    max_tokens: usize,
    kv: KvRequest,
) -> Result<Answer> {
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let params = GenerationParams { sampling, max_tokens, kv, ..GenerationParams::default() };
    let request = Request::new(engine.info(), id, prompt, params)?;
    let (sender, events) = channel();
    let sent = Instant::now();
    engine.submit(request, Box::new(TimedSink(sender)))?;
    let (mut cached, mut tokens, mut times) = (0, Vec::new(), Vec::new());
    let usage = loop {
        match events.recv().context("the engine stopped answering")? {
            (_, Event::Started { cached_tokens, .. }) => cached = cached_tokens,
            (at, Event::Token { token, .. }) => {
                tokens.push(token);
                times.push(at - sent);
            }
            (_, Event::Done(usage)) => break usage,
            (_, Event::Failed(error)) => return Err(error.into()),
            (_, Event::Embedding(_) | Event::Kept(_) | Event::Finished { .. }) => {}
        }
    };
    ensure!(!tokens.is_empty(), "no token came");
    Ok(Answer { tokens, times, cached, usage })
}
