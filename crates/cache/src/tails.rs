//! Coding the full-precision tails of idle prefixes, so that a short memory costs precision before it costs prefixes.
//!
//! A stored prefix ends in pages whose rows are still full, because the next query would read them so. When room is
//! needed and nobody uses such a page, its rows are coded and the full page goes back to the pool; the node remembers
//! ([`Node::demoted`](crate::radix::Node)) and a later hit may read the codes instead.
//!
//! **Invariants:** a page that anyone else holds is never demoted, the sink never. The bookkeeping is done at once,
//! the coding by whoever owns the device: everything in [`RadixCache::take_demotions`] must be coded, in that order,
//! before any page of the pool is read or written again.

use crate::evict::Reclaimed;
use crate::pool::PagePool;
use crate::radix::{Node, NodeId, RadixCache};
use oscar_codec::{CacheLayout, CodedPageId, FullPageId, PAGE_TOKENS, Side};
use std::ops::Range;

/// Rows to be coded: positions `positions` of a sequence, which lie in its block `block`.
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
    /// A tree that codes idle tails before it evicts anything, where the layout allows it: codes that are smaller
    /// than rows, keys and values coded together, and pages that are whole demotion units.
    pub fn with_demotion(layout: CacheLayout, pool: &PagePool) -> Self {
        let windows = layout.windows();
        let allowed = layout.coded().is_some()
            && layout.coded_block_bytes() < layout.full_block_bytes()
            && windows.sides_agree()
            && !layout.codes_span_pages()
            && PAGE_TOKENS.is_multiple_of(windows.tail(Side::Key).unit)
            && windows.sink().is_multiple_of(windows.tail(Side::Key).unit);
        let mut tree = Self::new(layout);
        tree.tails = allowed.then(|| Tails { pool: pool.clone(), due: Vec::new() });
        tree
    }

    /// The rows that have to be coded now; see the [module](self).
    pub fn take_demotions(&mut self) -> Vec<TailDemotion> {
        self.tails.as_mut().map(|tails| std::mem::take(&mut tails.due)).unwrap_or_default()
    }

    /// Bytes that demoting the node's page would give; 0 if that is not possible.
    pub(crate) fn demotable(&self, node: &Node) -> usize {
        let idle = node.pages.full.as_ref().is_some_and(|page| !page.is_shared());
        if self.tails.is_none() || !idle || node.block * PAGE_TOKENS < self.layout.windows().sink() {
            return 0;
        }
        let taken = if node.pages.coded.is_some() { 0 } else { self.layout.coded_block_bytes() };
        self.layout.full_block_bytes() - taken
    }

    /// Codes idle tails, least recently used first and each from its oldest page, until `bytes` are free.
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
        // Progress counts both sides, which go together here.
        let positions = node.block * PAGE_TOKENS + coded.coded() / 2..(node.block + 1) * PAGE_TOKENS;
        coded.mark_coded(2 * PAGE_TOKENS);
        let demotion = TailDemotion { block: node.block, positions, full, coded: coded.id() };
        node.pages.coded = Some(coded);
        if let Some(tails) = self.tails.as_mut().filter(|_| !demotion.positions.is_empty()) {
            // A page that was demoted and evicted in the same breath may be demoted into again: the last one counts.
            tails.due.retain(|earlier| earlier.coded != demotion.coded);
            tails.due.push(demotion);
        }
    }
}
