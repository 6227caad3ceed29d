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

/// Counters, and their values at one moment.
macro_rules! numbers {
    ($counters:ident, $(#[$about:meta])* $stats:ident: $($(#[$help:meta])* $name:ident),* $(,)?) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
        pub struct $stats {
            $($(#[$help])* pub $name: u64,)*
        }

        #[doc = concat!("[`", stringify!($stats), "`] as they are counted.")]
        #[derive(Debug, Default)]
        pub struct $counters {
            $(pub(crate) $name: std::sync::atomic::AtomicU64,)*
        }

        impl $counters {
            pub fn snapshot(&self) -> $stats {
                $stats { $($name: self.$name.load(std::sync::atomic::Ordering::Relaxed),)* }
            }
        }
    };
}
pub(crate) use numbers;

numbers!(
    Counters,
    /// Numbers of a store. Counters only grow; those marked so are of this moment.
    StoreStats:
    /// Pages read, by tier.
    ram_hits,
    disk_hits,
    shared_hits,
    /// Pages that were looked for and not there.
    misses,
    /// Prompts whose last stored page has no recurrent state, in models that need one.
    missing_states,
    /// Pages that were there at the look-up and gone when they were to be read.
    vanished,
    ram_read_bytes,
    disk_read_bytes,
    shared_read_bytes,
    written_pages,
    written_bytes,
    /// The same in the shared server.
    shared_written_pages,
    shared_written_bytes,
    /// Pages that the server did not take because it was full.
    shared_full,
    /// Exchanges with the server that failed or were late; it is left alone for a while then.
    shared_errors,
    /// Pages that were not written because the queue was full.
    dropped_writes,
    /// Pages that were not written because the disk was full.
    disk_full,
    /// Pages that were not written or read for another reason.
    io_errors,
    /// Pages that were damaged: cut off, a wrong checksum, other tokens.
    corrupt,
    /// Pages of another model, cache or device under our name.
    wrong_fingerprint,
    /// Requests that went on without pages because the store did not answer in time.
    timeouts,
    /// Pages removed by age or size.
    pruned_pages,
    /// Now: pages and bytes in RAM, bytes in the directory, bytes waiting to be written.
    ram_pages,
    ram_bytes,
    disk_bytes,
    queued_bytes,
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
