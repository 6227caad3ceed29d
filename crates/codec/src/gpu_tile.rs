//! The byte order of pages on a GPU: each lane of a warp loads exactly the fragments that it feeds
//! to the tensor cores.
//!
//! A warp multiplies 16-token tiles with `mma.m16n8k16`, whose left operand spreads a 16×16 block
//! over 32 lanes: lane `4·row + quad` holds four registers `x`, each a pair of 16-bit elements `h`.
//! Rows of the block are `row + 8·(x mod 2)`, columns `2·quad + h + 8·(x div 2)`. Keys are
//! multiplied as they are (rows are tokens, columns channels), values transposed (rows are
//! channels, columns tokens); step `j` covers channels `16j..16j + 16`.
//!
//! **Codes.** A 32-bit word holds one pair of elements for `16 / bits` *planes*: plane `p` of half
//! `h` lies at bit `16h + bits·p`, so one mask extracts a pair from the word that is already an
//! fp16 pair (bits 0 to 10 of an fp16 number count in steps of 2⁻²⁴, below and just above its
//! smallest normal number alike). A plane is a step; if a word has more planes than a head has
//! steps, the upper planes hold further registers. Words are stored lane by lane in groups of
//! sixteen bytes. Three-bit codes are a two-bit set followed by a one-bit set, in which the bits of
//! two words share one word, so that each bit lies at the plane of its two-bit field or next to it.
//!
//! **Parameters.** Tokens `row` and `row + 8` of a tile are adjacent, because one lane holds the
//! scores of both.
//!
//! **Unquantized rows.** Panels of 64 channels; in a panel a token is 128 bytes, whose 16-byte
//! chunks are permuted by `chunk xor (token mod 8)`: the 128-byte swizzle that `ldmatrix` reads
//! without bank conflicts and `wgmma` understands.
//!
//! DO NOT CHANGE: `kernels-cuda/kernels/page.cuh` is this file in CUDA.

use crate::layout::{BitField, Fields};
use crate::page::{PAGE_TOKENS, Side, TILE_TOKENS};

/// Head sizes that split into whole panels and whole words.
pub(crate) const HEAD_DIMS: [usize; 3] = [64, 128, 256];

const LANES: usize = 32;

/// Position of a code within its tile: the lane, the word among the lane's words, the half and the
/// plane.
struct Place {
    lane: usize,
    word: usize,
    half: usize,
    plane: usize,
}

fn place(side: Side, bits: u32, head_dim: usize, token: usize, channel: usize) -> Place {
    let steps = head_dim / 16;
    let planes = 16 / bits as usize;
    let (j, within) = (channel / 16, channel % 16);
    let (row, column) = match side {
        Side::Key => (token, within),
        Side::Value => (within, token),
    };
    let lane = row % 8 * 4 + column % 8 / 2;
    let (row_half, column_half) = (row / 8, column / 8);
    // Planes carry different powers of two. A power that belongs to a channel can be undone outside
    // the inner loop, so the channel's half of the block moves into further planes first.
    let (channel_half, token_half) = match side {
        Side::Key => (column_half, row_half),
        Side::Value => (row_half, column_half),
    };
    let (word, plane) = match planes / steps {
        0 | 1 => (row_half + 2 * column_half + 4 * (j / planes), j % planes),
        2 => (token_half, j + steps * channel_half),
        _ => (0, j + steps * channel_half + 2 * steps * token_half),
    };
    Place { lane, word, half: column % 2, plane }
}

/// Byte of a lane's word, from the start of its tile.
fn word_byte(words: usize, lane: usize, word: usize) -> usize {
    let group = words.min(4);
    (word / group * LANES * group + lane * group + word % group) * 4
}

fn field(base: usize, words: usize, place: &Place, bit: usize, width: u32, code_shift: u32) -> BitField {
    let bit = 16 * place.half + bit;
    BitField {
        byte: base + word_byte(words, place.lane, place.word) + bit / 8,
        shift: (bit % 8) as u32,
        width,
        code_shift,
    }
}

/// Where the code of `channel` of `token` lies, from the start of the side's codes.
pub(crate) fn locate(side: Side, bits: u32, head_dim: usize, token: usize, channel: usize) -> Fields {
    let words = |bits: usize| TILE_TOKENS * head_dim * bits / 32 / LANES;
    let tile = token / TILE_TOKENS * TILE_TOKENS * head_dim * bits as usize / 8;
    let token = token % TILE_TOKENS;
    if bits != 3 {
        let at = place(side, bits, head_dim, token, channel);
        return [Some(field(tile, words(bits as usize), &at, at.plane * bits as usize, bits, 0)), None];
    }
    let at = place(side, 2, head_dim, token, channel);
    let low = field(tile, words(2), &at, at.plane * 2, 2, 0);
    let top = Place { word: at.word / 2, ..at };
    let bit = top.plane * 2 + at.word % 2;
    let high = field(tile + TILE_TOKENS * head_dim / 4, words(1), &top, bit, 1, 2);
    [Some(low), Some(high)]
}

/// Index, in parameters, of parameter `which` of a token's `group`.
pub(crate) fn param_index(groups: usize, token: usize, group: usize, which: usize) -> usize {
    let (tile, token) = (token / TILE_TOKENS, token % TILE_TOKENS);
    (((tile * groups + group) * 8 + token % 8) * 2 + token / 8) * 2 + which
}

/// Index, in elements, of a value stored unquantized.
pub(crate) fn element_index(token: usize, channel: usize) -> usize {
    let (panel, within) = (channel / 64, channel % 64);
    let chunk = (within / 8) ^ (token % 8);
    (panel * PAGE_TOKENS + token) * 64 + chunk * 8 + within % 8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits_of(words: &[u32], field: BitField) -> u32 {
        words[field.byte / 4] >> (field.byte % 4 * 8 + field.shift as usize) & ((1 << field.width) - 1)
    }

    /// Two-bit keys of head 128: word `x` of a lane, masked for plane `j`, is register `x` of step
    /// `j`.
    #[test]
    fn two_bit_words_are_registers_of_the_left_operand() {
        let code = |token: usize, channel: usize| ((token * 7 + channel * 13 + channel / 16) % 4) as u32;
        for side in [Side::Key, Side::Value] {
            let mut words = vec![0u32; 128];
            for token in 0..16 {
                for channel in 0..128 {
                    let f = locate(side, 2, 128, token, channel)[0].unwrap();
                    words[f.byte / 4] |= code(token, channel) << (f.byte % 4 * 8 + f.shift as usize);
                }
            }
            for lane in 0..32 {
                let (r, q) = (lane / 4, lane % 4);
                for x in 0..4 {
                    let word = words[lane * 4 + x];
                    for j in 0..8 {
                        let shifted = if j < 5 { word } else { word >> 10 };
                        let pair = (shifted & (0x0003_0003 << (2 * (j % 5)))) >> (2 * (j % 5));
                        for h in 0..2 {
                            let (row, column) = (r + 8 * (x % 2), 2 * q + h + 8 * (x / 2));
                            let (token, within) =
                                if side == Side::Key { (row, column) } else { (column, row) };
                            assert_eq!(pair >> (16 * h) & 0xffff, code(token, 16 * j + within));
                        }
                    }
                }
            }
        }
    }

    /// The high bit of a three-bit code lies at, or one above, the low bits' plane.
    #[test]
    fn three_bit_planes_line_up() {
        for side in [Side::Key, Side::Value] {
            for d in HEAD_DIMS {
                for (token, channel) in [(0, 0), (5, 17), (9, 63), (15, d - 1), (33, d / 2 + 3)] {
                    let [Some(low), Some(high)] = locate(side, 3, d, token, channel) else {
                        panic!("two fields")
                    };
                    let bit = |f: BitField| f.byte % 2 * 8 + f.shift as usize;
                    assert!([0, 1].contains(&(bit(high) - bit(low))), "{side:?} {d} {token} {channel}");
                    let mut words = vec![0u32; 16 * d * 3 * 4 / 32];
                    words[high.byte / 4] = 1 << (high.byte % 4 * 8 + high.shift as usize);
                    assert_eq!(bits_of(&words, high), 1);
                }
            }
        }
    }

    #[test]
    fn rows_of_a_panel_are_swizzled_by_sixteen_bytes() {
        assert_eq!(element_index(0, 0), 0);
        assert_eq!(element_index(1, 0), 64 + 8);
        assert_eq!(element_index(1, 8), 64);
        assert_eq!(element_index(10, 127), 64 * 64 + 10 * 64 + (7 ^ 2) * 8 + 7);
    }
}
