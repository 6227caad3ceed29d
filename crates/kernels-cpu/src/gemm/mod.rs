//! Matrix products with packed weights: `y = x · Wᵀ`, the linear layer of a model.
//!
//! The work is cut into tiles of up to 96 rows by 64 outputs; a kernel computes all sums of a tile,
//! and this module prepares `x`, hands out tiles and writes `y`.
//!
//! Invariant: every sum is accumulated over the inputs in one fixed order, by the same instructions
//! whatever the number of rows, so a row's result is bit-identical alone, in any batch and with any
//! number of threads.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_coded;
mod coded;
mod mxfp4;
mod packed;
pub(crate) mod scalar;
#[cfg(test)]
mod tests;
pub(crate) mod tile;

pub use coded::{CodedMatrix, ExpertMatrix};
pub(crate) use coded::{CodedTile, Codes};
pub use mxfp4::MxMatrix;
pub use packed::{INPUT_PADDING, PackError, PackedMatrix, Precision, Weights};

use crate::buffer::Buffer;
use crate::disjoint::Disjoint;
use crate::kernels::Kernels;
use crate::ops::convert::{f32_from_bf16, f32_to_bf16};
use crate::pool::ThreadPool;
use tile::{GROUP, GROUP_BLOCKS, LANES, TILE_ROWS, Tile, XForm};

/// What happens to a product before it is written.
#[derive(Clone, Copy, Debug, Default)]
pub struct Epilogue<'a> {
    /// Added to every row: one value per output.
    pub bias: Option<&'a [f32]>,
    /// Adds to what `y` holds, as a residual connection wants, instead of replacing it.
    pub accumulate: bool,
}

/// Memory for the prepared rows of `x`, kept from call to call.
#[derive(Debug, Default)]
pub struct GemmScratch {
    x: Buffer,
}

/// A task reads at least this much of the weights (a row or two; more rows count as more): some
/// microseconds of work, against the fraction of one that claiming it takes.
const TASK_BYTES: usize = 128 << 10;
/// Elements of `x` that one task prepares.
const PREPARE_ELEMENTS: usize = 32 << 10;

impl PackedMatrix {
    /// `y[r] = W · x[r]` for `m` rows, with bias and accumulation as the epilogue says. `x` holds
    /// `m` rows of `inputs` values, `y` `m` rows of `outputs` values. At BF16 precision `x` is
    /// rounded to BF16 first.
    ///
    /// # Panics
    /// If a slice has the wrong length.
    pub fn linear(
        &self,
        kernels: &Kernels,
        pool: &ThreadPool,
        x: &[f32],
        m: usize,
        y: &mut [f32],
        epilogue: Epilogue<'_>,
        scratch: &mut GemmScratch,
    ) {
        assert_eq!(x.len(), m * self.inputs, "x: {m} rows of {} inputs", self.inputs);
        assert_eq!(y.len(), m * self.outputs, "y: {m} rows of {} outputs", self.outputs);
        assert!(
            epilogue.bias.is_none_or(|bias| bias.len() == self.outputs),
            "bias: {} outputs",
            self.outputs
        );
        if m == 0 {
            return;
        }
        let (kernel, form) = match self.precision {
            Precision::Bf16 => (kernels.gemm.bf16, kernels.gemm.bf16_x),
            Precision::F32 => (kernels.gemm.f32, XForm::F32),
        };
        let x_stride = row_stride(self.steps * form.words_per_step());
        scratch.x.reserve(m * x_stride);
        let prepared = &mut scratch.x.words_mut()[..m * x_stride];
        let rows_per_task = (PREPARE_ELEMENTS / self.inputs).max(1);
        pool.run_chunks(prepared, rows_per_task * x_stride, |index, words| {
            let rows = &x[index * rows_per_task * self.inputs..];
            for (row, words) in rows.chunks_exact(self.inputs).zip(words.chunks_exact_mut(x_stride)) {
                prepare_row(row, form, words);
            }
        });

        let plan = Plan::new(self, m, pool.threads());
        let (prepared, y) = (&*prepared, Disjoint::new(y));
        pool.run(plan.tasks(), &|task| {
            let mut sums = Sums([0.0; TILE_ROWS * GROUP]);
            for index in plan.tiles_of(task) {
                let (group, first_row) = (index / plan.row_tiles, index % plan.row_tiles * TILE_ROWS);
                let first_block = group * GROUP_BLOCKS;
                let blocks = GROUP_BLOCKS.min(plan.blocks - first_block);
                let rows = TILE_ROWS.min(m - first_row);
                let block_words = self.steps * LANES;
                let mut tile = Tile {
                    weights: &self.words.words()[first_block * block_words..][..blocks * block_words],
                    blocks,
                    steps: self.steps,
                    x: &prepared[first_row * x_stride..],
                    x_stride,
                    rows,
                    sums: &mut sums.0,
                };
                // SAFETY: `Kernels` exist only for variants this processor can run.
                unsafe { kernel(&mut tile) };
                let first_output = group * GROUP;
                let outputs = GROUP.min(self.outputs - first_output);
                for row in 0..rows {
                    let start = (first_row + row) * self.outputs + first_output;
                    // SAFETY: tiles are distinct, and each owns its rows and outputs of `y`.
                    let y = unsafe { y.part(start..start + outputs) };
                    write_row(&sums.0[row * GROUP..][..outputs], first_output, epilogue, y);
                }
            }
        });
    }
}

/// The sums of one tile, aligned for the stores of the kernels.
#[repr(align(64))]
struct Sums([f32; TILE_ROWS * GROUP]);

/// How the tiles of a product are dealt to tasks. Has no influence on the numbers.
struct Plan {
    blocks: usize,
    row_tiles: usize,
    tiles: usize,
    tiles_per_task: usize,
}

impl Plan {
    fn new(matrix: &PackedMatrix, m: usize, threads: usize) -> Self {
        let blocks = matrix.outputs.div_ceil(LANES);
        let row_tiles = m.div_ceil(TILE_ROWS);
        let tiles = blocks.div_ceil(GROUP_BLOCKS) * row_tiles;
        // Up to four rows cost no more than reading the weights.
        let cost = matrix.steps * GROUP * size_of::<u32>() * m.min(TILE_ROWS).div_ceil(4);
        let tiles_per_task = if tiles * cost <= TASK_BYTES {
            tiles
        } else {
            TASK_BYTES.div_ceil(cost).min(tiles.div_ceil(threads))
        };
        Self { blocks, row_tiles, tiles, tiles_per_task }
    }

    fn tasks(&self) -> usize {
        self.tiles.div_ceil(self.tiles_per_task)
    }

    /// Neighbouring tiles differ in their rows first, and so find their weights in the cache.
    fn tiles_of(&self, task: usize) -> std::ops::Range<usize> {
        task * self.tiles_per_task..self.tiles.min((task + 1) * self.tiles_per_task)
    }
}

/// Words between two prepared rows: an odd number of cache lines, so that the rows of a strip do
/// not all fall into the same set of the cache.
pub(crate) fn row_stride(words: usize) -> usize {
    let lines = words.div_ceil(LANES);
    (lines | 1) * LANES
}

/// Writes one row of `x` in the form the kernel asks for, zeros behind.
pub(crate) fn prepare_row(row: &[f32], form: XForm, words: &mut [u32]) {
    let used = match form {
        XForm::F32 => {
            words.iter_mut().zip(row).for_each(|(word, &x)| *word = x.to_bits());
            row.len()
        }
        XForm::Bf16AsF32 => {
            let rounded = row.iter().map(|&x| f32_from_bf16(f32_to_bf16(x)).to_bits());
            words.iter_mut().zip(rounded).for_each(|(word, x)| *word = x);
            row.len()
        }
        XForm::Bf16Pair => {
            let (pairs, last) = row.as_chunks::<2>();
            for (word, &[first, second]) in words.iter_mut().zip(pairs) {
                *word = u32::from(f32_to_bf16(first)) | u32::from(f32_to_bf16(second)) << 16;
            }
            if let [x] = last {
                words[pairs.len()] = u32::from(f32_to_bf16(*x));
            }
            row.len().div_ceil(2)
        }
    };
    words[used..].fill(0);
}

/// `y = (sums + bias) + y`, each part as the epilogue says.
fn write_row(sums: &[f32], first_output: usize, epilogue: Epilogue<'_>, y: &mut [f32]) {
    let bias = epilogue.bias.map(|bias| &bias[first_output..][..sums.len()]);
    match (bias, epilogue.accumulate) {
        (None, false) => y.copy_from_slice(sums),
        (None, true) => y.iter_mut().zip(sums).for_each(|(y, sum)| *y += sum),
        (Some(bias), false) => {
            y.iter_mut().zip(sums).zip(bias).for_each(|((y, sum), bias)| *y = sum + bias);
        }
        (Some(bias), true) => {
            y.iter_mut().zip(sums).zip(bias).for_each(|((y, sum), bias)| *y += sum + bias);
        }
    }
}
