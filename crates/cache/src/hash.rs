//! Names of pages that other programs can compute too.
//!
//! The hash of a page is SHA-256 over the digest of the page before it (nothing for the first page)
//! and the page's token ids as 4-byte little-endian numbers. SGLang names its pages in the same
//! way.

use sha2::{Digest, Sha256};

/// Chained digest of a page and everything before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageHash(pub [u8; 32]);

impl PageHash {
    pub fn of(parent: Option<&PageHash>, tokens: &[u32]) -> Self {
        let mut hasher = Sha256::new();
        if let Some(parent) = parent {
            hasher.update(parent.0);
        }
        for token in tokens {
            hasher.update(token.to_le_bytes());
        }
        Self(hasher.finalize().into())
    }

    /// The hashes of consecutive pages from the start of a sequence.
    pub fn chain<'a>(pages: impl Iterator<Item = &'a [u32]>) -> impl Iterator<Item = Self> {
        pages.scan(None, |parent: &mut Option<Self>, tokens| {
            *parent = Some(Self::of(parent.as_ref(), tokens));
            *parent
        })
    }

    /// The page's number in KV events: the first 8 bytes of the digest, as a signed number.
    pub fn event_id(&self) -> i64 {
        i64::from_be_bytes([
            self.0[0], self.0[1], self.0[2], self.0[3], self.0[4], self.0[5], self.0[6], self.0[7],
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chain_is_sha256_of_parent_digest_and_little_endian_ids() {
        // Computed with Python's hashlib.
        let first = PageHash::of(None, &[1, 2, 3]);
        let second = PageHash::of(Some(&first), &[4]);
        let hex = |h: &PageHash| h.0.iter().map(|b| format!("{b:02x}")).collect::<String>();
        assert_eq!(hex(&first), FIRST);
        assert_eq!(hex(&second), SECOND);
        let pages: [&[u32]; 2] = [&[1, 2, 3], &[4]];
        assert_eq!(PageHash::chain(pages.into_iter()).collect::<Vec<_>>(), [first, second]);
        assert_eq!(first.event_id(), FIRST_ID);
    }

    const FIRST: &str = "4636993d3e1da4e9d6b8f87b79e8f7c6d018580d52661950eabc3845c5897a4d";
    const SECOND: &str = "cae427896adf826b263f0caef3c2cac907160ef49aa89d8222ba92a1cab31e8a";
    const FIRST_ID: i64 = 5059399719711515881;
}
