//! What a store counts.

use crate::object::Defect;
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};

/// Where a page was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    Ram,
    Disk,
    /// A server that machines share: Valkey, Redis or S3.
    Shared,
    /// Another machine, by a ticket.
    Peer,
}

/// Numbers of a store. Counters only grow; those marked so are of this moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StoreStats {
    /// Pages read, by tier.
    pub ram_hits: u64,
    pub disk_hits: u64,
    pub shared_hits: u64,
    /// Pages that were looked for and not there.
    pub misses: u64,
    /// Prompts whose last stored page has no recurrent state, in models that need one.
    pub missing_states: u64,
    /// Pages that were there at the look-up and gone when they were to be read.
    pub vanished: u64,
    pub ram_read_bytes: u64,
    pub disk_read_bytes: u64,
    pub shared_read_bytes: u64,
    pub written_pages: u64,
    pub written_bytes: u64,
    /// The same in the shared server.
    pub shared_written_pages: u64,
    pub shared_written_bytes: u64,
    /// Pages that the server did not take because it was full.
    pub shared_full: u64,
    /// Exchanges with the server that failed or were late; it is left alone for a while then.
    pub shared_errors: u64,
    /// Pages that were not written because the queue was full.
    pub dropped_writes: u64,
    /// Pages that were not written because the disk was full.
    pub disk_full: u64,
    /// Pages that were not written or read for another reason.
    pub io_errors: u64,
    /// Pages that were damaged: cut off, a wrong checksum, other tokens.
    pub corrupt: u64,
    /// Pages of another model, cache or device under our name.
    pub wrong_fingerprint: u64,
    /// Requests that went on without pages because the store did not answer in time.
    pub timeouts: u64,
    /// Pages removed by age or size.
    pub pruned_pages: u64,
    /// Now: pages and bytes in RAM, bytes in the directory, bytes waiting to be written.
    pub ram_pages: u64,
    pub ram_bytes: u64,
    pub disk_bytes: u64,
    pub queued_bytes: u64,
}

macro_rules! counters {
    ($($name:ident),*) => {
        /// [`StoreStats`] as they are counted.
        #[derive(Debug, Default)]
        pub struct Counters {
            $(pub(crate) $name: AtomicU64,)*
        }

        impl Counters {
            pub fn snapshot(&self) -> StoreStats {
                StoreStats { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters!(
    ram_hits,
    disk_hits,
    shared_hits,
    misses,
    missing_states,
    vanished,
    ram_read_bytes,
    disk_read_bytes,
    shared_read_bytes,
    shared_written_pages,
    shared_written_bytes,
    shared_full,
    shared_errors,
    written_pages,
    written_bytes,
    dropped_writes,
    disk_full,
    io_errors,
    corrupt,
    wrong_fingerprint,
    timeouts,
    pruned_pages,
    ram_pages,
    ram_bytes,
    disk_bytes,
    queued_bytes
);

impl Counters {
    /// Counts a page that is not the one that was asked for.
    pub(crate) fn note(&self, defect: Defect) {
        match defect {
            Defect::Corrupt(_) => add(&self.corrupt, 1),
            Defect::WrongFingerprint => add(&self.wrong_fingerprint, 1),
        }
    }
}

pub(crate) fn add(counter: &AtomicU64, value: usize) {
    counter.fetch_add(value as u64, Ordering::Relaxed);
}

pub(crate) fn subtract(gauge: &AtomicU64, value: usize) {
    gauge.fetch_sub(value as u64, Ordering::Relaxed);
}

pub(crate) fn set(gauge: &AtomicU64, value: u64) {
    gauge.store(value, Ordering::Relaxed);
}
