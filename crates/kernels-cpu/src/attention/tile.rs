//! Dequantized rows as BF16 pages, so that the BF16 kernels can read formats without a kernel of
//! their own.

use oscar_codec::{PAGE_TOKENS, TILE_TOKENS};

use crate::cpu::Variant;

/// A cache line of sixteen pairs of BF16.
#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
struct Line([u32; 16]);

/// One side of a page in [`CodeLayout::CpuTile`](oscar_codec::CodeLayout::CpuTile) order.
#[derive(Default)]
pub(super) struct Bf16Tile {
    lines: Vec<Line>,
}

impl Bf16Tile {
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: lines are plain 32-bit words without padding, and bytes need no alignment.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), size_of_val(&*self.lines)) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; every pattern of bits is a word, and the slice is borrowed
        // exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), size_of_val(&*self.lines)) }
    }

    /// The page's pairs, to be written: 64 × `d` halves.
    pub(super) fn words_mut(&mut self, d: usize) -> &mut [u32] {
        self.lines.resize(PAGE_TOKENS * d * 2 / 64, Line::default());
        words(&mut self.lines)
    }

    /// Takes keys, 64 × `d`, rounded to nearest even: `[tile][channel pair][16 tokens][2]`.
    pub(super) fn store_keys(&mut self, variant: Variant, rows: &[f32], d: usize) {
        self.lines.resize(PAGE_TOKENS * d * 2 / 64, Line::default());
        let lines = &mut self.lines[..];
        compiled_for!(variant, keys_body(rows: &[f32], d: usize, lines: &mut [Line]));
    }

    /// Takes values, 64 × `d`, rounded to nearest even: `[token pair][channel][2]`.
    pub(super) fn store_values(&mut self, variant: Variant, rows: &[f32], d: usize) {
        self.lines.resize(PAGE_TOKENS * d * 2 / 64, Line::default());
        let lines = &mut self.lines[..];
        compiled_for!(variant, values_body(rows: &[f32], d: usize, lines: &mut [Line]));
    }

    /// Takes values that are the keys of a page, which lie in the order of keys.
    pub(super) fn store_values_of_keys(&mut self, variant: Variant, keys: &[u8], d: usize) {
        assert_eq!(keys.len(), PAGE_TOKENS * d * 2, "a page of keys");
        self.lines.resize(PAGE_TOKENS * d * 2 / 64, Line::default());
        let lines = &mut self.lines[..];
        compiled_for!(variant, turn_body(keys: &[u8], d: usize, lines: &mut [Line]));
    }
}

#[inline(always)]
fn pair(low: f32, high: f32) -> u32 {
    rounded(low) >> 16 | rounded(high) & 0xffff_0000
}

/// Bits of a finite value rounded to nearest even in the upper half, as `f32_to_bf16` does, kept in
/// 32 bits so that the compiler need not change widths.
#[inline(always)]
fn rounded(value: f32) -> u32 {
    let bits = value.to_bits();
    bits.wrapping_add(0x7fff + (bits >> 16 & 1))
}

#[inline(always)]
fn keys_body(rows: &[f32], d: usize, lines: &mut [Line]) {
    for (rows, lines) in rows.chunks_exact(TILE_TOKENS * d).zip(lines.chunks_exact_mut(d / 2)) {
        // Sixteen pairs of each row at a time: what is turned stays in registers or close by.
        for (block, lines) in lines.chunks_mut(16).enumerate() {
            let mut pairs = [[0u32; 16]; TILE_TOKENS];
            for (row, pairs) in rows.chunks_exact(d).zip(&mut pairs) {
                let row = &row[32 * block..][..2 * lines.len()];
                for (two, pair_of) in row.as_chunks::<2>().0.iter().zip(pairs) {
                    *pair_of = pair(two[0], two[1]);
                }
            }
            for (p, line) in lines.iter_mut().enumerate() {
                for lane in 0..TILE_TOKENS {
                    line.0[lane] = pairs[lane][p & 15];
                }
            }
        }
    }
}

fn words(lines: &mut [Line]) -> &mut [u32] {
    // SAFETY: a line is sixteen words without padding, and the slice is borrowed exclusively.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast::<u32>(), 16 * lines.len()) }
}

#[inline(always)]
fn values_body(rows: &[f32], d: usize, lines: &mut [Line]) {
    let words = words(lines);
    // One long run of words: over lines the compiler would gather and scatter.
    for (two, words) in rows.chunks_exact(2 * d).zip(words.chunks_exact_mut(d)) {
        let (even, odd) = two.split_at(d);
        for ((word, even), odd) in words.iter_mut().zip(even).zip(odd) {
            *word = pair(*even, *odd);
        }
    }
}

/// From `[tile][channel pair][16 tokens][2]` to `[token pair][channel][2]`. Two tokens of a channel
/// pair are 64 bits in both orders, with the middle halves swapped; eight lines at a time are turned.
#[inline(always)]
fn turn_body(keys: &[u8], d: usize, lines: &mut [Line]) {
    let swap = |x: u64| x & 0xffff_0000_0000_ffff | (x & 0xffff_0000) << 16 | (x >> 16) & 0xffff_0000;
    for (tile, words) in keys.chunks_exact(32 * d).zip(words(lines).chunks_exact_mut(8 * d)) {
        for (block, eight) in tile.chunks_exact(8 * 64).enumerate() {
            let mut pairs = [[0u64; 8]; 8];
            for (line, pairs) in eight.as_chunks::<64>().0.iter().zip(&mut pairs) {
                for (bytes, pair_of) in line.as_chunks::<8>().0.iter().zip(pairs) {
                    *pair_of = swap(u64::from_le_bytes(*bytes));
                }
            }
            for (tokens, words) in words.chunks_exact_mut(d).enumerate() {
                let words = &mut words[16 * block..][..16];
                for (two, pairs) in words.as_chunks_mut::<2>().0.iter_mut().zip(&pairs) {
                    let both = pairs[tokens & 7];
                    *two = [both as u32, (both >> 32) as u32];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_codec::{CodeLayout, KvFormat, Side};

    #[test]
    fn a_tile_is_the_bf16_page_of_the_rows() {
        for d in [32, 80, 128, 256] {
            let codec = KvFormat::Bf16.codec(d, CodeLayout::CpuTile).unwrap();
            let row = |i: usize| ((i * 7919 % 1009) as f32 - 504.0) / 77.0;
            let keys: Vec<f32> = (0..PAGE_TOKENS * d).map(row).collect();
            let values: Vec<f32> = (0..PAGE_TOKENS * d).map(|i| row(i + 3)).collect();
            let mut page = vec![0; codec.page_bytes()];
            codec.quantize(&keys, &values, &mut page).unwrap();
            for variant in Variant::available() {
                let mut tile = Bf16Tile::default();
                tile.store_keys(variant, &keys, d);
                assert!(tile.bytes() == &page[codec.codes_range(Side::Key)], "{variant}, keys of {d}");
                tile.store_values(variant, &values, d);
                assert!(tile.bytes() == &page[codec.codes_range(Side::Value)], "{variant}, values of {d}");
                tile.store_keys(variant, &values, d);
                let mut turned = Bf16Tile::default();
                turned.store_values_of_keys(variant, tile.bytes(), d);
                assert!(turned.bytes() == &page[codec.codes_range(Side::Value)], "{variant}, turned, {d}");
            }
        }
    }
}
