//! The numbered batches, and what a reader gets who missed some.
//!
//! Batches are numbered from 0. The last ones are kept and sent again on request. Who has missed more
//! gets a snapshot instead: everything cleared, then all pages that are held, parents first. It is
//! packed into batches whose numbers end just below the next one, so that the reader goes on from
//! there as if it had read everything.

use crate::pack::{Encoding, pack};
use bytes::Bytes;
use oscar_engine::{CacheEvent, PageHash};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// Kept batches take at most this many bytes.
const KEPT_BYTES: usize = 64 << 20;

/// Pages in one batch of a snapshot, if there are numbers for more than one.
const SNAPSHOT_PAGES: usize = 1024;

/// A batch as it is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    pub number: u64,
    pub payload: Bytes,
}

/// See the [module](self).
#[derive(Debug)]
pub struct Journal {
    encoding: Encoding,
    most_kept: usize,
    next: u64,
    kept: VecDeque<Batch>,
    kept_bytes: usize,
    /// The pages that are held, as events, by age. A parent is older than its children.
    held: BTreeMap<u64, CacheEvent>,
    ages: HashMap<PageHash, u64>,
    age: u64,
}

impl Journal {
    pub fn new(encoding: Encoding, most_kept: usize) -> Self {
        Self {
            encoding,
            most_kept,
            next: 0,
            kept: VecDeque::new(),
            kept_bytes: 0,
            held: BTreeMap::new(),
            ages: HashMap::new(),
            age: 0,
        }
    }

    /// Numbers and packs the next batch; an empty one shows readers whether they missed any.
    pub fn append(&mut self, time: f64, events: &[CacheEvent]) -> Result<Batch, rmp_serde::encode::Error> {
        events.iter().for_each(|event| self.apply(event));
        let payload = Bytes::from(pack(self.encoding, time, events)?);
        let batch = Batch { number: self.next, payload };
        self.next += 1;
        self.kept_bytes += batch.payload.len();
        self.kept.push_back(batch.clone());
        while self.kept.len() > self.most_kept || self.kept_bytes > KEPT_BYTES {
            let Some(oldest) = self.kept.pop_front() else { break };
            self.kept_bytes -= oldest.payload.len();
        }
        Ok(batch)
    }

    fn apply(&mut self, event: &CacheEvent) {
        match event {
            CacheEvent::Stored { hash, .. } => {
                self.age += 1;
                if let Some(earlier) = self.ages.insert(*hash, self.age) {
                    self.held.remove(&earlier);
                }
                self.held.insert(self.age, event.clone());
            }
            CacheEvent::Removed { hash } => {
                if let Some(age) = self.ages.remove(hash) {
                    self.held.remove(&age);
                }
            }
            CacheEvent::Cleared => {
                self.held.clear();
                self.ages.clear();
            }
        }
    }

    /// What a reader needs who has everything before batch `start`; nothing if none is missing.
    pub fn replay(&self, start: u64, time: f64) -> Result<Vec<Batch>, rmp_serde::encode::Error> {
        if start >= self.next {
            return Ok(Vec::new());
        }
        let oldest = self.kept.front().map_or(self.next, |batch| batch.number);
        // A reader that begins needs no history.
        if start > 0 && start >= oldest {
            let skipped = (start - oldest) as usize;
            return Ok(self.kept.iter().skip(skipped).cloned().collect());
        }
        let events: Vec<&CacheEvent> =
            std::iter::once(&CacheEvent::Cleared).chain(self.held.values()).collect();
        let numbers = usize::try_from(self.next - start).unwrap_or(usize::MAX);
        let size = events.len().div_ceil(numbers).max(SNAPSHOT_PAGES);
        let parts = events.chunks(size);
        let first = self.next - parts.len() as u64;
        let part = |(number, part): (u64, &[&CacheEvent])| {
            let payload = pack(self.encoding, time, part.iter().copied())?;
            Ok(Batch { number, payload: payload.into() })
        };
        (first..).zip(parts).map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn chain(pages: u32) -> Vec<CacheEvent> {
        let mut parent = None;
        (0..pages)
            .map(|page| {
                let tokens: Arc<[u32]> = [page; 64].into();
                let hash = PageHash::of(parent.as_ref(), &tokens);
                CacheEvent::Stored { parent: parent.replace(hash), hash, tokens }
            })
            .collect()
    }

    fn hash(event: &CacheEvent) -> PageHash {
        match event {
            CacheEvent::Stored { hash, .. } => *hash,
            _ => panic!("{event:?}"),
        }
    }

    fn numbers(batches: &[Batch]) -> Vec<u64> {
        batches.iter().map(|batch| batch.number).collect()
    }

    #[test]
    fn kept_batches_are_sent_again_and_a_snapshot_stands_for_older_ones() {
        let mut journal = Journal::new(Encoding::Map, 3);
        let pages = chain(5);
        journal.append(0.0, &[CacheEvent::Cleared]).unwrap();
        let sent: Vec<Batch> =
            pages.iter().map(|page| journal.append(1.0, std::slice::from_ref(page)).unwrap()).collect();
        journal.append(2.0, &[CacheEvent::Removed { hash: hash(&pages[4]) }]).unwrap();
        assert_eq!(numbers(&journal.replay(7, 3.0).unwrap()), [] as [u64; 0]);
        assert_eq!(numbers(&journal.replay(5, 3.0).unwrap()), [5, 6]);
        assert_eq!(journal.replay(4, 3.0).unwrap()[0], sent[3], "the same bytes");
        for start in [0, 2] {
            let snapshot = journal.replay(start, 3.0).unwrap();
            let cleared = [CacheEvent::Cleared];
            let expected = pack(Encoding::Map, 3.0, cleared.iter().chain(&pages[..4])).unwrap();
            assert_eq!(snapshot, [Batch { number: 6, payload: expected.into() }], "from {start}");
        }
    }

    #[test]
    fn a_snapshot_never_needs_more_numbers_than_were_missed() {
        let mut journal = Journal::new(Encoding::Map, 1);
        let pages = chain(5000);
        journal.append(0.0, &[CacheEvent::Cleared]).unwrap();
        journal.append(0.0, &pages).unwrap();
        journal.append(0.0, &[]).unwrap();
        assert_eq!(numbers(&journal.replay(0, 1.0).unwrap()), [0, 1, 2]);
        assert_eq!(numbers(&journal.replay(1, 1.0).unwrap()), [1, 2]);
        (0..10).for_each(|_| drop(journal.append(0.0, &[]).unwrap()));
        assert_eq!(numbers(&journal.replay(0, 1.0).unwrap()), [8, 9, 10, 11, 12]);
        journal.append(0.0, &[CacheEvent::Cleared]).unwrap();
        assert_eq!(numbers(&journal.replay(0, 1.0).unwrap()), [13]);
        assert!(journal.held.is_empty() && journal.ages.is_empty());
    }

    #[test]
    fn kept_batches_are_bounded_in_bytes_too() {
        let mut journal = Journal::new(Encoding::Map, usize::MAX);
        let pages = chain(100_000);
        for _ in 0..5 {
            journal.append(0.0, &pages).unwrap();
            assert!(journal.kept_bytes <= KEPT_BYTES);
        }
        assert!(!journal.kept.is_empty() && journal.kept.len() < 5);
        assert_eq!(journal.held.len(), pages.len(), "a page that is stored twice is held once");
    }
}
