//! GPU attention: the kernels of a cache, the choice among them for a step, and their launches.
//!
//! A layer attends in up to four launches: `append` normalizes and rotates the new heads and stores
//! keys and values; `demote` quantizes tiles that leave the recent window; `prefill` attends for
//! sequences with several rows and `decode` for those with one. In most steps of single tokens the
//! decode kernel does the work of `append` too. A simple kernel stands in where there is no other.
//!
//! A layer with a sliding window has one kernel for all rows (`sliding`), after `append`. Layers with
//! attention sinks use forms of `decode` and `prefill` that add them.

pub(crate) mod append;
pub mod decode;
pub(crate) mod demote;
pub(crate) mod hopper;
pub(crate) mod prefill;
pub(crate) mod simple;
pub(crate) mod sinks;
pub(crate) mod sliding;
mod variant;

pub use sinks::Sinks;
pub use variant::Variant;

use crate::device::{Device, Function, Properties};
use crate::error::{CudaError, Result};
use crate::kernels::Kernels;
use crate::layout::Layout;
use crate::memory::DevicePtr;
use crate::pages::{CudaPages, HeadPages};
use crate::sources::DEMOTE;
use crate::step::{StepSummary, StepTables};
use crate::storage::Storage;
use append::AppendKernel;
use decode::{DecodeKernels, DecodeMemory, Queries};
use half::bf16;
use hopper::HopperMemory;
use oscar_backend::{AttentionKernels, AttentionPath, HeadShape, PrefillWave};
use oscar_codec::CacheLayout;
use prefill::{Prefill, PrefillKernel};
use sliding::SlidingKernels;

pub(crate) const LAYOUTS: &[Layout] = &[
    append::HeadConstants::LAYOUT,
    append::AppendParams::LAYOUT,
    decode::DecodePlan::LAYOUT,
    decode::PlanArgs::LAYOUT,
    decode::DecodeArgs::LAYOUT,
    decode::WORKER_PLAN,
    decode::ITEM_PLAN,
    decode::PARTIAL_QUAD,
    demote::DemoteArgs::LAYOUT,
    demote::RecodedHead::LAYOUT,
    demote::RecodedPage::LAYOUT,
    demote::RecodeArgs::LAYOUT,
    prefill::PrefillParams::LAYOUT,
    hopper::HopperPrefillParams::LAYOUT,
    hopper::DequantizeParams::LAYOUT,
    simple::SimpleParams::LAYOUT,
    sinks::Sinks::LAYOUT,
    sinks::ShiftSinksParams::LAYOUT,
    sliding::SlidingParams::LAYOUT,
];

/// Which kernels attend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionMode {
    /// The fastest kernels that the device and the cache allow.
    #[default]
    Auto,
    /// Like `Auto`, but `append` always has its own launch.
    Apart,
    /// Like `Auto`, but prompts go through the `mma.sync` kernel on every GPU, for comparison.
    Mma,
    /// Like `Auto`, but the Hopper kernel multiplies all quantized keys in FP16, for comparison.
    F16,
    /// `attention_simple.cu` for everything, as a second opinion.
    Simple,
}

impl AttentionMode {
    /// The mode that `OSCAR_CUDA_ATTENTION` names.
    pub fn from_environment() -> Result<Self> {
        match std::env::var("OSCAR_CUDA_ATTENTION").as_deref() {
            Ok("simple") => Ok(Self::Simple),
            Ok("apart") => Ok(Self::Apart),
            Ok("mma") => Ok(Self::Mma),
            Ok("f16") => Ok(Self::F16),
            Ok("" | "auto") | Err(_) => Ok(Self::Auto),
            Ok(other) => Err(CudaError::Unsupported(format!(
                "OSCAR_CUDA_ATTENTION={other}: it may be auto, apart, mma, f16 or simple"
            ))),
        }
    }

    /// The kernels that read a cache, in words and as an answer to branch on.
    pub fn describe(self, device: &Device, layout: &CacheLayout) -> AttentionKernels {
        let d = layout.head_dim();
        let (path, description) = if Storage::of(layout).is_ok_and(|s| s == Storage::Dequantized) {
            let description = format!(
                "simple kernel: {} has no GPU kernels of its own, so its history is quantized and \
                 dequantized on the CPU and kept in BF16; answers are the codec's, memory and speed are not",
                layout.format()
            );
            (AttentionPath::Dequantized, description)
        } else if self == Self::Simple {
            (AttentionPath::Simple, "simple kernel (OSCAR_CUDA_ATTENTION)".into())
        } else {
            let prefill = match PrefillKernel::choose(device.properties(), d, self) {
                Some(kernel) => kernel.name(),
                None => "simple prefill kernel (too little shared memory)",
            };
            (AttentionPath::Native, format!("tensor-core decode kernel, {prefill}, head size {d}"))
        };
        let description = match layout.sliding() {
            Some(group) => format!(
                "{description}; {} of {} layers: mma.sync kernel for sliding windows, BF16 rows of the last {} tokens",
                group.layers(),
                layout.layers(),
                group.window()
            ),
            None => description,
        };
        AttentionKernels { path, description }
    }

    /// Prompt tokens of one step that suit this GPU and these heads.
    pub fn prefill_chunk(self, gpu: &Properties, heads: &HeadShape) -> usize {
        prefill::chunk(gpu, heads, self)
    }

    /// The waves of the prefill kernel for these heads.
    pub fn prefill_wave(self, gpu: &Properties, heads: &HeadShape) -> PrefillWave {
        prefill::wave(gpu, heads, self).unwrap_or(PrefillWave::NONE)
    }

    /// Keys of at most this many bits are multiplied in E4M3 by prompts, in heads of 128 channels and more.
    pub(crate) fn e4m3_key_bits(self, gpu: &Properties) -> u32 {
        match PrefillKernel::choose(gpu, 128, self) {
            Some(PrefillKernel::Hopper) if self != Self::Simple => hopper::e4m3_bits(self),
            _ => 0,
        }
    }

    /// Bytes of pages that are expanded for prompts of together `tokens` tokens.
    pub(crate) fn expanded_bytes(self, gpu: &Properties, heads: &HeadShape, tokens: usize) -> usize {
        match PrefillKernel::choose(gpu, heads.head_dim, self) {
            Some(PrefillKernel::Hopper) if self != Self::Simple => hopper::expanded_bytes(heads, tokens),
            _ => 0,
        }
    }

    /// Most bytes of parts of attention, where prompts of few rows share their context among blocks.
    pub(crate) fn partial_bytes(self, gpu: &Properties, heads: &HeadShape) -> usize {
        match PrefillKernel::choose(gpu, heads.head_dim, self) {
            Some(kernel @ PrefillKernel::Hopper) if self != Self::Simple => {
                hopper::partial_bytes(gpu, kernel.block(heads.head_dim).rows, heads.head_dim)
            }
            _ => 0,
        }
    }

    /// Whether queries can read codes where the windows alone say BF16. The simple kernel knows
    /// only the windows.
    pub fn reads_codes_in_window(self, device: &Device, head_dim: usize) -> bool {
        self != Self::Simple && PrefillKernel::choose(device.properties(), head_dim, self).is_some()
    }
}

/// The kernels of one cache. They are compiled when its pages are reserved, not during an answer.
pub struct CacheKernels {
    pub(crate) append: AppendKernel,
    demote: Option<Function>,
    /// Where another kernel is missing or not wanted.
    simple: Option<Function>,
    prefill: Option<Prefill>,
    decode: Option<DecodeKernels>,
    /// For the sliding layers, if there are some.
    sliding: Option<SlidingKernels>,
}

/// The kernels that attend in one step, the same for all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// The simple kernel for every row.
    Simple,
    /// The decode kernel for every row. `fused`: it also does the work of `append`.
    Decode { fused: bool },
    /// The prefill kernel for every row.
    Prefill,
    /// The prefill kernel for sequences with several rows, the decode kernel for those with one.
    PrefillAndDecode,
    /// The GPU has too little shared memory for the prefill kernel: the simple kernel takes every
    /// row, then the decode kernel those of sequences with one. So a single token's result does not
    /// depend on the other sequences of its step.
    SimpleAndDecode,
}

impl Path {
    /// Whether the decode kernel runs, which needs a plan.
    pub fn decodes(self) -> bool {
        !matches!(self, Self::Simple | Self::Prefill)
    }
}

impl CacheKernels {
    /// `heads` are the pages of each layer and KV head of a cache.
    pub fn new(
        device: &Device,
        kernels: &Kernels,
        mode: AttentionMode,
        shape: &HeadShape,
        (layout, storage): (&CacheLayout, Storage),
        heads: &[HeadPages],
    ) -> Result<Self> {
        let d = shape.head_dim;
        let by_head = vec![("HEAD_DIM", d)];
        let native = mode != AttentionMode::Simple && storage != Storage::Dequantized;
        let prefill = match native {
            true => Prefill::new(device, kernels, d, mode)?,
            false => None,
        };
        let quantizes = storage == Storage::Codes;
        Ok(Self {
            append: AppendKernel::new(kernels, d)?,
            demote: quantizes.then(|| kernels.function(&DEMOTE, &by_head, c"demote", 0)).transpose()?,
            simple: prefill.is_none().then(|| simple::function(kernels, d, storage)).transpose()?,
            prefill,
            decode: match native {
                true => {
                    let fuses = mode != AttentionMode::Apart;
                    Some(DecodeKernels::new(device, kernels, shape, (layout, heads), fuses)?)
                }
                false => None,
            },
            sliding: layout.sliding().map(|_| SlidingKernels::new(kernels, d)).transpose()?,
        })
    }

    /// Compiles the forms that add attention sinks, at the first layer that has some.
    pub fn prepare_sinks(&self, kernels: &Kernels) -> Result<()> {
        self.prefill.as_ref().map_or(Ok(()), |prefill| prefill.prepare_sinks(kernels))?;
        self.decode.as_ref().map_or(Ok(()), |decode| decode.prepare_sinks(kernels))
    }

    /// The kernels for a step. With `tapped`, `append` has a launch of its own: something looks at
    /// the heads before attention.
    pub fn choose(&self, device: &Device, summary: &StepSummary, layout: &CacheLayout, tapped: bool) -> Path {
        let Some(decode) = &self.decode else { return Path::Simple };
        let any = |wanted: fn(u32) -> bool| summary.sequences.iter().any(|s| wanted(s.rows));
        match (any(|rows| rows > 1), any(|rows| rows == 1), self.prefill.is_some()) {
            (false, _, _) => {
                let fused = !tapped
                    && summary.only_new_tokens(layout.windows())
                    && decode.can_fuse(device, summary, layout);
                Path::Decode { fused }
            }
            (true, false, true) => Path::Prefill,
            (true, true, true) => Path::PrefillAndDecode,
            (true, false, false) => Path::Simple,
            (true, true, false) => Path::SimpleAndDecode,
        }
    }

    /// Quantizes the tiles that the tables name.
    ///
    /// # Safety
    /// As for [`demote::launch`].
    pub unsafe fn demote(
        &self,
        device: &Device,
        scope: demote::Scope,
        tables: &StepTables,
        pages: &CudaPages,
    ) -> Result<()> {
        match self.demote {
            // SAFETY: the caller's promise.
            Some(function) => unsafe { demote::launch(device, function, scope, tables, pages) },
            None => Ok(()),
        }
    }
}

/// One layer's attention in a step.
pub struct LayerCall<'a> {
    pub layer: usize,
    pub tables: &'a StepTables,
    pub summary: &'a StepSummary,
    pub pages: &'a CudaPages,
    pub queries: Queries,
    /// f32 `[row][query head][head_dim]`. [`Path::Prefill`] can do without.
    pub out: Option<DevicePtr<f32>>,
    /// The same in BF16, if wanted.
    pub rounded: Option<DevicePtr<bf16>>,
    /// [`CacheKernels::prepare_sinks`] was called if there are some.
    pub sinks: Sinks,
}

impl LayerCall<'_> {
    /// Enqueues the attention of a layer. Returns whether the BF16 output was written as well.
    ///
    /// # Safety
    /// The tables must be on the device and of a step over `pages`, in which every page that the windows
    /// require has memory. `queries` and both outputs must have the step's rows of query heads. If `path`
    /// decodes, the step must have been planned with the same tables.
    pub unsafe fn attend(
        &self,
        device: &Device,
        path: Path,
        memory: &mut DecodeMemory,
        prefill: &mut HopperMemory,
    ) -> Result<bool> {
        let kernels = self.pages.kernels();
        let missing = || CudaError::Shape { what: "attention", detail: format!("no kernel for {path:?}") };
        if matches!(path, Path::Simple | Path::SimpleAndDecode) {
            // SAFETY: the caller's promise.
            unsafe { simple::launch(device, kernels.simple.ok_or_else(missing)?, self) }?;
        }
        if matches!(path, Path::Prefill | Path::PrefillAndDecode) {
            // SAFETY: the caller's promise.
            unsafe { kernels.prefill.as_ref().ok_or_else(missing)?.launch(device, self, prefill) }?;
        }
        if path.decodes() {
            // SAFETY: the caller's promise.
            unsafe { memory.attend(device, kernels.decode.as_ref().ok_or_else(missing)?, self) }?;
        }
        Ok(self.rounded.is_some() && !matches!(path, Path::Simple | Path::SimpleAndDecode))
    }

    /// Enqueues the attention of a sliding layer, whose tables name the pages of its group. Both outputs
    /// are written, as far as they are there.
    ///
    /// # Safety
    /// The tables must be on the device and of a step over `pages`, in which every page that the window
    /// requires has memory. `queries`, both outputs and the sinks must have the step's rows of query heads.
    pub unsafe fn slide(&self, device: &Device, window: usize) -> Result<()> {
        let missing = || CudaError::Shape { what: "attention", detail: "no sliding layers".into() };
        let kernels = self.pages.kernels().sliding.as_ref().ok_or_else(missing)?;
        // SAFETY: the caller's promise.
        unsafe { kernels.launch(device, self, window) }
    }

    /// The tables for the launches of this layer.
    fn step(&self) -> StepTables {
        self.tables.of_layer(self.layer, self.pages.shape().kv_heads)
    }

    /// Plans the decode attention of all layers.
    ///
    /// # Safety
    /// The tables must be on the device and of a step over `pages`.
    pub unsafe fn plan(
        device: &Device,
        memory: &mut DecodeMemory,
        tables: &StepTables,
        pages: &CudaPages,
        fused: bool,
        views: bool,
    ) -> Result<()> {
        match &pages.kernels().decode {
            // SAFETY: the caller's promise.
            Some(kernels) => unsafe { memory.plan(device, kernels, tables, pages, fused, views) },
            None => Ok(()),
        }
    }

    /// The f32 output.
    fn held_out(&self) -> Result<DevicePtr<f32>> {
        let detail = || "this kernel writes f32".into();
        self.out.ok_or_else(|| CudaError::Shape { what: "the output of attention", detail: detail() })
    }

    /// Rotated queries that are ready.
    fn ready_queries(&self) -> Result<DevicePtr<f32>> {
        match self.queries {
            Queries::Ready(queries) => Ok(queries),
            Queries::FromProjections(_) => {
                let detail = "only decode attention takes projections".into();
                Err(CudaError::Shape { what: "attention", detail })
            }
        }
    }
}
