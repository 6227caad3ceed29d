//! What a stored prefix must hold so that a sequence may continue from it.
//!
//! A sequence of `n` tokens needs, block by block, the pages that queries from `n` on will read:
//! full pages of the sink and of everything at or after `boundary(n − 1)`, quantized pages of
//! everything between. In models with sliding layers it also needs their pages of the window
//! before `n`, in models with recurrent states the state after `n` tokens. Nothing less will do: a
//! row can only be computed again from the full-precision rows of *its* window, those rows from the
//! ones of theirs, and so on back to the start. A prefix is therefore *resumable* at `n` or it is not;
//! there is no cheap repair in between.
//!
//! There is one exception, and it is counted. Where full pages were given up to make room, a
//! sequence may continue after the last block that is all quantized, and read everything before it
//! quantized. The rows behind that block, the recent window among them, are computed again. They
//! are *approximate*, and marked so wherever they are stored: the first of them read quantized rows
//! where a cold run reads BF16.

use crate::pool::{CodedPage, FullPage, SlidingPage, StateSlot};
use crate::view::View;
use oscar_codec::{CacheLayout, PAGE_TOKENS, Side};
use std::sync::Arc;

/// Longest prefix of a sequence of `len` tokens that ends with a whole page and leaves at least one
/// token to compute.
pub fn resume_point(len: usize) -> usize {
    len.saturating_sub(1) / PAGE_TOKENS * PAGE_TOKENS
}

/// The pages held of one block.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockPages {
    pub full: Option<FullPage>,
    pub coded: Option<CodedPage>,
    pub sliding: Option<SlidingPage>,
    /// The recurrent state after the block.
    pub state: Option<StateSlot>,
}

/// What a resume at some length needs of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockNeed {
    pub full: bool,
    /// Required progress of quantization, as [`CodedPage::coded`] counts it.
    pub coded: usize,
    pub sliding: bool,
    pub state: bool,
}

impl BlockNeed {
    /// The need of `block` for a resume at `len > 0` tokens that reads everything before
    /// `coded_until` except the sink quantized, regardless of the windows.
    pub fn at(layout: &CacheLayout, len: usize, coded_until: usize, block: usize) -> Self {
        let sliding = layout.sliding_blocks(len).contains(&block);
        let state = layout.has_states() && (block + 1) * PAGE_TOKENS == len;
        if layout.coded().is_none() {
            return Self { full: true, coded: 0, sliding, state };
        }
        let boundary = layout.windows().boundary(len - 1).max(coded_until);
        Self {
            full: layout.keeps_full_page(block, boundary),
            coded: coded_progress(layout, len, coded_until, block),
            sliding,
            state,
        }
    }

    pub fn is_met(&self, pages: &BlockPages) -> bool {
        (!self.full || pages.full.is_some())
            && (!self.sliding || pages.sliding.is_some())
            && (!self.state || pages.state.is_some())
            && (self.coded == 0 || pages.coded.as_ref().is_some_and(|page| page.coded() >= self.coded))
    }
}

/// Progress of quantization of `block` in a sequence of `len > 0` tokens, as [`CodedPage::coded`]
/// counts it.
pub(crate) fn coded_progress(layout: &CacheLayout, len: usize, coded_until: usize, block: usize) -> usize {
    let windows = layout.windows();
    let (start, end) = (block * PAGE_TOKENS, (block + 1) * PAGE_TOKENS);
    [Side::Key, Side::Value]
        .map(|side| windows.side_boundary(side, len - 1).max(coded_until).min(end))
        .into_iter()
        .map(|coded| if start.max(windows.sink()) < coded { coded - start } else { 0 })
        .sum()
}

/// A resumable prefix: holds on all its pages.
#[derive(Debug, Default)]
pub struct PrefixPages {
    pub(crate) blocks: Vec<BlockPages>,
    /// Everything before this position except the sink is read quantized, regardless of the
    /// windows; 0 if the windows decide.
    pub(crate) coded_until: usize,
    /// From this position on, rows are approximate: they differ from those of a cold run.
    pub(crate) approximate_from: Option<usize>,
    /// Stands for the blocks after the sink.
    pub(crate) view: Option<Arc<View>>,
}

impl PrefixPages {
    /// What is left of the prefix's history, if some of it was evicted.
    pub fn view(&self) -> Option<&Arc<View>> {
        self.view.as_ref()
    }

    /// The same prefix with a view in place of the history before the view's end. `None` if that
    /// history is not all quantized, or if it has a view already.
    pub fn reading(mut self, layout: &CacheLayout, view: Arc<View>) -> Option<Self> {
        let boundary = layout.windows().boundary(self.len().checked_sub(1)?);
        if self.view.is_some() || boundary < view.end() {
            return None;
        }
        for (block, pages) in self.blocks.iter_mut().enumerate() {
            if view.covers(layout, block) {
                *pages = BlockPages::default();
            }
        }
        self.view = Some(view);
        Some(self)
    }

    /// Tokens of the prefix, whole pages.
    pub fn len(&self) -> usize {
        self.blocks.len() * PAGE_TOKENS
    }

    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether a sequence that continues from here gives the same answers as a cold run.
    pub fn is_exact(&self) -> bool {
        self.approximate_from.is_none()
    }
}
