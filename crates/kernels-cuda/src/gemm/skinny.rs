//! Launching `skinny_gemm.cu`: which variant, how many blocks.

use super::CudaMatrix;
use crate::device::{Device, Function, KernelParams, LaunchShape};
use crate::error::{CudaError, Result};
use crate::kernels::Kernels;
use crate::sources::{SKINNY_GEMM, weight_defines};
use oscar_backend::WeightFormat;
use std::ffi::CStr;

/// Most rows the kernel takes.
pub const MOST_ROWS: usize = 16;

/// Tiles of a unit that holds gates and their ups.
const GATED_TILES: usize = 4;

/// A variant: rows it has room for, warps a block, tiles of 8 outputs in a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkinnyShape {
    pub rows: usize,
    pub warps: usize,
    pub tiles: usize,
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct Params {
    weights: u64,
    scales: u64,
    x: u64,
    out: u64,
    bias: u64,
    norm: u64,
    rows: u32,
    outputs: u32,
    inputs: u32,
    add: u32,
    gated: u32,
    eps: f32,
}

// SAFETY: the struct of `skinny_gemm.cu`; `Skinny::enqueue` fills it with addresses of live matrices.
unsafe impl KernelParams for Params {}

/// A variant's kernels: without and with a norm.
#[derive(Clone, Copy)]
struct Pair {
    shape: SkinnyShape,
    plain: Function,
    normed: Function,
}

/// The variants that the GPU has room for, of kernels for weights in one format.
pub struct Skinny {
    device: Device,
    format: WeightFormat,
    pairs: Vec<Pair>,
}

/// The variants of `skinny_gemm.cu` and the names of their kernels, those with most warps first.
const VARIANTS: [(SkinnyShape, &CStr, &CStr); 6] = [
    (SkinnyShape { rows: 8, warps: 16, tiles: 4 }, c"skinny_8_16_4", c"skinny_norm_8_16_4"),
    (SkinnyShape { rows: 8, warps: 16, tiles: 3 }, c"skinny_8_16_3", c"skinny_norm_8_16_3"),
    (SkinnyShape { rows: 16, warps: 16, tiles: 4 }, c"skinny_16_16_4", c"skinny_norm_16_16_4"),
    (SkinnyShape { rows: 16, warps: 16, tiles: 3 }, c"skinny_16_16_3", c"skinny_norm_16_16_3"),
    (SkinnyShape { rows: 8, warps: 8, tiles: 4 }, c"skinny_8_8_4", c"skinny_norm_8_8_4"),
    (SkinnyShape { rows: 16, warps: 8, tiles: 4 }, c"skinny_16_8_4", c"skinny_norm_16_8_4"),
];

impl SkinnyShape {
    /// Dynamic shared memory: the lanes' slots and the sums of two units.
    fn shared(self) -> usize {
        // `SLOTS_OF` of `skinny_gemm.cu`.
        let slots = if self.tiles == 4 { 3 } else { 4 };
        self.warps * self.tiles * (slots * 512 + 2 * 64 * 4 * (self.rows / 8))
    }

    fn units(self, outputs: usize) -> usize {
        outputs.div_ceil(8 * self.tiles)
    }

    /// Tiles that the busiest of so many blocks takes: what a product lasts.
    fn longest(self, outputs: usize, blocks: usize) -> usize {
        self.units(outputs).div_ceil(blocks) * self.tiles
    }

    /// Room for the squares of a norm, which is not dynamic.
    fn fits(self, shared_memory: usize) -> bool {
        self.shared() + self.warps * self.rows * 4 <= shared_memory
    }
}

impl Skinny {
    pub fn new(device: &Device, kernels: &Kernels, format: WeightFormat) -> Result<Self> {
        let room = device.properties().shared_memory as usize;
        let defines = weight_defines(format);
        let pairs = VARIANTS
            .iter()
            .filter(|(shape, ..)| shape.fits(room))
            .map(|&(shape, plain, normed)| {
                let function = |name| kernels.function(&SKINNY_GEMM, &defines, name, shape.shared());
                Ok(Pair { shape, plain: function(plain)?, normed: function(normed)? })
            })
            .collect::<Result<_>>()?;
        Ok(Self { device: device.clone(), format, pairs })
    }

    /// Does the kernel take this product?
    pub fn takes(matrix: &CudaMatrix, rows: usize) -> bool {
        rows <= MOST_ROWS && Self::multiplies(matrix.format(), matrix.outputs, matrix.inputs)
    }

    /// Does it take matrices of this shape?
    pub fn multiplies(format: WeightFormat, outputs: usize, inputs: usize) -> bool {
        // `CHUNK` of `skinny_gemm.cu`.
        let chunk = match format {
            WeightFormat::Bf16 => 32,
            WeightFormat::Fp8 => 64,
        };
        inputs.is_multiple_of(chunk) && outputs.is_multiple_of(8)
    }

    /// Can [`SkinnyProduct::gated`] be asked of this matrix?
    pub fn gates(matrix: &CudaMatrix) -> bool {
        matrix.outputs.is_multiple_of(16 * GATED_TILES)
    }

    /// The variants for `rows` rows.
    pub fn shapes(&self, rows: usize) -> impl Iterator<Item = SkinnyShape> {
        let capacity = if rows <= 8 { 8 } else { MOST_ROWS };
        self.pairs.iter().map(|p| p.shape).filter(move |s| s.rows == capacity)
    }

    /// The variant that is used: most warps first, then the evenest share of the work.
    pub fn choose(&self, rows: usize, outputs: usize, gated: bool) -> Option<SkinnyShape> {
        choose(self.shapes(rows), outputs, gated, self.blocks())
    }

    fn blocks(&self) -> usize {
        self.device.properties().multiprocessors as usize
    }

    pub fn enqueue(&self, matrix: &CudaMatrix, product: &SkinnyProduct) -> Result<()> {
        let Some(shape) = self.choose(product.rows, matrix.outputs, product.gated) else {
            let detail = "the GPU has too little shared memory a block".into();
            return Err(CudaError::Shape { what: "a skinny product", detail });
        };
        self.enqueue_as(shape, matrix, product)
    }

    /// [`Skinny::enqueue`] with a variant of [`Skinny::shapes`].
    pub fn enqueue_as(&self, shape: SkinnyShape, matrix: &CudaMatrix, product: &SkinnyProduct) -> Result<()> {
        let Some(pair) = self.pairs.iter().find(|p| p.shape == shape) else {
            let detail = format!("{shape:?} is no variant of the kernel");
            return Err(CudaError::Shape { what: "a skinny product", detail });
        };
        if matrix.format() != self.format {
            let detail = format!("{:?} weights for kernels of {:?}", matrix.format(), self.format);
            return Err(CudaError::Shape { what: "a skinny product", detail });
        }
        let (norm, eps) = product.norm.unwrap_or_default();
        let params = Params {
            weights: matrix.weights.address(),
            scales: matrix.scales.as_ref().map_or(0, |s| s.address()),
            x: product.x,
            out: product.out,
            bias: matrix.bias.as_ref().map_or(0, |b| b.address()),
            norm,
            rows: product.rows as u32,
            outputs: matrix.outputs as u32,
            inputs: matrix.inputs as u32,
            add: product.add as u32,
            gated: product.gated as u32,
            eps,
        };
        let blocks = shape.units(matrix.outputs).min(self.blocks());
        let launch = LaunchShape::new(blocks, shape.warps as u32 * 32).shared(shape.shared()).overlapping();
        let function = if product.norm.is_some() { pair.normed } else { pair.plain };
        self.device.launch(function, launch, &params)
    }
}

fn choose(
    shapes: impl Iterator<Item = SkinnyShape>,
    outputs: usize,
    gated: bool,
    blocks: usize,
) -> Option<SkinnyShape> {
    shapes
        .filter(|s| !gated || s.tiles == GATED_TILES)
        .min_by_key(|s| (std::cmp::Reverse(s.warps), s.longest(outputs, blocks), std::cmp::Reverse(s.tiles)))
}

/// What is multiplied: `out ← x · wᵀ + bias`, with a norm before it and a gate behind it where asked. Addresses are of
/// f32 rows.
#[derive(Clone, Copy, Debug)]
pub struct SkinnyProduct {
    pub rows: usize,
    pub x: u64,
    pub out: u64,
    /// RMSNorm of `x`: its weights' address and epsilon.
    pub norm: Option<(u64, f32)>,
    /// Adds to what `out` holds.
    pub add: bool,
    /// The matrix makes `[gate | up]` and `out` receives `silu(gate) · up`.
    pub gated: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fitting(rows: usize, room: usize) -> impl Iterator<Item = SkinnyShape> {
        VARIANTS.iter().map(|v| v.0).filter(move |s| s.rows == rows && s.fits(room))
    }

    #[test]
    fn every_supported_gpu_has_room_for_a_variant_of_every_size() {
        // Shared memory a block may have on sm_80, sm_89 and sm_90.
        for (room, warps) in [(163 << 10, 16), (99 << 10, 8), (227 << 10, 16)] {
            for rows in [8, MOST_ROWS] {
                for gated in [false, true] {
                    let chosen = choose(fitting(rows, room), 4096, gated, 108).unwrap();
                    assert_eq!((chosen.warps, chosen.rows), (warps, rows), "{room} bytes");
                }
            }
        }
        // More than half of a multiprocessor: no two blocks on one while another has none.
        for (shape, ..) in VARIANTS.iter().filter(|v| v.0.warps == 16) {
            assert!(shape.shared() > 114 << 10, "{shape:?}");
        }
    }

    #[test]
    fn units_are_chosen_so_that_the_busiest_block_has_least_to_do() {
        let tiles = |outputs, gated| choose(fitting(8, 227 << 10), outputs, gated, 132).unwrap().tiles;
        // 128 units of 4 tiles; 256 of 3 in two rounds instead of 192 of 4; 107 of 3 instead of 80 of 4.
        assert_eq!([4096, 6144, 2560].map(|outputs| tiles(outputs, false)), [4, 3, 3]);
        assert_eq!(tiles(6144, true), 4);
    }
}
