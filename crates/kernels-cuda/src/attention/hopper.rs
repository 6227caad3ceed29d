//! Prefill attention on Hopper, in two launches: quantized pages are expanded to FP16 (keys of one or
//! two bits to E4M3), then one kernel attends over BF16 pages and the expanded ones. A third launch
//! merges where blocks share a context.
//!
//! Expanding takes about 1 % of the time at 100K tokens and chunks of 4096. The memory for it is
//! bounded: a long context is expanded and attended for a few KV heads at a time.

use super::prefill::{Block, LEAST_ROWS};
use super::{AttentionMode, LayerCall, Sinks};
use crate::backend::grow;
use crate::device::{Device, Function, LaunchShape, Properties};
use crate::error::Result;
use crate::kernels::Kernels;
use crate::layout::shared_struct;
use crate::memory::{Buffer, DevicePtr};
use crate::pages::HeadPages;
use crate::sources::{ATTENTION_PREFILL_HOPPER, DEQUANTIZE, prefill_defines};
use crate::step::{SequenceInfo, StepTables};
use half::{bf16, f16};
use oscar_backend::{HeadShape, PrefillWave};
use oscar_codec::PAGE_TOKENS;
use std::ops::Range;
use std::sync::OnceLock;

/// Bytes of expanded pages at a time, unless one KV head needs more.
pub const EXPANDED_BYTES: usize = 512 << 20;

/// Threads of a block of `dequantize.cu`.
const DEQUANTIZE_THREADS: u32 = 128;
/// Rows that a block of `prefill_merge` adds up.
const MERGE_ROWS: usize = 4;
/// Fewest pages of a block that shares a context.
const LEAST_PAGES: usize = 16;
/// Blocks that share contexts fill the GPU at most this often.
const SPLIT_WAVES: usize = 2 * PrefillWave::DIVIDED;

/// Memory for expanded pages and for parts of rows, kept from step to step.
#[derive(Default)]
pub struct HopperMemory {
    expanded: Option<Buffer>,
    partial: Option<Buffer>,
}

/// Keys of at most this many bits are expanded to E4M3. Its rounding error is 2.6 % of a key; that of
/// two bits is 34 %, of four bits 9 %.
const E4M3_BITS: u32 = 2;

/// The kernels beside the one that attends.
pub struct HopperKernels {
    /// Expands quantized pages.
    dequantize: Function,
    /// Adds up the parts of rows whose context several blocks share.
    merge: Function,
    /// The same with attention sinks.
    merge_with_sinks: OnceLock<Function>,
    e4m3_bits: u32,
}

shared_struct! {
    pub(super) struct DequantizeParams {
        step: StepTables,
        pages: DevicePtr<HeadPages>,
        expanded: DevicePtr<f16>,
        expanded_head: u64,
        first_head: u32,
        first_sequence: u32,
        least_rows: u32,
        e4m3_bits: u32,
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
        first_sequence: u32,
        least_rows: u32,
        tiles: u32,
        splits: u32,
        e4m3_bits: u32,
        scale: f32,
        partial: Option<DevicePtr<f32>>,
        sinks: Sinks,
    }
}

impl HopperKernels {
    pub fn new(kernels: &Kernels, head_dim: usize, mode: AttentionMode) -> Result<Self> {
        let defines = vec![("HEAD_DIM", head_dim)];
        Ok(Self {
            dequantize: kernels.function(&DEQUANTIZE, &defines, c"dequantize_pages", page_bytes(head_dim))?,
            merge: Self::merge(kernels, head_dim, false)?,
            merge_with_sinks: OnceLock::new(),
            // A panel of E4M3 has 128 channels.
            e4m3_bits: if head_dim >= 128 { e4m3_bits(mode) } else { 0 },
        })
    }

    fn merge(kernels: &Kernels, head_dim: usize, sinks: bool) -> Result<Function> {
        let defines = prefill_defines(head_dim, sinks);
        kernels.function(&ATTENTION_PREFILL_HOPPER, &defines, c"prefill_merge", 0)
    }

    /// Compiles the merge with attention sinks.
    pub(super) fn prepare_sinks(&self, kernels: &Kernels, head_dim: usize) -> Result<()> {
        let _ = self.merge_with_sinks.set(Self::merge(kernels, head_dim, true)?);
        Ok(())
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
        memory: &mut HopperMemory,
    ) -> Result<()> {
        let shape = call.pages.shape();
        let merge = call.sinks.form(self.merge, &self.merge_with_sinks)?;
        let work = Expansion::of(call);
        let head_bytes = work.places * page_bytes(shape.head_dim);
        let heads = match work.blocks {
            0 => shape.kv_heads,
            _ => heads_at_a_time(head_bytes, shape.kv_heads),
        };
        let buffer = match work.blocks {
            0 => None,
            _ => Some(grow(device, &mut memory.expanded, heads * head_bytes, "expanded pages")?.0.ptr()),
        };
        let whole = block.launch(call, heads);
        let prompts = work.prompts.clone();
        let (tiles, kv_heads, sequences) = (whole.grid.0, whole.grid.1, prompts.len() as u32);
        let blocks = tiles as usize * kv_heads as usize * sequences as usize;
        let splits = splits(blocks, device.properties().multiprocessors as usize, work.pages);
        let partial = match splits {
            1 => None,
            _ => {
                let bytes = blocks * splits * part_bytes(block.rows, shape.head_dim);
                Some(grow(device, &mut memory.partial, bytes, "parts of attention")?.0.ptr())
            }
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
                    first_sequence: prompts.start as u32,
                    least_rows: LEAST_ROWS,
                    e4m3_bits: self.e4m3_bits,
                };
                let launch = LaunchShape {
                    grid: (work.blocks as u32, count as u32, sequences),
                    block: DEQUANTIZE_THREADS,
                    shared: page_bytes(shape.head_dim) as u32,
                    overlap: true,
                };
                // SAFETY: the caller's promise; `expanded` has a page for every place of the tables and
                // each of `count` heads.
                unsafe { device.launch(self.dequantize, launch, params) }?;
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
                first_sequence: prompts.start as u32,
                least_rows: LEAST_ROWS,
                tiles,
                splits: splits as u32,
                e4m3_bits: self.e4m3_bits,
                scale: shape.scale,
                partial,
                sinks: call.sinks,
            };
            let grid = (count as u32, tiles * splits as u32, sequences);
            // SAFETY: the caller's promise; the kernel before has expanded the pages of these heads, and
            // `partial` has room for the parts of `heads` heads.
            unsafe { device.launch(function, LaunchShape { grid, ..whole }, params) }?;
            if splits > 1 {
                let rows = tiles as usize * block.rows;
                let launch = LaunchShape {
                    grid: (count as u32, rows.div_ceil(MERGE_ROWS) as u32, sequences),
                    block: 32 * MERGE_ROWS as u32,
                    shared: 0,
                    overlap: true,
                };
                // SAFETY: the kernel before has written the parts.
                unsafe { device.launch(merge, launch, params) }?;
            }
        }
        Ok(())
    }
}

/// Blocks that share the context of the same rows: as many as keep the multiprocessors busy, each with
/// enough pages to be worth its part of the merge. Of many blocks none is shared: their last wave
/// matters little.
fn splits(blocks: usize, multiprocessors: usize, pages: usize) -> usize {
    let most = (pages / LEAST_PAGES).min(SPLIT_WAVES * multiprocessors / blocks.max(1)).max(1);
    // Time in waves; of equals the fewest.
    let time = |splits: usize| (blocks * splits).div_ceil(multiprocessors) as f64 / splits as f64;
    (1..=most).fold(1, |best, splits| if time(splits) < 0.95 * time(best) { splits } else { best })
}

/// Bytes of the parts of a block of rows.
fn part_bytes(rows: usize, head_dim: usize) -> usize {
    4 * rows * (head_dim + 2)
}

/// Most bytes of parts of attention.
pub fn partial_bytes(gpu: &Properties, rows: usize, head_dim: usize) -> usize {
    SPLIT_WAVES * gpu.multiprocessors as usize * part_bytes(rows, head_dim)
}

/// Keys of at most this many bits are expanded to E4M3, in heads of 128 channels and more.
pub fn e4m3_bits(mode: AttentionMode) -> u32 {
    if mode == AttentionMode::F16 { 0 } else { E4M3_BITS }
}

/// The prompts of a step, and the pages that it expands for each KV head.
struct Expansion {
    /// From the first sequence with several rows to the last.
    prompts: Range<usize>,
    /// Pages of the longest sequence.
    pages: usize,
    /// Places of the page tables.
    places: usize,
    /// Most quantized blocks of a sequence with several rows.
    blocks: usize,
}

impl Expansion {
    fn of(call: &LayerCall<'_>) -> Self {
        let first = call.tables.sink as usize / PAGE_TOKENS;
        let sequences = &call.summary.sequences;
        let is_prompt = |s: &SequenceInfo| s.rows >= LEAST_ROWS;
        let prompts = || sequences.iter().filter(|s| is_prompt(s));
        let end = |s: &SequenceInfo| (s.first_position + s.rows) as usize;
        let places = prompts().map(|s| s.table as usize + end(s).div_ceil(PAGE_TOKENS)).max();
        let quantized = |s: &&SequenceInfo| s.boundary > call.tables.sink;
        let blocks = prompts().filter(quantized).map(|s| (s.boundary as usize).div_ceil(PAGE_TOKENS) - first);
        let pages = prompts().map(|s| end(s).div_ceil(PAGE_TOKENS)).max();
        let begin = sequences.iter().position(is_prompt).unwrap_or(0);
        Self {
            prompts: begin..sequences.iter().rposition(is_prompt).map_or(begin, |last| last + 1),
            pages: pages.unwrap_or(0),
            places: places.unwrap_or(0),
            blocks: blocks.max().unwrap_or(0),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_blocks_share_long_contexts_and_fill_whole_waves() {
        // An H200 and chunks of 48 to 1000 tokens of 32/8 heads behind 90K tokens.
        let of = |tokens: usize| (8 * tokens.div_ceil(48), splits(8 * tokens.div_ceil(48), 132, 1400));
        assert_eq!([48, 384, 500, 768, 800].map(of), [(8, 16), (64, 2), (88, 3), (128, 1), (136, 4)]);
        assert_eq!([1584, 1900, 7920].map(of), [(264, 1), (320, 2), (1320, 1)]);
        assert_eq!(splits(8, 132, 3), 1, "a short context is not divided");
        assert_eq!(splits(1, 132, 40), 2);
        for blocks in 1..132 {
            let splits = splits(blocks, 132, 10_000);
            assert!(blocks * splits <= SPLIT_WAVES * 132, "{blocks} × {splits} parts");
            let busy = blocks as f64 * splits as f64 / ((blocks * splits).div_ceil(132) * 132) as f64;
            assert!(busy > 0.79, "{blocks} blocks in {splits} parts: {busy} of the multiprocessors");
        }
    }
}
