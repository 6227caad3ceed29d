//! AVX2 with FMA: BF16 weights are widened by a shift (first input) and a mask (second input), then
//! fused multiply-adds with broadcast words of `x`.
//!
//! Each sum lives in one lane of one accumulator and takes the inputs in order, whatever the strip
//! height.

use std::arch::x86_64::*;

use super::tile::{GROUP, GemmKernels, LANES, Tile, XForm};

pub(crate) const KERNELS: GemmKernels = GemmKernels { bf16, bf16_x: XForm::Bf16AsF32, f32, coded: None };

/// Lanes of a 256-bit vector; a block is two of them.
const HALF: usize = 8;
/// Rows in registers at once.
const STRIP: usize = 4;
/// How far ahead of use weights are fetched, in words.
const PREFETCH: usize = 8 * LANES;

#[target_feature(enable = "avx2,fma")]
fn bf16(tile: &mut Tile<'_>) {
    tile.check(XForm::Bf16AsF32);
    all_strips::<false>(tile);
}

#[target_feature(enable = "avx2,fma")]
fn f32(tile: &mut Tile<'_>) {
    tile.check(XForm::F32);
    all_strips::<true>(tile);
}

/// One or two rows: width instead of height, or the latency of the additions would show. More rows:
/// blocks outside and strips inside, so that one block's weights stay near while all rows pass over
/// them.
#[target_feature(enable = "avx2,fma")]
fn all_strips<const F32: bool>(tile: &mut Tile<'_>) {
    match tile.rows {
        1 => one_strip::<F32, 1, 4>(tile),
        2 => one_strip::<F32, 2, 2>(tile),
        rows => {
            for block in 0..tile.blocks {
                for row in (0..rows).step_by(STRIP) {
                    match (rows - row).min(STRIP) {
                        1 => accumulate::<F32, 1, 1>(tile, row, block),
                        2 => accumulate::<F32, 2, 1>(tile, row, block),
                        3 => accumulate::<F32, 3, 1>(tile, row, block),
                        _ => accumulate::<F32, STRIP, 1>(tile, row, block),
                    }
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma")]
fn one_strip<const F32: bool, const ROWS: usize, const BLOCKS: usize>(tile: &mut Tile<'_>) {
    let whole = tile.blocks / BLOCKS * BLOCKS;
    for block in (0..whole).step_by(BLOCKS) {
        accumulate::<F32, ROWS, BLOCKS>(tile, 0, block);
    }
    for block in whole..tile.blocks {
        accumulate::<F32, ROWS, 1>(tile, 0, block);
    }
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn accumulate<const F32: bool, const ROWS: usize, const BLOCKS: usize>(
    tile: &mut Tile<'_>,
    row: usize,
    block: usize,
) {
    let block_words = tile.steps * LANES;
    let mut sums = [[[_mm256_setzero_ps(); 2]; BLOCKS]; ROWS];
    // SAFETY: `Tile::check` has compared the slices with the shape, and the callers stay inside the
    // shape: rows row..row+ROWS, blocks block..block+BLOCKS, all steps. A prefetch may point past
    // the end (hence `wrapping_add`): it reads nothing and never faults.
    unsafe {
        let weights = tile.weights.as_ptr().add(block * block_words);
        let x = tile.x.as_ptr().add(row * tile.x_stride).cast::<f32>();
        for step in 0..tile.steps {
            for b in 0..BLOCKS {
                let line = weights.add(b * block_words + step * LANES);
                _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(PREFETCH).cast());
                for half in 0..2 {
                    let w = _mm256_loadu_si256(line.add(half * HALF).cast());
                    if F32 {
                        for r in 0..ROWS {
                            let x = _mm256_broadcast_ss(&*x.add(r * tile.x_stride + step));
                            let sum = &mut sums[r][b][half];
                            *sum = _mm256_fmadd_ps(x, _mm256_castsi256_ps(w), *sum);
                        }
                    } else {
                        let w0 = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(w));
                        let high = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
                        let w1 = _mm256_castsi256_ps(_mm256_and_si256(w, high));
                        for r in 0..ROWS {
                            let pair = x.add(r * tile.x_stride + 2 * step);
                            let sum = &mut sums[r][b][half];
                            *sum = _mm256_fmadd_ps(_mm256_broadcast_ss(&*pair), w0, *sum);
                            *sum = _mm256_fmadd_ps(_mm256_broadcast_ss(&*pair.add(1)), w1, *sum);
                        }
                    }
                }
            }
        }
        let out = tile.sums.as_mut_ptr().add(row * GROUP + block * LANES);
        for r in 0..ROWS {
            for b in 0..BLOCKS {
                for half in 0..2 {
                    _mm256_storeu_ps(out.add(r * GROUP + b * LANES + half * HALF), sums[r][b][half]);
                }
            }
        }
    }
}
