//! Places for pages in a row, the fastest first.

use crate::PageStore;
use crate::counters::{Counters, Tier, add};
use crate::directory::DirectoryStore;
use crate::fingerprint::Fingerprint;
use crate::object::{Loaded, PageName, PageRef, SealedPage};
use crate::ram::RamStore;
use crate::shared::SharedStore;
use oscar_cache::{PageHash, PageKind, StoredKinds};
use std::sync::Arc;

/// RAM, a directory, a server, or several of them. A page is kept in every tier; one that is found in a
/// slower tier is copied to RAM.
pub struct Tiers {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) counters: Arc<Counters>,
    pub(crate) ram: Option<RamStore>,
    pub(crate) directory: Option<DirectoryStore>,
    pub(crate) shared: Option<SharedStore>,
}

impl Tiers {
    pub fn new(
        fingerprint: Fingerprint,
        counters: Arc<Counters>,
        ram: Option<RamStore>,
        directory: Option<DirectoryStore>,
    ) -> Self {
        Self { fingerprint, counters, ram, directory, shared: None }
    }

    /// The same with a Valkey or Redis server as the last tier.
    #[must_use]
    pub fn with_shared(self, shared: Option<SharedStore>) -> Self {
        Self { shared, ..self }
    }

    fn each(&self) -> impl Iterator<Item = (Tier, &dyn PageStore)> {
        let ram = self.ram.iter().map(|store| (Tier::Ram, store as &dyn PageStore));
        let directory = self.directory.iter().map(|store| (Tier::Disk, store as &dyn PageStore));
        let shared = self.shared.iter().map(|store| (Tier::Shared, store as &dyn PageStore));
        ram.chain(directory).chain(shared)
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
            if let (Tier::Disk | Tier::Shared, Some(ram)) = (tier, &self.ram) {
                ram.put_many(&[SealedPage { name: page.name, bytes: loaded.bytes().clone() }]);
            }
            return Some((tier, loaded));
        }
        if self.directory.is_none() && self.shared.is_none() {
            add(&self.counters.vanished, 1);
        }
        None
    }

    /// Keeps a copy in every tier; whether a tier that outlives the process has it, or RAM if that is
    /// all there is.
    pub fn put(&self, page: SealedPage) -> bool {
        let pages = [page];
        self.lasting(|store| store.put_many(&pages) == [true]).contains(&true)
    }

    /// Counts a page as used; whether every tier that outlives the process still has it. A page that
    /// one of them lost is written again.
    pub fn touch(&self, name: PageName) -> bool {
        self.lasting(|store| store.touch_many(&[name]) == [true]).into_iter().all(|has| has)
    }

    /// Does something in every tier. The results are those of the tiers that outlive the process, or of
    /// RAM if that is all there is.
    fn lasting(&self, run: impl Fn(&dyn PageStore) -> bool) -> Vec<bool> {
        let is_alone = self.directory.is_none() && self.shared.is_none();
        let done: Vec<(Tier, bool)> = self.each().map(|(tier, store)| (tier, run(store))).collect();
        done.into_iter().filter(|(tier, _)| *tier != Tier::Ram || is_alone).map(|(_, done)| done).collect()
    }
}
