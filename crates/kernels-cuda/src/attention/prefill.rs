//! Prefill attention: flash kernels for sequences that bring several rows.
//!
//! [`PrefillKernel::choose`] decides by architecture and head size which kernel a cache gets.

use super::LayerCall;
use crate::device::{Device, Function, LaunchShape, Properties};
use crate::error::Result;
use crate::kernels::Kernels;
use crate::layout::shared_struct;
use crate::memory::DevicePtr;
use crate::pages::HeadPages;
use crate::sources::ATTENTION_PREFILL;
use crate::step::StepTables;
use half::bf16;

/// The prefill kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillKernel {
    /// `attention_prefill.cu`: `mma.sync` tensor-core products, from Ampere on.
    Ampere,
}

impl PrefillKernel {
    /// The kernel for this GPU and head size; `None` if its shared memory is too small for any.
    pub fn choose(gpu: &Properties, head_dim: usize) -> Option<Self> {
        [Self::Ampere].into_iter().find(|k| k.block(head_dim).shared <= gpu.shared_memory as usize)
    }

    /// Its name in the start banner.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ampere => "tensor-core prefill kernel",
        }
    }

    fn block(self, head_dim: usize) -> Block {
        match self {
            Self::Ampere => {
                let (rows, threads) = if head_dim == 256 { (64, 128) } else { (128, 256) };
                let (queries, tile, raw) = (rows * head_dim * 2, 64 * head_dim * 4, 8 * head_dim * 8 + 512);
                Block { rows, threads, shared: queries + 2 * tile + 2 * raw }
            }
        }
    }
}

/// The size of a thread block.
#[derive(Clone, Copy)]
struct Block {
    /// Rows times query heads of a KV head.
    rows: usize,
    threads: u32,
    /// Bytes of dynamic shared memory.
    shared: usize,
}

/// A compiled prefill kernel.
pub struct Prefill {
    function: Function,
    block: Block,
}

shared_struct! {
    pub(super) struct PrefillParams {
        step: StepTables,
        pages: DevicePtr<HeadPages>,
        queries: DevicePtr<f32>,
        out: DevicePtr<f32>,
        rounded: Option<DevicePtr<bf16>>,
        query_heads: u32,
        kv_heads: u32,
        /// Sequences with fewer rows are left to the decode kernel.
        least_rows: u32,
        scale: f32,
    }
}

impl Prefill {
    /// The kernel for this head size, if the GPU has one.
    pub fn new(device: &Device, kernels: &Kernels, head_dim: usize) -> Result<Option<Self>> {
        let Some(kernel) = PrefillKernel::choose(device.properties(), head_dim) else { return Ok(None) };
        let block = kernel.block(head_dim);
        let function = match kernel {
            PrefillKernel::Ampere => {
                let defines = vec![("HEAD_DIM", head_dim)];
                kernels.function(&ATTENTION_PREFILL, &defines, c"attention_prefill", block.shared)?
            }
        };
        Ok(Some(Self { function, block }))
    }

    /// Attention of the sequences of a layer that bring at least two rows.
    ///
    /// # Safety
    /// As for [`LayerCall::attend`].
    pub unsafe fn launch(&self, device: &Device, call: &LayerCall<'_>) -> Result<()> {
        let shape = call.pages.shape();
        let params = PrefillParams {
            step: *call.tables,
            pages: call.pages.layer(call.layer),
            queries: call.ready_queries()?,
            out: call.out,
            rounded: call.rounded,
            query_heads: shape.query_heads as u32,
            kv_heads: shape.kv_heads as u32,
            least_rows: 2,
            scale: shape.scale,
        };
        let most_rows = call.summary.sequences.iter().map(|s| s.rows as usize).max().unwrap_or(0);
        let launch = LaunchShape {
            grid: (
                (most_rows * shape.group()).div_ceil(self.block.rows) as u32,
                shape.kv_heads as u32,
                call.summary.sequences.len() as u32,
            ),
            block: self.block.threads,
            shared: self.block.shared as u32,
            overlap: true,
        };
        // SAFETY: the caller's promise.
        unsafe { device.launch(self.function, launch, params) }
    }
}
