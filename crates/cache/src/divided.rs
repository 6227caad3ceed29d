//! Blocks whose pages views take one by one, by layer and head.
//!
//! On a device that maps memory up to the largest block in use, views would need as much memory
//! again for ids of their own. There their pages come from quantized blocks: a block is divided when
//! some head needs a page and has none left, and is whole again when all of its pages are back.

use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Default)]
pub(crate) struct Divided {
    /// Free pages by layer and head, as ids of their blocks.
    free: Vec<BTreeSet<u32>>,
    /// Pages in use of each divided block.
    used: BTreeMap<u32, usize>,
}

impl Divided {
    pub fn new(heads: usize) -> Self {
        Self { free: vec![BTreeSet::new(); heads], used: BTreeMap::new() }
    }

    /// Blocks that must be added before each head can take so many pages.
    pub fn missing(&self, counts: &[usize]) -> usize {
        let missing = self.free.iter().zip(counts).map(|(free, count)| count.saturating_sub(free.len()));
        missing.max().unwrap_or(0)
    }

    /// Divides a block.
    pub fn add(&mut self, block: u32) {
        self.used.insert(block, 0);
        self.free.iter_mut().for_each(|free| {
            free.insert(block);
        });
    }

    /// Takes the lowest free page of a head.
    pub fn take(&mut self, head: usize) -> Option<u32> {
        let id = self.free[head].pop_first()?;
        *self.used.entry(id).or_default() += 1;
        Some(id)
    }

    /// Returns a page. `true` if its block is whole again, and no longer divided.
    pub fn give_back(&mut self, head: usize, id: u32) -> bool {
        self.free[head].insert(id);
        let left = self.used.get_mut(&id).map_or(0, |used| {
            *used -= 1;
            *used
        });
        if left == 0 {
            self.used.remove(&id);
            self.free.iter_mut().for_each(|free| {
                free.remove(&id);
            });
        }
        left == 0
    }

    /// Pages in use.
    pub fn pages(&self) -> usize {
        self.used.values().sum()
    }
}
