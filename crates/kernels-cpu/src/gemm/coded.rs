//! FP8 weights that stay FP8 in memory: half the bytes of BF16 to read.
//!
//! Codes lie in the order of a BF16 [`PackedMatrix`], a byte instead of two: blocks of 16 outputs,
//! `[in / 2][16 outputs][2 inputs]`. A task expands the blocks it multiplies into a buffer that
//! stays in its core's cache. The words are those that [`PackedMatrix::pack`] would have stored, so
//! the products are the same to the last bit. A few rows multiply the codes themselves where a
//! kernel expands them in registers ([`CodedTile`]).

use oscar_backend::{FP8_BLOCK, Fp8Blocks, MXFP4_GROUP, ScaleGrid};

use super::mxfp4::MxMatrix;
use super::packed::{INPUT_PADDING, PackError, PackedMatrix};
use super::tile::{GROUP, GROUP_BLOCKS, LANES};
use crate::buffer::Buffer;
use crate::kernels::Kernels;
use crate::pool::ThreadPool;

/// Inputs in a step.
pub(super) const STEP_INPUTS: usize = 2;
/// Bytes of a step of FP8 codes.
pub(super) const STEP_BYTES: usize = LANES * STEP_INPUTS;

/// A matrix of FP8 codes.
#[derive(Debug)]
pub struct CodedMatrix {
    outputs: usize,
    inputs: usize,
    steps: usize,
    codes: Buffer,
    scales: Vec<f32>,
    grid: ScaleGrid,
}

impl CodedMatrix {
    /// # Errors
    /// If codes or scales are not those of a matrix of this shape, or there are none.
    pub fn pack(
        pool: &ThreadPool,
        weights: Fp8Blocks<'_>,
        outputs: usize,
        inputs: usize,
    ) -> Result<Self, PackError> {
        if outputs == 0 || inputs == 0 {
            return Err(PackError::Empty { outputs, inputs });
        }
        weights.check(outputs, inputs).map_err(|error| PackError::Coded(error.to_string()))?;
        let steps = inputs.next_multiple_of(INPUT_PADDING) / STEP_INPUTS;
        let block_words = steps * STEP_BYTES / size_of::<u32>();
        let mut codes = Buffer::zeroed(outputs.div_ceil(LANES) * block_words);
        pool.run_chunks(codes.words_mut(), block_words, |block, words| {
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(words);
            for lane in 0..LANES.min(outputs - block * LANES) {
                let row = &weights.codes[(block * LANES + lane) * inputs..][..inputs];
                for (input, &code) in row.iter().enumerate() {
                    bytes[input / 2 * STEP_BYTES + 2 * lane + input % 2] = code;
                }
            }
        });
        Ok(Self { outputs, inputs, steps, codes, scales: weights.scales.to_vec(), grid: weights.grid })
    }

    /// The codes of four blocks from `first` on, a multiple of four.
    fn codes(&self, first: usize) -> Codes<'_> {
        let bytes = self.steps * STEP_BYTES;
        let codes = &bytemuck::cast_slice(self.codes.words())[first * bytes..][..GROUP_BLOCKS * bytes];
        match self.grid {
            ScaleGrid::Blocks => {
                let columns = self.inputs.div_ceil(FP8_BLOCK);
                let scales = &self.scales[first * LANES / FP8_BLOCK * columns..][..columns];
                Codes::Fp8Blocks { codes, scales }
            }
            ScaleGrid::Channels => {
                Codes::Fp8Channels { codes, scales: &self.scales[first * LANES..][..GROUP] }
            }
        }
    }

    /// Writes the BF16 words of `blocks` blocks from `first` on.
    fn expand(&self, kernels: &Kernels, first: usize, blocks: usize, words: &mut [u32]) {
        let block_bytes = self.steps * STEP_BYTES;
        let codes: &[u8] = bytemuck::cast_slice(self.codes.words());
        for (block, words) in (first..first + blocks).zip(words.chunks_exact_mut(self.steps * LANES)) {
            let codes = &codes[block * block_bytes..][..block_bytes];
            match self.grid {
                ScaleGrid::Channels => {
                    let of = |lane| self.scales.get(block * LANES + lane).copied().unwrap_or(0.0);
                    kernels.expand_fp8(codes, &std::array::from_fn(of), words);
                }
                ScaleGrid::Blocks => {
                    let steps = FP8_BLOCK / STEP_INPUTS;
                    let row = block * LANES / FP8_BLOCK * self.inputs.div_ceil(FP8_BLOCK);
                    let parts = codes.chunks(steps * STEP_BYTES).zip(words.chunks_mut(steps * LANES));
                    // The padding of the inputs may begin a block of its own, of zeros.
                    for ((codes, words), column) in parts.zip(0..) {
                        let scale = self.scales.get(row + column).copied().unwrap_or(0.0);
                        kernels.expand_fp8(codes, &[scale; LANES], words);
                    }
                }
            }
        }
    }
}

/// The codes of four blocks, one block after another, with their scales.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Codes<'a> {
    /// A scale for every 128 inputs of all four blocks.
    Fp8Blocks { codes: &'a [u8], scales: &'a [f32] },
    /// A scale for each of the 64 outputs.
    Fp8Channels { codes: &'a [u8], scales: &'a [f32] },
    /// A byte for two inputs; scales of every 32 inputs, `[block][inputs / 32][16 outputs]`.
    Mxfp4 { codes: &'a [u8], scales: &'a [u8] },
}

/// Like [`Tile`](super::tile::Tile), with weights that the kernel expands: four blocks.
#[derive(Debug)]
pub(crate) struct CodedTile<'a> {
    pub weights: Codes<'a>,
    pub steps: usize,
    /// Rows of BF16 pairs, a word for each step.
    pub x: &'a [u32],
    pub x_stride: usize,
    pub rows: usize,
    pub sums: &'a mut [f32],
}

impl CodedTile<'_> {
    /// Checks the extents once, so that a kernel may then read without looking.
    ///
    /// # Panics
    /// If a slice is shorter than the shape says.
    pub fn check(&self) {
        let steps = GROUP_BLOCKS * self.steps;
        assert!(self.rows > 0 && self.steps.is_multiple_of(MXFP4_GROUP / STEP_INPUTS));
        match self.weights {
            Codes::Fp8Blocks { codes, .. } => assert_eq!(codes.len(), steps * STEP_BYTES),
            Codes::Fp8Channels { codes, scales } => {
                assert!(codes.len() == steps * STEP_BYTES && scales.len() == GROUP);
            }
            Codes::Mxfp4 { codes, scales } => {
                assert!(
                    codes.len() == steps * LANES && scales.len() * MXFP4_GROUP == codes.len() * STEP_INPUTS
                );
            }
        }
        assert!(self.x.len() >= (self.rows - 1) * self.x_stride + self.steps);
        assert!(self.sums.len() >= self.rows * GROUP);
    }
}

/// The weights of an expert: BF16, f32, FP8 or MXFP4.
#[derive(Debug)]
pub enum ExpertMatrix {
    Packed(PackedMatrix),
    Coded(CodedMatrix),
    Mxfp4(MxMatrix),
}

impl ExpertMatrix {
    pub fn outputs(&self) -> usize {
        match self {
            Self::Packed(matrix) => matrix.outputs,
            Self::Coded(matrix) => matrix.outputs,
            Self::Mxfp4(matrix) => matrix.outputs,
        }
    }

    pub fn inputs(&self) -> usize {
        match self {
            Self::Packed(matrix) => matrix.inputs,
            Self::Coded(matrix) => matrix.inputs,
            Self::Mxfp4(matrix) => matrix.inputs,
        }
    }

    /// Steps of a block.
    pub fn steps(&self) -> usize {
        match self {
            Self::Packed(matrix) => matrix.steps,
            Self::Coded(matrix) => matrix.steps,
            Self::Mxfp4(matrix) => matrix.steps,
        }
    }

    /// Memory held: what one pass reads.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Packed(matrix) => matrix.bytes(),
            Self::Coded(matrix) => matrix.codes.bytes() + 4 * matrix.scales.len(),
            Self::Mxfp4(matrix) => matrix.bytes(),
        }
    }

    /// The codes of four blocks from `first` on, if the matrix has codes and all their outputs.
    pub(crate) fn codes(&self, first: usize) -> Option<Codes<'_>> {
        let whole = (first + GROUP_BLOCKS) * LANES <= self.outputs();
        match self {
            Self::Coded(matrix) if whole => Some(matrix.codes(first)),
            Self::Mxfp4(matrix) if whole => Some(matrix.codes(first)),
            _ => None,
        }
    }

    /// The words of `blocks` blocks from `first` on, as kernels read them; `room` keeps those that
    /// are expanded.
    pub fn words<'a>(
        &'a self,
        kernels: &Kernels,
        first: usize,
        blocks: usize,
        room: &'a mut Buffer,
    ) -> &'a [u32] {
        let (first_word, count) = (first * self.steps() * LANES, blocks * self.steps() * LANES);
        let mut expand = |write: &dyn Fn(&mut [u32])| {
            room.reserve(count);
            write(&mut room.words_mut()[..count]);
        };
        match self {
            Self::Packed(matrix) => return &matrix.words.words()[first_word..][..count],
            Self::Coded(matrix) => expand(&|words| matrix.expand(kernels, first, blocks, words)),
            Self::Mxfp4(matrix) => expand(&|words| matrix.expand(kernels, first, blocks, words)),
        }
        &room.words()[..count]
    }
}

#[cfg(test)]
mod tests {
    use super::super::tile::Tile;
    use super::*;
    use crate::cpu::Variant;
    use crate::kernels::testing::kernels_or_note;
    use crate::{Precision, Weights};
    use oscar_backend::{Fp8Matrix, Mxfp4Blocks};

    #[test]
    fn codes_expand_to_the_words_of_a_packed_matrix() {
        let pool = ThreadPool::new(2).unwrap();
        for (outputs, inputs) in [(150, 161), (16, 32), (1, 1), (33, 300)] {
            // Every code that is a number, subnormals included.
            let codes: Vec<u8> = (0..outputs * inputs)
                .map(|i| (i * 167 % 256) as u8)
                .map(|code| if code & 0x7f == 0x7f { 0x7e } else { code })
                .collect();
            for grid in [ScaleGrid::Blocks, ScaleGrid::Channels] {
                let count = grid.shape(outputs, inputs).iter().product();
                let scales: Vec<f32> = (0..count).map(|i| 0.003 * (1 + i * 7 % 11) as f32).collect();
                let blocks = Fp8Blocks { codes: &codes, scales: &scales, grid };
                let packed =
                    PackedMatrix::pack(&pool, Weights::Fp8(blocks), outputs, inputs, Precision::Bf16)
                        .unwrap();
                let coded = ExpertMatrix::Coded(CodedMatrix::pack(&pool, blocks, outputs, inputs).unwrap());
                for kernels in Variant::ALL.into_iter().filter_map(kernels_or_note) {
                    let (mut room, blocks) = (Buffer::zeroed(0), outputs.div_ceil(LANES));
                    let words = coded.words(kernels, 0, blocks, &mut room);
                    assert_eq!(words, packed.words.words(), "{outputs} × {inputs} {grid:?}");
                }
            }
        }
        let matrix = Fp8Matrix::quantize(&[1.0; 6], 2, 3);
        assert!(CodedMatrix::pack(&pool, matrix.blocks(), 3, 3).is_err());
    }

    /// Kernels that expand codes in registers give the bits of products with expanded weights.
    #[test]
    fn coded_avx512_matches_expanded_weights() {
        let pool = ThreadPool::new(1).unwrap();
        let Some(kernels) = kernels_or_note(Variant::Avx512) else { return };
        let kernel = kernels.gemm.coded.unwrap();
        let (outputs, inputs) = (192, 224);
        let codes: Vec<u8> =
            (0..outputs * inputs).map(|i| (i * 167 % 253 % 127) as u8 | (i as u8 & 0x80)).collect();
        let fp8 = |grid: ScaleGrid| {
            let count = grid.shape(outputs, inputs).iter().product();
            let scales: Vec<f32> = (0..count).map(|i| 0.003 * (1 + i * 7 % 11) as f32).collect();
            let blocks = Fp8Blocks { codes: &codes, scales: &scales, grid };
            ExpertMatrix::Coded(CodedMatrix::pack(&pool, blocks, outputs, inputs).unwrap())
        };
        let scales: Vec<u8> = (0..outputs * inputs / 32).map(|i| (110 + i * 7 % 30) as u8).collect();
        let mxfp4 = Mxfp4Blocks { codes: &codes[..outputs * inputs / 2], scales: &scales };
        let mxfp4 = ExpertMatrix::Mxfp4(MxMatrix::pack(&pool, mxfp4, outputs, inputs).unwrap());
        for matrix in [fp8(ScaleGrid::Blocks), fp8(ScaleGrid::Channels), mxfp4] {
            let (steps, x_stride, mut room) = (matrix.steps(), matrix.steps() + 16, Buffer::zeroed(0));
            let x: Vec<u32> = (0..9 * x_stride as u32)
                .map(|i| ((i * 40_503 % 0x3f00) << 16) | (i * 977 % 0xbe00))
                .collect();
            for rows in 1..=9 {
                for first in (0..outputs / LANES).step_by(GROUP_BLOCKS) {
                    let (mut expected, mut sums) = ([0.0; 9 * GROUP], [0.0; 9 * GROUP]);
                    let weights = matrix.words(kernels, first, GROUP_BLOCKS, &mut room);
                    let (blocks, x) = (GROUP_BLOCKS, &x[..]);
                    let mut tile = Tile { weights, blocks, steps, x, x_stride, rows, sums: &mut expected };
                    let weights = matrix.codes(first).unwrap();
                    let mut coded = CodedTile { weights, steps, x, x_stride, rows, sums: &mut sums };
                    // SAFETY: the processor has this variant.
                    unsafe {
                        (kernels.gemm.bf16)(&mut tile);
                        kernel(&mut coded);
                    }
                    assert!(expected[0] != 0.0 && expected.map(f32::to_bits) == sums.map(f32::to_bits));
                }
            }
            assert!(matrix.codes(outputs / LANES - 3).is_none(), "the last block is missing");
        }
    }
}
