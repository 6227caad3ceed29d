//! MXFP4 weights that stay codes in memory: 4.25 bits a weight to read.
//!
//! Codes lie in the order of a BF16 [`PackedMatrix`](super::PackedMatrix): blocks of 16 outputs,
//! `[in / 2][16 outputs]`, a byte for two inputs; scales `[in / 32][16 outputs]`. A task expands the
//! blocks it multiplies, exactly, into the words that a packed matrix would have stored.

use oscar_backend::{MXFP4_GROUP, Mxfp4Blocks, mxfp4_factor};

use super::coded::Codes;
use super::packed::PackError;
use super::tile::{GROUP_BLOCKS, LANES};
use crate::kernels::Kernels;
use crate::pool::ThreadPool;

/// Inputs in a step.
const STEP_INPUTS: usize = 2;
const GROUP_STEPS: usize = MXFP4_GROUP / STEP_INPUTS;

/// A matrix of MXFP4 codes.
#[derive(Debug)]
pub struct MxMatrix {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) steps: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl MxMatrix {
    /// # Errors
    /// If codes or scales are not those of a matrix of this shape, or there are none.
    pub fn pack(
        pool: &ThreadPool,
        weights: Mxfp4Blocks<'_>,
        outputs: usize,
        inputs: usize,
    ) -> Result<Self, PackError> {
        if outputs == 0 || inputs == 0 {
            return Err(PackError::Empty { outputs, inputs });
        }
        weights.check(outputs, inputs).map_err(|error| PackError::Coded(error.to_string()))?;
        let (steps, groups) = (inputs / STEP_INPUTS, inputs / MXFP4_GROUP);
        let blocks = outputs.div_ceil(LANES);
        // Outputs that fill the last block have codes of zero.
        let interleave = |from: &[u8], width: usize| {
            let mut to = vec![0; blocks * width * LANES];
            pool.run_chunks(&mut to, width * LANES, |block, to| {
                for lane in 0..LANES.min(outputs - block * LANES) {
                    let row = &from[(block * LANES + lane) * width..][..width];
                    row.iter().enumerate().for_each(|(i, &byte)| to[i * LANES + lane] = byte);
                }
            });
            to
        };
        let (codes, scales) = (interleave(weights.codes, steps), interleave(weights.scales, groups));
        Ok(Self { outputs, inputs, steps, codes, scales })
    }

    pub(super) fn bytes(&self) -> usize {
        self.codes.len() + self.scales.len()
    }

    /// The codes of four blocks from `first` on.
    pub(super) fn codes(&self, first: usize) -> Codes<'_> {
        let of = |bytes, width: usize| -> &[u8] {
            let all: &Vec<u8> = bytes;
            &all[first * width * LANES..][..GROUP_BLOCKS * width * LANES]
        };
        Codes::Mxfp4 {
            codes: of(&self.codes, self.steps),
            scales: of(&self.scales, self.steps / GROUP_STEPS),
        }
    }

    /// Writes the BF16 words of `blocks` blocks from `first` on.
    pub(super) fn expand(&self, kernels: &Kernels, first: usize, blocks: usize, words: &mut [u32]) {
        let groups = first * self.steps / GROUP_STEPS..(first + blocks) * self.steps / GROUP_STEPS;
        let codes = self.codes.chunks_exact(GROUP_STEPS * LANES).skip(groups.start);
        let scales = self.scales.chunks_exact(LANES).skip(groups.start);
        for ((codes, scales), words) in codes.zip(scales).zip(words.chunks_exact_mut(GROUP_STEPS * LANES)) {
            kernels.expand_mxfp4(codes, &std::array::from_fn(|lane| mxfp4_factor(scales[lane])), words);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ExpertMatrix, PackedMatrix};
    use super::*;
    use crate::buffer::Buffer;
    use crate::cpu::Variant;
    use crate::kernels::testing::kernels_or_note;
    use crate::{Precision, Weights};

    #[test]
    fn codes_expand_to_the_words_of_a_packed_matrix() {
        let pool = ThreadPool::new(2).unwrap();
        for (outputs, inputs) in [(150, 160), (16, 32), (1, 64), (33, 320)] {
            let codes: Vec<u8> = (0..outputs * inputs / 2).map(|i| (i * 167 % 256) as u8).collect();
            let scales: Vec<u8> = (0..outputs * inputs / 32).map(|i| (100 + i * 7 % 40) as u8).collect();
            let blocks = Mxfp4Blocks { codes: &codes, scales: &scales };
            let expanded = blocks.expand(outputs, inputs).unwrap();
            let packed =
                PackedMatrix::pack(&pool, Weights::F32(&expanded), outputs, inputs, Precision::Bf16).unwrap();
            let coded = ExpertMatrix::Mxfp4(MxMatrix::pack(&pool, blocks, outputs, inputs).unwrap());
            let mut room = Buffer::zeroed(0);
            for kernels in Variant::ALL.into_iter().filter_map(kernels_or_note) {
                let words = coded.words(kernels, 0, outputs.div_ceil(LANES), &mut room);
                // Code 8 is −0; a packed matrix keeps its sign too.
                assert_eq!(words, packed.words.words(), "{outputs} × {inputs}");
                let last = outputs.div_ceil(LANES) - 1;
                let part = coded.words(kernels, last, 1, &mut room);
                assert_eq!(part, &packed.words.words()[last * packed.steps * LANES..]);
            }
            assert!(MxMatrix::pack(&pool, blocks, outputs + 1, inputs).is_err());
        }
    }
}
