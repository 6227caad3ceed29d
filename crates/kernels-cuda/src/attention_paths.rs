//! Which kernel attends for which sequences of a step.

use crate::attention::decode::{DecodeAttention, DecodeRows, Queries, Variant};
use crate::device::{Device, KernelParams, LaunchShape};
use crate::error::{CudaError, Result};
use crate::heads::Projections;
use crate::kernels::Kernels;
use crate::pages::CudaPages;
use crate::sources::{ATTENTION_DECODED, ATTENTION_GENERIC, ATTENTION_PREFILL};
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
struct GenericParams {
    step: StepTables,
    pages: u64,
    queries: u64,
    out: u64,
    query_heads: u32,
    kv_heads: u32,
    scale: f32,
    unused: u32,
}

// SAFETY: the struct of `attention_generic.cu`, filled with addresses of live buffers.
unsafe impl KernelParams for GenericParams {}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct DecodedParams {
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

// SAFETY: the struct of `attention_decoded.cu`, filled with addresses of live buffers.
unsafe impl KernelParams for DecodedParams {}

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

/// The kernels that attend, and what they keep from step to step.
#[derive(Default)]
pub struct AttentionPaths {
    decode: DecodeAttention,
    /// `OSCAR_CUDA_ATTENTION=generic`: the plain kernel for everything, as a second opinion.
    plain: bool,
    /// `OSCAR_CUDA_ATTENTION=apart`: `append` always has a launch of its own.
    apart: bool,
    /// May decode attention make the heads of this step?
    makes_heads: bool,
    /// Query heads to a KV head, once heads have come.
    group: Option<usize>,
}

impl AttentionPaths {
    pub fn new() -> Result<Self> {
        let (plain, apart) = match std::env::var("OSCAR_CUDA_ATTENTION").as_deref() {
            Ok("generic") => (true, false),
            Ok("apart") => (false, true),
            Ok("" | "auto") | Err(_) => (false, false),
            Ok(other) => {
                let why = format!("OSCAR_CUDA_ATTENTION={other}: it may be auto, apart or generic");
                return Err(CudaError::Unsupported(why));
            }
        };
        Ok(Self { plain, apart, ..Self::default() })
    }

    /// Compiles what prompts will need.
    pub fn prepare(
        &self,
        device: &Device,
        kernels: &Kernels,
        head_dim: usize,
        storage: Storage,
    ) -> Result<()> {
        if storage == Storage::Decoded {
            let defines = vec![("HEAD_DIM", head_dim)];
            kernels.function(&ATTENTION_DECODED, &defines, c"attention_decoded", 0)?;
        } else if !self.plain && prefill_fits(device, head_dim) {
            let (defines, shared) = (vec![("HEAD_DIM", head_dim)], prefill_block(head_dim).1);
            kernels.function(&ATTENTION_PREFILL, &defines, c"attention_prefill", shared)?;
        }
        Ok(())
    }

    pub fn describe(&self, device: &Device, layout: &CacheLayout) -> String {
        let d = layout.head_dim();
        if Storage::of(layout).is_ok_and(|storage| storage == Storage::Decoded) {
            return format!(
                "generic, {} has no kernels here: codes are made on the CPU and kept decoded in BF16 on the device; \
                 answers are the codec's, memory and speed are not",
                layout.format()
            );
        }
        if self.plain {
            return "generic kernel (as asked)".into();
        }
        match prefill_fits(device, d) {
            true => format!("tensor-core decode and prefill kernels, head size {d}"),
            false => format!(
                "tensor-core decode kernel, generic prefill (too little shared memory), head size {d}"
            ),
        }
    }

    /// Can queries read as code what the windows give them in BF16? The plain kernel knows the windows alone.
    pub fn reads_demoted_tails(&self, device: &Device, head_dim: usize) -> bool {
        !self.plain && prefill_fits(device, head_dim)
    }

    pub fn begin_step(
        &mut self,
        device: &Device,
        kernels: &Kernels,
        tables: &StepTables,
        summary: &StepSummary,
        pool: &CudaPages,
    ) -> Result<()> {
        let decodes = !self.plain && pool.storage() != Storage::Decoded;
        let kv_heads = pool.layout().kv_heads();
        self.makes_heads = decodes
            && !self.apart
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
        if self.plain { Ok(()) } else { self.decode.plan_again(device, kernels) }
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
            decoded(device, kernels, call)?;
            return Ok(false);
        }
        let rows = || call.summary.sequences.iter().map(|s| s.rows);
        // The plain kernel takes all rows, so it runs first where the decode kernel follows.
        let plain = self.plain || rows().any(|r| r > 1) && !prefill_fits(device, call.shape.head_dim);
        if plain {
            generic(device, kernels, call)?;
        } else if rows().any(|r| r > 1) {
            prefill(device, kernels, call, 2)?;
        }
        if !self.plain && rows().any(|r| r == 1) {
            let queries = call.projections.map_or(Queries::Ready(call.queries), Queries::FromProjections);
            let rows = DecodeRows { queries, out: call.out, rounded: call.rounded };
            self.decode.attend(device, kernels, call.layer, call.shape, call.tables, call.pool, rows)?;
        }
        Ok(!plain && call.rounded != 0)
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

/// The kernel of caches whose history is kept decoded, for any row.
pub fn decoded(device: &Device, kernels: &Kernels, call: &AttentionCall<'_>) -> Result<()> {
    let (shape, windows): (_, &Windows) = (call.shape, call.pool.layout().windows());
    let defines = vec![("HEAD_DIM", shape.head_dim)];
    let function = kernels.function(&ATTENTION_DECODED, &defines, c"attention_decoded", 0)?;
    let (key, value) = (windows.tail(Side::Key), windows.tail(Side::Value));
    let params = DecodedParams {
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
        unused: 0,
    };
    let launch = LaunchShape::grid2(call.summary.rows, shape.query_heads, 256).overlapping();
    device.launch(function, launch, &params)
}
