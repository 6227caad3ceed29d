//! Sequences over a prefix tree beside a model of memory: every position that a query reads must hold
//! the row of exactly its tokens, and every state that a step begins from must be that of its tokens.

use crate::{CacheEvent, PageHash, PagePool, RadixCache, SequencePages};
use oscar_codec::{BlockCounts, CacheLayout, CodeLayout, FormatTable, KvFormat, PAGE_TOKENS, Windows};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// The contents of the pages: for each position, a digest of the tokens up to it.
#[derive(Default)]
pub(crate) struct Memory {
    pub full: HashMap<u32, [u64; PAGE_TOKENS]>,
    pub coded: HashMap<u32, [u64; PAGE_TOKENS]>,
    pub sliding: HashMap<u32, [u64; PAGE_TOKENS]>,
    /// States: the digest of all tokens so far.
    pub states: HashMap<u32, u64>,
}

pub(crate) struct World {
    pub layout: CacheLayout,
    pub pool: PagePool,
    pub tree: RadixCache,
    pub memory: Memory,
    pub live: Vec<Live>,
    born: u64,
    pub approximate_hits: usize,
    /// The pages that the recorded events tell of: parent and tokens by name.
    pub heard: HashMap<PageHash, (Option<PageHash>, Arc<[u32]>)>,
}

pub(crate) struct Live {
    pub tokens: Vec<u32>,
    pub pages: SequencePages,
    /// The expected rows: those of a cold run, except rows computed after an approximate hit, which are
    /// its own.
    pub rows: Vec<u64>,
}

pub(crate) fn digests(tokens: &[u32]) -> Vec<u64> {
    tokens
        .iter()
        .scan(7u64, |state, &t| {
            *state = (*state ^ u64::from(t)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
            Some(*state)
        })
        .collect()
}

/// Text number `text`: pages of few kinds, so that texts share prefixes and branch between pages
/// and inside them.
pub(crate) fn text(text: u64, len: usize) -> Vec<u32> {
    let kind = |page: usize| (text >> (2 * (page % 8))) & 3;
    (0..len)
        .map(|i| {
            let (page, offset) = (i / PAGE_TOKENS, i % PAGE_TOKENS);
            // Kind 3 differs from kind 0 in the second half only.
            match kind(page) {
                3 if offset < 32 => offset as u32,
                kind => offset as u32 + 100 * kind as u32,
            }
        })
        .collect()
}

/// Bytes of a state: more than a block.
const STATE_BYTES: usize = 100_000;

/// A small cache. `zero_width`: one of its heads stores no history. `window`: its second layer slides.
pub(crate) fn layout(
    format: KvFormat,
    windows: Windows,
    zero_width: bool,
    window: Option<usize>,
) -> CacheLayout {
    let mut layout = CacheLayout::new(format, 2, 2, 64, windows, CodeLayout::CpuTile).unwrap();
    if zero_width && format.is_coded() {
        let widths = [(2, 2), (0, 0), (2, 2), (2, 2)];
        let table = FormatTable::from_widths(2, 2, 64, &widths, CodeLayout::CpuTile).unwrap();
        layout = layout.with_coded_table(table);
    }
    match window {
        Some(window) => layout.with_sliding_layers(window, &[1]).unwrap(),
        None => layout,
    }
}

/// The same cache beside states.
pub(crate) fn with_states(layout: CacheLayout) -> CacheLayout {
    layout.with_states(STATE_BYTES)
}

impl World {
    pub fn new(format: KvFormat, windows: Windows, blocks: usize, approximates: bool) -> Self {
        Self::of(layout(format, windows, false, None), blocks, approximates)
    }

    pub fn of(layout: CacheLayout, blocks: usize, approximates: bool) -> Self {
        let pool = PagePool::new(&layout, blocks * layout.unquantized_block_bytes());
        let mut tree = match approximates {
            true => RadixCache::with_approximate_hits(layout.clone()),
            false => RadixCache::new(layout.clone()),
        };
        tree.record_events();
        Self {
            layout,
            pool,
            tree,
            memory: Memory::default(),
            live: Vec::new(),
            born: 0,
            approximate_hits: 0,
            heard: HashMap::new(),
        }
    }

    pub fn begin(&mut self, tokens: Vec<u32>) -> usize {
        let prefix = self.tree.find(&tokens[..tokens.len() - 1]);
        let exact = self.tree.find_exact(&tokens[..tokens.len() - 1]);
        assert!(exact.is_exact() && exact.len() <= prefix.len());
        let (len, from) = (prefix.len(), prefix.approximate_from.unwrap_or(usize::MAX));
        let pages = SequencePages::resume(&self.layout, prefix);
        assert_eq!(pages.is_exact(), from == usize::MAX);
        let mut rows = digests(&tokens);
        self.born += 1;
        for (j, row) in rows.iter_mut().enumerate().skip(from) {
            *row =
                if j < len { self.read(&pages, len, j) } else { *row ^ self.born.wrapping_mul(0x5851_f42d) };
        }
        self.approximate_hits += usize::from(!pages.is_exact());
        self.live.push(Live { tokens, pages, rows });
        if len > 0 {
            let live = &self.live[self.live.len() - 1];
            self.check_reads(live, len);
            assert_eq!(live.pages.states().is_some(), self.layout.has_states());
            self.check_state(&live.pages, &live.rows[..len]);
        }
        len
    }

    /// Stores up to `count` more tokens of a live sequence, if pages are available.
    pub fn grow(&mut self, which: usize, count: usize) -> bool {
        let mut live = self.live.swap_remove(which);
        let Live { tokens, pages, rows } = &mut live;
        let count = count.min(tokens.len() - pages.len());
        let step = loop {
            match pages.prepare(&self.layout, &self.pool, count) {
                Ok(step) => break Some(step),
                Err(full) => {
                    let wanted = full.wanted - full.free;
                    let possible = self.tree.reclaimable();
                    let got = self.tree.reclaim(wanted).bytes;
                    assert!(got >= wanted.min(possible) && got <= possible, "{got} of {possible}");
                    if got < wanted {
                        break None;
                    }
                }
            }
        };
        if let Some(step) = &step {
            for p in step.positions.clone() {
                let page = pages.full()[p / PAGE_TOKENS].unwrap().0;
                self.memory.full.entry(page).or_insert([0; PAGE_TOKENS])[p % PAGE_TOKENS] = rows[p];
                if self.layout.sliding().is_some() {
                    let page = pages.sliding()[p / PAGE_TOKENS].unwrap().0;
                    self.memory.sliding.entry(page).or_insert([0; PAGE_TOKENS])[p % PAGE_TOKENS] = rows[p];
                }
            }
            if let Some(states) = pages.states() {
                assert_eq!(states.from.is_some(), step.positions.start > 0);
                self.check_state(pages, &rows[..step.positions.start]);
                self.memory.states.insert(states.to.0, rows[step.positions.end - 1]);
            }
            for p in step.demote.clone() {
                let (block, at) = (p / PAGE_TOKENS, p % PAGE_TOKENS);
                let row = self.memory.full[&pages.full()[block].unwrap().0][at];
                let page = pages.coded()[block].unwrap().0;
                self.memory.coded.entry(page).or_insert([0; PAGE_TOKENS])[at] = row;
            }
            for t in step.positions.clone() {
                self.check_reads(&live, t);
            }
            live.pages.commit(&self.layout, step);
        }
        self.live.push(live);
        step.is_some()
    }

    /// The row that the query at `t` reads at `j`, by the rule of the kernels: quantized between
    /// sink and boundary, and before the end of the last block that has only a quantized page.
    fn read(&self, pages: &SequencePages, t: usize, j: usize) -> u64 {
        let only_code = |block: &usize| pages.full()[*block].is_none() && pages.coded()[*block].is_some();
        let coded_until = (0..pages.full().len()).rev().find(only_code).map_or(0, |b| (b + 1) * PAGE_TOKENS);
        let windows = self.layout.windows();
        // The tile that a first step quantizes before anyone reads it is still in full precision.
        let t = if t == pages.len() { t - 1 } else { t };
        let is_coded =
            self.layout.coded().is_some() && j >= windows.sink() && j < windows.boundary(t).max(coded_until);
        let (block, at) = (j / PAGE_TOKENS, j % PAGE_TOKENS);
        match is_coded {
            true => self.memory.coded[&pages.coded()[block].expect("codes are held").0][at],
            false => self.memory.full[&pages.full()[block].expect("rows are held").0][at],
        }
    }

    /// The query at `t` finds the right row at every position before it.
    fn check_reads(&self, live: &Live, t: usize) {
        for j in 0..t {
            assert_eq!(self.read(&live.pages, t, j), live.rows[j], "query {t} reads {j}");
        }
        let Some(group) = self.layout.sliding() else { return };
        for j in (t + 1).saturating_sub(group.window())..t {
            let page = live.pages.sliding()[j / PAGE_TOKENS].expect("rows of the window are held").0;
            assert_eq!(self.memory.sliding[&page][j % PAGE_TOKENS], live.rows[j], "{t} reads sliding {j}");
        }
    }

    /// A sequence with these rows begins its next step from their state.
    fn check_state(&self, pages: &SequencePages, rows: &[u64]) {
        if let (Some(state), Some(row)) = (pages.states().and_then(|states| states.from), rows.last()) {
            assert_eq!(self.memory.states[&state.0], *row, "the state after {} tokens", rows.len());
        }
    }

    /// Whoever follows the events knows the unsalted pages of the tree.
    pub fn check_events(&mut self) {
        for event in self.tree.take_events() {
            match event {
                CacheEvent::Stored { parent, hash, tokens } => {
                    assert!(parent.is_none_or(|parent| self.heard.contains_key(&parent)), "parents first");
                    assert_eq!(hash, PageHash::of(parent.as_ref(), &tokens));
                    assert!(self.heard.insert(hash, (parent, tokens)).is_none(), "stored once");
                }
                CacheEvent::Removed { hash } => {
                    assert!(self.heard.remove(&hash).is_some(), "only what was stored is removed");
                    assert!(self.heard.values().all(|(parent, _)| *parent != Some(hash)), "leaves first");
                }
                CacheEvent::Cleared => self.heard.clear(),
            }
        }
        let nodes = self.tree.nodes.iter().flatten();
        let held: HashMap<_, _> = nodes
            .filter_map(|node| Some((node.hash?, (self.tree.node(node.parent).hash, node.tokens.clone()))))
            .collect();
        assert_eq!(self.heard, held);
    }

    /// Every page in use is held by the tree or a sequence, and by nobody else.
    pub fn check_accounts(&self) {
        let (mut full, mut coded, mut sliding) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        let mut states = BTreeSet::new();
        for node in self.tree.nodes.iter().flatten() {
            full.extend(node.pages.full.iter().map(|p| p.id().0));
            coded.extend(node.pages.coded.iter().map(|p| p.id().0));
            sliding.extend(node.pages.sliding.iter().map(|p| p.id().0));
            states.extend(node.pages.state.iter().map(|slot| slot.id()));
        }
        for Live { pages, .. } in &self.live {
            full.extend(pages.full().iter().flatten().map(|p| p.0));
            full.extend((0..pages.full().len()).filter_map(|b| pages.block(b).full.map(|p| p.id().0)));
            coded.extend(pages.coded().iter().flatten().map(|p| p.0));
            sliding.extend((0..pages.full().len()).filter_map(|b| pages.block(b).sliding.map(|p| p.id().0)));
            states.extend(pages.state.ids());
        }
        let usage = self.pool.usage();
        assert_eq!((usage.full_pages, usage.coded_pages), (full.len(), coded.len()));
        assert_eq!((usage.sliding_pages, usage.states), (sliding.len(), states.len()));
        let (full, coded, sliding) = (full.len(), coded.len(), sliding.len());
        let counts = BlockCounts { full, coded, sliding, states: states.len() };
        assert_eq!(usage.bytes, self.layout.bytes_of(counts));
        assert!(usage.bytes <= usage.budget);
        let pages = self.tree.pages();
        assert!(pages.idle_full <= pages.full && pages.spare_full <= pages.idle_full);
    }
}
