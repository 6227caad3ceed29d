//! The largest step of a model, and the memory that it takes.

use crate::HeadShape;

/// The largest step that a model will run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepSize {
    /// Rows of all sequences together.
    pub rows: usize,
    /// Rows whose logits are wanted.
    pub logits: usize,
    /// Tokens of the longest sequence.
    pub context: usize,
    pub heads: HeadShape,
    /// Tables of cosines and sines.
    pub rope_tables: usize,
    /// Channels of a head that RoPE turns.
    pub rotary: usize,
    /// Width of the rows between layers.
    pub hidden: usize,
    /// Width of the rows inside of the feed-forward part.
    pub intermediate: usize,
    pub vocab: usize,
    /// Whether some weights are FP8.
    pub fp8: bool,
    /// Whether pages are quantized.
    pub quantized: bool,
    /// Whether results of products are normalized before they are added.
    pub result_norms: bool,
}

impl StepSize {
    /// Width of all query heads.
    pub fn query_width(&self) -> usize {
        self.heads.query_heads * self.heads.head_dim
    }

    /// Width of the queries, keys and values of a row.
    pub fn qkv_width(&self) -> usize {
        (self.heads.query_heads + 2 * self.heads.kv_heads) * self.heads.head_dim
    }
}

/// How a device divides the attention of a prompt: into blocks of rows. A wave is the blocks that run
/// at the same time. A partial last wave takes as long as a full one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillWave {
    /// Tokens of a full wave.
    pub tokens: usize,
    /// Tokens of a block.
    pub block: usize,
    /// Whether fewer than [`PrefillWave::DIVIDED`] waves divide their contexts among the idle parts of the
    /// device, so that they take about as long as their blocks.
    pub divides: bool,
}

impl PrefillWave {
    /// No waves: time grows linearly with the tokens.
    pub const NONE: Self = Self { tokens: 1, block: 1, divides: false };
    /// Waves from which on contexts are not divided: a partial last wave matters little.
    pub const DIVIDED: usize = 3;

    /// Waves that `tokens` tokens need.
    pub fn needed(&self, tokens: usize) -> usize {
        tokens.next_multiple_of(self.block.max(1)).div_ceil(self.tokens.max(1))
    }

    /// Tokens whose attention takes as long as that of `tokens` tokens of a prompt.
    pub fn occupied(&self, tokens: usize) -> usize {
        let blocks = tokens.next_multiple_of(self.block.max(1));
        match self.takes_parts(blocks) {
            true => blocks,
            false => self.needed(tokens) * self.tokens,
        }
    }

    /// Whether this many tokens take about as long as their blocks.
    pub fn takes_parts(&self, tokens: usize) -> bool {
        self.divides && tokens < Self::DIVIDED * self.tokens
    }

    /// The largest number of tokens, in whole blocks, that `waves` waves hold.
    pub fn filling(&self, waves: usize) -> usize {
        let block = self.block.max(1);
        waves.saturating_mul(self.tokens.max(1)) / block * block
    }
}

/// Bytes that a device keeps for steps, beside weights and pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepMemory {
    /// Rows of activations, those of logits among them.
    pub activations: usize,
    /// Quantized pages that a prompt reads in 16 bits.
    pub expanded_pages: usize,
    /// Workspace of matrix products, and FP8 weights expanded for them.
    pub products: usize,
    /// Cosines and sines of every position.
    pub rope: usize,
}

impl StepMemory {
    pub fn total(&self) -> usize {
        let Self { activations, expanded_pages, products, rope } = self;
        activations + expanded_pages + products + rope
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waves_are_filled_in_whole_blocks() {
        // An H200 with 32 query and 8 KV heads: 132 blocks of 192 rows.
        let wave = PrefillWave { tokens: 792, block: 48, divides: false };
        assert_eq!([1, 2, 5].map(|n| wave.filling(n)), [768, 1584, 3936]);
        assert_eq!([1, 768, 769, 1584, 3936, 4096].map(|n| wave.needed(n)), [1, 1, 2, 2, 5, 6]);
        assert_eq!((PrefillWave::NONE.needed(7), PrefillWave::NONE.filling(7)), (7, 7));
        let divided = PrefillWave { divides: true, ..wave };
        assert_eq!([1, 49, 769, 1000].map(|n| wave.occupied(n)), [792, 792, 1584, 1584]);
        assert_eq!([1, 49, 769, 1000, 2352].map(|n| divided.occupied(n)), [48, 96, 816, 1008, 2352]);
        assert_eq!([2377, 3936].map(|n| divided.occupied(n)), [3168, 3960]);
    }
}
