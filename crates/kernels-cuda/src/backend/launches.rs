//! The small kernels of `rows.cu`, `gram.cu`, `random.cu` and `pick.cu`: their parameters and
//! launches.
//!
//! # Safety
//! The launches are `unsafe`: the pointers of their parameters must hold as many elements as the
//! parameters and the number of rows say ([`Device::launch`]).

use crate::device::{Device, Function, LaunchShape};
use crate::error::{CudaError, Result};
use crate::kernels::Kernels;
use crate::layout::{Layout, Shared, shared_struct};
use crate::memory::DevicePtr;
use crate::sources::{GRAM, PICK, RANDOM, ROWS, Source};
use half::bf16;
use oscar_backend::Gate;
use std::ffi::CStr;

/// Tokens that fit into the parameters of the launch that embeds them.
pub const EMBED_FEW: usize = 16;

shared_struct! {
    pub struct EmbedParams {
        pub table: DevicePtr<bf16>,
        /// `None`: the tokens are in `few`.
        pub tokens: Option<DevicePtr<u32>>,
        pub out: DevicePtr<f32>,
        pub width: u32,
        pub scale: f32,
        pub few: [u32; EMBED_FEW],
    }
}

shared_struct! {
    pub struct RmsNormParams {
        pub x: DevicePtr<f32>,
        pub weight: DevicePtr<f32>,
        pub out: Option<DevicePtr<f32>>,
        pub rounded: Option<DevicePtr<bf16>>,
        pub width: u32,
        pub eps: f32,
    }
}

shared_struct! {
    pub struct AddNormParams {
        pub x: DevicePtr<f32>,
        pub weight: DevicePtr<f32>,
        pub out: DevicePtr<f32>,
        pub width: u32,
        pub eps: f32,
    }
}

shared_struct! {
    pub struct SwigluParams {
        /// One of the two is read.
        pub gate_up: Option<DevicePtr<f32>>,
        pub rounded_gate_up: Option<DevicePtr<bf16>>,
        /// One of the two is written.
        pub out: Option<DevicePtr<f32>>,
        pub rounded: Option<DevicePtr<bf16>>,
        pub width: u32,
        pub rows: u32,
    }
}

shared_struct! {
    pub struct SelectParams {
        /// One of the two is read.
        pub x: Option<DevicePtr<f32>>,
        pub rounded: Option<DevicePtr<bf16>>,
        pub rows: DevicePtr<u32>,
        pub out: DevicePtr<f32>,
        pub width: u32,
    }
}

shared_struct! {
    pub struct RoundParams {
        pub x: DevicePtr<f32>,
        pub high: DevicePtr<bf16>,
        pub low: Option<DevicePtr<bf16>>,
        pub count: u64,
    }
}

shared_struct! {
    pub struct BiasParams {
        pub bias: DevicePtr<f32>,
        pub out: DevicePtr<f32>,
        pub width: u32,
        pub rows: u32,
    }
}

shared_struct! {
    pub struct GramParams {
        pub x: DevicePtr<f32>,
        pub weights: Option<DevicePtr<f32>>,
        pub gram: DevicePtr<f64>,
        pub stride: u32,
        pub first: u32,
        pub width: u32,
        pub rows: u32,
    }
}

shared_struct! {
    pub struct RandomParams {
        pub out: DevicePtr<bf16>,
        pub count: u64,
        pub seed: u64,
        pub amplitude: f32,
    }
}

shared_struct! {
    pub struct RandomPagesParams {
        pub pages: DevicePtr<u8>,
        pub page_bytes: u64,
        pub parameters: u64,
        pub count: u64,
        pub seed: u64,
    }
}

shared_struct! {
    /// A request for the candidates of one row.
    #[derive(PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
    pub struct PickedRow {
        pub row: u32,
        pub count: u32,
        pub mask: u32,
    }
}

shared_struct! {
    pub struct PickParams {
        pub logits: DevicePtr<f32>,
        pub rows: DevicePtr<PickedRow>,
        pub parts: DevicePtr<u64>,
        pub out: DevicePtr<u64>,
        pub masks: Option<DevicePtr<u32>>,
        pub width: u32,
        pub part_count: u32,
        pub mask_words: u32,
    }
}

shared_struct! {
    pub struct DivergenceParams {
        pub exact: DevicePtr<f32>,
        pub other: DevicePtr<f32>,
        /// Divergence and agreement of each row.
        pub out: DevicePtr<f32>,
        pub width: u32,
        pub exact_rows: u32,
    }
}

pub const LAYOUTS: &[Layout] = &[
    EmbedParams::LAYOUT,
    RmsNormParams::LAYOUT,
    AddNormParams::LAYOUT,
    SwigluParams::LAYOUT,
    SelectParams::LAYOUT,
    RoundParams::LAYOUT,
    BiasParams::LAYOUT,
    GramParams::LAYOUT,
    RandomParams::LAYOUT,
    RandomPagesParams::LAYOUT,
    PickedRow::LAYOUT,
    PickParams::LAYOUT,
    DivergenceParams::LAYOUT,
];

/// The kernels, compiled.
pub struct Launches {
    device: Device,
    embed: Function,
    rms_norm: Function,
    add_rms_norm: Function,
    /// By [`Gate`]: silu, GELU, clamped.
    gates: [Function; 3],
    select: Function,
    round: Function,
    bias: Function,
    greedy_parts: Function,
    greedy_merge: Function,
    top_candidates: Function,
}

impl Launches {
    pub fn new(device: &Device, kernels: &Kernels) -> Result<Self> {
        let rows = |name: &'static CStr| kernels.function(&ROWS, &Vec::new(), name, 0);
        let pick = |name: &'static CStr| kernels.function(&PICK, &Vec::new(), name, 0);
        Ok(Self {
            device: device.clone(),
            embed: rows(c"embed")?,
            rms_norm: rows(c"rms_norm")?,
            add_rms_norm: rows(c"add_rms_norm")?,
            gates: [rows(c"swiglu")?, rows(c"gelu_tanh_rows")?, rows(c"clamped_rows")?],
            select: rows(c"select_rows")?,
            round: rows(c"round_to_bf16")?,
            bias: rows(c"add_bias")?,
            greedy_parts: pick(c"greedy_parts")?,
            greedy_merge: pick(c"greedy_merge")?,
            top_candidates: pick(c"top_candidates")?,
        })
    }

    /// Blocks for `count` independent elements.
    fn blocks(&self, count: u64) -> usize {
        (count.div_ceil(256 * 4) as usize).clamp(1, self.device.properties().multiprocessors as usize * 16)
    }

    /// Launches a kernel, unless the grid is empty.
    ///
    /// # Safety
    /// As for [`Device::launch`].
    unsafe fn launch<P: Shared>(&self, function: Function, shape: LaunchShape, p: P) -> Result<()> {
        if shape.grid.0 == 0 || shape.grid.1 == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.device.launch(function, shape, p) }
    }

    /// # Safety
    /// See the module.
    pub unsafe fn embed(&self, rows: usize, p: EmbedParams) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(self.embed, LaunchShape::new(rows, 256).overlapping(), p) }
    }

    /// # Safety
    /// See the module.
    pub unsafe fn rms_norm(&self, rows: usize, p: RmsNormParams) -> Result<()> {
        // A thread of the kernel holds up to four quads. Many rows fill the GPU with smaller blocks.
        let elements = if rows < 256 { 8 } else { 16 };
        let threads = (p.width / elements).next_multiple_of(32).clamp(64, 1024);
        if !p.width.is_multiple_of(4) || p.width > 16 * threads {
            let detail = format!("rows of {} elements: a multiple of 4 up to 16384 is needed", p.width);
            return Err(CudaError::Shape { what: "a norm", detail });
        }
        // SAFETY: the caller's promise.
        unsafe { self.launch(self.rms_norm, LaunchShape::new(rows, threads).overlapping(), p) }
    }

    /// # Safety
    /// See the module.
    pub unsafe fn add_rms_norm(&self, rows: usize, p: AddNormParams) -> Result<()> {
        let threads = (p.width / 8).next_multiple_of(32).clamp(64, 1024);
        // SAFETY: the caller's promise.
        unsafe { self.launch(self.add_rms_norm, LaunchShape::new(rows, threads).overlapping(), p) }
    }

    /// # Safety
    /// See the module.
    pub unsafe fn gate(&self, gate: Gate, p: SwigluParams) -> Result<()> {
        const THREADS: u32 = 256;
        if !p.width.is_multiple_of(4) {
            let detail = format!("rows of {} elements: a multiple of 4 is needed", p.width);
            return Err(CudaError::Shape { what: "a gate", detail });
        }
        let [silu, gelu_tanh, clamped] = self.gates;
        let function = match gate {
            Gate::Silu => silu,
            Gate::GeluTanh => gelu_tanh,
            Gate::Clamped => clamped,
        };
        // Two blocks for a row, so that a thread has a few independent loads.
        let blocks = (p.rows as usize).min(1 << 16);
        // SAFETY: the caller's promise.
        unsafe { self.launch(function, LaunchShape::grid2(blocks, 2, THREADS).overlapping(), p) }
    }

    /// # Safety
    /// See the module.
    pub unsafe fn select(&self, rows: usize, p: SelectParams) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(self.select, LaunchShape::new(rows, 256).overlapping(), p) }
    }

    /// # Safety
    /// See the module.
    pub unsafe fn round(&self, p: RoundParams) -> Result<()> {
        let shape = LaunchShape::new(self.blocks(p.count), 256).overlapping();
        // SAFETY: the caller's promise.
        unsafe { self.launch(self.round, shape, p) }
    }

    /// # Safety
    /// See the module.
    pub unsafe fn bias(&self, p: BiasParams) -> Result<()> {
        let blocks = self.blocks(u64::from(p.rows) * u64::from(p.width));
        // SAFETY: the caller's promise.
        unsafe { self.launch(self.bias, LaunchShape::new(blocks, 256).overlapping(), p) }
    }

    /// # Safety
    /// See the module.
    pub unsafe fn gram(&self, kernels: &Kernels, p: GramParams) -> Result<()> {
        let tiles = (p.width as usize).div_ceil(16);
        // SAFETY: the caller's promise.
        unsafe { self.launch_once(kernels, &GRAM, c"gram", LaunchShape::grid2(tiles, tiles, 256), p) }
    }

    /// # Safety
    /// See the module.
    pub unsafe fn random(&self, kernels: &Kernels, p: RandomParams) -> Result<()> {
        let shape = LaunchShape::new(self.blocks(p.count), 256);
        // SAFETY: the caller's promise.
        unsafe { self.launch_once(kernels, &RANDOM, c"random_bf16", shape, p) }
    }

    /// # Safety
    /// See the module.
    pub unsafe fn random_pages(&self, kernels: &Kernels, p: RandomPagesParams) -> Result<()> {
        let shape = LaunchShape::new(self.blocks(p.count * p.page_bytes / 4), 256);
        // SAFETY: the caller's promise.
        unsafe { self.launch_once(kernels, &RANDOM, c"random_pages", shape, p) }
    }

    /// The most likely token of each of `rows` rows.
    ///
    /// # Safety
    /// See the module.
    pub unsafe fn greedy(&self, rows: usize, p: PickParams) -> Result<()> {
        let slices = LaunchShape::grid2(p.part_count as usize, rows, 256).overlapping();
        // SAFETY: the caller's promise.
        unsafe {
            self.launch(self.greedy_parts, slices, p)?;
            self.launch(self.greedy_merge, LaunchShape::new(rows, 64).overlapping(), p)
        }
    }

    /// The most likely tokens of each of `rows` rows.
    ///
    /// # Safety
    /// See the module.
    pub unsafe fn top_candidates(&self, rows: usize, p: PickParams) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(self.top_candidates, LaunchShape::new(rows, 1024).overlapping(), p) }
    }

    /// A kernel that is not kept, because no step uses it.
    ///
    /// # Safety
    /// As for [`Device::launch`].
    unsafe fn launch_once<P: Shared>(
        &self,
        kernels: &Kernels,
        source: &'static Source,
        name: &'static CStr,
        shape: LaunchShape,
        p: P,
    ) -> Result<()> {
        let function = kernels.function(source, &Vec::new(), name, 0)?;
        // SAFETY: the caller's promise.
        unsafe { self.launch(function, shape, p) }
    }
}
