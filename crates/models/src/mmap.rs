//! Read-only mapping of weight files: the crate's only `unsafe`, one call.
//!
//! Invariant: a [`FileBytes`] never changes length, and its slice lives as long as it does.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

use memmap2::{Advice, Mmap};

/// The bytes of one file: mapped from disk, or linked into the binary.
#[derive(Debug)]
pub(crate) enum FileBytes {
    Mapped(Mmap),
    Static(&'static [u8]),
}

impl FileBytes {
    /// Says whether few, scattered pages or everything will be read next, so that the system reads
    /// ahead only where it helps. A system that does not listen changes nothing.
    pub(crate) fn expect_scattered_reads(&self, scattered: bool) {
        if let Self::Mapped(map) = self {
            let advice = if scattered { Advice::Random } else { Advice::Normal };
            let _ = map.advise(advice);
        }
    }
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
        }
    }
}

/// Maps a file for reading; pages are loaded when first touched.
#[allow(unsafe_code)]
pub(crate) fn map_file(path: &Path) -> io::Result<FileBytes> {
    let file = File::open(path)?;
    // SAFETY: the mapping is read-only and owned by the returned value, so nothing can write
    // through it and no slice outlives it. One thing cannot be ruled out: someone changes the file
    // while it is mapped. Overwritten bytes would appear here, and a truncated file would raise
    // SIGBUS on access. Downloaders replace files by rename, which leaves an existing mapping
    // intact; editing a served checkpoint in place is documented as unsupported.
    let map = unsafe { Mmap::map(&file)? };
    Ok(FileBytes::Mapped(map))
}
