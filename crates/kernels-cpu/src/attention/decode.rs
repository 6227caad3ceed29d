//! Pages decoded to rows, for every codec that has no kernel of its own.
//!
//! One body, compiled once for each instruction set; its loops are written so that the compiler finds vectors in
//! them. A page is decoded once for all rows of a work item.
//!
//! Invariant: what comes out is what `RowPageCodec::decode_token` defines, to the bit (the official affine format:
//! to a rounding of its offset). Tokens that are not asked for come out as zeros.

use oscar_codec::channel_groups::GroupHeader;
use oscar_codec::page::Scheme;
use oscar_codec::record::RecordCodec;
use oscar_codec::turboquant::Instance;
use oscar_codec::{CodeLayout, PAGE_TOKENS, PageCodec, RowPageCodec, Side, TILE_TOKENS, affine, fp8};
use std::sync::OnceLock;

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

/// Decodes the tokens in `used` into `rows`, 64 × head size.
pub(super) fn decode_page(
    variant: Variant,
    page: SidePage<'_>,
    used: u64,
    rows: &mut [f32],
    codes: &mut CodeBuffer,
) {
    assert_eq!(rows.len(), PAGE_TOKENS * page.codec.head_dim());
    match variant {
        // SAFETY: a variant is only passed on by `attend`, which found it available.
        #[cfg(target_arch = "x86_64")]
        Variant::Avx2 => unsafe { decode_avx2(page, used, rows, codes) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Variant::Avx512 | Variant::Amx => unsafe { decode_avx512(page, used, rows, codes) },
        _ => decode_body(page, used, rows, codes),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn decode_avx2(page: SidePage<'_>, used: u64, rows: &mut [f32], codes: &mut CodeBuffer) {
    decode_body(page, used, rows, codes);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq")]
fn decode_avx512(page: SidePage<'_>, used: u64, rows: &mut [f32], codes: &mut CodeBuffer) {
    decode_body(page, used, rows, codes);
}

#[inline(always)]
fn decode_body(page: SidePage<'_>, used: u64, rows: &mut [f32], buffer: &mut CodeBuffer) {
    let SidePage { codec, side, .. } = page;
    let bytes = page.bytes();
    let d = codec.head_dim();
    if codec.token_groups(side).is_some() {
        return decode_token_groups(page, used, rows, buffer);
    }
    let codes = &bytes[codec.codes_range(side)];
    let mapped = MappedSide::new(codec, side);
    for (token, row) in rows.chunks_exact_mut(d).enumerate() {
        if used >> token & 1 == 0 {
            row.fill(0.0);
        } else if let Some(records) = codec.records(side) {
            let record = &codes[token * records.row_bytes()..][..records.row_bytes()];
            decode_record(records, record, row, buffer);
        } else if codec.spec(side).is_coded() {
            mapped.decode_row(bytes, codes, token, row, buffer);
        } else {
            codec.decode_row(side, bytes, token, row);
        }
    }
}

/// Codes placed by a layout.
struct MappedSide<'a> {
    codec: &'a RowPageCodec,
    side: Side,
    bits: u32,
    /// What the codes of centroid schemes stand for.
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
    fn decode_row(&self, page: &[u8], codes: &[u8], token: usize, row: &mut [f32], buffer: &mut CodeBuffer) {
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
                    for (v, &code) in part.iter_mut().zip(codes) {
                        *v = params.scale * levels[code as usize & 15] + params.offset;
                    }
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
        _ => out.iter_mut().zip(bytes).for_each(|(code, &byte)| *code = u32::from(byte)),
    }
}

/// Codes of one token in [`CodeLayout::CpuTile`] order.
#[inline(always)]
fn unpack_tile(side: Side, codes: &[u8], bits: u32, token: usize, out: &mut [u32]) {
    let d = out.len();
    let (tile, lane) = (token / TILE_TOKENS, token % TILE_TOKENS);
    let tile = &codes[tile * TILE_TOKENS * d * bits as usize / 8..][..TILE_TOKENS * d * bits as usize / 8];
    // Three bits are a set of two-bit planes and then one of one-bit planes.
    let (low, high) = if bits == 3 { tile.split_at(TILE_TOKENS * d / 4) } else { (tile, &[][..]) };
    match (side, bits) {
        (Side::Key, 1) => key_planes::<1, 32, 0>(low, lane, out),
        (Side::Key, 2 | 3) => key_planes::<2, 16, 0>(low, lane, out),
        (Side::Key, 4) => key_planes::<4, 8, 0>(low, lane, out),
        (Side::Key, _) => key_planes::<8, 4, 0>(low, lane, out),
        (Side::Value, 1) => value_planes::<1, 0>(low, lane, out),
        (Side::Value, 2 | 3) => value_planes::<2, 0>(low, lane, out),
        (Side::Value, 4) => value_planes::<4, 0>(low, lane, out),
        (Side::Value, _) => value_planes::<8, 0>(low, lane, out),
    }
    match (side, bits) {
        (Side::Key, 3) => key_planes::<1, 32, 2>(high, lane, out),
        (Side::Value, 3) => value_planes::<1, 2>(high, lane, out),
        _ => {}
    }
}

/// A word is a token's: byte `i` of plane `j` is channel `4j + i`. `N` channels a line; a shift of 0 begins codes
/// anew, any other adds to them.
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
fn decode_record(records: &RecordCodec, record: &[u8], row: &mut [f32], buffer: &mut CodeBuffer) {
    match records {
        RecordCodec::Fp8 { head_dim } => {
            static TABLE: OnceLock<[f32; 256]> = OnceLock::new();
            let table = TABLE.get_or_init(|| std::array::from_fn(|code| fp8::decode(code as u8)));
            let scale = half::f16::from_le_bytes([record[*head_dim], record[head_dim + 1]]).to_f32();
            row.iter_mut().zip(record).for_each(|(v, &code)| *v = scale * table[usize::from(code)]);
        }
        RecordCodec::TurboQuant(codec) => {
            for instance in codec.instances() {
                decode_instance(instance, record, &mut row[instance.first..][..instance.channels], buffer);
            }
        }
    }
}

#[inline(always)]
fn decode_instance(instance: &Instance, record: &[u8], row: &mut [f32], buffer: &mut CodeBuffer) {
    let (codes, signs, norm, residual) = instance.parts(record);
    let unpacked = &mut buffer[..row.len()];
    unpack_stream(codes, instance.bits, unpacked);
    let mut levels = [0f32; 16];
    levels[..instance.levels.len()].copy_from_slice(&instance.levels);
    row.iter_mut().zip(unpacked.iter()).for_each(|(v, &code)| *v = levels[code as usize & 15]);
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
fn decode_token_groups(page: SidePage<'_>, used: u64, rows: &mut [f32], buffer: &mut CodeBuffer) {
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
            for &channel in &header.promoted {
                unpacked[channel] = u32::from(groups.code(&header.whole, tile, token, channel));
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
    promoted: Vec<usize>,
    whole: GroupHeader,
}

impl SplitHeader {
    fn new(header: &GroupHeader) -> Self {
        let (mut scales, mut minima) = ([0.0; MAX_DIM], [0.0; MAX_DIM]);
        for (c, params) in header.params.iter().enumerate() {
            (scales[c], minima[c]) = (params.scale, params.min);
        }
        let promoted = (0..header.slots.len()).filter(|&c| header.slots[c].is_some()).collect();
        Self { scales, minima, promoted, whole: header.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_codec::{KvFormat, SideSpec};

    fn rows(n: usize, seed: u64) -> Vec<f32> {
        let mut random = oscar_codec::random::SeededGaussian::new(seed);
        (0..n).map(|_| random.normal() as f32).collect()
    }

    /// Rows of the specification as a BF16 tile, against the one decoded straight from a page.
    #[cfg(target_arch = "x86_64")]
    fn check_tile(name: &str, page: SidePage<'_>, used: u64, rows: &[f32]) {
        use super::super::{decode512, tile::Bf16Tile};
        let SidePage { codec, side, .. } = page;
        if !Variant::Avx512.is_available() || !decode512::reads(codec, side) {
            return;
        }
        let (mut got, mut want) = (Bf16Tile::default(), Bf16Tile::default());
        match side {
            Side::Key => want.store_keys(Variant::Scalar, rows, codec.head_dim()),
            Side::Value => want.store_values(Variant::Scalar, rows, codec.head_dim()),
        }
        // Room left by an earlier page must not show.
        let mut halves = vec![0x7fc0; 100];
        // SAFETY: AVX-512 is available.
        unsafe { decode512::decode(page, used, &mut halves, &mut got) };
        // Sketches are summed in another order: what is left of it after rounding is a step of BF16 at most, where
        // centroid and sketch do not cancel.
        let sketched = match codec.records(side) {
            Some(RecordCodec::TurboQuant(codec)) => codec.instances().iter().any(|i| i.sketch.is_some()),
            _ => false,
        };
        let halves = |tile: &Bf16Tile| -> Vec<f32> {
            tile.bytes().as_chunks().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f32()).collect()
        };
        for (i, (a, b)) in halves(&got).iter().zip(halves(&want)).enumerate() {
            let same =
                if sketched { (a - b).abs() <= b.abs() / 128.0 + 1e-5 } else { a.to_bits() == b.to_bits() };
            assert!(same, "{name} {side:?}, head {}, half {i}: {a} for {b}", codec.head_dim());
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn check_tile(_: &str, _: SidePage<'_>, _: u64, _: &[f32]) {}

    /// Three pages of a codec whose groups begin at `origin`, and every variant against the specification.
    fn check(name: &str, codec: &RowPageCodec, origin: usize) {
        let d = codec.head_dim();
        let tokens = 3 * PAGE_TOKENS;
        let all = rows(tokens * d, 9);
        let mut pages = vec![vec![0u8; codec.page_bytes()]; 3];
        for side in [Side::Key, Side::Value] {
            match codec.token_groups(side) {
                Some(groups) => {
                    let mut first = origin;
                    while first + groups.tokens() <= tokens {
                        let rows = &all[first * d..(first + groups.tokens()) * d];
                        codec
                            .encode_group(side, first, rows, |at, range, bytes| {
                                pages[at.block][range].copy_from_slice(bytes);
                            })
                            .unwrap();
                        first += groups.tokens();
                    }
                }
                None => {
                    for (page, rows) in pages.iter_mut().zip(all.chunks_exact(PAGE_TOKENS * d)) {
                        codec.encode_side_rows(side, 0, rows, page).unwrap();
                    }
                }
            }
        }
        let pages: Vec<Option<&[u8]>> = pages.iter().map(|p| Some(p.as_slice())).collect();
        // Official parameters multiply out in another order.
        let exact = codec.spec(Side::Key).scheme != Scheme::OfficialAffine;
        for side in [Side::Key, Side::Value] {
            for (block, used) in [(0, 0xffff_ffff_0000_0000u64), (1, u64::MAX), (1, 0x0ff1_0000_8000_0001)] {
                let page = SidePage { codec, side, pages: &pages, block, origin };
                let mut want = vec![0.0; PAGE_TOKENS * d];
                for (token, want) in want.chunks_exact_mut(d).enumerate().filter(|(t, _)| used >> t & 1 == 1)
                {
                    codec.decode_token(side, &pages, origin, block * PAGE_TOKENS + token, want).unwrap();
                }
                check_tile(name, page, used, &want);
                for variant in Variant::available() {
                    let mut got = vec![f32::NAN; PAGE_TOKENS * d];
                    decode_page(variant, page, used, &mut got, &mut [0; MAX_DIM]);
                    for (token, (got, want)) in got.chunks_exact(d).zip(want.chunks_exact(d)).enumerate() {
                        let same = |(a, b): (&f32, &f32)| {
                            if exact { a.to_bits() == b.to_bits() } else { (a - b).abs() <= 1e-5 }
                        };
                        assert!(
                            got.iter().zip(want).all(same),
                            "{variant} {name} {side:?}, head {d}, token {token}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn decoding_matches_scalar() {
        for format in KvFormat::all() {
            for d in [64, 80, 96, 128, 256] {
                for layout in [CodeLayout::Logical, CodeLayout::CpuTile, CodeLayout::Official] {
                    let Ok(codec) = format.codec(d, layout) else { continue };
                    check(&format!("{format} in {layout:?}"), &codec, 32);
                }
            }
        }
    }

    #[test]
    fn groups_of_channels_of_every_width_match_scalar() {
        for (bits, group) in [(1, 32), (2, 32), (2, 64), (3, 32), (3, 128), (4, 64), (8, 32)] {
            let codec = KvFormat::Int { bits, group }.codec(128, CodeLayout::CpuTile).unwrap();
            check(&format!("int{bits}-g{group}"), &codec, 0);
        }
    }

    #[test]
    fn sides_of_different_kinds_are_decoded_each_its_own_way() {
        let codec =
            RowPageCodec::new(128, SideSpec::BF16, SideSpec::affine(2, 0.9), CodeLayout::CpuTile).unwrap();
        check("bf16 keys", &codec, 0);
    }
}
