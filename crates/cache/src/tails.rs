//! Quantizing the full-precision tails of idle prefixes: when memory is short, prefixes lose
//! precision before they are lost.
//!
//! A stored prefix ends in pages whose rows are still in BF16, because the next query would read
//! them so. If room is needed and nobody uses such a page, its rows are quantized and the full page
//! returns to the pool. The node remembers this ([`Node::demoted`](crate::radix::Node)), and a
//! later hit may read the quantized rows instead.
//!
//! Zero-width heads have no quantized rows: after such a hit they would read nothing but the sink.
//! So the hit ends a recent window earlier, and the sequence computes that window again
//! ([`RadixCache::with_recent_rows`]).
//!
//! **Invariants:** A page that anyone else holds is never demoted, the sink never. The bookkeeping
//! happens at once; the owner of the device does the quantization. Everything in
//! [`RadixCache::take_demotions`] must be quantized, in that order, before any page of the pool is
//! read or written again.

use crate::evict::Reclaimed;
use crate::pool::PagePool;
use crate::radix::{Node, NodeId, RadixCache};
use oscar_codec::{CacheLayout, CodedPageId, FullPageId, PAGE_TOKENS, Side, Tail};
use std::ops::Range;

/// Rows to quantize: positions `positions` of a sequence, which lie in its block `block`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TailDemotion {
    pub block: usize,
    pub positions: Range<usize>,
    pub full: FullPageId,
    pub coded: CodedPageId,
}

/// What a tree needs to demote tails.
#[derive(Debug)]
pub(crate) struct Tails {
    pool: PagePool,
    due: Vec<TailDemotion>,
}

impl RadixCache {
    /// A tree that quantizes idle tails before it evicts anything, if the layout allows it:
    /// quantized rows are smaller, keys and values are quantized together, and pages are whole
    /// demotion units. Zero-width heads resume a recent window earlier, where the pages of sliding
    /// layers may be gone: a layout with both keeps its tails.
    pub fn with_demotion(layout: CacheLayout, pool: &PagePool) -> Self {
        let windows = layout.windows();
        let allowed = layout.coded().is_some()
            && layout.coded_block_bytes() < layout.full_block_bytes()
            && windows.sides_agree()
            && !layout.codes_span_pages()
            && (layout.sliding().is_none() || layout.keeps_all_history())
            && PAGE_TOKENS.is_multiple_of(windows.tail(Side::Key).unit)
            && windows.sink().is_multiple_of(windows.tail(Side::Key).unit);
        let mut tree = Self::new(layout);
        tree.tails = allowed.then(|| Tails { pool: pool.clone(), due: Vec::new() });
        tree
    }

    /// The rows that must be quantized now; see the [module](self).
    pub fn take_demotions(&mut self) -> Vec<TailDemotion> {
        self.tails.as_mut().map(|tails| std::mem::take(&mut tails.due)).unwrap_or_default()
    }

    /// Bytes that demoting the node's page would free; 0 if it is not possible.
    pub(crate) fn demotable(&self, node: &Node) -> usize {
        let idle = node.pages.full.as_ref().is_some_and(|page| !page.is_shared());
        if self.tails.is_none() || !idle || node.block * PAGE_TOKENS < self.layout.windows().sink() {
            return 0;
        }
        let taken = if node.pages.coded.is_some() { 0 } else { self.layout.coded_block_bytes() };
        self.layout.full_block_bytes() - taken
    }

    /// Demotes idle tails, least recently used first and each from its oldest page, until `bytes`
    /// are free.
    pub(crate) fn demote_tails(&mut self, bytes: usize, done: &mut Reclaimed) {
        if self.tails.is_none() || done.bytes >= bytes {
            return;
        }
        let mut candidates: Vec<(u64, usize, NodeId)> = Vec::new();
        for (id, node) in self.nodes.iter().enumerate() {
            if let Some(node) = node.as_ref().filter(|node| self.demotable(node) > 0) {
                candidates.push((node.last_used, node.block, id));
            }
        }
        candidates.sort_unstable();
        for (_, _, id) in candidates {
            if done.bytes >= bytes {
                return;
            }
            done.bytes += self.demotable(self.node(id));
            done.demoted += 1;
            self.demote(id);
        }
    }

    /// Blocks before the end of a demoted tail that a resume computes again: the recent window if
    /// some head has no codes of it.
    pub(crate) fn computed_again(&self) -> usize {
        let Tail { recent, unit } = self.layout.windows().tail(Side::Key);
        match self.layout.keeps_all_history() {
            true => 0,
            // Everything before this has codes.
            false => recent.next_multiple_of(unit).div_ceil(PAGE_TOKENS),
        }
    }

    /// Where a sequence resumes that could read `path` quantized up to `coded_until`: its blocks, and
    /// the position up to which it reads quantized then.
    pub(crate) fn with_recent_rows(&self, path: &[NodeId], coded_until: usize) -> (usize, usize) {
        let again = self.computed_again();
        if again == 0 {
            return (path.len(), coded_until);
        }
        let count = path.len().saturating_sub(again);
        let (len, view) = (count * PAGE_TOKENS, self.view_of(&path[..count]));
        match view.is_some_and(|view| self.layout.windows().boundary(len.max(1) - 1) < view.end()) {
            true => (0, 0),
            false => (count, len),
        }
    }

    fn demote(&mut self, id: NodeId) {
        let Some(pool) = self.tails.as_ref().map(|tails| tails.pool.clone()) else { return };
        let node = self.node_mut(id);
        let Some(page) = node.pages.full.take() else { return };
        node.demoted = true;
        let full = page.id();
        let coded = match &node.pages.coded {
            Some(coded) => coded.clone(),
            None => pool.exchange(page),
        };
        // Progress counts both sides, which advance together here.
        let positions = node.block * PAGE_TOKENS + coded.coded() / 2..(node.block + 1) * PAGE_TOKENS;
        coded.mark_coded(2 * PAGE_TOKENS);
        let demotion = TailDemotion { block: node.block, positions, full, coded: coded.id() };
        node.pages.coded = Some(coded);
        if let Some(tails) = self.tails.as_mut().filter(|_| !demotion.positions.is_empty()) {
            // A page may be demoted, evicted and demoted into again before the demotions are taken.
            // The last demotion counts.
            tails.due.retain(|earlier| earlier.coded != demotion.coded);
            tails.due.push(demotion);
        }
    }
}
