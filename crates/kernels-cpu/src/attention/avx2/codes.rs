//! Quantized and BF16 pages on AVX2.
//!
//! `vpmaddubsw` adds two products of an unsigned code and a signed byte to 16 bits. With codes up
//! to `c` a pair is at most 2 · c · 128, so 2^15 / (256 · c) pairs can be added before the sums
//! have to move to 32 bits: [`units_in_16_bits`] counts them, and a test proves that none
//! overflows. BF16 rows become f32 by a shift or a mask; queries and weights stay f32.

use std::arch::x86_64::*;

use super::int8;
use super::softmax::{weigh_codes, weigh_f32};
use crate::attention::avx512::codes::tile_bytes;
use crate::attention::block::{LANES, MAX_DIM, MAX_ROW, RowBlock, middle_code};
use crate::attention::page::{PageView, Stage, Stages};
use crate::attention::precision::AttentionPrecision;
use oscar_codec::PAGE_TOKENS;

/// Rows in registers at once: their 16-bit sums take half of the sixteen registers.
const STRIP: usize = 4;
/// 32-bit lanes of a vector: half a line.
const HALF: usize = LANES / 2;

/// Units of four quads whose products fit 16-bit sums, by width.
const fn units_in_16_bits(bits: u32) -> usize {
    let pair = 2 * ((1 << bits) - 1) * 128;
    (i16::MAX as usize / pair) / 4
}

/// Picks the instance for a width.
macro_rules! by_bits {
    ($bits:expr, $function:ident) => {
        match $bits {
            1 => $function::<1>,
            2 => $function::<2>,
            3 => $function::<3>,
            4 => $function::<4>,
            _ => $function::<5>,
        }
    };
}

pub(in crate::attention) fn code_stages(
    precision: AttentionPrecision,
    key_bits: u32,
    value_bits: u32,
) -> Stages {
    let score: Stage = match precision.one_byte(key_bits) {
        true => int8::score_stage(key_bits),
        false => by_bits!(key_bits, score),
    };
    if precision.one_byte(value_bits) {
        let (weigh, add_values) = (int8::weigh_stage(value_bits), int8::value_stage(value_bits));
        return Stages { score, weigh, add_values, find_maxima: None };
    }
    let (weigh, add_values): (Stage, Stage) =
        (by_bits!(value_bits, weigh_codes), by_bits!(value_bits, add_values));
    Stages { score, weigh, add_values, find_maxima: None }
}

pub(in crate::attention) fn bf16_stages() -> Stages {
    Stages { score: score_bf16, weigh: weigh_f32, add_values: add_values_bf16, find_maxima: None }
}

/// Half a line of quad `J` of a unit: as in the AVX-512 kernel, eight lanes from `8 · half`.
///
/// # Safety
/// The tile must be readable for [`tile_bytes`] and contain the unit.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::attention) unsafe fn quad<const BITS: u32, const J: usize>(
    tile: *const u8,
    unit: usize,
    half: usize,
    head_dim: usize,
) -> __m256i {
    let field = |base: usize, index: usize, shift: usize, mask: i8| {
        // SAFETY: the lines of a unit lie in its tile.
        let v = unsafe { _mm256_loadu_si256(tile.add(base + 64 * index + 32 * half).cast()) };
        let shifted = _mm256_srl_epi16(v, _mm_cvtsi32_si128(shift as i32));
        _mm256_and_si256(shifted, _mm256_set1_epi8(mask))
    };
    match BITS {
        1 => field(0, unit / 2, 4 * (unit % 2) + J, 1),
        2 => field(0, unit, 2 * J, 3),
        3 => {
            let high = field(4 * head_dim, unit / 2, 4 * (unit % 2) + J, 1);
            _mm256_or_si256(field(0, unit, 2 * J, 3), _mm256_slli_epi16::<2>(high))
        }
        4 => field(0, 2 * unit + J / 2, 4 * (J % 2), 15),
        _ => {
            let high = field(8 * head_dim, unit / 2, 4 * (unit % 2) + J, 1);
            _mm256_or_si256(field(0, 2 * unit + J / 2, 4 * (J % 2), 15), _mm256_slli_epi16::<4>(high))
        }
    }
}

/// Exact sums of a strip of rows, high and low bytes in turn.
type Sums = [__m256i; 2 * STRIP];

/// Adds codes times four bytes of each row of the strip.
///
/// # Safety
/// `bytes + i · stride` must be readable for 4 bytes for each of the `2 · STRIP` rows.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn add_products(mut sums: Sums, codes: __m256i, bytes: *const i8, stride: usize) -> Sums {
    for (i, sum) in sums.iter_mut().enumerate() {
        // SAFETY: as the caller vouches.
        let word = unsafe { bytes.add(i * stride).cast::<i32>().read_unaligned() };
        *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(codes, _mm256_set1_epi32(word)));
    }
    sums
}

/// Products of all units with a strip of rows: `256·H + L` of each row.
///
/// # Safety
/// `tile_of(u)` must give, for each of `units` units, a tile and the unit's place in it as [`quad`]
/// wants them; `bytes + i · stride` must be readable for `16 · units` bytes for each of the `2 ·
/// STRIP` rows.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn code_products<const BITS: u32>(
    units: usize,
    tile_of: impl Fn(usize) -> (*const u8, usize),
    half: usize,
    head_dim: usize,
    bytes: *const i8,
    stride: usize,
) -> [__m256; STRIP] {
    let zero = _mm256_setzero_si256();
    let mut wide: Sums = [zero; 2 * STRIP];
    let mut unit = 0;
    while unit < units {
        let end = units.min(unit + units_in_16_bits(BITS));
        let mut narrow: Sums = [zero; 2 * STRIP];
        for u in unit..end {
            let (tile, place) = tile_of(u);
            // SAFETY: as the caller vouches.
            unsafe {
                let at = bytes.add(16 * u);
                narrow = add_products(narrow, quad::<BITS, 0>(tile, place, half, head_dim), at, stride);
                narrow =
                    add_products(narrow, quad::<BITS, 1>(tile, place, half, head_dim), at.add(4), stride);
                narrow =
                    add_products(narrow, quad::<BITS, 2>(tile, place, half, head_dim), at.add(8), stride);
                narrow =
                    add_products(narrow, quad::<BITS, 3>(tile, place, half, head_dim), at.add(12), stride);
            }
        }
        for (wide, narrow) in wide.iter_mut().zip(narrow) {
            *wide = _mm256_add_epi32(*wide, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)));
        }
        unit = end;
    }
    std::array::from_fn(|row| {
        let hi = _mm256_slli_epi32::<8>(wide[2 * row]);
        _mm256_cvtepi32_ps(_mm256_add_epi32(hi, wide[2 * row + 1]))
    })
}

#[target_feature(enable = "avx2,fma,f16c")]
fn score<const BITS: u32>(block: &mut RowBlock, view: &PageView<'_>) {
    let d = block.head_dim;
    let bytes = tile_bytes(BITS, d);
    assert_eq!(view.keys.len(), 4 * bytes);
    assert_eq!(view.key_params.len(), 4 * PAGE_TOKENS);
    for tile in 0..4 {
        for half in 0..2 {
            for first in (0..block.rows).step_by(STRIP) {
                // SAFETY: tile and units are in the page, as asserted; blocks have ROWS rows,
                // padding included.
                unsafe {
                    let keys = view.keys.as_ptr().add(tile * bytes);
                    let queries = block.q_codes.as_ptr().add(2 * first).cast::<i8>();
                    let sums =
                        code_products::<BITS>(d / LANES, |unit| (keys, unit), half, d, queries, MAX_DIM);
                    let params = view.key_params.as_ptr().add(64 * tile + 16 * half).cast::<__m128i>();
                    let scale = _mm256_cvtph_ps(_mm_loadu_si128(params));
                    let min = _mm256_cvtph_ps(_mm_loadu_si128(params.add(2)));
                    for row in 0..STRIP {
                        let at = first + row;
                        let offset = _mm256_mul_ps(min, _mm256_set1_ps(block.q_sum[at]));
                        let rest = _mm256_set1_ps(middle_code(BITS) * block.q_rest[at]);
                        let step = _mm256_set1_ps(block.q_step[at]);
                        let dot = _mm256_fmadd_ps(sums[row], step, rest);
                        let to = block.scores[at].as_mut_ptr().add(LANES * tile + HALF * half);
                        _mm256_storeu_ps(to, _mm256_fmadd_ps(dot, scale, offset));
                    }
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
        for half in 0..2 {
            for first in (0..block.rows).step_by(STRIP) {
                // SAFETY: as in `score`; rows of weights are 64 bytes.
                unsafe {
                    let weights = block.w_codes.as_ptr().add(2 * first).cast::<i8>();
                    let values = view.values.as_ptr();
                    let tile_of = |tile| (values.wrapping_add(tile * bytes), slab);
                    let sums = code_products::<BITS>(tiles, tile_of, half, d, weights, PAGE_TOKENS);
                    for row in 0..STRIP {
                        let at = block.out[first + row].as_mut_ptr().add(LANES * slab + HALF * half);
                        let step = _mm256_set1_ps(block.w_step[first + row]);
                        _mm256_storeu_ps(at, _mm256_fmadd_ps(sums[row], step, _mm256_loadu_ps(at)));
                    }
                }
            }
        }
    }
}

/// The two BF16 of each lane as f32.
#[inline]
#[target_feature(enable = "avx2")]
fn widen_bf16(pairs: __m256i) -> (__m256, __m256) {
    let odd = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32));
    (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(odd))
}

/// Sums over pairs of one strip of rows and two half lines.
///
/// # Safety
/// `lines + i · line_stride` must be readable for 64 bytes, and `factors + r · row_stride + 2 i`
/// for two floats, for each of `pairs` pairs and `STRIP` rows.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn bf16_products(
    lines: *const u8,
    line_stride: usize,
    factors: *const f32,
    row_stride: usize,
    pairs: usize,
) -> [[__m256; 2]; STRIP] {
    let mut sums = [[_mm256_setzero_ps(); 2]; STRIP];
    for pair in 0..pairs {
        for half in 0..2 {
            // SAFETY: as the caller vouches.
            unsafe {
                let at = lines.add(pair * line_stride + 32 * half);
                let (even, odd) = widen_bf16(_mm256_loadu_si256(at.cast()));
                for (row, sums) in sums.iter_mut().enumerate() {
                    let factor = factors.add(row * row_stride + 2 * pair);
                    sums[half] = _mm256_fmadd_ps(even, _mm256_set1_ps(*factor), sums[half]);
                    sums[half] = _mm256_fmadd_ps(odd, _mm256_set1_ps(*factor.add(1)), sums[half]);
                }
            }
        }
    }
    sums
}

#[target_feature(enable = "avx2,fma")]
fn score_bf16(block: &mut RowBlock, view: &PageView<'_>) {
    let d = block.head_dim;
    assert_eq!(view.keys.len(), PAGE_TOKENS * d * 2);
    for tile in 0..4 {
        for first in (0..block.rows).step_by(STRIP) {
            // SAFETY: a tile is d/2 lines; blocks have ROWS rows of MAX_ROW floats, padding
            // included.
            unsafe {
                let queries = block.q.as_ptr().add(first).cast::<f32>();
                let lines = view.keys.as_ptr().add(tile * 32 * d);
                let sums = bf16_products(lines, 64, queries, MAX_ROW, d / 2);
                for (row, sums) in sums.iter().enumerate() {
                    let to = block.scores[first + row].as_mut_ptr().add(LANES * tile);
                    _mm256_storeu_ps(to, sums[0]);
                    _mm256_storeu_ps(to.add(HALF), sums[1]);
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma")]
fn add_values_bf16(block: &mut RowBlock, view: &PageView<'_>) {
    let d = block.head_dim;
    assert_eq!(view.values.len(), PAGE_TOKENS * d * 2);
    for slab in 0..d / LANES {
        for first in (0..block.rows).step_by(STRIP) {
            // SAFETY: a token pair is d lanes of 4 bytes; `scores` holds a weight for each token.
            unsafe {
                let weights = block.scores.as_ptr().add(first).cast::<f32>();
                let lines = view.values.as_ptr().add(64 * slab);
                let sums = bf16_products(lines, 4 * d, weights, PAGE_TOKENS, PAGE_TOKENS / 2);
                for (row, sums) in sums.iter().enumerate() {
                    let step = _mm256_set1_ps(block.w_step[first + row]);
                    let at = block.out[first + row].as_mut_ptr().add(LANES * slab);
                    for (half, sum) in sums.iter().enumerate() {
                        let at = at.add(HALF * half);
                        _mm256_storeu_ps(at, _mm256_fmadd_ps(*sum, step, _mm256_loadu_ps(at)));
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
        for (bits, units) in [(1, 31), (2, 10), (3, 4), (4, 2), (5, 1)] {
            assert_eq!(units_in_16_bits(bits), units);
            // Four quads a unit, each adding two products to a 16-bit lane.
            let largest = units * 4 * 2 * ((1 << bits) - 1) * 128;
            assert!(largest <= i16::MAX as usize, "{bits} bits");
        }
    }
}
