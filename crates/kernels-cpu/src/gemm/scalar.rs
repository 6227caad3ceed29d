//! The specification: each sum starts at zero and takes its products in order of the input index.
//!
//! A product of two BF16 numbers is exact in f32, so a multiplication followed by an addition here
//! equals a fused multiply-add there. F32 products are not exact, and fused variants differ by
//! their rounding.

use super::tile::{GROUP, GemmKernels, LANES, Tile, XForm};

pub(crate) const KERNELS: GemmKernels = GemmKernels { bf16, bf16_x: XForm::Bf16AsF32, f32, coded: None };

fn bf16(tile: &mut Tile<'_>) {
    tile.check(XForm::Bf16AsF32);
    for row in 0..tile.rows {
        for block in 0..tile.blocks {
            let x = &tile.x[row * tile.x_stride..][..2 * tile.steps];
            let mut sums = [0.0_f32; LANES];
            for (step, pair) in tile.block(block).chunks_exact(LANES).zip(x.chunks_exact(2)) {
                let (x0, x1) = (f32::from_bits(pair[0]), f32::from_bits(pair[1]));
                for lane in 0..LANES {
                    sums[lane] += x0 * f32::from_bits(step[lane] << 16);
                    sums[lane] += x1 * f32::from_bits(step[lane] & 0xffff_0000);
                }
            }
            tile.sums[row * GROUP + block * LANES..][..LANES].copy_from_slice(&sums);
        }
    }
}

fn f32(tile: &mut Tile<'_>) {
    tile.check(XForm::F32);
    for row in 0..tile.rows {
        for block in 0..tile.blocks {
            let x = &tile.x[row * tile.x_stride..][..tile.steps];
            let mut sums = [0.0_f32; LANES];
            for (step, &x) in tile.block(block).chunks_exact(LANES).zip(x) {
                for lane in 0..LANES {
                    sums[lane] += f32::from_bits(x) * f32::from_bits(step[lane]);
                }
            }
            tile.sums[row * GROUP + block * LANES..][..LANES].copy_from_slice(&sums);
        }
    }
}
