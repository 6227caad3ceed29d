//! The way of new heads into the cache: norms, RoPE, rotation, storage.
//!
//! Two kernels implement it: `append.cu` for any rows, and decode attention itself in most steps of
//! single tokens.

use crate::device::{Device, Function, LaunchShape};
use crate::error::Result;
use crate::kernels::Kernels;
use crate::layout::shared_struct;
use crate::memory::DevicePtr;
use crate::pages::{CudaPages, HeadPages};
use crate::sources::APPEND;
use crate::step::StepTables;

shared_struct! {
    /// Constants of a layer; `None` for parts that a model does not have.
    #[derive(Default)]
    pub struct HeadConstants {
        pub query_norm: Option<DevicePtr<f32>>,
        pub key_norm: Option<DevicePtr<f32>>,
        pub cosines: Option<DevicePtr<f32>>,
        pub sines: Option<DevicePtr<f32>>,
        pub rotation: Option<DevicePtr<[u32; 4]>>,
        pub mean: Option<DevicePtr<f32>>,
        pub eps: f32,
    }
}

/// Rows of `[queries | keys | values]`, f32, as a matrix product made them.
#[derive(Clone, Copy, Debug)]
pub struct Projections {
    pub rows: DevicePtr<f32>,
    pub constants: HeadConstants,
}

shared_struct! {
    pub(super) struct AppendParams {
        step: StepTables,
        pages: DevicePtr<HeadPages>,
        qkv: DevicePtr<f32>,
        queries: DevicePtr<f32>,
        heads: HeadConstants,
        query_heads: u32,
        kv_heads: u32,
        rows_per_block: u32,
    }
}

/// Rows of a block of `append` in large steps: the block reads its rotation once for all of them.
const ROWS_PER_BLOCK: usize = 16;
/// Steps of up to this many rows have a block for each row.
const ROWS_ALONE: usize = 16;
/// Most rows of a block of `append_rows`, a multiple of [`ROWS_PER_BLOCK`].
const MOST_ROWS_PER_BLOCK: usize = 128;
/// Threads of a block of `append_rows`, and its blocks on a multiprocessor.
const PROMPT_BLOCK: (u32, usize) = (256, 2);

/// `append.cu` for one head size.
#[derive(Clone, Copy)]
pub struct AppendKernel {
    /// For few rows, and for taps.
    few: Function,
    /// For many rows.
    many: Option<Function>,
    head_dim: usize,
}

impl AppendKernel {
    pub fn new(kernels: &Kernels, head_dim: usize) -> Result<Self> {
        let defines = vec![("HEAD_DIM", head_dim)];
        let few = kernels.function(&APPEND, &defines, c"append", Self::shared(head_dim))?;
        let many = || kernels.function(&APPEND, &defines, c"append_rows", Self::rotation(head_dim) / 2);
        Ok(Self { few, many: (head_dim <= 128).then(many).transpose()?, head_dim })
    }

    /// Bytes of a head's rotation in `append`; `append_rows` keeps half as many.
    fn rotation(head_dim: usize) -> usize {
        head_dim * head_dim * 4
    }

    /// Bytes of shared memory of `append`: vectors in two parts, and the rotation if it is small
    /// enough.
    fn shared(head_dim: usize) -> usize {
        const VECTORS: usize = 16;
        let rotation = if head_dim <= 128 { Self::rotation(head_dim) } else { 16 };
        2 * VECTORS * (head_dim + 8) * 2 + rotation
    }

    /// Stores the keys and values of a layer and writes rotated queries to `queries`. With `tapped`,
    /// the projections get QK-norm and RoPE in place.
    ///
    /// # Safety
    /// The tables must be of a step over `pages`, on the device, and each new row must have a full
    /// page with memory. The projections must have the step's rows, and constants for the heads of
    /// the model and all positions of the step. `queries` must have as many rows of query heads.
    pub unsafe fn launch(
        &self,
        device: &Device,
        layer: usize,
        tables: &StepTables,
        pages: &CudaPages,
        projections: Projections,
        queries: DevicePtr<f32>,
        tapped: bool,
    ) -> Result<()> {
        let (shape, rows) = (pages.shape(), tables.rows as usize);
        let many = self.many.filter(|_| rows > ROWS_ALONE && !tapped);
        let rows_per_block = match many {
            Some(_) => {
                let blocks = device.properties().multiprocessors as usize * PROMPT_BLOCK.1;
                let even = (rows * shape.kv_heads).div_ceil(blocks).next_multiple_of(ROWS_PER_BLOCK);
                even.min(MOST_ROWS_PER_BLOCK)
            }
            None if rows <= ROWS_ALONE => 1,
            None => ROWS_PER_BLOCK,
        };
        let params = AppendParams {
            step: *tables,
            pages: pages.layer(layer),
            qkv: projections.rows,
            queries,
            heads: projections.constants,
            query_heads: shape.query_heads as u32,
            kv_heads: shape.kv_heads as u32,
            rows_per_block: rows_per_block as u32,
        };
        let (function, threads, shared) = match many {
            Some(many) => (many, PROMPT_BLOCK.0, Self::rotation(self.head_dim) / 2),
            None => (self.few, 2 * self.head_dim as u32, Self::shared(self.head_dim)),
        };
        let grid = LaunchShape::grid2(rows.div_ceil(rows_per_block), shape.kv_heads, threads);
        // SAFETY: the caller's promise.
        unsafe { device.launch(function, grid.shared(shared).overlapping(), params) }
    }
}
