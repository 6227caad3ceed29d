//! Places for pages in a row, the fastest first.

use crate::PageStore;
use crate::counters::{Counters, Tier, add};
use crate::directory::DirectoryStore;
use crate::fingerprint::Fingerprint;
use crate::object::{Loaded, PageName, PageRef, SealedPage};
use crate::ram::RamStore;
use oscar_cache::{PageHash, PageKind, StoredKinds};
use std::sync::Arc;

/// RAM, a directory, a server, or several of them. A page is kept in every tier; one that is found in a
/// slower tier is copied to RAM.
pub struct Tiers {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) counters: Arc<Counters>,
    pub(crate) ram: Option<RamStore>,
    pub(crate) directory: Option<DirectoryStore>,
    pub(crate) shared: Option<Box<dyn PageStore>>,
    /// Kinds of pages that there may be.
    kinds: &'static [PageKind],
}

impl Tiers {
    pub fn new(
        fingerprint: Fingerprint,
        counters: Arc<Counters>,
        ram: Option<RamStore>,
        directory: Option<DirectoryStore>,
    ) -> Self {
        Self { fingerprint, counters, ram, directory, shared: None, kinds: &PageKind::ALL }
    }

    /// The same with a server as the last tier.
    #[must_use]
    pub fn with_shared(self, shared: Option<Box<dyn PageStore>>) -> Self {
        Self { shared, ..self }
    }

    /// The same for a cache that has only these kinds of pages.
    #[must_use]
    pub fn with_kinds(self, kinds: &'static [PageKind]) -> Self {
        Self { kinds, ..self }
    }

    fn each(&self) -> impl Iterator<Item = (Tier, &dyn PageStore)> {
        let ram = self.ram.iter().map(|store| (Tier::Ram, store as &dyn PageStore));
        let directory = self.directory.iter().map(|store| (Tier::Disk, store as &dyn PageStore));
        let shared = self.shared.iter().map(|store| (Tier::Shared, &**store));
        ram.chain(directory).chain(shared)
    }

    /// The kinds of these pages that any tier has, up to the first page that none has. The rest counts
    /// as missed.
    pub fn look_up(&self, pages: &[PageHash]) -> Vec<StoredKinds> {
        let mut found: Vec<StoredKinds> = Vec::new();
        for (_, store) in self.each() {
            let kinds = store.exists_prefix(pages, self.kinds);
            found.resize(found.len().max(kinds.len()), StoredKinds::default());
            for (found, kinds) in found.iter_mut().zip(kinds) {
                PageKind::ALL.into_iter().filter(|kind| kinds.has(*kind)).for_each(|kind| found.insert(kind));
            }
        }
        add(&self.counters.misses, pages.len() - found.len());
        found
    }

    /// Reads each page from the fastest tier that has it. Pages that no tier gives count as vanished.
    pub fn get_many(&self, pages: &[PageRef<'_>]) -> Vec<Option<(Tier, Loaded)>> {
        let mut found: Vec<Option<(Tier, Loaded)>> = pages.iter().map(|_| None).collect();
        for (tier, store) in self.each() {
            let left: Vec<usize> = (0..pages.len()).filter(|&place| found[place].is_none()).collect();
            if left.is_empty() {
                break;
            }
            let asked: Vec<PageRef<'_>> = left.iter().map(|&place| pages[place]).collect();
            for (place, loaded) in left.into_iter().zip(store.get_many(&asked)) {
                let Some(loaded) = loaded else { continue };
                if let (Tier::Disk | Tier::Shared, Some(ram)) = (tier, &self.ram) {
                    ram.put_many(&[SealedPage { name: pages[place].name, bytes: loaded.bytes().clone() }]);
                }
                found[place] = Some((tier, loaded));
            }
        }
        add(&self.counters.vanished, found.iter().filter(|page| page.is_none()).count());
        found
    }

    /// Copies pages to every tier. Returns for each page whether a tier that outlives the process has
    /// it now; if RAM is the only tier, whether RAM has it.
    pub fn put_many(&self, pages: &[SealedPage]) -> Vec<bool> {
        let mut kept = vec![false; pages.len()];
        for there in self.lasting(|store| store.put_many(pages)) {
            kept.iter_mut().zip(there).for_each(|(kept, there)| *kept |= there);
        }
        kept
    }

    /// Marks pages as used. Returns for each page whether every tier that outlives the process still
    /// has it. The caller writes the others again.
    pub fn touch_many(&self, names: &[PageName]) -> Vec<bool> {
        let mut kept = vec![true; names.len()];
        for there in self.lasting(|store| store.touch_many(names)) {
            kept.iter_mut().zip(there).for_each(|(kept, there)| *kept &= there);
        }
        kept
    }

    /// Runs an operation on every tier. Returns the results of the tiers that outlive the process, or
    /// of RAM if it is the only tier.
    fn lasting(&self, run: impl Fn(&dyn PageStore) -> Vec<bool>) -> Vec<Vec<bool>> {
        let is_alone = self.directory.is_none() && self.shared.is_none();
        let done: Vec<(Tier, Vec<bool>)> = self.each().map(|(tier, store)| (tier, run(store))).collect();
        done.into_iter().filter(|(tier, _)| *tier != Tier::Ram || is_alone).map(|(_, done)| done).collect()
    }
}
