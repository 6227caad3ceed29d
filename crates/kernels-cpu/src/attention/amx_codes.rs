//! Quantized pages on AMX tiles, for the many rows of a prompt.
//!
//! The codes of a page are unpacked to bytes once, in the order of B tiles, for all blocks of a
//! work item. The integer products are exact, and scores, weights and outputs follow from them by
//! the code of the AVX-512 variant, so results are bit-equal to that variant's. With few rows
//! unpacking costs more than the tiles save; those are left to AVX-512 (docs/benchmarks/cpu.md).

use std::arch::asm;
use std::arch::x86_64::*;

use super::amx::Tiles;
use super::avx512::codes::{ScoreUnits, add_to_output, join, key_params, quad, tile_bytes};
use super::avx512::int8::add_low_rows;
use super::block::{LANES, MAX_DIM, ROWS, RowBlock};
use super::page::{PageView, Stages};
use super::precision::AttentionPrecision;
use oscar_codec::PAGE_TOKENS;

/// Blocks of rows from which on tiles are faster.
pub(super) const LEAST_BLOCKS: usize = 3;
/// Channels of a B tile of keys, tokens of a B tile of values.
const DEPTH: usize = 64;
/// Bytes of a B tile.
const TILE_BYTES: usize = 1024;

/// Widths of a head's codes, and whether one byte of a query or weight is multiplied with them.
#[derive(Clone, Copy, Debug)]
pub(super) struct CodeTiles {
    keys: SideTiles,
    values: SideTiles,
}

#[derive(Clone, Copy, Debug)]
struct SideTiles {
    bits: u32,
    one_byte: bool,
}

/// 64 bytes of codes: a row of a B tile.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

/// The codes of a page as B tiles: keys by 16 tokens, values by 16 channels. And room for products.
#[derive(Default)]
pub(super) struct UnpackedPage {
    keys: Vec<Line>,
    values: Vec<Line>,
    sums: Box<Sums>,
}

/// Results of four tiles: up to 16 rows of 16 sums each.
#[repr(C, align(64))]
#[derive(Default)]
struct Sums([[[i32; LANES]; 2 * ROWS]; 4]);

impl Sums {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn row(&self, tile: usize, row: usize) -> __m512i {
        // SAFETY: sixteen integers.
        unsafe { _mm512_loadu_si512(self.0[tile][row].as_ptr().cast()) }
    }

    /// The sum of a row of queries or weights.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn of<const ONE_BYTE: bool>(&self, tile: usize, row: usize) -> __m512i {
        match ONE_BYTE {
            true => self.row(tile, row),
            false => join(self.row(tile, 2 * row), self.row(tile, 2 * row + 1)),
        }
    }
}

impl CodeTiles {
    /// `None` for heads that do not divide into tiles.
    pub(super) fn new(
        precision: AttentionPrecision,
        key_bits: u32,
        value_bits: u32,
        head_dim: usize,
    ) -> Option<Self> {
        let side = |bits| SideTiles { bits, one_byte: precision.one_byte(bits) };
        (head_dim.is_multiple_of(DEPTH) && head_dim <= MAX_DIM)
            .then(|| Self { keys: side(key_bits), values: side(value_bits) })
    }

    /// Reads a page with all blocks that have a mask for it. `stages` are those of AVX-512 for the
    /// same codec.
    ///
    /// # Safety
    /// The processor must have AMX and the process the permission to use it.
    pub(super) unsafe fn read(
        self,
        blocks: &mut [Box<RowBlock>],
        stages: &[Stages],
        view: &PageView<'_>,
        page: &mut UnpackedPage,
    ) {
        let reads = |block: &RowBlock| block.masks[..block.rows].iter().any(|&mask| mask != 0);
        let Some(head_dim) = blocks.first().map(|block| block.head_dim) else { return };
        // SAFETY: AMX as the caller vouches, and with it AVX-512; the stages are of that variant.
        unsafe {
            self.unpack(head_dim, view, page);
            let mut tiles = Tiles::configure(a_rows(self.keys.one_byte, 0).0);
            for block in blocks.iter_mut().filter(|block| reads(block)) {
                match self.keys.one_byte {
                    true => score::<true>(self.keys.bits, block, view, page),
                    false => score::<false>(self.keys.bits, block, view, page),
                }
            }
            for (block, stages) in blocks.iter_mut().zip(stages).filter(|(block, _)| reads(block)) {
                stages.find_maxima.inspect(|find_maxima| find_maxima(block, view));
                if stages.find_maxima.is_none() || block.any_weight {
                    (stages.weigh)(block, view);
                }
            }
            // A configuration takes as long as the products of several blocks.
            if self.keys.one_byte != self.values.one_byte {
                drop(tiles);
                tiles = Tiles::configure(a_rows(self.values.one_byte, 0).0);
            }
            for block in blocks.iter_mut().filter(|block| reads(block) && block.any_weight) {
                match self.values.one_byte {
                    true => add_values::<true>(block, page),
                    false => add_values::<false>(block, page),
                }
            }
            drop(tiles);
        }
    }

    /// # Safety
    /// As for [`Self::read`].
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack(self, head_dim: usize, view: &PageView<'_>, page: &mut UnpackedPage) {
        let units = head_dim / LANES;
        let by_channel = |tile, unit, j| (tile * units + unit) * 4 + j;
        // One-byte weights of a page lie by quads, then by tiles; others by tiles.
        let by_quad = |tile, slab, j| slab * 16 + 4 * j + tile;
        let by_tile = |tile, slab, j| slab * 16 + 4 * tile + j;
        // SAFETY: as the caller vouches.
        unsafe {
            unpack_side(self.keys.bits, view.keys, head_dim, &mut page.keys, by_channel);
            match self.values.one_byte {
                true => unpack_side(self.values.bits, view.values, head_dim, &mut page.values, by_quad),
                false => unpack_side(self.values.bits, view.values, head_dim, &mut page.values, by_tile),
            }
        }
    }
}

/// # Safety
/// The processor must have AMX, with tiles configured for keys.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,f16c")]
unsafe fn score<const ONE_BYTE: bool>(
    bits: u32,
    block: &mut RowBlock,
    view: &PageView<'_>,
    page: &mut UnpackedPage,
) {
    let UnpackedPage { keys, sums, .. } = page;
    assert_eq!(keys.len(), PAGE_TOKENS * block.head_dim / 64);
    assert_eq!(view.key_params.len(), 4 * PAGE_TOKENS);
    let stride = a_rows(ONE_BYTE, MAX_DIM).1;
    // SAFETY: A tiles are rows of queries, as far as the head goes; B tiles are the four of the
    // page, each of all channels. Parameters and scores of four tiles are there.
    unsafe {
        let queries = block.q_codes.as_ptr().cast();
        signed_products(queries, stride, keys.as_ptr().cast(), block.head_dim / DEPTH, sums);
        let params: [_; 4] = std::array::from_fn(|tile| key_params(view, tile));
        for row in 0..block.rows {
            let units = match ONE_BYTE {
                true => ScoreUnits::one_byte(block, row, bits),
                false => ScoreUnits::both_bytes(block, row, bits),
            };
            for (tile, &params) in params.iter().enumerate() {
                units.store(block, row, tile, sums.of::<ONE_BYTE>(tile, row), params);
            }
        }
        if ONE_BYTE {
            add_low_rows(block, view, bits);
        }
    }
}

/// # Safety
/// The processor must have AMX, with tiles configured for values.
#[target_feature(enable = "avx512f")]
unsafe fn add_values<const ONE_BYTE: bool>(block: &mut RowBlock, page: &mut UnpackedPage) {
    let UnpackedPage { values, sums, .. } = page;
    assert_eq!(values.len(), PAGE_TOKENS * block.head_dim / 64);
    let stride = a_rows(ONE_BYTE, PAGE_TOKENS).1;
    for first in (0..block.head_dim / LANES).step_by(4) {
        // SAFETY: the A tile is the page's weights; heads have a multiple of four slabs, and each is
        // one B tile.
        unsafe {
            let weights = block.w_codes.as_ptr().cast();
            let slabs = values.as_ptr().cast::<u8>().add(first * TILE_BYTES);
            match ONE_BYTE {
                true => unsigned_products(weights, stride, slabs, 1, sums),
                false => signed_products(weights, stride, slabs, 1, sums),
            }
            for row in 0..block.rows {
                for slab in 0..4 {
                    add_to_output(block, row, first + slab, sums.of::<ONE_BYTE>(slab, row));
                }
            }
        }
    }
}

/// Rows of the A tile, and bytes from one to the next among rows of `row_bytes`. High and low bytes
/// take turns; one byte is the high one.
const fn a_rows(one_byte: bool, row_bytes: usize) -> (usize, usize) {
    if one_byte { (ROWS, 2 * row_bytes) } else { (2 * ROWS, row_bytes) }
}

/// Unpacks the codes of one side. `at(tile, unit, quad)` is the line that a quad belongs to.
///
/// # Safety
/// The processor must have AVX-512 BW.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn unpack_side(
    bits: u32,
    codes: &[u8],
    head_dim: usize,
    lines: &mut Vec<Line>,
    at: impl Fn(usize, usize, usize) -> usize,
) {
    assert_eq!(codes.len(), 4 * tile_bytes(bits, head_dim));
    lines.resize(PAGE_TOKENS * head_dim / 64, Line([0; 64]));
    macro_rules! quads {
        ($bits:literal) => {
            for tile in 0..4 {
                for unit in 0..head_dim / LANES {
                    // SAFETY: tile and unit are in the page, as asserted.
                    let quads = unsafe {
                        let tile = codes.as_ptr().add(tile * tile_bytes($bits, head_dim));
                        [
                            quad::<$bits, 0>(tile, unit, head_dim),
                            quad::<$bits, 1>(tile, unit, head_dim),
                            quad::<$bits, 2>(tile, unit, head_dim),
                            quad::<$bits, 3>(tile, unit, head_dim),
                        ]
                    };
                    for (j, quad) in quads.into_iter().enumerate() {
                        let line = &mut lines[at(tile, unit, j)];
                        // SAFETY: a line is 64 bytes.
                        unsafe { _mm512_store_si512(line.0.as_mut_ptr().cast(), quad) };
                    }
                }
            }
        };
    }
    match bits {
        1 => quads!(1),
        2 => quads!(2),
        3 => quads!(3),
        4 => quads!(4),
        5 => quads!(5),
        _ => quads!(8),
    }
}

/// Four tiles of sums: `C[i] = Σ A[k] · B[i][k]` over `depth` tiles along the summed dimension.
macro_rules! four_products {
    ($name:ident, $instruction:literal, $kind:literal) => {
        #[doc = concat!("[`four_products`] of ", $kind, " bytes in A by unsigned codes in B.")]
        ///
        /// # Safety
        /// Tiles configured, `depth` at least 1; the rows of each A tile readable `a_stride` bytes
        /// apart, A tiles 64 bytes apart; `4 · depth` B tiles readable one after the other.
        unsafe fn $name(a: *const u8, a_stride: usize, b: *const u8, depth: usize, sums: &mut Sums) {
            // SAFETY: as the caller vouches; the sums have room for four tiles of 16 rows.
            unsafe {
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "2:",
                    "tileloadd tmm4, [{a} + {a_stride}*1]",
                    "tileloadd tmm5, [{b0} + {line}*1]",
                    concat!($instruction, " tmm0, tmm4, tmm5"),
                    "tileloadd tmm6, [{b1} + {line}*1]",
                    concat!($instruction, " tmm1, tmm4, tmm6"),
                    "tileloadd tmm7, [{b2} + {line}*1]",
                    concat!($instruction, " tmm2, tmm4, tmm7"),
                    "tileloadd tmm5, [{b3} + {line}*1]",
                    concat!($instruction, " tmm3, tmm4, tmm5"),
                    "add {a}, 64",
                    "add {b0}, 1024",
                    "add {b1}, 1024",
                    "add {b2}, 1024",
                    "add {b3}, 1024",
                    "dec {depth}",
                    "jnz 2b",
                    "tilestored [{c} + {line}*1], tmm0",
                    "tilestored [{c} + {line}*1 + 1024], tmm1",
                    "tilestored [{c} + {line}*1 + 2048], tmm2",
                    "tilestored [{c} + {line}*1 + 3072], tmm3",
                    a = inout(reg) a => _,
                    a_stride = in(reg) a_stride,
                    b0 = inout(reg) b => _,
                    b1 = inout(reg) b.add(depth * TILE_BYTES) => _,
                    b2 = inout(reg) b.add(2 * depth * TILE_BYTES) => _,
                    b3 = inout(reg) b.add(3 * depth * TILE_BYTES) => _,
                    line = in(reg) 64_usize,
                    depth = inout(reg) depth => _,
                    c = in(reg) sums.0.as_mut_ptr(),
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

four_products!(signed_products, "tdpbsud", "signed");
four_products!(unsigned_products, "tdpbuud", "unsigned");
