//! Launching `skinny_gemm.cu`: which variant for which shape.

use super::CudaMatrix;
use crate::device::{Device, Function, KernelParams, LaunchShape};
use crate::error::Result;
use crate::kernels::Kernels;
use crate::sources::SKINNY_GEMM;
use std::ffi::CStr;

/// Most rows the kernel takes.
pub const MOST_ROWS: usize = 32;

/// A variant: rows it has room for, tiles of 8 outputs a block, warps a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkinnyShape {
    pub rows: usize,
    pub tiles: usize,
    pub warps: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    weights: u64,
    x: u64,
    out: u64,
    bias: u64,
    rows: u32,
    outputs: u32,
    inputs: u32,
    add: u32,
}

// SAFETY: the struct of `skinny_gemm.cu`; `Skinny::enqueue` fills it with addresses of live matrices.
unsafe impl KernelParams for Params {}

/// Compiled variants of the kernel.
pub struct Skinny {
    device: Device,
    functions: Vec<(usize, usize, Function)>,
}

const VARIANTS: [(usize, usize, &CStr); 8] = [
    (8, 1, c"skinny_8_1"),
    (8, 2, c"skinny_8_2"),
    (8, 4, c"skinny_8_4"),
    (16, 1, c"skinny_16_1"),
    (16, 2, c"skinny_16_2"),
    (16, 4, c"skinny_16_4"),
    (32, 2, c"skinny_32_2"),
    (32, 4, c"skinny_32_4"),
];

impl SkinnyShape {
    /// What measured best: enough blocks to fill the device, then as many outputs a block as possible, because every
    /// block reads all activations.
    pub fn choose(rows: usize, outputs: usize, multiprocessors: u32) -> Self {
        let capacity = if rows <= 8 { 8 } else { rows.next_power_of_two().min(MOST_ROWS) };
        let blocks = |tiles: usize| outputs.div_ceil(8 * tiles);
        let enough = multiprocessors as usize;
        let least = if capacity == 32 { 2 } else { 1 };
        let tiles = [4, 2, 1].into_iter().find(|&t| t >= least && blocks(t) >= 2 * enough).unwrap_or(least);
        let warps = if blocks(tiles) >= 4 * enough { 8 } else { 16 };
        Self { rows: capacity, tiles, warps }
    }

    fn shared(self) -> usize {
        self.warps * self.rows * self.tiles * 8 * 4
    }

    /// Every variant with room for `rows`, for benchmarks and checks.
    pub fn all(rows: usize) -> Vec<Self> {
        let fits = VARIANTS.iter().filter(|v| v.0 >= rows);
        fits.flat_map(|&(rows, tiles, _)| [8, 16].map(|warps| Self { rows, tiles, warps })).collect()
    }
}

impl Skinny {
    pub fn new(device: &Device, kernels: &Kernels) -> Result<Self> {
        let functions = VARIANTS
            .iter()
            .map(|&(rows, tiles, name)| {
                let most = SkinnyShape { rows, tiles, warps: 16 }.shared();
                Ok((rows, tiles, kernels.function(&SKINNY_GEMM, &Vec::new(), name, most)?))
            })
            .collect::<Result<_>>()?;
        Ok(Self { device: device.clone(), functions })
    }

    /// Does the kernel take this product?
    pub fn takes(matrix: &CudaMatrix, rows: usize) -> bool {
        rows <= MOST_ROWS && matrix.inputs.is_multiple_of(32) && matrix.outputs.is_multiple_of(8)
    }

    /// Enqueues `out ← x · wᵀ + bias`, or added to it; `x` and `out` are f32 rows.
    pub fn enqueue(
        &self,
        shape: SkinnyShape,
        matrix: &CudaMatrix,
        rows: usize,
        x: u64,
        out: u64,
        add: bool,
    ) -> Result<()> {
        let find = |&&(r, t, _): &&(usize, usize, Function)| (r, t) == (shape.rows, shape.tiles);
        let Some(&(_, _, function)) = self.functions.iter().find(find) else {
            let detail = format!("{shape:?} is no variant of the kernel");
            return Err(crate::error::CudaError::Shape { what: "a skinny product", detail });
        };
        let params = Params {
            weights: matrix.weights.address(),
            x,
            out,
            bias: matrix.bias.as_ref().map_or(0, |b| b.address()),
            rows: rows as u32,
            outputs: matrix.outputs as u32,
            inputs: matrix.inputs as u32,
            add: add as u32,
        };
        let grid = matrix.outputs.div_ceil(8 * shape.tiles);
        let launch = LaunchShape::new(grid, shape.warps as u32 * 32).shared(shape.shared()).overlapping();
        self.device.launch(function, launch, &params)
    }
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
                assert!(VARIANTS.iter().any(|&(r, t, _)| (r, t) == (shape.rows, shape.tiles)), "{shape:?}");
            }
        }
    }
}
