//! Launching `skinny_gemm.cu`: which variant, how many blocks.

use super::CudaMatrix;
use crate::device::{Device, Function, KernelParams, LaunchShape};
use crate::error::{CudaError, Result};
use crate::kernels::Kernels;
use crate::sources::SKINNY_GEMM;
use std::ffi::CStr;

/// Most rows the kernel takes.
pub const MOST_ROWS: usize = 16;

/// `TILES` and `SLOTS` of `skinny_gemm.cu`.
const TILES: usize = 4;
const SLOTS: usize = 3;

/// A variant: rows it has room for, warps a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkinnyShape {
    pub rows: usize,
    pub warps: usize,
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct Params {
    weights: u64,
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

/// The variants that the GPU has room for.
pub struct Skinny {
    device: Device,
    pairs: Vec<Pair>,
}

/// The variants of `skinny_gemm.cu` and the names of their kernels, those with most warps first.
const VARIANTS: [(SkinnyShape, &CStr, &CStr); 4] = [
    (SkinnyShape { rows: 8, warps: 16 }, c"skinny_8_16", c"skinny_norm_8_16"),
    (SkinnyShape { rows: 16, warps: 16 }, c"skinny_16_16", c"skinny_norm_16_16"),
    (SkinnyShape { rows: 8, warps: 8 }, c"skinny_8_8", c"skinny_norm_8_8"),
    (SkinnyShape { rows: 16, warps: 8 }, c"skinny_16_8", c"skinny_norm_16_8"),
];

impl SkinnyShape {
    /// Dynamic shared memory: the lanes' slots and the sums of two units.
    fn shared(self) -> usize {
        let (slots, sums) = (SLOTS * TILES * 512, 2 * TILES * 64 * 4 * (self.rows / 8));
        self.warps * (slots + sums)
    }

    /// Room for the squares of a norm, which is not dynamic.
    fn fits(self, shared_memory: usize) -> bool {
        self.shared() + self.warps * self.rows * 4 <= shared_memory
    }
}

impl Skinny {
    pub fn new(device: &Device, kernels: &Kernels) -> Result<Self> {
        let room = device.properties().shared_memory as usize;
        let pairs = VARIANTS
            .iter()
            .filter(|(shape, ..)| shape.fits(room))
            .map(|&(shape, plain, normed)| {
                let function = |name| kernels.function(&SKINNY_GEMM, &Vec::new(), name, shape.shared());
                Ok(Pair { shape, plain: function(plain)?, normed: function(normed)? })
            })
            .collect::<Result<_>>()?;
        Ok(Self { device: device.clone(), pairs })
    }

    /// Does the kernel take this product?
    pub fn takes(matrix: &CudaMatrix, rows: usize) -> bool {
        rows <= MOST_ROWS && matrix.inputs.is_multiple_of(32) && matrix.outputs.is_multiple_of(8)
    }

    /// Can [`SkinnyProduct::gated`] be asked of this matrix?
    pub fn gates(matrix: &CudaMatrix) -> bool {
        matrix.outputs.is_multiple_of(16 * TILES)
    }

    /// The variants for `rows` rows, the one that is used first.
    pub fn shapes(&self, rows: usize) -> impl Iterator<Item = SkinnyShape> {
        let capacity = if rows <= 8 { 8 } else { MOST_ROWS };
        self.pairs.iter().map(|p| p.shape).filter(move |s| s.rows == capacity)
    }

    pub fn enqueue(&self, matrix: &CudaMatrix, product: &SkinnyProduct) -> Result<()> {
        let Some(shape) = self.shapes(product.rows).next() else {
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
        let (norm, eps) = product.norm.unwrap_or_default();
        let params = Params {
            weights: matrix.weights.address(),
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
        let units = matrix.outputs.div_ceil(8 * TILES);
        let blocks = units.min(self.device.properties().multiprocessors as usize);
        let launch = LaunchShape::new(blocks, shape.warps as u32 * 32).shared(shape.shared()).overlapping();
        let function = if product.norm.is_some() { pair.normed } else { pair.plain };
        self.device.launch(function, launch, &params)
    }
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

    #[test]
    fn every_supported_gpu_has_room_for_a_variant_of_every_size() {
        // Shared memory a block may have on sm_80, sm_89 and sm_90.
        for (room, warps) in [(163 << 10, 16), (99 << 10, 8), (227 << 10, 16)] {
            for rows in [8, MOST_ROWS] {
                let first = VARIANTS.iter().find(|(s, ..)| s.rows == rows && s.fits(room));
                assert_eq!(first.map(|(s, ..)| s.warps), Some(warps), "{rows} rows in {room} bytes");
            }
        }
        // More than half of a multiprocessor: two blocks on one while another has none would cost half the speed.
        assert!(VARIANTS[0].0.shared() > 114 << 10);
    }
}
