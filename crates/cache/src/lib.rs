//! Bookkeeping of the paged cache: which block of which format holds which positions of which
//! sequence.
//!
//! [`PagePool`] hands out full-precision and quantized blocks, and blocks of sliding layers, under one
//! byte budget; a block is an owned value that returns itself when dropped. [`SequencePages`] is one sequence's page table: it
//! grows block by block, says which positions are demoted in a step, and releases full blocks once
//! their tokens are quantized. Blocks of sliding layers go once they leave the window.
//! [`RadixCache`] keeps the pages of past sequences for later ones with
//! the same beginning. A [`View`] holds the rows of a history that eviction left.
//!
//! **Invariant:** no tensors, no bytes of pages, no clock: only ids and counts. A request that
//! cannot be met changes nothing.

mod divided;
mod events;
mod evict;
mod page_hash;
mod persist;
#[cfg(test)]
mod persist_tests;
mod pool;
mod prefix;
mod radix;
#[cfg(test)]
mod radix_tests;
#[cfg(test)]
mod radix_world;
mod rows;
mod salt;
mod sequence;
mod sliding;
mod state;
mod view;
#[cfg(test)]
mod view_tests;

pub use events::{CacheEvent, PageHash};
pub use evict::Reclaimed;
pub use persist::{BlockOffer, PageKind, RestorePlan, RestoredPage, StoredKinds, WantedPage};
pub use prefix::{PrefixPages, resume_point};
pub use radix::{CachedPages, RadixCache};
pub use salt::{CacheSalt, PrefixKey};

pub use pool::{
    CodedPage, FullPage, OutOfPages, PagePool, PoolUsage, SlidingPage, StateSlot, StoredFlag, TakenPages,
};
pub use rows::SequenceRows;
pub use sequence::{SequencePages, StepPages};
pub use state::StepStates;
pub use view::{View, view_end};
