//! Mixtures of experts: `experts.cu`, their weights on the device and the launches of a layer.

use super::constants::CudaVector;
use super::expert_limits::{self, Form};
use super::experts_grouped::{GroupedKernels, Tiling};
use super::experts_single::SingleKernels;
use super::prepare_heads::PrepareHeadsParams;
use super::rows::{CudaRows, grow};
use super::{CudaBackend, State};
use crate::device::{Device, Function, LaunchShape};
use crate::error::{CudaError, Result};
use crate::gemm::{CudaMatrix, WORD_CODES, arrange, convert};
use crate::kernels::Kernels;
use crate::layout::{Layout, shared_struct};
use crate::memory::{Buffer, DevicePtr};
use crate::sources::{EXPERTS, expert_defines};
use crate::staging::Staging;
use half::bf16;
use oscar_backend::{
    ExpertFormat, ExpertId, ExpertsShape, Fp8Blocks, Gate, HostMatrix, HostValues, Output, Product,
    RouterRule, RouterScores, ScaleGrid, WeightFormat,
};
use std::ffi::CStr;

shared_struct! {
    pub(super) struct ExpertsParams {
        x: DevicePtr<f32>,
        norm: DevicePtr<f32>,
        normed: DevicePtr<f32>,
        router: DevicePtr<f32>,
        correction: Option<DevicePtr<f32>>,
        logits: DevicePtr<f32>,
        finished: DevicePtr<u32>,
        chosen: DevicePtr<u32>,
        weights: DevicePtr<f32>,
        slots: DevicePtr<u32>,
        slot_of: DevicePtr<u32>,
        tiles: DevicePtr<[u32; 4]>,
        tile_count: DevicePtr<u32>,
        between: DevicePtr<f32>,
        partial: DevicePtr<f32>,
        gate_up: DevicePtr<u8>,
        gate_up_scales: Option<DevicePtr<f32>>,
        down: DevicePtr<u8>,
        down_scales: Option<DevicePtr<f32>>,
        pub rows: u32,
        pub experts: u32,
        pub per_row: u32,
        pub hidden: u32,
        pub width: u32,
        sigmoid: u32,
        normalize: u32,
        factor: f32,
        eps: f32,
        channels: u32,
        rounded: u32,
        tile_rows: u32,
        stages: u32,
        gate: u32,
        router_bias: Option<DevicePtr<f32>>,
        gate_up_bias: Option<DevicePtr<f32>>,
        down_bias: Option<DevicePtr<f32>>,
    }
}

pub const LAYOUTS: &[Layout] = &[ExpertsParams::LAYOUT, PrepareHeadsParams::LAYOUT];

// Limits of `experts.cu`; `expert_limits` has those of a layer.
const PRODUCT_THREADS: u32 = 256;
/// From this many rows on, a block computes all logits of its rows.
const MANY_ROWS: usize = 256;

/// The kernels for one format of weights.
#[derive(Clone, Copy)]
struct ExpertKernels {
    route: Function,
    route_many: Function,
    sort: Function,
    gate_many: Function,
    down_tiles: Function,
    sum: Function,
    grouped: GroupedKernels,
    single: SingleKernels,
}

impl ExpertKernels {
    fn new(device: &Device, kernels: &Kernels, form: Form) -> Result<Self> {
        let defines = expert_defines(form.weights, form.general);
        let function = |name: &'static CStr| kernels.function(&EXPERTS, &defines, name, 0);
        Ok(Self {
            route: function(c"experts_route")?,
            route_many: function(c"experts_route_many")?,
            sort: function(c"experts_sort")?,
            gate_many: function(c"experts_gate_many")?,
            down_tiles: function(c"experts_down_tiles")?,
            sum: function(c"experts_sum")?,
            grouped: GroupedKernels::new(device, kernels, form)?,
            single: SingleKernels::new(device, kernels, form)?,
        })
    }

    fn tiling(&self, rows: usize) -> Tiling {
        match CudaBackend::rounds(rows) {
            true => self.grouped.tiling(rows),
            false => Tiling::OF_FEW_ROWS,
        }
    }
}

/// Codes or BF16 weights of all experts, one after the other, and their scales.
pub(super) struct Stack {
    pub weights: Buffer,
    pub scales: Option<Buffer>,
    /// A number for each output, in layers whose kernels take biases.
    biases: Option<Buffer>,
}

/// The experts of one layer and their router, on the device.
pub struct CudaExperts {
    kernels: ExpertKernels,
    experts: usize,
    hidden: usize,
    width: usize,
    shared_width: usize,
    rule: RouterRule,
    gate: Gate,
    general: bool,
    format: ExpertFormat,
    router: Buffer,
    correction: Option<Buffer>,
    router_bias: Option<Buffer>,
    /// `[expert][gate, up][width][hidden]`.
    pub(super) gate_up: Stack,
    /// `[expert][hidden][width]`.
    pub(super) down: Stack,
    /// Gate and up, and down, of the shared expert.
    pub(super) shared: Option<(CudaMatrix, CudaMatrix)>,
}

/// Memory that all layers share.
#[derive(Default)]
pub(super) struct ExpertsMemory {
    normed: Option<Buffer>,
    logits: Option<Buffer>,
    finished: Option<Buffer>,
    /// Chosen experts, their weights, and both directions of the list of slots.
    lists: [Option<Buffer>; 4],
    tiles: Option<Buffer>,
    tile_count: Option<Buffer>,
    between: Option<Buffer>,
    partial: Option<Buffer>,
    /// Gated rows of the shared expert.
    gated: CudaRows,
}

impl CudaExperts {
    pub(super) fn new(device: &Device, kernels: &Kernels, shape: &ExpertsShape<'_>) -> Result<Self> {
        let ExpertsShape { experts, hidden, width, shared_width, format, rule, .. } = *shape;
        let form = expert_limits::check(shape)?;
        let element = if form.weights == WeightFormat::Bf16 { 2 } else { 1 };
        let grid = match format {
            ExpertFormat::Bf16 | ExpertFormat::Mxfp4 => None,
            ExpertFormat::Fp8Blocks => Some(ScaleGrid::Blocks),
            ExpertFormat::Fp8Channels => Some(ScaleGrid::Channels),
        };
        let stack = |matrices: usize, outputs: usize, inputs: usize| -> Result<Stack> {
            let count =
                |grid: ScaleGrid| experts * matrices * grid.shape(outputs, inputs).iter().product::<usize>();
            Ok(Stack {
                weights: device.alloc(experts * matrices * outputs * inputs * element, "experts")?,
                scales: grid
                    .map(|grid| device.alloc(4 * count(grid), "the scales of experts"))
                    .transpose()?,
                // Zero where an expert has none.
                biases: form
                    .general
                    .then(|| {
                        device.upload_new(&vec![0f32; experts * matrices * outputs], "the biases of experts")
                    })
                    .transpose()?,
            })
        };
        Ok(Self {
            kernels: ExpertKernels::new(device, kernels, form)?,
            experts,
            hidden,
            width,
            shared_width,
            rule,
            gate: shape.gate,
            general: form.general,
            format,
            router: device.upload_new(shape.router, "a router")?,
            correction: shape.correction.map(|c| device.upload_new(c, "a router")).transpose()?,
            router_bias: shape.router_bias.map(|b| device.upload_new(b, "a router")).transpose()?,
            gate_up: stack(2, width, hidden)?,
            down: stack(1, hidden, width)?,
            shared: None,
        })
    }

    /// Bytes of one routed expert, and of the router and the shared expert.
    pub(super) fn bytes(&self) -> (usize, usize) {
        let beside = |buffer: &Option<Buffer>| buffer.as_ref().map_or(0, Buffer::bytes);
        let of = |stack: &Stack| stack.weights.bytes() + beside(&stack.scales) + beside(&stack.biases);
        let shared = self.shared.as_ref().map_or(0, |(gate_up, down)| gate_up.bytes() + down.bytes());
        ((of(&self.gate_up) + of(&self.down)) / self.experts, self.router.bytes() + shared)
    }

    /// Stores one matrix as the `index`-th of a stack.
    fn store(&self, staging: &Staging, stack: &Stack, index: usize, matrix: &HostMatrix<'_>) -> Result<()> {
        let HostMatrix { outputs, inputs, values, bias } = *matrix;
        let count = outputs * inputs;
        if let (Some(bias), Some(biases)) = (bias, &stack.biases) {
            staging.send_plain(bias, biases.slice::<f32>().part(index * outputs..(index + 1) * outputs)?)?;
        }
        let refuse = |detail: String| Err(CudaError::Shape { what: "an expert", detail });
        let given = match values {
            HostValues::Bf16(v) => v.len(),
            HostValues::F16(v) => v.len(),
            HostValues::F32(v) => v.len(),
            HostValues::Fp8(v) => v.codes.len(),
            HostValues::Mxfp4(v) => 2 * v.codes.len(),
        };
        if given != count {
            return refuse(format!("{given} weights for {outputs} × {inputs}"));
        }
        let all = stack.weights.slice::<bf16>();
        let place = || all.part(index * count..(index + 1) * count);
        match (values, self.format) {
            (HostValues::Bf16(v), ExpertFormat::Bf16) => staging.send_plain(v, place()?),
            (HostValues::F16(v), ExpertFormat::Bf16) => {
                convert(staging, v, 1, place()?, |x| bf16::from_f32(x[0].to_f32()))
            }
            // Random weights of benchmarks are no codes.
            (HostValues::F32(v), ExpertFormat::Bf16 | ExpertFormat::Mxfp4) => {
                convert(staging, v, 1, place()?, |x| bf16::from_f32(x[0]))
            }
            // Every number of MXFP4 is one of BF16.
            (HostValues::Mxfp4(v), ExpertFormat::Mxfp4) => match v.expand(outputs, inputs) {
                Ok(v) => convert(staging, &v, 1, place()?, |x| bf16::from_f32(x[0])),
                Err(error) => refuse(error.to_string()),
            },
            (HostValues::Fp8(v), ExpertFormat::Fp8Blocks | ExpertFormat::Fp8Channels) => {
                if let Err(error) = v.check(outputs, inputs) {
                    return refuse(error.to_string());
                }
                if (v.grid == ScaleGrid::Channels) != (self.format == ExpertFormat::Fp8Channels) {
                    return refuse(format!("scales of {:?} for {:?}", v.grid, self.format));
                }
                let words = count / WORD_CODES;
                let place = stack.weights.slice::<u32>().part(index * words..(index + 1) * words)?;
                convert(staging, v.codes, WORD_CODES, place, arrange)?;
                let Some(scales) = &stack.scales else { return refuse("no room for scales".into()) };
                let n = v.scales.len();
                staging.send_plain(v.scales, scales.slice::<f32>().part(index * n..(index + 1) * n)?)
            }
            (_, format) => refuse(format!("weights that are not {format:?}")),
        }
    }
}

impl CudaBackend {
    pub(super) fn put_expert(
        &self,
        experts: &mut CudaExperts,
        id: ExpertId,
        parts: &[HostMatrix<'_>; 3],
    ) -> Result<()> {
        let (hidden, staging) = (experts.hidden, &self.staging);
        let width = match id {
            ExpertId::Routed(index) if index < experts.experts => experts.width,
            ExpertId::Shared if experts.shared_width > 0 => experts.shared_width,
            _ => return Err(CudaError::Shape { what: "an expert", detail: format!("{id:?}") }),
        };
        let shapes = parts.each_ref().map(|part| [part.outputs, part.inputs]);
        expert_limits::check_parts(parts, experts.general)?;
        if shapes != [[width, hidden], [width, hidden], [hidden, width]] {
            return Err(CudaError::Shape { what: "an expert", detail: format!("{shapes:?} of {width}") });
        }
        match id {
            ExpertId::Routed(index) => {
                experts.store(staging, &experts.gate_up, 2 * index, &parts[0])?;
                experts.store(staging, &experts.gate_up, 2 * index + 1, &parts[1])?;
                experts.store(staging, &experts.down, index, &parts[2])
            }
            ExpertId::Shared => {
                experts.shared = Some((self.stacked(&parts[0], &parts[1])?, self.expanded(&parts[2])?));
                Ok(())
            }
        }
    }

    /// Gate and up of a shared expert as one matrix: FP8 if blocks do not cross the seam.
    fn stacked(&self, gate: &HostMatrix<'_>, up: &HostMatrix<'_>) -> Result<CudaMatrix> {
        let (outputs, inputs) = (gate.outputs + up.outputs, gate.inputs);
        if let (HostValues::Fp8(g), HostValues::Fp8(u)) = (gate.values, up.values)
            && g.grid == ScaleGrid::Blocks
            && u.grid == ScaleGrid::Blocks
            && gate.outputs.is_multiple_of(oscar_backend::FP8_BLOCK)
        {
            let (codes, scales) = ([g.codes, u.codes].concat(), [g.scales, u.scales].concat());
            let values =
                HostValues::Fp8(Fp8Blocks { codes: &codes, scales: &scales, grid: ScaleGrid::Blocks });
            return self.upload_matrix(&HostMatrix { outputs, inputs, values, bias: None });
        }
        let values = [f32_values(gate)?, f32_values(up)?].concat();
        self.upload_matrix(&HostMatrix { outputs, inputs, values: HostValues::F32(&values), bias: None })
    }

    /// A matrix in a form that all products take: scales of channels are expanded.
    fn expanded(&self, matrix: &HostMatrix<'_>) -> Result<CudaMatrix> {
        match matrix.values {
            HostValues::Fp8(v) if v.grid == ScaleGrid::Channels => {
                let values = f32_values(matrix)?;
                self.upload_matrix(&HostMatrix { values: HostValues::F32(&values), ..*matrix })
            }
            _ => self.upload_matrix(matrix),
        }
    }

    fn upload_matrix(&self, matrix: &HostMatrix<'_>) -> Result<CudaMatrix> {
        let uploaded = CudaMatrix::upload(&self.device, &self.staging, matrix)?;
        if uploaded.format() == WeightFormat::Fp8 {
            self.fp8_kernels()?;
        }
        Ok(uploaded)
    }

    /// `x += experts(norm(x))`.
    pub(super) fn run_experts(
        &self,
        state: &mut State,
        experts: &CudaExperts,
        (norm, eps): (&CudaVector, f32),
        x: &mut CudaRows,
    ) -> Result<()> {
        let (rows, hidden) = (x.count(), experts.hidden);
        let complete = experts.shared.is_some() == (experts.shared_width > 0);
        if x.width() != hidden || norm.len != hidden || !complete {
            let detail = format!("rows of {} for {hidden}, shared expert there: {complete}", x.width());
            return Err(CudaError::Shape { what: "a mixture of experts", detail });
        }
        if rows == 0 {
            return Ok(());
        }
        // The shared expert reads the residual before the others are added to it.
        let mut gated = std::mem::take(&mut state.experts.gated);
        gated.set_width(experts.shared_width);
        if let Some((gate_up, _)) = &experts.shared {
            let product = Product::of_normed(norm, eps, gate_up, Output::Gated(Gate::Silu));
            self.product(state, product, x, &mut gated)?;
        }
        x.drop_rounded();
        let p = self.expert_params(&mut state.experts, experts, (norm, eps), x)?;
        // SAFETY: the parameters of `experts.cu`; every buffer was made for these rows.
        unsafe { self.launch_experts(experts, p) }?;
        if let Some((_, down)) = &experts.shared {
            self.product(state, Product::of(down, Output::Add), &gated, x)?;
        }
        state.experts.gated = gated;
        Ok(())
    }

    fn expert_params(
        &self,
        memory: &mut ExpertsMemory,
        experts: &CudaExperts,
        (norm, eps): (&CudaVector, f32),
        x: &CudaRows,
    ) -> Result<ExpertsParams> {
        let (device, rows, rule) = (&self.device, x.count(), experts.rule);
        let slots = rows * rule.chosen;
        let tiling = experts.kernels.tiling(rows);
        let rounded = CudaBackend::rounds(rows);
        let buffer = |buffer: &mut Option<Buffer>, elements: usize| -> Result<DevicePtr<u8>> {
            Ok(grow(device, buffer, 4 * elements, "experts of a step")?.0.ptr())
        };
        let halves = |elements: usize| if rounded { elements.div_ceil(2) } else { elements };
        // The kernels leave it zero.
        let (finished, new) = grow(device, &mut memory.finished, 4 * rows, "experts of a step")?;
        if new {
            device.upload(&vec![0u32; finished.bytes() / 4], finished.slice())?;
        }
        let finished = finished.ptr();
        let [chosen, weights, in_order, places] = &mut memory.lists;
        Ok(ExpertsParams {
            x: x.held_values("a mixture of experts")?.ptr(),
            norm: norm.values.ptr(),
            normed: buffer(&mut memory.normed, halves(rows * experts.hidden))?.cast(),
            router: experts.router.ptr(),
            correction: experts.correction.as_ref().map(|c| c.ptr()),
            logits: buffer(&mut memory.logits, rows * experts.experts)?.cast(),
            finished,
            chosen: buffer(chosen, slots)?.cast(),
            weights: buffer(weights, slots)?.cast(),
            slots: buffer(in_order, slots)?.cast(),
            slot_of: buffer(places, slots)?.cast(),
            tiles: buffer(&mut memory.tiles, 4 * most_tiles(experts, rows, &tiling))?.cast(),
            tile_count: buffer(&mut memory.tile_count, 1)?.cast(),
            between: buffer(&mut memory.between, halves(slots * experts.width))?.cast(),
            partial: buffer(&mut memory.partial, halves(slots * experts.hidden))?.cast(),
            gate_up: experts.gate_up.weights.ptr(),
            gate_up_scales: experts.gate_up.scales.as_ref().map(|s| s.ptr()),
            down: experts.down.weights.ptr(),
            down_scales: experts.down.scales.as_ref().map(|s| s.ptr()),
            rows: rows as u32,
            experts: experts.experts as u32,
            per_row: rule.chosen as u32,
            hidden: experts.hidden as u32,
            width: experts.width as u32,
            sigmoid: u32::from(rule.scores == RouterScores::Sigmoid),
            normalize: u32::from(rule.normalize),
            factor: rule.factor,
            eps,
            channels: u32::from(experts.format == ExpertFormat::Fp8Channels),
            rounded: u32::from(rounded),
            tile_rows: tiling.rows as u32,
            stages: tiling.stages as u32,
            gate: gate_number(experts.gate),
            router_bias: experts.router_bias.as_ref().map(|b| b.ptr()),
            gate_up_bias: experts.gate_up.biases.as_ref().map(|b| b.ptr()),
            down_bias: experts.down.biases.as_ref().map(|b| b.ptr()),
        })
    }

    /// # Safety
    /// The pointers of `p` must have room for its rows ([`CudaBackend::expert_params`]).
    unsafe fn launch_experts(&self, experts: &CudaExperts, p: ExpertsParams) -> Result<()> {
        let (rows, kernels, device) = (p.rows as usize, experts.kernels, &self.device);
        let (hidden, width) = (experts.hidden, experts.width);
        let tiling = kernels.tiling(rows);
        let tiles = most_tiles(experts, rows, &tiling);
        let grid = |x: usize, y: usize, threads: u32| LaunchShape::grid2(x, y, threads).overlapping();
        // SAFETY: the caller's promise, for all launches.
        unsafe {
            if rows == 1 && kernels.single.takes(hidden, width, experts.rule.chosen) {
                return kernels.single.launch(device, p);
            }
            let groups = rows.div_ceil(16);
            match rows < MANY_ROWS {
                true => device.launch(kernels.route, grid(groups, experts.experts.div_ceil(8), 256), p)?,
                false => device.launch(kernels.route_many, grid(groups, 1, 256), p)?,
            }
            device.launch(kernels.sort, grid(1, 1, 1024), p)?;
            if CudaBackend::rounds(rows) {
                return kernels.grouped.launch(device, &tiling, p);
            }
            device.launch(kernels.gate_many, grid(tiles, width.div_ceil(16), PRODUCT_THREADS), p)?;
            device.launch(kernels.down_tiles, grid(tiles, hidden.div_ceil(32), PRODUCT_THREADS), p)?;
            device.launch(kernels.sum, grid(rows, (hidden / 4).div_ceil(128), 128), p)
        }
    }
}

/// The number of a gate in `gate.cuh`.
fn gate_number(gate: Gate) -> u32 {
    match gate {
        Gate::Silu => 0,
        Gate::GeluTanh => 1,
        Gate::Clamped => 2,
    }
}

/// Most tiles of a step: every expert may have one that is not full.
fn most_tiles(experts: &CudaExperts, rows: usize, tiling: &Tiling) -> usize {
    let slots = rows * experts.rule.chosen;
    slots.min(experts.experts + slots / tiling.rows)
}

fn f32_values(matrix: &HostMatrix<'_>) -> Result<Vec<f32>> {
    Ok(match matrix.values {
        HostValues::Bf16(v) => v.iter().map(|x| x.to_f32()).collect(),
        HostValues::F16(v) => v.iter().map(|x| x.to_f32()).collect(),
        HostValues::F32(v) => v.to_vec(),
        HostValues::Fp8(v) => v.expand(matrix.inputs),
        HostValues::Mxfp4(v) => v
            .expand(matrix.outputs, matrix.inputs)
            .map_err(|error| CudaError::Shape { what: "an expert", detail: error.to_string() })?,
    })
}
