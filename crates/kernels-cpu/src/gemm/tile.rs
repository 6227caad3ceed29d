//! The unit of work of a matrix product, as every kernel sees it.

use super::coded::CodedTile;

/// Outputs side by side in one packed block: the lanes of a 512-bit vector, the columns of an AMX
/// tile.
pub const LANES: usize = 16;
/// Blocks a tile of work spans at most.
pub const GROUP_BLOCKS: usize = 4;
/// Outputs of a full group of blocks, and the row stride of [`Tile::sums`].
pub const GROUP: usize = LANES * GROUP_BLOCKS;
/// Rows of `x` a tile of work spans at most: a multiple of every kernel's strip (4, 6 and 32 rows).
/// It bounds the buffer of sums to 24 KiB, and is large enough that reading the weights once per
/// tile costs little.
pub const TILE_ROWS: usize = 96;

/// `rows × blocks·16` sums of products over the whole inner dimension.
///
/// A *step* is 64 bytes of one block: for BF16 two inputs of 16 outputs, `[lane][2]`; for F32 one
/// input of 16 outputs. Everything is counted in 32-bit words: a step is 16 of them.
#[derive(Debug)]
pub struct Tile<'a> {
    /// `blocks` blocks of `steps` steps, one after another.
    pub weights: &'a [u32],
    pub blocks: usize,
    pub steps: usize,
    /// Row `r` starts at word `r * x_stride`, in the form the kernel asks for ([`XForm`]).
    pub x: &'a [u32],
    pub x_stride: usize,
    pub rows: usize,
    /// The sum for row `r`, output `o` goes to `r * GROUP + o`. What it held before is ignored.
    pub sums: &'a mut [f32],
}

/// How a kernel wants the rows of `x` prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XForm {
    /// One word a step: two inputs as BF16, the first in the low half.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // asked for by x86 kernels only
    Bf16Pair,
    /// Two words a step: the same two inputs, rounded to BF16, as f32.
    Bf16AsF32,
    /// One word a step: one input as f32.
    F32,
}

impl XForm {
    pub const fn words_per_step(self) -> usize {
        match self {
            Self::Bf16Pair | Self::F32 => 1,
            Self::Bf16AsF32 => 2,
        }
    }
}

impl Tile<'_> {
    /// Checks the extents once, so that a kernel may then read without looking.
    ///
    /// # Panics
    /// If a slice is shorter than the shape says.
    pub fn check(&self, form: XForm) {
        assert!((1..=GROUP_BLOCKS).contains(&self.blocks) && (1..=TILE_ROWS).contains(&self.rows));
        assert_eq!(self.weights.len(), self.blocks * self.steps * LANES);
        assert!(self.x.len() >= (self.rows - 1) * self.x_stride + self.steps * form.words_per_step());
        assert!(self.sums.len() >= self.rows * GROUP);
    }

    /// First word of a block's weights.
    pub fn block(&self, block: usize) -> &[u32] {
        &self.weights[block * self.steps * LANES..][..self.steps * LANES]
    }
}

/// The matrix kernels of one variant.
///
/// The functions are `unsafe` because they use the variant's instructions: the caller vouches that
/// the processor has them. [`crate::Kernels`] only exists where it does.
#[derive(Clone, Copy, Debug)]
pub struct GemmKernels {
    pub bf16: unsafe fn(&mut Tile<'_>),
    pub bf16_x: XForm,
    pub f32: unsafe fn(&mut Tile<'_>),
    /// Few rows with weights that it expands in registers, to the bits of `bf16`. Absent where
    /// weights are expanded in memory for any number of rows.
    pub coded: Option<unsafe fn(&mut CodedTile<'_>)>,
}
