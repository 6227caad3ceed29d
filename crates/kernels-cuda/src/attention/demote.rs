//! Coding of the tiles that leave the recent window in this step: one launch a layer.

use crate::device::{Device, KernelParams, LaunchShape};
use crate::error::Result;
use crate::kernels::Kernels;
use crate::pages::CudaPages;
use crate::sources::DEMOTE;
use crate::step::StepTables;
use oscar_codec::TILE_TOKENS;

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct DemoteArgs {
    step: StepTables,
    heads: u64,
    roundings: u64,
    kv_heads: u32,
    unused: u32,
}

// SAFETY: the struct of `demote.cu`, filled with addresses of live buffers.
unsafe impl KernelParams for DemoteArgs {}

/// Blocks that share one multiprocessor without crowding it.
const BLOCKS_PER_MULTIPROCESSOR: usize = 2;

/// Codes one layer's demoted tiles; nothing where the step demotes none.
pub fn demote(
    device: &Device,
    kernels: &Kernels,
    layer: usize,
    step: &StepTables,
    pool: &CudaPages,
) -> Result<()> {
    let (kv_heads, head_dim) = (pool.layout().kv_heads(), pool.layout().head_dim());
    let jobs = step.demoted_count as usize * kv_heads * 2;
    if jobs == 0 {
        return Ok(());
    }
    let function = kernels.function(&DEMOTE, &vec![("HEAD_DIM", head_dim)], c"demote", 0)?;
    let most = device.properties().multiprocessors as usize * BLOCKS_PER_MULTIPROCESSOR;
    let args = DemoteArgs {
        step: *step,
        heads: pool.layer(layer),
        roundings: pool.layer_roundings(layer),
        kv_heads: kv_heads as u32,
        unused: 0,
    };
    device.launch(function, LaunchShape::new(jobs.min(most), 32 * TILE_TOKENS as u32).overlapping(), &args)
}
