//! AVX-512: one 64-byte step of a block is one vector operand, of `vdpbf16ps` for BF16 or of a
//! fused multiply-add for F32; the words of `x` are broadcast.
//!
//! Each sum lives in one lane of one accumulator and takes the steps in order. Accumulators parked
//! in memory between two panels of steps come back unchanged, so neither the strip height nor the
//! panel length shows.

use std::arch::x86_64::*;

use super::tile::{GROUP, GROUP_BLOCKS, GemmKernels, LANES, Tile, XForm};

pub(crate) const KERNELS: GemmKernels =
    GemmKernels { bf16, bf16_x: XForm::Bf16Pair, f32, coded: Some(super::avx512_coded::bf16) };

/// Rows in registers at once: 6 × 4 accumulators, 4 weight vectors and a broadcast fill 29 of 32
/// registers.
const STRIP: usize = 6;
/// Steps of a panel: 4 blocks × 16 KiB stay in the second-level cache while all strips pass over
/// them.
const PANEL: usize = 256;
/// How far ahead of use weights are fetched, in words. With four blocks side by side this is 2 KiB
/// in flight, which measured best; much further and memory pages change under it.
const PREFETCH: usize = 8 * LANES;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn bf16(tile: &mut Tile<'_>) {
    tile.check(XForm::Bf16Pair);
    all_strips::<false>(tile);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) fn f32(tile: &mut Tile<'_>) {
    tile.check(XForm::F32);
    all_strips::<true>(tile);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn all_strips<const F32: bool>(tile: &mut Tile<'_>) {
    // A single strip has no use for panels: the weights pass once.
    let panel = if tile.rows <= STRIP { tile.steps } else { PANEL };
    let mut first_step = 0;
    while first_step < tile.steps {
        let steps = panel.min(tile.steps - first_step);
        for row in (0..tile.rows).step_by(STRIP) {
            let part = Part { first_step, steps, row };
            match (tile.rows - row).min(STRIP) {
                1 => strip::<F32, 1>(tile, part),
                2 => strip::<F32, 2>(tile, part),
                3 => strip::<F32, 3>(tile, part),
                4 => strip::<F32, 4>(tile, part),
                5 => strip::<F32, 5>(tile, part),
                _ => strip::<F32, STRIP>(tile, part),
            }
        }
        first_step += steps;
    }
}

/// A strip of rows over a panel of steps.
#[derive(Clone, Copy)]
struct Part {
    first_step: usize,
    steps: usize,
    row: usize,
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn strip<const F32: bool, const ROWS: usize>(tile: &mut Tile<'_>, part: Part) {
    if tile.blocks == GROUP_BLOCKS {
        accumulate::<F32, ROWS, GROUP_BLOCKS>(tile, part, 0);
    } else {
        for block in 0..tile.blocks {
            accumulate::<F32, ROWS, 1>(tile, part, block);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
#[inline]
fn accumulate<const F32: bool, const ROWS: usize, const BLOCKS: usize>(
    tile: &mut Tile<'_>,
    part: Part,
    block: usize,
) {
    let block_words = tile.steps * LANES;
    let mut sums = [[_mm512_setzero_ps(); BLOCKS]; ROWS];
    // SAFETY: `Tile::check` has compared the slices with the shape, and the callers stay inside the
    // shape: rows row..row+ROWS, blocks block..block+BLOCKS, steps first_step..first_step+steps. A
    // prefetch may point past the end (hence `wrapping_add`): it reads nothing and never faults.
    unsafe {
        let weights = tile.weights.as_ptr().add(block * block_words + part.first_step * LANES);
        let x = tile.x.as_ptr().add(part.row * tile.x_stride + part.first_step);
        let parked = tile.sums.as_mut_ptr().add(part.row * GROUP + block * LANES);
        if part.first_step != 0 {
            for r in 0..ROWS {
                for b in 0..BLOCKS {
                    sums[r][b] = _mm512_loadu_ps(parked.add(r * GROUP + b * LANES));
                }
            }
        }
        for step in 0..part.steps {
            let mut w = [_mm512_setzero_si512(); BLOCKS];
            for b in 0..BLOCKS {
                let line = weights.add(b * block_words + step * LANES);
                _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(PREFETCH).cast());
                w[b] = _mm512_loadu_si512(line.cast());
            }
            for r in 0..ROWS {
                let x = _mm512_set1_epi32(x.add(r * tile.x_stride + step).read().cast_signed());
                for b in 0..BLOCKS {
                    sums[r][b] = multiply_add::<F32>(sums[r][b], x, w[b]);
                }
            }
        }
        for r in 0..ROWS {
            for b in 0..BLOCKS {
                _mm512_storeu_ps(parked.add(r * GROUP + b * LANES), sums[r][b]);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
#[inline]
fn multiply_add<const F32: bool>(sum: __m512, x: __m512i, w: __m512i) -> __m512 {
    if F32 {
        _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), sum)
    } else {
        // SAFETY: both types are 512 plain bits.
        let (x, w) = unsafe {
            (std::mem::transmute::<__m512i, __m512bh>(x), std::mem::transmute::<__m512i, __m512bh>(w))
        };
        _mm512_dpbf16_ps(sum, x, w)
    }
}
