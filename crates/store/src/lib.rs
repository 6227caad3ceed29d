//! Copies of cache pages that outlive their eviction, and with a directory also the process.
//!
//! A page is stored under the hash of its tokens and of everything before them
//! ([`oscar_cache::PageHash`]), below the [`Fingerprint`] of everything that its bytes depend on.
//! [`PageStore`] is one place for pages: [`RamStore`], [`DirectoryStore`], [`RedisStore`] (Valkey or
//! Redis) or `S3Store` (with the feature `s3`). [`Tiers`] puts them in a row. [`Store`] adds the threads, so that whoever runs the model
//! never waits for a disk. [`TransferDesk`] and [`RemotePages`] carry the pages of one prompt to another machine.
//!
//! **Invariants:** a page that is returned has the fingerprint, the hash and the tokens that were
//! asked for, and its checksum is right; anything else is a counted miss. Any number of processes
//! may use a directory at once: a file appears whole or not at all, and a file that vanishes is a
//! miss. Nothing here knows a model, a device or a request.

mod counters;
mod deadline;
mod directory;
mod fingerprint;
mod folder;
mod object;
mod ram;
mod redis;
mod resp;
#[cfg(feature = "s3")]
mod s3;
mod service;
mod shared;
mod tiers;
mod transfer;

pub use counters::{Counters, StoreStats, Tier};
pub use directory::{DirectoryStore, Files, PlainFiles};
pub use fingerprint::{Fingerprint, FingerprintParts};
pub use folder::{Entry, Listing, Pruned, StoreLimits, list, prune};
pub use object::{Defect, Loaded, Page, PageName, PageRef, SealedPage, verify_file};
pub use ram::RamStore;
pub use redis::{NoAddress, RedisAddress, RedisStore};
#[cfg(feature = "s3")]
pub use s3::{NoBucket, S3Address, S3Store};
pub use service::{FetchedPage, Reply, Store, StoreOptions, StoreReader};
pub use shared::{Shared, SharedAddress};
pub use tiers::Tiers;
pub use transfer::{
    Ask, DeskOptions, PeerRule, PeerRules, PeerTicket, Peers, Question, RemotePages, Ticket, TicketId,
    TransferCounters, TransferDesk, TransferStats, Verdict, serve_desk,
};

pub use oscar_cache::PageKind;
use oscar_cache::{PageHash, StoredKinds};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A place for pages. Every method may be called from several threads.
pub trait PageStore: Send + Sync {
    /// Which of these kinds are stored of these pages, which follow each other from the start of a
    /// sequence. The list ends before the first page with none.
    fn exists_prefix(&self, pages: &[PageHash], kinds: &[PageKind]) -> Vec<StoredKinds>;
    /// Reads and verifies pages: one result each, `None` for a miss.
    fn get_many(&self, pages: &[PageRef<'_>]) -> Vec<Option<Loaded>>;
    /// Stores copies of pages. Returns for each whether it is stored now.
    fn put_many(&self, pages: &[SealedPage]) -> Vec<bool>;
    /// Marks these pages as used now. Returns for each whether it is stored.
    fn touch_many(&self, pages: &[PageName]) -> Vec<bool>;
}

/// The stored kinds of one page. `there[i]` says whether kind `kinds[i]` is stored.
pub(crate) fn kinds_of(kinds: &[PageKind], there: &[bool]) -> StoredKinds {
    let mut stored = StoredKinds::default();
    let held = kinds.iter().zip(there).filter(|(_, there)| **there);
    held.for_each(|(kind, _)| stored.insert(*kind));
    stored
}

/// The stored kinds of each page, up to the first page with none.
pub(crate) fn stored_prefix(
    pages: &[PageHash],
    kinds: &[PageKind],
    has: impl Fn(&PageName) -> bool,
) -> Vec<StoredKinds> {
    let stored = |(block, &hash): (usize, &PageHash)| {
        let has = |&kind| has(&PageName { hash, block: block as u32, kind });
        kinds_of(kinds, &kinds.iter().map(has).collect::<Vec<_>>())
    };
    pages.iter().enumerate().map(stored).take_while(|stored| !stored.is_empty()).collect()
}

/// Locks data that is valid after every statement: a panic of another thread does no harm.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
