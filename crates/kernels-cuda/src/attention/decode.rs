//! Decode attention: the plan of a step, its scratch memory, and the launches.
//!
//! A step is planned once for all layers whose heads have the same widths. Every layer is then one
//! launch of as many blocks (*workers*) as the GPU has multiprocessors. An *item* is one KV head of
//! one sequence. Nothing here waits for the device, and a launch's parameters depend only on
//! addresses, so a graph can hold the launches of all steps that use the same buffers.

use super::append::{HeadConstants, Projections};
use super::{LayerCall, Variant};
use crate::backend::grow;
use crate::device::{Device, Function, KernelParams, LaunchShape};
use crate::error::{CudaError, Result};
use crate::kernels::Kernels;
use crate::memory::Buffer;
use crate::pages::{CudaPages, HeadPages};
use crate::sources::{ATTENTION_DECODE, ATTENTION_PLAN, Defines};
use crate::step::{SequenceInfo, StepSummary, StepTables};
use oscar_backend::HeadShape;
use oscar_codec::CacheLayout;
use std::f32::consts::LOG2_E;

/// Bytes below which another block is not worth its start.
const LEAST_COST: u32 = 16 << 10;

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct DecodePlan {
    memory: u64,
    workers: u32,
    unused: u32,
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct PlanArgs {
    step: StepTables,
    heads: u64,
    cost_before: u64,
    plan: DecodePlan,
    kv_heads: u32,
    head_dim: u32,
    least_cost: u32,
    spare: u32,
    round_cost: u32,
    own_workers: u32,
}

// SAFETY: the struct of `attention_plan.cu`, filled with addresses of live buffers.
unsafe impl KernelParams for PlanArgs {}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct DecodeArgs {
    step: StepTables,
    plan: DecodePlan,
    heads: u64,
    queries: u64,
    qkv: u64,
    new_heads: HeadConstants,
    out: u64,
    rounded: u64,
    partials: u64,
    kv_heads: u32,
    group: u32,
    scale: f32,
    unused: u32,
}

// SAFETY: the struct of `attention_decode.cu`, filled with addresses of live buffers.
unsafe impl KernelParams for DecodeArgs {}

/// Page ids in a `WorkerPlan` of `decode_plan.cuh`.
const FIRST_PAGES: usize = 64;
/// Threads of a block of `attention_plan.cu`.
const PLAN_THREADS: u32 = 256;
/// KV heads and workers that `attention_plan.cu` has room for.
const MOST_HEADS: usize = 256;
const MOST_WORKERS: usize = 256;
/// A step has few items if it has this many workers for each.
const WORKERS_TO_AN_ITEM: usize = 8;
/// Most that a worker may read, as a multiple of its share. Memory stays as busy with a tenth of the
/// multiprocessors idle.
const MOST_UNEVEN: f64 = 1.12;
/// Bytes of `WorkerPlan` and `ItemPlan`.
const WORKER_PLAN: usize = 48 + 4 * FIRST_PAGES;
const ITEM_PLAN: usize = 16;
/// Bytes of `PartialQuad` of `decode_merge.cuh`.
const PARTIAL_QUAD: usize = 32;
/// Every byte of a partial result that no worker has written.
const EMPTY: u8 = 0xff;

/// Where the queries come from.
#[derive(Clone, Copy, Debug)]
pub enum Queries {
    /// f32 `[row][query head][head_dim]`, in the cache's basis; keys and values are in their pages.
    Ready(u64),
    /// The decode kernel makes them, and stores keys and values.
    FromProjections(Projections),
}

/// The decode kernels of one cache.
pub struct DecodeKernels {
    plan: Function,
    apart: (Variant, Function),
    /// The form that does the work of `append` too.
    fused: Option<(Variant, Function)>,
    /// Layers whose heads have the same widths share a profile, and so a plan.
    profile_of_layer: Vec<usize>,
    /// A layer of each profile.
    profiles: Vec<usize>,
}

impl DecodeKernels {
    /// `heads` are the pages of each layer and KV head; `fuses`: the fused form may be used.
    pub fn new(
        device: &Device,
        kernels: &Kernels,
        shape: &HeadShape,
        heads: &[HeadPages],
        fuses: bool,
    ) -> Result<Self> {
        if shape.kv_heads > MOST_HEADS {
            return Err(CudaError::Unsupported(format!(
                "decode attention with {} KV heads: plans are made for up to {MOST_HEADS}",
                shape.kv_heads
            )));
        }
        let shared_memory = device.properties().shared_memory as usize;
        let compiled = |v: Variant| {
            let name = c"decode_attention";
            kernels.function(&ATTENTION_DECODE, &v.defines(), name, v.shared_bytes()).map(|f| (v, f))
        };
        let variant = Variant::fitting(shape.head_dim, shape.group(), shared_memory)?;
        let fused = variant.fused(shared_memory).filter(|_| fuses);
        let (profile_of_layer, profiles) = profiles(heads, shape.kv_heads);
        Ok(Self {
            plan: kernels.function(&ATTENTION_PLAN, &Defines::new(), c"decode_plan", 0)?,
            apart: compiled(variant)?,
            fused: fused.map(compiled).transpose()?,
            profile_of_layer,
            profiles,
        })
    }

    /// Whether the decode kernel can also do the work of `append` in this step. Each block that reads
    /// an item makes its queries, so a block should read one item only: there must be few items, or
    /// they must fill the blocks evenly.
    pub fn can_fuse(&self, device: &Device, summary: &StepSummary, layout: &CacheLayout) -> bool {
        let (costs, workers) = (costs(summary, layout), workers(device));
        let kv_heads = layout.kv_heads();
        self.fused.is_some()
            && (is_few(costs.len() * kv_heads, workers) || fill_evenly(&costs, kv_heads, workers))
    }
}

/// Plans and scratch memory, kept from step to step; memory grows and is never given back.
#[derive(Default)]
pub struct DecodeMemory {
    plans: Option<Buffer>,
    cost: Option<Buffer>,
    partials: Option<Buffer>,
}

impl DecodeMemory {
    /// Plans the decode attention of a step for all layers: sequences that bring exactly one row.
    /// `fused`: every layer will run the fused form, and no item shares its workers.
    pub fn plan(
        &mut self,
        device: &Device,
        kernels: &DecodeKernels,
        tables: &StepTables,
        pages: &CudaPages,
        fused: bool,
    ) -> Result<()> {
        let (shape, variant) = (pages.shape(), kernels.apart.0);
        let sequences = tables.sequence_count as usize;
        let items = sequences * shape.kv_heads;
        grow(device, &mut self.plans, plan_bytes(device, items) * kernels.profiles.len(), "attention plans")?;
        grow(device, &mut self.cost, 8 * (sequences + 1), "attention plans")?;
        for (profile, &layer) in kernels.profiles.iter().enumerate() {
            let args = PlanArgs {
                step: *tables,
                heads: pages.layer(layer),
                cost_before: address(&self.cost),
                plan: self.plan_of(device, items, profile),
                kv_heads: shape.kv_heads as u32,
                head_dim: shape.head_dim as u32,
                least_cost: LEAST_COST,
                spare: spare_workers(items, workers(device)) as u32,
                round_cost: (variant.warps * variant.slot_bytes()) as u32,
                own_workers: u32::from(fused),
            };
            // Without overlap: attention reads the plan before it waits for the kernels of its layer.
            device.launch(kernels.plan, LaunchShape::new(workers(device), PLAN_THREADS), &args)?;
        }
        Ok(())
    }

    /// One layer's attention for the planned sequences.
    pub fn attend(&mut self, device: &Device, kernels: &DecodeKernels, call: &LayerCall<'_>) -> Result<()> {
        let refuse = |detail: String| CudaError::Shape { what: "decode attention", detail };
        let ((variant, function), queries, projections) = match (call.queries, kernels.fused) {
            (Queries::Ready(queries), _) => (kernels.apart, queries, None),
            (Queries::FromProjections(raw), Some(fused)) => (fused, 0, Some(raw)),
            (Queries::FromProjections(_), None) => {
                return Err(refuse(format!("{:?} does not take projections", kernels.apart.0)));
            }
        };
        let (shape, workers) = (call.pages.shape(), workers(device));
        let partials = 2 * workers * 8 * variant.query_tiles * shape.head_dim / 4 * PARTIAL_QUAD;
        if grow(device, &mut self.partials, partials, "partial attention results")?
            && let Some(buffer) = &self.partials
        {
            device.fill(buffer, EMPTY)?;
        }
        let profile = kernels.profile_of_layer.get(call.layer).copied();
        let profile = profile.ok_or_else(|| refuse(format!("layer {} was not planned", call.layer)))?;
        let items = call.tables.sequence_count as usize * shape.kv_heads;
        let args = DecodeArgs {
            step: *call.tables,
            plan: self.plan_of(device, items, profile),
            heads: call.pages.layer(call.layer),
            queries,
            qkv: projections.map_or(0, |p| p.rows),
            new_heads: projections.map(|p| p.constants).unwrap_or_default(),
            out: call.out,
            rounded: call.rounded,
            partials: address(&self.partials),
            kv_heads: shape.kv_heads as u32,
            group: shape.group() as u32,
            scale: shape.scale * LOG2_E,
            unused: 0,
        };
        let grid = LaunchShape::new(workers, 32 * (variant.warps as u32 + 1));
        device.launch(function, grid.shared(variant.shared_bytes()).overlapping(), &args)
    }

    fn plan_of(&self, device: &Device, items: usize, profile: usize) -> DecodePlan {
        let memory = address(&self.plans) + (profile * plan_bytes(device, items)) as u64;
        DecodePlan { memory, workers: workers(device) as u32, unused: 0 }
    }
}

fn plan_bytes(device: &Device, items: usize) -> usize {
    (workers(device) * WORKER_PLAN + items * ITEM_PLAN).next_multiple_of(128)
}

fn workers(device: &Device) -> usize {
    (device.properties().multiprocessors as usize).min(MOST_WORKERS)
}

/// Workers to leave idle if little is read: `append` has a block for each head of each row, and these
/// still hold their multiprocessors when attention begins on the others. Many rows hold too many to
/// leave them all out.
fn spare_workers(items: usize, workers: usize) -> usize {
    if is_few(items, workers) { items } else { 0 }
}

fn is_few(items: usize, workers: usize) -> bool {
    items <= workers / WORKERS_TO_AN_ITEM
}

/// About how much each sequence of a step reads, in rows of BF16.
fn costs(summary: &StepSummary, layout: &CacheLayout) -> Vec<usize> {
    let coded = |s: &SequenceInfo| (s.boundary as usize).saturating_sub(layout.windows().sink());
    let (full, code) = (layout.full_block_bytes(), layout.coded_block_bytes());
    let cost =
        |s: &SequenceInfo| (s.first_position + s.rows) as usize - coded(s) + coded(s) * code / full.max(1);
    summary.sequences.iter().map(cost).collect()
}

/// Whether no worker reads much more than its share if each item has workers of its own, as the plan
/// then assigns them.
fn fill_evenly(costs: &[usize], kv_heads: usize, workers: usize) -> bool {
    let (items, total) = (costs.len() * kv_heads, costs.iter().sum::<usize>() * kv_heads);
    let Some(rest) = workers.checked_sub(items) else { return false };
    let slowest = |&cost: &usize| cost as f64 / (1 + cost * rest / total.max(1)) as f64;
    let slowest = costs.iter().map(slowest).fold(0.0, f64::max);
    slowest * workers as f64 <= total as f64 * MOST_UNEVEN
}

fn address(buffer: &Option<Buffer>) -> u64 {
    buffer.as_ref().map_or(0, Buffer::address)
}

/// The profile of every layer, and the first layer of every profile.
fn profiles(heads: &[HeadPages], kv_heads: usize) -> (Vec<usize>, Vec<usize>) {
    let widths = |layer: usize| -> Vec<(u32, u32)> {
        heads[layer * kv_heads..(layer + 1) * kv_heads].iter().map(|h| (h.key_bits, h.value_bits)).collect()
    };
    let (mut of_layer, mut first): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
    for layer in 0..heads.len() / kv_heads.max(1) {
        let profile = first.iter().position(|&f| widths(f) == widths(layer)).unwrap_or_else(|| {
            first.push(layer);
            first.len() - 1
        });
        of_layer.push(profile);
    }
    (of_layer, first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_leave_their_multiprocessors_out_and_many_do_not() {
        assert_eq!([1, 8, 16, 17, 64].map(|items| spare_workers(items, 132)), [1, 8, 16, 0, 0]);
        assert_eq!(spare_workers(1, 4), 0);
    }

    #[test]
    fn items_fill_workers_evenly_or_not_at_all() {
        let equal = |batch: usize| fill_evenly(&vec![1000; batch], 8, 132);
        assert_eq!(
            [3, 4, 5, 6, 7, 8, 9, 16, 17].map(equal),
            [true, true, true, false, false, true, false, true, false]
        );
        let long_and_short = [100_000, 1000, 1000, 1000, 1000, 1000, 1000, 1000];
        assert!(!fill_evenly(&long_and_short, 8, 132));
        assert!(fill_evenly(&[100_000, 99_000, 98_000, 97_000], 8, 132));
        assert!(!fill_evenly(&[0; 20], 8, 132), "more items than workers");
    }

    #[test]
    fn layers_of_equal_widths_share_a_plan() {
        let head = |key_bits, value_bits| HeadPages {
            full: 0,
            coded: 0,
            key_bits,
            value_bits,
            key_clip: 0,
            value_clip: 0,
        };
        let heads =
            [head(2, 2), head(2, 2), head(2, 3), head(2, 2), head(2, 2), head(2, 2), head(2, 3), head(2, 2)];
        assert_eq!(profiles(&heads, 2), (vec![0, 1, 0, 1], vec![0, 1]));
        assert_eq!(profiles(&[], 2), (vec![], vec![]));
    }
}
