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

/// Rows of a block in large steps: the block reads its rotation once for all of them.
const ROWS_PER_BLOCK: usize = 16;
/// Steps of up to this many rows have a block for each row.
const ROWS_ALONE: usize = 16;

/// `append.cu` for one head size.
#[derive(Clone, Copy)]
pub struct AppendKernel {
    function: Function,
    head_dim: usize,
}

impl AppendKernel {
    pub fn new(kernels: &Kernels, head_dim: usize) -> Result<Self> {
        let defines = vec![("HEAD_DIM", head_dim)];
        let function = kernels.function(&APPEND, &defines, c"append", Self::shared(head_dim))?;
        Ok(Self { function, head_dim })
    }

    /// Bytes of dynamic shared memory: vectors in two parts, and the rotation if it is small
    /// enough.
    fn shared(head_dim: usize) -> usize {
        const VECTORS: usize = 16;
        let rotation = if head_dim <= 128 { head_dim * head_dim * 4 } else { 16 };
        2 * VECTORS * (head_dim + 8) * 2 + rotation
    }

    /// Stores the keys and values of a layer and writes rotated queries to `queries`.
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
    ) -> Result<()> {
        let (shape, rows) = (pages.shape(), tables.rows as usize);
        let rows_per_block = if rows <= ROWS_ALONE { 1 } else { ROWS_PER_BLOCK };
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
        let grid =
            LaunchShape::grid2(rows.div_ceil(rows_per_block), shape.kv_heads, 2 * self.head_dim as u32);
        let grid = grid.shared(Self::shared(self.head_dim)).overlapping();
        // SAFETY: the caller's promise.
        unsafe { device.launch(self.function, grid, params) }
    }
}
