//! Pages dequantized to rows, for every codec without a kernel of its own.
//!
//! One body, compiled once for each instruction set; its loops are written so that the compiler
//! vectorizes them. A page is dequantized once for all rows of a work item.
//!
//! Invariant: the rows are those that `RowPageCodec::dequantize_token` defines, bit for bit (the
//! official affine format: up to a rounding of its offset). Tokens that are not requested become
//! zeros.

use oscar_codec::channel_groups::GroupHeader;
use oscar_codec::page::Scheme;
use oscar_codec::record::RecordCodec;
use oscar_codec::turboquant::Instance;
use oscar_codec::{CodeLayout, PAGE_TOKENS, RowPageCodec, Side, TILE_TOKENS, affine, fp8};

use super::block::MAX_DIM;
use crate::cpu::Variant;

/// Room for the codes of a row.
pub(super) type CodeBuffer = [u32; MAX_DIM];

/// One side of one page, with the pages around it for codes that span them.
#[derive(Clone, Copy)]
pub(super) struct SidePage<'a> {
    pub codec: &'a RowPageCodec,
    pub side: Side,
    pub pages: &'a [Option<&'a [u8]>],
    pub block: usize,
    /// Where groups of tokens begin.
    pub origin: usize,
}

impl<'a> SidePage<'a> {
    pub(super) fn bytes(&self) -> &'a [u8] {
        let page = self.pages.get(self.block).copied().flatten();
        page.unwrap_or_else(|| panic!("page of block {} is absent", self.block))
    }
}

/// Dequantizes the tokens in `used` into `rows`, 64 × head size.
pub(super) fn dequantize_page(
    variant: Variant,
    page: SidePage<'_>,
    used: u64,
    rows: &mut [f32],
    codes: &mut CodeBuffer,
) {
    assert_eq!(rows.len(), PAGE_TOKENS * page.codec.head_dim());
    compiled_for!(
        variant,
        dequantize_body(page: SidePage<'_>, used: u64, rows: &mut [f32], codes: &mut CodeBuffer)
    );
}

#[inline(always)]
fn dequantize_body(page: SidePage<'_>, used: u64, rows: &mut [f32], buffer: &mut CodeBuffer) {
    let SidePage { codec, side, .. } = page;
    let bytes = page.bytes();
    let d = codec.head_dim();
    if codec.token_groups(side).is_some() {
        return dequantize_token_groups(page, used, rows, buffer);
    }
    let codes = &bytes[codec.codes_range(side)];
    let mapped = MappedSide::new(codec, side);
    for (token, row) in rows.chunks_exact_mut(d).enumerate() {
        if used >> token & 1 == 0 {
            row.fill(0.0);
        } else if let Some(records) = codec.records(side) {
            let record = &codes[token * records.row_bytes()..][..records.row_bytes()];
            dequantize_record(records, record, row, buffer);
        } else if codec.spec(side).is_coded() {
            mapped.dequantize_row(bytes, codes, token, row, buffer);
        } else {
            codec.dequantize_row(side, bytes, token, row);
        }
    }
}

/// Codes placed by a layout.
struct MappedSide<'a> {
    codec: &'a RowPageCodec,
    side: Side,
    bits: u32,
    /// The levels of codes in centroid schemes.
    levels: Option<[f32; 16]>,
}

impl<'a> MappedSide<'a> {
    fn new(codec: &'a RowPageCodec, side: Side) -> Self {
        let spec = codec.spec(side);
        let centroids = matches!(spec.scheme, Scheme::LloydMax(_));
        let levels = centroids.then(|| std::array::from_fn(|code| codec.level(side, code as u8)));
        Self { codec, side, bits: spec.bits, levels }
    }

    #[inline(always)]
    fn dequantize_row(
        &self,
        page: &[u8],
        codes: &[u8],
        token: usize,
        row: &mut [f32],
        buffer: &mut CodeBuffer,
    ) {
        let d = row.len();
        let unpacked = &mut buffer[..d];
        match self.codec.layout() {
            CodeLayout::Logical => {
                let bytes = d * self.bits as usize / 8;
                unpack_stream(&codes[token * bytes..][..bytes], self.bits, unpacked);
            }
            CodeLayout::CpuTile => unpack_tile(self.side, codes, self.bits, token, unpacked),
            _ => {
                for (channel, code) in unpacked.iter_mut().enumerate() {
                    *code = u32::from(self.codec.code(self.side, page, token, channel));
                }
            }
        }
        let groups = self.codec.groups(self.side);
        let width = d / groups;
        for g in 0..groups {
            let params = self.codec.group_params(self.side, page, token, g);
            let part = &mut row[g * width..(g + 1) * width];
            let codes = &unpacked[g * width..(g + 1) * width];
            match &self.levels {
                Some(levels) => {
                    look_up(self.bits, levels, codes, part);
                    part.iter_mut().for_each(|v| *v = params.scale * *v + params.offset);
                }
                None => {
                    for (v, &code) in part.iter_mut().zip(codes) {
                        // Codes are below 2⁸: as a signed number they convert in one instruction.
                        *v = params.scale * code as i32 as f32 + params.offset;
                    }
                }
            }
        }
    }
}

/// The levels of codes.
#[inline(always)]
fn look_up(bits: u32, levels: &[f32; 16], codes: &[u32], out: &mut [f32]) {
    /// A choice for each bit, which unlike an index the compiler can make in all lanes at once.
    #[inline(always)]
    fn choose<const BITS: u32>(levels: &[f32; 16], codes: &[u32], out: &mut [f32]) {
        for (v, &code) in out.iter_mut().zip(codes) {
            let mut left = *levels;
            for bit in 0..BITS {
                for i in 0..(1 << BITS) >> (bit + 1) {
                    left[i] = if code >> bit & 1 == 1 { left[2 * i + 1] } else { left[2 * i] };
                }
            }
            *v = left[0];
        }
    }
    match bits {
        1 => choose::<1>(levels, codes, out),
        2 => choose::<2>(levels, codes, out),
        3 => choose::<3>(levels, codes, out),
        _ => out.iter_mut().zip(codes).for_each(|(v, &code)| *v = levels[code as usize & 15]),
    }
}

/// Codes of a little-endian bit stream.
#[inline(always)]
fn unpack_stream(bytes: &[u8], bits: u32, out: &mut [u32]) {
    /// `N` codes of `BITS` in each `BYTES` bytes.
    #[inline(always)]
    fn unpack<const BYTES: usize, const N: usize, const BITS: u32>(bytes: &[u8], out: &mut [u32]) {
        for (word, out) in bytes.as_chunks::<BYTES>().0.iter().zip(out.as_chunks_mut::<N>().0) {
            let mut four = [0; 4];
            four[..BYTES].copy_from_slice(word);
            let word = u32::from_le_bytes(four);
            for i in 0..N {
                out[i] = word.wrapping_shr(BITS.wrapping_mul(i as u32)) & ((1 << BITS) - 1);
            }
        }
    }
    match bits {
        // Rows are multiples of 8 channels, so words of 8 codes never run over.
        1 => unpack::<1, 8, 1>(bytes, out),
        2 if out.len().is_multiple_of(16) => unpack::<4, 16, 2>(bytes, out),
        2 => unpack::<2, 8, 2>(bytes, out),
        3 => unpack::<3, 8, 3>(bytes, out),
        4 => unpack::<4, 8, 4>(bytes, out),
        5 => {
            for (word, out) in bytes.as_chunks::<5>().0.iter().zip(out.as_chunks_mut::<8>().0) {
                let mut eight = [0; 8];
                eight[..5].copy_from_slice(word);
                let word = u64::from_le_bytes(eight);
                out.iter_mut().enumerate().for_each(|(i, code)| *code = (word >> (5 * i)) as u32 & 31);
            }
        }
        _ => out.iter_mut().zip(bytes).for_each(|(code, &byte)| *code = u32::from(byte)),
    }
}

/// Codes of one token in [`CodeLayout::CpuTile`] order.
#[inline(always)]
fn unpack_tile(side: Side, codes: &[u8], bits: u32, token: usize, out: &mut [u32]) {
    let d = out.len();
    let (tile, lane) = (token / TILE_TOKENS, token % TILE_TOKENS);
    let tile = &codes[tile * TILE_TOKENS * d * bits as usize / 8..][..TILE_TOKENS * d * bits as usize / 8];
    // Three and five bits are a set of two-bit or four-bit planes and then one of one-bit planes.
    let (low, high) = match bits {
        3 | 5 => tile.split_at(TILE_TOKENS * d * (bits as usize - 1) / 8),
        _ => (tile, &[][..]),
    };
    match (side, bits) {
        (Side::Key, 1) => key_planes::<1, 32, 0>(low, lane, out),
        (Side::Key, 2 | 3) => key_planes::<2, 16, 0>(low, lane, out),
        (Side::Key, 4 | 5) => key_planes::<4, 8, 0>(low, lane, out),
        (Side::Key, _) => key_planes::<8, 4, 0>(low, lane, out),
        (Side::Value, 1) => value_planes::<1, 0>(low, lane, out),
        (Side::Value, 2 | 3) => value_planes::<2, 0>(low, lane, out),
        (Side::Value, 4 | 5) => value_planes::<4, 0>(low, lane, out),
        (Side::Value, _) => value_planes::<8, 0>(low, lane, out),
    }
    match (side, bits) {
        (Side::Key, 3) => key_planes::<1, 32, 2>(high, lane, out),
        (Side::Value, 3) => value_planes::<1, 2>(high, lane, out),
        (Side::Key, 5) => key_planes::<1, 32, 4>(high, lane, out),
        (Side::Value, 5) => value_planes::<1, 4>(high, lane, out),
        _ => {}
    }
}

/// A word is a token's: byte `i` of plane `j` is channel `4j + i`. `N` channels a line; a shift of
/// 0 begins codes anew, any other adds to them.
#[inline(always)]
fn key_planes<const WIDTH: u32, const N: usize, const SHIFT: u32>(set: &[u8], lane: usize, out: &mut [u32]) {
    for (line, out) in set.as_chunks::<64>().0.iter().zip(out.as_chunks_mut::<N>().0) {
        let word = u32::from_le_bytes([0, 1, 2, 3].map(|i| line[(4 * lane + i) & 63]));
        for i in 0..N {
            let shift = 8 * (i as u32 & 3) + WIDTH.wrapping_mul(i as u32 / 4);
            let field = (word.wrapping_shr(shift) & ((1 << WIDTH) - 1)) << SHIFT;
            out[i] = if SHIFT == 0 { field } else { out[i] | field };
        }
    }
}

/// A word is a channel's: byte `i` of plane `j` is token `4j + i`. Otherwise as [`key_planes`].
#[inline(always)]
fn value_planes<const WIDTH: u32, const SHIFT: u32>(set: &[u8], lane: usize, out: &mut [u32]) {
    let (quad, planes) = (lane / 4, 8 / WIDTH as usize);
    let lines = set.as_chunks::<64>().0;
    for (slab, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let (line, plane) = match WIDTH {
            1 => (slab / 2, quad + 4 * (slab % 2)),
            _ => (slab * (4 / planes) + quad / planes, quad % planes),
        };
        let shift = 8 * (lane as u32 % 4) + WIDTH * plane as u32;
        let words = lines[line].as_chunks::<4>().0;
        for i in 0..16 {
            let field = (u32::from_le_bytes(words[i]).wrapping_shr(shift) & ((1 << WIDTH) - 1)) << SHIFT;
            out[i] = if SHIFT == 0 { field } else { out[i] | field };
        }
    }
}

#[inline(always)]
fn dequantize_record(records: &RecordCodec, record: &[u8], row: &mut [f32], buffer: &mut CodeBuffer) {
    match records {
        RecordCodec::Fp8 { head_dim } => {
            let scale = half::f16::from_le_bytes([record[*head_dim], record[head_dim + 1]]).to_f32();
            row.iter_mut().zip(record).for_each(|(v, &code)| *v = scale * fp8_value(code));
        }
        RecordCodec::TurboQuant(codec) => {
            for instance in codec.instances() {
                dequantize_instance(
                    instance,
                    record,
                    &mut row[instance.first..][..instance.channels],
                    buffer,
                );
            }
        }
    }
}

/// `fp8::dequantize` without branches.
#[inline(always)]
fn fp8_value(code: u8) -> f32 {
    let code = u32::from(code);
    // An E4M3 exponent is biased by 7, that of an f32 by 127; below 2⁻⁶ a code counts steps of 2⁻⁹.
    let normal = f32::from_bits(((code & 0x7f) << 20) + (120 << 23));
    let steps = (code & 7) as i32 as f32 * (1.0 / 512.0);
    let magnitude = if code & 0x78 == 0 { steps } else { normal };
    let magnitude = if magnitude > fp8::MAX { fp8::MAX } else { magnitude };
    f32::from_bits(magnitude.to_bits() | (code & 0x80) << 24)
}

#[inline(always)]
fn dequantize_instance(instance: &Instance, record: &[u8], row: &mut [f32], buffer: &mut CodeBuffer) {
    let (codes, signs, norm, residual) = instance.parts(record);
    let unpacked = &mut buffer[..row.len()];
    unpack_stream(codes, instance.bits, unpacked);
    let mut levels = [0f32; 16];
    levels[..instance.levels.len()].copy_from_slice(&instance.levels);
    look_up(instance.bits, &levels, unpacked, row);
    let squares = if instance.normalized { affine::lane_sum(row.iter().map(|v| v * v)) } else { 0.0 };
    let scale = instance.scale(norm, squares);
    row.iter_mut().for_each(|v| *v *= scale);
    let Some(sketch) = &instance.sketch else { return };
    let factor = instance.sketch_factor(residual);
    let mut sums = [0f32; MAX_DIM];
    let sums = &mut sums[..row.len()];
    for (i, directions) in sketch.chunks_exact(row.len()).enumerate() {
        let sign = if signs[i / 8] >> (i % 8) & 1 == 1 { 1.0 } else { -1.0 };
        sums.iter_mut().zip(directions).for_each(|(sum, g)| *sum += sign * g);
    }
    row.iter_mut().zip(sums.iter()).for_each(|(v, sum)| *v += factor * sum);
}

#[inline(always)]
fn dequantize_token_groups(page: SidePage<'_>, used: u64, rows: &mut [f32], buffer: &mut CodeBuffer) {
    let SidePage { codec, side, pages, block, origin } = page;
    let Some(groups) = codec.token_groups(side) else { return };
    let (d, bytes) = (codec.head_dim(), page.bytes());
    let mut current: Option<(usize, SplitHeader)> = None;
    for (tile, rows) in rows.chunks_exact_mut(TILE_TOKENS * d).enumerate() {
        let used = used >> (tile * TILE_TOKENS) & 0xffff;
        let position = block * PAGE_TOKENS + tile * TILE_TOKENS;
        if used == 0 {
            rows.fill(0.0);
            continue;
        }
        if !current.as_ref().is_some_and(|(first, _)| (*first..first + groups.tokens()).contains(&position)) {
            let header = codec.group_header(side, pages, origin, position);
            let (first, header) =
                header.unwrap_or_else(|| panic!("a page of the group at {position} is absent"));
            current = Some((first, SplitHeader::new(&header)));
        }
        let Some((_, header)) = &current else { continue };
        let tile = &bytes[codec.tile_range(side, groups, tile)];
        for (token, row) in rows.chunks_exact_mut(d).enumerate() {
            if used >> token & 1 == 0 {
                row.fill(0.0);
                continue;
            }
            let unpacked = &mut buffer[..d];
            unpack_stream(&tile[token * d / 4..][..d / 4], 2, unpacked);
            let (plane, first) = (groups.plane(tile), token * groups.promoted());
            for &(channel, slot) in &header.promoted {
                let index = first + slot;
                unpacked[channel] |= u32::from(plane[index / 4] >> (2 * (index % 4)) & 3) << 2;
            }
            let params = header.scales.iter().zip(&header.minima);
            for ((v, &code), (scale, min)) in row.iter_mut().zip(unpacked.iter()).zip(params) {
                // Codes are below 2⁸: as a signed number they convert in one instruction.
                *v = scale * code as i32 as f32 + min;
            }
        }
    }
}

/// A group's parameters, a list each.
struct SplitHeader {
    scales: [f32; MAX_DIM],
    minima: [f32; MAX_DIM],
    /// Promoted channels, each with its row of the second plane.
    promoted: Vec<(usize, usize)>,
}

impl SplitHeader {
    fn new(header: &GroupHeader) -> Self {
        let (mut scales, mut minima) = ([0.0; MAX_DIM], [0.0; MAX_DIM]);
        for (c, params) in header.params.iter().enumerate() {
            (scales[c], minima[c]) = (params.scale, params.min);
        }
        let slots = header.slots.iter().enumerate();
        let promoted = slots.filter_map(|(c, slot)| Some((c, usize::from((*slot)?)))).collect();
        Self { scales, minima, promoted }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_eight_bit_float_has_its_value() {
        for code in 0..=u8::MAX {
            assert_eq!(fp8_value(code).to_bits(), fp8::dequantize(code).to_bits(), "{code:#x}");
        }
    }
}
