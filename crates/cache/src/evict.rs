//! Making room: what the prefix tree gives up, and in which order.
//!
//! 1. Full pages that are also held quantized, and pages of sliding layers, that lie in no window
//!    before a branch or an end; states of nodes that are neither. An exact resume there is unlikely.
//! 2. In a tree with approximate hits: the BF16 tails of idle prefixes, least recently used first.
//!    What is left of such a prefix is quantized, and a hit on it approximate.
//! 3. Least recently used first: leaves with all their pages, full pages and pages of sliding
//!    layers in the other windows, and the other states.
//!
//! A state is large, so most go earlier: when a sequence puts a state into the tree, those that it passed
//! on the way go, except after branches and ends of prompts.

use crate::pool::{CodedPage, FullPage, SlidingPage, StateSlot};
use crate::prefix::BlockPages;
use crate::radix::{Node, NodeId, ROOT, RadixCache};
use crate::view::View;
use oscar_codec::{BlockCounts, CacheLayout, CodedPageId, FullPageId, PAGE_TOKENS};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;

/// What [`RadixCache::reclaim`] or [`RadixCache::flush`] gave back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Full pages dropped because they are also held quantized, pages of sliding layers, and states.
    pub thinned: usize,
    /// Pages of evicted leaves, of all kinds.
    pub evicted: usize,
    pub bytes: usize,
}

impl std::ops::AddAssign for Reclaimed {
    fn add_assign(&mut self, other: Self) {
        self.thinned += other.thinned;
        self.evicted += other.evicted;
        self.bytes += other.bytes;
    }
}

/// What a node can lose while its other pages stay.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Spare {
    Full,
    Sliding,
    State,
}

/// Which pages may go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Extent {
    /// Pages that an approximate hit does not read: full ones after the sink, and leaves that are
    /// not all quantized.
    Tails,
    Everything,
}

impl BlockPages {
    pub(crate) fn is_empty(&self) -> bool {
        self.count() == 0
    }

    fn count(&self) -> usize {
        let Self { full, coded, sliding, state } = self;
        let pages = [full.is_some(), coded.is_some(), sliding.is_some(), state.is_some()];
        pages.into_iter().filter(|held| *held).count()
    }

    /// Whether nobody else holds the page of the sliding layers.
    fn has_idle_sliding(&self) -> bool {
        self.sliding.as_ref().is_some_and(|page| !page.is_shared())
    }

    /// Whether nobody else holds the state.
    fn has_idle_state(&self) -> bool {
        self.state.as_ref().is_some_and(|state| !state.is_shared())
    }

    pub(crate) fn has_a_page_of(&self, other: &Self) -> bool {
        let full = |pages: &Self| pages.full.as_ref().map(FullPage::id);
        let coded = |pages: &Self| pages.coded.as_ref().map(CodedPage::id);
        let sliding = |pages: &Self| pages.sliding.as_ref().map(SlidingPage::id);
        let state = |pages: &Self| pages.state.as_ref().map(StateSlot::id);
        (self.full.is_some() && full(self) == full(other))
            || (self.coded.is_some() && coded(self) == coded(other))
            || (self.sliding.is_some() && sliding(self) == sliding(other))
            || (self.state.is_some() && state(self) == state(other))
    }
}

/// How many nodes of the tree hold each page and each view. A view's part of the tree shares the
/// pages of its windows with the part of its base; every other page has one node. A view may be
/// stored under its key and be read in several parts of the tree. Models with sliding layers or
/// states have no views.
#[derive(Clone, Default)]
struct Holders {
    full: HashMap<FullPageId, usize>,
    coded: HashMap<CodedPageId, usize>,
    views: HashMap<*const View, usize>,
}

impl Holders {
    fn of(tree: &RadixCache) -> Self {
        let mut holders = Self::default();
        if tree.has_views() {
            for pages in tree.nodes.iter().flatten().map(|node| &node.pages) {
                pages.full.iter().for_each(|page| *holders.full.entry(page.id()).or_default() += 1);
                pages.coded.iter().for_each(|page| *holders.coded.entry(page.id()).or_default() += 1);
            }
            for view in tree.nodes.iter().flatten().filter_map(|node| node.view.as_ref()) {
                *holders.views.entry(Arc::as_ptr(view)).or_default() += 1;
            }
        }
        holders
    }

    /// Whether only the tree holds the node's pages, and nobody reads its view.
    fn are_all(&self, node: &Node) -> bool {
        let BlockPages { full, coded, sliding, state } = &node.pages;
        full.as_ref().is_none_or(|p| p.holds() == self.full.get(&p.id()).copied().unwrap_or(1))
            && coded.as_ref().is_none_or(|p| p.holds() == self.coded.get(&p.id()).copied().unwrap_or(1))
            && sliding.as_ref().is_none_or(|page| !page.is_shared())
            && state.as_ref().is_none_or(|state| !state.is_shared())
            && node.view.as_ref().is_none_or(|view| {
                Arc::strong_count(view) == self.views.get(&Arc::as_ptr(view)).copied().unwrap_or(1)
            })
    }

    /// Takes the node's holds away; returns the bytes of the pages that nobody holds then.
    fn release(&mut self, node: &Node, layout: &CacheLayout) -> usize {
        let is_last = |left: Option<&mut usize>| match left {
            Some(left) => {
                *left -= 1;
                *left == 0
            }
            None => true,
        };
        let BlockPages { full, coded, sliding, state } = &node.pages;
        let full = full.as_ref().is_some_and(|page| is_last(self.full.get_mut(&page.id())));
        let coded = coded.as_ref().is_some_and(|page| is_last(self.coded.get_mut(&page.id())));
        let (full, coded) = (full.into(), coded.into());
        let (sliding, states) = (sliding.is_some().into(), state.is_some().into());
        let view = match &node.view {
            Some(view) if is_last(self.views.get_mut(&Arc::as_ptr(view))) => view.bytes(),
            _ => 0,
        };
        layout.bytes_of(BlockCounts { full, coded, sliding, states }) + view
    }
}

impl RadixCache {
    /// Gives back at least `bytes`, or everything that is idle.
    pub fn reclaim(&mut self, bytes: usize) -> Reclaimed {
        let mut done = Reclaimed::default();
        self.thin(bytes, &mut done);
        if self.approximates {
            self.evict(bytes, Extent::Tails, &mut done);
        }
        self.evict(bytes, Extent::Everything, &mut done);
        done
    }

    /// Evicts every page that no sequence holds and no held page follows.
    pub fn flush(&mut self) -> Reclaimed {
        self.note_flush(|tree| {
            let mut done = Reclaimed::default();
            tree.evict(usize::MAX, Extent::Everything, &mut done);
            done
        })
    }

    /// Bytes that [`RadixCache::reclaim`] could give back now. Visits every node.
    pub fn reclaimable(&self) -> usize {
        // A node can go with all its pages once its whole subtree can. Other nodes can lose their
        // full page, that of sliding layers and their state at most.
        let mut order = vec![ROOT];
        let mut next = 0;
        while next < order.len() {
            order.extend(self.node(order[next]).children.values());
            next += 1;
        }
        let mut stays = vec![false; self.nodes.len()];
        stays[ROOT] = true;
        let holders = Holders::of(self);
        let mut left = holders.clone();
        let mut bytes = 0;
        for &id in order.iter().skip(1).rev() {
            let node = self.node(id);
            if !holders.are_all(node) {
                stays[id] = true;
            }
            if stays[id] {
                stays[node.parent] = true;
                bytes += self.spare(node).iter().map(|&spare| self.bytes_of(spare)).sum::<usize>();
            } else {
                bytes += left.release(node, &self.layout);
            }
        }
        bytes
    }

    /// Whether the node's full page is idle and fully covered by its quantized page.
    pub(crate) fn is_thinnable(&self, node: &Node) -> bool {
        node.block * PAGE_TOKENS >= self.layout.windows().sink()
            && node.pages.full.as_ref().is_some_and(|page| !page.is_shared())
            && node.pages.coded.as_ref().is_some_and(CodedPage::is_complete)
    }

    /// The `reach` nodes before each branch, end of a prompt and end of an answer: their rows make it
    /// resumable.
    fn windows_worth_keeping(&self, reach: usize) -> Vec<bool> {
        let mut keep = vec![false; self.nodes.len()];
        for (id, node) in self.nodes.iter().enumerate() {
            if node.as_ref().is_some_and(|node| node.anchor || node.children.len() != 1) {
                let mut at = id;
                for _ in 0..reach {
                    if at == ROOT {
                        break;
                    }
                    keep[at] = true;
                    at = self.node(at).parent;
                }
            }
        }
        keep
    }

    /// What a node can lose without being evicted.
    fn spare(&self, node: &Node) -> Vec<Spare> {
        let all = [
            (Spare::Full, self.is_thinnable(node)),
            (Spare::Sliding, node.pages.has_idle_sliding()),
            (Spare::State, node.pages.has_idle_state()),
        ];
        all.into_iter().filter(|(_, idle)| *idle).map(|(spare, _)| spare).collect()
    }

    fn bytes_of(&self, spare: Spare) -> usize {
        match spare {
            Spare::Full => self.layout.full_block_bytes(),
            Spare::Sliding => self.layout.sliding_block_bytes(),
            Spare::State => self.layout.state_bytes(),
        }
    }

    fn drop_spare(&mut self, id: NodeId, spare: Spare, done: &mut Reclaimed) {
        let pages = &mut self.node_mut(id).pages;
        match spare {
            Spare::Full => pages.full = None,
            Spare::Sliding => pages.sliding = None,
            Spare::State => pages.state = None,
        }
        done.thinned += 1;
        done.bytes += self.bytes_of(spare);
    }

    /// Gives up the states on the way to `id`, if it has one itself, up to the last branch or end of a
    /// prompt.
    pub(crate) fn drop_passed_states(&mut self, id: NodeId) {
        let mut at = id;
        if !self.layout.has_states() {
            return;
        }
        while at != ROOT && self.node(at).pages.state.is_none() {
            at = self.node(at).parent;
        }
        while at != ROOT {
            at = self.node(at).parent;
            let node = self.node_mut(at);
            if at == ROOT || node.anchor || node.children.len() > 1 {
                return;
            }
            node.pages.state = None;
        }
    }

    /// Drops full pages, pages of sliding layers and states that were kept only because there was room.
    fn thin(&mut self, bytes: usize, done: &mut Reclaimed) {
        if done.bytes >= bytes {
            return;
        }
        let keep = self.windows_worth_keeping(self.window_reach());
        let keep_sliding = self.windows_worth_keeping(self.sliding_reach());
        let keep_state = self.windows_worth_keeping(1);
        let mut candidates: Vec<(u64, usize, NodeId, Spare)> = Vec::new();
        for (id, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            for spare in self.spare(node) {
                let is_kept = match spare {
                    Spare::Full => keep[id],
                    Spare::Sliding => keep_sliding[id],
                    Spare::State => keep_state[id],
                };
                if !is_kept {
                    candidates.push((node.last_used, node.block, id, spare));
                }
            }
        }
        candidates.sort_unstable();
        for (_, _, id, spare) in candidates {
            if done.bytes >= bytes {
                return;
            }
            self.drop_spare(id, spare, done);
        }
    }

    /// Blocks before an end whose sliding rows a resume there, or a page earlier, may need.
    fn sliding_reach(&self) -> usize {
        self.layout.sliding().map_or(0, |_| self.layout.sliding_reach() + 1)
    }

    /// Least recently used first: leaves with all their pages, the remaining full pages that are also
    /// held quantized, the remaining pages of sliding layers, and the remaining states.
    fn evict(&mut self, bytes: usize, extent: Extent, done: &mut Reclaimed) {
        if done.bytes >= bytes {
            return;
        }
        let mut holders = Holders::of(self);
        let sink = self.layout.windows().sink();
        let is_evictable = |holders: &Holders, id: NodeId, node: &Node| {
            let is_tail = || {
                let coded = node.pages.coded.as_ref();
                node.block * PAGE_TOKENS >= sink
                    && node.view.is_none()
                    && !coded.is_some_and(CodedPage::is_complete)
            };
            id != ROOT
                && node.children.is_empty()
                && holders.are_all(node)
                && (extent == Extent::Everything || is_tail())
        };
        let mut candidates = BinaryHeap::new();
        for (id, node) in self.nodes.iter().enumerate() {
            if let Some(node) = node
                && (is_evictable(&holders, id, node) || !self.spare(node).is_empty())
            {
                candidates.push(Reverse((node.last_used, id)));
            }
        }
        while done.bytes < bytes
            && let Some(Reverse((_, id))) = candidates.pop()
        {
            let Some(node) = &self.nodes[id] else { continue };
            if !is_evictable(&holders, id, node) {
                for spare in self.spare(node) {
                    if done.bytes < bytes {
                        self.drop_spare(id, spare, done);
                    }
                }
                continue;
            }
            let node = self.remove(id);
            done.evicted += node.pages.count();
            done.bytes += holders.release(&node, &self.layout);
            let parent = self.node(node.parent);
            if is_evictable(&holders, node.parent, parent) {
                candidates.push(Reverse((parent.last_used, node.parent)));
            }
        }
    }
}
