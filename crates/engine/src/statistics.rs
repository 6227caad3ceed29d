//! The engine's numbers.

use crate::live::{Live, LiveRequests};
use crate::post::Reading;
use crate::request::{EngineStats, RequestId, RunningRequest};
use crate::row_cap::history_rows;
use oscar_backend::Backend;
use oscar_cache::{CachedPages, RadixCache, Reclaimed};
use oscar_codec::CacheLayout;
use oscar_runner::Runner;
use std::time::{Duration, Instant};

/// Counting the pages of the prefix cache visits all of it, so it is not done after every step.
const RECOUNT_AFTER: Duration = Duration::from_millis(50);

/// Counters that the engine increments, and the last count of the prefix cache.
#[derive(Debug, Default)]
pub struct Statistics {
    /// Its counters are current; its gauges are filled in by [`Statistics::snapshot`].
    pub counters: EngineStats,
    cached: CachedPages,
    counted: Option<Instant>,
}

impl Statistics {
    /// Counts pages that were given up to make room.
    pub fn note_reclaimed(&mut self, reclaimed: &Reclaimed) {
        self.counters.evicted_pages += (reclaimed.evicted + reclaimed.thinned) as u64;
    }

    /// The numbers of this moment; `exact` counts the prefix cache's pages too.
    pub fn snapshot<B: Backend>(
        &mut self,
        runner: &Runner<B>,
        cache: Option<&RadixCache>,
        live: &LiveRequests,
        exact: bool,
    ) -> EngineStats {
        if exact || self.counted.is_none_or(|at| at.elapsed() >= RECOUNT_AFTER) {
            self.cached = cache.map(RadixCache::pages).unwrap_or_default();
            self.counted = Some(Instant::now());
        }
        let (layout, usage, cached) = (runner.layout(), runner.usage(), &self.cached);
        let in_tree = cache.map_or(0, RadixCache::tokens);
        let choices = live.open().flat_map(|(_, live)| live.choices.values());
        let beyond: usize = choices.map(|c| c.stored().saturating_sub(c.published)).sum();
        let running = live.open().filter(|(_, live)| live.is_running());
        let requests: Vec<_> = running.map(|(id, live)| running_request(id, live, layout)).collect();
        EngineStats {
            running: requests.len(),
            waiting: live.open().count() - requests.len(),
            full_pages: usage.full_pages,
            coded_pages: usage.coded_pages,
            cached_full_pages: cached.idle_full.min(usage.full_pages),
            cached_coded_pages: cached.idle_coded.min(usage.coded_pages),
            sliding_pages: usage.sliding_pages,
            cached_sliding_pages: cached.idle_sliding.min(usage.sliding_pages),
            states: usage.states,
            cached_states: cached.idle_states.min(usage.states),
            // Full pages that are kept beside quantized ones only because there is room do not
            // count.
            cache_bytes: usage.bytes.saturating_sub(cached.spare_full * layout.full_block_bytes()),
            // Pages of sliding layers and states are the same in a BF16 cache.
            bf16_bytes: (in_tree + beyond) * layout.grown_elements() * 2
                + usage.sliding_pages * layout.sliding_block_bytes()
                + usage.states * layout.state_bytes(),
            requests,
            ..self.counters.clone()
        }
    }
}

fn running_request(id: RequestId, live: &Live, layout: &CacheLayout) -> RunningRequest {
    let windows = layout.windows();
    let mut request = RunningRequest {
        id,
        prompt_tokens: live.usage.prompt_tokens,
        generated_tokens: live.usage.completion_tokens,
        cached_tokens: live.usage.cached_tokens,
        sink_tokens: 0,
        coded_tokens: 0,
        evicted_tokens: 0,
        recent_tokens: 0,
        bytes: 0,
        views: live
            .post
            .as_ref()
            .and_then(|post| post.reading.as_ref())
            .map_or_else(Vec::new, Reading::views),
    };
    for sequence in live.choices.values().filter_map(|choice| choice.sequence.as_ref()) {
        let len = sequence.len();
        let sink = layout.coded().map_or(0, |_| len.min(windows.sink()));
        let (history, kept) = history_rows(layout, sequence);
        request.sink_tokens += sink;
        request.coded_tokens += kept;
        request.evicted_tokens += history.saturating_sub(kept);
        request.recent_tokens += len - sink - history;
        request.bytes += sequence.pages().bytes(layout);
    }
    request
}
