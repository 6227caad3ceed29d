//! AMX: `x` is cut into A tiles of 16 rows × 32 inputs; 16 steps of a packed block are a B tile of
//! 32 inputs × 16 outputs as they lie in memory.
//!
//! Every row count goes through tiles, one row included: `tdpbf16ps` computes each row of A by
//! itself and in a fixed order, and sums parked in memory between two panels come back unchanged,
//! so the shape does not show. F32 matrices have no tile instruction and use the AVX-512 kernel.
//!
//! Tile registers: 0–3 sums, 4–5 A, 6–7 B. They hold values only inside one `asm!` block; what
//! lives from block to block is the tile configuration, which a kernel call loads at its start and
//! releases at its end.

use std::arch::asm;

use super::tile::{GROUP, GROUP_BLOCKS, GemmKernels, LANES, Tile, XForm};
use crate::tiles::{self, TileConfig};

pub(crate) const KERNELS: GemmKernels =
    GemmKernels { bf16, bf16_x: XForm::Bf16Pair, f32: super::avx512::f32, coded: None };

/// Rows of a tile.
const TILE: usize = 16;
/// Steps in a B tile, one a tile row.
const TILE_STEPS: usize = 16;
/// Tiles along the inputs in a panel: two blocks' weights (32 KiB) stay in the nearest cache while
/// all rows of the tile of work pass over them.
const PANEL_TILES: usize = 16;

/// Two A tiles, of 16 and of `lower` rows, by two B tiles.
const fn two_by_two_shape(lower: u8) -> TileConfig {
    let (upper, b) = (TILE as u8, TILE_STEPS as u8);
    TileConfig::full_width([upper, upper, lower, lower, upper, lower, b, b])
}

/// One A tile of `rows` rows by up to four B tiles.
const fn one_by_four_shape(rows: u8) -> TileConfig {
    let b = TILE_STEPS as u8;
    TileConfig::full_width([rows, rows, rows, rows, rows, rows, b, b])
}

/// # Safety
/// The processor must have AMX and the process the permission to use it.
unsafe fn bf16(tile: &mut Tile<'_>) {
    tile.check(XForm::Bf16Pair);
    assert_eq!(tile.steps % TILE_STEPS, 0, "packed inputs are padded to whole tiles");
    if tile.steps == 0 {
        tile.sums[..tile.rows * GROUP].fill(0.0);
        return;
    }
    // Pairs of row tiles as far as they go; what is left is a pair with a short lower tile, or one
    // tile.
    let paired = if tile.blocks == GROUP_BLOCKS { tile.rows / (2 * TILE) * (2 * TILE) } else { 0 };
    // SAFETY: rows and blocks handed down lie in the tile of work, which `check` compared with the
    // slices; each configuration is loaded before the rows it describes; AMX as the caller vouches.
    unsafe {
        if paired > 0 {
            two_by_two_shape(TILE as u8).load();
            row_pairs(tile, 0..paired);
        }
        let mut row = paired;
        if tile.blocks == GROUP_BLOCKS && tile.rows - row > TILE {
            two_by_two_shape((tile.rows - row - TILE) as u8).load();
            row_pairs(tile, row..tile.rows);
            row = tile.rows;
        }
        while row < tile.rows {
            let rows = (tile.rows - row).min(TILE);
            one_by_four_shape(rows as u8).load();
            single_row_tile(tile, row);
            row += rows;
        }
        tiles::release();
    }
}

/// Rows in pairs of tiles, all four blocks, panel by panel.
///
/// # Safety
/// AMX with a `two_by_two` configuration loaded whose rows lie in the tile of work; four blocks.
unsafe fn row_pairs(tile: &mut Tile<'_>, rows: std::ops::Range<usize>) {
    let tiles = tile.steps / TILE_STEPS;
    for first in (0..tiles).step_by(PANEL_TILES) {
        let count = PANEL_TILES.min(tiles - first);
        for block in (0..GROUP_BLOCKS).step_by(2) {
            for row in rows.clone().step_by(2 * TILE) {
                // SAFETY: as the caller vouches.
                unsafe { two_by_two(&Operands::at(tile, row, block, first), count, first != 0) };
            }
        }
    }
}

/// Up to 16 rows from `row` on, all blocks, all inputs at once: the weights pass only once.
///
/// # Safety
/// AMX with a `one_by_four` configuration loaded whose rows lie in the tile of work.
unsafe fn single_row_tile(tile: &mut Tile<'_>, row: usize) {
    let tiles = tile.steps / TILE_STEPS;
    // SAFETY: as the caller vouches.
    unsafe {
        if tile.blocks == GROUP_BLOCKS {
            one_by_four(&Operands::at(tile, row, 0, 0), tiles);
        } else {
            for block in 0..tile.blocks {
                one_by_one(&Operands::at(tile, row, block, 0), tiles);
            }
        }
    }
}

/// Where one run over tiles along the inputs starts, strides in bytes.
struct Operands {
    a: *const u32,
    a_stride: usize,
    b: *const u32,
    block_words: usize,
    sums: *mut f32,
}

/// Bytes between two rows of sums.
const SUMS_STRIDE: usize = GROUP * size_of::<f32>();
/// Bytes between two rows of a B tile.
const B_STRIDE: usize = LANES * size_of::<u32>();

impl Operands {
    /// # Safety
    /// Row, block and inner tile must lie in the tile of work.
    unsafe fn at(tile: &mut Tile<'_>, row: usize, block: usize, inner_tile: usize) -> Self {
        let block_words = tile.steps * LANES;
        let step = inner_tile * TILE_STEPS;
        // SAFETY: inside the slices, as the caller vouches and `Tile::check` has compared.
        unsafe {
            Self {
                a: tile.x.as_ptr().add(row * tile.x_stride + step),
                a_stride: tile.x_stride * size_of::<u32>(),
                b: tile.weights.as_ptr().add(block * block_words + step * LANES),
                block_words,
                sums: tile.sums.as_mut_ptr().add(row * GROUP + block * LANES),
            }
        }
    }
}

/// Two row tiles by two blocks over `tiles` tiles along the inputs; `resume` adds to the parked
/// sums.
///
/// # Safety
/// AMX with a `two_by_two` configuration; operands with that many rows, two blocks and `tiles`
/// inner tiles.
unsafe fn two_by_two(at: &Operands, tiles: usize, resume: bool) {
    // SAFETY: tile loads and stores touch exactly the rows of the configuration at the given
    // strides, which lie in the operands as the caller vouches; `tiles` is at least one.
    unsafe {
        asm!(
            "test {resume}, {resume}",
            "jnz 2f",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "jmp 3f",
            "2:",
            "tileloadd tmm0, [{c0} + {c_stride}*1]",
            "tileloadd tmm1, [{c0} + {c_stride}*1 + 64]",
            "tileloadd tmm2, [{c1} + {c_stride}*1]",
            "tileloadd tmm3, [{c1} + {c_stride}*1 + 64]",
            "3:",
            "tileloadd tmm6, [{b0} + {b_stride}*1]",
            "tileloadd tmm4, [{a0} + {a_stride}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b1} + {b_stride}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a1} + {a_stride}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a0}, 64",
            "add {a1}, 64",
            "add {b0}, 1024",
            "add {b1}, 1024",
            "dec {tiles}",
            "jnz 3b",
            "tilestored [{c0} + {c_stride}*1], tmm0",
            "tilestored [{c0} + {c_stride}*1 + 64], tmm1",
            "tilestored [{c1} + {c_stride}*1], tmm2",
            "tilestored [{c1} + {c_stride}*1 + 64], tmm3",
            resume = in(reg) usize::from(resume),
            a0 = inout(reg) at.a => _,
            a1 = inout(reg) at.a.byte_add(TILE * at.a_stride) => _,
            a_stride = in(reg) at.a_stride,
            b0 = inout(reg) at.b => _,
            b1 = inout(reg) at.b.add(at.block_words) => _,
            b_stride = in(reg) B_STRIDE,
            c0 = in(reg) at.sums,
            c1 = in(reg) at.sums.byte_add(TILE * SUMS_STRIDE),
            c_stride = in(reg) SUMS_STRIDE,
            tiles = inout(reg) tiles => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// One row tile by four blocks over all `tiles` tiles along the inputs, weights fetched ahead: the
/// path of decoding, where each weight is read from memory and used once.
///
/// # Safety
/// AMX with a `one_by_four` configuration; operands with that many rows, four blocks and `tiles`
/// inner tiles.
unsafe fn one_by_four(at: &Operands, tiles: usize) {
    // SAFETY: as in `two_by_two`; prefetches may run past the end of a block, which reads nothing
    // and never faults.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{a} + {a_stride}*1]",
            "tileloadd tmm6, [{b0} + {b_stride}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b1} + {b_stride}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm6, [{b2} + {b_stride}*1]",
            "tdpbf16ps tmm2, tmm4, tmm6",
            "tileloadd tmm7, [{b3} + {b_stride}*1]",
            "tdpbf16ps tmm3, tmm4, tmm7",
            // The tile four further on, of each block, line by line.
            "mov {line:e}, 4096",
            "3:",
            "prefetcht0 [{b0} + {line}]",
            "prefetcht0 [{b1} + {line}]",
            "prefetcht0 [{b2} + {line}]",
            "prefetcht0 [{b3} + {line}]",
            "add {line:e}, 64",
            "cmp {line:e}, 5120",
            "jne 3b",
            "add {a}, 64",
            "add {b0}, 1024",
            "add {b1}, 1024",
            "add {b2}, 1024",
            "add {b3}, 1024",
            "dec {tiles}",
            "jnz 2b",
            "tilestored [{c} + {c_stride}*1], tmm0",
            "tilestored [{c} + {c_stride}*1 + 64], tmm1",
            "tilestored [{c} + {c_stride}*1 + 128], tmm2",
            "tilestored [{c} + {c_stride}*1 + 192], tmm3",
            a = inout(reg) at.a => _,
            a_stride = in(reg) at.a_stride,
            b0 = inout(reg) at.b => _,
            b1 = inout(reg) at.b.add(at.block_words) => _,
            b2 = inout(reg) at.b.add(2 * at.block_words) => _,
            b3 = inout(reg) at.b.add(3 * at.block_words) => _,
            b_stride = in(reg) B_STRIDE,
            c = in(reg) at.sums,
            c_stride = in(reg) SUMS_STRIDE,
            tiles = inout(reg) tiles => _,
            line = out(reg) _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// One row tile by one block: the last blocks of a matrix whose outputs do not fill a group.
///
/// # Safety
/// AMX with a `one_by_four` configuration; operands with that many rows, one block and `tiles`
/// inner tiles.
unsafe fn one_by_one(at: &Operands, tiles: usize) {
    // SAFETY: as in `two_by_two`.
    unsafe {
        asm!(
            "tilezero tmm0",
            "2:",
            "tileloadd tmm4, [{a} + {a_stride}*1]",
            "tileloadd tmm6, [{b} + {b_stride}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "add {a}, 64",
            "add {b}, 1024",
            "dec {tiles}",
            "jnz 2b",
            "tilestored [{c} + {c_stride}*1], tmm0",
            a = inout(reg) at.a => _,
            a_stride = in(reg) at.a_stride,
            b = inout(reg) at.b => _,
            b_stride = in(reg) B_STRIDE,
            c = in(reg) at.sums,
            c_stride = in(reg) SUMS_STRIDE,
            tiles = inout(reg) tiles => _,
            out("tmm0") _, out("tmm4") _, out("tmm6") _,
            options(nostack),
        );
    }
}
