//! Weights in the order the kernels read them.
//!
//! A matrix `[out][in]` becomes blocks of 16 outputs. BF16: a block is `[in / 2][16 outputs][2
//! inputs]`, so that 64 consecutive bytes (a step) are the operand of `vdpbf16ps`, and 16
//! consecutive steps an AMX B tile. F32: a block is `[in][16 outputs]`. Outputs are padded to 16
//! and inputs to 32 with zeros.
//!
//! The order is the same for all variants, so a matrix is packed once and any variant can multiply
//! with it.

use half::{bf16, f16};
use oscar_backend::Fp8Blocks;
use thiserror::Error;

use super::tile::LANES;
use crate::buffer::Buffer;
use crate::ops::convert::{f32_from_bf16, f32_to_bf16};
use crate::pool::ThreadPool;

/// Inputs are padded to a multiple of this: the depth of an AMX tile.
pub const INPUT_PADDING: usize = 32;

/// How weights are stored and multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Weights and activations rounded to BF16, sums in f32.
    Bf16,
    /// Everything in f32: twice the bytes, for small matrices that need it.
    F32,
}

/// Row-major weights `[out][in]` as a checkpoint holds them.
#[derive(Clone, Copy, Debug)]
pub enum Weights<'a> {
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
    F32(&'a [f32]),
    /// Expanded while packing: products always read BF16 (or f32).
    Fp8(Fp8Blocks<'a>),
}

/// Why weights could not be packed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PackError {
    #[error("a matrix of {outputs} outputs and {inputs} inputs needs {outputs}·{inputs} weights, not {len}")]
    Length { outputs: usize, inputs: usize, len: usize },
    #[error("a matrix needs at least one output and one input, not {outputs}×{inputs}")]
    Empty { outputs: usize, inputs: usize },
    #[error("{0}")]
    Coded(String),
}

/// A weight matrix, packed once for [`PackedMatrix::linear`].
#[derive(Debug)]
pub struct PackedMatrix {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) precision: Precision,
    /// Steps of 16 words in a block.
    pub(super) steps: usize,
    pub(super) words: Buffer,
}

impl PackedMatrix {
    /// Packs row-major weights.
    ///
    /// # Errors
    /// If the number of weights is not `outputs · inputs`, or is zero.
    pub fn pack(
        pool: &ThreadPool,
        weights: Weights<'_>,
        outputs: usize,
        inputs: usize,
        precision: Precision,
    ) -> Result<Self, PackError> {
        let len = match weights {
            Weights::Bf16(weights) => weights.len(),
            Weights::F16(weights) => weights.len(),
            Weights::F32(weights) => weights.len(),
            Weights::Fp8(weights) => weights.codes.len(),
        };
        if outputs == 0 || inputs == 0 {
            return Err(PackError::Empty { outputs, inputs });
        }
        if outputs.checked_mul(inputs) != Some(len) {
            return Err(PackError::Length { outputs, inputs, len });
        }
        if let Weights::Fp8(weights) = weights {
            weights.check(outputs, inputs).map_err(|error| PackError::Coded(error.to_string()))?;
        }
        let padded = inputs.next_multiple_of(INPUT_PADDING);
        let steps = match precision {
            Precision::Bf16 => padded / 2,
            Precision::F32 => padded,
        };
        let mut words = Buffer::zeroed(outputs.div_ceil(LANES) * steps * LANES);
        pool.run_chunks(words.words_mut(), steps * LANES, |block, words| {
            let mut expanded = Vec::new();
            for lane in 0..LANES.min(outputs - block * LANES) {
                let output = block * LANES + lane;
                let row = output * inputs..(output + 1) * inputs;
                if let Weights::Fp8(weights) = weights {
                    expanded.resize(inputs, 0.0);
                    weights.expand_row(output, &mut expanded);
                }
                match (precision, weights) {
                    (Precision::Bf16, Weights::Bf16(w)) => pack_pairs(words, lane, &w[row], |w| w.to_bits()),
                    (Precision::Bf16, Weights::F16(w)) => {
                        pack_pairs(words, lane, &w[row], |w| f32_to_bf16(w.to_f32()));
                    }
                    (Precision::Bf16, Weights::F32(w)) => pack_pairs(words, lane, &w[row], f32_to_bf16),
                    (Precision::F32, Weights::Bf16(w)) => pack_single(words, lane, &w[row], bf16::to_f32),
                    (Precision::F32, Weights::F16(w)) => pack_single(words, lane, &w[row], f16::to_f32),
                    (Precision::F32, Weights::F32(w)) => pack_single(words, lane, &w[row], |w| w),
                    (Precision::Bf16, Weights::Fp8(_)) => pack_pairs(words, lane, &expanded, f32_to_bf16),
                    (Precision::F32, Weights::Fp8(_)) => pack_single(words, lane, &expanded, |w| w),
                }
            }
        });
        Ok(Self { outputs, inputs, precision, steps, words })
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Memory held, padding included: what one pass over the matrix reads.
    pub fn bytes(&self) -> usize {
        self.words.bytes()
    }

    /// The weights of one output as f32: a row of an embedding that shares its memory with the
    /// output matrix.
    ///
    /// # Panics
    /// If `output` or the length of `row` is not of this matrix.
    pub fn read_row(&self, output: usize, row: &mut [f32]) {
        assert!(output < self.outputs, "output {output} of a matrix of {} outputs", self.outputs);
        assert_eq!(row.len(), self.inputs, "a row of this matrix has {} inputs", self.inputs);
        let block = &self.words.words()[output / LANES * self.steps * LANES..][..self.steps * LANES];
        let lane = output % LANES;
        match self.precision {
            Precision::Bf16 => {
                for (input, value) in row.iter_mut().enumerate() {
                    let pair = block[input / 2 * LANES + lane];
                    *value = f32_from_bf16((pair >> (16 * (input % 2))) as u16);
                }
            }
            Precision::F32 => {
                for (input, value) in row.iter_mut().enumerate() {
                    *value = f32::from_bits(block[input * LANES + lane]);
                }
            }
        }
    }
}

/// Writes one output's weights into its lane, two inputs a word, the first in the low half.
fn pack_pairs<W: Copy>(block: &mut [u32], lane: usize, row: &[W], bits: impl Fn(W) -> u16) {
    for (step, pair) in row.chunks(2).enumerate() {
        let second = pair.get(1).map_or(0, |&w| u32::from(bits(w)));
        block[step * LANES + lane] = u32::from(bits(pair[0])) | second << 16;
    }
}

/// Writes one output's weights into its lane, one input a word.
fn pack_single<W: Copy>(block: &mut [u32], lane: usize, row: &[W], value: impl Fn(W) -> f32) {
    for (step, &w) in row.iter().enumerate() {
        block[step * LANES + lane] = value(w).to_bits();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> ThreadPool {
        ThreadPool::new(2).unwrap()
    }

    #[test]
    fn bf16_words_lie_where_the_kernels_read_them() {
        // Output o, input i has the value 100·o + i, which BF16 holds exactly up to 256.
        let weights: Vec<f32> = (0..2 * 33).map(|n| (100 * (n / 33) + n % 33) as f32).collect();
        let packed = PackedMatrix::pack(&pool(), Weights::F32(&weights), 2, 33, Precision::Bf16).unwrap();
        assert_eq!((packed.steps, packed.bytes()), (32, 32 * 64));
        let value = |step: usize, lane: usize, half: usize| {
            f32_from_bf16((packed.words.words()[step * LANES + lane] >> (16 * half)) as u16)
        };
        assert_eq!((value(0, 0, 0), value(0, 0, 1), value(0, 1, 0)), (0.0, 1.0, 100.0));
        assert_eq!((value(5, 1, 1), value(16, 1, 0)), (111.0, 132.0));
        // Padding: the missing partner of input 32, later inputs, missing outputs.
        assert_eq!((value(16, 1, 1), value(17, 0, 0), value(0, 2, 0)), (0.0, 0.0, 0.0));
    }

    #[test]
    fn rows_read_back_as_stored_from_every_type() {
        let exact: Vec<f32> = (0..17 * 80).map(|n| (n % 251) as f32 / 4.0).collect();
        let as_bf16: Vec<bf16> = exact.iter().map(|&w| bf16::from_f32(w)).collect();
        let as_f16: Vec<f16> = exact.iter().map(|&w| f16::from_f32(w)).collect();
        for precision in [Precision::Bf16, Precision::F32] {
            for weights in [Weights::Bf16(&as_bf16), Weights::F16(&as_f16), Weights::F32(&exact)] {
                let packed = PackedMatrix::pack(&pool(), weights, 17, 80, precision).unwrap();
                for output in 0..17 {
                    let mut row = [f32::NAN; 80];
                    packed.read_row(output, &mut row);
                    assert_eq!(row, exact[output * 80..][..80]);
                }
            }
        }
    }

    #[test]
    fn fp8_is_packed_as_what_it_expands_to() {
        let (outputs, inputs) = (150, 161);
        let values: Vec<f32> =
            (0..outputs * inputs).map(|n| ((n * 37 % 501) as f32 - 250.0) / 77.0).collect();
        let matrix = oscar_backend::Fp8Matrix::quantize(&values, outputs, inputs);
        let expanded = matrix.blocks().expand(inputs);
        for precision in [Precision::Bf16, Precision::F32] {
            let pack = |weights| PackedMatrix::pack(&pool(), weights, outputs, inputs, precision).unwrap();
            let (codes, plain) = (pack(Weights::Fp8(matrix.blocks())), pack(Weights::F32(&expanded)));
            assert_eq!(codes.words.words(), plain.words.words());
        }
        let few = Fp8Blocks { scales: &matrix.scales[1..], ..matrix.blocks() };
        let error = PackedMatrix::pack(&pool(), Weights::Fp8(few), outputs, inputs, Precision::Bf16);
        assert!(error.unwrap_err().to_string().contains("3 scales"));
    }

    #[test]
    fn wrong_sizes_are_refused_with_the_numbers() {
        let weights = [0.0; 11];
        for (outputs, inputs) in [(3, 4), (usize::MAX, 2)] {
            let error = PackedMatrix::pack(&pool(), Weights::F32(&weights), outputs, inputs, Precision::Bf16);
            assert_eq!(error.unwrap_err(), PackError::Length { outputs, inputs, len: 11 });
        }
        let error = PackedMatrix::pack(&pool(), Weights::F32(&[]), 0, 4, Precision::F32).unwrap_err();
        assert!(error.to_string().contains("0×4"), "{error}");
    }
}
