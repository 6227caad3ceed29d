//! Prefill attention on Hopper, in two launches: quantized pages are expanded to FP16, then one kernel
//! attends over BF16 pages and the expanded ones.
//!
//! Expanding takes about 1 % of the time at 100K tokens and chunks of 4096. The memory for it is
//! bounded: a long context is expanded and attended for a few KV heads at a time.

use super::LayerCall;
use super::prefill::{Block, LEAST_ROWS};
use crate::backend::grow;
use crate::device::{Device, Function, LaunchShape};
use crate::error::Result;
use crate::kernels::Kernels;
use crate::layout::shared_struct;
use crate::memory::{Buffer, DevicePtr};
use crate::pages::HeadPages;
use crate::sources::DEQUANTIZE;
use crate::step::StepTables;
use half::{bf16, f16};
use oscar_backend::HeadShape;
use oscar_codec::PAGE_TOKENS;

/// Bytes of expanded pages at a time, unless one KV head needs more.
pub const EXPANDED_BYTES: usize = 512 << 20;

/// Threads of a block of `dequantize.cu`.
const DEQUANTIZE_THREADS: u32 = 128;

/// Memory for expanded pages, kept from step to step.
#[derive(Default)]
pub struct ExpandedPages(Option<Buffer>);

/// The kernel that expands pages.
pub struct Dequantize(Function);

shared_struct! {
    pub(super) struct DequantizeParams {
        step: StepTables,
        pages: DevicePtr<HeadPages>,
        expanded: DevicePtr<f16>,
        expanded_head: u64,
        first_head: u32,
        least_rows: u32,
    }
}

shared_struct! {
    pub(super) struct HopperPrefillParams {
        step: StepTables,
        pages: DevicePtr<HeadPages>,
        expanded: Option<DevicePtr<f16>>,
        expanded_head: u64,
        queries: DevicePtr<f32>,
        out: Option<DevicePtr<f32>>,
        rounded: Option<DevicePtr<bf16>>,
        query_heads: u32,
        kv_heads: u32,
        first_head: u32,
        least_rows: u32,
        scale: f32,
    }
}

impl Dequantize {
    pub fn new(kernels: &Kernels, head_dim: usize) -> Result<Self> {
        let defines = vec![("HEAD_DIM", head_dim)];
        let shared = page_bytes(head_dim);
        Ok(Self(kernels.function(&DEQUANTIZE, &defines, c"dequantize_pages", shared)?))
    }

    /// Attends with `function`, expanding the quantized pages of a few KV heads at a time.
    ///
    /// # Safety
    /// As for [`LayerCall::attend`]; `function` and `block` are those of the Hopper kernel.
    pub(super) unsafe fn attend(
        &self,
        device: &Device,
        call: &LayerCall<'_>,
        function: Function,
        block: &Block,
        expanded: &mut ExpandedPages,
    ) -> Result<()> {
        let shape = call.pages.shape();
        let work = Expansion::of(call);
        let head_bytes = work.places * page_bytes(shape.head_dim);
        let heads = match work.blocks {
            0 => shape.kv_heads,
            _ => heads_at_a_time(head_bytes, shape.kv_heads),
        };
        let buffer = match work.blocks {
            0 => None,
            _ => Some(grow(device, &mut expanded.0, heads * head_bytes, "expanded pages")?.0.ptr()),
        };
        for first_head in (0..shape.kv_heads).step_by(heads) {
            let count = heads.min(shape.kv_heads - first_head);
            if let Some(expanded) = buffer {
                let params = DequantizeParams {
                    step: call.step(),
                    pages: call.pages.layer(call.layer),
                    expanded,
                    expanded_head: head_bytes as u64,
                    first_head: first_head as u32,
                    least_rows: LEAST_ROWS,
                };
                let launch = LaunchShape {
                    grid: (work.blocks as u32, count as u32, call.summary.sequences.len() as u32),
                    block: DEQUANTIZE_THREADS,
                    shared: page_bytes(shape.head_dim) as u32,
                    overlap: true,
                };
                // SAFETY: the caller's promise; `expanded` has a page for every place of the tables and
                // each of `count` heads.
                unsafe { device.launch(self.0, launch, params) }?;
            }
            let params = HopperPrefillParams {
                step: call.step(),
                pages: call.pages.layer(call.layer),
                expanded: buffer,
                expanded_head: head_bytes as u64,
                queries: call.ready_queries()?,
                out: call.out,
                rounded: call.rounded,
                query_heads: shape.query_heads as u32,
                kv_heads: shape.kv_heads as u32,
                first_head: first_head as u32,
                least_rows: LEAST_ROWS,
                scale: shape.scale,
            };
            // SAFETY: the caller's promise; the kernel before has expanded the pages of these heads.
            unsafe { device.launch(function, block.launch(call, count), params) }?;
        }
        Ok(())
    }
}

/// The pages that a step expands, for each KV head.
struct Expansion {
    /// Places of the page tables.
    places: usize,
    /// Most quantized blocks of a sequence with several rows.
    blocks: usize,
}

impl Expansion {
    fn of(call: &LayerCall<'_>) -> Self {
        let first = call.tables.sink as usize / PAGE_TOKENS;
        let prompts = || call.summary.sequences.iter().filter(|s| s.rows >= LEAST_ROWS);
        let end = |s: &crate::step::SequenceInfo| (s.first_position + s.rows) as usize;
        let places = prompts().map(|s| s.table as usize + end(s).div_ceil(PAGE_TOKENS)).max();
        let quantized = |s: &&crate::step::SequenceInfo| s.boundary > call.tables.sink;
        let blocks = prompts().filter(quantized).map(|s| (s.boundary as usize).div_ceil(PAGE_TOKENS) - first);
        Self { places: places.unwrap_or(0), blocks: blocks.max().unwrap_or(0) }
    }
}

/// KV heads whose pages are expanded together.
fn heads_at_a_time(head_bytes: usize, kv_heads: usize) -> usize {
    (EXPANDED_BYTES / head_bytes.max(1)).clamp(1, kv_heads.max(1))
}

/// Most bytes of expanded pages, for prompts of together `tokens` tokens.
pub fn expanded_bytes(heads: &HeadShape, tokens: usize) -> usize {
    let head_bytes = tokens.div_ceil(PAGE_TOKENS) * page_bytes(heads.head_dim);
    head_bytes * heads_at_a_time(head_bytes, heads.kv_heads)
}

/// A page of keys and values in 16 bits.
fn page_bytes(head_dim: usize) -> usize {
    4 * PAGE_TOKENS * head_dim
}
