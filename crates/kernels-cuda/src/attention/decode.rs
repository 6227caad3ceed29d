//! Decode attention: the variant of the kernel, the plan of a step and its scratch memory.
//!
//! A step is planned once for all layers whose heads have the same widths; every layer is then one launch of as many
//! blocks as the GPU has multiprocessors. Nothing here waits for the device, and a launch's parameters depend only on
//! addresses, so steps of the same buffers can be captured in a graph.

use crate::device::{Device, KernelParams, LaunchShape};
use crate::error::{CudaError, Result};
use crate::heads::{HeadConstants, Projections};
use crate::kernels::Kernels;
use crate::memory::Buffer;
use crate::pages::{CudaPages, HeadPages};
use crate::sources::{ATTENTION_DECODE, ATTENTION_PLAN, Defines, HEAD_DIMS};
use crate::step::StepTables;
use oscar_backend::HeadShape;
use std::f32::consts::LOG2_E;

/// Most query heads to a KV head.
pub const MAX_GROUP: usize = 16;
/// Bytes below which a block is not worth its start.
const LEAST_COST: u32 = 16 << 10;
/// Slots of a warp's ring: more hide more latency, as far as shared memory goes.
const STAGES: std::ops::RangeInclusive<usize> = 2..=4;

/// One compiled form of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    pub head_dim: usize,
    /// Tiles of eight query heads.
    pub query_tiles: usize,
    /// Warps that read; one more fills their rings.
    pub warps: usize,
    pub stages: usize,
    /// Tiles of four query heads whose high and low bytes are multiplied against two-bit keys; 0 for fp16 queries.
    pub split_query: usize,
    /// Does it make queries, and the new token's key and value, of projections?
    pub from_projections: bool,
}

impl Variant {
    /// The largest form for this shape that fits a block's shared memory.
    pub fn fitting(head_dim: usize, group: usize, shared_memory: usize) -> Result<Self> {
        if !HEAD_DIMS.contains(&head_dim) || group == 0 || group > MAX_GROUP {
            return Err(CudaError::Unsupported(format!(
                "attention with head size {head_dim} and {group} query heads to a KV head: kernels exist for head sizes 64, \
                 128 and 256 and up to {MAX_GROUP} query heads"
            )));
        }
        let query_tiles = group.div_ceil(8);
        // Registers: results and query of every warp, the filling one too, must fit the register file.
        let warps = match query_tiles * head_dim {
            0..=128 => 15,
            129..=256 => 7,
            _ => 4,
        };
        let split_query = if head_dim == 128 && group <= 8 { group.div_ceil(4) } else { 0 };
        let mut variant = Self {
            head_dim,
            query_tiles,
            warps,
            stages: *STAGES.end(),
            split_query,
            from_projections: false,
        };
        while variant.shared_bytes() > shared_memory {
            if variant.stages > *STAGES.start() {
                variant.stages -= 1;
            } else if variant.warps > 1 {
                (variant.warps, variant.stages) = (variant.warps / 2, *STAGES.end());
            } else {
                return Err(CudaError::Unsupported(format!(
                    "attention needs {} bytes of shared memory, the GPU has {shared_memory} a block",
                    variant.shared_bytes()
                )));
            }
        }
        // Each plane of four heads is made by a warp of its own.
        if variant.warps < 4 * variant.split_query {
            variant.split_query = 0;
        }
        Ok(variant)
    }

    /// Bytes of a slot: a two-bit page, half of any other, or one side of a BF16 tile.
    fn slot_bytes(&self) -> usize {
        32 * self.head_dim + 512
    }

    /// The form of it that takes projections instead of queries, where there is one: it needs a warp for every vector and
    /// for every 16 channels, registers for the rotation, and a little more shared memory.
    pub fn taking_projections(self, shared_memory: usize) -> Option<Self> {
        let variant = Self { from_projections: true, ..self };
        let takes = self.query_tiles == 1 && self.head_dim <= 128 && self.warps >= 10;
        (takes && variant.shared_bytes() <= shared_memory).then_some(variant)
    }

    /// Dynamic shared memory; the kernel asserts that its `Shared` fits.
    pub fn shared_bytes(&self) -> usize {
        let Self { head_dim, query_tiles, warps, stages, .. } = *self;
        let (steps, heads, slot) = (head_dim / 16, 8 * query_tiles, self.slot_bytes());
        let slots = warps * stages * (slot + 20);
        // A warp's result goes into a slot where it fits.
        let result = heads * (head_dim + 4) * 4;
        let results = if result <= slot { 16 } else { warps * result };
        let query = query_tiles * steps * (32 * 24 + 32);
        let by_warp = (warps + 3) * (8 + heads * 8 + 96);
        // Vectors in two parts before their rotation, queries after it, a key and a value.
        let new_heads = match self.from_projections {
            true => 4 * 9 * (head_dim + 8) + 32 * (head_dim + 4) + 4 * head_dim + 32,
            false => 0,
        };
        // The last number: page addresses of 32 KV heads, and single values.
        (slots + results + query + by_warp + new_heads + heads * 4 + steps * 16 + 1280).next_multiple_of(128)
    }

    pub fn defines(&self) -> Defines {
        vec![
            ("HEAD_DIM", self.head_dim),
            ("QUERY_TILES", self.query_tiles),
            ("WARPS", self.warps),
            ("STAGES", self.stages),
            ("SPLIT_QUERY", self.split_query),
            ("FROM_PROJECTIONS", usize::from(self.from_projections)),
            ("BLOCKS", 1),
            ("SHARED_BYTES", self.shared_bytes()),
        ]
    }

    /// Every variant that a GPU with this much shared memory a block may ask for.
    pub fn all(shared_memory: usize) -> impl Iterator<Item = Self> {
        HEAD_DIMS.into_iter().flat_map(move |d| {
            let fitting = move |g| Self::fitting(d, g, shared_memory).ok();
            let plain = [4, 8, 16].into_iter().filter_map(fitting);
            plain.flat_map(move |v| [Some(v), v.taking_projections(shared_memory)].into_iter().flatten())
        })
    }
}

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
/// KV heads that `attention_plan.cu` has room for.
const MOST_HEADS: usize = 256;
/// A step is of few items where there are so many workers to each.
const WORKERS_TO_AN_ITEM: usize = 8;
/// By how much a worker may read more than its share. Memory is as busy with a tenth of the multiprocessors idle.
const MOST_UNEVEN: f64 = 1.12;
/// Bytes of `WorkerPlan` and `ItemPlan`.
const WORKER_PLAN: usize = 48 + 4 * FIRST_PAGES;
const ITEM_PLAN: usize = 16;

/// Workers that `attention_plan.cu` has room for.
const MOST_WORKERS: usize = 256;
/// Bytes of `PartialQuad` of `decode_merge.cuh`.
const PARTIAL_QUAD: usize = 32;
/// Every byte of a partial result that nobody has written yet.
const EMPTY: u8 = 0xff;

/// Where the queries come from.
#[derive(Clone, Copy, Debug)]
pub enum Queries {
    /// f32 `[row][query head][head_dim]`, in the cache's basis; keys and values are in their pages.
    Ready(u64),
    /// The kernel makes them, and stores keys and values.
    FromProjections(Projections),
}

/// Queries and results of one layer, as device addresses.
#[derive(Clone, Copy, Debug)]
pub struct DecodeRows {
    pub queries: Queries,
    /// The same shape in f32, or 0.
    pub out: u64,
    /// The same shape in BF16, or 0.
    pub rounded: u64,
}

/// Plans and scratch memory, kept from step to step; memory grows and is never given back.
#[derive(Default)]
pub struct DecodeAttention {
    /// Serial number of the pages the profiles were made for.
    pages: u64,
    /// Layers whose heads have the same widths share a profile, and so a plan.
    profile_of_layer: Vec<usize>,
    /// A layer of each profile.
    profiles: Vec<usize>,
    plans: Option<Buffer>,
    cost: Option<Buffer>,
    partials: Option<Buffer>,
    /// The launches of the last plan.
    planned: Vec<PlanArgs>,
    /// The variant that is compiled, in both its forms.
    compiled: Option<Variant>,
}

impl DecodeAttention {
    /// Plans the decode attention of a step: sequences that bring exactly one row. `makes_heads`: no `append` runs before it.
    pub fn plan(
        &mut self,
        device: &Device,
        kernels: &Kernels,
        step: &StepTables,
        pool: &CudaPages,
        makes_heads: bool,
    ) -> Result<()> {
        let (kv_heads, head_dim) = (pool.layout().kv_heads(), pool.layout().head_dim());
        if self.pages != pool.serial() {
            (self.profile_of_layer, self.profiles) = profiles(pool.heads(), kv_heads);
            self.pages = pool.serial();
        }
        if kv_heads > MOST_HEADS {
            return Err(CudaError::Unsupported(format!(
                "decode attention with {kv_heads} KV heads: plans are made for up to {MOST_HEADS}"
            )));
        }
        let sequences = step.sequence_count as usize;
        let items = sequences * kv_heads;
        let bytes = self.plan_bytes(device, items) * self.profiles.len();
        grow(device, &mut self.plans, bytes, "attention plans", None)?;
        grow(device, &mut self.cost, 8 * (sequences + 1), "attention plans", None)?;
        let spare = spare_workers(items, workers(device));
        // How many query heads share a KV head is not known here; up to eight do in most models.
        let variant = Variant::fitting(head_dim, 8, device.properties().shared_memory as usize)?;
        self.planned.clear();
        for (profile, &layer) in self.profiles.iter().enumerate() {
            self.planned.push(PlanArgs {
                step: *step,
                heads: pool.layer(layer),
                cost_before: address(&self.cost),
                plan: self.plan_of(device, items, profile),
                kv_heads: kv_heads as u32,
                head_dim: head_dim as u32,
                least_cost: LEAST_COST,
                spare: spare as u32,
                round_cost: (variant.warps * variant.slot_bytes()) as u32,
                own_workers: u32::from(makes_heads),
            });
        }
        self.plan_again(device, kernels)
    }

    /// The last plan for what its tables hold now.
    pub fn plan_again(&self, device: &Device, kernels: &Kernels) -> Result<()> {
        let function = kernels.function(&ATTENTION_PLAN, &Defines::new(), c"decode_plan", 0)?;
        // Without overlap: attention reads the plan before it waits for the kernels of its layer.
        let shape = LaunchShape::new(workers(device), PLAN_THREADS);
        self.planned.iter().try_for_each(|args| device.launch(function, shape, args))
    }

    /// Can attention make the heads of a step whose sequences read so much each? Each block that reads an item makes its queries,
    /// so that a block must read one only: the items must be few, or go into the blocks evenly.
    pub fn makes_heads(device: &Device, costs: &[usize], kv_heads: usize) -> bool {
        let workers = workers(device);
        is_few(costs.len() * kv_heads, workers) || go_in_evenly(costs, kv_heads, workers)
    }

    /// One layer's attention for the planned sequences.
    pub fn attend(
        &mut self,
        device: &Device,
        kernels: &Kernels,
        layer: usize,
        shape: &HeadShape,
        step: &StepTables,
        pool: &CudaPages,
        rows: DecodeRows,
    ) -> Result<()> {
        let group = shape.query_heads / shape.kv_heads.max(1);
        let shared_memory = device.properties().shared_memory as usize;
        let plain = Variant::fitting(shape.head_dim, group, shared_memory)?;
        let compiled = |v: &Variant| {
            kernels.function(&ATTENTION_DECODE, &v.defines(), c"decode_attention", v.shared_bytes())
        };
        let taking = plain.taking_projections(shared_memory);
        // Both forms are compiled with the first: not in the middle of an answer.
        if self.compiled != Some(plain) {
            [Some(plain), taking].iter().flatten().try_for_each(|v| compiled(v).map(drop))?;
            self.compiled = Some(plain);
        }
        let (variant, queries, projections) = match (rows.queries, taking) {
            (Queries::Ready(queries), _) => (plain, queries, None),
            (Queries::FromProjections(raw), Some(taking)) => (taking, 0, Some(raw)),
            (Queries::FromProjections(_), None) => {
                let detail = format!("{plain:?} does not take projections");
                return Err(CudaError::Shape { what: "decode attention", detail });
            }
        };
        let function = compiled(&variant)?;
        let shared = variant.shared_bytes();
        let workers = workers(device);
        let partials = 2 * workers * 8 * variant.query_tiles * shape.head_dim / 4 * PARTIAL_QUAD;
        grow(device, &mut self.partials, partials, "partial attention results", Some(EMPTY))?;
        let profile = *self.profile_of_layer.get(layer).ok_or_else(|| CudaError::Shape {
            what: "decode attention",
            detail: format!("layer {layer} was not planned"),
        })?;
        let items = step.sequence_count as usize * shape.kv_heads;
        let args = DecodeArgs {
            step: *step,
            plan: self.plan_of(device, items, profile),
            heads: pool.layer(layer),
            queries,
            qkv: projections.map_or(0, |p| p.rows),
            new_heads: projections.map(|p| p.constants).unwrap_or_default(),
            out: rows.out,
            rounded: rows.rounded,
            partials: address(&self.partials),
            kv_heads: shape.kv_heads as u32,
            group: group as u32,
            scale: shape.scale * LOG2_E,
            unused: 0,
        };
        let launch = LaunchShape::new(workers, 32 * (variant.warps as u32 + 1)).shared(shared).overlapping();
        device.launch(function, launch, &args)
    }

    fn plan_bytes(&self, device: &Device, items: usize) -> usize {
        (workers(device) * WORKER_PLAN + items * ITEM_PLAN).next_multiple_of(128)
    }

    fn plan_of(&self, device: &Device, items: usize, profile: usize) -> DecodePlan {
        let memory = address(&self.plans) + (profile * self.plan_bytes(device, items)) as u64;
        DecodePlan { memory, workers: workers(device) as u32, unused: 0 }
    }
}

fn workers(device: &Device) -> usize {
    (device.properties().multiprocessors as usize).min(MOST_WORKERS)
}

/// Workers to leave idle where little is read: `append` has a block for each head of each row, and still holds their
/// multiprocessors when attention begins on the others. Many rows hold too many to leave them all out.
fn spare_workers(items: usize, workers: usize) -> usize {
    if is_few(items, workers) { items } else { 0 }
}

fn is_few(items: usize, workers: usize) -> bool {
    items <= workers / WORKERS_TO_AN_ITEM
}

/// Does no worker read much more than its share if each item has workers of its own, as the plan then gives them out?
fn go_in_evenly(costs: &[usize], kv_heads: usize, workers: usize) -> bool {
    let (items, total) = (costs.len() * kv_heads, costs.iter().sum::<usize>() * kv_heads);
    let Some(rest) = workers.checked_sub(items) else { return false };
    let slowest = |&cost: &usize| cost as f64 / (1 + cost * rest / total.max(1)) as f64;
    let slowest = costs.iter().map(slowest).fold(0.0, f64::max);
    slowest * workers as f64 <= total as f64 * MOST_UNEVEN
}

fn address(buffer: &Option<Buffer>) -> u64 {
    buffer.as_ref().map_or(0, Buffer::address)
}

/// Replaces a buffer that is too small, filled with a byte where asked.
fn grow(
    device: &Device,
    buffer: &mut Option<Buffer>,
    bytes: usize,
    what: &str,
    fill: Option<u8>,
) -> Result<()> {
    if buffer.as_ref().is_none_or(|b| b.bytes() < bytes) {
        *buffer = None;
        let new = device.alloc(bytes.next_power_of_two().max(4096), what)?;
        if let Some(byte) = fill {
            device.fill(&new, byte)?;
        }
        *buffer = Some(new);
    }
    Ok(())
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
    fn every_shape_has_a_variant_on_every_supported_gpu() {
        // Shared memory a block may have on sm_80, sm_89 and sm_90.
        for shared in [163 << 10, 99 << 10, 227 << 10] {
            for d in HEAD_DIMS {
                for group in 1..=MAX_GROUP {
                    let v = Variant::fitting(d, group, shared).unwrap();
                    assert!(
                        v.shared_bytes() <= shared && v.query_tiles * 8 >= group && v.warps >= 2,
                        "{v:?}"
                    );
                }
            }
        }
        let tuned = Variant::fitting(128, 4, 227 << 10).unwrap();
        assert_eq!((tuned.warps, tuned.stages, tuned.split_query), (15, 3, 1));
    }

    #[test]
    fn shapes_without_a_kernel_say_which_exist() {
        for (d, group) in [(96, 4), (128, 17), (128, 0)] {
            let error = Variant::fitting(d, group, 227 << 10).unwrap_err().to_string();
            assert!(error.contains("64, 128 and 256"), "{error}");
        }
        assert!(Variant::fitting(256, 16, 8 << 10).unwrap_err().to_string().contains("shared memory"));
    }

    #[test]
    fn few_rows_leave_their_multiprocessors_out_and_many_do_not() {
        assert_eq!([1, 8, 16, 17, 64].map(|items| spare_workers(items, 132)), [1, 8, 16, 0, 0]);
        assert_eq!(spare_workers(1, 4), 0);
    }

    #[test]
    fn items_go_into_workers_evenly_or_not_at_all() {
        let equal = |batch: usize| go_in_evenly(&vec![1000; batch], 8, 132);
        assert_eq!(
            [3, 4, 5, 6, 7, 8, 9, 16, 17].map(equal),
            [true, true, true, false, false, true, false, true, false]
        );
        let long_and_short = [100_000, 1000, 1000, 1000, 1000, 1000, 1000, 1000];
        assert!(!go_in_evenly(&long_and_short, 8, 132));
        assert!(go_in_evenly(&[100_000, 99_000, 98_000, 97_000], 8, 132));
        assert!(!go_in_evenly(&[0; 20], 8, 132), "more items than workers");
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
