//! Decode attention: the plan of a step, its scratch memory, and the launches.
//!
//! A step is planned once for all layers whose heads have the same widths. Every layer is then one
//! launch of as many blocks (*workers*) as the GPU has multiprocessors. An *item* is one KV head of
//! one sequence. Nothing here waits for the device, and a launch's parameters depend only on
//! addresses, so a graph can hold the launches of all steps that use the same buffers.

use super::append::{HeadConstants, Projections};
use super::{LayerCall, Sinks, Variant};
use crate::backend::grow;
use crate::device::{Device, Function, LaunchShape};
use crate::error::{CudaError, Result};
use crate::kernels::Kernels;
use crate::layout::{Layout, shared_struct};
use crate::memory::{Buffer, DevicePtr};
use crate::pages::{CudaPages, HeadPages};
use crate::sources::{ATTENTION_DECODE, ATTENTION_PLAN, Defines};
use crate::step::{SequenceInfo, StepSummary, StepTables};
use half::bf16;
use oscar_backend::HeadShape;
use oscar_codec::CacheLayout;
use std::f32::consts::LOG2_E;
use std::sync::OnceLock;

/// Bytes below which another block is not worth its start.
const LEAST_COST: u32 = 16 << 10;

shared_struct! {
    /// A `WorkerPlan` for each worker, then an `ItemPlan` for each item.
    pub(super) struct DecodePlan {
        memory: DevicePtr<u8>,
        workers: u32,
    }
}

shared_struct! {
    pub(super) struct PlanArgs {
        step: StepTables,
        heads: DevicePtr<HeadPages>,
        cost_before: DevicePtr<u64>,
        plan: DecodePlan,
        plan_bytes: u64,
        kv_heads: u32,
        head_dim: u32,
        least_cost: u32,
        spare: u32,
        round_cost: u32,
        own_workers: u32,
    }
}

shared_struct! {
    pub(super) struct DecodeArgs {
        step: StepTables,
        plan: DecodePlan,
        heads: DevicePtr<HeadPages>,
        /// `None` if the kernel makes the queries of `qkv`.
        queries: Option<DevicePtr<f32>>,
        qkv: Option<DevicePtr<f32>>,
        new_heads: HeadConstants,
        out: DevicePtr<f32>,
        rounded: Option<DevicePtr<bf16>>,
        partials: DevicePtr<f32>,
        kv_heads: u32,
        group: u32,
        scale: f32,
        sinks: Sinks,
    }
}

/// Page ids in a `WorkerPlan` of `decode_plan.cuh`.
const FIRST_PAGES: usize = 64;
/// Threads of a block of `attention_plan.cu`.
const PLAN_THREADS: u32 = 256;
/// KV heads and workers that `attention_plan.cu` has room for.
const MOST_HEADS: usize = 256;
const MOST_WORKERS: usize = 256;
/// A step has few items if it has this many workers for each.
const WORKERS_TO_AN_ITEM: usize = 8;
/// Most that a worker may read, as a multiple of its share. Memory stays as busy with a tenth of
/// the multiprocessors idle.
const MOST_UNEVEN: f64 = 1.12;
/// Structs that only the kernels read and write.
pub(super) const WORKER_PLAN: Layout = Layout { name: "WorkerPlan", size: 64 + 4 * FIRST_PAGES, fields: &[] };
pub(super) const ITEM_PLAN: Layout = Layout { name: "ItemPlan", size: 16, fields: &[] };
pub(super) const PARTIAL_QUAD: Layout = Layout { name: "PartialQuad", size: 32, fields: &[] };
/// Every byte of a partial result that no worker has written.
const EMPTY: u8 = 0xff;

/// Where the queries come from.
#[derive(Clone, Copy, Debug)]
pub enum Queries {
    /// f32 `[row][query head][head_dim]`, in the cache's basis; keys and values are in their pages.
    Ready(DevicePtr<f32>),
    /// The decode kernel makes them, and stores keys and values.
    FromProjections(Projections),
}

/// The decode kernels of one cache.
pub struct DecodeKernels {
    plan: Function,
    apart: (Variant, Function),
    /// The form that does the work of `append` too.
    fused: Option<(Variant, Function)>,
    /// The form of `apart` that adds attention sinks.
    with_sinks: OnceLock<Function>,
    /// Layers whose heads have the same widths share a profile, and so a plan.
    profile_of_layer: Vec<usize>,
    /// A layer of each profile.
    profiles: Vec<usize>,
}

impl DecodeKernels {
    /// `heads` are the pages of each layer and KV head of a cache; `fuses`: the fused form may be used.
    pub fn new(
        device: &Device,
        kernels: &Kernels,
        shape: &HeadShape,
        (layout, heads): (&CacheLayout, &[HeadPages]),
        fuses: bool,
    ) -> Result<Self> {
        if shape.kv_heads > MOST_HEADS {
            return Err(CudaError::Unsupported(format!(
                "decode attention with {} KV heads: plans are made for up to {MOST_HEADS}",
                shape.kv_heads
            )));
        }
        let shared_memory = device.properties().shared_memory as usize;
        let compiled = |v: Variant| compiled(kernels, v).map(|function| (v, function));
        let variant = Variant::fitting(shape.head_dim, shape.group(), shared_memory)?;
        let fused = variant.fused(shared_memory).filter(|_| fuses);
        let (profile_of_layer, profiles) = profiles(heads, shape.kv_heads, |layer| layout.slides(layer));
        Ok(Self {
            plan: kernels.function(&ATTENTION_PLAN, &Defines::new(), c"decode_plan", 0)?,
            apart: compiled(variant)?,
            fused: fused.map(compiled).transpose()?,
            with_sinks: OnceLock::new(),
            profile_of_layer,
            profiles,
        })
    }

    /// Compiles the form that adds attention sinks, once.
    pub fn prepare_sinks(&self, kernels: &Kernels) -> Result<()> {
        if self.with_sinks.get().is_none() {
            let _ = self.with_sinks.set(compiled(kernels, Variant { sinks: true, ..self.apart.0 })?);
        }
        Ok(())
    }

    /// Whether the decode kernel can also do the work of `append` in this step. Each block that
    /// reads an item makes its queries, so a block should read one item only: there must be few
    /// items, or they must fill the blocks evenly.
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
    /// `fused`: every layer will run the fused form, and no item shares its workers. `views`: some
    /// sequence reads a view, whose heads keep different rows in each layer, so each layer has a plan.
    ///
    /// # Safety
    /// As for [`LayerCall::plan`].
    pub unsafe fn plan(
        &mut self,
        device: &Device,
        kernels: &DecodeKernels,
        tables: &StepTables,
        pages: &CudaPages,
        fused: bool,
        views: bool,
    ) -> Result<()> {
        let (shape, variant) = (pages.shape(), kernels.apart.0);
        let sequences = tables.sequence_count as usize;
        let items = sequences * shape.kv_heads;
        let layers = if views { pages.layout().layers() } else { 1 };
        let bytes = plan_bytes(device, items) * layers.max(kernels.profiles.len());
        let plans = grow(device, &mut self.plans, bytes, "attention plans")?.0;
        let cost = grow(device, &mut self.cost, 8 * (sequences + 1) * layers, "attention plans")?.0;
        let profiles = if views { &[0] } else { &kernels.profiles[..] };
        for (profile, &layer) in profiles.iter().enumerate() {
            let args = PlanArgs {
                step: *tables,
                heads: pages.layer(layer),
                cost_before: cost.ptr(),
                plan: plan_of(plans, device, items, profile),
                plan_bytes: plan_bytes(device, items) as u64,
                kv_heads: shape.kv_heads as u32,
                head_dim: shape.head_dim as u32,
                least_cost: LEAST_COST,
                spare: spare_workers(items, workers(device)) as u32,
                round_cost: (variant.warps * variant.slot_bytes()) as u32,
                own_workers: u32::from(fused),
            };
            // Without overlap: attention reads the plan before it waits for the kernels of its
            // layer.
            let grid = LaunchShape::grid2(workers(device), layers, PLAN_THREADS);
            // SAFETY: the caller's promise about the tables; the buffers have room for the plans of
            // this many items and for the costs of all sequences, for each layer of the grid.
            unsafe { device.launch(kernels.plan, grid, args) }?;
        }
        Ok(())
    }

    /// One layer's attention for the planned sequences.
    ///
    /// # Safety
    /// As for [`LayerCall::attend`].
    pub unsafe fn attend(
        &mut self,
        device: &Device,
        kernels: &DecodeKernels,
        call: &LayerCall<'_>,
    ) -> Result<()> {
        let refuse = |detail: String| CudaError::Shape { what: "decode attention", detail };
        let ((variant, function), queries, projections) = match (call.queries, kernels.fused) {
            (Queries::Ready(queries), _) => {
                let (variant, plain) = kernels.apart;
                ((variant, call.sinks.form(plain, &kernels.with_sinks)?), Some(queries), None)
            }
            (Queries::FromProjections(raw), Some(fused)) if call.sinks.is_empty() => (fused, None, Some(raw)),
            (Queries::FromProjections(_), _) => {
                let sinks = !call.sinks.is_empty();
                return Err(refuse(format!(
                    "{:?} does not take projections, sinks: {sinks}",
                    kernels.apart.0
                )));
            }
        };
        let (shape, workers) = (call.pages.shape(), workers(device));
        let bytes = 2 * workers * 8 * variant.query_tiles * shape.head_dim / 4 * PARTIAL_QUAD.size;
        let (partials, new) = grow(device, &mut self.partials, bytes, "partial attention results")?;
        if new {
            device.fill(partials, EMPTY)?;
        }
        let profile = kernels.profile_of_layer.get(call.layer).copied();
        let profile = if call.summary.views { Some(call.layer) } else { profile };
        let profile = profile.ok_or_else(|| refuse(format!("layer {} was not planned", call.layer)))?;
        let items = call.tables.sequence_count as usize * shape.kv_heads;
        let plans = self.plans.as_ref().ok_or_else(|| refuse("the step was not planned".into()))?;
        let args = DecodeArgs {
            step: call.step(),
            plan: plan_of(plans, device, items, profile),
            heads: call.pages.layer(call.layer),
            queries,
            qkv: projections.map(|p| p.rows),
            new_heads: projections.map(|p| p.constants).unwrap_or_default(),
            out: call.held_out()?,
            rounded: call.rounded,
            partials: partials.ptr(),
            kv_heads: shape.kv_heads as u32,
            group: shape.group() as u32,
            scale: shape.scale * LOG2_E,
            sinks: call.sinks,
        };
        let grid = LaunchShape::new(workers, 32 * (variant.warps as u32 + 1));
        // SAFETY: the caller's promise; the partial results have room for all workers.
        unsafe { device.launch(function, grid.shared(variant.shared_bytes()).overlapping(), args) }
    }
}

/// The plan of a profile.
fn plan_of(plans: &Buffer, device: &Device, items: usize, profile: usize) -> DecodePlan {
    let memory = plans.ptr::<u8>().add(profile * plan_bytes(device, items));
    DecodePlan { memory, workers: workers(device) as u32 }
}

fn plan_bytes(device: &Device, items: usize) -> usize {
    (workers(device) * WORKER_PLAN.size + items * ITEM_PLAN.size).next_multiple_of(128)
}

fn workers(device: &Device) -> usize {
    (device.properties().multiprocessors as usize).min(MOST_WORKERS)
}

/// Workers to leave idle if little is read: `append` has a block for each head of each row, and
/// these still hold their multiprocessors when attention begins on the others. Many rows hold too
/// many to leave them all out.
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

/// Whether no worker reads much more than its share if each item has workers of its own, as the
/// plan then assigns them.
fn fill_evenly(costs: &[usize], kv_heads: usize, workers: usize) -> bool {
    let (items, total) = (costs.len() * kv_heads, costs.iter().sum::<usize>() * kv_heads);
    let Some(rest) = workers.checked_sub(items) else { return false };
    let slowest = |&cost: &usize| cost as f64 / (1 + cost * rest / total.max(1)) as f64;
    let slowest = costs.iter().map(slowest).fold(0.0, f64::max);
    slowest * workers as f64 <= total as f64 * MOST_UNEVEN
}

fn compiled(kernels: &Kernels, v: Variant) -> Result<Function> {
    kernels.function(&ATTENTION_DECODE, &v.defines(), c"decode_attention", v.shared_bytes())
}

/// The profile of every layer, and the first layer of every profile. Sliding layers need none; they get
/// the first.
fn profiles(
    heads: &[HeadPages],
    kv_heads: usize,
    slides: impl Fn(usize) -> bool,
) -> (Vec<usize>, Vec<usize>) {
    let widths = |layer: usize| -> Vec<(u32, u32)> {
        heads[layer * kv_heads..(layer + 1) * kv_heads].iter().map(|h| (h.key_bits, h.value_bits)).collect()
    };
    let (mut of_layer, mut first): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
    for layer in 0..heads.len() / kv_heads.max(1) {
        if slides(layer) {
            of_layer.push(0);
            continue;
        }
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
        assert_eq!(profiles(&heads, 2, |_| false), (vec![0, 1, 0, 1], vec![0, 1]));
        assert_eq!(profiles(&heads, 2, |layer| layer % 2 == 0), (vec![0, 0, 0, 0], vec![1]));
        assert_eq!(profiles(&[], 2, |_| false), (vec![], vec![]));
    }
}
