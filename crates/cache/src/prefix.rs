//! What a stored prefix must hold so that a sequence may go on from it, by the one rule.
//!
//! A sequence of `n` tokens needs, block by block, what the queries from `n` on will read: full pages of the sink
//! and of everything at or after `boundary(n − 1)`, codes of everything between. Nothing less will do: a row can
//! only be computed again from the full-precision rows of *its* window, those rows from the ones of theirs, and so
//! on back to the start. A prefix is therefore *resumable* at `n` or it is not; there is no cheap repair in between.
//!
//! The one exception is counted: where the full pages of an idle tail were coded to make room
//! ([`tails`](crate::tails)), a sequence may go on reading everything up to there as code. What it computes is
//! *approximate* from then on, and marked so wherever it is stored.

use crate::pool::{CodedPage, FullPage};
use oscar_codec::{CacheLayout, PAGE_TOKENS, Side};

/// Longest prefix of a sequence of `len` tokens that ends with a page and leaves at least one token to compute.
pub fn resume_point(len: usize) -> usize {
    len.saturating_sub(1) / PAGE_TOKENS * PAGE_TOKENS
}

/// The pages held of one block.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockPages {
    pub full: Option<FullPage>,
    pub coded: Option<CodedPage>,
}

/// What resuming at some length needs of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockNeed {
    pub full: bool,
    /// How far the block must be coded, as [`CodedPage::coded`] counts.
    pub coded: usize,
}

impl BlockNeed {
    /// The need of `block` when resuming at `len > 0` tokens, reading everything before `coded_until` but the sink as
    /// code whatever the windows say.
    pub fn at(layout: &CacheLayout, len: usize, coded_until: usize, block: usize) -> Self {
        if layout.coded().is_none() {
            return Self { full: true, coded: 0 };
        }
        let sink = layout.windows().sink();
        let boundary = layout.windows().boundary(len - 1).max(coded_until);
        let (start, end) = (block * PAGE_TOKENS, (block + 1) * PAGE_TOKENS);
        Self { full: start < sink || end > boundary, coded: coded_progress(layout, len, coded_until, block) }
    }

    pub fn is_met(&self, pages: &BlockPages) -> bool {
        (!self.full || pages.full.is_some())
            && (self.coded == 0 || pages.coded.as_ref().is_some_and(|page| page.coded() >= self.coded))
    }
}

/// How far `block` of a sequence of `len > 0` tokens is coded, as [`CodedPage::coded`] counts.
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
    /// Everything before this position but the sink is read as code, whatever the windows say; 0 if they decide.
    pub(crate) coded_until: usize,
    /// From here on rows are not those of a cold run.
    pub(crate) approximate_from: Option<usize>,
}

impl PrefixPages {
    /// Tokens of the prefix, whole pages.
    pub fn len(&self) -> usize {
        self.blocks.len() * PAGE_TOKENS
    }

    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Will a sequence that goes on from here answer as a cold run does?
    pub fn is_exact(&self) -> bool {
        self.approximate_from.is_none()
    }
}
