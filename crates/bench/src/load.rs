//! Sends requests to an engine and times what comes back.
//!
//! **Invariant:** times are taken where events are made (the engine's thread), and an open-loop
//! request counts as sent when it was due, so a slow driver or a full queue cannot flatter a
//! latency.

use anyhow::{Result, bail};
use oscar_codec::random::SplitMix64;
use oscar_engine::{
    EngineApi, Event, EventSink, GenerationParams, Request, RequestId, RunningRequest, SharedConstraint,
};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// How often the engine's gauges are read while no event comes.
const POLL: Duration = Duration::from_millis(2);

/// When conversations begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// One more whenever one has ended.
    Closed { concurrency: usize },
    /// At random times, independent of the engine.
    Open { rate: f64, seed: u64 },
}

/// The work.
#[derive(Clone)]
pub struct Load {
    /// For each conversation what each turn adds.
    pub conversations: Vec<Vec<Vec<u32>>>,
    pub output_tokens: usize,
    pub arrivals: Arrivals,
    /// The form that answers must have. No answer of it may end before `output_tokens`.
    pub constraint: Option<SharedConstraint>,
}

/// What came of it.
#[derive(Debug, Default)]
pub struct Outcome {
    pub requests: usize,
    pub seconds: f64,
    /// Most requests in the batch at once, those whose prompt was only partly stored included.
    pub peak_running: usize,
    /// Most requests at once whose whole prompt was in the cache: what the memory really holds.
    pub peak_held: usize,
    pub peak_cache_bytes: usize,
    pub preemptions: u64,
    pub evicted_pages: u64,
    pub ttft_ms: Option<Percentiles>,
    /// Time of each token after the first, averaged over an answer; none if answers have one token.
    pub tpot_ms: Option<Percentiles>,
    /// Time between two tokens of an answer, over all of them.
    pub inter_token_ms: Option<Percentiles>,
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub output_tokens: usize,
    /// Time in which at least one answer was between its first and last token.
    pub decoding_seconds: f64,
}

impl Outcome {
    pub fn requests_per_s(&self) -> f64 {
        self.requests as f64 / self.seconds
    }

    pub fn tokens_per_s(&self) -> f64 {
        self.output_tokens as f64 / self.seconds
    }

    /// Tokens after the first of each answer, over the time in which any answer was being
    /// continued.
    pub fn decode_tokens_per_s(&self) -> Option<f64> {
        let tokens = self.output_tokens - self.requests;
        (tokens > 0 && self.decoding_seconds > 0.0).then(|| tokens as f64 / self.decoding_seconds)
    }

    pub fn prefix_hit_share(&self) -> f64 {
        self.cached_tokens as f64 / self.prompt_tokens as f64
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Percentiles {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
}

impl Percentiles {
    /// Nearest rank: every percentile is a value that was measured.
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let last = values.len().checked_sub(1)?;
        let at = |share: f64| values[((values.len() as f64 * share).ceil() as usize).clamp(1, last + 1) - 1];
        Some(Self { p50: at(0.5), p90: at(0.9), p99: at(0.99) })
    }
}

/// When each of `count` conversations is due, after the start; `None` if that depends on the
/// answers.
fn due_times(arrivals: Arrivals, count: usize) -> Option<Vec<Duration>> {
    let Arrivals::Open { rate, seed } = arrivals else { return None };
    let mut random = SplitMix64::new(seed ^ 0xA55A_0000_0000);
    let mut at = 0.0;
    let gaps = (0..count).map(|_| {
        at += -random.uniform().ln() / rate;
        Duration::from_secs_f64(at)
    });
    Some(gaps.collect())
}

/// An event and when the engine made it.
pub(crate) struct Arrival {
    pub id: RequestId,
    pub at: Instant,
    pub event: Event,
}

pub(crate) struct TimedSink {
    pub id: RequestId,
    pub out: Sender<Arrival>,
}

impl EventSink for TimedSink {
    fn send(&self, event: Event) -> bool {
        self.out.send(Arrival { id: self.id, at: Instant::now(), event }).is_ok()
    }
}

/// One conversation on its way.
struct Conversation {
    tokens: Vec<u32>,
    turn: usize,
    sent: Instant,
    first: Option<Instant>,
    last: Instant,
    answered: usize,
}

/// Everything a run keeps track of.
struct Driver<'a, E: EngineApi> {
    load: &'a Load,
    engine: &'a E,
    out: Sender<Arrival>,
    conversations: Vec<Option<Conversation>>,
    begun: usize,
    ended: usize,
    decoding: usize,
    decoding_since: Instant,
    ttft_ms: Vec<f64>,
    tpot_ms: Vec<f64>,
    inter_token_ms: Vec<f64>,
    outcome: Outcome,
}

impl Load {
    /// The same first prompts, one after the other, each with a single token of answer.
    pub fn warm_up(&self) -> Self {
        let first = |turns: &Vec<Vec<u32>>| turns[..1].to_vec();
        Self {
            conversations: self.conversations.iter().map(first).collect(),
            output_tokens: 1,
            arrivals: Arrivals::Closed { concurrency: 1 },
            constraint: None,
        }
    }

    /// Runs the work to its end; `progress` hears how many requests are done.
    ///
    /// # Errors
    /// If the engine refuses, fails or cuts short any request: the formats would not have done the
    /// same work.
    pub fn drive<E: EngineApi>(&self, engine: &E, progress: impl FnMut(usize)) -> Result<Outcome> {
        let (out, events) = channel();
        let started = Instant::now();
        let driver = Driver {
            load: self,
            engine,
            out,
            conversations: self.conversations.iter().map(|_| None).collect(),
            begun: 0,
            ended: 0,
            decoding: 0,
            decoding_since: started,
            ttft_ms: Vec::new(),
            tpot_ms: Vec::new(),
            inter_token_ms: Vec::new(),
            outcome: Outcome::default(),
        };
        driver.run(started, &events, progress)
    }
}

impl<E: EngineApi> Driver<'_, E> {
    fn run(
        mut self,
        started: Instant,
        events: &Receiver<Arrival>,
        mut progress: impl FnMut(usize),
    ) -> Result<Outcome> {
        let before = self.engine.stats();
        let count = self.load.conversations.len();
        let due = due_times(self.load.arrivals, count);
        let mut end = started;
        while self.ended < count {
            let mut wait = POLL;
            while self.begun < count {
                let sent = match (&due, self.load.arrivals) {
                    (Some(due), _) => {
                        let at = started + due[self.begun];
                        let now = Instant::now();
                        if at > now {
                            wait = wait.min(at - now);
                            break;
                        }
                        at
                    }
                    (None, Arrivals::Closed { concurrency }) if self.begun - self.ended >= concurrency => {
                        break;
                    }
                    (None, _) => Instant::now(),
                };
                self.begin(sent)?;
            }
            match events.recv_timeout(wait) {
                Ok(arrival) => {
                    for arrival in std::iter::once(arrival).chain(events.try_iter()) {
                        end = arrival.at;
                        self.take(arrival)?;
                    }
                    progress(self.outcome.requests);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => bail!("the engine ended before the work was done"),
            }
            let now = self.engine.stats();
            self.outcome.peak_running = self.outcome.peak_running.max(now.running);
            let holds_prompt =
                |r: &&RunningRequest| r.sink_tokens + r.coded_tokens + r.recent_tokens >= r.prompt_tokens;
            let held = now.requests.iter().filter(holds_prompt).count();
            self.outcome.peak_held = self.outcome.peak_held.max(held);
            self.outcome.peak_cache_bytes = self.outcome.peak_cache_bytes.max(now.cache_bytes);
        }
        let after = self.engine.stats();
        self.outcome.preemptions = after.preemptions - before.preemptions;
        self.outcome.evicted_pages = after.evicted_pages - before.evicted_pages;
        self.outcome.seconds = (end - started).as_secs_f64();
        self.outcome.ttft_ms = Percentiles::of(self.ttft_ms);
        self.outcome.tpot_ms = Percentiles::of(self.tpot_ms);
        self.outcome.inter_token_ms = Percentiles::of(self.inter_token_ms);
        Ok(self.outcome)
    }

    fn begin(&mut self, sent: Instant) -> Result<()> {
        let which = self.begun;
        self.begun += 1;
        let tokens = self.load.conversations[which][0].clone();
        self.conversations[which] =
            Some(Conversation { tokens, turn: 0, sent, first: None, last: sent, answered: 0 });
        self.submit(which)
    }

    fn submit(&self, which: usize) -> Result<()> {
        let Some(conversation) = &self.conversations[which] else { return Ok(()) };
        let id = RequestId(which as u64);
        let params = GenerationParams {
            max_tokens: self.load.output_tokens,
            constraint: self.load.constraint.clone(),
            ..Default::default()
        };
        let sink = Box::new(TimedSink { id, out: self.out.clone() });
        let request = Request::new(self.engine.info(), id, conversation.tokens.clone(), params)?;
        self.engine.submit(request, sink)?;
        Ok(())
    }

    fn take(&mut self, Arrival { id, at, event }: Arrival) -> Result<()> {
        let which = id.0 as usize;
        let Some(conversation) = &mut self.conversations[which] else { return Ok(()) };
        match event {
            Event::Started { .. } | Event::Embedding(_) | Event::Kept(_) | Event::Finished { .. } => {}
            Event::Token { token, .. } => {
                if conversation.first.is_none() {
                    conversation.first = Some(at);
                    if self.decoding == 0 {
                        self.decoding_since = at;
                    }
                    self.decoding += 1;
                } else {
                    self.inter_token_ms.push((at - conversation.last).as_secs_f64() * 1e3);
                }
                conversation.last = at;
                conversation.answered += 1;
                conversation.tokens.push(token);
            }
            Event::Failed(error) => bail!(error),
            Event::Done(usage) => {
                let (answered, wanted) = (conversation.answered, self.load.output_tokens);
                let Some(first) = conversation.first.filter(|_| answered == wanted) else {
                    bail!(
                        "an answer ended after {answered} of {wanted} tokens: the cache is too small, give more --kv-memory"
                    );
                };
                let last = conversation.last;
                self.decoding -= 1;
                if self.decoding == 0 {
                    self.outcome.decoding_seconds += (last - self.decoding_since).as_secs_f64();
                }
                self.ttft_ms.push((first - conversation.sent).as_secs_f64() * 1e3);
                if answered > 1 {
                    self.tpot_ms.push((last - first).as_secs_f64() * 1e3 / (answered - 1) as f64);
                }
                self.outcome.requests += 1;
                self.outcome.prompt_tokens += usage.prompt_tokens;
                self.outcome.cached_tokens += usage.cached_tokens;
                self.outcome.output_tokens += answered;
                conversation.turn += 1;
                match self.load.conversations[which].get(conversation.turn) {
                    Some(more) => {
                        conversation.tokens.extend(more);
                        conversation.first = None;
                        conversation.answered = 0;
                        conversation.sent = at;
                        self.submit(which)?;
                    }
                    None => {
                        self.conversations[which] = None;
                        self.ended += 1;
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_measured_values() {
        let p = Percentiles::of((1..=100).rev().map(f64::from).collect()).unwrap();
        assert_eq!((p.p50, p.p90, p.p99), (50.0, 90.0, 99.0));
        let one = Percentiles::of(vec![7.0]).unwrap();
        assert_eq!((one.p50, one.p99), (7.0, 7.0));
        assert_eq!(Percentiles::of(Vec::new()), None);
    }

    #[test]
    fn open_arrivals_keep_their_rate_and_their_seed() {
        let due = |seed| due_times(Arrivals::Open { rate: 50.0, seed }, 4000).unwrap();
        let times = due(3);
        assert!(times.windows(2).all(|w| w[0] <= w[1]));
        let rate = 4000.0 / times[3999].as_secs_f64();
        assert!((47.0..53.0).contains(&rate), "{rate}");
        // Exponential gaps: as wide as their mean, unlike a metronome's.
        let gaps: Vec<f64> = times.windows(2).map(|w| (w[1] - w[0]).as_secs_f64() * 50.0).collect();
        let variance = gaps.iter().map(|g| (g - 1.0).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((0.85..1.15).contains(&variance), "{variance}");
        assert_eq!(times, due(3));
        assert_ne!(times, due(4));
        assert_eq!(due_times(Arrivals::Closed { concurrency: 2 }, 5), None);
    }
}
