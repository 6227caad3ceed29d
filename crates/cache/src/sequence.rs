//! One sequence's page table.

use crate::pool::{CodedPage, FullPage, OutOfPages, PagePool};
use crate::prefix::{BlockNeed, BlockPages, PrefixPages, coded_progress, resume_point};
use crate::sliding::SlidingPages;
use crate::state::RecurrentState;
use crate::view::View;
use oscar_codec::{BlockCounts, CacheLayout, CodedPageId, FullPageId, PAGE_TOKENS, Side, SlidingPageId};
use std::ops::Range;
use std::sync::Arc;

/// The effect of a step of `tokens` new positions on the sequence; made by
/// [`SequencePages::prepare`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepPages {
    /// Positions written in this step.
    pub positions: Range<usize>,
    /// Positions whose keys are quantized in this step, whole demotion units.
    pub demote: Range<usize>,
    /// Positions whose values are quantized: the same, unless the windows of the two sides differ.
    pub demote_values: Range<usize>,
}

/// Page table of a sequence: block `b` covers positions `64·b..64·(b+1)` and holds a full page, a
/// quantized page, or both while its tokens are being demoted. In models with sliding layers it also
/// holds their page until that has left the window.
#[derive(Debug, Default)]
pub struct SequencePages {
    len: usize,
    full: Vec<Option<FullPage>>,
    coded: Vec<Option<CodedPage>>,
    /// Full pages that the sequence itself no longer reads. They are kept for the prefix tree, and
    /// for a resume at the last whole page.
    lagging: Vec<(usize, FullPage)>,
    sliding: SlidingPages,
    pub(crate) state: RecurrentState,
    keeps_resumable: bool,
    /// Everything before this position except the sink is read quantized, regardless of the
    /// windows.
    coded_until: usize,
    /// From this position on, rows are approximate, because the sequence began with an approximate hit.
    approximate_from: Option<usize>,
    /// Codes depend on later pages, so no other sequence can use them.
    keeps_codes_back: bool,
    full_ids: Vec<Option<FullPageId>>,
    coded_ids: Vec<Option<CodedPageId>>,
    /// Stands for the blocks after the sink, which have no pages then.
    view: Option<Arc<View>>,
}

impl SequencePages {
    pub fn new() -> Self {
        Self::default()
    }

    /// A table for use with a [`RadixCache`](crate::RadixCache): it keeps full pages that it no
    /// longer reads until they were offered to the tree, and those that a resume at
    /// `resume_point(len)` needs.
    pub fn resumable() -> Self {
        Self { keeps_resumable: true, ..Self::default() }
    }

    /// Continues a prefix that is already stored.
    pub fn resume(layout: &CacheLayout, prefix: PrefixPages) -> Self {
        let mut pages = Self::resumable();
        pages.len = prefix.len();
        pages.coded_until = prefix.coded_until;
        pages.approximate_from = prefix.approximate_from;
        pages.view = prefix.view;
        pages.grow(prefix.blocks.len());
        let stored = prefix.blocks.last().and_then(|held| held.state.clone());
        pages.state = RecurrentState::resume(pages.len, stored);
        for (block, held) in prefix.blocks.into_iter().enumerate() {
            let need = BlockNeed::at(layout, pages.len, pages.coded_until, block);
            match held.sliding {
                Some(page) if need.sliding => pages.sliding.put(block, page),
                Some(page) => pages.sliding.put_lagging(block, page),
                None => {}
            }
            if let Some(page) = held.coded {
                pages.coded_ids[block] = Some(page.id());
                pages.coded[block] = Some(page);
            }
            match held.full {
                Some(page) if need.full => {
                    pages.full_ids[block] = Some(page.id());
                    pages.full[block] = Some(page);
                }
                // Read quantized from here on; the tree has the full page.
                Some(_) if block * PAGE_TOKENS < pages.coded_until => {}
                Some(page) => pages.lagging.push((block, page)),
                None => {}
            }
        }
        pages.trim(layout);
        pages
    }

    /// A table for other continuations of the first `len` tokens, whole pages, that shares their pages.
    /// `view` replaces the history before its end; otherwise the fork reads what this table reads.
    /// `None` if this table no longer holds a page that the fork would read.
    pub fn fork(&self, layout: &CacheLayout, len: usize, view: Option<Arc<View>>) -> Option<Self> {
        if !len.is_multiple_of(PAGE_TOKENS) || len == 0 || len > self.len {
            return None;
        }
        let view = view.or_else(|| self.view.clone());
        let mut blocks = Vec::with_capacity(len / PAGE_TOKENS);
        for block in 0..len / PAGE_TOKENS {
            let mut pages = self.block(block);
            if view.as_ref().is_some_and(|view| view.covers(layout, block)) {
                pages = BlockPages::default();
            } else if !BlockNeed::at(layout, len, self.coded_until, block).is_met(&pages) {
                return None;
            }
            blocks.push(pages);
        }
        let (coded_until, approximate_from) = (self.coded_until, self.approximate_from);
        Some(Self::resume(layout, PrefixPages { blocks, coded_until, approximate_from, view }))
    }

    /// What is left of the history, if some of it was evicted.
    pub fn view(&self) -> Option<&Arc<View>> {
        self.view.as_ref()
    }

    /// Positions stored so far.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether its answers are those of a cold run.
    pub fn is_exact(&self) -> bool {
        self.approximate_from.is_none()
    }

    /// Whether the rows of `block` are those of a cold run.
    pub(crate) fn is_exact_block(&self, block: usize) -> bool {
        self.approximate_from.is_none_or(|from| (block + 1) * PAGE_TOKENS <= from)
    }

    /// First position at or beyond the sink that the last query read in BF16.
    pub fn boundary(&self, layout: &CacheLayout) -> usize {
        match self.len {
            0 => layout.windows().sink(),
            len => layout.windows().boundary(len - 1).max(self.coded_until),
        }
    }

    pub fn full(&self) -> &[Option<FullPageId>] {
        &self.full_ids
    }

    pub fn coded(&self) -> &[Option<CodedPageId>] {
        &self.coded_ids
    }

    /// Pages of the sliding layers; empty in models without any.
    pub fn sliding(&self) -> &[Option<SlidingPageId>] {
        self.sliding.ids()
    }

    /// Blocks that the sequence reads or will read.
    pub fn blocks(&self) -> BlockCounts {
        BlockCounts {
            full: self.full_ids.iter().flatten().count(),
            coded: self.coded_ids.iter().flatten().count(),
            sliding: self.sliding.count(),
            states: self.state.count(),
        }
    }

    /// Takes the pages that `tokens` more positions need. On failure nothing changes.
    pub fn prepare(
        &mut self,
        layout: &CacheLayout,
        pool: &PagePool,
        tokens: usize,
    ) -> Result<StepPages, OutOfPages> {
        let end = self.len + tokens;
        self.keeps_codes_back = layout.codes_span_pages();
        let demotion = |side| if tokens == 0 { self.len..self.len } else { self.demotion(layout, side, end) };
        let (demote, demote_values) = (demotion(Side::Key), demotion(Side::Value));
        let blocks = end.div_ceil(PAGE_TOKENS);
        let first_new = self.len.div_ceil(PAGE_TOKENS);
        let coded_blocks = blocks_of(&demote, &demote_values);
        // The last block can have lost its full page only if it was complete, so only new blocks
        // need one. They have it already if an earlier step was prepared and not run.
        let full_missing: Vec<usize> =
            (first_new..blocks).filter(|&b| self.full_ids.get(b).copied().flatten().is_none()).collect();
        let coded_missing: Vec<usize> =
            coded_blocks.filter(|&b| self.coded_ids.get(b).copied().flatten().is_none()).collect();
        // A prompt chunk may be longer than the window: its own rows read all of its blocks.
        let sliding_missing = self.sliding.missing(layout, first_new..blocks);
        let (full, coded, sliding) = (full_missing.len(), coded_missing.len(), sliding_missing.len());
        let states = self.state.missing(layout, tokens);
        let taken = pool.take(BlockCounts { full, coded, sliding, states })?;
        self.state.prepare(taken.states);
        self.grow(blocks);
        for (block, page) in sliding_missing.into_iter().zip(taken.sliding) {
            self.sliding.put(block, page);
        }
        for (block, page) in full_missing.into_iter().zip(taken.full) {
            self.full_ids[block] = Some(page.id());
            self.full[block] = Some(page);
        }
        for (block, page) in coded_missing.into_iter().zip(taken.coded) {
            self.coded_ids[block] = Some(page.id());
            self.coded[block] = Some(page);
        }
        Ok(StepPages { positions: self.len..end, demote, demote_values })
    }

    fn demotion(&self, layout: &CacheLayout, side: Side, end: usize) -> Range<usize> {
        if layout.coded().is_none() {
            return 0..0;
        }
        let windows = layout.windows();
        let before = self
            .len
            .checked_sub(1)
            .map_or(windows.sink(), |t| windows.side_boundary(side, t).max(self.coded_until));
        before..windows.side_boundary(side, end - 1).max(self.coded_until)
    }

    fn grow(&mut self, blocks: usize) {
        if blocks > self.full.len() {
            self.full.resize_with(blocks, || None);
            self.coded.resize_with(blocks, || None);
            self.full_ids.resize(blocks, None);
            self.coded_ids.resize(blocks, None);
        }
    }

    /// Ends a step: its positions are stored. Full pages whose tokens are all quantized return to the
    /// pool, and so do pages of sliding layers that left the window.
    pub fn commit(&mut self, layout: &CacheLayout, step: &StepPages) {
        debug_assert_eq!(
            step.positions.start, self.len,
            "steps are committed in the order they were prepared"
        );
        let before = self.boundary(layout);
        self.len = step.positions.end;
        self.sliding.advance(layout, self.len, self.keeps_resumable);
        self.state.commit(self.len, self.keeps_resumable);
        if step.demote.is_empty() && step.demote_values.is_empty() {
            return;
        }
        for block in blocks_of(&step.demote, &step.demote_values) {
            if let Some(page) = &self.coded[block] {
                page.mark_coded(coded_progress(layout, self.len, self.coded_until, block));
            }
        }
        // A block no longer needs its full page once both sides of all its tokens are quantized.
        let first = layout.windows().sink().div_ceil(PAGE_TOKENS).max(before / PAGE_TOKENS);
        for block in first..self.boundary(layout) / PAGE_TOKENS {
            self.full_ids[block] = None;
            if let Some(page) = self.full[block].take()
                && self.keeps_resumable
            {
                self.lagging.push((block, page));
            }
        }
    }

    /// Gives up pages that the sequence no longer reads and no resume at `resume_point(len)` or later
    /// needs.
    pub fn trim(&mut self, layout: &CacheLayout) {
        let (point, coded_until) = (resume_point(self.len), self.coded_until);
        self.lagging.retain(|&(block, _)| point > 0 && BlockNeed::at(layout, point, coded_until, block).full);
        self.sliding.trim(layout, point);
        self.state.trim(point);
    }

    /// Pages held beyond those that the sequence itself reads, of the kind that has more of them.
    pub fn finished_pages(&self) -> usize {
        self.lagging.len().max(self.sliding.lagging())
    }

    /// Bytes of the blocks held, including shared ones.
    pub fn bytes(&self, layout: &CacheLayout) -> usize {
        let mut blocks = self.blocks();
        blocks.full += self.lagging.len();
        blocks.sliding += self.sliding.lagging();
        layout.bytes_of(blocks) + self.view.as_ref().map_or(0, |view| view.bytes())
    }

    /// The pages of `block` that a prefix tree may store. Codes that depend on later pages are left
    /// out: another sequence may continue differently from here.
    pub(crate) fn block(&self, block: usize) -> BlockPages {
        let lagging = || self.lagging.iter().find(|(b, _)| *b == block).map(|(_, page)| page.clone());
        BlockPages {
            full: self.full[block].clone().or_else(lagging),
            coded: self.coded[block].clone().filter(|page| page.coded() > 0 && !self.keeps_codes_back),
            sliding: self.sliding.get(block).cloned(),
            state: self.state.after((block + 1) * PAGE_TOKENS).cloned(),
        }
    }

    /// Exchanges the pages of a whole block for others with the same contents.
    pub(crate) fn adopt(&mut self, block: usize, pages: &BlockPages) {
        pages.sliding.iter().for_each(|page| self.sliding.adopt(block, page));
        pages.state.iter().for_each(|slot| self.state.adopt((block + 1) * PAGE_TOKENS, slot));
        if let (Some(own), Some(page)) = (&mut self.full[block], &pages.full) {
            self.full_ids[block] = Some(page.id());
            *own = page.clone();
        }
        if let (Some((_, own)), Some(page)) =
            (self.lagging.iter_mut().find(|(b, _)| *b == block), &pages.full)
        {
            *own = page.clone();
        }
        if let (Some(own), Some(page)) = (&mut self.coded[block], &pages.coded)
            && page.coded() >= own.coded()
        {
            self.coded_ids[block] = Some(page.id());
            *own = page.clone();
        }
    }
}

/// Blocks that hold positions of either range.
fn blocks_of(keys: &Range<usize>, values: &Range<usize>) -> Range<usize> {
    match (keys.is_empty(), values.is_empty()) {
        (true, true) => 0..0,
        (false, true) => keys.start / PAGE_TOKENS..keys.end.div_ceil(PAGE_TOKENS),
        (true, false) => values.start / PAGE_TOKENS..values.end.div_ceil(PAGE_TOKENS),
        (false, false) => {
            keys.start.min(values.start) / PAGE_TOKENS..keys.end.max(values.end).div_ceil(PAGE_TOKENS)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_codec::{CodeLayout, KvFormat, Windows};
    use proptest::prelude::*;

    fn layout(format: KvFormat, windows: Windows) -> CacheLayout {
        CacheLayout::new(format, 2, 2, 64, windows, CodeLayout::CpuTile).unwrap()
    }

    fn sliding(layout: CacheLayout, window: Option<usize>) -> CacheLayout {
        match window {
            Some(window) => layout.with_sliding_layers(window, &[0]).unwrap(),
            None => layout,
        }
    }

    /// Every position that a query at the end may read has the page that the rule requires.
    fn check_readable(pages: &SequencePages, layout: &CacheLayout, step: &StepPages) {
        for t in step.positions.clone() {
            for j in 0..=t {
                for side in [Side::Key, Side::Value] {
                    let coded = layout.coded().is_some() && layout.windows().reads_side_as_code(side, t, j);
                    let block = j / PAGE_TOKENS;
                    assert!(
                        if coded { pages.coded()[block].is_some() } else { pages.full()[block].is_some() },
                        "query {t} cannot read {j} (coded: {coded})"
                    );
                }
            }
            let Some(group) = layout.sliding() else { continue };
            for j in (t + 1).saturating_sub(group.window())..=t {
                assert!(pages.sliding()[j / PAGE_TOKENS].is_some(), "query {t} cannot read sliding {j}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn any_chunking_keeps_every_page_the_rule_needs_and_leaks_none(
            chunks in prop::collection::vec(1usize..200, 1..12), sink in 0usize..8, recent in 1usize..300,
            window in prop::option::of(1usize..300),
        ) {
            let layout = layout(KvFormat::OSCAR2, Windows::new(sink * 16, recent).unwrap());
            let layout = sliding(layout, window);
            let pool = PagePool::new(&layout, usize::MAX / 4);
            let mut pages = SequencePages::new();
            let mut coded_up_to = sink * 16;
            for n in chunks {
                let step = pages.prepare(&layout, &pool, n).unwrap();
                check_readable(&pages, &layout, &step);
                prop_assert_eq!(step.demote.start, coded_up_to);
                coded_up_to = step.demote.end;
                pages.commit(&layout, &step);
                prop_assert_eq!(pages.blocks(), layout.blocks(pages.len()), "at {} tokens", pages.len());
                prop_assert_eq!(pool.usage().bytes, layout.sequence_bytes(pages.len()));
            }
            drop(pages);
            prop_assert_eq!(pool.usage().bytes, 0);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn a_resumable_table_can_always_be_resumed_at_its_last_whole_page(
            chunks in prop::collection::vec(1usize..150, 1..14), sink in 0usize..8, recent in 1usize..300,
            window in prop::option::of(1usize..300),
        ) {
            let layout = layout(KvFormat::OSCAR2, Windows::new(sink * 16, recent).unwrap());
            let layout = sliding(layout, window);
            let pool = PagePool::new(&layout, usize::MAX / 4);
            let mut pages = SequencePages::resumable();
            for n in chunks {
                let step = pages.prepare(&layout, &pool, n).unwrap();
                pages.commit(&layout, &step);
                let point = resume_point(pages.len());
                for block in 0..point / PAGE_TOKENS {
                    let (need, held) = (BlockNeed::at(&layout, point, 0, block), pages.block(block));
                    prop_assert!(need.is_met(&held), "{need:?} by {held:?} at {}", pages.len());
                }
                pages.trim(&layout);
                prop_assert!(pages.lagging.len() <= 1 && pages.sliding.lagging() <= 1);
                prop_assert_eq!(pool.usage().bytes, pages.bytes(&layout));
            }
            drop(pages);
            prop_assert_eq!(pool.usage().bytes, 0);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Keys are flushed by the residual while values slide, in any chunks: the pages are those
        /// of the rule, and every position is quantized exactly once on each side.
        #[test]
        fn sides_with_windows_of_their_own_keep_what_they_need(
            chunks in prop::collection::vec(1usize..300, 1..10), which in 0usize..5, sink in 0usize..4,
        ) {
            let name = ["kivi2", "kivi2-g64", "kitty", "kivi2-g32", "kitty-pro"][which];
            let format: KvFormat = name.parse().unwrap();
            let windows = match which {
                3 => format.windows(Some(16 * sink), Some(100)),
                _ => format.windows(None, None),
            };
            let layout = layout(format, windows.unwrap());
            let pool = PagePool::new(&layout, usize::MAX / 4);
            let mut pages = SequencePages::resumable();
            let mut coded = [layout.windows().sink(); 2];
            for n in chunks {
                let step = pages.prepare(&layout, &pool, n).unwrap();
                check_readable(&pages, &layout, &step);
                prop_assert_eq!([step.demote.start, step.demote_values.start], coded);
                coded = [step.demote.end, step.demote_values.end];
                pages.commit(&layout, &step);
                pages.trim(&layout);
                prop_assert_eq!(pages.blocks(), layout.blocks(pages.len()), "at {} tokens", pages.len());
                // A resume at the last whole page finds its codes, unless they cannot be shared.
                let point = resume_point(pages.len());
                for block in 0..point / PAGE_TOKENS {
                    let (need, held) = (BlockNeed::at(&layout, point, 0, block), pages.block(block));
                    prop_assert_eq!(need.is_met(&held), need.coded == 0 || !layout.codes_span_pages());
                }
            }
            drop(pages);
            prop_assert_eq!(pool.usage().bytes, 0);
        }
    }

    #[test]
    fn a_refused_step_changes_nothing() {
        let layout = layout(KvFormat::Bf16, Windows::default());
        let pool = PagePool::new(&layout, 3 * layout.full_block_bytes());
        let mut pages = SequencePages::new();
        let step = pages.prepare(&layout, &pool, 130).unwrap();
        pages.commit(&layout, &step);
        let error = pages.prepare(&layout, &pool, 100).unwrap_err();
        assert_eq!(error.free, 0);
        assert!(error.to_string().contains("--kv-memory"));
        assert_eq!((pages.len(), pages.blocks().full), (130, 3));
        let step = pages.prepare(&layout, &pool, 62).unwrap();
        pages.commit(&layout, &step);
        assert_eq!(pages.len(), 192);
    }

    #[test]
    fn ids_are_reused_lowest_first_and_never_shared() {
        let layout = layout(KvFormat::OSCAR2, Windows::default());
        let pool = PagePool::new(&layout, usize::MAX / 4);
        let count = |full| BlockCounts { full, ..BlockCounts::default() };
        let mut full = pool.take(count(4)).unwrap().full;
        full.remove(1);
        full.remove(0);
        let again = pool.take(count(3)).unwrap().full;
        assert_eq!(again.iter().map(|p| p.id().0).collect::<Vec<_>>(), [0, 1, 4]);
    }
}
