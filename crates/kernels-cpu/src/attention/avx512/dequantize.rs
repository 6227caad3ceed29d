//! Quantized pages as BF16 tiles on AVX-512, for every codec that has no kernel of its own.
//!
//! Codes placed by [`CodeLayout::CpuTile`] already lie as the tile wants them, a lane for a token
//! (keys) or a channel (values): each lane's word is shifted, its code looked up, scaled and
//! rounded. Sides stored row by row go through [`rows`](super::rows).
//!
//! Invariant: the tile is that of the rows `RowPageCodec::dequantize_token` defines, rounded to
//! BF16, to the bit; values below the normal numbers become zero, as the BF16 products would make
//! them. Tokens that are not asked for come out as zeros.

use std::arch::x86_64::*;

use oscar_codec::page::Scheme;
use oscar_codec::{CodeLayout, RowPageCodec, Side, TILE_TOKENS};

use super::rows;
use crate::attention::block::{LANES, MAX_DIM};
use crate::attention::dequantize::SidePage;
use crate::attention::tile::Bf16Tile;

/// Groups of channels a head may have.
const MAX_GROUPS: usize = MAX_DIM / 32;
/// Words of sixteen pairs.
const LINE: usize = LANES;

/// Whether [`dequantize`] reads this side.
pub(in crate::attention) fn reads(codec: &RowPageCodec, side: Side) -> bool {
    if codec.is_mapped(side) {
        // Five bits have kernels that read codes; where these do not apply, the plain way will do.
        codec.spec(side).is_coded() && codec.spec(side).bits != 5 && codec.layout() == CodeLayout::CpuTile
    } else {
        rows::reads(codec, side)
    }
}

/// Dequantizes the tokens in `used`. `halves` is room to keep from call to call.
///
/// # Panics
/// If [`reads`] does not hold.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(in crate::attention) fn dequantize(
    page: SidePage<'_>,
    used: u64,
    halves: &mut Vec<u16>,
    tile: &mut Bf16Tile,
) {
    let SidePage { codec, side, .. } = page;
    assert!(reads(codec, side), "a side that AVX-512 dequantizes");
    let words = tile.words_mut(codec.head_dim());
    if let Some(next) = page.pages.get(page.block + 1).copied().flatten() {
        fetch(&next[codec.codes_range(side)]);
        fetch(&next[codec.params_range(side)]);
    }
    if !codec.is_mapped(side) {
        return rows::dequantize(page, used, halves, words);
    }
    let bytes = page.bytes();
    let spec = codec.spec(side);
    let codes = 1 << spec.bits.min(4);
    let mapped = Mapped {
        d: codec.head_dim(),
        groups: codec.groups(side),
        codes: &bytes[codec.codes_range(side)],
        params: &bytes[codec.params_range(side)],
        scheme: spec.scheme,
        levels: std::array::from_fn(|code| codec.level(side, (code % codes) as u8)),
        used,
    };
    let official = spec.scheme == Scheme::OfficialAffine;
    match (side, spec.bits, official) {
        (Side::Key, 1, _) => mapped.keys::<1, 1, false>(words),
        (Side::Key, 2, true) => mapped.keys::<2, 2, true>(words),
        (Side::Key, 2, false) => mapped.keys::<2, 2, false>(words),
        (Side::Key, 3, _) => mapped.keys::<3, 2, false>(words),
        (Side::Key, 4, _) => mapped.keys::<4, 4, false>(words),
        (Side::Key, ..) => mapped.keys::<8, 8, false>(words),
        (Side::Value, 1, _) => mapped.values::<1, 1, false>(words),
        (Side::Value, 2, true) => mapped.values::<2, 2, true>(words),
        (Side::Value, 2, false) => mapped.values::<2, 2, false>(words),
        (Side::Value, 3, _) => mapped.values::<3, 2, false>(words),
        (Side::Value, 4, _) => mapped.values::<4, 4, false>(words),
        (Side::Value, ..) => mapped.values::<8, 8, false>(words),
    }
}

/// Prefetches the bytes that are dequantized next: pages lie apart, so the processor cannot predict
/// them.
fn fetch(bytes: &[u8]) {
    for line in bytes.chunks(64) {
        // SAFETY: prefetches never fault.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
    }
}

/// One side whose codes lie in tiles.
struct Mapped<'a> {
    d: usize,
    groups: usize,
    codes: &'a [u8],
    params: &'a [u8],
    scheme: Scheme,
    /// The levels of codes before scale and offset, repeated: a lookup need not mask the bits above
    /// a code.
    levels: [f32; LANES],
    used: u64,
}

/// Scale and offset of each lane; in the official format the second is the zero point.
#[derive(Clone, Copy)]
struct Pair {
    scale: __m512,
    second: __m512,
}

/// `BITS` is the width of codes, `WIDTH` that of their first set of planes: 2 for three bits, whose
/// top bit lies apart.
impl Mapped<'_> {
    fn row_bytes<const BITS: u32>(&self) -> usize {
        self.d * BITS as usize / 8
    }

    /// A tile's codes: the first set of planes and the one of top bits.
    fn tile<const BITS: u32>(&self, tile: usize) -> (&[u8], &[u8]) {
        let bytes = TILE_TOKENS * self.row_bytes::<BITS>();
        let codes = &self.codes[tile * bytes..][..bytes];
        codes.split_at(if BITS == 3 { TILE_TOKENS * self.d / 4 } else { bytes })
    }

    /// Parameters of sixteen tokens.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    fn pair(&self, tile: usize, group: usize) -> Pair {
        let first = (tile * self.groups + group) * 2 * TILE_TOKENS;
        if self.scheme == Scheme::OfficialAffine {
            let at = &self.params[4 * first..][..8 * TILE_TOKENS];
            let (scale, second) = at.split_at(4 * TILE_TOKENS);
            // SAFETY: sixteen 32-bit floats each.
            let load = |at: &[u8]| unsafe { _mm512_loadu_ps(at.as_ptr().cast()) };
            return Pair { scale: load(scale), second: load(second) };
        }
        let at = &self.params[2 * first..][..4 * TILE_TOKENS];
        let (scale, second) = at.split_at(2 * TILE_TOKENS);
        // SAFETY: sixteen halves each.
        let load = |at: &[u8]| unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.as_ptr().cast())) };
        let (scale, second) = (load(scale), load(second));
        if self.scheme == Scheme::RoundedZero {
            let zero = _mm512_xor_ps(second, _mm512_set1_ps(-0.0));
            return Pair { scale, second: _mm512_mul_ps(zero, scale) };
        }
        Pair { scale, second }
    }

    /// Levels of the codes at `shift` in each lane of `low`, their top bits, if apart, at `top` in
    /// `high`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn level<const BITS: u32>(
        levels: __m512,
        (low, shift): (__m512i, u32),
        (high, top): (__m512i, u32),
    ) -> __m512 {
        let at = |word, shift: u32| _mm512_srlv_epi32(word, _mm512_set1_epi32(shift as i32));
        let code = at(low, shift);
        match BITS {
            8 => _mm512_cvtepi32_ps(_mm512_and_si512(code, _mm512_set1_epi32(0xff))),
            3 => {
                let top = _mm512_and_si512(at(high, top), _mm512_set1_epi32(1));
                let low = _mm512_and_si512(code, _mm512_set1_epi32(3));
                _mm512_permutexvar_ps(_mm512_or_si512(low, _mm512_slli_epi32::<2>(top)), levels)
            }
            _ => _mm512_permutexvar_ps(code, levels),
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    fn keys<const BITS: u32, const WIDTH: u32, const OFFICIAL: bool>(&self, words: &mut [u32]) {
        let d = self.d;
        let channels = 32 / WIDTH as usize;
        let levels = load_floats(&self.levels);
        for (tile, words) in words.chunks_exact_mut(TILE_TOKENS / 2 * d).enumerate() {
            let keep = (self.used >> (TILE_TOKENS * tile)) as u16;
            if keep == 0 {
                words.fill(0);
                continue;
            }
            let (low, high) = self.tile::<BITS>(tile);
            for (line, out) in words.chunks_exact_mut(channels / 2 * LINE).enumerate() {
                let first = line * channels;
                let pair = self.pair(tile, first * self.groups / d);
                let word = load_line(low, line);
                let top = if BITS == 3 { load_line(high, first / 32) } else { word };
                for (i, out) in out.as_chunks_mut::<LINE>().0.iter_mut().enumerate() {
                    // Byte `i` of plane `j` is channel `4j + i`.
                    let at = |channel: usize| {
                        let shift =
                            |channel: usize, width| 8 * (channel as u32 % 4) + width * (channel as u32 / 4);
                        let top_shift = shift((first + channel) % 32, 1);
                        Self::level::<BITS>(levels, (word, shift(channel, WIDTH)), (top, top_shift))
                    };
                    let halves = pair_halves::<OFFICIAL>([at(2 * i), at(2 * i + 1)], [pair, pair]);
                    store_line(out, _mm512_maskz_mov_epi32(keep, halves));
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    fn values<const BITS: u32, const WIDTH: u32, const OFFICIAL: bool>(&self, words: &mut [u32]) {
        let d = self.d;
        let levels = load_floats(&self.levels);
        let mut scales = [[0f32; TILE_TOKENS]; MAX_GROUPS];
        let mut seconds = [[0f32; TILE_TOKENS]; MAX_GROUPS];
        for (tile, words) in words.chunks_exact_mut(TILE_TOKENS / 2 * d).enumerate() {
            let used = self.used >> (TILE_TOKENS * tile) & 0xffff;
            if used == 0 {
                words.fill(0);
                continue;
            }
            for group in 0..self.groups {
                let pair = self.pair(tile, group);
                // SAFETY: room for sixteen floats each.
                unsafe {
                    _mm512_storeu_ps(scales[group].as_mut_ptr(), pair.scale);
                    _mm512_storeu_ps(seconds[group].as_mut_ptr(), pair.second);
                }
            }
            let (low, high) = self.tile::<BITS>(tile);
            for slab in 0..d / LANES {
                let group = slab * LANES * self.groups / d;
                let (scales, seconds) = (&scales[group], &seconds[group]);
                let splat = |token: usize| Pair {
                    scale: _mm512_set1_ps(scales[token]),
                    second: _mm512_set1_ps(seconds[token]),
                };
                for pair in 0..TILE_TOKENS / 2 {
                    // Byte `i` of plane `j` is token `4j + i`.
                    let at = |token: usize| {
                        let (line, shift) = value_place::<WIDTH>(slab, token);
                        let (top_line, top) = value_place::<1>(slab, token);
                        let word = load_line(low, line);
                        let high = if BITS == 3 { load_line(high, top_line) } else { word };
                        Self::level::<BITS>(levels, (word, shift), (high, top))
                    };
                    let halves = pair_halves::<OFFICIAL>(
                        [at(2 * pair), at(2 * pair + 1)],
                        [splat(2 * pair), splat(2 * pair + 1)],
                    );
                    let keep = [0, 0xffff, 0xffff_0000, u32::MAX][(used >> (2 * pair) & 3) as usize];
                    let out = &mut words[pair * d + slab * LANES..];
                    if let Some(out) = out.first_chunk_mut() {
                        store_line(out, _mm512_and_si512(halves, _mm512_set1_epi32(keep as i32)));
                    }
                }
            }
        }
    }
}

/// Line and bit of a token's codes in the planes of a slab of sixteen channels.
#[inline(always)]
fn value_place<const WIDTH: u32>(slab: usize, token: usize) -> (usize, u32) {
    let (quad, planes) = (token / 4, 8 / WIDTH as usize);
    let (line, plane) = match WIDTH {
        1 => (slab / 2, quad + 4 * (slab % 2)),
        _ => (slab * (4 / planes) + quad / planes, quad % planes),
    };
    (line, 8 * (token as u32 % 4) + WIDTH * plane as u32)
}

/// Two values a lane, rounded to BF16: the first in the low half.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn pair_halves<const OFFICIAL: bool>([low, high]: [__m512; 2], [first, second]: [Pair; 2]) -> __m512i {
    let value = |level, pair: Pair| {
        if OFFICIAL {
            _mm512_mul_ps(_mm512_sub_ps(level, pair.second), pair.scale)
        } else {
            _mm512_add_ps(_mm512_mul_ps(pair.scale, level), pair.second)
        }
    };
    let halves = round_halves(value(low, first), value(high, second));
    // SAFETY: 64 bytes of indices.
    let turn = unsafe { _mm512_loadu_si512(INTERLEAVE.as_ptr().cast()) };
    _mm512_permutexvar_epi16(turn, halves)
}

/// Half `2i` comes from lane `i` of the first sixteen, half `2i + 1` from that of the second.
static INTERLEAVE: [u16; 32] = {
    let mut turn = [0; 32];
    let mut i = 0;
    while i < 32 {
        turn[i] = (i / 2 + 16 * (i % 2)) as u16;
        i += 1;
    }
    turn
};

/// Thirty-two values as BF16, `low` first.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(in crate::attention) fn round_halves(low: __m512, high: __m512) -> __m512i {
    // SAFETY: both types are 512 plain bits.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::attention) fn load_floats(floats: &[f32; LANES]) -> __m512 {
    // SAFETY: sixteen floats.
    unsafe { _mm512_loadu_ps(floats.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_line(bytes: &[u8], line: usize) -> __m512i {
    let line = &bytes[64 * line..][..64];
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_si512(line.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::attention) fn store_line(out: &mut [u32; LINE], line: __m512i) {
    // SAFETY: 64 bytes.
    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), line) }
}
