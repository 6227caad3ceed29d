//! Names of blocks whose bytes leave a device or return to it.

use oscar_codec::{CacheLayout, CodedPageId, FullPageId};

/// A block of either format: 64 tokens of every layer and head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockId {
    Full(FullPageId),
    Coded(CodedPageId),
}

impl BlockId {
    /// Bytes of the block in this cache.
    pub fn bytes(self, layout: &CacheLayout) -> usize {
        match self {
            Self::Full(_) => layout.full_block_bytes(),
            Self::Coded(_) => layout.coded_block_bytes(),
        }
    }
}
