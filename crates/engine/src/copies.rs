//! Copies of pages, as a store or another machine gets them.

use oscar_backend::{Backend, BlockId};
use oscar_cache::{BlockOffer, PageKind, PrefixKey, RadixCache, StoredFlag};
use oscar_codec::{CacheLayout, PAGE_TOKENS};
use oscar_runner::Runner;
use oscar_store::{Page, PageName, PageRef};

/// Bytes copied from the device between two steps. A prompt step of 8K tokens makes 321 MB in four bits
/// on the shape of Qwen3-8B and 1.2 GB in BF16, more than a disk writes meanwhile.
const OFFER_BYTES: usize = 512 << 20;

/// A copy of a page without its bytes, which [`fill`] adds.
pub struct Copy {
    pub page: Page,
    pub block: BlockId,
}

/// Reads the bytes of all copies at once; `false` if that failed.
pub fn fill<B: Backend>(runner: &Runner<B>, copies: &mut [Copy]) -> bool {
    let mut blocks: Vec<_> = copies.iter_mut().map(|copy| (copy.block, copy.page.payload())).collect();
    let read = runner.read_blocks(&mut blocks);
    read.inspect_err(|error| tracing::warn!(%error, "pages could not be read for a copy")).is_ok()
}

/// A page of an offer.
pub struct OfferedPage<'a> {
    offer: &'a BlockOffer,
    pub kind: PageKind,
    progress: usize,
    block: BlockId,
    stored: StoredFlag,
}

/// The pages of an offer.
pub fn pages_of(offer: &BlockOffer) -> impl Iterator<Item = OfferedPage<'_>> {
    let page = move |kind, progress, block, stored: &StoredFlag| {
        let stored = stored.clone();
        OfferedPage { offer, kind, progress, block, stored }
    };
    let BlockOffer { full, coded, sliding, state, .. } = offer;
    let full = full.iter().map(move |p| page(PageKind::Full, 0, BlockId::Full(p.id()), p.stored()));
    let sliding =
        sliding.iter().map(move |p| page(PageKind::Sliding, 0, BlockId::Sliding(p.id()), p.stored()));
    let state = state.iter().map(move |p| page(PageKind::State, 0, BlockId::State(p.id()), p.stored()));
    let coded = coded.iter().map(move |p| match p.is_complete() {
        true => page(PageKind::Coded, p.coded(), BlockId::Coded(p.id()), p.stored()),
        // A part may grow, so it is written again.
        false => page(PageKind::Part, p.coded(), BlockId::Coded(p.id()), &StoredFlag::default()),
    });
    full.chain(sliding).chain(state).chain(coded)
}

impl OfferedPage<'_> {
    /// Tokens up to the end of the block.
    fn end(&self) -> usize {
        (self.offer.block + 1) * PAGE_TOKENS
    }

    fn name(&self) -> PageName {
        PageName { hash: self.offer.hash, block: self.offer.block as u32, kind: self.kind }
    }

    fn copy(&self, layout: &CacheLayout) -> Copy {
        let page = PageRef { name: self.name(), tokens: &self.offer.tokens };
        Copy { page: Page::new(page, self.progress, self.block.bytes(layout)), block: self.block }
    }
}

/// Pages that are copied for the store together.
#[derive(Default)]
pub struct Gathered {
    pub copies: Vec<Copy>,
    /// Those of the copied pages.
    pub flags: Vec<StoredFlag>,
    /// Pages that the store has.
    pub used: Vec<(PageName, StoredFlag)>,
    /// Pages for which there is no time.
    pub dropped: usize,
    /// Bytes of the copies since the last step.
    pub bytes: usize,
}

impl Gathered {
    /// Adds a page, unless the store has it.
    pub fn add(&mut self, layout: &CacheLayout, page: &OfferedPage<'_>) {
        if page.stored.is_set() {
            return self.used.push((page.name(), page.stored.clone()));
        }
        let bytes = page.block.bytes(layout);
        if self.bytes > 0 && self.bytes + bytes > OFFER_BYTES {
            self.dropped += 1;
            return;
        }
        self.bytes += bytes;
        self.copies.push(page.copy(layout));
        self.flags.push(page.stored.clone());
    }
}

/// Copies of everything that a resume at the end of `key` needs, with the number of tokens that they
/// cover. Of recurrent states that is the one after `resume` tokens; without it pages are of no use.
/// `None` if they have more bytes than `has_room` allows.
pub fn copies<B: Backend>(
    runner: &Runner<B>,
    cache: &RadixCache,
    key: PrefixKey<'_>,
    resume: usize,
    has_room: impl FnOnce(usize) -> bool,
) -> Option<(Vec<Page>, usize)> {
    let (layout, offers) = (runner.layout(), cache.offers(key, 0, true));
    let is_state = |page: &OfferedPage<'_>| page.kind == PageKind::State;
    let mut wanted: Vec<OfferedPage<'_>> =
        offers.iter().flat_map(pages_of).filter(|page| !is_state(page) || page.end() == resume).collect();
    if layout.has_states() && !wanted.iter().any(is_state) {
        wanted.clear();
    }
    if !has_room(wanted.iter().map(|page| page.block.bytes(layout)).sum()) {
        return None;
    }
    let mut copies: Vec<Copy> = wanted.iter().map(|page| page.copy(layout)).collect();
    let tokens = wanted.iter().map(OfferedPage::end).max().unwrap_or(0);
    let pages = fill(runner, &mut copies).then(|| copies.into_iter().map(|copy| copy.page).collect())?;
    Some((pages, tokens))
}
