//! Pages on AMX tiles, with the softmax of the AVX-512 variant.
//!
//! Quantized keys: A is the queries, high and low bytes of up to eight rows as up to sixteen tile
//! rows of 64 channels; B is 16 tokens unpacked to 64 channels (16 lines); `tdpbsud` adds exact
//! products to 32 bits. Quantized values: A is the weights of the page's 64 tokens, B one slab of
//! 16 channels. BF16 pages are B tiles as they lie in memory. Every tile row is computed by itself
//! and in a fixed order, so the number of rows does not show.
//!
//! Tile registers hold values only inside one `asm!` block; a stage loads the configuration at its
//! start and releases it at its end.

use std::arch::asm;

use super::avx512::codes::{quad, tile_bytes, weigh_stage};
use super::avx512::softmax::{prefetch, weigh_bf16};
use super::block::{LANES, MAX_DIM, RowBlock, middle_code};
use super::page::{PageView, Stage, Stages};
use crate::tiles::{TileConfig, release};
use oscar_codec::PAGE_TOKENS;
use std::arch::x86_64::*;

/// Bytes of a tile row.
const ROW_BYTES: usize = 64;
/// Channels of a B tile of codes.
const CODE_CHANNELS: usize = 64;
/// Channels of a B tile of BF16 keys, and tokens of a B tile of BF16 values.
const BF16_DEPTH: usize = 32;

pub(super) fn code_stages(key_bits: u32, value_bits: u32, rows: usize) -> Stages {
    let score: Stage = match key_bits {
        1 => score::<1>,
        2 => score::<2>,
        3 => score::<3>,
        4 => score::<4>,
        _ => score::<8>,
    };
    let add_values: Stage = match value_bits {
        1 => add_values::<1>,
        2 => add_values::<2>,
        3 => add_values::<3>,
        4 => add_values::<4>,
        _ => add_values::<8>,
    };
    Stages { score, weigh: weigh_stage(value_bits, rows), add_values, find_maxima: None }
}

pub(super) fn bf16_stages(rows: usize) -> Stages {
    let weigh: Stage = super::avx512::codes::by_rows!(rows, weigh_bf16);
    Stages { score: score_bf16, weigh, add_values: add_values_bf16, find_maxima: None }
}

/// Tiles configured for this thread; dropping it gives them back.
struct Tiles;

impl Tiles {
    /// Tiles 0–3 (sums) and 4 (A) of `rows` rows, 6 and 7 (B) of 16.
    ///
    /// # Safety
    /// The processor must have AMX and the process the permission to use it.
    unsafe fn configure(rows: usize) -> Self {
        let (r, b) = (rows as u8, 16);
        // SAFETY: as the caller vouches.
        unsafe { TileConfig::full_width([r, r, r, r, r, r, b, b]).load() };
        Self
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: a value exists only where AMX does.
        unsafe { release() };
    }
}

/// Defines `C = Σ A·B` over `depth` tiles (at least one) along the summed dimension, for one tile
/// of results.
macro_rules! tile_product {
    ($name:ident, $instruction:literal) => {
        /// # Safety
        /// Tiles configured; each A tile readable for the configured rows at `a_stride`, each B
        /// tile for 16 rows at `b_stride`, both `a_step` and `b_step` bytes apart; `c` writable for
        /// the configured rows of 64 bytes.
        unsafe fn $name(
            a: *const u8,
            a_stride: usize,
            a_step: usize,
            b: *const u8,
            b_stride: usize,
            b_step: usize,
            depth: usize,
            c: *mut u8,
        ) {
            // SAFETY: as the caller vouches; `depth` is at least one.
            unsafe {
                asm!(
                    "tilezero tmm0",
                    "2:",
                    "tileloadd tmm4, [{a} + {a_stride}*1]",
                    "tileloadd tmm6, [{b} + {b_stride}*1]",
                    concat!($instruction, " tmm0, tmm4, tmm6"),
                    "add {a}, {a_step}",
                    "add {b}, {b_step}",
                    "dec {depth}",
                    "jnz 2b",
                    "tilestored [{c} + {c_stride}*1], tmm0",
                    a = inout(reg) a => _,
                    a_stride = in(reg) a_stride,
                    a_step = in(reg) a_step,
                    b = inout(reg) b => _,
                    b_stride = in(reg) b_stride,
                    b_step = in(reg) b_step,
                    c = in(reg) c,
                    c_stride = in(reg) ROW_BYTES,
                    depth = inout(reg) depth => _,
                    out("tmm0") _, out("tmm4") _, out("tmm6") _,
                    options(nostack),
                );
            }
        }
    };
}

tile_product!(signed_by_unsigned, "tdpbsud");
tile_product!(bf16_by_bf16, "tdpbf16ps");

/// Unpacks four quads of a unit to four lines.
///
/// # Safety
/// The tile must be readable and contain the unit; `to` writable for 256 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn unpack<const BITS: u32>(tile: *const u8, unit: usize, head_dim: usize, to: *mut u8) {
    // SAFETY: as the caller vouches.
    unsafe {
        let lines = [
            quad::<BITS, 0>(tile, unit, head_dim),
            quad::<BITS, 1>(tile, unit, head_dim),
            quad::<BITS, 2>(tile, unit, head_dim),
            quad::<BITS, 3>(tile, unit, head_dim),
        ];
        for (j, line) in lines.into_iter().enumerate() {
            _mm512_storeu_si512(to.add(64 * j).cast(), line);
        }
    }
}

/// `256·H + L` of one row of results.
#[inline]
#[target_feature(enable = "avx512f")]
fn joined(results: &[[i32; LANES]; 16], row: usize) -> __m512 {
    // SAFETY: rows of sixteen 32-bit integers.
    unsafe {
        let hi = _mm512_loadu_si512(results[2 * row].as_ptr().cast::<__m512i>());
        let lo = _mm512_loadu_si512(results[2 * row + 1].as_ptr().cast::<__m512i>());
        _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(hi), lo))
    }
}

/// # Safety
/// The processor must have AMX and the process the permission to use it.
#[target_feature(enable = "avx512f,avx512bw,f16c")]
unsafe fn score<const BITS: u32>(block: &mut RowBlock, view: &PageView<'_>) {
    let d = block.head_dim;
    let bytes = tile_bytes(BITS, d);
    assert_eq!(view.keys.len(), 4 * bytes);
    assert_eq!(view.key_params.len(), 4 * PAGE_TOKENS);
    prefetch(view.keys.as_ptr(), view.ahead, view.keys.len());
    prefetch(view.key_params.as_ptr(), view.ahead, 256);
    let depth = d.div_ceil(CODE_CHANNELS);
    // Lines beyond the head are multiplied by zero queries, and hold codes of an earlier page:
    // finite integers. SAFETY: AMX as the caller vouches; tiles and units are in the page; operands
    // are fields of the block, queries padded with zeros to whole tiles.
    unsafe {
        let tiles = Tiles::configure(2 * block.rows);
        for tile in 0..4 {
            let keys = view.keys.as_ptr().add(tile * bytes);
            let b = block.tile_b.as_mut_ptr().cast::<u8>();
            for unit in 0..d / LANES {
                unpack::<BITS>(keys, unit, d, b.add(256 * unit));
            }
            signed_by_unsigned(
                block.q_codes.as_ptr().cast(),
                MAX_DIM,
                CODE_CHANNELS,
                b,
                ROW_BYTES,
                1024,
                depth,
                block.tile_c[tile].as_mut_ptr().cast(),
            );
        }
        drop(tiles);
        for tile in 0..4 {
            let params = view.key_params.as_ptr().add(64 * tile).cast::<__m256i>();
            let scale = _mm512_cvtph_ps(_mm256_loadu_si256(params));
            let min = _mm512_cvtph_ps(_mm256_loadu_si256(params.add(1)));
            for row in 0..block.rows {
                let offset = _mm512_mul_ps(min, _mm512_set1_ps(block.q_sum[row]));
                let rest = _mm512_set1_ps(middle_code(BITS) * block.q_rest[row]);
                let step = _mm512_set1_ps(block.q_step[row]);
                let dot = _mm512_fmadd_ps(joined(&block.tile_c[tile], row), step, rest);
                let to = block.scores[row].as_mut_ptr().add(LANES * tile);
                _mm512_storeu_ps(to, _mm512_fmadd_ps(dot, scale, offset));
            }
        }
    }
}

/// # Safety
/// The processor must have AMX and the process the permission to use it.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn add_values<const BITS: u32>(block: &mut RowBlock, view: &PageView<'_>) {
    let d = block.head_dim;
    let bytes = tile_bytes(BITS, d);
    assert_eq!(view.values.len(), 4 * bytes);
    prefetch(view.values.as_ptr(), view.ahead, view.values.len());
    // SAFETY: as in `score`; the weights of a page are one A tile.
    unsafe {
        let tiles = Tiles::configure(2 * block.rows);
        for slab in 0..d / LANES {
            let at = slab % 4;
            let b = block.tile_b[at].as_mut_ptr();
            for tile in 0..4 {
                unpack::<BITS>(view.values.as_ptr().add(tile * bytes), slab, d, b.add(256 * tile));
            }
            signed_by_unsigned(
                block.w_codes.as_ptr().cast(),
                PAGE_TOKENS,
                0,
                b,
                ROW_BYTES,
                0,
                1,
                block.tile_c[at].as_mut_ptr().cast(),
            );
            for row in 0..block.rows {
                let to = block.out[row].as_mut_ptr().add(LANES * slab);
                let step = _mm512_set1_ps(block.w_step[row]);
                let sum = _mm512_fmadd_ps(joined(&block.tile_c[at], row), step, _mm512_loadu_ps(to));
                _mm512_storeu_ps(to, sum);
            }
        }
        drop(tiles);
    }
}

/// # Safety
/// The processor must have AMX and the process the permission to use it.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn score_bf16(block: &mut RowBlock, view: &PageView<'_>) {
    let d = block.head_dim;
    assert_eq!(view.keys.len(), PAGE_TOKENS * d * 2);
    let whole = d / BF16_DEPTH;
    let rest = d % BF16_DEPTH / 2;
    // SAFETY: AMX as the caller vouches; tiles of keys are in the page; queries are rows of MAX_DIM
    // elements.
    unsafe {
        let tiles = Tiles::configure(block.rows);
        for tile in 0..4 {
            let keys = view.keys.as_ptr().add(tile * 32 * d);
            let c = block.tile_c[tile].as_mut_ptr().cast::<u8>();
            let queries = block.q_bf16.as_ptr().cast();
            bf16_by_bf16(queries, 2 * MAX_DIM, 64, keys, ROW_BYTES, 1024, whole, c);
        }
        drop(tiles);
        for tile in 0..4 {
            for row in 0..block.rows {
                let mut sum = _mm512_loadu_ps(block.tile_c[tile][row].as_ptr().cast());
                // Heads that are not a multiple of 32 end in half a tile.
                for pair in d / 2 - rest..d / 2 {
                    let line = view.keys.as_ptr().add(tile * 32 * d + 64 * pair).cast::<__m512i>();
                    let query = block.q_bf16[row].as_ptr().add(2 * pair).cast::<i32>().read_unaligned();
                    let line: __m512bh = std::mem::transmute(_mm512_loadu_si512(line));
                    let query: __m512bh = std::mem::transmute(_mm512_set1_epi32(query));
                    sum = _mm512_dpbf16_ps(sum, line, query);
                }
                _mm512_storeu_ps(block.scores[row].as_mut_ptr().add(LANES * tile), sum);
            }
        }
    }
}

/// # Safety
/// The processor must have AMX and the process the permission to use it.
#[target_feature(enable = "avx512f")]
unsafe fn add_values_bf16(block: &mut RowBlock, view: &PageView<'_>) {
    let d = block.head_dim;
    assert_eq!(view.values.len(), PAGE_TOKENS * d * 2);
    // SAFETY: AMX as the caller vouches; a B tile is 16 token pairs, `4 d` bytes apart, of one
    // slab.
    unsafe {
        let tiles = Tiles::configure(block.rows);
        for slab in 0..d / LANES {
            let values = view.values.as_ptr().add(ROW_BYTES * slab);
            let c = block.tile_c[slab % 4].as_mut_ptr().cast::<u8>();
            let weights = block.w_bf16.as_ptr().cast();
            bf16_by_bf16(
                weights,
                2 * PAGE_TOKENS,
                64,
                values,
                4 * d,
                16 * 4 * d,
                PAGE_TOKENS / BF16_DEPTH,
                c,
            );
            for row in 0..block.rows {
                let sum = _mm512_loadu_ps(block.tile_c[slab % 4][row].as_ptr().cast());
                let to = block.out[row].as_mut_ptr().add(LANES * slab);
                let step = _mm512_set1_ps(block.w_step[row]);
                _mm512_storeu_ps(to, _mm512_fmadd_ps(sum, step, _mm512_loadu_ps(to)));
            }
        }
        drop(tiles);
    }
}
