//! Quantized pages on AVX-512 VNNI: raw codes against fixed-point queries and weights of two bytes.
//!
//! `vpdpbusd` multiplies four unsigned codes of a lane by four signed bytes and adds the products
//! to 32 bits. All sums are exact: |256·H + L| ≤ 256 · 255 · 32639 < 2^31. For keys a lane is a
//! token and the bytes are channels; for values a lane is a channel and the bytes are tokens. Codes
//! are unpacked in registers by shift and mask; with up to eight rows that is a few percent of the
//! work, so nothing is staged in memory.

use std::arch::x86_64::*;

use super::int8;
use super::softmax::{prefetch, weigh_codes};
use crate::attention::block::{LANES, MAX_DIM, RowBlock, middle_code};
use crate::attention::page::{PageView, Stage, Stages};
use crate::attention::precision::AttentionPrecision;
use oscar_codec::PAGE_TOKENS;

/// Picks the instance for a width and for the least number of rows that has one.
macro_rules! by_rows {
    ($rows:expr, $function:ident $(, $bits:literal)?) => {
        match $rows {
            0 | 1 => $function::<$($bits,)? 1>,
            2 => $function::<$($bits,)? 2>,
            3 | 4 => $function::<$($bits,)? 4>,
            5 | 6 => $function::<$($bits,)? 6>,
            _ => $function::<$($bits,)? 8>,
        }
    };
}
pub(in crate::attention) use by_rows;

macro_rules! by_bits {
    ($bits:expr, $rows:expr, $function:ident) => {
        match $bits {
            1 => by_rows!($rows, $function, 1),
            2 => by_rows!($rows, $function, 2),
            3 => by_rows!($rows, $function, 3),
            4 => by_rows!($rows, $function, 4),
            5 => by_rows!($rows, $function, 5),
            _ => by_rows!($rows, $function, 8),
        }
    };
}

pub(in crate::attention) fn code_stages(
    precision: AttentionPrecision,
    key_bits: u32,
    value_bits: u32,
    rows: usize,
) -> Stages {
    let score: Stage = match precision.one_byte(key_bits) {
        true => int8::score_stage(key_bits, rows),
        false => by_bits!(key_bits, rows, score),
    };
    match precision.one_byte(value_bits) {
        true => int8::stages(score, value_bits, rows),
        false => Stages {
            score,
            weigh: by_bits!(value_bits, rows, weigh_codes),
            add_values: by_bits!(value_bits, rows, add_values),
            find_maxima: None,
        },
    }
}

/// Bytes of a side's codes in one 16-token tile.
pub(in crate::attention) const fn tile_bytes(bits: u32, head_dim: usize) -> usize {
    LANES * head_dim * bits as usize / 8
}

/// Quad `J` (four bytes a lane) of unit `unit` of a tile: 16 channels of keys, or 16 channels × 16
/// tokens of values.
///
/// # Safety
/// The tile must be readable for [`tile_bytes`] and contain the unit.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(in crate::attention) unsafe fn quad<const BITS: u32, const J: usize>(
    tile: *const u8,
    unit: usize,
    head_dim: usize,
) -> __m512i {
    // SAFETY: the lines of a unit lie in its tile, see `oscar_codec::layout`.
    let line = |base: usize, index: usize| unsafe {
        _mm512_loadu_si512(tile.add(base + 64 * index).cast::<__m512i>())
    };
    let field = |v: __m512i, shift: usize, mask: i8| {
        // Bits that cross from the neighbouring byte are masked away.
        let shifted = _mm512_srl_epi16(v, _mm_cvtsi32_si128(shift as i32));
        _mm512_and_si512(shifted, _mm512_set1_epi8(mask))
    };
    match BITS {
        1 => field(line(0, unit / 2), 4 * (unit % 2) + J, 1),
        2 => constant_field::<2, J>(line(0, unit)),
        3 => {
            let low = constant_field::<2, J>(line(0, unit));
            let high = field(line(4 * head_dim, unit / 2), 4 * (unit % 2) + J, 1);
            _mm512_or_si512(low, _mm512_slli_epi16::<2>(high))
        }
        4 | 5 => {
            let low = match J % 2 {
                0 => constant_field::<4, 0>(line(0, 2 * unit + J / 2)),
                _ => constant_field::<4, 1>(line(0, 2 * unit + J / 2)),
            };
            if BITS == 4 {
                return low;
            }
            let high = field(line(8 * head_dim, unit / 2), 4 * (unit % 2) + J, 1);
            _mm512_or_si512(low, _mm512_slli_epi16::<4>(high))
        }
        _ => line(0, 4 * unit + J),
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn constant_field<const WIDTH: u32, const J: usize>(v: __m512i) -> __m512i {
    let mask = _mm512_set1_epi8((1 << WIDTH) - 1);
    let shifted = match (WIDTH, J) {
        (_, 0) => v,
        (2, 1) => _mm512_srli_epi16::<2>(v),
        (2, 2) | (4, 1) => _mm512_srli_epi16::<4>(v),
        _ => _mm512_srli_epi16::<6>(v),
    };
    _mm512_and_si512(shifted, mask)
}

/// Four bytes of a row of codes as one lane value.
///
/// # Safety
/// `at..at + 4` must be readable.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn broadcast(at: *const i8) -> __m512i {
    // SAFETY: as the caller vouches.
    _mm512_set1_epi32(unsafe { at.cast::<i32>().read_unaligned() })
}

/// `256·hi + lo`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::attention) fn join(hi: __m512i, lo: __m512i) -> __m512i {
    _mm512_add_epi32(_mm512_slli_epi32::<8>(hi), lo)
}

/// Scales and minima of a tile's keys.
///
/// # Safety
/// Parameters of four tiles must be in the page.
#[inline]
#[target_feature(enable = "avx512f,f16c")]
pub(in crate::attention) unsafe fn key_params(view: &PageView<'_>, tile: usize) -> (__m512, __m512) {
    // SAFETY: a tile's parameters are 32 bytes of scales and 32 of minima.
    unsafe {
        let params = view.key_params.as_ptr().add(64 * tile).cast::<__m256i>();
        (_mm512_cvtph_ps(_mm256_loadu_si256(params)), _mm512_cvtph_ps(_mm256_loadu_si256(params.add(1))))
    }
}

/// From a row's integer products with codes to scores: `scale · (sum · step + rest) + min · Σq`.
#[derive(Clone, Copy)]
pub(in crate::attention) struct ScoreUnits {
    pub step: f32,
    pub rest: f32,
}

impl ScoreUnits {
    /// For sums of both bytes of a query.
    pub(in crate::attention) fn both_bytes(block: &RowBlock, row: usize, bits: u32) -> Self {
        Self { step: block.q_step[row], rest: middle_code(bits) * block.q_rest[row] }
    }

    /// For sums of its high bytes.
    pub(in crate::attention) fn one_byte(block: &RowBlock, row: usize, bits: u32) -> Self {
        Self { step: 256.0 * block.q_step[row], rest: middle_code(bits) * block.q_rest_one_byte[row] }
    }

    /// Stores the scores of a row for a tile of tokens.
    ///
    /// # Safety
    /// The tile must be one of the four of a page.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(in crate::attention) unsafe fn store(
        self,
        block: &mut RowBlock,
        row: usize,
        tile: usize,
        sum: __m512i,
        (scale, min): (__m512, __m512),
    ) {
        let offset = _mm512_mul_ps(min, _mm512_set1_ps(block.q_sum[row]));
        let (step, rest) = (_mm512_set1_ps(self.step), _mm512_set1_ps(self.rest));
        let dot = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), step, rest);
        let score = _mm512_fmadd_ps(dot, scale, offset);
        // SAFETY: scores have room for four tiles.
        unsafe { _mm512_storeu_ps(block.scores[row].as_mut_ptr().add(LANES * tile), score) };
    }
}

/// Adds the integer products of a row's weights with a slab of values to its output.
///
/// # Safety
/// The slab must be within a head of [`MAX_DIM`] channels.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::attention) unsafe fn add_to_output(
    block: &mut RowBlock,
    row: usize,
    slab: usize,
    sum: __m512i,
) {
    let step = _mm512_set1_ps(block.w_step[row]);
    // SAFETY: as the caller vouches.
    unsafe {
        let out = block.out[row].as_mut_ptr().add(LANES * slab);
        _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), step, _mm512_loadu_ps(out)));
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vnni,f16c")]
fn score<const BITS: u32, const R: usize>(block: &mut RowBlock, view: &PageView<'_>) {
    assert_eq!(view.keys.len(), 4 * tile_bytes(BITS, block.head_dim));
    assert_eq!(view.key_params.len(), 4 * PAGE_TOKENS);
    prefetch(view.key_params.as_ptr(), view.ahead, 256);
    // Sixteen accumulators at most: with few rows a broadcast query serves several tiles.
    // SAFETY: all four tiles are in the page, as asserted.
    unsafe {
        match R {
            1 | 2 => score_tiles::<BITS, R, 4>(block, view, 0),
            4 => {
                score_tiles::<BITS, R, 2>(block, view, 0);
                score_tiles::<BITS, R, 2>(block, view, 2);
            }
            _ => (0..4).for_each(|tile| score_tiles::<BITS, R, 1>(block, view, tile)),
        }
    }
}

/// # Safety
/// Keys and parameters of tiles `first..first + T` must be in the page.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,f16c")]
unsafe fn score_tiles<const BITS: u32, const R: usize, const T: usize>(
    block: &mut RowBlock,
    view: &PageView<'_>,
    first: usize,
) {
    let d = block.head_dim;
    let bytes = tile_bytes(BITS, d);
    let zero = _mm512_setzero_si512();
    let (mut hi, mut lo) = ([[zero; T]; R], [[zero; T]; R]);
    let queries = block.q_codes.as_ptr().cast::<i8>();
    for unit in 0..d / LANES {
        macro_rules! step {
            ($j:literal) => {
                // SAFETY: tile and unit are in the page; rows of queries are MAX_DIM bytes, the
                // head's first.
                unsafe {
                    let codes: [__m512i; T] = std::array::from_fn(|t| {
                        quad::<BITS, $j>(view.keys.as_ptr().add((first + t) * bytes), unit, d)
                    });
                    for row in 0..R {
                        let at = queries.add(2 * row * MAX_DIM + 16 * unit + 4 * $j);
                        let (q_hi, q_lo) = (broadcast(at), broadcast(at.add(MAX_DIM)));
                        for t in 0..T {
                            hi[row][t] = _mm512_dpbusd_epi32(hi[row][t], codes[t], q_hi);
                            lo[row][t] = _mm512_dpbusd_epi32(lo[row][t], codes[t], q_lo);
                        }
                    }
                }
            };
        }
        for t in 0..T {
            let at = view.keys.as_ptr().wrapping_add((first + t) * bytes + unit * bytes * LANES / d);
            prefetch(at, view.ahead, bytes * LANES / d);
        }
        step!(0);
        step!(1);
        step!(2);
        step!(3);
    }
    for t in 0..T {
        let tile = first + t;
        // SAFETY: the tile is in the page, as the caller vouches.
        unsafe {
            let params = key_params(view, tile);
            for row in 0..R {
                let sum = join(hi[row][t], lo[row][t]);
                ScoreUnits::both_bytes(block, row, BITS).store(block, row, tile, sum, params);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn add_values<const BITS: u32, const R: usize>(block: &mut RowBlock, view: &PageView<'_>) {
    let d = block.head_dim;
    assert_eq!(view.values.len(), 4 * tile_bytes(BITS, d));
    let slabs = d / LANES;
    let mut slab = 0;
    macro_rules! slabs_at_once {
        ($count:literal) => {
            while slabs - slab >= $count {
                // SAFETY: the slabs are in the page, as asserted.
                unsafe { value_slabs::<BITS, R, $count>(block, view, slab) };
                slab += $count;
            }
        };
    }
    if R <= 2 {
        slabs_at_once!(4);
    }
    if R <= 4 {
        slabs_at_once!(2);
    }
    slabs_at_once!(1);
}

/// # Safety
/// Values of slabs `first..first + S` must be in the page.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn value_slabs<const BITS: u32, const R: usize, const S: usize>(
    block: &mut RowBlock,
    view: &PageView<'_>,
    first: usize,
) {
    let d = block.head_dim;
    let bytes = tile_bytes(BITS, d);
    let zero = _mm512_setzero_si512();
    let (mut hi, mut lo) = ([[zero; S]; R], [[zero; S]; R]);
    let weights = block.w_codes.as_ptr().cast::<i8>();
    for tile in 0..4 {
        macro_rules! step {
            ($j:literal) => {
                // SAFETY: tile and slabs are in the page; rows of weights are 64 bytes, one a
                // token.
                unsafe {
                    let codes: [__m512i; S] = std::array::from_fn(|s| {
                        quad::<BITS, $j>(view.values.as_ptr().add(tile * bytes), first + s, d)
                    });
                    for row in 0..R {
                        let at = weights.add(2 * row * PAGE_TOKENS + 16 * tile + 4 * $j);
                        let (w_hi, w_lo) = (broadcast(at), broadcast(at.add(PAGE_TOKENS)));
                        for s in 0..S {
                            hi[row][s] = _mm512_dpbusd_epi32(hi[row][s], codes[s], w_hi);
                            lo[row][s] = _mm512_dpbusd_epi32(lo[row][s], codes[s], w_lo);
                        }
                    }
                }
            };
        }
        let unit_bytes = bytes * LANES / d;
        let at = view.values.as_ptr().wrapping_add(tile * bytes + first * unit_bytes);
        prefetch(at, view.ahead, S * unit_bytes);
        step!(0);
        step!(1);
        step!(2);
        step!(3);
    }
    for s in 0..S {
        for row in 0..R {
            // SAFETY: the slab is within the head.
            unsafe { add_to_output(block, row, first + s, join(hi[row][s], lo[row][s])) };
        }
    }
}
