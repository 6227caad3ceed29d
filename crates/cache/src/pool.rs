//! Blocks under one memory budget: full-precision and quantized ones, those of sliding layers, and the
//! states of sequences.

use crate::divided::Divided;
use oscar_codec::{BlockCounts, CacheLayout, CodedPageId, FullPageId, PAGE_TOKENS, SlidingPageId, StateId};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// The pool has no room; nothing was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the KV cache is full: {wanted} bytes more are needed and {free} of {budget} are free; use a smaller context or \
     batch, a narrower --kv format, or a larger --kv-memory"
)]
pub struct OutOfPages {
    pub wanted: usize,
    pub free: usize,
    pub budget: usize,
}

/// What is in use now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsage {
    pub full_pages: usize,
    pub coded_pages: usize,
    pub sliding_pages: usize,
    /// Recurrent states.
    pub states: usize,
    /// Pages of views, each of one layer and head.
    pub view_pages: usize,
    pub bytes: usize,
    pub budget: usize,
}

/// Ids of one format. The lowest free id is handed out first, so memory that was never needed is
/// never touched.
#[derive(Debug, Default)]
pub(crate) struct Ids {
    next: u32,
    free: BinaryHeap<Reverse<u32>>,
    pub used: usize,
}

impl Ids {
    pub(crate) fn take(&mut self) -> u32 {
        self.used += 1;
        match self.free.pop() {
            Some(Reverse(id)) => id,
            None => {
                self.next += 1;
                self.next - 1
            }
        }
    }

    pub(crate) fn give_back(&mut self, id: u32) {
        self.used -= 1;
        self.free.push(Reverse(id));
    }
}

/// The formats of blocks.
#[derive(Clone, Copy, Debug)]
enum Format {
    Full,
    Coded,
    Sliding,
    State,
}

/// The ids in use.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// Of each [`Format`].
    blocks: [Ids; 4],
    /// Of the pages of views, by layer and head; counted from the layout's first such id.
    pub heads: Vec<Ids>,
    /// Bytes of these pages.
    pub head_bytes: usize,
    /// The pages of views, if they come from quantized blocks.
    pub divided: Option<Divided>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    state: Mutex<State>,
    /// Bytes of a block of each [`Format`].
    block_bytes: [usize; 4],
    /// Bytes of a quantized page by layer and head.
    pub page_bytes: Vec<usize>,
    pub view_ids: Range<u32>,
    pub budget: usize,
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while holding the lock leaves counts consistent: each critical section is one
        // update.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(crate) fn bytes(&self, state: &State) -> usize {
        let blocks = state.blocks.iter().zip(self.block_bytes);
        blocks.map(|(ids, bytes)| ids.used * bytes).sum::<usize>() + state.head_bytes
    }

    /// The free bytes if so many are there.
    pub(crate) fn admit(&self, state: &State, wanted: usize) -> Result<(), OutOfPages> {
        let free = self.budget.saturating_sub(self.bytes(state));
        match wanted <= free {
            true => Ok(()),
            false => Err(OutOfPages { wanted, free, budget: self.budget }),
        }
    }

    /// Pages of each layer and head from quantized blocks, all or none.
    pub(crate) fn take_from_blocks(
        &self,
        state: &mut State,
        counts: &[usize],
    ) -> Result<Option<Vec<Vec<u32>>>, OutOfPages> {
        let Some(missing) = state.divided.as_ref().map(|divided| divided.missing(counts)) else {
            return Ok(None);
        };
        self.admit(state, missing * self.block_bytes[Format::Coded as usize])?;
        let State { blocks, divided: Some(divided), .. } = state else { return Ok(None) };
        (0..missing).for_each(|_| divided.add(blocks[Format::Coded as usize].take()));
        let pages = |(head, &count): (usize, &usize)| (0..count).map_while(|_| divided.take(head)).collect();
        Ok(Some(counts.iter().enumerate().map(pages).collect()))
    }

    /// Returns a page that came from a quantized block.
    pub(crate) fn give_back_to_block(state: &mut State, head: usize, id: u32) {
        if state.divided.as_mut().is_some_and(|divided| divided.give_back(head, id)) {
            state.blocks[Format::Coded as usize].give_back(id);
        }
    }

    /// So many blocks with the lowest free ids.
    fn take<Id>(
        self: &Arc<Self>,
        state: &mut State,
        (format, id_of): (Format, fn(u32) -> Id),
        count: usize,
    ) -> Vec<Hold<Id>> {
        let mut one = || {
            let (id, stored) = (state.blocks[format as usize].take(), StoredFlag::default());
            let block = Block { id, format, coded: AtomicUsize::new(0), stored, shared: self.clone() };
            Hold { id: id_of(id), block: Arc::new(block) }
        };
        (0..count).map(|_| one()).collect()
    }
}

/// Hands out blocks. Cheap to clone.
#[derive(Clone, Debug)]
pub struct PagePool {
    pub(crate) shared: Arc<Shared>,
}

/// The one owner of a block.
#[derive(Debug)]
struct Block {
    id: u32,
    format: Format,
    /// See [`CodedPage::coded`].
    coded: AtomicUsize,
    stored: StoredFlag,
    shared: Arc<Shared>,
}

/// Whether a page store has, or is about to have, a copy of a block. It holds no block: a write
/// that fails later can still clear it.
#[derive(Clone, Debug, Default)]
pub struct StoredFlag(Arc<AtomicBool>);

impl StoredFlag {
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub fn set(&self, stored: bool) {
        self.0.store(stored, Ordering::Relaxed);
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.shared.lock().blocks[self.format as usize].give_back(self.id);
    }
}

/// A hold on a block; the block returns to its pool when the last hold is dropped.
#[derive(Clone, Debug)]
pub struct Hold<Id> {
    id: Id,
    block: Arc<Block>,
}

impl<Id: Copy> Hold<Id> {
    pub fn id(&self) -> Id {
        self.id
    }

    /// Holds on this block.
    pub(crate) fn holds(&self) -> usize {
        Arc::strong_count(&self.block)
    }

    /// Whether anyone else holds this block.
    pub fn is_shared(&self) -> bool {
        self.holds() > 1
    }

    /// Whether a store has the complete block.
    pub fn stored(&self) -> &StoredFlag {
        &self.block.stored
    }
}

/// A hold on a full-precision block.
pub type FullPage = Hold<FullPageId>;

/// A hold on a block of the sliding layers.
pub type SlidingPage = Hold<SlidingPageId>;

/// A hold on the recurrent state of a sequence.
pub type StateSlot = Hold<StateId>;

/// A hold on a quantized block.
///
/// Holders may quantize further tiles of a shared block. All of them hold the same tokens after the
/// same context, so they write the same bytes.
pub type CodedPage = Hold<CodedPageId>;

/// Blocks that were taken together.
#[derive(Debug, Default)]
pub struct TakenPages {
    pub full: Vec<FullPage>,
    pub coded: Vec<CodedPage>,
    pub sliding: Vec<SlidingPage>,
    pub states: Vec<StateSlot>,
}

impl CodedPage {
    /// Progress of quantization: the number of positions from the block's start whose keys are
    /// quantized, plus the number whose values are. Positions of the sink, which are never
    /// quantized, count as done. Both numbers only grow, and in the same order along any sequence,
    /// so the sum describes the state completely.
    pub fn coded(&self) -> usize {
        self.block.coded.load(Ordering::Relaxed)
    }

    /// Whether keys and values of the whole block are quantized.
    pub fn is_complete(&self) -> bool {
        self.coded() >= 2 * PAGE_TOKENS
    }

    /// Records progress, see [`CodedPage::coded`].
    pub fn mark_coded(&self, progress: usize) {
        self.block.coded.fetch_max(progress, Ordering::Relaxed);
    }
}

impl PagePool {
    pub fn new(layout: &CacheLayout, budget: usize) -> Self {
        let codecs = layout.coded().map(|table| table.codecs()).unwrap_or_default();
        let heads = codecs.iter().map(|_| Ids::default()).collect();
        let divided = layout.views_in_blocks().then(|| Divided::new(codecs.len()));
        Self {
            shared: Arc::new(Shared {
                state: Mutex::new(State { heads, divided, ..State::default() }),
                block_bytes: [
                    layout.full_block_bytes(),
                    layout.coded_block_bytes(),
                    layout.sliding_block_bytes(),
                    layout.state_bytes(),
                ],
                page_bytes: codecs.iter().map(|codec| codec.page_bytes()).collect(),
                view_ids: layout.view_page_ids(budget),
                budget,
            }),
        }
    }

    /// Takes so many blocks, all or none.
    pub fn take(&self, counts: BlockCounts) -> Result<TakenPages, OutOfPages> {
        let BlockCounts { full, coded, sliding, states } = counts;
        let shared = &self.shared;
        let mut state = shared.lock();
        let counts = [full, coded, sliding, states];
        let wanted = counts.iter().zip(shared.block_bytes).map(|(n, bytes)| n * bytes).sum();
        shared.admit(&state, wanted)?;
        Ok(TakenPages {
            full: shared.take(&mut state, (Format::Full, FullPageId), full),
            coded: shared.take(&mut state, (Format::Coded, CodedPageId), coded),
            sliding: shared.take(&mut state, (Format::Sliding, SlidingPageId), sliding),
            states: shared.take(&mut state, (Format::State, StateId), states),
        })
    }

    /// Bytes not handed out.
    pub fn free(&self) -> usize {
        let state = self.shared.lock();
        self.shared.budget.saturating_sub(self.shared.bytes(&state))
    }

    pub fn usage(&self) -> PoolUsage {
        let state = self.shared.lock();
        PoolUsage {
            full_pages: state.blocks[Format::Full as usize].used,
            coded_pages: state.blocks[Format::Coded as usize].used,
            sliding_pages: state.blocks[Format::Sliding as usize].used,
            states: state.blocks[Format::State as usize].used,
            view_pages: match &state.divided {
                Some(divided) => divided.pages(),
                None => state.heads.iter().map(|ids| ids.used).sum(),
            },
            bytes: self.shared.bytes(&state),
            budget: self.shared.budget,
        }
    }
}
