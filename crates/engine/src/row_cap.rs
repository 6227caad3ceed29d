//! A cap on the quantized rows of each conversation, so that it may grow for ever in bounded memory.
//!
//! At fixed positions of a sequence its history is compacted: the rows are scored, the best `rows`
//! of each layer and head (on average) are copied into a view, and the sequence goes on behind it.
//! The positions depend on the cap alone. So which rows a query reads is a function of the tokens:
//! chunks, batches, preemption and prefix hits do not change an answer.
//!
//! In the prefix tree a compacted sequence lies below a salt that names the cap and the position of
//! its last compaction, its *lineage*. Sequences of another cap, or of none, never reach it.

use crate::request::RequestError;
use crate::scheduler::Pauses;
use oscar_backend::{Backend, RowEviction, eviction_refusal};
use oscar_cache::{CacheSalt, PrefixKey, PrefixPages, RadixCache};
use oscar_codec::{CacheLayout, PAGE_TOKENS};
use oscar_runner::{Runner, Sequence, StepError};
use oscar_views::{Budget, Evict, Eviction, HeadSplit, History, Policy, Probe, Selection, score, select};
use std::ops::Range;
use std::sync::Arc;

/// Which rows of this model this device can evict, or why none.
pub(crate) fn allowed<B: Backend>(runner: &Runner<B>) -> Result<Evictable, String> {
    runner.config().evicts_rows()?;
    let (backend, layout) = (runner.backend(), runner.layout().clone());
    match backend.evicts_rows(&layout) {
        RowEviction::Never(why) => Err(eviction_refusal(backend, why).to_string()),
        by => Ok(Evictable { layout, by }),
    }
}

/// A cache on a device that evicts rows of it.
#[derive(Clone, Debug)]
pub(crate) struct Evictable {
    pub layout: CacheLayout,
    by: RowEviction,
}

impl Evictable {
    /// # Errors
    /// Says why the policy is not possible here.
    pub fn check(&self, eviction: Eviction, heads: HeadSplit) -> Result<(), String> {
        self.layout.evicts_rows()?;
        if self.by == RowEviction::ByKeys && eviction.needs_weights() {
            return Err(format!(
                "{eviction} needs attention weights of single rows, which this device does not add up: use \
                 keydiff-post, keydiff or recent, or --device cpu"
            ));
        }
        if self.layout.views_in_blocks() && heads != HeadSplit::Uniform {
            return Err(format!(
                "views on this device have room for equally many rows of every head: use --evict-heads uniform, not {}",
                heads.name()
            ));
        }
        Ok(())
    }
}

/// The division among heads of a policy that names none. A block has a page for each head, so devices whose
/// views lie in blocks divide evenly.
pub fn default_split(layout: &CacheLayout, eviction: Eviction) -> HeadSplit {
    match layout.views_in_blocks() {
        true => HeadSplit::Uniform,
        false => eviction.default_split(),
    }
}

/// See the [module](self).
#[derive(Clone, Debug, PartialEq)]
pub struct RowCap {
    pub policy: Policy,
    /// Rows that may come beyond the budget before the history is compacted again.
    pub block: usize,
    /// Position of the first compaction.
    first: usize,
    /// Rows of each layer and head after a compaction, on average.
    pub(crate) rows: usize,
    /// Positions that every compaction keeps beside the budget, ascending.
    protected: Arc<[Range<usize>]>,
}

/// Rows between two compactions, unless the user says otherwise.
pub const EVICT_BLOCK: usize = 512;
/// The policy if only a budget is given.
pub const DEFAULT_EVICT: Evict = Evict::KeyDiff;

impl RowCap {
    /// # Errors
    /// Says why this cache, device or policy cannot be capped.
    pub fn new<B: Backend>(runner: &Runner<B>, policy: Policy, block: usize) -> Result<Self, String> {
        Self::of(&allowed(runner)?, policy, block)
    }

    /// A cap of a cache whose rows can be evicted.
    ///
    /// # Errors
    /// Says why this cache or policy cannot be capped.
    pub(crate) fn of(cache: &Evictable, policy: Policy, block: usize) -> Result<Self, String> {
        let layout = &cache.layout;
        cache.check(Eviction::Scorer(policy.evict), policy.heads)?;
        if Eviction::Scorer(policy.evict).keeps_base() {
            return Err(format!(
                "{} scores the whole history at once, which a cap does not keep: use snapkv, tova, keydiff or recent",
                policy.evict
            ));
        }
        let rows = rows_of(layout, policy.budget)?;
        let block = block.max(1).next_multiple_of(PAGE_TOKENS);
        let windows = layout.windows();
        let first = (windows.sink() + windows.recent() + rows + block).next_multiple_of(PAGE_TOKENS);
        Ok(Self { policy, block, first, rows, protected: Arc::from([]) })
    }

    /// The same cap for a prompt with protected positions (ascending), which are never evicted.
    pub(crate) fn protecting(self, protected: &[Range<usize>]) -> Self {
        Self { protected: protected.into(), ..self }
    }

    /// Lengths at which a sequence is compacted.
    pub(crate) fn pauses(&self) -> Pauses {
        Pauses { first: self.first, every: self.block }
    }

    /// Compactions up to a sequence of `len` tokens, the last first.
    fn points(&self, len: usize) -> impl Iterator<Item = usize> + use<> {
        let (first, block) = (self.first, self.block);
        let count = if len < first { 0 } else { (len - first) / block + 1 };
        (0..count).rev().map(move |i| first + i * block)
    }

    /// Whether a sequence of this length is compacted before it goes on.
    pub fn is_point(&self, len: usize) -> bool {
        len >= self.first && (len - self.first).is_multiple_of(self.block)
    }

    /// The part of the prefix tree for sequences whose last compaction was at `point`.
    fn lineage(&self, salt: Option<CacheSalt>, point: usize) -> CacheSalt {
        let base = salt.map(|salt| format!("{salt:?}")).unwrap_or_default();
        let (policy, block) = (self.policy.to_string(), self.block.to_string());
        // What lies behind the point is not known when a shorter prompt is compacted there.
        let before = self.protected.iter().filter(|range| range.start < point);
        let protected: Vec<String> = before.map(|r| format!("{}-{}", r.start, r.end.min(point))).collect();
        CacheSalt::of(&["view", &base, &policy, &block, &point.to_string(), &protected.join(",")])
    }

    /// Bytes that a sequence of `tokens` takes at most.
    pub fn most_bytes(&self, layout: &CacheLayout, tokens: usize) -> usize {
        let view = if tokens < self.first { 0 } else { view_bytes(layout, self.rows, &self.protected) };
        layout.peak_bytes(tokens.min(self.first)) + view + layout.full_block_bytes()
    }

    /// The longest stored prefix of `tokens` from which a sequence under this cap can go on, and its
    /// lineage.
    pub fn find(
        &self,
        cache: &mut RadixCache,
        salt: Option<CacheSalt>,
        tokens: &[u32],
        exact: bool,
    ) -> (Option<CacheSalt>, PrefixPages) {
        let mut find = |salt, tokens: &[u32]| match exact {
            true => cache.find_exact(PrefixKey::new(salt, tokens)),
            false => cache.find(PrefixKey::new(salt, tokens)),
        };
        // A prefix that ends at the next compaction would have to be compacted first: one page less
        // is found, and computed again.
        let before = |next: usize| &tokens[..tokens.len().min(next - 1)];
        for point in self.points(tokens.len()) {
            let lineage = Some(self.lineage(salt, point));
            let prefix = find(lineage, before(point + self.block));
            if prefix.view().is_some() {
                return (lineage, prefix);
            }
        }
        (None, find(salt, before(self.first)))
    }

    /// Compacts a sequence that has reached a point: returns it with its lineage and what was kept.
    pub fn compact<B: Backend>(
        &self,
        runner: &mut Runner<B>,
        sequence: &Sequence,
        tokens: &[u32],
        salt: Option<CacheSalt>,
    ) -> Result<(Sequence, CacheSalt, Selection), StepError> {
        let len = sequence.len();
        let history = History { sequence, tokens, len, observed: None };
        let scores = score(runner, &history, self.policy.evict, &Probe::default())?;
        let Policy { budget, heads, .. } = self.policy;
        let selection = select(runner.layout(), &scores, budget, heads, &self.protected);
        let derived = runner.derive(sequence, len, selection.kept.clone())?;
        Ok((derived, self.lineage(salt, len), selection))
    }

    /// What is told to a request that wants what a capped conversation does not keep.
    pub(crate) fn refusal(parameter: &'static str) -> RequestError {
        RequestError::Invalid {
            parameter,
            problem: "is not possible with --kv-budget or kv.budget: rows of the prompt may be evicted"
                .into(),
        }
    }
}

/// Rows of each layer and head that a budget allows, on average.
pub(crate) fn rows_of(layout: &CacheLayout, budget: Budget) -> Result<usize, String> {
    if matches!(budget, Budget::Percent(_)) {
        return Err("a share of a growing history is no cap: give rows (2048) or bytes (64M)".into());
    }
    let heads = layout.coded().map_or(0, |t| t.codecs().iter().filter(|c| c.keeps_history()).count());
    match budget.total(layout, usize::MAX / 1024) / heads.max(1) {
        0 => Err(format!("{budget} bytes hold less than a page of rows")),
        rows => Ok(rows),
    }
}

/// Bytes of a view that keeps `rows` of each layer and head, on average, beside protected positions.
pub(crate) fn view_bytes(layout: &CacheLayout, rows: usize, protected: &[Range<usize>]) -> usize {
    let protected: usize = protected.iter().map(Range::len).sum();
    ((rows + protected).div_ceil(PAGE_TOKENS) + 1) * layout.coded_block_bytes()
}

/// Rows of history of a sequence: all that a whole cache would hold quantized, and those that a layer
/// and head reads on average.
pub(crate) fn history_rows(layout: &CacheLayout, sequence: &Sequence) -> (usize, usize) {
    let Some(table) = layout.coded().filter(|_| !sequence.is_empty()) else { return (0, 0) };
    let (sink, boundary) = (layout.windows().sink(), sequence.pages().boundary(layout));
    let all = boundary.saturating_sub(sink);
    let kept = sequence.pages().view().map_or(all, |view| {
        let heads = table.codecs().iter().filter(|codec| codec.keeps_history()).count().max(1);
        view.rows() / heads + boundary.saturating_sub(view.end())
    });
    (all, kept)
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_codec::{CodeLayout, KvFormat, Windows};

    #[test]
    fn views_in_blocks_are_divided_evenly_and_other_divisions_refused() {
        let (windows, order) = (Windows::new(64, 64).unwrap(), CodeLayout::Logical);
        let layout = CacheLayout::new(KvFormat::OSCAR2, 1, 2, 64, windows, order).unwrap();
        let kvzip = Eviction::Scorer(Evict::KvZip);
        assert_eq!(default_split(&layout, kvzip), HeadSplit::Global);
        let layout = layout.with_views_in_blocks();
        assert_eq!(default_split(&layout, kvzip), HeadSplit::Uniform);
        let cache = Evictable { layout, by: RowEviction::ByScores };
        cache.check(kvzip, HeadSplit::Uniform).unwrap();
        let error = cache.check(kvzip, HeadSplit::Global).unwrap_err();
        assert!(error.contains("--evict-heads uniform"), "{error}");
        let keys = Evictable { by: RowEviction::ByKeys, ..cache };
        assert!(keys.check(kvzip, HeadSplit::Uniform).unwrap_err().contains("keydiff-post"));
    }
}
