//! Streams that decode while a long prompt is read: what each costs the other.

use crate::load::{Arrival, Percentiles, TimedSink};
use anyhow::{Result, bail};
use oscar_engine::{EngineApi, Event, GenerationParams, Request, RequestId};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// The work: streams with their own prompts, and one prompt that is read beside them.
pub struct Streams {
    pub prompts: Vec<Vec<u32>>,
    /// Most tokens of a stream: enough for the long prompt to be read meanwhile.
    pub stream_tokens: usize,
    pub long_prompt: Vec<u32>,
    /// How long the streams run by themselves first.
    pub quiet: Duration,
}

/// What came of it.
#[derive(Debug)]
pub struct StreamsOutcome {
    /// Time to the first token of the long prompt with nothing beside it.
    pub alone_ttft_ms: f64,
    pub beside_ttft_ms: f64,
    /// Time between two tokens of a stream while nothing else runs.
    pub quiet_ms: Percentiles,
    /// The same while the long prompt is read.
    pub busy_ms: Percentiles,
    pub worst_ms: f64,
    /// When the worst of them ended, after the prompt came.
    pub worst_after_ms: f64,
    pub busy_tokens: usize,
}

/// The id of the long prompt; streams count from zero.
const LONG: RequestId = RequestId(u64::MAX);
/// No answer of the engine takes longer.
const PATIENCE: Duration = Duration::from_secs(600);

struct Driver<'a, E: EngineApi> {
    engine: &'a E,
    sender: Sender<Arrival>,
    events: Receiver<Arrival>,
    /// When each stream's last token came.
    last: Vec<Option<Instant>>,
    /// Time between two tokens, and when it ended.
    gaps: Vec<(Instant, f64)>,
}

impl Streams {
    /// Measures the prompt alone, then beside the streams. The prefix cache is emptied before each.
    pub fn drive<E: EngineApi>(&self, engine: &E) -> Result<StreamsOutcome> {
        let (sender, events) = channel();
        let last = vec![None; self.prompts.len()];
        let mut driver = Driver { engine, sender, events, last, gaps: Vec::new() };
        // The first steps of a process choose and load kernels.
        if let Some(prompt) = self.prompts.first() {
            driver.read(prompt)?;
        }
        engine.flush_cache();
        let alone_ttft_ms = driver.read(&self.long_prompt)?;
        engine.flush_cache();

        for (id, prompt) in self.prompts.iter().enumerate() {
            driver.submit(RequestId(id as u64), prompt, self.stream_tokens)?;
        }
        while driver.last.contains(&None) {
            driver.take(PATIENCE)?;
        }
        driver.gaps.clear();
        let until = Instant::now() + self.quiet;
        while Instant::now() < until {
            driver.take(PATIENCE)?;
        }
        let quiet: Vec<f64> = driver.gaps.drain(..).map(|(_, ms)| ms).collect();

        let sent = Instant::now();
        driver.submit(LONG, &self.long_prompt, 1)?;
        let first = loop {
            if let Some(first) = driver.take(PATIENCE)? {
                break first;
            }
        };
        // A gap that began before the prompt came belongs to neither.
        let beside =
            |(end, ms): &(Instant, f64)| *end - Duration::from_secs_f64(ms / 1e3) >= sent && *end <= first;
        driver.gaps.retain(beside);
        let busy: Vec<f64> = driver.gaps.iter().map(|(_, ms)| *ms).collect();
        let worst = driver.gaps.iter().max_by(|a, b| a.1.total_cmp(&b.1));
        let worst_after_ms = worst.map_or(0.0, |(end, _)| (*end - sent).as_secs_f64() * 1e3);
        for id in 0..self.prompts.len() {
            engine.cancel(RequestId(id as u64));
        }
        let (worst_ms, busy_tokens) = (busy.iter().copied().fold(0.0, f64::max), busy.len());
        let (Some(quiet_ms), Some(busy_ms)) = (Percentiles::of(quiet), Percentiles::of(busy)) else {
            bail!("too few tokens to measure: give a longer prompt");
        };
        let beside_ttft_ms = (first - sent).as_secs_f64() * 1e3;
        Ok(StreamsOutcome {
            alone_ttft_ms,
            beside_ttft_ms,
            quiet_ms,
            busy_ms,
            worst_ms,
            worst_after_ms,
            busy_tokens,
        })
    }
}

impl<E: EngineApi> Driver<'_, E> {
    fn submit(&self, id: RequestId, prompt: &[u32], max_tokens: usize) -> Result<()> {
        let params = GenerationParams { max_tokens, ..Default::default() };
        let request = Request::new(self.engine.info(), id, prompt.to_vec(), params)?;
        Ok(self.engine.submit(request, Box::new(TimedSink { id, out: self.sender.clone() }))?)
    }

    /// Reads a prompt by itself; milliseconds to its first token.
    fn read(&mut self, prompt: &[u32]) -> Result<f64> {
        let sent = Instant::now();
        self.submit(LONG, prompt, 1)?;
        let mut first = None;
        loop {
            let Arrival { at, event, .. } = self.next(PATIENCE)?;
            match (event, first) {
                (Event::Token { .. }, _) => first = Some((at - sent).as_secs_f64() * 1e3),
                (Event::Failed(error), _) => bail!(error),
                (Event::Done(_), Some(first)) => return Ok(first),
                (Event::Done(_), None) => bail!("the prompt ended without a token: give more --kv-memory"),
                _ => {}
            }
        }
    }

    /// Takes one event; returns when the first token of the long prompt came, if this is it.
    fn take(&mut self, patience: Duration) -> Result<Option<Instant>> {
        let Arrival { id, at, event } = self.next(patience)?;
        match event {
            Event::Token { .. } if id == LONG => return Ok(Some(at)),
            Event::Token { .. } => {
                let last = &mut self.last[id.0 as usize];
                if let Some(before) = last.replace(at) {
                    self.gaps.push((at, (at - before).as_secs_f64() * 1e3));
                }
            }
            Event::Failed(error) => bail!(error),
            Event::Done(_) if id != LONG => {
                bail!(
                    "a stream ended before the prompt was read: give it more --stream-tokens or --kv-memory"
                )
            }
            _ => {}
        }
        Ok(None)
    }

    fn next(&mut self, patience: Duration) -> Result<Arrival> {
        match self.events.recv_timeout(patience) {
            Ok(arrival) => Ok(arrival),
            Err(RecvTimeoutError::Timeout) => bail!("nothing came for {patience:?}"),
            Err(RecvTimeoutError::Disconnected) => bail!("the engine ended before the work was done"),
        }
    }
}
