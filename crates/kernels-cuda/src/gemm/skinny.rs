//! Launching `skinny_gemm.cu`: which variant for which shape.

use super::CudaMatrix;
use crate::device::{Device, Function, KernelParams, LaunchShape};
use crate::error::{CudaError, Result};
use crate::kernels::Kernels;
use crate::sources::SKINNY_GEMM;
use std::ffi::CStr;

/// Most rows the kernel takes.
pub const MOST_ROWS: usize = 16;

/// A variant: rows it has room for, tiles of 8 outputs a block, loads in flight, warps a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkinnyShape {
    pub rows: usize,
    pub tiles: usize,
    pub depth: usize,
    pub warps: usize,
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct Params {
    weights: u64,
    x: u64,
    out: u64,
    bias: u64,
    rows: u32,
    outputs: u32,
    inputs: u32,
    add: u32,
    gated: u32,
    unused: u32,
}

// SAFETY: the struct of `skinny_gemm.cu`; `Skinny::enqueue` fills it with addresses of live matrices.
unsafe impl KernelParams for Params {}

/// Compiled variants of the kernel.
pub struct Skinny {
    device: Device,
    functions: Vec<(SkinnyShape, Function)>,
}

/// The variants of `skinny_gemm.cu` and their names.
const VARIANTS: [(SkinnyShape, &CStr); 6] = [
    (SkinnyShape { rows: 8, tiles: 2, depth: 4, warps: 16 }, c"skinny_8_2_4_16"),
    (SkinnyShape { rows: 8, tiles: 4, depth: 2, warps: 8 }, c"skinny_8_4_2_8"),
    (SkinnyShape { rows: 8, tiles: 4, depth: 2, warps: 16 }, c"skinny_8_4_2_16"),
    (SkinnyShape { rows: 8, tiles: 4, depth: 4, warps: 8 }, c"skinny_8_4_4_8"),
    (SkinnyShape { rows: 16, tiles: 4, depth: 2, warps: 8 }, c"skinny_16_4_2_8"),
    (SkinnyShape { rows: 16, tiles: 4, depth: 2, warps: 16 }, c"skinny_16_4_2_16"),
];

impl SkinnyShape {
    /// What measured best: as many outputs a block as still fill the device, because every block reads all
    /// activations; more warps where there are few blocks.
    pub fn choose(rows: usize, outputs: usize, multiprocessors: u32) -> Self {
        let rows = if rows <= 8 { 8 } else { MOST_ROWS };
        let (blocks, enough) = (outputs.div_ceil(32), multiprocessors as usize);
        let (tiles, depth, warps) = match rows {
            8 if 2 * blocks < enough => (2, 4, 16),
            // One block a multiprocessor: all the warps it takes. Some more: they must share it.
            8 if blocks <= enough => (4, 2, 16),
            8 if blocks < 2 * enough => (4, 4, 8),
            _ if blocks >= 2 * enough => (4, 2, 8),
            _ => (4, 2, 16),
        };
        Self { rows, tiles, depth, warps }
    }

    fn shared(self) -> usize {
        self.warps * self.rows * self.tiles * 8 * 4
    }

    /// The variants for `rows` rows, for benchmarks and checks.
    pub fn all(rows: usize) -> Vec<Self> {
        let capacity = if rows <= 8 { 8 } else { MOST_ROWS };
        VARIANTS.iter().map(|v| v.0).filter(|v| v.rows == capacity).collect()
    }
}

impl Skinny {
    pub fn new(device: &Device, kernels: &Kernels) -> Result<Self> {
        let functions = VARIANTS
            .iter()
            .map(|&(shape, name)| {
                Ok((shape, kernels.function(&SKINNY_GEMM, &Vec::new(), name, shape.shared())?))
            })
            .collect::<Result<_>>()?;
        Ok(Self { device: device.clone(), functions })
    }

    /// Does the kernel take this product?
    pub fn takes(matrix: &CudaMatrix, rows: usize) -> bool {
        rows <= MOST_ROWS && matrix.inputs.is_multiple_of(32) && matrix.outputs.is_multiple_of(8)
    }

    /// Can [`SkinnyProduct::gated`] be asked of this matrix?
    pub fn gates(matrix: &CudaMatrix) -> bool {
        matrix.outputs.is_multiple_of(64)
    }

    pub fn enqueue(&self, shape: SkinnyShape, matrix: &CudaMatrix, product: &SkinnyProduct) -> Result<()> {
        let Some(&(_, function)) = self.functions.iter().find(|f| f.0 == shape) else {
            let detail = format!("{shape:?} is no variant of the kernel");
            return Err(CudaError::Shape { what: "a skinny product", detail });
        };
        let params = Params {
            weights: matrix.weights.address(),
            x: product.x,
            out: product.out,
            bias: matrix.bias.as_ref().map_or(0, |b| b.address()),
            rows: product.rows as u32,
            outputs: matrix.outputs as u32,
            inputs: matrix.inputs as u32,
            add: product.add as u32,
            gated: product.gated as u32,
            unused: 0,
        };
        let grid = matrix.outputs.div_ceil(8 * shape.tiles);
        let launch = LaunchShape::new(grid, shape.warps as u32 * 32).shared(shape.shared()).overlapping();
        self.device.launch(function, launch, &params)
    }
}

/// What is multiplied: `out ← x · wᵀ + bias`, with a gate behind it where asked. Addresses are of f32 rows.
#[derive(Clone, Copy, Debug)]
pub struct SkinnyProduct {
    pub rows: usize,
    pub x: u64,
    pub out: u64,
    /// Adds to what `out` holds.
    pub add: bool,
    /// The matrix makes `[gate | up]` and `out` receives `silu(gate) · up`.
    pub gated: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_choice_is_a_variant_with_room() {
        for rows in 1..=MOST_ROWS {
            for outputs in [8, 256, 2560, 4096, 6144, 24576, 151_936] {
                let shape = SkinnyShape::choose(rows, outputs, 132);
                assert!(shape.rows >= rows, "{rows} {shape:?}");
                assert!(VARIANTS.iter().any(|v| v.0 == shape), "{shape:?}");
            }
        }
    }
}
