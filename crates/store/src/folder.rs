//! The files of a store's directory: listing them, and removing the old and the too many.
//!
//! ```text
//! ROOT/<fingerprint>/about.txt                        the model and the cache, for people
//! ROOT/<fingerprint>/<ab>/<abcd…>-<block>.<kind>      one page
//! ROOT/<fingerprint>/<ab>/….tmp                       a page being written
//! ```
//!
//! The time of last use is the time of modification, so that processes agree on it without an index.

use crate::object::extension;
use oscar_cache::PageKind;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::{self, DirEntry};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The text about the pages of one fingerprint.
pub(crate) const ABOUT: &str = "about.txt";
/// Files with this ending are being written, or their writer was killed.
pub(crate) const TEMPORARY: &str = "tmp";
/// A temporary file that nobody has touched for so long has lost its writer.
const ABANDONED_AFTER: Duration = Duration::from_secs(600);
/// Uses within one such time count as simultaneous: then later blocks go before earlier ones, which
/// they cannot do without.
const SAME_USE: u64 = 10;
/// Pruning goes on until this share of the size limit is left, so that it does not begin again at
/// the next page.
const PRUNE_TO: f64 = 0.95;

/// How large and how old the pages of a directory may become.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreLimits {
    /// Most bytes of all files.
    pub bytes: Option<u64>,
    /// Longest time since the last use.
    pub age: Option<Duration>,
}

/// A stored page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub path: PathBuf,
    /// Name of the fingerprint's folder.
    pub fingerprint: String,
    pub kind: PageKind,
    pub block: u32,
    pub bytes: u64,
    pub used: SystemTime,
}

/// The files of a directory.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    pub pages: Vec<Entry>,
    /// Files being written, or abandoned: path, bytes, time.
    pub temporary: Vec<(PathBuf, u64, SystemTime)>,
    /// What each fingerprint's folder says about itself.
    pub about: BTreeMap<String, String>,
}

impl Listing {
    pub fn bytes(&self) -> u64 {
        let temporary: u64 = self.temporary.iter().map(|(_, bytes, _)| bytes).sum();
        temporary + self.pages.iter().map(|page| page.bytes).sum::<u64>()
    }
}

/// What [`prune`] removed and left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    pub too_old: usize,
    /// Least recently used, because the directory was too large.
    pub too_many: usize,
    pub abandoned: usize,
    pub freed: u64,
    pub left: u64,
}

/// Lists a store's directory. Files that vanish meanwhile are left out.
///
/// # Errors
/// If the directory itself cannot be read.
pub fn list(root: &Path) -> io::Result<Listing> {
    let mut listing = Listing::default();
    for folder in fs::read_dir(root)?.flatten() {
        let fingerprint = folder.file_name().to_string_lossy().into_owned();
        let is_ours = fingerprint.len() == 32 && fingerprint.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !is_ours {
            continue;
        }
        if let Ok(about) = fs::read_to_string(folder.path().join(ABOUT)) {
            listing.about.insert(fingerprint.clone(), about);
        }
        for part in entries(&folder.path()) {
            for file in entries(&part.path()) {
                add_file(&mut listing, &fingerprint, &file);
            }
        }
    }
    Ok(listing)
}

/// The entries of a folder; none if it is no folder or has vanished.
fn entries(folder: &Path) -> impl Iterator<Item = DirEntry> {
    fs::read_dir(folder).into_iter().flatten().flatten()
}

fn add_file(listing: &mut Listing, fingerprint: &str, file: &DirEntry) {
    let Ok(metadata) = file.metadata() else { return };
    let (path, bytes) = (file.path(), metadata.len());
    let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
    let ending = path.extension().map(|ending| ending.to_string_lossy().into_owned()).unwrap_or_default();
    if ending == TEMPORARY {
        listing.temporary.push((path, bytes, used));
        return;
    }
    let kind = PageKind::ALL.into_iter().find(|kind| extension(*kind) == ending);
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let block = stem.rsplit_once('-').and_then(|(_, block)| block.parse().ok());
    if let (Some(kind), Some(block)) = (kind, block) {
        listing.pages.push(Entry { path, fingerprint: fingerprint.to_owned(), kind, block, bytes, used });
    }
}

/// Removes pages that are too old, then the least recently used until `room` bytes fit below the
/// size limit, and files whose writer was killed.
///
/// # Errors
/// If the directory cannot be read. A file that cannot be removed is left.
pub fn prune(root: &Path, limits: StoreLimits, room: u64) -> io::Result<Pruned> {
    let Listing { mut pages, temporary, .. } = list(root)?;
    let now = SystemTime::now();
    let age = |used: SystemTime| now.duration_since(used).unwrap_or_default();
    let mut pruned = Pruned::default();
    for (path, bytes, used) in temporary {
        match age(used) > ABANDONED_AFTER && fs::remove_file(path).is_ok() {
            true => (pruned.abandoned, pruned.freed) = (pruned.abandoned + 1, pruned.freed + bytes),
            false => pruned.left += bytes,
        }
    }
    if let Some(most) = limits.age {
        pages.retain(|page| {
            let removed = age(page.used) > most && fs::remove_file(&page.path).is_ok();
            if removed {
                (pruned.too_old, pruned.freed) = (pruned.too_old + 1, pruned.freed + page.bytes);
            }
            !removed
        });
    }
    pruned.left += pages.iter().map(|page| page.bytes).sum::<u64>();
    let Some(most) = limits.bytes.filter(|most| pruned.left + room > *most) else { return Ok(pruned) };
    let aim = ((most as f64 * PRUNE_TO) as u64).saturating_sub(room);
    let used = |page: &Entry| page.used.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    pages.sort_by_cached_key(|page| (used(page) / SAME_USE, Reverse(page.block)));
    for page in pages {
        if pruned.left <= aim {
            break;
        }
        if fs::remove_file(&page.path).is_ok() {
            pruned.too_many += 1;
            pruned.freed += page.bytes;
            pruned.left -= page.bytes;
        }
    }
    Ok(pruned)
}
