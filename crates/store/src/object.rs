//! The bytes of a stored page: a header that repeats everything the reader asked for, then the
//! page as the device had it.
//!
//! ```text
//!   0  magic          "OSCARPG\0"          88  payload length     u64
//!   8  version        u32                  96  number of tokens   u32
//!  12  kind           u32                 100  tokens             64 × u32
//!  16  fingerprint    32 bytes            356  checksum           u32, CRC-32 of all other bytes
//!  48  page hash      32 bytes            360  payload
//!  80  block          u32
//!  84  progress       u32                 all numbers little-endian
//! ```
//!
//! A recurrent state is a page too: its tokens are those of the block that it follows.

use crate::fingerprint::Fingerprint;
use oscar_cache::{PageHash, PageKind};
use oscar_codec::PAGE_TOKENS;
use std::path::Path;
use std::sync::Arc;

const MAGIC: &[u8; 8] = b"OSCARPG\0";
/// DO NOT CHANGE the layout above without a new number.
const VERSION: u32 = 1;
const CHECKSUM_AT: usize = 100 + 4 * PAGE_TOKENS;
/// Bytes before the payload.
pub const HEADER_BYTES: usize = CHECKSUM_AT + 4;

/// The name of a stored page below a fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageName {
    pub hash: PageHash,
    pub block: u32,
    pub kind: PageKind,
}

/// The name of a page and the tokens that it must have.
#[derive(Clone, Copy, Debug)]
pub struct PageRef<'a> {
    pub name: PageName,
    pub tokens: &'a [u32],
}

/// Why stored bytes are not the page that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Defect {
    #[error("damaged: {0}")]
    Corrupt(&'static str),
    #[error("of another model, cache or device")]
    WrongFingerprint,
}

/// A page on its way to a store: room for the header, then the payload.
#[derive(Debug)]
pub struct Page {
    name: PageName,
    progress: u32,
    bytes: Vec<u8>,
}

impl Page {
    /// A page without payload. `progress` is that of quantized pages ([`oscar_cache::CodedPage::coded`]).
    pub fn new(page: PageRef<'_>, progress: usize, payload_bytes: usize) -> Self {
        debug_assert_eq!(page.tokens.len(), PAGE_TOKENS, "whole pages only");
        let mut bytes = Vec::with_capacity(HEADER_BYTES + payload_bytes);
        bytes.resize(100, 0);
        page.tokens.iter().for_each(|token| bytes.extend_from_slice(&token.to_le_bytes()));
        bytes.resize(HEADER_BYTES, 0);
        Self { name: page.name, progress: progress as u32, bytes }
    }

    /// Where the payload is appended.
    pub fn payload(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.len() == HEADER_BYTES
    }

    /// Completes the header.
    pub fn seal(mut self, fingerprint: &Fingerprint) -> SealedPage {
        let Self { name, progress, bytes } = &mut self;
        let payload = (bytes.len() - HEADER_BYTES) as u64;
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&kind_number(name.kind).to_le_bytes());
        bytes[16..48].copy_from_slice(fingerprint.bytes());
        bytes[48..80].copy_from_slice(name.hash.bytes());
        bytes[80..84].copy_from_slice(&name.block.to_le_bytes());
        bytes[84..88].copy_from_slice(&progress.to_le_bytes());
        bytes[88..96].copy_from_slice(&payload.to_le_bytes());
        bytes[96..100].copy_from_slice(&(PAGE_TOKENS as u32).to_le_bytes());
        let checksum = checksum(bytes);
        bytes[CHECKSUM_AT..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
        SealedPage { name: self.name, bytes: Arc::new(self.bytes) }
    }
}

/// A page with its header, ready to be kept.
#[derive(Clone, Debug)]
pub struct SealedPage {
    pub name: PageName,
    pub bytes: Arc<Vec<u8>>,
}

/// A page that was read and verified.
#[derive(Clone, Debug)]
pub struct Loaded {
    bytes: Arc<Vec<u8>>,
}

impl Loaded {
    /// Accepts bytes if they are the page that was asked for.
    pub(crate) fn verify(
        bytes: Arc<Vec<u8>>,
        fingerprint: &Fingerprint,
        page: &PageRef<'_>,
    ) -> Result<Self, Defect> {
        let header = Header::read(&bytes)?;
        if header.fingerprint != *fingerprint {
            return Err(Defect::WrongFingerprint);
        }
        if header.name != page.name {
            return Err(Defect::Corrupt("the header names another page"));
        }
        let mut tokens = bytes[100..CHECKSUM_AT].chunks_exact(4).map(u32_at);
        if !page.tokens.iter().all(|&token| tokens.next() == Some(token)) || tokens.next().is_some() {
            return Err(Defect::Corrupt("the tokens are others"));
        }
        Ok(Self { bytes })
    }

    pub fn payload(&self) -> &[u8] {
        &self.bytes[HEADER_BYTES..]
    }

    /// Progress of quantization.
    pub fn progress(&self) -> usize {
        u32_at(&self.bytes[84..88]) as usize
    }

    pub(crate) fn bytes(&self) -> &Arc<Vec<u8>> {
        &self.bytes
    }
}

/// The header of a page whose checksum is right.
struct Header {
    name: PageName,
    fingerprint: Fingerprint,
}

impl Header {
    fn read(bytes: &[u8]) -> Result<Self, Defect> {
        let Some(header) = bytes.get(..HEADER_BYTES) else {
            return Err(Defect::Corrupt("shorter than a header"));
        };
        if header[..8] != *MAGIC || u32_at(&header[8..12]) != VERSION {
            return Err(Defect::Corrupt("no page of this version"));
        }
        let length = header[88..96].iter().rev().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte));
        if (bytes.len() - HEADER_BYTES) as u64 != length {
            return Err(Defect::Corrupt("cut off or too long"));
        }
        if checksum(bytes) != u32_at(&header[CHECKSUM_AT..]) {
            return Err(Defect::Corrupt("wrong checksum"));
        }
        let kind = PageKind::ALL.into_iter().find(|kind| kind_number(*kind) == u32_at(&header[12..16]));
        let kind = kind.ok_or(Defect::Corrupt("unknown kind"))?;
        let digest = |from: usize| std::array::from_fn(|i| header[from + i]);
        let name = PageName { hash: PageHash::from_bytes(digest(48)), block: u32_at(&header[80..84]), kind };
        Ok(Self { name, fingerprint: Fingerprint::from_bytes(digest(16)) })
    }
}

/// Checks a file on its own: its checksum, and that header, file name and folder agree.
///
/// # Errors
/// If the file cannot be read; a defect is the inner result.
pub fn verify_file(path: &Path) -> std::io::Result<Result<(), Defect>> {
    let bytes = std::fs::read(path)?;
    Ok(Header::read(&bytes).and_then(|header| {
        let folder = path.parent().and_then(Path::parent).and_then(Path::file_name);
        if folder.is_none_or(|folder| folder.to_string_lossy() != header.fingerprint.folder()) {
            return Err(Defect::WrongFingerprint);
        }
        match path.file_name().is_some_and(|name| name.to_string_lossy() == header.name.file_name()) {
            true => Ok(()),
            false => Err(Defect::Corrupt("the header names another page")),
        }
    }))
}

impl PageName {
    pub(crate) fn file_name(&self) -> String {
        format!("{}-{}.{}", self.hash, self.block, extension(self.kind))
    }
}

pub(crate) fn extension(kind: PageKind) -> &'static str {
    match kind {
        PageKind::Full => "full",
        PageKind::Coded => "coded",
        PageKind::Part => "part",
        PageKind::Sliding => "sliding",
        PageKind::State => "state",
    }
}

/// DO NOT CHANGE: headers and questions of other machines have these numbers.
pub(crate) fn kind_number(kind: PageKind) -> u32 {
    match kind {
        PageKind::Full => 0,
        PageKind::Coded => 1,
        PageKind::Part => 2,
        PageKind::Sliding => 3,
        PageKind::State => 4,
    }
}

/// Of at least four bytes.
fn u32_at(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// CRC-32 of everything except the checksum itself.
fn checksum(bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&bytes[..CHECKSUM_AT]);
    hasher.update(&bytes[HEADER_BYTES..]);
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FingerprintParts;
    use oscar_cache::PrefixKey;
    use proptest::prelude::*;

    fn sealed(tokens: &[u32], payload: &[u8]) -> (Fingerprint, PageName, SealedPage) {
        let (fingerprint, _) = FingerprintParts::default().text("model", "test").finish();
        let hash = PageHash::chain(PrefixKey::new(None, tokens)).next().unwrap();
        let name = PageName { hash, block: 0, kind: PageKind::Coded };
        let mut page = Page::new(PageRef { name, tokens }, 77, payload.len());
        page.payload().extend_from_slice(payload);
        (fingerprint, name, page.seal(&fingerprint))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// A page comes back as it was; with any bit changed or any byte cut off it is refused.
        #[test]
        fn every_damage_is_seen(
            payload in prop::collection::vec(any::<u8>(), 0..300), bit in any::<usize>(), cut in any::<usize>(),
        ) {
            let tokens: Vec<u32> = (5..69).collect();
            let (fingerprint, name, page) = sealed(&tokens, &payload);
            let asked = PageRef { name, tokens: &tokens };
            let loaded = Loaded::verify(page.bytes.clone(), &fingerprint, &asked).unwrap();
            prop_assert_eq!((loaded.payload(), loaded.progress()), (&payload[..], 77));
            let mut flipped = (*page.bytes).clone();
            let bit = bit % (8 * flipped.len());
            flipped[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Loaded::verify(Arc::new(flipped), &fingerprint, &asked).is_err());
            let short = page.bytes[..cut % page.bytes.len()].to_vec();
            prop_assert!(matches!(Loaded::verify(Arc::new(short), &fingerprint, &asked), Err(Defect::Corrupt(_))));
        }
    }

    /// Stored headers and names have these.
    #[test]
    fn kinds_keep_their_numbers_and_endings() {
        let named = PageKind::ALL.map(|kind| (kind_number(kind), extension(kind)));
        assert_eq!(named, [(0, "full"), (1, "coded"), (2, "part"), (3, "sliding"), (4, "state")]);
    }

    #[test]
    fn other_pages_other_tokens_and_other_models_are_refused() {
        let tokens: Vec<u32> = (5..69).collect();
        let (fingerprint, name, page) = sealed(&tokens, b"payload");
        let verify = |fingerprint: &Fingerprint, name: PageName, tokens: &[u32]| {
            Loaded::verify(page.bytes.clone(), fingerprint, &PageRef { name, tokens }).err()
        };
        assert_eq!(verify(&fingerprint, name, &tokens), None);
        let (other, _) = FingerprintParts::default().text("model", "other").finish();
        assert_eq!(verify(&other, name, &tokens), Some(Defect::WrongFingerprint));
        let mut changed = tokens.clone();
        changed[63] += 1;
        assert_eq!(verify(&fingerprint, name, &changed), Some(Defect::Corrupt("the tokens are others")));
        for name in [
            PageName { block: 1, ..name },
            PageName { kind: PageKind::Full, ..name },
            PageName { kind: PageKind::State, ..name },
        ] {
            assert!(matches!(verify(&fingerprint, name, &tokens), Some(Defect::Corrupt(_))));
        }
    }
}
