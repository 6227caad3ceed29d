//! The engine's numbers.

use crate::request::{EngineStats, RequestId, RunningRequest};
use crate::sequences::Job;
use crate::worker::Worker;
use oscar_backend::Backend;
use oscar_cache::CachedPages;
use std::time::{Duration, Instant};

/// Counting the pages of the prefix cache looks at all of it, so it is not done after every step.
const RECOUNT_AFTER: Duration = Duration::from_millis(50);

/// What only grows, and the last count of the prefix cache.
#[derive(Debug, Default)]
pub struct Counters {
    pub steps: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub generated_tokens: u64,
    pub finished: u64,
    pub cancelled: u64,
    pub failed: u64,
    pub preemptions: u64,
    pub demoted_tokens: u64,
    pub demoted_tail_hits: u64,
    pub demoted_tail_pages: u64,
    pub evicted_pages: u64,
    pub busy_seconds: f64,
    cached: CachedPages,
    counted: Option<Instant>,
}

impl<B: Backend> Worker<B> {
    /// Brings the public snapshot up to date; `exact` counts the prefix cache's pages too.
    pub(crate) fn publish_statistics(&mut self, exact: bool) {
        let stale = self.counters.counted.is_none_or(|at| at.elapsed() >= RECOUNT_AFTER);
        if exact || stale {
            self.counters.cached = self.cache.as_ref().map(|cache| cache.pages()).unwrap_or_default();
            self.counters.counted = Some(Instant::now());
        }
        let layout = self.runner.layout();
        let usage = self.runner.usage();
        let (c, cached) = (&self.counters, &self.counters.cached);
        let in_tree = self.cache.as_ref().map_or(0, |cache| cache.tokens());
        let beyond: usize = self.choices.values().map(|c| c.stored().saturating_sub(c.published)).sum();
        let requests: Vec<RunningRequest> = self
            .jobs
            .iter()
            .filter(|(_, job)| job.live.iter().any(|id| self.choices[id].sequence.is_some()))
            .map(|(&id, job)| self.running_request(id, job))
            .collect();
        let stats = EngineStats {
            running: requests.len(),
            waiting: self.jobs.len() - requests.len(),
            steps: c.steps,
            prompt_tokens: c.prompt_tokens,
            cached_tokens: c.cached_tokens,
            generated_tokens: c.generated_tokens,
            finished: c.finished,
            cancelled: c.cancelled,
            failed: c.failed,
            preemptions: c.preemptions,
            demoted_tokens: c.demoted_tokens,
            demoted_tail_hits: c.demoted_tail_hits,
            demoted_tail_pages: c.demoted_tail_pages,
            evicted_pages: c.evicted_pages,
            full_pages: usage.full_pages,
            coded_pages: usage.coded_pages,
            cached_full_pages: cached.idle_full.min(usage.full_pages),
            cached_coded_pages: cached.idle_coded.min(usage.coded_pages),
            // Full pages kept beside their codes only because there is room are not what the cache takes.
            cache_bytes: usage.bytes.saturating_sub(cached.spare_full * layout.full_block_bytes()),
            bf16_bytes: (in_tree + beyond) * layout.elements_per_token() * 2,
            busy_seconds: c.busy_seconds,
            requests,
        };
        *self.shared.stats() = stats;
    }

    fn running_request(&self, id: RequestId, job: &Job) -> RunningRequest {
        let layout = self.runner.layout();
        let windows = layout.windows();
        let mut request = RunningRequest {
            id,
            prompt_tokens: job.prompt_tokens,
            generated_tokens: job.completion_tokens,
            cached_tokens: job.cached_tokens,
            sink_tokens: 0,
            coded_tokens: 0,
            recent_tokens: 0,
            bytes: 0,
        };
        for choice in job.live.iter().map(|id| &self.choices[id]) {
            let Some(sequence) = &choice.sequence else { continue };
            let len = sequence.len();
            let (sink, coded) = match layout.coded() {
                Some(_) if len > 0 => {
                    (len.min(windows.sink()), sequence.pages().boundary(layout) - windows.sink())
                }
                _ => (0, 0),
            };
            request.sink_tokens += sink;
            request.coded_tokens += coded;
            request.recent_tokens += len - sink - coded;
            request.bytes += sequence.pages().bytes(layout);
        }
        request
    }
}
