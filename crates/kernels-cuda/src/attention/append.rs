//! The way of new heads into the cache: norms, RoPE, rotation, storage.
//!
//! Two kernels implement it: `append.cu` for any rows, and decode attention itself in most steps of
//! single tokens.
//!
//! **Invariant:** [`HeadConstants`] has the layout of the struct in `kernels/heads.cuh`.

use crate::device::{Device, Function, KernelParams, LaunchShape};
use crate::error::Result;
use crate::kernels::Kernels;
use crate::pages::CudaPages;
use crate::sources::APPEND;
use crate::step::StepTables;

/// `HeadConstants` of the kernels: device addresses, 0 for parts that a model does not have.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::NoUninit)]
pub struct HeadConstants {
    pub query_norm: u64,
    pub key_norm: u64,
    pub cosines: u64,
    pub sines: u64,
    pub rotation: u64,
    pub mean: u64,
    pub eps: f32,
    pub unused: u32,
}

/// Rows of `[queries | keys | values]`, f32, as a matrix product made them.
#[derive(Clone, Copy, Debug)]
pub struct Projections {
    /// Device address.
    pub rows: u64,
    pub constants: HeadConstants,
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct AppendParams {
    step: StepTables,
    pages: u64,
    qkv: u64,
    queries: u64,
    heads: HeadConstants,
    query_heads: u32,
    kv_heads: u32,
    rows_per_block: u32,
    unused: u32,
}

// SAFETY: the struct of `append.cu`, filled with addresses of live buffers.
unsafe impl KernelParams for AppendParams {}

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

    /// Bytes of dynamic shared memory: vectors in two parts, and the rotation if it is small enough.
    fn shared(head_dim: usize) -> usize {
        const VECTORS: usize = 16;
        let rotation = if head_dim <= 128 { head_dim * head_dim * 4 } else { 16 };
        2 * VECTORS * (head_dim + 8) * 2 + rotation
    }

    /// Stores the keys and values of a layer and writes rotated queries to `queries`.
    pub fn launch(
        &self,
        device: &Device,
        layer: usize,
        tables: &StepTables,
        pages: &CudaPages,
        projections: Projections,
        queries: u64,
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
            unused: 0,
        };
        let grid =
            LaunchShape::grid2(rows.div_ceil(rows_per_block), shape.kv_heads, 2 * self.head_dim as u32);
        let grid = grid.shared(Self::shared(self.head_dim)).overlapping();
        device.launch(self.function, grid, &params)
    }
}
