//! The prefix cache: a tree of 64-token pages that any number of sequences share.
//!
//! A node is one page of tokens after its parent's; it holds the page's codes, its full-precision rows, or both.
//! Sequences go in as they grow, prompt and answer, with the full-precision rows of their windows; those rows stay
//! beside the codes while there is room for both. [`RadixCache::find`] gives the longest stored prefix that is resumable by the
//! one rule (see [`prefix`](crate::prefix)), so that a hit answers as a cold run does, to the bit.
//!
//! **Invariants:** a tree has one cache layout, which is part of what its pages mean. All holders of a page hold
//! the same tokens after the same context: pages in the tree are complete and their full rows never change; codes
//! are only added, the same by whoever adds them. A page that anyone else holds is never given back.

use crate::hash::PageHash;
use crate::prefix::{BlockNeed, BlockPages, PrefixPages, resume_point};
use crate::sequence::SequencePages;
use oscar_codec::{CacheLayout, PAGE_TOKENS};
use std::collections::HashMap;
use std::sync::Arc;

/// Index of a node; the root, which has no page, is 0.
pub(crate) type NodeId = usize;
pub(crate) const ROOT: NodeId = 0;

#[derive(Debug)]
pub(crate) struct Node {
    pub parent: NodeId,
    /// The page's tokens; empty at the root.
    pub tokens: Arc<[u32]>,
    pub children: HashMap<Arc<[u32]>, NodeId>,
    /// Which block of its sequences this is.
    pub block: usize,
    pub pages: BlockPages,
    pub hash: Option<PageHash>,
    /// A prompt ended here: its repetition will resume at this node.
    pub anchor: bool,
    /// When it was last found or inserted, in operations of the tree.
    pub last_used: u64,
}

/// Pages in the tree, and those of them that nobody else holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedPages {
    pub tokens: usize,
    pub full: usize,
    pub coded: usize,
    pub idle_full: usize,
    pub idle_coded: usize,
    /// Idle full pages whose codes are held too: given back at the first need of room.
    pub spare_full: usize,
}

/// See the [module](self).
#[derive(Debug)]
pub struct RadixCache {
    pub(crate) layout: CacheLayout,
    pub(crate) nodes: Vec<Option<Node>>,
    free: Vec<NodeId>,
    operations: u64,
    count: usize,
}

impl RadixCache {
    pub fn new(layout: CacheLayout) -> Self {
        let root = Node {
            parent: ROOT,
            tokens: Arc::from([]),
            children: HashMap::new(),
            block: 0,
            pages: BlockPages::default(),
            hash: None,
            anchor: false,
            last_used: 0,
        };
        Self { layout, nodes: vec![Some(root)], free: Vec::new(), operations: 0, count: 0 }
    }

    /// Tokens stored in the tree.
    pub fn tokens(&self) -> usize {
        self.count * PAGE_TOKENS
    }

    pub(crate) fn node(&self, id: NodeId) -> &Node {
        self.nodes[id].as_ref().expect("ids of live nodes only are kept")
    }

    pub(crate) fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id].as_mut().expect("ids of live nodes only are kept")
    }

    /// Nodes of the stored prefix of `tokens`, whole pages.
    fn path(&self, tokens: &[u32]) -> Vec<NodeId> {
        let mut path = Vec::new();
        let mut node = ROOT;
        for page in tokens.chunks_exact(PAGE_TOKENS) {
            match self.node(node).children.get(page) {
                Some(&child) => {
                    path.push(child);
                    node = child;
                }
                None => break,
            }
        }
        path
    }

    /// The longest prefix of `tokens` from which a sequence can go on as if it had just computed it. Empty if there
    /// is none. To leave tokens to compute, pass fewer.
    pub fn find(&mut self, tokens: &[u32]) -> PrefixPages {
        let path = self.path(tokens);
        self.operations += 1;
        for &id in &path {
            self.nodes[id].as_mut().expect("a path is of live nodes").last_used = self.operations;
        }
        let mut count = path.len();
        // Needs of lower blocks do not shrink as the length does, so each length is asked afresh; the blocks most
        // likely to fail, those of the window, come first.
        while count > 0 && !self.is_resumable(&path[..count]) {
            count -= 1;
        }
        let blocks = path[..count].iter().map(|&id| self.node(id).pages.clone()).collect();
        PrefixPages { blocks }
    }

    fn is_resumable(&self, path: &[NodeId]) -> bool {
        let len = path.len() * PAGE_TOKENS;
        path.iter()
            .enumerate()
            .rev()
            .all(|(block, &id)| BlockNeed::at(&self.layout, len, block).is_met(&self.node(id).pages))
    }

    /// Puts the whole pages of a sequence into the tree and returns how many tokens that is. `tokens` are the
    /// sequence's from its start. Where the tree has a page already, the sequence changes over to it and its own
    /// copy is given back.
    pub fn insert(&mut self, tokens: &[u32], pages: &mut SequencePages) -> usize {
        let stored = pages.len().min(tokens.len()) / PAGE_TOKENS;
        self.operations += 1;
        let mut parent = ROOT;
        for (block, page) in tokens.chunks_exact(PAGE_TOKENS).take(stored).enumerate() {
            let id = match self.node(parent).children.get(page) {
                Some(&id) => id,
                None => self.add(parent, page, block),
            };
            let operations = self.operations;
            let node = self.node_mut(id);
            node.last_used = operations;
            let offered = pages.block(block);
            if node.pages.full.is_none() {
                node.pages.full = offered.full;
            }
            let coded = |page: &BlockPages| page.coded.as_ref().map_or(0, |page| page.coded());
            if coded(&node.pages) < offered.coded.as_ref().map_or(0, |page| page.coded()) {
                node.pages.coded = offered.coded;
            }
            pages.adopt(block, &node.pages);
            parent = id;
        }
        pages.trim(&self.layout);
        stored * PAGE_TOKENS
    }

    /// Remembers that a prompt ended after `tokens`, so that its window is thinned late.
    pub fn mark_prompt(&mut self, tokens: &[u32]) {
        let path = self.path(&tokens[..resume_point(tokens.len())]);
        if let Some(&last) = path.last() {
            self.node_mut(last).anchor = true;
        }
    }

    fn add(&mut self, parent: NodeId, tokens: &[u32], block: usize) -> NodeId {
        let tokens: Arc<[u32]> = Arc::from(tokens);
        let hash = PageHash::of(self.node(parent).hash.as_ref(), &tokens);
        let node = Node {
            parent,
            tokens: tokens.clone(),
            children: HashMap::new(),
            block,
            pages: BlockPages::default(),
            hash: Some(hash),
            anchor: false,
            last_used: 0,
        };
        let id = match self.free.pop() {
            Some(id) => {
                self.nodes[id] = Some(node);
                id
            }
            None => {
                self.nodes.push(Some(node));
                self.nodes.len() - 1
            }
        };
        self.node_mut(parent).children.insert(tokens, id);
        self.count += 1;
        id
    }

    /// Takes a leaf out of the tree.
    pub(crate) fn remove(&mut self, id: NodeId) -> Node {
        let node = self.nodes[id].take().expect("ids of live nodes only are kept");
        debug_assert!(node.children.is_empty() && id != ROOT, "only leaves are removed");
        self.node_mut(node.parent).children.remove(&node.tokens);
        self.free.push(id);
        self.count -= 1;
        node
    }

    /// Hashes of the stored pages of a prefix, in order.
    pub fn hashes(&self, tokens: &[u32]) -> Vec<PageHash> {
        self.path(tokens).into_iter().filter_map(|id| self.node(id).hash).collect()
    }

    /// Counts pages; looks at every node.
    pub fn pages(&self) -> CachedPages {
        let mut total = CachedPages { tokens: self.tokens(), ..CachedPages::default() };
        for node in self.nodes.iter().flatten() {
            if let Some(page) = &node.pages.full {
                total.full += 1;
                total.idle_full += usize::from(!page.is_shared());
                total.spare_full += usize::from(self.is_thinnable(node));
            }
            if let Some(page) = &node.pages.coded {
                total.coded += 1;
                total.idle_coded += usize::from(!page.is_shared());
            }
        }
        total
    }
}
