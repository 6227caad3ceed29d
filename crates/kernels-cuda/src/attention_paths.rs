//! Which kernel attends for which sequences of a step.

use crate::attention::decode::{DecodeAttention, DecodeRows, Queries, Variant};
use crate::device::{Device, Function, KernelParams, LaunchShape};
use crate::error::{CudaError, Result};
use crate::heads::Projections;
use crate::kernels::Kernels;
use crate::pages::CudaPages;
use crate::sources::{ATTENTION_PREFILL, ATTENTION_SIMPLE, simple_attention_defines};
use crate::step::{SequenceInfo, StepSummary, StepTables, window};
use crate::storage::Storage;
use oscar_backend::HeadShape;
use oscar_codec::{CacheLayout, Side, Windows};

/// One layer's attention in a step.
pub struct AttentionCall<'a> {
    pub layer: usize,
    pub shape: &'a HeadShape,
    pub tables: &'a StepTables,
    pub summary: &'a StepSummary,
    pub pool: &'a CudaPages,
    /// f32 `[row][query head][head_dim]`, device addresses.
    pub queries: u64,
    /// What decode attention is to make the queries from, where it said that it would.
    pub projections: Option<Projections>,
    pub out: u64,
    /// The output in BF16 as well, or 0.
    pub rounded: u64,
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct SimpleParams {
    step: StepTables,
    pages: u64,
    queries: u64,
    out: u64,
    query_heads: u32,
    kv_heads: u32,
    scale: f32,
    key_recent: u32,
    key_unit: u32,
    value_recent: u32,
    value_unit: u32,
    unused: u32,
}

// SAFETY: the struct of `attention_simple.cu`, filled with addresses of live buffers.
unsafe impl KernelParams for SimpleParams {}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
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

/// Which kernels attend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionMode {
    /// The fastest kernels that the device and the cache allow.
    #[default]
    Auto,
    /// Like `Auto`, but `append` always has its own launch.
    Apart,
    /// `attention_simple.cu` for everything, as a second opinion.
    Simple,
}

impl AttentionMode {
    /// The mode that `OSCAR_CUDA_ATTENTION` names.
    pub fn from_environment() -> Result<Self> {
        match std::env::var("OSCAR_CUDA_ATTENTION").as_deref() {
            Ok("simple") => Ok(Self::Simple),
            Ok("apart") => Ok(Self::Apart),
            Ok("" | "auto") | Err(_) => Ok(Self::Auto),
            Ok(other) => Err(CudaError::Unsupported(format!(
                "OSCAR_CUDA_ATTENTION={other}: it may be auto, apart or simple"
            ))),
        }
    }
}

/// The kernels that attend, and their state from step to step.
#[derive(Default)]
pub struct AttentionPaths {
    decode: DecodeAttention,
    mode: AttentionMode,
    /// May decode attention make the heads of this step?
    makes_heads: bool,
    /// Query heads to a KV head, once heads have come.
    group: Option<usize>,
}

impl AttentionPaths {
    pub fn new(mode: AttentionMode) -> Self {
        Self { mode, ..Self::default() }
    }

    fn is_simple(&self) -> bool {
        self.mode == AttentionMode::Simple
    }

    /// Compiles what prompts will need.
    pub fn prepare(
        &self,
        device: &Device,
        kernels: &Kernels,
        head_dim: usize,
        storage: Storage,
    ) -> Result<()> {
        if storage == Storage::Decoded || self.is_simple() || !prefill_fits(device, head_dim) {
            simple_kernel(kernels, head_dim, storage)?;
        } else {
            let (defines, shared) = (vec![("HEAD_DIM", head_dim)], prefill_block(head_dim).1);
            kernels.function(&ATTENTION_PREFILL, &defines, c"attention_prefill", shared)?;
        }
        Ok(())
    }

    pub fn describe(&self, device: &Device, layout: &CacheLayout) -> String {
        let d = layout.head_dim();
        if Storage::of(layout).is_ok_and(|storage| storage == Storage::Decoded) {
            return format!(
                "simple kernel: {} has no GPU kernels of its own, so its history is quantized and dequantized on the CPU and \
                 kept in BF16; answers are the codec's, memory and speed are not",
                layout.format()
            );
        }
        if self.is_simple() {
            return "simple kernel (OSCAR_CUDA_ATTENTION)".into();
        }
        match prefill_fits(device, d) {
            true => format!("tensor-core decode and prefill kernels, head size {d}"),
            false => format!(
                "tensor-core decode kernel, simple prefill kernel (too little shared memory), head size {d}"
            ),
        }
    }

    /// Whether queries can read codes where the windows alone say BF16. The simple kernel knows only
    /// the windows.
    pub fn reads_demoted_tails(&self, device: &Device, head_dim: usize) -> bool {
        !self.is_simple() && prefill_fits(device, head_dim)
    }

    pub fn begin_step(
        &mut self,
        device: &Device,
        kernels: &Kernels,
        tables: &StepTables,
        summary: &StepSummary,
        pool: &CudaPages,
    ) -> Result<()> {
        let decodes = !self.is_simple() && pool.storage() != Storage::Decoded;
        let kv_heads = pool.layout().kv_heads();
        self.makes_heads = decodes
            && self.mode == AttentionMode::Auto
            && summary.only_new_tokens(pool.layout().windows())
            && DecodeAttention::makes_heads(device, &costs(summary, pool.layout()), kv_heads)
            && self.has_kernel(device, pool.layout().head_dim(), self.group.unwrap_or(1));
        if decodes && summary.sequences.iter().any(|s| s.rows == 1) {
            self.decode.plan(device, kernels, tables, pool, self.makes_heads)?;
        }
        Ok(())
    }

    /// Plans as for the last step, whose tables now hold another like it.
    pub fn plan_again(&self, device: &Device, kernels: &Kernels) -> Result<()> {
        if self.is_simple() { Ok(()) } else { self.decode.plan_again(device, kernels) }
    }

    /// Will attention of this step take projections, and make queries, keys and values of them itself?
    pub fn makes_heads(&mut self, device: &Device, shape: &HeadShape) -> bool {
        let group = shape.query_heads / shape.kv_heads.max(1);
        self.group = Some(group);
        self.makes_heads && self.has_kernel(device, shape.head_dim, group)
    }

    /// Is there a kernel for heads like these that takes projections?
    fn has_kernel(&self, device: &Device, head_dim: usize, group: usize) -> bool {
        let shared = device.properties().shared_memory as usize;
        Variant::fitting(head_dim, group, shared).is_ok_and(|v| v.taking_projections(shared).is_some())
    }

    /// Enqueues a layer's attention; the answer says whether the BF16 output was written as well.
    pub fn attend(&mut self, device: &Device, kernels: &Kernels, call: &AttentionCall<'_>) -> Result<bool> {
        if call.pool.storage() == Storage::Decoded {
            simple(device, kernels, call)?;
            return Ok(false);
        }
        let rows = || call.summary.sequences.iter().map(|s| s.rows);
        // The simple kernel takes all rows, so it runs first where the decode kernel follows.
        let takes_all =
            self.is_simple() || rows().any(|r| r > 1) && !prefill_fits(device, call.shape.head_dim);
        if takes_all {
            simple(device, kernels, call)?;
        } else if rows().any(|r| r > 1) {
            prefill(device, kernels, call, 2)?;
        }
        if !self.is_simple() && rows().any(|r| r == 1) {
            let queries = call.projections.map_or(Queries::Ready(call.queries), Queries::FromProjections);
            let rows = DecodeRows { queries, out: call.out, rounded: call.rounded };
            self.decode.attend(device, kernels, call.layer, call.shape, call.tables, call.pool, rows)?;
        }
        Ok(!takes_all && call.rounded != 0)
    }
}

/// About what each sequence of a step reads, in rows of BF16.
fn costs(summary: &StepSummary, layout: &CacheLayout) -> Vec<usize> {
    let coded = |s: &SequenceInfo| (s.boundary as usize).saturating_sub(layout.windows().sink());
    let (full, code) = (layout.full_block_bytes(), layout.coded_block_bytes());
    let cost =
        |s: &SequenceInfo| (s.first_position + s.rows) as usize - coded(s) + coded(s) * code / full.max(1);
    summary.sequences.iter().map(cost).collect()
}

fn prefill_fits(device: &Device, head_dim: usize) -> bool {
    prefill_block(head_dim).1 <= device.properties().shared_memory as usize
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

fn simple_kernel(kernels: &Kernels, head_dim: usize, storage: Storage) -> Result<Function> {
    let defines = simple_attention_defines(head_dim, storage == Storage::Decoded);
    kernels.function(&ATTENTION_SIMPLE, &defines, c"attention_simple", 0)
}

/// `attention_simple.cu`, for all rows.
pub fn simple(device: &Device, kernels: &Kernels, call: &AttentionCall<'_>) -> Result<()> {
    let (shape, windows): (_, &Windows) = (call.shape, call.pool.layout().windows());
    let function = simple_kernel(kernels, shape.head_dim, call.pool.storage())?;
    let (key, value) = (windows.tail(Side::Key), windows.tail(Side::Value));
    let params = SimpleParams {
        step: *call.tables,
        pages: call.pool.layer(call.layer),
        queries: call.queries,
        out: call.out,
        query_heads: shape.query_heads as u32,
        kv_heads: shape.kv_heads as u32,
        scale: shape.scale,
        key_recent: window(key.recent),
        key_unit: window(key.unit),
        value_recent: window(value.recent),
        value_unit: window(value.unit),
        unused: 0,
    };
    let launch = LaunchShape::grid2(call.summary.rows, shape.query_heads, 256).overlapping();
    device.launch(function, launch, &params)
}
