//! The small kernels of `rows.cu`, `gram.cu`, `random.cu` and `pick.cu`: their parameters and launches.

use crate::device::{Device, Function, KernelParams, LaunchShape};
use crate::error::{CudaError, Result};
use crate::kernels::Kernels;
use crate::sources::{GRAM, PICK, RANDOM, ROWS, Source};
use std::ffi::CStr;

/// Tokens that fit into the parameters of the launch that embeds them.
pub const EMBED_FEW: usize = 16;

macro_rules! params {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, bytemuck::NoUninit)]
        pub struct $name { $(pub $field: $type),* }
        // SAFETY: the fields are those of the kernel's parameter struct, in its order; the backend fills them with
        // addresses of buffers that live until the stream has passed the launch.
        unsafe impl KernelParams for $name {}
    };
}

params!(Embed { table: u64, tokens: u64, out: u64, width: u32, unused: u32, few: [u32; EMBED_FEW] });
params!(RmsNorm { x: u64, weight: u64, out: u64, rounded: u64, width: u32, eps: f32 });
params!(Swiglu { gate_up: u64, out: u64, rounded: u64, width: u32, rows: u32 });
params!(Select { x: u64, rows: u64, out: u64, width: u32, unused: u32 });
params!(Round { x: u64, high: u64, low: u64, count: u64 });
params!(Bias { bias: u64, out: u64, width: u32, rows: u32 });
params!(Gram { x: u64, weights: u64, gram: u64, stride: u32, first: u32, width: u32, rows: u32 });
params!(Random { out: u64, count: u64, seed: u64, amplitude: f32, unused: u32 });
params!(RandomPages { pages: u64, page_bytes: u64, parameters: u64, count: u64, seed: u64 });
params!(PickParams { logits: u64, rows: u64, parts: u64, out: u64, width: u32, part_count: u32 });
/// The kernels, compiled.
pub struct Launches {
    device: Device,
    embed: Function,
    rms_norm: Function,
    swiglu: Function,
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
            swiglu: rows(c"swiglu")?,
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

    pub fn embed(&self, rows: usize, p: &Embed) -> Result<()> {
        self.device.launch(self.embed, LaunchShape::new(rows, 256).overlapping(), p)
    }

    pub fn rms_norm(&self, rows: usize, p: &RmsNorm) -> Result<()> {
        // A thread of the kernel holds up to four quads.
        let threads = (p.width / 8).next_multiple_of(32).clamp(64, 1024);
        if !p.width.is_multiple_of(4) || p.width > 16 * threads {
            let detail = format!("rows of {} elements: a multiple of 4 up to 16384 is needed", p.width);
            return Err(CudaError::Shape { what: "a norm", detail });
        }
        self.device.launch(self.rms_norm, LaunchShape::new(rows, threads).overlapping(), p)
    }

    pub fn swiglu(&self, p: &Swiglu) -> Result<()> {
        let blocks = self.blocks(u64::from(p.rows) * u64::from(p.width));
        self.device.launch(self.swiglu, LaunchShape::new(blocks, 256).overlapping(), p)
    }

    pub fn select(&self, rows: usize, p: &Select) -> Result<()> {
        self.device.launch(self.select, LaunchShape::new(rows, 256).overlapping(), p)
    }

    pub fn round(&self, p: &Round) -> Result<()> {
        self.device.launch(self.round, LaunchShape::new(self.blocks(p.count), 256).overlapping(), p)
    }

    pub fn bias(&self, p: &Bias) -> Result<()> {
        let blocks = self.blocks(u64::from(p.rows) * u64::from(p.width));
        self.device.launch(self.bias, LaunchShape::new(blocks, 256).overlapping(), p)
    }

    pub fn gram(&self, kernels: &Kernels, p: &Gram) -> Result<()> {
        let tiles = (p.width as usize).div_ceil(16);
        self.launch_once(kernels, &GRAM, c"gram", LaunchShape::grid2(tiles, tiles, 256), p)
    }

    pub fn random(&self, kernels: &Kernels, p: &Random) -> Result<()> {
        let shape = LaunchShape::new(self.blocks(p.count), 256);
        self.launch_once(kernels, &RANDOM, c"random_bf16", shape, p)
    }

    pub fn random_pages(&self, kernels: &Kernels, p: &RandomPages) -> Result<()> {
        let shape = LaunchShape::new(self.blocks(p.count * p.page_bytes / 4), 256);
        self.launch_once(kernels, &RANDOM, c"random_pages", shape, p)
    }

    /// The most likely token of each of `rows` rows.
    pub fn greedy(&self, rows: usize, p: &PickParams) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        let slices = LaunchShape::grid2(p.part_count as usize, rows, 256).overlapping();
        self.device.launch(self.greedy_parts, slices, p)?;
        self.device.launch(self.greedy_merge, LaunchShape::new(rows, 64).overlapping(), p)
    }

    /// The most likely tokens of each of `rows` rows.
    pub fn top_candidates(&self, rows: usize, p: &PickParams) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        self.device.launch(self.top_candidates, LaunchShape::new(rows, 1024).overlapping(), p)
    }

    fn launch_once<P: KernelParams>(
        &self,
        kernels: &Kernels,
        source: &'static Source,
        name: &'static CStr,
        shape: LaunchShape,
        p: &P,
    ) -> Result<()> {
        self.device.launch(kernels.function(source, &Vec::new(), name, 0)?, shape, p)
    }
}
