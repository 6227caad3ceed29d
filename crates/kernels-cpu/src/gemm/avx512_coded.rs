//! AVX-512 products of a few rows with FP8 and MXFP4 weights, which are expanded in registers.
//!
//! Sums take the same BF16 weights in the same order as [`super::avx512`] over expanded weights, so
//! both give the same bits. Reading codes once is what bounds a decode step; an expanded copy would
//! be written to and read from the second-level cache on top.

use std::arch::x86_64::*;

use super::coded::{CodedTile, Codes, STEP_BYTES, STEP_INPUTS};
use super::tile::{GROUP, GROUP_BLOCKS, LANES};
use crate::ops::expand::{Mxfp4Values, Table, scaled};
use oscar_backend::{FP8_BLOCK, MXFP4_GROUP};

/// Rows in registers at once: 4 × 4 accumulators, a table of four registers, weights and codes.
const STRIP: usize = 4;
/// How far ahead of use codes are fetched, in bytes of one block.
const PREFETCH: usize = 1024;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
pub(super) fn bf16(tile: &mut CodedTile<'_>) {
    tile.check();
    let steps = tile.steps;
    match tile.weights {
        Codes::Fp8Blocks { codes, scales } => strips(
            tile,
            codes,
            STEP_BYTES,
            FP8_BLOCK / STEP_INPUTS,
            |group| Table::new(scales.get(group).copied().unwrap_or(0.0)),
            |table, _, codes| table.look_up(codes),
        ),
        Codes::Fp8Channels { codes, scales } => {
            let table = Table::new(1.0);
            // SAFETY: `check` found 64 scales.
            let lanes = |block: usize| unsafe { _mm512_loadu_ps(scales.as_ptr().add(block * LANES)) };
            let scales: [__m512; GROUP_BLOCKS] = [lanes(0), lanes(1), lanes(2), lanes(3)];
            strips(
                tile,
                codes,
                STEP_BYTES,
                steps,
                |_| (),
                |(), block, codes| {
                    let [first, second] = table.look_up(codes);
                    [scaled(first, scales[block]), scaled(second, scales[block])]
                },
            );
        }
        Codes::Mxfp4 { codes, scales } => {
            let values = Mxfp4Values::new();
            let groups = steps / (MXFP4_GROUP / STEP_INPUTS);
            // SAFETY: `check` found 16 scales for each block and group.
            let factors = |block: usize, group: usize| unsafe {
                Mxfp4Values::factors(scales.as_ptr().add((block * groups + group) * LANES))
            };
            strips(
                tile,
                codes,
                STEP_BYTES / 2,
                MXFP4_GROUP / STEP_INPUTS,
                |group| [factors(0, group), factors(1, group), factors(2, group), factors(3, group)],
                |factors, block, codes: &[u8; STEP_BYTES]| values.expand(codes, factors[block]),
            );
        }
    }
}

/// All rows, a strip at a time. `group` steps share the scales that `scales` prepares; `expand` gives
/// the BF16 pairs of two steps of a block.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
#[inline]
fn strips<T, const BYTES: usize>(
    tile: &mut CodedTile<'_>,
    codes: &[u8],
    step_bytes: usize,
    group: usize,
    scales: impl Fn(usize) -> T,
    expand: impl Fn(&T, usize, &[u8; BYTES]) -> [__m512i; 2],
) {
    assert!(BYTES == 2 * step_bytes && codes.len() == GROUP_BLOCKS * tile.steps * step_bytes);
    for row in (0..tile.rows).step_by(STRIP) {
        match (tile.rows - row).min(STRIP) {
            1 => accumulate::<T, 1, BYTES>(tile, row, codes, group, &scales, &expand),
            2 => accumulate::<T, 2, BYTES>(tile, row, codes, group, &scales, &expand),
            3 => accumulate::<T, 3, BYTES>(tile, row, codes, group, &scales, &expand),
            _ => accumulate::<T, STRIP, BYTES>(tile, row, codes, group, &scales, &expand),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
#[inline]
fn accumulate<T, const ROWS: usize, const BYTES: usize>(
    tile: &mut CodedTile<'_>,
    row: usize,
    codes: &[u8],
    group: usize,
    scales: &impl Fn(usize) -> T,
    expand: &impl Fn(&T, usize, &[u8; BYTES]) -> [__m512i; 2],
) {
    let block_bytes = tile.steps / 2 * BYTES;
    let mut sums = [[_mm512_setzero_ps(); GROUP_BLOCKS]; ROWS];
    // SAFETY: `CodedTile::check` and `strips` have compared the slices with the shape: four blocks of
    // an even number of steps, and rows row..row+ROWS of `x` and `sums`. A prefetch may point past
    // the end (hence `wrapping_add`): it reads nothing and never faults.
    unsafe {
        let x = tile.x.as_ptr().add(row * tile.x_stride);
        for first in (0..tile.steps).step_by(group) {
            let scales = scales(first / group);
            for step in (first..tile.steps.min(first + group)).step_by(2) {
                for b in 0..GROUP_BLOCKS {
                    let at = codes.as_ptr().add(b * block_bytes + step / 2 * BYTES);
                    _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(PREFETCH).cast());
                    let w = expand(&scales, b, &*at.cast::<[u8; BYTES]>());
                    for (step, w) in [(step, w[0]), (step + 1, w[1])] {
                        let w = std::mem::transmute::<__m512i, __m512bh>(w);
                        for r in 0..ROWS {
                            let x = _mm512_set1_epi32(x.add(r * tile.x_stride + step).read().cast_signed());
                            let x = std::mem::transmute::<__m512i, __m512bh>(x);
                            sums[r][b] = _mm512_dpbf16_ps(sums[r][b], x, w);
                        }
                    }
                }
            }
        }
        let out = tile.sums.as_mut_ptr().add(row * GROUP);
        for r in 0..ROWS {
            for b in 0..GROUP_BLOCKS {
                _mm512_storeu_ps(out.add(r * GROUP + b * LANES), sums[r][b]);
            }
        }
    }
}
