//! The names of a prefix's pages, which mean the same in every process.

use crate::events::PageHash;
use crate::salt::PrefixKey;
use oscar_codec::PAGE_TOKENS;
use sha2::{Digest, Sha256};
use std::fmt;

/// DO NOT CHANGE: pages below a salt are stored under hashes that begin with this.
const SALT_DOMAIN: &[u8] = b"oscar cache salt v1";

impl PageHash {
    /// The hashes of the whole pages of `key`. The first page below a salt follows a hash of the salt.
    pub fn chain<'a>(key: PrefixKey<'a>) -> impl Iterator<Item = Self> + 'a {
        let root = key.salt.map(|salt| {
            Self(Sha256::new_with_prefix(SALT_DOMAIN).chain_update(salt.bytes()).finalize().into())
        });
        key.tokens.chunks_exact(PAGE_TOKENS).scan(root, |parent, page| {
            *parent = Some(Self::of(parent.as_ref(), page));
            *parent
        })
    }

    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

/// In hexadecimal digits.
impl fmt::Display for PageHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for PageHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageHash({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CacheSalt;

    #[test]
    fn salt_context_and_tokens_all_count() {
        let tokens: Vec<u32> = (0..200).collect();
        let chain = |salt, tokens: &[u32]| PageHash::chain(PrefixKey::new(salt, tokens)).collect::<Vec<_>>();
        let plain = chain(None, &tokens);
        assert_eq!(plain.len(), 3, "whole pages only");
        assert_eq!(plain[1], PageHash::of(Some(&PageHash::of(None, &tokens[..64])), &tokens[64..128]));
        let salted = chain(Some(CacheSalt::of(&["a"])), &tokens);
        assert!(plain.iter().zip(&salted).all(|(a, b)| a != b));
        let mut other = tokens.clone();
        other[70] += 1;
        let other = chain(None, &other);
        assert_eq!((plain[0] == other[0], plain[1] == other[1], plain[2] == other[2]), (true, false, false));
    }
}
