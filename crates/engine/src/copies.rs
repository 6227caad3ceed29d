//! Copies of pages, as a store or another machine gets them.

use oscar_backend::{Backend, BlockId};
use oscar_cache::{BlockOffer, PageKind, PrefixKey, RadixCache, StoredFlag};
use oscar_codec::{CacheLayout, PAGE_TOKENS};
use oscar_runner::Runner;
use oscar_store::{Page, PageName, PageRef};

/// Bytes copied from the device between two steps: more than a prompt step of 8K tokens makes.
const OFFER_BYTES: usize = 256 << 20;

/// A copy of a page without its bytes, which [`fill`] adds.
pub struct Copy {
    pub page: Page,
    pub block: BlockId,
}

impl Copy {
    pub fn new(page: PageRef<'_>, progress: usize, block: BlockId, bytes: usize) -> Self {
        Self { page: Page::new(page, progress, bytes), block }
    }
}

/// Reads the bytes of all copies at once; `false` if that failed.
pub fn fill<B: Backend>(runner: &Runner<B>, copies: &mut [Copy]) -> bool {
    let mut blocks: Vec<_> = copies.iter_mut().map(|copy| (copy.block, copy.page.payload())).collect();
    let read = runner.read_blocks(&mut blocks);
    read.inspect_err(|error| tracing::warn!(%error, "pages could not be read for a copy")).is_ok()
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
    /// Adds a page of this kind and progress, unless the store has it.
    pub fn add(
        &mut self,
        layout: &CacheLayout,
        offer: &BlockOffer,
        (kind, progress): (PageKind, usize),
        block: BlockId,
        stored: &StoredFlag,
    ) {
        let name = PageName { hash: offer.hash, block: offer.block as u32, kind };
        if stored.is_set() {
            return self.used.push((name, stored.clone()));
        }
        let bytes = block.bytes(layout);
        if self.bytes > 0 && self.bytes + bytes > OFFER_BYTES {
            self.dropped += 1;
            return;
        }
        self.bytes += bytes;
        self.copies.push(Copy::new(PageRef { name, tokens: &offer.tokens }, progress, block, bytes));
        self.flags.push(stored.clone());
    }
}

/// Copies of everything that a resume at the end of `key` needs, with the number of tokens that they
/// cover. `None` if they have more bytes than `has_room` allows.
pub fn copies<B: Backend>(
    runner: &Runner<B>,
    cache: &RadixCache,
    key: PrefixKey<'_>,
    has_room: impl FnOnce(usize) -> bool,
) -> Option<(Vec<Page>, usize)> {
    let offers = cache.offers(key, 0, true);
    let mut wanted = Vec::new();
    for offer in &offers {
        let full = offer.full.as_ref().map(|page| (PageKind::Full, 0, BlockId::Full(page.id())));
        let coded = offer.coded.as_ref().map(|page| {
            let kind = if page.is_complete() { PageKind::Coded } else { PageKind::Part };
            (kind, page.coded(), BlockId::Coded(page.id()))
        });
        let sliding = offer.sliding.as_ref().map(|page| (PageKind::Sliding, 0, BlockId::Sliding(page.id())));
        wanted.extend(full.into_iter().chain(coded).chain(sliding).map(|page| (offer, page)));
    }
    if !has_room(wanted.iter().map(|(_, (_, _, block))| block.bytes(runner.layout())).sum()) {
        return None;
    }
    let page = |(offer, (kind, progress, block)): (&BlockOffer, (PageKind, usize, BlockId))| {
        let name = PageName { hash: offer.hash, block: offer.block as u32, kind };
        let page = PageRef { name, tokens: &offer.tokens };
        Copy::new(page, progress, block, block.bytes(runner.layout()))
    };
    let mut copies: Vec<Copy> = wanted.into_iter().map(page).collect();
    let pages = fill(runner, &mut copies).then(|| copies.into_iter().map(|copy| copy.page).collect())?;
    Some((pages, offers.last().map_or(0, |offer| (offer.block + 1) * PAGE_TOKENS)))
}
