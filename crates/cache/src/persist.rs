//! Pages that outlive the tree: which ones a store should keep, and how they come back.
//!
//! A store keeps the quantized pages of every prefix, and the full-precision pages only of the sink
//! and of the windows before an end: the end of a prompt or an answer, or a branch. The same holds for
//! the pages of sliding layers. Of the recurrent states it keeps those at the ends. A prefix with all
//! pages, and the state, that a resume needs comes back exact. Without
//! the full pages of its window it comes back as an approximate hit, if the tree allows that.
//!
//! **Invariants:** approximate rows are never offered, so everything stored is exact. The tree
//! decides from names and kinds alone; the owner of the device moves the bytes.

use crate::events::PageHash;
use crate::pool::{CodedPage, FullPage, SlidingPage, StateSlot};
use crate::prefix::{BlockNeed, BlockPages, resume_point};
use crate::radix::{Node, NodeId, ROOT, RadixCache};
use crate::salt::PrefixKey;
use oscar_codec::{BlockCounts, CacheLayout, PAGE_TOKENS};
use std::sync::Arc;

/// Progress of a page whose keys and values are all quantized.
const COMPLETE: usize = 2 * PAGE_TOKENS;

/// The forms in which a store keeps a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PageKind {
    /// All rows in full precision.
    Full,
    /// All rows quantized.
    Coded,
    /// Some rows quantized: the block in which a window begins. Useful only beside the full page.
    Part,
    /// All rows of the sliding layers.
    Sliding,
    /// The recurrent state after the block.
    State,
}

impl PageKind {
    pub const ALL: [Self; 5] = [Self::Full, Self::Coded, Self::Part, Self::Sliding, Self::State];

    /// The kinds of pages that a cache may have.
    pub fn of(layout: &CacheLayout) -> &'static [Self] {
        use PageKind::{Coded, Full, Part, Sliding, State};
        match (layout.coded().is_some(), layout.sliding().is_some(), layout.has_states()) {
            (false, false, false) => &[Full],
            (false, false, true) => &[Full, State],
            (false, true, false) => &[Full, Sliding],
            (false, true, true) => &[Full, Sliding, State],
            (true, false, false) => &[Full, Coded, Part],
            (true, false, true) => &[Full, Coded, Part, State],
            (true, true, false) => &[Full, Coded, Part, Sliding],
            (true, true, true) => &Self::ALL,
        }
    }

    /// Bytes of a page of this kind.
    pub fn bytes(self, layout: &CacheLayout) -> usize {
        match self {
            Self::Full => layout.full_block_bytes(),
            Self::Coded | Self::Part => layout.coded_block_bytes(),
            Self::Sliding => layout.sliding_block_bytes(),
            Self::State => layout.state_bytes(),
        }
    }

    /// Room for one page of this kind.
    pub fn counts(self) -> BlockCounts {
        let none = BlockCounts::default();
        match self {
            Self::Full => BlockCounts { full: 1, ..none },
            Self::Coded | Self::Part => BlockCounts { coded: 1, ..none },
            Self::Sliding => BlockCounts { sliding: 1, ..none },
            Self::State => BlockCounts { states: 1, ..none },
        }
    }
}

/// What a store has of one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredKinds {
    pub full: bool,
    pub coded: bool,
    pub part: bool,
    pub sliding: bool,
    pub state: bool,
}

impl StoredKinds {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub fn has(&self, kind: PageKind) -> bool {
        match kind {
            PageKind::Full => self.full,
            PageKind::Coded => self.coded,
            PageKind::Part => self.part,
            PageKind::Sliding => self.sliding,
            PageKind::State => self.state,
        }
    }

    pub fn insert(&mut self, kind: PageKind) {
        match kind {
            PageKind::Full => self.full = true,
            PageKind::Coded => self.coded = true,
            PageKind::Part => self.part = true,
            PageKind::Sliding => self.sliding = true,
            PageKind::State => self.state = true,
        }
    }
}

/// Pages of one block that a store should have. It holds them.
#[derive(Debug)]
pub struct BlockOffer {
    pub block: usize,
    pub hash: PageHash,
    pub tokens: Arc<[u32]>,
    pub full: Option<FullPage>,
    /// Complete, or a part of it if a resume needs no more.
    pub coded: Option<CodedPage>,
    pub sliding: Option<SlidingPage>,
    /// The recurrent state after the block.
    pub state: Option<StateSlot>,
}

/// A page to fetch from a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WantedPage {
    pub block: usize,
    pub kind: PageKind,
}

/// How a longer prefix becomes resumable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestorePlan {
    /// Pages that the tree lacks, by block.
    pub wanted: Vec<WantedPage>,
    /// Tokens of the prefix.
    pub len: usize,
    /// Whether it gives the same answers as a cold run.
    pub exact: bool,
}

/// A page that came from a store; its bytes are in place.
#[derive(Debug)]
pub enum RestoredPage {
    Full(FullPage),
    /// Quantized as far as [`CodedPage::coded`] says.
    Coded(CodedPage),
    Sliding(SlidingPage),
    State(StateSlot),
}

/// What the tree and a store have of one block together.
#[derive(Clone, Copy, Default)]
struct Available {
    full: bool,
    /// Progress of quantization.
    coded: usize,
    sliding: bool,
    state: bool,
}

impl Available {
    fn meets(&self, need: BlockNeed) -> bool {
        (!need.full || self.full)
            && (!need.sliding || self.sliding)
            && (!need.state || self.state)
            && need.coded <= self.coded
    }
}

impl RadixCache {
    /// Tokens of `key` from which a sequence can continue now, as [`RadixCache::find`] or
    /// [`RadixCache::find_exact`] would say. Counts as no use.
    pub fn resumable_len<'a>(&self, key: impl Into<PrefixKey<'a>>, exact: bool) -> usize {
        let mut path = self.path(key.into());
        if exact {
            path.truncate(self.exact_blocks(&path));
        }
        self.longest(&path, !exact).len()
    }

    /// Blocks of `path` before the first approximate one.
    fn exact_blocks(&self, path: &[NodeId]) -> usize {
        if self.view_of(path).is_some() {
            // Rows behind a view depend on it, and a store keeps no views.
            return 0;
        }
        path.iter().position(|&id| self.node(id).approximate).unwrap_or(path.len())
    }

    /// Pages of `key` that a store should have, from block `from` on: complete quantized pages and,
    /// if the key `ends` here, the pages and states that a resume here, at an earlier end or at a branch
    /// needs.
    pub fn offers<'a>(&self, key: impl Into<PrefixKey<'a>>, from: usize, ends: bool) -> Vec<BlockOffer> {
        let key = key.into();
        let mut path = self.path(key);
        path.truncate(self.exact_blocks(&path));
        let nothing_coded = self.layout.coded().is_none();
        let least = BlockNeed { full: nothing_coded, coded: COMPLETE, sliding: false, state: false };
        let mut needs = vec![least; path.len()];
        if ends {
            self.add_windows(&path, key.tokens.len(), &mut needs);
        }
        let offer = |(block, (&id, hash)): (usize, (&NodeId, PageHash))| {
            let (node, need) = (self.node(id), needs[block]);
            let coded = node.pages.coded.clone().filter(|page| page.coded() >= need.coded);
            let full = node.pages.full.clone().filter(|_| need.full);
            let sliding = node.pages.sliding.clone().filter(|_| need.sliding);
            let state = node.pages.state.clone().filter(|_| need.state);
            let any = full.is_some() || coded.is_some() || sliding.is_some() || state.is_some();
            any.then(|| BlockOffer { block, hash, tokens: node.tokens.clone(), full, coded, sliding, state })
        };
        path.iter().zip(PageHash::chain(key)).enumerate().skip(from).filter_map(offer).collect()
    }

    /// Adds to `needs` the states at the ends and branches of a path that ends after `len` tokens, and
    /// the pages of the windows before them.
    fn add_windows(&self, path: &[NodeId], len: usize, needs: &mut [BlockNeed]) {
        let windows = self.layout.windows();
        let sink = windows.sink().div_ceil(PAGE_TOKENS);
        let reach = self.window_reach().max(self.layout.sliding_reach());
        let again = resume_point(len) / PAGE_TOKENS;
        for (block, &id) in path.iter().enumerate() {
            let (node, end) = (self.node(id), block + 1);
            if !(end == path.len() || end == again || node.anchor || node.children.len() > 1) {
                continue;
            }
            let window = end.saturating_sub(reach).max(sink)..end;
            for block in (0..sink.min(end)).chain(window) {
                let need = BlockNeed::at(&self.layout, end * PAGE_TOKENS, 0, block);
                needs[block].full |= need.full;
                needs[block].sliding |= need.sliding;
                needs[block].state |= need.state;
                if need.coded > 0 {
                    needs[block].coded = needs[block].coded.min(need.coded);
                }
            }
        }
    }

    /// Blocks before an end that a window may touch.
    pub(crate) fn window_reach(&self) -> usize {
        self.layout.windows().recent().div_ceil(PAGE_TOKENS) + 2
    }

    /// How the longest prefix of `key` becomes resumable with the help of a store that has `stored`
    /// of its first blocks; `None` if it is neither longer nor more exact than with the tree alone. What
    /// the tree has of the prefix counts as used: room for the rest is taken elsewhere.
    pub fn plan_restore<'a>(
        &mut self,
        key: impl Into<PrefixKey<'a>>,
        stored: &[StoredKinds],
        exact: bool,
    ) -> Option<RestorePlan> {
        let key = key.into();
        let path = self.path(key);
        let held = |block: usize| path.get(block).map(|&id| self.node(id)).filter(|node| !node.approximate);
        let blocks = (key.tokens.len() / PAGE_TOKENS).min(stored.len().max(path.len()));
        let available: Vec<Available> = (0..blocks)
            .map(|block| self.available(held(block), stored.get(block).copied().unwrap_or_default()))
            .collect();
        let now = |exact| self.resumable_len(key, exact) / PAGE_TOKENS;
        let (exact_now, any_now) = (now(true), now(exact));
        // As in `longest`, over pages of the tree and the store together.
        let quantized = if exact { 0 } else { self.all_quantized(&available) };
        let least = quantized.saturating_sub(self.worth_computing());
        let mut ends = (least.max(exact_now + 1)..=self.most_blocks(&available)).rev();
        let (count, coded_until) = match ends.find(|&count| self.is_exact_end(&available[..count])) {
            Some(count) => (count, 0),
            None if least > exact_now && quantized > any_now => (quantized, quantized * PAGE_TOKENS),
            None => return None,
        };
        let len = count * PAGE_TOKENS;
        let mut wanted = Vec::new();
        for block in 0..count {
            let need = BlockNeed::at(&self.layout, len, coded_until, block);
            let pages = held(block).map(|node| node.pages.clone()).unwrap_or_default();
            if need.full && pages.full.is_none() {
                wanted.push(WantedPage { block, kind: PageKind::Full });
            }
            if need.sliding && pages.sliding.is_none() {
                wanted.push(WantedPage { block, kind: PageKind::Sliding });
            }
            if need.state && pages.state.is_none() {
                wanted.push(WantedPage { block, kind: PageKind::State });
            }
            if need.coded > pages.coded.as_ref().map_or(0, CodedPage::coded) {
                let kind = if stored.get(block).is_some_and(|kinds| kinds.coded) {
                    PageKind::Coded
                } else {
                    PageKind::Part
                };
                wanted.push(WantedPage { block, kind });
            }
        }
        self.touched_path(key);
        Some(RestorePlan { wanted, len, exact: coded_until == 0 })
    }

    /// Whether `plan` falls short of what a store has because it does not have the recurrent state there.
    pub fn lacks_state<'a>(
        &self,
        key: impl Into<PrefixKey<'a>>,
        stored: &[StoredKinds],
        plan: Option<&RestorePlan>,
    ) -> bool {
        let has_state = stored.last().is_none_or(|kinds| kinds.state);
        let reached = || plan.map_or_else(|| self.resumable_len(key, true), |plan| plan.len);
        self.layout.has_states() && !has_state && reached() < stored.len() * PAGE_TOKENS
    }

    fn available(&self, node: Option<&Node>, stored: StoredKinds) -> Available {
        let nothing = BlockPages::default();
        let pages = node.map_or(&nothing, |node| &node.pages);
        let full = pages.full.is_some() || stored.full;
        let progress = pages.coded.as_ref().map_or(0, CodedPage::coded);
        let coded = match stored {
            StoredKinds { coded: true, .. } => COMPLETE,
            // How far it goes is known once it is read.
            StoredKinds { part: true, .. } if full => COMPLETE - 1,
            _ => progress,
        };
        let sliding = pages.sliding.is_some() || stored.sliding;
        let state = pages.state.is_some() || stored.state;
        Available { full, coded: coded.max(progress), sliding, state }
    }

    /// No prefix of more blocks than this can be resumable. Without this bound, every length would
    /// be tried down to a block that is missing near the start.
    fn most_blocks(&self, available: &[Available]) -> usize {
        if self.layout.coded().is_none() {
            return available.iter().position(|block| !block.full).unwrap_or(available.len());
        }
        let sink = self.layout.windows().sink().div_ceil(PAGE_TOKENS);
        let first_block = |missing: &dyn Fn(usize) -> bool| (0..available.len()).find(|&b| missing(b));
        let no_sink = first_block(&|block| block < sink && !available[block].full);
        let not_coded = first_block(&|block| block >= sink && available[block].coded < COMPLETE);
        let limit = not_coded.map_or(available.len(), |block| block + self.window_reach());
        limit.min(no_sink.unwrap_or(usize::MAX)).min(available.len())
    }

    /// Whether a sequence could continue after these blocks as if it had just computed them.
    fn is_exact_end(&self, blocks: &[Available]) -> bool {
        let need = |block| BlockNeed::at(&self.layout, blocks.len() * PAGE_TOKENS, 0, block);
        blocks.iter().enumerate().rev().all(|(block, held)| held.meets(need(block)))
    }

    /// Blocks after which a sequence could continue that reads everything before them quantized.
    fn all_quantized(&self, blocks: &[Available]) -> usize {
        let len = blocks.len() * PAGE_TOKENS;
        let need = |block| BlockNeed::at(&self.layout, len, len, block);
        let met = blocks.iter().enumerate().take_while(|(block, held)| held.meets(need(*block)));
        if self.approximates { met.count() } else { 0 }
    }

    /// Puts pages of `key` that came from a store into the tree, in the order of their blocks. Stops
    /// at the first block whose predecessor is not in the tree; returns the pages that found a place.
    pub fn restore<'a>(
        &mut self,
        key: impl Into<PrefixKey<'a>>,
        pages: impl IntoIterator<Item = (usize, RestoredPage)>,
    ) -> usize {
        let PrefixKey { salt, tokens } = key.into();
        let mut pages = pages.into_iter().peekable();
        if pages.peek().is_none() {
            return 0;
        }
        self.operations += 1;
        let mut parent = salt.map_or(ROOT, |salt| self.root_or_new(salt));
        let mut placed = 0;
        for (block, page) in tokens.chunks_exact(PAGE_TOKENS).enumerate() {
            let is_next = pages.peek().is_some_and(|(b, _)| *b == block);
            let id = match self.node(parent).children.get(page) {
                Some(&id) => id,
                None if is_next => self.add(parent, page, block),
                None => break,
            };
            self.node_mut(id).last_used = self.operations;
            while let Some((_, page)) = pages.next_if(|(b, _)| *b == block) {
                self.place(id, page);
                placed += 1;
            }
            parent = id;
            if pages.peek().is_none() {
                break;
            }
        }
        placed
    }

    fn place(&mut self, id: NodeId, page: RestoredPage) {
        let node = self.node_mut(id);
        if node.approximate {
            // Stored pages are exact; rows of this node are not.
            (node.pages, node.approximate) = (BlockPages::default(), false);
        }
        match page {
            RestoredPage::Sliding(page) => {
                node.pages.sliding.get_or_insert(page);
            }
            RestoredPage::State(slot) => {
                node.pages.state.get_or_insert(slot);
            }
            RestoredPage::Full(page) => {
                node.pages.full.get_or_insert(page);
            }
            RestoredPage::Coded(page) => {
                if node.pages.coded.as_ref().is_none_or(|held| held.coded() < page.coded()) {
                    node.pages.coded = Some(page);
                }
            }
        }
    }
}
