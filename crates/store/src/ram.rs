//! Pages in host memory, least recently used out first.

use crate::counters::{Counters, add, set};
use crate::fingerprint::Fingerprint;
use crate::object::{Loaded, PageName, PageRef, SealedPage};
use crate::{PageStore, stored_prefix};
use oscar_cache::{PageHash, PageKind, StoredKinds};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Seconds within which uses count as simultaneous: then later blocks go before earlier ones, which
/// they cannot do without.
const SAME_USE: u64 = 5;

/// See the [module](self).
pub struct RamStore {
    fingerprint: Fingerprint,
    counters: Arc<Counters>,
    most_bytes: usize,
    began: Instant,
    state: Mutex<State>,
}

/// The order in which pages go: time of last use, block, number of the use.
type Use = (u64, Reverse<u32>, u64);

#[derive(Default)]
struct State {
    pages: HashMap<PageName, (Arc<Vec<u8>>, Use)>,
    /// Names by their last use.
    order: BTreeMap<Use, PageName>,
    uses: u64,
    bytes: usize,
}

impl State {
    fn next_use(&mut self, name: &PageName, now: u64) -> Use {
        self.uses += 1;
        (now, Reverse(name.block), self.uses)
    }

    fn touch(&mut self, name: &PageName, now: u64) -> Option<Arc<Vec<u8>>> {
        let next = self.next_use(name, now);
        let (bytes, last) = self.pages.get_mut(name)?;
        self.order.remove(last);
        self.order.insert(next, *name);
        *last = next;
        Some(bytes.clone())
    }

    fn remove(&mut self, name: &PageName) {
        if let Some((bytes, last)) = self.pages.remove(name) {
            self.order.remove(&last);
            self.bytes -= bytes.len();
        }
    }

    fn insert(&mut self, name: PageName, bytes: Arc<Vec<u8>>, now: u64) {
        self.remove(&name);
        let next = self.next_use(&name, now);
        self.bytes += bytes.len();
        self.order.insert(next, name);
        self.pages.insert(name, (bytes, next));
    }
}

impl RamStore {
    pub fn new(fingerprint: Fingerprint, most_bytes: usize, counters: Arc<Counters>) -> Self {
        Self { fingerprint, counters, most_bytes, began: Instant::now(), state: Mutex::default() }
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_secs() / SAME_USE
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while holding the lock leaves the maps consistent enough: a lost page is a miss.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, state: &State) {
        set(&self.counters.ram_pages, state.pages.len() as u64);
        set(&self.counters.ram_bytes, state.bytes as u64);
    }

    fn get(&self, page: &PageRef<'_>) -> Option<Loaded> {
        let bytes = self.lock().touch(&page.name, self.now())?;
        let length = bytes.len();
        match Loaded::verify(bytes, &self.fingerprint, page) {
            Ok(loaded) => {
                add(&self.counters.ram_hits, 1);
                add(&self.counters.ram_read_bytes, length);
                Some(loaded)
            }
            Err(defect) => {
                self.counters.note(defect);
                let mut state = self.lock();
                state.remove(&page.name);
                self.count(&state);
                None
            }
        }
    }
}

impl PageStore for RamStore {
    fn exists_prefix(&self, pages: &[PageHash], kinds: &[PageKind]) -> Vec<StoredKinds> {
        let state = self.lock();
        stored_prefix(pages, kinds, |name| state.pages.contains_key(name))
    }

    fn get_many(&self, pages: &[PageRef<'_>]) -> Vec<Option<Loaded>> {
        pages.iter().map(|page| self.get(page)).collect()
    }

    fn put_many(&self, pages: &[SealedPage]) -> Vec<bool> {
        let mut state = self.lock();
        let mut put = |page: &SealedPage| {
            if page.bytes.len() > self.most_bytes {
                return false;
            }
            state.insert(page.name, page.bytes.clone(), self.now());
            while state.bytes > self.most_bytes
                && let Some((_, oldest)) = state.order.first_key_value()
            {
                let oldest = *oldest;
                state.remove(&oldest);
            }
            state.pages.contains_key(&page.name)
        };
        let put = pages.iter().map(&mut put).collect();
        self.count(&state);
        put
    }

    fn touch_many(&self, pages: &[PageName]) -> Vec<bool> {
        let mut state = self.lock();
        pages.iter().map(|name| state.touch(name, self.now()).is_some()).collect()
    }
}
