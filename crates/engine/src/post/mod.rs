//! Post mode: views of a history that stays whole.
//!
//! A conversation under a [`PostCap`] is computed as if there were no cap; its history is the *base*.
//! At fixed positions, the points, the base is probed in the background ([`jobs`](self::jobs)) and the
//! rows that its views keep are chosen ([`sets`](self::sets)). A later turn is routed to one of these
//! views by the text of its last user message. Everything before that message is read as the base
//! computed it: through the view up to the point, and in full between the point and the message. The
//! message and the answer are computed on the view, and afterwards once more on the base, so that
//! later views of other topics have them too, and the page store, which keeps no views.
//!
//! So an answer depends on the tokens, the point and the route alone, which together are its
//! *lineage*: not on chunks, batches, preemption or the prefix cache. Which lineage a turn has
//! depends on the views that are ready when it comes; its usage tells.

mod jobs;
mod sets;

pub(crate) use jobs::{Bench, Job, Jobs, Progress};
pub(crate) use sets::ViewSets;

use crate::kv_request::KvRoute;
use crate::request::RunningView;
use crate::row_cap::{self, Evictable, rows_of};
use oscar_backend::Backend;
use oscar_cache::{CacheSalt, PageHash, PrefixKey};
use oscar_codec::{CacheLayout, PAGE_TOKENS};
use oscar_runner::Runner;
use oscar_views::{
    Budget, EpisodeOptions, Evict, Eviction, HeadSplit, InputEmbeddings, Keep, Probe, Route, ViewSet,
};
use std::ops::Range;
use std::sync::Arc;

/// What post mode needs of a model: how it is led to speak of its context, and its input embeddings.
#[derive(Clone, Debug)]
pub struct PostSetting {
    pub probe: Probe,
    pub embeddings: InputEmbeddings,
    pub episodes: EpisodeOptions,
}

/// How a conversation is divided for post mode: positions of its prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// Where the last message of the user begins.
    pub start: usize,
    /// The messages before it, ascending.
    pub utterances: Vec<Range<usize>>,
    /// The tokens of the bare text of that message.
    pub question: Vec<u32>,
}

/// Rows that a turn reads of its history, chosen from the whole of it.
#[derive(Clone, Debug, PartialEq)]
pub struct PostCap {
    pub eviction: Eviction,
    pub(crate) keep: Keep,
    /// Rows between two points.
    pub block: usize,
    /// The first point.
    first: usize,
    /// Rows of each layer and head that a view keeps, on average.
    pub(crate) rows: usize,
    episodes: EpisodeOptions,
}

impl PostCap {
    /// # Errors
    /// Says why this cache, device or policy has no views of a whole history.
    pub fn new<B: Backend>(
        runner: &Runner<B>,
        eviction: Eviction,
        budget: (Budget, HeadSplit),
        block: usize,
        episodes: EpisodeOptions,
    ) -> Result<Self, String> {
        Self::of(&row_cap::allowed(runner)?, eviction, budget, block, episodes)
    }

    /// A cap of a cache whose rows can be evicted.
    ///
    /// # Errors
    /// Says why this cache or policy has no views of a whole history.
    pub(crate) fn of(
        cache: &Evictable,
        eviction: Eviction,
        (budget, heads): (Budget, HeadSplit),
        block: usize,
        episodes: EpisodeOptions,
    ) -> Result<Self, String> {
        if !matches!(eviction, Eviction::KeyDiffPost | Eviction::Episodes | Eviction::Scorer(Evict::KvZip)) {
            return Err(format!(
                "{eviction} is not served: it would compute the whole history again for its scores; use \
                 keydiff-post, kvzip, episodes, keydiff, snapkv, tova or recent"
            ));
        }
        cache.check(eviction, heads)?;
        let layout = &cache.layout;
        let rows = rows_of(layout, budget)?;
        let block = block.max(1).next_multiple_of(PAGE_TOKENS);
        let windows = layout.windows();
        let first = (windows.sink() + windows.recent() + rows + block).next_multiple_of(PAGE_TOKENS);
        let keep = Keep { budget, heads, protected: Arc::from([]) };
        Ok(Self { eviction, keep, block, first, rows, episodes })
    }

    /// The same cap for a prompt some positions of which (ascending) are never evicted.
    pub(crate) fn protecting(mut self, protected: &[Range<usize>]) -> Self {
        self.keep.protected = protected.into();
        self
    }

    /// Whether a history of this length has views.
    pub(crate) fn has_views(&self, len: usize) -> bool {
        len >= self.first
    }

    /// The points within the first `until` tokens, the last first, each with a name of the base up to
    /// there and of everything that decides which rows its views keep.
    pub(crate) fn points(
        &self,
        salt: Option<CacheSalt>,
        turn: &Turn,
        tokens: &[u32],
    ) -> Vec<(usize, CacheSalt)> {
        let until = turn.start.min(tokens.len());
        let hashes: Vec<PageHash> = PageHash::chain(PrefixKey::new(salt, &tokens[..until])).collect();
        let points = (self.first..=until).step_by(self.block);
        let named = points.map(|point| {
            let clipped = |ranges: &[Range<usize>]| {
                let before = ranges.iter().filter(|range| range.start < point);
                before.map(|r| format!("{}-{}", r.start, r.end.min(point))).collect::<Vec<_>>().join(",")
            };
            let Keep { budget, heads, protected } = &self.keep;
            let key = CacheSalt::of(&[
                "post",
                &hashes[point / PAGE_TOKENS - 1].to_string(),
                self.eviction.name(),
                &budget.to_string(),
                heads.name(),
                &format!("{:?}", self.episodes),
                &clipped(protected),
                &clipped(&turn.utterances),
            ]);
            (point, key)
        });
        let mut points: Vec<_> = named.collect();
        points.reverse();
        points
    }

    /// The cap up to a point: what lies behind it decides nothing.
    pub(crate) fn kept_until(&self, point: usize) -> Keep {
        let before = self.keep.protected.iter().filter(|range| range.start < point);
        let protected = before.map(|range| range.start..range.end.min(point)).collect();
        Keep { protected, ..self.keep.clone() }
    }
}

impl std::fmt::Display for PostCap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {}", self.eviction, self.keep.budget, self.keep.heads.name())
    }
}

/// A turn of a conversation in post mode.
#[derive(Debug)]
pub(crate) struct PostTurn {
    pub cap: PostCap,
    pub turn: Turn,
    /// Where the turn begins, whole pages: from here on it reads its view.
    pub start: usize,
    /// The view that it reads; the whole base if absent.
    pub reading: Option<Reading>,
}

/// The view that a turn reads.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    pub set: Arc<ViewSet>,
    pub point: usize,
    pub route: Route,
    pub similarity: Option<f64>,
    /// The name of the view, and of the part of the prefix tree that was computed on it.
    pub key: CacheSalt,
    pub lineage: CacheSalt,
}

impl Reading {
    /// The views that the turn could read, as the web page shows them.
    pub fn views(&self) -> Vec<RunningView> {
        let read = |route: Route| match (self.route, route) {
            (Route::Global, Route::Episode(_)) => false,
            (chosen, Route::Episode(episode)) => chosen.covers(episode),
            (chosen, other) => chosen == other,
        };
        let views = self.set.routes().zip(self.set.rows());
        views.map(|(route, &rows)| RunningView { rows, read: read(route) }).collect()
    }
}

impl PostTurn {
    /// `None` if the prompt has no turn that a view could serve.
    pub fn new(cap: PostCap, turn: Option<&Turn>, prompt: usize) -> Option<Self> {
        let turn = turn?.clone();
        let start = turn.start.min(prompt.saturating_sub(1)) / PAGE_TOKENS * PAGE_TOKENS;
        let turn = Turn { start, ..turn };
        Some(Self { cap, turn, start, reading: None })
    }

    /// How the turn was routed.
    pub fn taken(&self) -> KvRoute {
        match &self.reading {
            Some(Reading { route, similarity, .. }) => {
                KvRoute::View { route: *route, similarity: *similarity }
            }
            None => KvRoute::Full,
        }
    }

    /// Bytes of the view that it reads, about; 0 if it reads the base.
    pub fn view_bytes(&self, layout: &CacheLayout) -> usize {
        let bytes = || row_cap::view_bytes(layout, self.cap.rows, &self.cap.keep.protected);
        self.reading.as_ref().map_or(0, |_| bytes())
    }

    /// Chooses the view of the latest point that is ready.
    pub fn route(
        &mut self,
        salt: Option<CacheSalt>,
        tokens: &[u32],
        sets: &mut ViewSets,
        setting: &PostSetting,
    ) {
        let points = self.cap.points(salt, &self.turn, tokens);
        let found = points.into_iter().find_map(|(point, key)| Some((point, key, sets.get(key)?)));
        self.reading = found.map(|(point, base, set)| {
            let (route, similarity) = set.route(&self.turn.question, &setting.embeddings);
            let key = view_key(base, route);
            let lineage = CacheSalt::of(&["turn", &format!("{key:?}"), &self.start.to_string()]);
            Reading { set, point, route, similarity, key, lineage }
        });
    }
}

/// The name of one view of a base.
pub(crate) fn view_key(base: CacheSalt, route: Route) -> CacheSalt {
    CacheSalt::of(&["view", &format!("{base:?}"), &format!("{route:?}")])
}

/// Everything that the engine thread keeps for post mode.
#[derive(Default)]
pub(crate) struct PostMode {
    /// Absent where post mode is not possible.
    pub setting: Option<PostSetting>,
    pub sets: ViewSets,
    pub jobs: Jobs,
}

impl PostMode {
    pub fn clear(&mut self) {
        self.sets.clear();
        self.jobs.clear();
    }
}
