//! BF16 pages on AMX tiles, with the softmax of the AVX-512 variant.
//!
//! A is the queries or the weights of eight rows; B is the page as it lies in memory. Every tile row
//! is computed by itself and in a fixed order, so the number of rows does not show. `amx_codes` reads
//! quantized pages.
//!
//! Tile registers hold values only inside one `asm!` block. [`Tiles`] configures them once for a page
//! and all blocks of rows that read it: loading and releasing a configuration takes about 900 cycles.

use std::arch::asm;

use super::avx512::softmax::weigh_bf16;
use super::block::{LANES, MAX_ROW, RowBlock};
use super::page::{PageView, Stage, Stages};
use crate::tiles::{TileConfig, release};
use oscar_codec::PAGE_TOKENS;
use std::arch::x86_64::*;

/// Bytes of a tile row.
const ROW_BYTES: usize = 64;
/// Channels of a B tile of keys, and tokens of a B tile of values.
const DEPTH: usize = 32;

pub(super) fn stages(rows: usize) -> Stages {
    let weigh: Stage = super::avx512::codes::by_rows!(rows, weigh_bf16);
    Stages { score, weigh, add_values, find_maxima: None }
}

/// Tiles configured for this thread; dropping it gives them back.
pub(super) struct Tiles;

impl Tiles {
    /// Tiles 0–3 (sums) and 4 (A) of `rows` rows, 5–7 (B) of 16.
    ///
    /// # Safety
    /// The processor must have AMX and the process the permission to use it.
    pub(super) unsafe fn configure(rows: usize) -> Self {
        let r = rows as u8;
        // SAFETY: as the caller vouches.
        unsafe { TileConfig::full_width([r, r, r, r, r, 16, 16, 16]).load() };
        Self
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: a value exists only where AMX does.
        unsafe { release() };
    }
}

/// `C = Σ A·B` over `depth` tiles (at least one) along the summed dimension, for one tile of
/// results.
///
/// # Safety
/// Tiles configured; each A tile readable for the configured rows at `a_stride`, each B tile for 16
/// rows at `b_stride`, both `a_step` and `b_step` bytes apart; `c` writable for the configured rows
/// of 64 bytes.
unsafe fn tile_product(
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
            "tdpbf16ps tmm0, tmm4, tmm6",
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

/// # Safety
/// The processor must have AMX, with tiles configured for eight rows.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn score(block: &mut RowBlock, view: &PageView<'_>) {
    let d = block.head_dim;
    assert_eq!(view.keys.len(), PAGE_TOKENS * d * 2);
    let whole = d / DEPTH;
    assert!(whole > 0, "heads have at least {DEPTH} channels");
    let rest = d % DEPTH / 2;
    // SAFETY: AMX and tiles as the caller vouches; tiles of keys are in the page; queries are rows of MAX_ROW
    // elements.
    unsafe {
        for tile in 0..4 {
            let keys = view.keys.as_ptr().add(tile * 32 * d);
            let c = block.tile_c[tile].as_mut_ptr().cast::<u8>();
            let queries = block.q_bf16.as_ptr().cast();
            tile_product(queries, 2 * MAX_ROW, 64, keys, ROW_BYTES, 1024, whole, c);
        }
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
/// The processor must have AMX, with tiles configured for eight rows.
#[target_feature(enable = "avx512f")]
unsafe fn add_values(block: &mut RowBlock, view: &PageView<'_>) {
    let d = block.head_dim;
    assert_eq!(view.values.len(), PAGE_TOKENS * d * 2);
    // SAFETY: AMX and tiles as the caller vouches; a B tile is 16 token pairs, `4 d` bytes apart, of one
    // slab.
    unsafe {
        for slab in 0..d / LANES {
            let values = view.values.as_ptr().add(ROW_BYTES * slab);
            let c = block.tile_c[slab % 4].as_mut_ptr().cast::<u8>();
            let weights = block.w_bf16.as_ptr().cast();
            tile_product(weights, 2 * PAGE_TOKENS, 64, values, 4 * d, 16 * 4 * d, PAGE_TOKENS / DEPTH, c);
            for row in 0..block.rows {
                let sum = _mm512_loadu_ps(block.tile_c[slab % 4][row].as_ptr().cast());
                let to = block.out[row].as_mut_ptr().add(LANES * slab);
                let step = _mm512_set1_ps(block.w_step[row]);
                _mm512_storeu_ps(to, _mm512_fmadd_ps(sum, step, _mm512_loadu_ps(to)));
            }
        }
    }
}
