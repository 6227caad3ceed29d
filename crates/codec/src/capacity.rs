//! How many tokens and sequences fit into a given memory.

use crate::{CacheLayout, PAGE_TOKENS};

/// Sequences of one length that fit into a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Bytes of one sequence, at its largest, with the state that it keeps for a resume.
    pub sequence_bytes: usize,
    /// Bytes that reading a prompt takes besides: the unquantized pages of one chunk.
    pub prefill_bytes: usize,
    pub sequences: usize,
}

impl CacheLayout {
    /// Bytes a sequence may hold at any moment: at rest, plus the unquantized pages of one prefill
    /// chunk, and a second state while a step reads one and writes another.
    pub fn working_bytes(&self, context: usize, chunk: usize) -> usize {
        let chunk_blocks = chunk.min(context).div_ceil(PAGE_TOKENS) + 2;
        self.peak_bytes(context) + chunk_blocks * self.unquantized_block_bytes() + self.state_bytes()
    }

    /// Least memory in which a server takes a sequence of `tokens`: alone, one token a step, with what a
    /// resume at its last whole page needs.
    pub fn least_bytes(&self, tokens: usize) -> usize {
        self.peak_bytes(tokens) + self.unquantized_block_bytes() + self.resume_bytes()
    }

    /// Sequences of `context` tokens that fit into `bytes`, one of them being read in chunks.
    pub fn capacity(&self, bytes: usize, context: usize, chunk: usize) -> Capacity {
        let sequence_bytes = self.peak_bytes(context) + self.state_bytes();
        let prefill_bytes = self.working_bytes(context, chunk) - sequence_bytes;
        let sequences = bytes.saturating_sub(prefill_bytes) / sequence_bytes.max(1);
        Capacity { sequence_bytes, prefill_bytes, sequences }
    }

    /// Most tokens of one sequence that fit into `bytes` while it is read in chunks.
    pub fn longest_context(&self, bytes: usize, chunk: usize) -> usize {
        let fits_in = |tokens| self.working_bytes(tokens, chunk) <= bytes;
        let (mut fits, mut fails) = (0, 1);
        while fits_in(fails) && fails < 1 << 40 {
            (fits, fails) = (fails, fails * 2);
        }
        while fails - fits > 1 {
            let middle = fits + (fails - fits) / 2;
            if fits_in(middle) { fits = middle } else { fails = middle }
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use crate::{CacheLayout, CodeLayout, KvFormat, Windows};

    #[test]
    fn the_longest_context_fits_and_one_more_token_does_not() {
        for format in [KvFormat::Bf16, KvFormat::OSCAR2] {
            let layout =
                CacheLayout::new(format, 6, 2, 128, Windows::default(), CodeLayout::Logical).unwrap();
            for bytes in [4 * layout.full_block_bytes(), 5 << 20, 1 << 30] {
                for chunk in [1, 512] {
                    let n = layout.longest_context(bytes, chunk);
                    assert!(
                        (n == 0 || layout.working_bytes(n, chunk) <= bytes)
                            && layout.working_bytes(n + 1, chunk) > bytes,
                        "{format} {bytes} {n}"
                    );
                    if n > 0 {
                        let fit = layout.capacity(bytes, n, chunk);
                        assert!(fit.sequences >= 1);
                        assert!(fit.sequences * fit.sequence_bytes + fit.prefill_bytes <= bytes);
                    }
                }
            }
        }
    }

    /// States much larger than rows: each sequence has two, as the server reserves them.
    #[test]
    fn every_sequence_has_room_for_a_second_state() {
        let windows = Windows::default();
        let plain = CacheLayout::new(KvFormat::Bf16, 2, 1, 64, windows, CodeLayout::Logical).unwrap();
        let layout = plain.clone().with_states(64 << 20);
        let fit = layout.capacity(640 << 20, 1000, 64);
        assert_eq!(fit.sequences, 4, "ten states without any rows");
        assert_eq!(fit.sequence_bytes, layout.peak_bytes(1000) + (64 << 20));
        assert_eq!(fit.prefill_bytes, plain.capacity(640 << 20, 1000, 64).prefill_bytes);
        let longest = layout.longest_context(640 << 20, 64);
        assert!(layout.capacity(640 << 20, longest, 64).sequences == 1, "the longest fits");
    }

    #[test]
    fn the_least_memory_includes_a_resume() {
        let windows = Windows::default();
        let layout = CacheLayout::new(KvFormat::Bf16, 2, 1, 64, windows, CodeLayout::Logical).unwrap();
        let (layout, block) = (layout.clone().with_states(9 << 20), layout.full_block_bytes());
        assert_eq!(layout.least_bytes(640), (18 << 20) + 12 * block);
    }
}
