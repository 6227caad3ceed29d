//! Places for pages in a row, the fastest first.

use crate::PageStore;
use crate::counters::{Counters, Tier, add};
use crate::directory::DirectoryStore;
use crate::fingerprint::Fingerprint;
use crate::object::{Loaded, PageName, PageRef, SealedPage};
use crate::ram::RamStore;
use oscar_cache::{PageHash, PageKind, StoredKinds};
use std::sync::Arc;

/// RAM, a directory, or both. A page is kept in every tier; one that is found in a slower tier is
/// copied to the faster ones.
pub struct Tiers {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) counters: Arc<Counters>,
    pub(crate) ram: Option<RamStore>,
    pub(crate) directory: Option<DirectoryStore>,
}

impl Tiers {
    pub fn new(
        fingerprint: Fingerprint,
        counters: Arc<Counters>,
        ram: Option<RamStore>,
        directory: Option<DirectoryStore>,
    ) -> Self {
        Self { fingerprint, counters, ram, directory }
    }

    fn each(&self) -> impl Iterator<Item = (Tier, &dyn PageStore)> {
        let ram = self.ram.iter().map(|store| (Tier::Ram, store as &dyn PageStore));
        ram.chain(self.directory.iter().map(|store| (Tier::Disk, store as &dyn PageStore)))
    }

    /// What the tiers have together of these pages, up to the first of which they have nothing. The
    /// rest counts as missed.
    pub fn look_up(&self, pages: &[PageHash]) -> Vec<StoredKinds> {
        let mut found: Vec<StoredKinds> = Vec::new();
        for (_, store) in self.each() {
            let kinds = store.exists_prefix(pages);
            found.resize(found.len().max(kinds.len()), StoredKinds::default());
            for (found, kinds) in found.iter_mut().zip(kinds) {
                PageKind::ALL.into_iter().filter(|kind| kinds.has(*kind)).for_each(|kind| found.insert(kind));
            }
        }
        add(&self.counters.misses, pages.len() - found.len());
        found
    }

    /// Reads a page from the fastest tier that has it.
    pub fn get(&self, page: PageRef<'_>) -> Option<(Tier, Loaded)> {
        for (tier, store) in self.each() {
            let Some(loaded) = store.get_many(&[page]).pop().flatten() else { continue };
            if let (Tier::Disk, Some(ram)) = (tier, &self.ram) {
                ram.put_many(&[SealedPage { name: page.name, bytes: loaded.bytes().clone() }]);
            }
            return Some((tier, loaded));
        }
        if self.directory.is_none() {
            add(&self.counters.vanished, 1);
        }
        None
    }

    /// Keeps a copy in every tier; whether the last tier, which lasts longest, has it.
    pub fn put(&self, page: SealedPage) -> bool {
        let pages = [page];
        self.each().map(|(_, store)| store.put_many(&pages) == [true]).last().unwrap_or(false)
    }

    /// Counts a page as used; whether the last tier has it.
    pub fn touch(&self, name: PageName) -> bool {
        self.each().map(|(_, store)| store.touch_many(&[name]) == [true]).last().unwrap_or(false)
    }
}
