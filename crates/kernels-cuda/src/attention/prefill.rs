//! Prefill attention: flash kernels for sequences that bring several rows.
//!
//! [`PrefillKernel::choose`] decides by architecture and head size which kernel a cache gets.

use super::hopper::{HopperKernels, HopperMemory};
use super::{AttentionMode, LayerCall, Sinks};
use crate::device::{Device, Function, LaunchShape, Properties};
use crate::error::Result;
use crate::kernels::Kernels;
use crate::layout::shared_struct;
use crate::memory::DevicePtr;
use crate::pages::HeadPages;
use crate::sources::{ATTENTION_PREFILL, ATTENTION_PREFILL_HOPPER, HOPPER, prefill_defines};
use crate::step::StepTables;
use half::bf16;
use oscar_backend::{HeadShape, PrefillWave};
use std::sync::OnceLock;

/// The prefill kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillKernel {
    /// `attention_prefill_hopper.cu`: `wgmma` products over BF16 and dequantized pages.
    Hopper,
    /// `attention_prefill.cu`: `mma.sync` tensor-core products, from Ampere on.
    Ampere,
}

impl PrefillKernel {
    /// The kernel for this GPU and head size; `None` if its shared memory is too small for any.
    pub fn choose(gpu: &Properties, head_dim: usize, mode: AttentionMode) -> Option<Self> {
        let hopper = 10 * gpu.major + gpu.minor == HOPPER && mode != AttentionMode::Mma;
        [Self::Hopper, Self::Ampere]
            .into_iter()
            .filter(|&kernel| kernel != Self::Hopper || hopper)
            .find(|kernel| kernel.block(head_dim).shared <= gpu.shared_memory as usize)
    }

    /// Blocks that a multiprocessor runs at a time. The Hopper kernel takes all registers of one.
    fn resident(self, gpu: &Properties, head_dim: usize) -> usize {
        match self {
            Self::Hopper => 1,
            Self::Ampere => (gpu.shared_memory as usize / self.block(head_dim).shared).max(1),
        }
    }

    /// Its name in the start banner.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hopper => "wgmma prefill kernel",
            Self::Ampere => "mma.sync prefill kernel",
        }
    }

    pub(super) fn block(self, head_dim: usize) -> Block {
        match self {
            Self::Hopper => {
                let (groups, stages) = if head_dim == 256 { (2, 2) } else { (3, 4) };
                let (queries, page) = (64 * head_dim * 2, 64 * head_dim * 4);
                // Barriers lie in static shared memory, rounded up to the alignment of the rest.
                let shared = groups * queries + stages * page;
                Block { rows: 64 * groups, threads: 128 * (groups as u32 + 1), shared }
            }
            Self::Ampere => {
                let (rows, threads) = if head_dim == 256 { (64, 128) } else { (128, 256) };
                let (queries, tile, raw) = (rows * head_dim * 2, 64 * head_dim * 4, 8 * head_dim * 8 + 512);
                Block { rows, threads, shared: queries + 2 * tile + 2 * raw }
            }
        }
    }
}

/// A good number of prompt tokens in a step. Products run at full speed from 2048 rows on. More rows
/// make a partial last wave of attention matter less, and take more memory.
fn about(gpu: &Properties) -> usize {
    const LARGE: usize = 64 << 30;
    if gpu.memory >= LARGE { 8192 } else { 4096 }
}

/// Prompt tokens of one step: the number nearest to [`about`] that fills whole waves of the prefill
/// kernel. A partial wave takes as long as a full one.
pub fn chunk(gpu: &Properties, heads: &HeadShape, mode: AttentionMode) -> usize {
    let about = about(gpu);
    let Some(wave) = wave(gpu, heads, mode) else { return about };
    let candidates = (1..).map(|count| wave.filling(count)).take_while(|&tokens| tokens <= 2 * about);
    candidates.filter(|&n| n > 0).min_by_key(|n| n.abs_diff(about)).unwrap_or(about)
}

/// The blocks that run at the same time; `None` if the GPU has no prefill kernel for these heads.
pub fn wave(gpu: &Properties, heads: &HeadShape, mode: AttentionMode) -> Option<PrefillWave> {
    let kernel = PrefillKernel::choose(gpu, heads.head_dim, mode)?;
    let block = (kernel.block(heads.head_dim).rows / heads.group().max(1)).max(1);
    let blocks = gpu.multiprocessors as usize * kernel.resident(gpu, heads.head_dim);
    let tokens = (blocks * block / heads.kv_heads.max(1)).max(1);
    Some(PrefillWave { tokens, block, divides: kernel == PrefillKernel::Hopper })
}

/// The size of a thread block.
#[derive(Clone, Copy)]
pub(super) struct Block {
    /// Rows times query heads of a KV head.
    pub rows: usize,
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: usize,
}

impl Block {
    /// The launch for the rows of a step and this many KV heads.
    pub fn launch(&self, call: &LayerCall<'_>, kv_heads: usize) -> LaunchShape {
        let most_rows = call.summary.sequences.iter().map(|s| s.rows as usize).max().unwrap_or(0);
        LaunchShape {
            grid: (
                (most_rows * call.pages.shape().group()).div_ceil(self.rows) as u32,
                kv_heads as u32,
                call.summary.sequences.len() as u32,
            ),
            block: self.threads,
            shared: self.shared as u32,
            overlap: true,
        }
    }
}

/// Sequences with fewer rows are left to the decode kernel.
pub(super) const LEAST_ROWS: u32 = 2;

/// A compiled prefill kernel.
pub struct Prefill {
    kernel: PrefillKernel,
    head_dim: usize,
    function: Function,
    block: Block,
    /// On Hopper: the kernels before and after it.
    hopper: Option<HopperKernels>,
    /// The form that adds attention sinks.
    with_sinks: OnceLock<Function>,
}

shared_struct! {
    pub(super) struct PrefillParams {
        step: StepTables,
        pages: DevicePtr<HeadPages>,
        queries: DevicePtr<f32>,
        out: Option<DevicePtr<f32>>,
        rounded: Option<DevicePtr<bf16>>,
        query_heads: u32,
        kv_heads: u32,
        least_rows: u32,
        scale: f32,
        sinks: Sinks,
    }
}

impl Prefill {
    /// The kernel for this head size, if the GPU has one.
    pub fn new(
        device: &Device,
        kernels: &Kernels,
        head_dim: usize,
        mode: AttentionMode,
    ) -> Result<Option<Self>> {
        let Some(kernel) = PrefillKernel::choose(device.properties(), head_dim, mode) else {
            return Ok(None);
        };
        let block = kernel.block(head_dim);
        let function = Self::function(kernels, kernel, head_dim, false)?;
        let hopper = match kernel {
            PrefillKernel::Hopper => Some(HopperKernels::new(kernels, head_dim, mode)?),
            PrefillKernel::Ampere => None,
        };
        Ok(Some(Self { kernel, head_dim, function, block, hopper, with_sinks: OnceLock::new() }))
    }

    fn function(kernels: &Kernels, kernel: PrefillKernel, head_dim: usize, sinks: bool) -> Result<Function> {
        let (source, name) = match kernel {
            PrefillKernel::Hopper => (&ATTENTION_PREFILL_HOPPER, c"attention_prefill_hopper"),
            PrefillKernel::Ampere => (&ATTENTION_PREFILL, c"attention_prefill"),
        };
        kernels.function(source, &prefill_defines(head_dim, sinks), name, kernel.block(head_dim).shared)
    }

    /// Compiles the form that adds attention sinks, once.
    pub fn prepare_sinks(&self, kernels: &Kernels) -> Result<()> {
        if self.with_sinks.get().is_none() {
            if let Some(hopper) = &self.hopper {
                hopper.prepare_sinks(kernels, self.head_dim)?;
            }
            let _ = self.with_sinks.set(Self::function(kernels, self.kernel, self.head_dim, true)?);
        }
        Ok(())
    }

    /// Attention of the sequences of a layer that bring at least two rows.
    ///
    /// # Safety
    /// As for [`LayerCall::attend`].
    pub unsafe fn launch(
        &self,
        device: &Device,
        call: &LayerCall<'_>,
        memory: &mut HopperMemory,
    ) -> Result<()> {
        let function = call.sinks.form(self.function, &self.with_sinks)?;
        if let Some(hopper) = &self.hopper {
            // SAFETY: the caller's promise.
            return unsafe { hopper.attend(device, call, function, &self.block, memory) };
        }
        let shape = call.pages.shape();
        let params = PrefillParams {
            step: call.step(),
            pages: call.pages.layer(call.layer),
            queries: call.ready_queries()?,
            out: call.out,
            rounded: call.rounded,
            query_heads: shape.query_heads as u32,
            kv_heads: shape.kv_heads as u32,
            least_rows: LEAST_ROWS,
            scale: shape.scale,
            sinks: call.sinks,
        };
        // SAFETY: the caller's promise.
        unsafe { device.launch(function, self.block.launch(call, shape.kv_heads), params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk_on(multiprocessors: u32, sm: (i32, i32), query_heads: usize, head_dim: usize) -> usize {
        let h200 = Properties::h200();
        let gpu = Properties { multiprocessors, major: sm.0, minor: sm.1, memory: 24 << 30, ..h200 };
        let heads = HeadShape { query_heads, kv_heads: 8, head_dim, rms_norm_eps: 1e-6, scale: 1.0 };
        chunk(&gpu, &heads, AttentionMode::Auto)
    }

    #[test]
    fn a_chunk_is_whole_waves_near_4096_tokens() {
        // 132 multiprocessors, blocks of 192 rows: 82 blocks for each of 8 KV heads are 4.97 waves.
        assert_eq!(chunk_on(132, (9, 0), 32, 128), 82 * 192 / 4);
        assert_eq!(chunk_on(132, (9, 0), 96, 128) % 16, 0);
        // A GPU with more memory takes ten waves.
        let heads = HeadShape { query_heads: 32, kv_heads: 8, head_dim: 128, rms_norm_eps: 1e-6, scale: 1.0 };
        assert_eq!(chunk(&Properties::h200(), &heads, AttentionMode::Auto), 165 * 192 / 4);
        for multiprocessors in [20, 84, 108, 132] {
            for (sm, head_dim) in [((9, 0), 64), ((9, 0), 256), ((8, 0), 128), ((8, 9), 64)] {
                for query_heads in [8, 32, 128] {
                    let tokens = chunk_on(multiprocessors, sm, query_heads, head_dim);
                    assert!(
                        (2048..=8192).contains(&tokens),
                        "{multiprocessors} {sm:?} {query_heads}: {tokens}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_gpu_with_one_multiprocessor_or_a_model_with_many_heads_still_gets_a_chunk() {
        assert!(chunk_on(1, (9, 0), 128, 64) > 0);
        assert!(chunk_on(4096, (9, 0), 8, 128) > 0);
    }
}
