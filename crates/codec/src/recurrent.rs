//! The recurrent state of a sequence.
//!
//! Layers with a delta net have no rows in the cache. What they remember of all tokens so far is one
//! *state* of fixed size for each sequence. A state belongs to one length: nothing can be cut off it. So a
//! prefix can be resumed only where somebody kept the state of just that length.

use crate::cache_layout::CacheLayout;

/// The room of one state: of all layers with a delta net. Handed out by the cache, resolved by a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StateId(pub u32);

impl CacheLayout {
    /// The same cache beside states of this size. Its layers are those with attention.
    pub fn with_states(mut self, bytes: usize) -> Self {
        self.state_bytes = bytes;
        self
    }

    /// Bytes of the state of a sequence; 0 in models without one.
    pub fn state_bytes(&self) -> usize {
        self.state_bytes
    }

    /// Whether sequences have a state.
    pub fn has_states(&self) -> bool {
        self.state_bytes > 0
    }

    /// States that a sequence of `tokens` needs to go on.
    pub(crate) fn states(&self, tokens: usize) -> usize {
        usize::from(self.has_states() && tokens > 0)
    }

    /// Bytes that a sequence may hold for a resume at its last whole page, beside what it reads itself.
    pub fn resume_bytes(&self) -> usize {
        self.unquantized_block_bytes() + self.state_bytes
    }
}

#[cfg(test)]
mod tests {
    use crate::{CacheLayout, CodeLayout, KvFormat, Windows};

    #[test]
    fn a_state_costs_the_same_at_every_length() {
        for format in [KvFormat::Bf16, KvFormat::OSCAR2] {
            let plain = CacheLayout::new(format, 3, 2, 256, Windows::default(), CodeLayout::CpuTile).unwrap();
            let stateful = plain.clone().with_states(1 << 20);
            assert_eq!(stateful.sequence_bytes(0), 0);
            for tokens in [1, 64, 1000, 30_000] {
                assert_eq!(stateful.sequence_bytes(tokens), plain.sequence_bytes(tokens) + (1 << 20));
                assert_eq!(stateful.peak_bytes(tokens), plain.peak_bytes(tokens) + (1 << 20));
                // The state before a step and the one after it.
                let (working, without) =
                    (stateful.working_bytes(tokens, 512), plain.working_bytes(tokens, 512));
                assert_eq!(working, without + (2 << 20));
                assert_eq!(stateful.bits_per_element(tokens), plain.bits_per_element(tokens));
            }
            assert_eq!(stateful.page_bits(), plain.page_bits());
            assert_eq!(stateful.with_order(CodeLayout::Logical).unwrap().state_bytes(), 1 << 20);
            assert!(stateful.evicts_rows().is_err() && stateful.describe().contains("1.0 MiB"));
        }
    }
}
