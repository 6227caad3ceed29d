//! Codes of one and two bits on AVX2, against queries and weights of one byte (why that is enough:
//! [`crate::attention::precision`]).
//!
//! `vpmaddubsw` multiplies unsigned by signed bytes and adds pairs to 16 bits: codes by signed
//! queries, or unsigned weights by codes. 16-bit sums move to 32 bits before they could overflow; a
//! test proves the counts. A strip of four rows keeps both halves of a line in registers, so that a
//! broadcast serves two products.

use std::arch::x86_64::*;

use super::codes::quad;
use super::softmax::weigh_bytes;
use crate::attention::avx512::codes::tile_bytes;
use crate::attention::block::{LANES, MAX_DIM, RowBlock, middle_code};
use crate::attention::page::{PageView, Stage};
use oscar_codec::PAGE_TOKENS;

/// Rows in registers at once: 16-bit sums of two halves of a line each.
const STRIP: usize = 4;
/// 32-bit lanes of a vector: half a line.
const HALF: usize = LANES / 2;

/// Largest magnitude of a byte of a query, and of a weight.
const QUERY_MAX: usize = 128;
const WEIGHT_MAX: usize = 255;

/// Units of four quads whose products with bytes up to `byte` fit 16-bit sums.
const fn units_in_16_bits(bits: u32, byte: usize) -> usize {
    (i16::MAX as usize / (2 * ((1 << bits) - 1) * byte)) / 4
}

pub(in crate::attention) fn score_stage(bits: u32) -> Stage {
    if bits == 1 { score::<1> } else { score::<2> }
}

pub(in crate::attention) fn weigh_stage(bits: u32) -> Stage {
    if bits == 1 { weigh_bytes::<1> } else { weigh_bytes::<2> }
}

pub(in crate::attention) fn value_stage(bits: u32) -> Stage {
    if bits == 1 { add_values::<1> } else { add_values::<2> }
}

/// Exact sums of `R` rows, for both halves of a line.
type Sums<const R: usize> = [[__m256i; 2]; R];

/// Products of all units with `R` rows of bytes: signed ones by codes, or, if `UNSIGNED`, unsigned
/// ones.
///
/// # Safety
/// `tile_of(u)` must give, for each of `units` units, a tile and the unit's place in it as [`quad`]
/// wants them; `bytes + r · stride` must be readable for `16 · units` bytes for each row `r`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn products<const BITS: u32, const R: usize, const UNSIGNED: bool>(
    units: usize,
    tile_of: impl Fn(usize) -> (*const u8, usize),
    head_dim: usize,
    bytes: *const i8,
    stride: usize,
) -> Sums<R> {
    let zero = _mm256_setzero_si256();
    let at_once = units_in_16_bits(BITS, if UNSIGNED { WEIGHT_MAX } else { QUERY_MAX });
    let mut wide: Sums<R> = [[zero; 2]; R];
    let mut unit = 0;
    while unit < units {
        let end = units.min(unit + at_once);
        let mut narrow: Sums<R> = [[zero; 2]; R];
        for u in unit..end {
            let (tile, place) = tile_of(u);
            macro_rules! step {
                ($j:literal) => {
                    // SAFETY: as the caller vouches.
                    unsafe {
                        let codes: [__m256i; 2] =
                            std::array::from_fn(|half| quad::<BITS, $j>(tile, place, half, head_dim));
                        for (row, sums) in narrow.iter_mut().enumerate() {
                            let at = bytes.add(row * stride + 16 * u + 4 * $j);
                            let word = _mm256_set1_epi32(at.cast::<i32>().read_unaligned());
                            for half in 0..2 {
                                let pairs = match UNSIGNED {
                                    true => _mm256_maddubs_epi16(word, codes[half]),
                                    false => _mm256_maddubs_epi16(codes[half], word),
                                };
                                sums[half] = _mm256_add_epi16(sums[half], pairs);
                            }
                        }
                    }
                };
            }
            step!(0);
            step!(1);
            step!(2);
            step!(3);
        }
        for (wide, narrow) in wide.iter_mut().zip(narrow) {
            for (wide, narrow) in wide.iter_mut().zip(narrow) {
                *wide = _mm256_add_epi32(*wide, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)));
            }
        }
        unit = end;
    }
    wide
}

/// Scales and minima of half a tile's keys.
///
/// # Safety
/// Parameters of four tiles must be in the page.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn key_params(view: &PageView<'_>, tile: usize, half: usize) -> (__m256, __m256) {
    // SAFETY: a tile's parameters are 32 bytes of scales and 32 of minima.
    unsafe {
        let params = view.key_params.as_ptr().add(64 * tile + 16 * half).cast::<__m128i>();
        (_mm256_cvtph_ps(_mm_loadu_si128(params)), _mm256_cvtph_ps(_mm_loadu_si128(params.add(2))))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn score<const BITS: u32>(block: &mut RowBlock, view: &PageView<'_>) {
    let d = block.head_dim;
    let bytes = tile_bytes(BITS, d);
    assert_eq!(view.keys.len(), 4 * bytes);
    assert_eq!(view.key_params.len(), 4 * PAGE_TOKENS);
    for tile in 0..4 {
        // SAFETY: tiles and units are in the page; high bytes of the rows, padding included, are
        // every other row of
        // `q_codes`; scores have room for 64 tokens.
        unsafe {
            let keys = view.keys.as_ptr().add(tile * bytes);
            for first in (0..block.rows).step_by(STRIP) {
                let queries = block.q_codes.as_ptr().add(2 * first).cast::<i8>();
                let sums = products::<BITS, STRIP, false>(d / LANES, |u| (keys, u), d, queries, 2 * MAX_DIM);
                for half in 0..2 {
                    let (scale, min) = key_params(view, tile, half);
                    for (row, sums) in (first..).zip(&sums) {
                        let offset = _mm256_mul_ps(min, _mm256_set1_ps(block.q_sum[row]));
                        let rest = _mm256_set1_ps(middle_code(BITS) * block.q_rest_one_byte[row]);
                        let step = _mm256_set1_ps(256.0 * block.q_step[row]);
                        let dot = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[half]), step, rest);
                        let to = block.scores[row].as_mut_ptr().add(LANES * tile + HALF * half);
                        _mm256_storeu_ps(to, _mm256_fmadd_ps(dot, scale, offset));
                    }
                }
            }
            for row in (0..block.rows).filter(|row| block.low_rows >> row & 1 == 1) {
                let low = block.q_codes[2 * row + 1].as_ptr();
                let sums = products::<BITS, 1, false>(d / LANES, |u| (keys, u), d, low, 0);
                for half in 0..2 {
                    let (scale, _) = key_params(view, tile, half);
                    let step = _mm256_set1_ps(block.q_step[row]);
                    let part = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[0][half]), step);
                    let at = block.scores[row].as_mut_ptr().add(LANES * tile + HALF * half);
                    _mm256_storeu_ps(at, _mm256_fmadd_ps(part, scale, _mm256_loadu_ps(at)));
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma")]
fn add_values<const BITS: u32>(block: &mut RowBlock, view: &PageView<'_>) {
    let d = block.head_dim;
    let bytes = tile_bytes(BITS, d);
    assert_eq!(view.values.len(), 4 * bytes);
    // Not a constant to the compiler: unrolled over all tiles it keeps all weights in registers it
    // has not got.
    let tiles = view.values.len() / bytes;
    for slab in 0..d / LANES {
        for first in (0..block.rows).step_by(STRIP) {
            // SAFETY: as in `score`; rows of weights are 64 bytes.
            unsafe {
                let weights = block.w_codes.as_ptr().add(2 * first).cast::<i8>();
                let values = view.values.as_ptr();
                let tile_of = |tile| (values.wrapping_add(tile * bytes), slab);
                let sums = products::<BITS, STRIP, true>(tiles, tile_of, d, weights, 2 * PAGE_TOKENS);
                for (row, sums) in (first..).zip(&sums) {
                    let step = _mm256_set1_ps(block.w_step[row]);
                    let at = block.out[row].as_mut_ptr().add(LANES * slab);
                    for (half, &sum) in sums.iter().enumerate() {
                        let at = at.add(HALF * half);
                        let sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), step, _mm256_loadu_ps(at));
                        _mm256_storeu_ps(at, sum);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bit_sums_cannot_overflow() {
        for bits in [1, 2] {
            for byte in [QUERY_MAX, WEIGHT_MAX] {
                let units = units_in_16_bits(bits, byte);
                // Four quads a unit, each adding two products to a 16-bit lane.
                assert!(units >= 4 && units * 4 * 2 * ((1 << bits) - 1) * byte <= i16::MAX as usize);
            }
        }
    }
}
