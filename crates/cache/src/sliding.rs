//! Pages of the sliding layers of one sequence.
//!
//! A block's page is taken with the block and given up once no later query of the sequence sees its
//! last position (`oscar_codec::sliding`). A sequence for the prefix tree keeps it a little longer:
//! until it was offered to the tree and no resume at the last whole page needs it.

use crate::pool::SlidingPage;
use oscar_codec::{CacheLayout, SlidingPageId};
use std::ops::Range;

#[derive(Debug, Default)]
pub(crate) struct SlidingPages {
    /// By block; empty in models without sliding layers.
    pages: Vec<Option<SlidingPage>>,
    ids: Vec<Option<SlidingPageId>>,
    /// Blocks before this one have left every later window.
    first: usize,
    /// Pages that the sequence itself no longer reads, by block.
    lagging: Vec<(usize, SlidingPage)>,
}

impl SlidingPages {
    pub fn ids(&self) -> &[Option<SlidingPageId>] {
        &self.ids
    }

    /// Pages that the sequence reads.
    pub fn count(&self) -> usize {
        self.ids.iter().flatten().count()
    }

    /// Pages held beyond those.
    pub fn lagging(&self) -> usize {
        self.lagging.len()
    }

    /// The blocks among `blocks` that need a page and have none.
    pub fn missing(&self, layout: &CacheLayout, blocks: Range<usize>) -> Vec<usize> {
        match layout.sliding() {
            Some(_) => blocks.filter(|&b| self.ids.get(b).copied().flatten().is_none()).collect(),
            None => Vec::new(),
        }
    }

    pub fn put(&mut self, block: usize, page: SlidingPage) {
        if self.pages.len() <= block {
            self.pages.resize_with(block + 1, || None);
            self.ids.resize(block + 1, None);
        }
        self.ids[block] = Some(page.id());
        self.pages[block] = Some(page);
    }

    /// A page that only a resume before the sequence's end needs.
    pub fn put_lagging(&mut self, block: usize, page: SlidingPage) {
        self.lagging.push((block, page));
    }

    /// Gives up the pages that no query after `len` tokens sees; `keep` holds them for the tree.
    pub fn advance(&mut self, layout: &CacheLayout, len: usize, keep: bool) {
        let first = layout.sliding_blocks(len).start.min(self.pages.len());
        for block in self.first..first {
            self.ids[block] = None;
            if let Some(page) = self.pages[block].take()
                && keep
            {
                self.lagging.push((block, page));
            }
        }
        self.first = self.first.max(first);
    }

    /// Gives up held pages that no resume at `point` or later needs.
    pub fn trim(&mut self, layout: &CacheLayout, point: usize) {
        let needed = layout.sliding_blocks(point);
        self.lagging.retain(|(block, _)| needed.contains(block));
    }

    /// The page of a block, if it is held.
    pub fn get(&self, block: usize) -> Option<&SlidingPage> {
        let lagging = || self.lagging.iter().find(|(b, _)| *b == block).map(|(_, page)| page);
        self.pages.get(block).and_then(Option::as_ref).or_else(lagging)
    }

    /// Exchanges the page of a block for another with the same contents.
    pub fn adopt(&mut self, block: usize, page: &SlidingPage) {
        if let Some(Some(own)) = self.pages.get_mut(block) {
            self.ids[block] = Some(page.id());
            *own = page.clone();
        }
        if let Some((_, own)) = self.lagging.iter_mut().find(|(b, _)| *b == block) {
            *own = page.clone();
        }
    }
}
