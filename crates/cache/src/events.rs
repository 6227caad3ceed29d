//! Changes of the prefix tree, for routers that send a request to the server that holds its prefix.
//!
//! A tree that records appends one [`CacheEvent`] for each page that comes or goes; the owner of the
//! tree takes them after each step. Applied in order, they give the pages that the tree holds. A page
//! counts as held while some form of it is.
//!
//! **Invariant:** prefixes below a salt are never recorded. A salt keeps what one tenant sends from
//! others, and whoever reads these events reads tokens.

use crate::radix::{Node, NodeId, ROOT, RadixCache};
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// Names a page by its tokens and all tokens before it: SHA-256 over the parent's digest, if there is
/// one, and the page's tokens as little-endian words. SGLang's rule: DO NOT CHANGE, routers compute
/// the same hashes and compare.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageHash(pub(crate) [u8; 32]);

impl PageHash {
    pub fn of(parent: Option<&Self>, tokens: &[u32]) -> Self {
        let mut hasher = Sha256::new();
        if let Some(Self(digest)) = parent {
            hasher.update(digest);
        }
        for token in tokens {
            hasher.update(token.to_le_bytes());
        }
        Self(hasher.finalize().into())
    }

    /// The number that stands for the page in events: the first eight bytes, big-endian, signed.
    pub fn event_id(&self) -> i64 {
        let mut first = [0; 8];
        first.copy_from_slice(&self.0[..8]);
        i64::from_be_bytes(first)
    }
}

/// A change of the pages that the tree holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// A page of these tokens is held after `parent`, which is absent for the first page.
    Stored { parent: Option<PageHash>, hash: PageHash, tokens: Arc<[u32]> },
    /// No form of the page is held any more.
    Removed { hash: PageHash },
    /// No page is held.
    Cleared,
}

impl RadixCache {
    /// Records changes from now on. The tree must be empty.
    pub fn record_events(&mut self) {
        debug_assert_eq!(self.tokens(), 0, "pages stored before are not recorded");
        self.events = Some(Vec::new());
    }

    /// The changes since the last call, in order.
    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        self.events.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// A node of a page was made.
    pub(crate) fn note_stored(&mut self, id: NodeId) {
        if self.events.is_none() {
            return;
        }
        let node = self.node(id);
        let parent = self.node(node.parent).hash;
        if node.parent != ROOT && parent.is_none() {
            // Below a salt.
            return;
        }
        let tokens = node.tokens.clone();
        let hash = PageHash::of(parent.as_ref(), &tokens);
        self.node_mut(id).hash = Some(hash);
        self.events.get_or_insert_default().push(CacheEvent::Stored { parent, hash, tokens });
    }

    /// A node was taken out of the tree.
    pub(crate) fn note_removed(&mut self, node: &Node) {
        if let (Some(events), Some(hash)) = (&mut self.events, node.hash) {
            events.push(CacheEvent::Removed { hash });
        }
    }

    /// Runs `flush`, and records it as one event and the pages that are still held.
    pub(crate) fn note_flush<T>(&mut self, flush: impl FnOnce(&mut Self) -> T) -> T {
        let recorded = self.events.take();
        let result = flush(self);
        if recorded.is_none() {
            return result;
        }
        let mut events = vec![CacheEvent::Cleared];
        let mut left = vec![ROOT];
        while let Some(id) = left.pop() {
            let node = self.node(id);
            if let Some(hash) = node.hash {
                let parent = self.node(node.parent).hash;
                events.push(CacheEvent::Stored { parent, hash, tokens: node.tokens.clone() });
            }
            left.extend(node.children.values());
        }
        self.events = Some(events);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computed with Python's hashlib after SGLang's rule.
    #[test]
    fn hashes_are_sglangs() {
        let tokens: Vec<u32> = (0..64).collect();
        let first = PageHash::of(None, &tokens);
        let second = PageHash::of(Some(&first), &tokens);
        assert_eq!(
            (first.event_id(), second.event_id()),
            (-96_911_884_851_298_857, -8_449_054_281_622_955_398)
        );
    }
}
