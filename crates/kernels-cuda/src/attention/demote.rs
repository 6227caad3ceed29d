//! Coding of the tiles that leave the recent window in this step: one launch for all layers where the rows are there before the
//! step, else one a layer.

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
    head_count: u32,
    unused: u32,
}

// SAFETY: the struct of `demote.cu`, filled with addresses of live buffers.
unsafe impl KernelParams for DemoteArgs {}

/// Blocks that share one multiprocessor without crowding it where other kernels run beside them.
const BLOCKS_PER_MULTIPROCESSOR: usize = 2;

/// Blocks of a launch that runs alone.
const MOST_BLOCKS: usize = 1 << 16;

/// The heads of some layers, which are coded together.
#[derive(Clone, Copy)]
pub struct Demotion {
    heads: u64,
    roundings: u64,
    head_count: usize,
    head_dim: usize,
    /// Do other kernels run beside it?
    beside_others: bool,
}

impl Demotion {
    /// Of one layer, in the middle of a step.
    pub fn of_layer(pool: &CudaPages, layer: usize) -> Self {
        Self {
            heads: pool.layer(layer),
            roundings: pool.layer_roundings(layer),
            head_count: pool.layout().kv_heads(),
            head_dim: pool.layout().head_dim(),
            beside_others: true,
        }
    }

    /// Of all layers, whose heads lie one behind the other, before a step.
    pub fn of_all_layers(pool: &CudaPages) -> Self {
        let head_count = pool.layout().layers() * pool.layout().kv_heads();
        Self { head_count, beside_others: false, ..Self::of_layer(pool, 0) }
    }

    /// Codes the tiles that these tables name.
    pub fn launch(&self, device: &Device, kernels: &Kernels, step: &StepTables) -> Result<()> {
        let jobs = step.demoted_count as usize * self.head_count * 2;
        if jobs == 0 {
            return Ok(());
        }
        let function = kernels.function(&DEMOTE, &vec![("HEAD_DIM", self.head_dim)], c"demote", 0)?;
        let most = match self.beside_others {
            true => device.properties().multiprocessors as usize * BLOCKS_PER_MULTIPROCESSOR,
            false => MOST_BLOCKS,
        };
        let args = DemoteArgs {
            step: *step,
            heads: self.heads,
            roundings: self.roundings,
            head_count: self.head_count as u32,
            unused: 0,
        };
        let shape = LaunchShape::new(jobs.min(most), 32 * TILE_TOKENS as u32);
        device.launch(function, shape.overlapping(), &args)
    }
}
