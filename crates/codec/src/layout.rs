//! The positions of bits in a page.
//!
//! The *logical* order is the definition: token by token, channel by channel, a little-endian bit
//! stream. A kernel layout is a permutation of it that suits an instruction set. A test proves each
//! one a bijection, and a page can be converted between any two layouts code by code.

use crate::error::{CodecError, Result};
use crate::gpu_tile;
use crate::page::{Side, TILE_TOKENS};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CodeLayout {
    /// Token-major bit stream; parameters token by token.
    #[default]
    Logical,
    /// Byte order of the official kernels, two-bit codes only: byte `i` of a row holds channels
    /// `i`, `i + d/4`, `i + d/2`, `i + 3d/4` from the low bits up.
    Official,
    /// 16-token tiles for VNNI and AMX. A 64-byte line is sixteen 32-bit lanes. For keys a lane is
    /// a token and byte `i` of plane `j` is channel `4j + i` of the line's channels; for values a
    /// lane is a channel and byte `i` of plane `j` is token `4j + i`. Three-bit codes are a two-bit
    /// plane set followed by a one-bit one, five-bit codes a four-bit set followed by a one-bit one.
    CpuTile,
    /// 16-token tiles in the order in which the lanes of a warp feed tensor cores; see
    /// [`gpu_tile`](mod@crate::gpu_tile).
    GpuTile,
}

/// Some bits of one code: `width` bits at `shift` in `byte`, worth `1 << code_shift`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitField {
    pub byte: usize,
    pub shift: u32,
    pub width: u32,
    pub code_shift: u32,
}

/// A code lies in one or two fields.
pub type Fields = [Option<BitField>; 2];

/// The positions of one side's codes and parameters, for one width and head size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeMap {
    layout: CodeLayout,
    side: Side,
    bits: u32,
    head_dim: usize,
}

/// The planes of bits of a width, which unpack by shift and mask: `(plane width, weight shift)`.
pub const fn planes(bits: u32) -> &'static [(u32, u32)] {
    match bits {
        1 => &[(1, 0)],
        2 => &[(2, 0)],
        3 => &[(2, 0), (1, 2)],
        4 => &[(4, 0)],
        5 => &[(4, 0), (1, 4)],
        _ => &[(8, 0)],
    }
}

impl CodeLayout {
    pub fn name(self) -> &'static str {
        match self {
            Self::Logical => "logical",
            Self::Official => "official",
            Self::CpuTile => "cpu-tile",
            Self::GpuTile => "gpu-tile",
        }
    }
}

impl CodeMap {
    pub fn new(layout: CodeLayout, side: Side, bits: u32, head_dim: usize) -> Result<Self> {
        let refuse = |why| Err(CodecError::Layout { layout: layout.name(), bits, head_dim, why });
        match layout {
            CodeLayout::Official if bits != 2 => {
                return refuse("the official byte order is defined for 2-bit codes");
            }
            CodeLayout::CpuTile if matches!(bits, 1 | 3 | 5) && !head_dim.is_multiple_of(32) => {
                return refuse(
                    "one-bit planes hold 32 channels a lane, so the head size must be a multiple of 32",
                );
            }
            CodeLayout::GpuTile if bits == 5 => {
                return refuse("GPU pages hold codes of 1 to 4 and of 8 bits");
            }
            CodeLayout::GpuTile if !gpu_tile::HEAD_DIMS.contains(&head_dim) => {
                return refuse("GPU pages are defined for head sizes 64, 128 and 256");
            }
            _ => {}
        }
        Ok(Self { layout, side, bits, head_dim })
    }

    /// Bytes of one token's codes.
    pub fn row_bytes(&self) -> usize {
        self.head_dim * self.bits as usize / 8
    }

    /// Position of the code of `channel` of `token`, from the start of the side's codes.
    pub fn locate(&self, token: usize, channel: usize) -> Fields {
        let d = self.head_dim;
        match self.layout {
            CodeLayout::Logical => {
                let bit = (token * d + channel) * self.bits as usize;
                let (byte, shift) = (bit / 8, (bit % 8) as u32);
                let width = self.bits.min(8 - shift);
                let low = BitField { byte, shift, width, code_shift: 0 };
                let rest = self.bits - width;
                let high = BitField { byte: byte + 1, shift: 0, width: rest, code_shift: width };
                [Some(low), (rest > 0).then_some(high)]
            }
            CodeLayout::Official => {
                let quarter = d / 4;
                let byte = token * quarter + channel % quarter;
                [
                    Some(BitField { byte, shift: 2 * (channel / quarter) as u32, width: 2, code_shift: 0 }),
                    None,
                ]
            }
            CodeLayout::CpuTile => {
                let mut fields = [None; 2];
                let mut base = token / TILE_TOKENS * TILE_TOKENS * self.row_bytes();
                for (field, &(width, code_shift)) in fields.iter_mut().zip(planes(self.bits)) {
                    let (byte, shift) = self.tile_position(width, token % TILE_TOKENS, channel);
                    *field = Some(BitField { byte: base + byte, shift, width, code_shift });
                    base += TILE_TOKENS * d * width as usize / 8;
                }
                fields
            }
            CodeLayout::GpuTile => gpu_tile::locate(self.side, self.bits, d, token, channel),
        }
    }

    /// Byte and bit within one plane set of a 16-token tile.
    fn tile_position(&self, width: u32, token: usize, channel: usize) -> (usize, u32) {
        let planes = 8 / width as usize;
        let (line, lane, plane, byte) = match self.side {
            Side::Key => {
                let within = channel % (4 * planes);
                (channel / (4 * planes), token, within / 4, within % 4)
            }
            Side::Value => {
                let (quad, slab) = (token / 4, channel / 16);
                // A one-bit line has room for eight quads but a tile has four, so it takes two
                // slabs of channels.
                let (line, plane) = match width {
                    1 => (slab / 2, quad + 4 * (slab % 2)),
                    _ => (slab * (4 / planes) + quad / planes, quad % planes),
                };
                (line, channel % 16, plane, token % 4)
            }
        };
        ((line * 16 + lane) * 4 + byte, plane as u32 * width)
    }

    pub fn read(&self, codes: &[u8], token: usize, channel: usize) -> u8 {
        self.locate(token, channel).into_iter().flatten().fold(0, |code, f| {
            let bits = (codes[f.byte] >> f.shift) as u32 & ((1 << f.width) - 1);
            code | (bits << f.code_shift) as u8
        })
    }

    pub fn write(&self, codes: &mut [u8], token: usize, channel: usize, code: u8) {
        for f in self.locate(token, channel).into_iter().flatten() {
            let mask = (((1u32 << f.width) - 1) << f.shift) as u8;
            let bits = ((code as u32 >> f.code_shift) << f.shift) as u8 & mask;
            codes[f.byte] = codes[f.byte] & !mask | bits;
        }
    }

    /// Copies the codes of one token to another place.
    pub fn copy_row(&self, from: &[u8], token: usize, to: &mut [u8], place: usize) {
        for channel in 0..self.head_dim {
            let fields = self.locate(token, channel).into_iter().zip(self.locate(place, channel));
            for (source, target) in fields {
                let (Some(source), Some(target)) = (source, target) else { continue };
                let mask = ((1u32 << source.width) - 1) as u8;
                let bits = from[source.byte] >> source.shift & mask;
                let byte = &mut to[target.byte];
                *byte = *byte & !(mask << target.shift) | bits << target.shift;
            }
        }
    }

    /// Index, in units of one parameter, of parameter `which` (0 scale, 1 minimum) of a token's
    /// `group`.
    pub fn param_index(&self, groups: usize, token: usize, group: usize, which: usize) -> usize {
        match self.layout {
            CodeLayout::Logical | CodeLayout::Official => (token * groups + group) * 2 + which,
            CodeLayout::CpuTile => {
                let (tile, lane) = (token / TILE_TOKENS, token % TILE_TOKENS);
                ((tile * groups + group) * 2 + which) * TILE_TOKENS + lane
            }
            CodeLayout::GpuTile => gpu_tile::param_index(groups, token, group, which),
        }
    }

    /// Index, in elements, of a value stored unquantized.
    ///
    /// In `CpuTile`, keys lie `[tile][channel pair][16 tokens][2]` and values `[tile][token
    /// pair][channel][2]`: the operands of the BF16 dot-product instructions.
    pub fn element_index(&self, token: usize, channel: usize) -> usize {
        let d = self.head_dim;
        match (self.layout, self.side) {
            (CodeLayout::Logical | CodeLayout::Official, _) => token * d + channel,
            (CodeLayout::CpuTile, Side::Key) => {
                let (tile, lane) = (token / TILE_TOKENS, token % TILE_TOKENS);
                tile * TILE_TOKENS * d + ((channel / 2) * TILE_TOKENS + lane) * 2 + channel % 2
            }
            (CodeLayout::CpuTile, Side::Value) => (token / 2 * d + channel) * 2 + token % 2,
            (CodeLayout::GpuTile, _) => gpu_tile::element_index(token, channel),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::PAGE_TOKENS;

    #[test]
    fn every_layout_is_a_bijection_on_the_bits_of_a_page() {
        for layout in [CodeLayout::Logical, CodeLayout::Official, CodeLayout::CpuTile, CodeLayout::GpuTile] {
            for side in [Side::Key, Side::Value] {
                for bits in [1, 2, 3, 4, 5, 8] {
                    for d in [32, 64, 80, 96, 128, 256] {
                        let Ok(map) = CodeMap::new(layout, side, bits, d) else { continue };
                        let mut used = vec![0u8; PAGE_TOKENS * map.row_bytes()];
                        for token in 0..PAGE_TOKENS {
                            for channel in 0..d {
                                let mut width = 0;
                                for f in map.locate(token, channel).into_iter().flatten() {
                                    let mask = (((1u32 << f.width) - 1) << f.shift) as u8;
                                    assert_eq!(
                                        used[f.byte] & mask,
                                        0,
                                        "{layout:?} {side:?} {bits} {d} overlaps"
                                    );
                                    used[f.byte] |= mask;
                                    width += f.width;
                                }
                                assert_eq!(width, bits);
                            }
                        }
                        assert!(
                            used.iter().all(|&b| b == 0xff),
                            "{layout:?} {side:?} {bits} bits, head {d}: holes"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn tiles_do_not_share_bytes() {
        for layout in [CodeLayout::CpuTile, CodeLayout::GpuTile] {
            for side in [Side::Key, Side::Value] {
                for bits in [1, 2, 3, 4, 5, 8] {
                    let Ok(map) = CodeMap::new(layout, side, bits, 128) else { continue };
                    let tile_bytes = TILE_TOKENS * map.row_bytes();
                    for token in 0..PAGE_TOKENS {
                        for channel in 0..128 {
                            for f in map.locate(token, channel).into_iter().flatten() {
                                assert_eq!(f.byte / tile_bytes, token / TILE_TOKENS);
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn element_and_parameter_orders_are_bijections() {
        for (layout, d) in [(CodeLayout::Logical, 96), (CodeLayout::CpuTile, 96), (CodeLayout::GpuTile, 128)]
        {
            for side in [Side::Key, Side::Value] {
                let map = CodeMap::new(layout, side, 2, d).unwrap();
                let mut elements: Vec<usize> =
                    (0..PAGE_TOKENS).flat_map(|t| (0..d).map(move |c| map.element_index(t, c))).collect();
                elements.sort_unstable();
                assert!(elements.iter().copied().eq(0..PAGE_TOKENS * d));
                let mut params: Vec<usize> = (0..PAGE_TOKENS)
                    .flat_map(|t| (0..3).flat_map(move |g| (0..2).map(move |w| map.param_index(3, t, g, w))))
                    .collect();
                params.sort_unstable();
                assert!(params.iter().copied().eq(0..PAGE_TOKENS * 6));
            }
        }
    }

    #[test]
    fn official_order_packs_the_golden_bytes() {
        let map = CodeMap { layout: CodeLayout::Official, side: Side::Key, bits: 2, head_dim: 8 };
        for (codes, bytes) in [([0, 1, 1, 1, 1, 2, 2, 3], [148, 229]), ([0, 1, 1, 2, 2, 2, 3, 3], [228, 233])]
        {
            let mut packed = [0u8; 2];
            for (c, &code) in codes.iter().enumerate() {
                map.write(&mut packed, 0, c, code);
            }
            assert_eq!(packed, bytes);
        }
    }

    #[test]
    fn impossible_combinations_say_why() {
        let error = CodeMap::new(CodeLayout::Official, Side::Key, 4, 128).unwrap_err().to_string();
        assert!(error.contains("official") && error.contains("4-bit"), "{error}");
        assert!(CodeMap::new(CodeLayout::CpuTile, Side::Value, 3, 80).is_err());
        let error = CodeMap::new(CodeLayout::GpuTile, Side::Key, 5, 128).unwrap_err().to_string();
        assert!(error.contains("1 to 4"), "{error}");
        let error = CodeMap::new(CodeLayout::GpuTile, Side::Key, 2, 96).unwrap_err().to_string();
        assert!(error.contains("64, 128 and 256"), "{error}");
    }
}
