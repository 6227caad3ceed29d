//! Copies of pages, as a store or another machine gets them.

use oscar_backend::{Backend, BlockId};
use oscar_cache::{BlockOffer, PageKind, PrefixKey, RadixCache};
use oscar_codec::PAGE_TOKENS;
use oscar_runner::Runner;
use oscar_store::{Page, PageName, PageRef};

/// A copy of a page.
pub fn copy<B: Backend>(
    runner: &Runner<B>,
    page: PageRef<'_>,
    progress: usize,
    block: BlockId,
) -> Option<Page> {
    let mut page = Page::new(page, progress, block.bytes(runner.layout()));
    let read = runner.read_block(block, page.payload());
    read.inspect_err(|error| tracing::warn!(%error, "a page could not be read for a copy")).ok()?;
    Some(page)
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
        copy(runner, PageRef { name, tokens: &offer.tokens }, progress, block)
    };
    let pages = wanted.into_iter().map(page).collect::<Option<_>>()?;
    Some((pages, offers.last().map_or(0, |offer| (offer.block + 1) * PAGE_TOKENS)))
}
