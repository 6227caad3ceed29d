//! Which kernel attends for which sequences of a step.

use crate::device::{Device, KernelParams, LaunchShape};
use crate::error::Result;
use crate::kernels::Kernels;
use crate::pages::CudaPages;
use crate::sources::{ATTENTION_GENERIC, ATTENTION_PREFILL};
use crate::step::{StepSummary, StepTables};
use oscar_backend::HeadShape;
use oscar_codec::CacheLayout;

/// One layer's attention in a step.
pub struct AttentionCall<'a> {
    pub layer: usize,
    pub shape: &'a HeadShape,
    pub tables: &'a StepTables,
    pub summary: &'a StepSummary,
    pub pool: &'a CudaPages,
    /// f32 `[row][query head][head_dim]`, device addresses.
    pub queries: u64,
    pub out: u64,
    /// The output in BF16 as well, or 0.
    pub rounded: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct GenericParams {
    step: StepTables,
    pages: u64,
    queries: u64,
    out: u64,
    query_heads: u32,
    kv_heads: u32,
    scale: f32,
}

// SAFETY: the struct of `attention_generic.cu`, filled with addresses of live buffers.
unsafe impl KernelParams for GenericParams {}

#[repr(C)]
#[derive(Clone, Copy)]
struct PrefillParams {
    step: StepTables,
    pages: u64,
    queries: u64,
    out: u64,
    rounded: u64,
    query_heads: u32,
    kv_heads: u32,
    least_rows: u32,
    scale: f32,
}

// SAFETY: the struct of `attention_prefill.cu`, filled with addresses of live buffers.
unsafe impl KernelParams for PrefillParams {}

pub struct AttentionPaths {}

impl AttentionPaths {
    pub fn new(_device: &Device) -> Self {
        Self {}
    }

    pub fn describe(&self, layout: &CacheLayout) -> String {
        let _ = layout;
        "generic".into()
    }

    pub fn begin_step(
        &mut self,
        _device: &Device,
        _kernels: &Kernels,
        _tables: &StepTables,
        _summary: &StepSummary,
        _pool: &CudaPages,
    ) -> Result<()> {
        Ok(())
    }

    pub fn demote(
        &mut self,
        _device: &Device,
        _kernels: &Kernels,
        _layer: usize,
        _tables: &StepTables,
        _summary: &StepSummary,
        _pool: &mut CudaPages,
    ) -> Result<()> {
        Ok(())
    }

    pub fn attend(&mut self, device: &Device, kernels: &Kernels, call: &AttentionCall<'_>) -> Result<()> {
        if call.summary.decode {
            return generic(device, kernels, call);
        }
        prefill(device, kernels, call, 1)
    }
}

/// Rows a block of `attention_prefill.cu` takes, and its shared memory.
fn prefill_block(head_dim: usize) -> (usize, usize) {
    let rows = if head_dim == 256 { 64 } else { 128 };
    let (queries, tile, raw) = (rows * head_dim * 2, 64 * head_dim * 4, 8 * head_dim * 8 + 512);
    (rows, queries + 2 * tile + 2 * raw)
}

/// The flash kernel, for the sequences that bring at least `least_rows` rows.
pub fn prefill(
    device: &Device,
    kernels: &Kernels,
    call: &AttentionCall<'_>,
    least_rows: usize,
) -> Result<()> {
    let shape = call.shape;
    let (block_rows, shared) = prefill_block(shape.head_dim);
    let defines = vec![("HEAD_DIM", shape.head_dim)];
    let function = kernels.function(&ATTENTION_PREFILL, &defines, c"attention_prefill", shared)?;
    let params = PrefillParams {
        step: *call.tables,
        pages: call.pool.layer(call.layer),
        queries: call.queries,
        out: call.out,
        rounded: call.rounded,
        query_heads: shape.query_heads as u32,
        kv_heads: shape.kv_heads as u32,
        least_rows: least_rows as u32,
        scale: shape.scale,
    };
    let most_rows = call.summary.sequences.iter().map(|s| s.rows as usize).max().unwrap_or(0);
    let group = shape.query_heads / shape.kv_heads;
    let launch = LaunchShape {
        grid: (
            (most_rows * group).div_ceil(block_rows) as u32,
            shape.kv_heads as u32,
            call.summary.sequences.len() as u32,
        ),
        block: if shape.head_dim == 256 { 128 } else { 256 },
        shared: shared as u32,
        overlap: true,
    };
    device.launch(function, launch, &params)
}

/// The plain kernel, for any row.
pub fn generic(device: &Device, kernels: &Kernels, call: &AttentionCall<'_>) -> Result<()> {
    let shape = call.shape;
    let defines = vec![("HEAD_DIM", shape.head_dim)];
    let function = kernels.function(&ATTENTION_GENERIC, &defines, c"attention_generic", 0)?;
    let params = GenericParams {
        step: *call.tables,
        pages: call.pool.layer(call.layer),
        queries: call.queries,
        out: call.out,
        query_heads: shape.query_heads as u32,
        kv_heads: shape.kv_heads as u32,
        scale: shape.scale,
    };
    let launch = LaunchShape::grid2(call.summary.rows, shape.query_heads, 256).overlapping();
    device.launch(function, launch, &params)
}
