//! Codes whose groups run along tokens, one channel at a time: the keys of KIVI and Kitty.
//!
//! A group is `g` consecutive tokens; each channel of it has its own fp16 scale and minimum. Kitty
//! also promotes the channels of largest mean magnitude to four bits: a second two-bit plane holds
//! their high bits, and one byte for each channel names its row of that plane.
//!
//! A page has 64 tokens and a group may have 128, so the parameters of a group are spread in equal
//! slices over its 16-token tiles. A page then has a fixed size wherever groups begin, and the bits
//! are exactly those of the method: `2 + 32/g`, or `2 + 2ρ + (32 + 8)/g` if a share `ρ` of the
//! channels is promoted. The price: reading one tile needs all tiles of its group.
//!
//! A tile is `[codes, token by token][high bits of promoted channels, token by token][slice of the
//! parameters]`.

use crate::affine::{self, AffineParams};
use crate::error::{CodecError, Result};
use crate::page::TILE_TOKENS;
use half::f16;

/// Code bits of a channel that is not promoted.
pub const BITS: u32 = 2;
/// Code bits of a promoted channel.
pub const PROMOTED_BITS: u32 = 4;
/// Map entry of a channel that is not promoted.
const NOT_PROMOTED: u8 = u8::MAX;

/// The shape of the groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelGroups {
    head_dim: usize,
    tokens: usize,
    promoted: usize,
}

/// All parameters of a group.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupHeader {
    /// Scale and minimum of each channel.
    pub params: Vec<AffineParams>,
    /// Row of the second plane, for promoted channels.
    pub slots: Vec<Option<u8>>,
}

impl ChannelGroups {
    /// Groups of `tokens` tokens in which `promoted` channels have four bits.
    pub fn new(head_dim: usize, tokens: usize, promoted: usize) -> Result<Self> {
        let splits = tokens.is_multiple_of(TILE_TOKENS)
            && tokens > 0
            && (4 * head_dim).is_multiple_of(tokens / TILE_TOKENS);
        if !splits || promoted >= head_dim || promoted >= usize::from(NOT_PROMOTED) {
            return Err(CodecError::TokenGroup { tokens, head_dim });
        }
        Ok(Self { head_dim, tokens, promoted })
    }

    /// Tokens of a group.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Channels of a group that have four bits.
    pub fn promoted(&self) -> usize {
        self.promoted
    }

    /// Tiles of a group.
    pub fn tiles(&self) -> usize {
        self.tokens / TILE_TOKENS
    }

    fn code_bytes(&self) -> usize {
        TILE_TOKENS * self.head_dim * BITS as usize / 8
    }

    fn plane_bytes(&self) -> usize {
        TILE_TOKENS * self.promoted * (PROMOTED_BITS - BITS) as usize / 8
    }

    /// Bytes of a group's parameters in each of its tiles.
    fn slice_bytes(&self) -> usize {
        let map = if self.promoted > 0 { self.head_dim } else { 0 };
        (4 * self.head_dim + map).div_ceil(self.tiles())
    }

    /// Bytes of 16 tokens, their share of the parameters counted.
    pub fn tile_bytes(&self) -> usize {
        self.code_bytes() + self.plane_bytes() + self.slice_bytes()
    }

    /// The channels that a group promotes: largest mean magnitude first; of equal ones the lower
    /// channel first.
    pub fn promoted_channels(&self, rows: &[f32]) -> Vec<usize> {
        let mut magnitude = vec![0f64; self.head_dim];
        for row in rows.chunks_exact(self.head_dim) {
            magnitude.iter_mut().zip(row).for_each(|(m, v)| *m += f64::from(v.abs()));
        }
        let mut order: Vec<usize> = (0..self.head_dim).collect();
        order.sort_by(|&a, &b| magnitude[b].total_cmp(&magnitude[a]).then(a.cmp(&b)));
        order.truncate(self.promoted);
        order
    }

    /// Quantizes the rows of a whole group into its tiles, one after another in `tiles`.
    pub fn quantize(&self, rows: &[f32], tiles: &mut [u8]) -> Result<()> {
        crate::error::check_len("rows of a token group", rows.len(), self.tokens * self.head_dim)?;
        crate::error::check_len("tiles of a token group", tiles.len(), self.tiles() * self.tile_bytes())?;
        let d = self.head_dim;
        let mut rows = rows.to_vec();
        affine::sanitize(&mut rows, affine::SATURATION);
        let mut slots = vec![NOT_PROMOTED; d];
        for (slot, channel) in self.promoted_channels(&rows).into_iter().enumerate() {
            slots[channel] = slot as u8;
        }
        tiles.fill(0);
        let mut header = Vec::with_capacity(self.tiles() * self.slice_bytes());
        let (mut column, mut codes) = (vec![0.0; self.tokens], vec![0u8; self.tokens]);
        for (channel, &slot) in slots.iter().enumerate() {
            column.iter_mut().zip(rows[channel..].iter().step_by(d)).for_each(|(to, from)| *to = *from);
            let bits = if slot == NOT_PROMOTED { BITS } else { PROMOTED_BITS };
            let params = affine::quantize_group(&column, bits, &mut codes);
            header.extend(f16::from_f32(params.scale).to_le_bytes());
            header.extend(f16::from_f32(params.min).to_le_bytes());
            for (token, code) in codes.iter().enumerate() {
                let tile = &mut tiles[token / TILE_TOKENS * self.tile_bytes()..];
                let index = token % TILE_TOKENS * d + channel;
                tile[index / 4] |= (code & 3) << (2 * (index % 4));
                if slot != NOT_PROMOTED {
                    let index = token % TILE_TOKENS * self.promoted + usize::from(slot);
                    tile[self.code_bytes() + index / 4] |= (code >> 2) << (2 * (index % 4));
                }
            }
        }
        if self.promoted > 0 {
            header.extend_from_slice(&slots);
        }
        let start = self.code_bytes() + self.plane_bytes();
        for (tile, slice) in tiles.chunks_exact_mut(self.tile_bytes()).zip(header.chunks(self.slice_bytes()))
        {
            tile[start..start + slice.len()].copy_from_slice(slice);
        }
        Ok(())
    }

    /// The high bits of promoted channels in a tile, token by token.
    pub fn plane<'a>(&self, tile: &'a [u8]) -> &'a [u8] {
        &tile[self.code_bytes()..][..self.plane_bytes()]
    }

    /// A tile's slice of its group's parameters. In order they are `[fp16 scale, fp16 minimum]` of
    /// each channel, then, if channels are promoted, one byte for each channel: its row of the
    /// second plane, if it has one.
    pub fn header_slice<'a>(&self, tile: &'a [u8]) -> &'a [u8] {
        &tile[self.code_bytes() + self.plane_bytes()..self.tile_bytes()]
    }

    /// Joins the parameters of a group from its tiles, given in order.
    pub fn header<'a>(&self, tiles: impl Iterator<Item = &'a [u8]>) -> GroupHeader {
        let d = self.head_dim;
        let mut bytes = Vec::with_capacity(self.tiles() * self.slice_bytes());
        for tile in tiles {
            bytes.extend_from_slice(self.header_slice(tile));
        }
        let half = |at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
        let params = (0..d).map(|c| AffineParams { scale: half(4 * c), min: half(4 * c + 2) }).collect();
        let slot = |c: usize| {
            let slot = if self.promoted > 0 { bytes[4 * d + c] } else { NOT_PROMOTED };
            // A page that was never written has random slots; entries beyond the plane are not
            // read.
            (usize::from(slot) < self.promoted).then_some(slot)
        };
        GroupHeader { params, slots: (0..d).map(slot).collect() }
    }

    /// The code of one channel of one token of a tile.
    pub fn code(&self, header: &GroupHeader, tile: &[u8], token: usize, channel: usize) -> u8 {
        let field = |bytes: &[u8], index: usize| bytes[index / 4] >> (2 * (index % 4)) & 3;
        let low = field(tile, token * self.head_dim + channel);
        match header.slots[channel] {
            Some(slot) => {
                let plane = &tile[self.code_bytes()..];
                low | field(plane, token * self.promoted + usize::from(slot)) << 2
            }
            None => low,
        }
    }

    /// Dequantizes one token of a tile.
    pub fn dequantize_row(&self, header: &GroupHeader, tile: &[u8], token: usize, row: &mut [f32]) {
        let codes = &tile[token * self.head_dim / 4..][..self.head_dim / 4];
        for ((quad, params), byte) in row.chunks_exact_mut(4).zip(header.params.chunks_exact(4)).zip(codes) {
            for i in 0..4 {
                quad[i] = params[i].dequantize(byte >> (2 * i) & 3);
            }
        }
        for (channel, _) in header.slots.iter().enumerate().filter(|(_, slot)| slot.is_some()) {
            row[channel] = header.params[channel].dequantize(self.code(header, tile, token, channel));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SeededGaussian;

    fn rows(groups: &ChannelGroups, seed: u64) -> Vec<f32> {
        let mut random = SeededGaussian::new(seed);
        // Channels of very different size, as in real keys.
        (0..groups.tokens * groups.head_dim)
            .map(|i| random.normal() as f32 * if i % groups.head_dim % 9 == 4 { 20.0 } else { 1.0 })
            .collect()
    }

    fn coded(groups: &ChannelGroups, rows: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let mut tiles = vec![0; groups.tiles() * groups.tile_bytes()];
        groups.quantize(rows, &mut tiles).unwrap();
        let header = groups.header(tiles.chunks_exact(groups.tile_bytes()));
        let mut dequantized = vec![0.0; rows.len()];
        for (token, row) in dequantized.chunks_exact_mut(groups.head_dim).enumerate() {
            let tile = &tiles[token / TILE_TOKENS * groups.tile_bytes()..][..groups.tile_bytes()];
            groups.dequantize_row(&header, tile, token % TILE_TOKENS, row);
        }
        (tiles, dequantized)
    }

    #[test]
    fn groups_run_along_tokens_one_channel_at_a_time() {
        for (d, g) in [(128, 32), (128, 64), (128, 128), (64, 128), (80, 128), (96, 32)] {
            let groups = ChannelGroups::new(d, g, 0).unwrap();
            let rows = rows(&groups, 3);
            let (_, dequantized) = coded(&groups, &rows);
            for channel in 0..d {
                let column =
                    |from: &[f32]| -> Vec<f32> { from[channel..].iter().step_by(d).copied().collect() };
                let (column, dequantized) = (column(&rows), column(&dequantized));
                let mut codes = vec![0; g];
                let params = affine::quantize_group(&column, 2, &mut codes);
                let expected: Vec<f32> = codes.iter().map(|&c| params.dequantize(c)).collect();
                assert_eq!(dequantized, expected, "head {d}, groups of {g}, channel {channel}");
            }
        }
    }

    #[test]
    fn a_change_of_one_channel_leaves_the_others_alone() {
        let groups = ChannelGroups::new(128, 64, 0).unwrap();
        let mut rows = rows(&groups, 4);
        let before = coded(&groups, &rows).1;
        rows[17 * 128 + 5] = 1e4;
        let after = coded(&groups, &rows).1;
        for (i, (a, b)) in before.iter().zip(&after).enumerate() {
            assert!(i % 128 == 5 || a == b, "channel {}", i % 128);
        }
    }

    #[test]
    fn the_channels_of_largest_mean_magnitude_are_promoted() {
        let groups = ChannelGroups::new(128, 128, 16).unwrap();
        let rows = rows(&groups, 5);
        let (tiles, dequantized) = coded(&groups, &rows);
        let header = groups.header(tiles.chunks_exact(groups.tile_bytes()));
        let magnitude = |c: usize| rows[c..].iter().step_by(128).map(|v| v.abs()).sum::<f32>();
        let promoted: Vec<usize> = (0..128).filter(|&c| header.slots[c].is_some()).collect();
        assert_eq!(promoted.len(), 16);
        let least = promoted.iter().map(|&c| magnitude(c)).fold(f32::INFINITY, f32::min);
        assert!((0..128).filter(|c| !promoted.contains(c)).all(|c| magnitude(c) <= least));
        // Channels 4, 13, 22, … are twenty times as large: there are 14 of them.
        assert!((4..128).step_by(9).all(|c| promoted.contains(&c)));
        for channel in 0..128 {
            let column: Vec<f32> = rows[channel..].iter().step_by(128).copied().collect();
            let mut codes = vec![0; 128];
            let bits = if promoted.contains(&channel) { 4 } else { 2 };
            let params = affine::quantize_group(&column, bits, &mut codes);
            let same = (0..128).all(|t| dequantized[t * 128 + channel] == params.dequantize(codes[t]));
            assert!(same, "channel {channel} at {bits} bits");
        }
    }

    #[test]
    fn bytes_are_those_of_the_formula() {
        for (g, promoted, bits) in [
            (32, 0, 3.0),
            (64, 0, 2.5),
            (128, 0, 2.25),
            (128, 16, 2.0 + 0.25 + 40.0 / 128.0),
            (128, 32, 2.0 + 0.5 + 40.0 / 128.0),
        ] {
            let groups = ChannelGroups::new(128, g, promoted).unwrap();
            assert_eq!(groups.tile_bytes() as f64 * 8.0 / (16.0 * 128.0), bits, "{g} {promoted}");
        }
    }

    #[test]
    fn groups_that_do_not_split_into_tiles_are_refused() {
        assert!(ChannelGroups::new(128, 24, 0).unwrap_err().to_string().contains("24"));
        assert!(ChannelGroups::new(128, 0, 0).is_err());
        assert!(ChannelGroups::new(128, 128, 128).is_err());
        let groups = ChannelGroups::new(32, 32, 0).unwrap();
        assert!(groups.quantize(&[0.0; 32], &mut [0; 8]).is_err());
    }

    #[test]
    fn hostile_rows_dequantize_to_finite_numbers() {
        let groups = ChannelGroups::new(32, 32, 4).unwrap();
        for value in [f32::NAN, f32::INFINITY, f32::MAX, -0.0, f32::from_bits(1)] {
            let mut rows = vec![value; 32 * 32];
            rows[7] = 1.0;
            assert!(coded(&groups, &rows).1.iter().all(|v| v.is_finite()), "{value}");
        }
        // Bytes that no quantizer wrote must not cause an access out of bounds.
        let tiles = vec![0xff; groups.tiles() * groups.tile_bytes()];
        let header = groups.header(tiles.chunks_exact(groups.tile_bytes()));
        let mut row = [0.0; 32];
        groups.dequantize_row(&header, &tiles[..groups.tile_bytes()], 15, &mut row);
    }
}
