//! The tables of views on the device: how many rows each layer and head keeps, and their pages.
//!
//! A view never changes, so its table is sent once and stays until the room is needed. All tables lie
//! in one buffer; when it is full, it begins anew with the views of the step.

use super::layout::ViewHead;
use crate::device::Device;
use crate::error::Result;
use crate::memory::{Buffer, DevicePtr};
use crate::transfers::Transfers;
use oscar_backend::{SequenceRows, View};
use std::collections::HashMap;

/// Words of a [`ViewHead`].
const HEAD_WORDS: usize = size_of::<ViewHead>() / 4;
const LEAST_BYTES: usize = 1 << 20;

/// Where the table of a view lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ViewPlace {
    /// Index of its first [`ViewHead`].
    pub head: u32,
    pub end: u32,
    /// Largest page id + 1.
    pub pages: usize,
}

/// See the [module](self).
#[derive(Default)]
pub struct ViewTables {
    buffer: Option<Buffer>,
    /// Words in use.
    used: usize,
    /// By [`View::id`].
    places: HashMap<u64, ViewPlace>,
}

impl ViewTables {
    /// Enqueues the copies of tables that the device lacks. Returns the place of each sequence's view.
    pub fn send(
        &mut self,
        device: &Device,
        transfers: &mut Transfers,
        sequences: &[SequenceRows<'_>],
    ) -> Result<Vec<Option<ViewPlace>>> {
        let views = || sequences.iter().filter_map(|s| s.view);
        let missing: usize = views().filter(|v| !self.places.contains_key(&v.id())).map(words_of).sum();
        if 4 * (self.used + missing) > self.buffer.as_ref().map_or(0, Buffer::bytes) {
            let bytes = 4 * views().map(words_of).sum::<usize>();
            (self.used, self.places) = (0, HashMap::new());
            if self.buffer.as_ref().is_none_or(|buffer| buffer.bytes() < bytes) {
                self.buffer = None;
                let bytes = (2 * bytes).next_power_of_two().max(LEAST_BYTES);
                self.buffer = Some(device.alloc(bytes, "the tables of views")?);
            }
        }
        for view in views() {
            if let (Some(buffer), false) = (&self.buffer, self.places.contains_key(&view.id())) {
                let (words, place) = table(view, self.used);
                transfers.enqueue(&words, buffer.slice().part(self.used..self.used + words.len())?)?;
                self.used += words.len();
                self.places.insert(view.id(), place);
            }
        }
        Ok(sequences.iter().map(|s| s.view.and_then(|view| self.places.get(&view.id()).copied())).collect())
    }

    /// Where the tables begin.
    pub fn start(&self) -> Option<DevicePtr<u32>> {
        self.buffer.as_ref().map(Buffer::ptr)
    }
}

/// Words of a view's table; even, so that a [`ViewHead`] is aligned.
fn words_of(view: &View) -> usize {
    let pages = |head| view.pages(head).len();
    (view.heads() * HEAD_WORDS + (0..view.heads()).map(pages).sum::<usize>()).next_multiple_of(HEAD_WORDS)
}

/// The table of a view that begins at a word of the buffer: its heads, then its page ids.
fn table(view: &View, start: usize) -> (Vec<u32>, ViewPlace) {
    let (mut words, mut ids) = (Vec::with_capacity(words_of(view)), Vec::new());
    let first = start + view.heads() * HEAD_WORDS;
    for head in 0..view.heads() {
        words.extend([view.kept(head).len() as u32, (first + ids.len()) as u32]);
        ids.extend_from_slice(view.pages(head));
    }
    let pages = ids.iter().max().map_or(0, |&id| id as usize + 1);
    words.append(&mut ids);
    words.resize(words.len().next_multiple_of(HEAD_WORDS), 0);
    (words, ViewPlace { head: (start / HEAD_WORDS) as u32, end: view.end() as u32, pages })
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_cache::PagePool;
    use oscar_codec::{CacheLayout, CodeLayout, KvFormat, Windows};

    #[test]
    fn a_table_names_rows_and_pages_of_every_head() {
        let windows = Windows::default();
        let layout = CacheLayout::new(KvFormat::OSCAR2, 2, 2, 64, windows, CodeLayout::GpuTile).unwrap();
        let pool = PagePool::new(&layout.with_views_in_blocks(), 1 << 30);
        let layout = CacheLayout::new(KvFormat::OSCAR2, 2, 2, 64, windows, CodeLayout::GpuTile).unwrap();
        let kept = vec![(64..65).collect(), vec![], (64..193).collect(), (100..164).collect()];
        let view = View::new(&layout, &pool, 256, kept).unwrap();
        let (words, place) = table(&view, 10);
        assert_eq!(words.len(), words_of(&view));
        assert_eq!(words, [1, 18, 0, 19, 129, 19, 64, 22, 0, 0, 1, 2, 0, 0]);
        assert_eq!(place, ViewPlace { head: 5, end: 256, pages: 3 });
    }
}
