//! Pages in a directory that any number of processes share.
//!
//! There is no index and no lock. A page is written to a temporary file and renamed; a reader opens
//! the name and verifies everything; a file that vanishes is a miss.

use crate::PageStore;
use crate::counters::{Counters, add, set, subtract};
use crate::fingerprint::Fingerprint;
use crate::folder::{ABOUT, StoreLimits, TEMPORARY, prune};
use crate::object::{Defect, Loaded, PageName, PageRef, SealedPage};
use oscar_cache::{PageHash, PageKind, StoredKinds};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// A page that was used within this time is not marked as used again.
const USE_EVERY: Duration = Duration::from_secs(5);

/// How files are written. Tests put a disk that is full behind it.
pub trait Files: Send + Sync {
    /// Writes a new file.
    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()>;
}

/// The file system. Files are readable by their owner alone: pages tell what was in prompts.
pub struct PlainFiles;

impl Files for PlainFiles {
    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut options = File::options();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        options.open(path)?.write_all(bytes)
    }
}

/// See the [module](self).
pub struct DirectoryStore {
    root: PathBuf,
    folder: PathBuf,
    fingerprint: Fingerprint,
    limits: StoreLimits,
    counters: Arc<Counters>,
    files: Box<dyn Files>,
    /// Tells the temporary files of this store from those of every other. A process number does
    /// not: each container has a process 1.
    writer: u64,
    written: AtomicU64,
}

impl DirectoryStore {
    /// Opens or makes a store. `about` is a text for people about the fingerprint.
    ///
    /// # Errors
    /// If the directory cannot be made, read and written.
    pub fn open(
        root: &Path,
        fingerprint: Fingerprint,
        about: &str,
        limits: StoreLimits,
        counters: Arc<Counters>,
    ) -> io::Result<Self> {
        Self::with_files(root, fingerprint, about, limits, counters, Box::new(PlainFiles))
    }

    /// [`DirectoryStore::open`] with another way to write files.
    pub fn with_files(
        root: &Path,
        fingerprint: Fingerprint,
        about: &str,
        limits: StoreLimits,
        counters: Arc<Counters>,
        files: Box<dyn Files>,
    ) -> io::Result<Self> {
        let folder = root.join(fingerprint.folder());
        make_private(&folder)?;
        let writer = getrandom::u64().map_err(|error| io::Error::other(error.to_string()))?;
        let (root, written) = (root.to_owned(), AtomicU64::new(0));
        let store = Self { root, folder, fingerprint, limits, counters, files, writer, written };
        let named = store.folder.join(ABOUT);
        if !named.exists() {
            store.write_whole(&named, about.as_bytes())?;
        }
        store.tidy(0)?;
        Ok(store)
    }

    /// The directory of all fingerprints.
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn path(&self, name: &PageName) -> PathBuf {
        let file = name.file_name();
        self.folder.join(&file[..2]).join(file)
    }

    /// Applies the limits with room for `room` more bytes, and counts the bytes anew: other
    /// processes write and remove too.
    pub fn tidy(&self, room: u64) -> io::Result<()> {
        let pruned = prune(&self.root, self.limits, room)?;
        add(&self.counters.pruned_pages, pruned.too_old + pruned.too_many);
        set(&self.counters.disk_bytes, pruned.left);
        Ok(())
    }

    /// How often [`DirectoryStore::tidy`] should run.
    pub fn tidy_every(&self) -> Duration {
        let most = Duration::from_secs(60);
        self.limits.age.map_or(most, |age| (age / 4).clamp(Duration::from_millis(100), most))
    }

    /// Writes a file that appears whole or not at all.
    fn write_whole(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{:016x}-{number}.{TEMPORARY}", self.writer));
        let temporary = path.with_file_name(name);
        let written = self.files.write(&temporary, bytes).and_then(|()| fs::rename(&temporary, path));
        written.inspect_err(|_| {
            // The file may not exist; an abandoned one is removed later.
            let _ = fs::remove_file(&temporary);
        })
    }

    fn put(&self, page: &SealedPage) -> io::Result<bool> {
        let path = self.path(&page.name);
        let length = page.bytes.len() as u64;
        // A part may have grown since; everything else is the same whoever writes it. A file of
        // another length was cut off.
        let held = fs::metadata(&path).ok().map(|about| about.len());
        if page.name.kind != PageKind::Part && held == Some(length) {
            return Ok(true);
        }
        if let Some(most) = self.limits.bytes {
            if length > most {
                return Ok(false);
            }
            if self.counters.disk_bytes.load(Ordering::Relaxed) + length > most {
                self.tidy(length)?;
            }
        }
        make_private(path.parent().unwrap_or(&self.folder))?;
        self.write_whole(&path, &page.bytes)?;
        add(&self.counters.disk_bytes, page.bytes.len());
        add(&self.counters.written_pages, 1);
        add(&self.counters.written_bytes, page.bytes.len());
        Ok(true)
    }

    fn read(&self, page: &PageRef<'_>) -> io::Result<Result<Loaded, Defect>> {
        let mut file = File::open(self.path(&page.name))?;
        mark_used(&file);
        let mut bytes = Vec::with_capacity(file.metadata().map_or(0, |about| about.len() as usize + 1));
        file.read_to_end(&mut bytes)?;
        Ok(Loaded::verify(Arc::new(bytes), &self.fingerprint, page))
    }

    fn get(&self, page: &PageRef<'_>) -> Option<Loaded> {
        let counters = &self.counters;
        match self.read(page) {
            Ok(Ok(loaded)) => {
                add(&counters.disk_hits, 1);
                add(&counters.disk_read_bytes, loaded.bytes().len());
                return Some(loaded);
            }
            Ok(Err(Defect::Corrupt(what))) => {
                add(&counters.corrupt, 1);
                let path = self.path(&page.name);
                tracing::warn!(what, path = %path.display(), "removed a damaged page of the store");
                let bytes = fs::metadata(&path).map_or(0, |about| about.len() as usize);
                if fs::remove_file(&path).is_ok() {
                    subtract(&counters.disk_bytes, bytes);
                }
            }
            Ok(Err(Defect::WrongFingerprint)) => add(&counters.wrong_fingerprint, 1),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(_) => add(&counters.io_errors, 1),
        }
        None
    }
}

/// Makes a folder that its owner alone can read, and those above it.
fn make_private(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// Notes the use of a page for those who prune. On a file system that refuses, pages are removed in
/// the order in which they were written.
fn mark_used(file: &File) {
    let now = SystemTime::now();
    let used = file.metadata().and_then(|about| about.modified());
    if used.is_ok_and(|used| now.duration_since(used).unwrap_or_default() > USE_EVERY) {
        let _ = file.set_modified(now);
    }
}

/// Whether an error says that there is no room.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge)
}

impl PageStore for DirectoryStore {
    fn exists_prefix(&self, pages: &[PageHash], kinds: &[PageKind]) -> Vec<StoredKinds> {
        let found = |(block, hash): (usize, &PageHash)| {
            let has = |kind| {
                let path = self.path(&PageName { hash: *hash, block: block as u32, kind });
                kinds.contains(&kind) && path.try_exists().unwrap_or(false)
            };
            let (full, coded, sliding) = (has(PageKind::Full), has(PageKind::Coded), has(PageKind::Sliding));
            let (part, state) = (full && !coded && has(PageKind::Part), has(PageKind::State));
            StoredKinds { full, coded, part, sliding, state }
        };
        pages.iter().enumerate().map(found).take_while(|found| !found.is_empty()).collect()
    }

    fn get_many(&self, pages: &[PageRef<'_>]) -> Vec<Option<Loaded>> {
        pages.iter().map(|page| self.get(page)).collect()
    }

    fn put_many(&self, pages: &[SealedPage]) -> Vec<bool> {
        let put = |page: &SealedPage| {
            self.put(page).unwrap_or_else(|error| {
                match is_full(&error) {
                    true => {
                        if self.counters.disk_full.load(Ordering::Relaxed) == 0 {
                            let folder = self.root.display();
                            tracing::warn!(%folder, "the disk of the page store is full: pages are not kept");
                        }
                        add(&self.counters.disk_full, 1);
                    }
                    false => add(&self.counters.io_errors, 1),
                }
                false
            })
        };
        pages.iter().map(put).collect()
    }

    fn touch_many(&self, pages: &[PageName]) -> Vec<bool> {
        let touch = |name: &PageName| match File::open(self.path(name)) {
            Ok(file) => {
                mark_used(&file);
                true
            }
            Err(_) => false,
        };
        pages.iter().map(touch).collect()
    }
}
