//! Names of blocks whose bytes leave a device or return to it.

use oscar_codec::{CacheLayout, CodedPageId, FullPageId, SlidingPageId, StateId};

/// A block of any kind: 64 tokens of every head of the sliding layers, or of the others; or the recurrent
/// state of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockId {
    Full(FullPageId),
    Coded(CodedPageId),
    Sliding(SlidingPageId),
    State(StateId),
}

impl BlockId {
    /// Bytes of the block in this cache.
    pub fn bytes(self, layout: &CacheLayout) -> usize {
        match self {
            Self::Full(_) => layout.full_block_bytes(),
            Self::Coded(_) => layout.coded_block_bytes(),
            Self::Sliding(_) => layout.sliding_block_bytes(),
            Self::State(_) => layout.state_bytes(),
        }
    }
}
