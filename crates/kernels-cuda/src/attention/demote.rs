//! Quantization of the tiles that leave the recent window: one launch for all layers if earlier
//! steps wrote the rows, otherwise one launch for each layer.

use crate::device::{Device, Function, LaunchShape};
use crate::error::Result;
use crate::layout::shared_struct;
use crate::memory::DevicePtr;
use crate::pages::{CudaPages, HeadPages, HeadRounding};
use crate::step::StepTables;
use oscar_codec::TILE_TOKENS;

shared_struct! {
    pub(super) struct DemoteArgs {
        step: StepTables,
        heads: DevicePtr<HeadPages>,
        roundings: Option<DevicePtr<HeadRounding>>,
        head_count: u32,
    }
}

shared_struct! {
    /// Widths of a head in a recoded history; 0 leaves a side exact.
    #[derive(bytemuck::Pod, bytemuck::Zeroable)]
    pub struct RecodedHead {
        pub key_bits: u32,
        pub value_bits: u32,
        /// As in [`HeadPages`].
        pub key_clip: u32,
        pub value_clip: u32,
    }
}

shared_struct! {
    /// A full page and its copy, in which tokens `first..end` are recoded.
    #[derive(bytemuck::Pod, bytemuck::Zeroable)]
    pub struct RecodedPage {
        pub from: u32,
        pub to: u32,
        pub first: u32,
        pub end: u32,
    }
}

shared_struct! {
    pub struct RecodeArgs {
        pub heads: DevicePtr<HeadPages>,
        pub roundings: Option<DevicePtr<HeadRounding>>,
        pub widths: DevicePtr<RecodedHead>,
        pub pages: DevicePtr<RecodedPage>,
    }
}

/// The heads that one launch quantizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Of one layer, in the middle of a step: other kernels run beside it.
    Layer(usize),
    /// Of all layers, whose heads lie one behind the other. It runs alone.
    AllLayers,
}

/// Steps of up to this many rows are short, and their kernels overlap.
const FEW_ROWS: usize = 64;
/// Blocks on one multiprocessor that do not crowd out the kernels beside them.
const BLOCKS_PER_MULTIPROCESSOR: usize = 2;
/// Blocks of a launch that runs alone.
const MOST_BLOCKS: usize = 1 << 16;

/// Quantizes the tiles that these tables name.
///
/// # Safety
/// The tables must be on the device, and the pages of their tiles must have memory.
pub unsafe fn launch(
    device: &Device,
    function: Function,
    scope: Scope,
    tables: &StepTables,
    pages: &CudaPages,
) -> Result<()> {
    let layout = pages.layout();
    let (first, layers, most) = match scope {
        // The kernels of a prompt fill the GPU one after the other.
        Scope::Layer(layer) if tables.rows as usize > FEW_ROWS => (layer, 1, MOST_BLOCKS),
        Scope::Layer(layer) => {
            (layer, 1, device.properties().multiprocessors as usize * BLOCKS_PER_MULTIPROCESSOR)
        }
        Scope::AllLayers => (0, layout.layers(), MOST_BLOCKS),
    };
    let head_count = layers * layout.kv_heads();
    let jobs = tables.demoted_count as usize * head_count * 2;
    if jobs == 0 {
        return Ok(());
    }
    let args = DemoteArgs {
        step: *tables,
        heads: pages.layer(first),
        roundings: pages.layer_roundings(first),
        head_count: head_count as u32,
    };
    let shape = LaunchShape::new(jobs.min(most), 32 * TILE_TOKENS as u32);
    // SAFETY: the caller's promise.
    unsafe { device.launch(function, shape.overlapping(), args) }
}
