//! Salts divide the prefix cache: a prefix stored under one salt is found under that salt alone.
//!
//! A salted prefix hangs below a node of its own, which is a child of the root. A request with another salt never
//! reaches that node, so neither what it finds nor the time it takes depends on it.

use sha2::{Digest, Sha256};
use std::sync::Arc;

/// Names one part of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheSalt([u8; 32]);

impl CacheSalt {
    /// The salt that `parts` stand for; different lists give different salts.
    pub fn of(parts: &[&str]) -> Self {
        let mut hasher = Sha256::new();
        for part in parts {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Self(hasher.finalize().into())
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The salt's edge below the root: shorter than a page, so it is never taken for one.
    pub(crate) fn edge(&self) -> Arc<[u32]> {
        self.0.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
    }
}

/// Tokens from the start of a sequence, and the part of the cache they belong to.
#[derive(Clone, Copy, Debug)]
pub struct PrefixKey<'a> {
    pub salt: Option<CacheSalt>,
    pub tokens: &'a [u32],
}

impl<'a> PrefixKey<'a> {
    pub fn new(salt: Option<CacheSalt>, tokens: &'a [u32]) -> Self {
        Self { salt, tokens }
    }
}

impl<'a> From<&'a [u32]> for PrefixKey<'a> {
    fn from(tokens: &'a [u32]) -> Self {
        Self::new(None, tokens)
    }
}

impl<'a> From<&'a Vec<u32>> for PrefixKey<'a> {
    fn from(tokens: &'a Vec<u32>) -> Self {
        Self::new(None, tokens)
    }
}

impl<'a, const N: usize> From<&'a [u32; N]> for PrefixKey<'a> {
    fn from(tokens: &'a [u32; N]) -> Self {
        Self::new(None, tokens)
    }
}
