//! Coding of the tiles that leave the recent window in this step: one launch for all layers where the rows are there before the
//! step, else one a layer.

use crate::device::{Device, KernelParams, LaunchShape};
use crate::error::Result;
use crate::kernels::Kernels;
use crate::pages::CudaPages;
use crate::sources::DEMOTE;
use crate::step::StepTables;
use oscar_codec::TILE_TOKENS;
use std::ops::Range;

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct DemoteArgs {
    step: StepTables,
    heads: u64,
    roundings: u64,
    head_count: u32,
    unused: u32,
}

// SAFETY: the struct of `demote.cu`, filled with addresses of live buffers.
unsafe impl KernelParams for DemoteArgs {}

/// Blocks that share one multiprocessor without crowding it, where other kernels run beside them.
const BLOCKS_PER_MULTIPROCESSOR: usize = 2;

/// Blocks of a launch that runs alone.
const MOST_BLOCKS: usize = 1 << 16;

/// Codes the demoted tiles of some layers; nothing where the step demotes none.
pub fn demote(
    device: &Device,
    kernels: &Kernels,
    layers: Range<usize>,
    step: &StepTables,
    pool: &CudaPages,
) -> Result<()> {
    let (kv_heads, head_dim) = (pool.layout().kv_heads(), pool.layout().head_dim());
    // Heads of all layers lie one behind the other.
    let heads = layers.len() * kv_heads;
    let jobs = step.demoted_count as usize * heads * 2;
    if jobs == 0 {
        return Ok(());
    }
    let function = kernels.function(&DEMOTE, &vec![("HEAD_DIM", head_dim)], c"demote", 0)?;
    let beside_others = device.properties().multiprocessors as usize * BLOCKS_PER_MULTIPROCESSOR;
    let blocks = if layers.len() > 1 { jobs.min(MOST_BLOCKS) } else { jobs.min(beside_others) };
    let args = DemoteArgs {
        step: *step,
        heads: pool.layer(layers.start),
        roundings: pool.layer_roundings(layers.start),
        head_count: heads as u32,
        unused: 0,
    };
    device.launch(function, LaunchShape::new(blocks, 32 * TILE_TOKENS as u32).overlapping(), &args)
}
