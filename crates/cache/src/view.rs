//! Views: which rows of a history a sequence still reads, and the pages that hold them.
//!
//! A [`View`] replaces the quantized blocks of the positions `sink..end` by pages of its own, for
//! each layer and head as many as its surviving rows fill (see `oscar_codec::view`). It is
//! immutable and shared by reference: a branch of a conversation, a preempted sequence and the
//! prefix tree all hold the same one.
//!
//! **Invariants:** the pages of a view count towards the pool's budget and return to it with the
//! last holder. A view is read only by sequences that were begun with it.

use crate::pool::{OutOfPages, PagePool, Shared};
use oscar_codec::{CacheLayout, PAGE_TOKENS, Survivors};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Pages of single heads; they return to the pool when this is dropped.
#[derive(Debug)]
struct HeadPages {
    /// By layer and head.
    ids: Vec<Vec<u32>>,
    bytes: usize,
    shared: Arc<Shared>,
}

impl Drop for HeadPages {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        let own = state.divided.is_none();
        state.head_bytes -= if own { self.bytes } else { 0 };
        for (head, ids) in self.ids.iter().enumerate() {
            ids.iter().for_each(|&id| match own {
                true => state.heads[head].give_back(id - self.shared.view_ids.start),
                false => Shared::give_back_to_block(&mut state, head, id),
            });
        }
    }
}

impl PagePool {
    /// Takes `counts[i]` quantized pages of layer and head `i`, all or none.
    fn take_head_pages(&self, counts: &[usize]) -> Result<HeadPages, OutOfPages> {
        let shared = &self.shared;
        let mut state = shared.lock();
        let bytes = counts.iter().zip(&shared.page_bytes).map(|(count, bytes)| count * bytes).sum();
        if let Some(ids) = shared.take_from_blocks(&mut state, counts)? {
            return Ok(HeadPages { ids, bytes, shared: shared.clone() });
        }
        shared.admit(&state, bytes)?;
        let ids = shared.view_ids.len();
        if state.heads.iter().zip(counts).any(|(head, count)| head.used + count > ids) {
            return Err(OutOfPages { wanted: bytes, free: 0, budget: shared.budget });
        }
        state.head_bytes += bytes;
        let first = shared.view_ids.start;
        let ids = counts
            .iter()
            .enumerate()
            .map(|(head, &count)| (0..count).map(|_| first + state.heads[head].take()).collect())
            .collect();
        Ok(HeadPages { ids, bytes, shared: shared.clone() })
    }
}

/// See the [module](self).
#[derive(Debug)]
pub struct View {
    id: u64,
    end: usize,
    /// Positions kept, ascending, by layer and head.
    kept: Vec<Vec<u32>>,
    pages: HeadPages,
}

impl View {
    /// Takes the pages for these positions of each layer and head, ascending and within `sink..end`.
    /// The pages hold nothing yet: a backend copies the rows.
    ///
    /// # Errors
    /// If there is no room for the pages.
    ///
    /// # Panics
    /// If the positions are not as stated.
    pub fn new(
        layout: &CacheLayout,
        pool: &PagePool,
        end: usize,
        kept: Vec<Vec<u32>>,
    ) -> Result<Self, OutOfPages> {
        let sink = layout.windows().sink();
        assert!(end.is_multiple_of(PAGE_TOKENS) && sink.is_multiple_of(PAGE_TOKENS) && end >= sink);
        assert_eq!(kept.len(), layout.layers() * layout.kv_heads(), "a list for each layer and head");
        for positions in &kept {
            let within = positions.iter().all(|&p| (sink..end).contains(&(p as usize)));
            assert!(within && positions.is_sorted_by(|a, b| a < b), "positions of a view");
        }
        let counts: Vec<usize> = kept.iter().map(|rows| rows.len().div_ceil(PAGE_TOKENS)).collect();
        let pages = pool.take_head_pages(&counts)?;
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Ok(Self { id: NEXT.fetch_add(1, Ordering::Relaxed), end, kept, pages })
    }

    /// A number that no other view of this process has.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The view stands for the positions between the sink and this one.
    pub fn end(&self) -> usize {
        self.end
    }

    /// Positions kept by layer and head.
    pub fn kept(&self, head: usize) -> &[u32] {
        &self.kept[head]
    }

    /// Page ids by layer and head, in the order of the rows.
    pub fn pages(&self, head: usize) -> &[u32] {
        &self.pages.ids[head]
    }

    /// The rows of a layer and head, as attention counts them.
    pub fn survivors(&self, head: usize) -> Survivors {
        Survivors { end: self.end, rows: self.kept[head].len() }
    }

    /// Rows of all layers and heads.
    pub fn rows(&self) -> usize {
        self.kept.iter().map(Vec::len).sum()
    }

    /// Layers times heads.
    pub fn heads(&self) -> usize {
        self.kept.len()
    }

    /// Bytes of its pages.
    pub fn bytes(&self) -> usize {
        self.pages.bytes
    }

    /// Whether the view stands for `block`, so that the sequence needs no quantized page of it.
    pub(crate) fn covers(&self, layout: &CacheLayout, block: usize) -> bool {
        block * PAGE_TOKENS >= layout.windows().sink() && (block + 1) * PAGE_TOKENS <= self.end
    }
}

/// End of the history that a view of a sequence of `len` tokens may stand for: whole pages that the
/// next query reads quantized.
pub fn view_end(layout: &CacheLayout, len: usize) -> usize {
    let windows = layout.windows();
    match len {
        0 => windows.sink(),
        len => (windows.boundary(len - 1) / PAGE_TOKENS * PAGE_TOKENS).max(windows.sink()),
    }
}
