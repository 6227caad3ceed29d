//! The prefix cache: a tree of 64-token pages that any number of sequences share.
//!
//! A node is one page of tokens after its parent's. It holds the quantized page, the full-precision
//! page, or both. In models with sliding layers it also holds their page; in models with recurrent
//! states some nodes hold the state after them. Sequences are inserted as they grow, prompt and
//! answer, with the full-precision rows of their windows; those rows stay beside the quantized ones
//! while there is room for both. [`RadixCache::find`] returns the longest stored prefix that is
//! resumable (see [`prefix`](crate::prefix)), so a hit gives the same answer as a cold run, bit for
//! bit. The exception is an approximate hit, which reads quantized rows alone; the caller is told.
//!
//! **Invariants:** A tree has one cache layout, which is part of the meaning of its pages. All
//! holders of a page hold the same tokens after the same context: pages in the tree are complete
//! and their full rows never change; quantized tiles are only added, with the same bytes whoever
//! adds them. Rows computed after an approximate hit live in nodes marked approximate and never mix
//! with exact ones. A page that anyone else holds is never given back.

use crate::events::{CacheEvent, PageHash};
use crate::prefix::{BlockNeed, BlockPages, PrefixPages, resume_point};
use crate::salt::{CacheSalt, PrefixKey};
use crate::sequence::SequencePages;
use crate::view::View;
use oscar_codec::{CacheLayout, PAGE_TOKENS, Side};
use std::collections::HashMap;
use std::sync::Arc;

/// Index of a node; the root, which has no page, is 0.
pub(crate) type NodeId = usize;
pub(crate) const ROOT: NodeId = 0;

#[derive(Debug)]
pub(crate) struct Node {
    pub parent: NodeId,
    /// The page's tokens; empty at the root, the salt at a node that only divides the tree.
    pub tokens: Arc<[u32]>,
    pub children: HashMap<Arc<[u32]>, NodeId>,
    /// Which block of its sequences this is.
    pub block: usize,
    pub pages: BlockPages,
    /// The view that stands for the history up to here, in a part of the tree that belongs to it.
    pub view: Option<Arc<View>>,
    /// A prompt ended here: the same prompt will resume at this node.
    pub anchor: bool,
    /// Its rows were computed after an approximate hit and differ from those of a cold run.
    pub approximate: bool,
    /// When it was last found or inserted, in operations of the tree.
    pub last_used: u64,
    /// The page's name in events; absent if it is not in them.
    pub hash: Option<PageHash>,
}

/// Pages in the tree, and those of them that nobody else holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedPages {
    pub tokens: usize,
    pub full: usize,
    pub coded: usize,
    pub idle_full: usize,
    pub idle_coded: usize,
    /// Idle full pages that are also held quantized: the first to be given back.
    pub spare_full: usize,
    /// Pages of sliding layers.
    pub sliding: usize,
    pub idle_sliding: usize,
    /// Recurrent states.
    pub states: usize,
    pub idle_states: usize,
}

/// See the [module](self).
#[derive(Debug)]
pub struct RadixCache {
    pub(crate) layout: CacheLayout,
    pub(crate) nodes: Vec<Option<Node>>,
    free: Vec<NodeId>,
    pub(crate) operations: u64,
    count: usize,
    /// A view was put into the tree.
    views: bool,
    /// Whether a sequence may continue where only quantized rows are left.
    pub(crate) approximates: bool,
    /// Changes that nobody has taken yet, if they are recorded.
    pub(crate) events: Option<Vec<CacheEvent>>,
}

impl RadixCache {
    pub fn new(layout: CacheLayout) -> Self {
        let root = Node {
            parent: ROOT,
            tokens: Arc::from([]),
            children: HashMap::new(),
            block: 0,
            pages: BlockPages::default(),
            view: None,
            anchor: false,
            approximate: false,
            last_used: 0,
            hash: None,
        };
        Self {
            layout,
            nodes: vec![Some(root)],
            free: Vec::new(),
            operations: 0,
            count: 0,
            views: false,
            approximates: false,
            events: None,
        }
    }

    /// A tree that also finds approximate hits, and gives up the tails of idle prefixes before whole
    /// prefixes, if the layout [allows it](Self::allows_approximate_hits).
    pub fn with_approximate_hits(layout: CacheLayout) -> Self {
        Self { approximates: Self::allows_approximate_hits(&layout), ..Self::new(layout) }
    }

    /// Whether a prefix of this layout can be resumed without its BF16 tail: keys and values are
    /// quantized together, pages are whole demotion units, and there are neither sliding layers nor
    /// recurrent states. A resume needs their pages and states before the end, which would be gone with
    /// the tail.
    pub fn allows_approximate_hits(layout: &CacheLayout) -> bool {
        let windows = layout.windows();
        let unit = windows.tail(Side::Key).unit;
        layout.coded().is_some()
            && layout.sliding().is_none()
            && !layout.has_states()
            && windows.sides_agree()
            && !layout.codes_span_pages()
            && PAGE_TOKENS.is_multiple_of(unit)
            && windows.sink().is_multiple_of(unit)
    }

    /// Whether the tree may hold views.
    pub(crate) fn has_views(&self) -> bool {
        self.views
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

    /// The node below which prefixes with this salt are stored.
    fn root_of(&self, salt: Option<CacheSalt>) -> Option<NodeId> {
        match salt {
            None => Some(ROOT),
            Some(salt) => self.node(ROOT).children.get(&salt.edge()).copied(),
        }
    }

    /// Nodes of the stored prefix of `key`, whole pages.
    pub(crate) fn path(&self, key: PrefixKey<'_>) -> Vec<NodeId> {
        let mut path = Vec::new();
        let Some(mut node) = self.root_of(key.salt) else { return path };
        for page in key.tokens.chunks_exact(PAGE_TOKENS) {
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

    /// Tokens of the longest stored prefix of `key`, whether or not a sequence can continue there.
    pub fn stored_tokens<'a>(&self, key: impl Into<PrefixKey<'a>>) -> usize {
        self.path(key.into()).len() * PAGE_TOKENS
    }

    /// The longest prefix of `key` from which a sequence can continue: exactly, as if it had
    /// just computed it, or approximately ([`PrefixPages::is_exact`] tells), if that saves more
    /// than a recent window. Empty if there is none. To leave tokens to compute, pass fewer.
    pub fn find<'a>(&mut self, key: impl Into<PrefixKey<'a>>) -> PrefixPages {
        let path = self.touched_path(key.into());
        self.longest(&path, true)
    }

    /// The longest prefix of `key` from which a sequence can continue as if it had just computed
    /// it.
    pub fn find_exact<'a>(&mut self, key: impl Into<PrefixKey<'a>>) -> PrefixPages {
        let path = self.touched_path(key.into());
        let exact = path.iter().position(|&id| self.node(id).approximate).unwrap_or(path.len());
        self.longest(&path[..exact], false)
    }

    pub(crate) fn touched_path(&mut self, key: PrefixKey<'_>) -> Vec<NodeId> {
        let path = self.path(key);
        self.operations += 1;
        for &id in &path {
            self.nodes[id].as_mut().expect("a path is of live nodes").last_used = self.operations;
        }
        path
    }

    pub(crate) fn longest(&self, path: &[NodeId], approximate: bool) -> PrefixPages {
        let quantized = if approximate { self.quantized_blocks(path) } else { 0 };
        let least = quantized.saturating_sub(self.worth_computing());
        match (least.max(1)..=path.len()).rev().find(|&count| self.is_resumable(&path[..count])) {
            Some(count) => self.pages_of(&path[..count], 0),
            None if least == 0 => PrefixPages::default(),
            None => self.pages_of(&path[..quantized], quantized * PAGE_TOKENS),
        }
    }

    /// Blocks of a recent window. An approximate hit must save more.
    pub(crate) fn worth_computing(&self) -> usize {
        self.layout.windows().recent().div_ceil(PAGE_TOKENS)
    }

    /// Blocks of `path` after which a sequence can continue that reads everything before them,
    /// except the sink, quantized.
    fn quantized_blocks(&self, path: &[NodeId]) -> usize {
        if !self.approximates {
            return 0;
        }
        let (len, view) = (path.len() * PAGE_TOKENS, self.view_of(path));
        let needed = |block| BlockNeed::at(&self.layout, len, len, block);
        let is_held = |&(block, &id): &(usize, &NodeId)| self.holds(view, block, id, needed(block));
        let count = path.iter().enumerate().take_while(is_held).count();
        if self.begins_inside(view, count) { 0 } else { count }
    }

    /// Whether the windows of a resume after `count` blocks would read rows of the view in BF16.
    fn begins_inside(&self, view: Option<&Arc<View>>, count: usize) -> bool {
        let last = (count * PAGE_TOKENS).max(1) - 1;
        view.is_some_and(|view| self.layout.windows().boundary(last) < view.end())
    }

    fn pages_of(&self, path: &[NodeId], coded_until: usize) -> PrefixPages {
        let blocks = path.iter().map(|&id| self.node(id).pages.clone()).collect();
        let view = self.view_of(path).cloned();
        let approximate = path.iter().position(|&id| self.node(id).approximate);
        let approximate = approximate.or((coded_until > 0).then_some(path.len()));
        let approximate_from = approximate.map(|block| block * PAGE_TOKENS);
        PrefixPages { blocks, coded_until, approximate_from, view }
    }

    /// The view of the path's part of the tree, if the path reaches it.
    pub(crate) fn view_of(&self, path: &[NodeId]) -> Option<&Arc<View>> {
        path.iter().rev().find_map(|&id| self.node(id).view.as_ref())
    }

    /// Whether a sequence can continue after `path` as if it had just computed it.
    fn is_resumable(&self, path: &[NodeId]) -> bool {
        let (len, view) = (path.len() * PAGE_TOKENS, self.view_of(path));
        let needed = |block| BlockNeed::at(&self.layout, len, 0, block);
        // Needs of lower blocks do not shrink with the length, so every length is checked from
        // scratch. The blocks most likely to fail, those of the window, come first.
        let mut blocks = path.iter().enumerate().rev();
        !self.begins_inside(view, path.len())
            && blocks.all(|(block, &id)| self.holds(view, block, id, needed(block)))
    }

    /// Whether a node has what is needed of its block. The blocks that a view covers need nothing.
    fn holds(&self, view: Option<&Arc<View>>, block: usize, id: NodeId, needed: BlockNeed) -> bool {
        view.is_some_and(|view| view.covers(&self.layout, block)) || needed.is_met(&self.node(id).pages)
    }

    /// Puts the whole pages of a sequence into the tree and returns how many tokens that is. `key`
    /// has the sequence's tokens from its start. If the tree already has a page, the sequence
    /// switches to it and gives its own copy back.
    pub fn insert<'a>(&mut self, key: impl Into<PrefixKey<'a>>, pages: &mut SequencePages) -> usize {
        let PrefixKey { salt, tokens } = key.into();
        let stored = pages.len().min(tokens.len()) / PAGE_TOKENS;
        self.operations += 1;
        self.views |= pages.view().is_some();
        let mut parent = match salt.filter(|_| stored > 0) {
            None => ROOT,
            Some(salt) => self.root_or_new(salt),
        };
        for (block, page) in tokens.chunks_exact(PAGE_TOKENS).take(stored).enumerate() {
            let id = match self.node(parent).children.get(page) {
                Some(&id) => id,
                None => {
                    let id = self.add(parent, page, block);
                    self.node_mut(id).approximate = !pages.is_exact_block(block);
                    id
                }
            };
            let operations = self.operations;
            let exact = pages.is_exact_block(block);
            let node = self.node_mut(id);
            node.last_used = operations;
            if let Some(view) = pages.view().filter(|view| view.end() == (block + 1) * PAGE_TOKENS) {
                node.view.get_or_insert_with(|| view.clone());
            }
            let offered = pages.block(block);
            if node.approximate && (exact || node.pages.is_empty()) {
                node.pages = offered;
                node.approximate = !exact;
            } else if node.approximate != exact && (exact || node.pages.has_a_page_of(&offered)) {
                if node.pages.full.is_none() && offered.full.is_some() {
                    node.pages.full = offered.full;
                }
                let coded = |page: &BlockPages| page.coded.as_ref().map_or(0, |page| page.coded());
                if coded(&node.pages) < offered.coded.as_ref().map_or(0, |page| page.coded()) {
                    node.pages.coded = offered.coded;
                }
                if node.pages.sliding.is_none() {
                    node.pages.sliding = offered.sliding;
                }
                if node.pages.state.is_none() {
                    node.pages.state = offered.state;
                }
                pages.adopt(block, &node.pages);
            }
            parent = id;
        }
        self.drop_passed_states(parent);
        pages.trim(&self.layout);
        stored * PAGE_TOKENS
    }

    /// Keeps a view under a key of its own, beside the sequences that read it.
    pub fn store_view(&mut self, key: CacheSalt, view: Arc<View>) {
        self.operations += 1;
        self.views = true;
        let (id, operations) = (self.root_or_new(key), self.operations);
        let node = self.node_mut(id);
        node.last_used = operations;
        node.view = Some(view);
    }

    /// The view that was stored under this key, if it was not evicted.
    pub fn stored_view(&mut self, key: CacheSalt) -> Option<Arc<View>> {
        let id = self.root_of(Some(key))?;
        self.operations += 1;
        let operations = self.operations;
        let node = self.node_mut(id);
        node.last_used = operations;
        node.view.clone()
    }

    /// Records that a prompt ended after these tokens, so that its window is thinned late.
    pub fn mark_prompt<'a>(&mut self, key: impl Into<PrefixKey<'a>>) {
        let PrefixKey { salt, tokens } = key.into();
        let path = self.path(PrefixKey::new(salt, &tokens[..resume_point(tokens.len())]));
        if let Some(&last) = path.last() {
            self.node_mut(last).anchor = true;
        }
    }

    /// The node below which prefixes with this salt are stored, made if it is missing.
    pub(crate) fn root_or_new(&mut self, salt: CacheSalt) -> NodeId {
        self.root_of(Some(salt)).unwrap_or_else(|| self.attach(ROOT, salt.edge(), 0))
    }

    pub(crate) fn add(&mut self, parent: NodeId, page: &[u32], block: usize) -> NodeId {
        self.count += 1;
        let id = self.attach(parent, Arc::from(page), block);
        self.note_stored(id);
        id
    }

    /// Makes a node, of a page or of a salt, below `parent`.
    fn attach(&mut self, parent: NodeId, tokens: Arc<[u32]>, block: usize) -> NodeId {
        let node = Node {
            parent,
            tokens: tokens.clone(),
            children: HashMap::new(),
            block,
            pages: BlockPages::default(),
            view: None,
            anchor: false,
            approximate: false,
            last_used: 0,
            hash: None,
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
        id
    }

    /// Takes a leaf out of the tree.
    pub(crate) fn remove(&mut self, id: NodeId) -> Node {
        let node = self.nodes[id].take().expect("ids of live nodes only are kept");
        debug_assert!(node.children.is_empty() && id != ROOT, "only leaves are removed");
        self.node_mut(node.parent).children.remove(&node.tokens);
        self.free.push(id);
        self.count -= usize::from(node.tokens.len() == PAGE_TOKENS);
        self.note_removed(&node);
        node
    }

    /// Counts pages. Visits every node.
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
            if let Some(page) = &node.pages.sliding {
                total.sliding += 1;
                total.idle_sliding += usize::from(!page.is_shared());
            }
            if let Some(state) = &node.pages.state {
                total.states += 1;
                total.idle_states += usize::from(!state.is_shared());
            }
        }
        total
    }
}
