//! What was learned of histories that have views: topics, and the rows of each view.

use oscar_cache::CacheSalt;
use oscar_views::ViewSet;
use std::collections::HashMap;
use std::sync::Arc;

/// Host memory that the scores of kept rows may take. The least recently used sets go first.
const MOST_BYTES: usize = 256 << 20;

/// Sets by the name of their base.
#[derive(Debug, Default)]
pub(crate) struct ViewSets {
    sets: HashMap<CacheSalt, (Arc<ViewSet>, u64)>,
    clock: u64,
    bytes: usize,
}

impl ViewSets {
    pub fn contains(&self, base: CacheSalt) -> bool {
        self.sets.contains_key(&base)
    }

    pub fn get(&mut self, base: CacheSalt) -> Option<Arc<ViewSet>> {
        self.clock += 1;
        let (set, used) = self.sets.get_mut(&base)?;
        *used = self.clock;
        Some(set.clone())
    }

    pub fn insert(&mut self, base: CacheSalt, set: Arc<ViewSet>) {
        self.clock += 1;
        self.bytes += set.bytes();
        if let Some((old, _)) = self.sets.insert(base, (set, self.clock)) {
            self.bytes -= old.bytes();
        }
        while self.bytes > MOST_BYTES && self.sets.len() > 1 {
            let oldest = self.sets.iter().min_by_key(|(_, (_, used))| *used).map(|(key, _)| *key);
            let Some((old, _)) = oldest.and_then(|key| self.sets.remove(&key)) else { break };
            self.bytes -= old.bytes();
        }
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }
}
