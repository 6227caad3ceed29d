//! Experts of many rows: the kernels of `experts_grouped.cu`.

use super::expert_limits::Form;
use super::experts::ExpertsParams;
use crate::device::{Device, Function, LaunchShape};
use crate::error::Result;
use crate::kernels::Kernels;
use crate::sources::{EXPERTS_GROUPED, expert_defines};
use oscar_backend::WeightFormat;
use std::ffi::CStr;

// Sizes of `experts_grouped.cu`.
const DEPTH: usize = 64;
const WEIGHT_ROWS: usize = 128;
const MOST_TILE_ROWS: usize = 256;
/// Tiles of the kernels for few rows, two blocks of which run together.
const FEW_TILE_ROWS: usize = 64;
const THREADS: u32 = 256;
const MOST_STAGES: usize = 8;

/// How rows are cut into tiles, and the chunks that the kernels hold in shared memory.
pub(super) struct Tiling {
    pub rows: usize,
    pub stages: usize,
    shared: usize,
    /// Blocks of a multiprocessor.
    together: usize,
}

impl Tiling {
    /// Tiles of `experts.cu`.
    pub const OF_FEW_ROWS: Self = Self { rows: 8, stages: 0, shared: 0, together: 1 };

    /// An expert has at most `rows` rows. The system takes a kibibyte of each block.
    fn new(rows: usize, format: WeightFormat, shared_memory: usize) -> Self {
        let weights = match format {
            WeightFormat::Bf16 => 2 * WEIGHT_ROWS * DEPTH,
            WeightFormat::Fp8 => WEIGHT_ROWS * DEPTH,
        };
        let bytes = |rows: usize| weights + 2 * rows * DEPTH;
        let mut rows = rows.next_power_of_two().clamp(32, MOST_TILE_ROWS);
        while rows > 32 && 3 * bytes(rows) > shared_memory {
            rows /= 2;
        }
        let together = if rows <= FEW_TILE_ROWS && 6 * bytes(rows) <= shared_memory { 2 } else { 1 };
        let each = (shared_memory + 1024) / together - 1024;
        let stages = (each / bytes(rows)).clamp(2, MOST_STAGES);
        Self { rows, stages, shared: stages * bytes(rows), together }
    }
}

/// The kernels for one format of weights.
#[derive(Clone, Copy)]
pub(super) struct GroupedKernels {
    /// Gate and down.
    products: [Function; 2],
    products_of_few: [Function; 2],
    sum: Function,
    format: WeightFormat,
    shared_memory: usize,
    blocks: usize,
}

impl GroupedKernels {
    pub fn new(device: &Device, kernels: &Kernels, form: Form) -> Result<Self> {
        let (defines, p) = (expert_defines(form.weights, form.general), device.properties());
        let shared_memory = p.shared_memory as usize;
        let function =
            |name: &'static CStr, shared| kernels.function(&EXPERTS_GROUPED, &defines, name, shared);
        Ok(Self {
            products: [
                function(c"experts_grouped_gate", shared_memory)?,
                function(c"experts_grouped_down", shared_memory)?,
            ],
            products_of_few: [
                function(c"experts_grouped_gate_few", shared_memory)?,
                function(c"experts_grouped_down_few", shared_memory)?,
            ],
            sum: function(c"experts_grouped_sum", 0)?,
            format: form.weights,
            shared_memory,
            blocks: p.multiprocessors as usize,
        })
    }

    pub fn tiling(&self, rows: usize) -> Tiling {
        Tiling::new(rows, self.format, self.shared_memory)
    }

    /// The products and the sum of rows that were routed and sorted.
    ///
    /// # Safety
    /// The pointers of `p` must have room for its rows, and `tiling` must be its own.
    pub unsafe fn launch(&self, device: &Device, tiling: &Tiling, p: ExpertsParams) -> Result<()> {
        let [gate, down] = if tiling.together == 2 { self.products_of_few } else { self.products };
        let products = LaunchShape::new(tiling.together * self.blocks, THREADS).shared(tiling.shared);
        let groups = (p.hidden as usize / 8).div_ceil(128);
        // SAFETY: the caller's promise, for all launches.
        unsafe {
            device.launch(gate, products.overlapping(), p)?;
            device.launch(down, products.overlapping(), p)?;
            device.launch(self.sum, LaunchShape::grid2(p.rows as usize, groups, 128).overlapping(), p)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_every_gpu() {
        for kibibytes in [99, 163, 227] {
            for format in [WeightFormat::Bf16, WeightFormat::Fp8] {
                for rows in [17, 32, 33, 200, 2048] {
                    let tiling = Tiling::new(rows, format, kibibytes << 10);
                    assert!(tiling.together * tiling.shared <= kibibytes << 10 && tiling.stages >= 3);
                    assert!(tiling.rows.is_power_of_two() && (32..=MOST_TILE_ROWS).contains(&tiling.rows));
                }
            }
        }
        assert_eq!(Tiling::new(2048, WeightFormat::Bf16, 227 << 10).rows, 256);
        assert_eq!(Tiling::new(32, WeightFormat::Bf16, 227 << 10).together, 2);
    }
}
