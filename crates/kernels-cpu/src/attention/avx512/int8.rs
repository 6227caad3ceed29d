//! Codes of one and two bits on AVX-512 VNNI, against queries and weights of one byte (why that is
//! enough: [`crate::attention::precision`]).
//!
//! Keys: unsigned codes by signed high bytes of the queries, `|Σ| ≤ 256 · 3 · 127`; the few rows
//! that need their low bytes get them in a pass of their own. Values: unsigned weights 0..=255 by
//! codes, which are small enough to be signed ones, `Σ ≤ 64 · 255 · 3`. All sums are exact. A line
//! of 64 bytes holds `8 / BITS` planes of codes, unpacked in registers once for all rows of the
//! block.

use std::arch::x86_64::*;

use super::codes::{ScoreUnits, add_to_output, by_rows, key_params, tile_bytes};
use super::softmax::prefetch;
use super::softmax_int8::{find_maxima, weigh_codes};
use crate::attention::block::{LANES, MAX_DIM, ROWS, RowBlock};
use crate::attention::page::{PageView, Stage, Stages};
use oscar_codec::PAGE_TOKENS;

pub(in crate::attention) fn score_stage(bits: u32, rows: usize) -> Stage {
    match bits {
        1 => by_rows!(rows, score, 1),
        _ => by_rows!(rows, score, 2),
    }
}

/// Values of `bits` bits after any stage that scores.
pub(in crate::attention) fn stages(score: Stage, bits: u32, rows: usize) -> Stages {
    let find_maxima: Stage = by_rows!(rows, find_maxima);
    let (weigh, add_values): (Stage, Stage) = match bits {
        1 => (by_rows!(rows, weigh_codes, 1), by_rows!(rows, add_values, 1)),
        _ => (by_rows!(rows, weigh_codes, 2), by_rows!(rows, add_values, 2)),
    };
    Stages { score, weigh, add_values, find_maxima: Some(find_maxima) }
}

/// Codes of plane `plane` of a line. The shift is a constant once loops over planes are unrolled.
#[inline(always)]
fn plane_of<const BITS: u32>(line: __m512i, plane: usize) -> __m512i {
    // SAFETY: inlined only into functions that have the instructions.
    unsafe {
        // Bits that cross from the neighbouring byte are masked away.
        let shifted = _mm512_srl_epi16(line, _mm_cvtsi32_si128((plane * BITS as usize) as i32));
        _mm512_and_si512(shifted, _mm512_set1_epi8((1 << BITS) - 1))
    }
}

/// # Safety
/// 64 bytes must be readable.
#[inline(always)]
unsafe fn load(at: *const u8) -> __m512i {
    // SAFETY: as the caller vouches.
    unsafe { _mm512_loadu_si512(at.cast::<__m512i>()) }
}

/// # Safety
/// Four bytes must be readable.
#[inline(always)]
unsafe fn broadcast(at: *const i8) -> __m512i {
    // SAFETY: as the caller vouches.
    unsafe { _mm512_set1_epi32(at.cast::<i32>().read_unaligned()) }
}

/// Runs the body for each plane of a line, with a constant plane number.
macro_rules! for_planes {
    ($bits:ident, $plane:ident => $body:block) => {
        for_planes!(@ $plane $body 0 1 2 3);
        if $bits == 1 {
            for_planes!(@ $plane $body 4 5 6 7);
        }
    };
    (@ $plane:ident $body:block $($number:literal)*) => {
        $({
            let $plane: usize = $number;
            $body
        })*
    };
}

#[target_feature(enable = "avx512f,avx512bw,avx512vnni,f16c")]
fn score<const BITS: u32, const R: usize>(block: &mut RowBlock, view: &PageView<'_>) {
    assert_eq!(view.keys.len(), 4 * tile_bytes(BITS, block.head_dim));
    assert_eq!(view.key_params.len(), 4 * PAGE_TOKENS);
    prefetch(view.key_params.as_ptr(), view.ahead, 256);
    // Sixteen sums at most; a broadcast query serves all tiles at hand.
    // SAFETY: all four tiles are in the page, as asserted.
    unsafe {
        if R <= 4 {
            score_tiles::<BITS, R, 4>(block, view, 0);
        } else {
            score_tiles::<BITS, R, 2>(block, view, 0);
            score_tiles::<BITS, R, 2>(block, view, 2);
        }
        let low_rows = block.low_rows;
        for row in (0..R).filter(|row| low_rows >> row & 1 == 1) {
            add_low_bytes::<BITS>(block, view, row);
        }
    }
}

/// Integer products of `T` tiles of keys with one byte of `R` rows, which are `row_stride` bytes
/// apart.
///
/// # Safety
/// Keys of the tiles, `head_dim · 16 · BITS / 8` bytes each, must be readable at `keys`, and
/// `head_dim` bytes of each row at `queries`. The processor must have VNNI.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn key_products<const BITS: u32, const R: usize, const T: usize>(
    keys: *const u8,
    ahead: isize,
    head_dim: usize,
    queries: *const i8,
    row_stride: usize,
) -> [[__m512i; T]; R] {
    let bytes = tile_bytes(BITS, head_dim);
    let mut sums = [[_mm512_setzero_si512(); T]; R];
    for line in 0..bytes / 64 {
        // SAFETY: lines of the tiles, and channels of the head, as the caller vouches.
        unsafe {
            let lines: [__m512i; T] = std::array::from_fn(|t| {
                let at = keys.add(t * bytes + 64 * line);
                prefetch(at, ahead, 64);
                load(at)
            });
            let queries = queries.add(line * 32 / BITS as usize);
            for_planes!(BITS, plane => {
                let codes: [__m512i; T] = std::array::from_fn(|t| plane_of::<BITS>(lines[t], plane));
                for row in 0..R {
                    let q = broadcast(queries.add(row * row_stride + 4 * plane));
                    for t in 0..T {
                        sums[row][t] = _mm512_dpbusd_epi32(sums[row][t], codes[t], q);
                    }
                }
            });
        }
    }
    sums
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
    // SAFETY: the tiles are in the page; high bytes of the rows are every other row of `q_codes`.
    unsafe {
        let keys = view.keys.as_ptr().add(first * tile_bytes(BITS, d));
        let queries = block.q_codes.as_ptr().cast::<i8>();
        let sums = key_products::<BITS, R, T>(keys, view.ahead, d, queries, 2 * MAX_DIM);
        for t in 0..T {
            let params = key_params(view, first + t);
            for row in 0..R {
                ScoreUnits::one_byte(block, row, BITS).store(block, row, first + t, sums[row][t], params);
            }
        }
    }
}

/// Adds the low bytes of the rows that need them to scores of high bytes.
///
/// # Safety
/// The processor must have VNNI and F16C.
pub(in crate::attention) unsafe fn add_low_rows(block: &mut RowBlock, view: &PageView<'_>, bits: u32) {
    let low_rows = block.low_rows;
    for row in (0..block.rows).filter(|row| low_rows >> row & 1 == 1) {
        assert_eq!(view.keys.len(), 4 * tile_bytes(bits, block.head_dim));
        assert_eq!(view.key_params.len(), 4 * PAGE_TOKENS);
        // SAFETY: four tiles and their parameters are in the page, as asserted.
        unsafe {
            match bits {
                1 => add_low_bytes::<1>(block, view, row),
                _ => add_low_bytes::<2>(block, view, row),
            }
        }
    }
}

/// Adds to a row's scores what the low bytes of its query contribute.
///
/// # Safety
/// Keys and parameters of four tiles must be in the page.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,f16c")]
unsafe fn add_low_bytes<const BITS: u32>(block: &mut RowBlock, view: &PageView<'_>, row: usize) {
    // SAFETY: as in `score_tiles`.
    unsafe {
        let low = block.q_codes[2 * row + 1].as_ptr();
        let sums = key_products::<BITS, 1, 4>(view.keys.as_ptr(), 0, block.head_dim, low, 0);
        for (tile, sum) in sums[0].iter().enumerate() {
            let (scale, _) = key_params(view, tile);
            let part = _mm512_mul_ps(_mm512_cvtepi32_ps(*sum), _mm512_set1_ps(block.q_step[row]));
            let at = block.scores[row].as_mut_ptr().add(LANES * tile);
            _mm512_storeu_ps(at, _mm512_fmadd_ps(part, scale, _mm512_loadu_ps(at)));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn add_values<const BITS: u32, const R: usize>(block: &mut RowBlock, view: &PageView<'_>) {
    let d = block.head_dim;
    assert!(R <= ROWS && view.values.len() == 4 * tile_bytes(BITS, d));
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
    if R <= 4 {
        slabs_at_once!(4);
    }
    slabs_at_once!(2);
    // One-bit lines hold two slabs, and their heads an even number of them.
    if BITS == 2 {
        slabs_at_once!(1);
    }
}

/// # Safety
/// Values of slabs `first..first + S` must be in the page; for one bit both numbers must be even.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn value_slabs<const BITS: u32, const R: usize, const S: usize>(
    block: &mut RowBlock,
    view: &PageView<'_>,
    first: usize,
) {
    let bytes = tile_bytes(BITS, block.head_dim);
    let slabs_in_line = 2 / BITS as usize;
    let mut sums = [[_mm512_setzero_si512(); S]; R];
    let weights = block.w_codes.as_ptr().cast::<i8>();
    for tile in 0..4 {
        // SAFETY: tile and slabs are in the page; rows of weights are 64 bytes, one a token.
        unsafe {
            let start = view.values.as_ptr().add(tile * bytes + 64 * (first / slabs_in_line));
            let mut lines = [_mm512_setzero_si512(); S];
            for (i, line) in lines[..S / slabs_in_line].iter_mut().enumerate() {
                let at = start.add(64 * i);
                prefetch(at, view.ahead, 64);
                *line = load(at);
            }
            for_planes!(BITS, plane => {
                let (quad, slab_in_line) = (plane % 4, plane / 4);
                let codes: [__m512i; S] = std::array::from_fn(|i| plane_of::<BITS>(lines[i], plane));
                for row in 0..R {
                    // Where `softmax_int8` packs the weights of four tokens.
                    let w = broadcast(weights.add(2 * row * PAGE_TOKENS + 16 * quad + 4 * tile));
                    for i in 0..S / slabs_in_line {
                        let sum = &mut sums[row][slabs_in_line * i + slab_in_line];
                        *sum = _mm512_dpbusd_epi32(*sum, w, codes[i]);
                    }
                }
            });
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        for (s, &sum) in sums.iter().enumerate() {
            // SAFETY: the slab is within the head.
            unsafe { add_to_output(block, row, first + s, sum) };
        }
    }
}
