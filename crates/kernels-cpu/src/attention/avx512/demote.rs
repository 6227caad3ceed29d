//! Demotion on AVX-512, in the operations and the order of the scalar specification.
//!
//! Keys lie with a token in each lane, so sixteen rows are quantized side by side and every
//! statistic is vertical. Values lie with a channel in each lane: statistics are taken row by row,
//! codes slab by slab. Magnitudes of BF16 are 15-bit integers, so the order statistic is found bit
//! by bit, counting.
//!
//! With query-aware rounding ([`super::rounding`]) levels are chosen before they are packed; they
//! replace the values.
//!
//! A row whose stored minimum would be zero or subnormal, where the sign of zero and the flush mode
//! matter, is left to the specification: [`demote`] returns false before it has written anything.

use std::arch::x86_64::*;

use oscar_codec::affine::{self, SATURATION, max_code};
use oscar_codec::clip::order_index;
use oscar_codec::{RowPageCodec, Side, TILE_TOKENS};

use crate::attention::block::{LANES, MAX_DIM};

/// Rows of one side of a tile, clamped, with a lane for each token (keys) or channel (values), and
/// the pair of each token.
#[repr(C, align(64))]
pub(in crate::attention) struct Rows {
    /// `[channel][token]` for keys, `[token][channel]` for values.
    pub(in crate::attention) x: [f32; TILE_TOKENS * MAX_DIM],
    /// BF16 magnitudes: `[channel pair][token][2]` for keys, `[token][channel]` for values.
    magnitudes: [u16; TILE_TOKENS * MAX_DIM],
    pub(in crate::attention) scale: [f32; TILE_TOKENS],
    pub(in crate::attention) min: [f32; TILE_TOKENS],
    /// `x` before it was clipped, where codes are rounded.
    pub(in crate::attention) raw: [f32; TILE_TOKENS * MAX_DIM],
    /// `x` holds levels instead of values.
    pub(in crate::attention) levelled: bool,
}

/// Quantizes a tile; false if it has to go through the specification.
///
/// # Safety
/// AVX-512 F, BW, VL and DQ; both pages of their codecs' size in tile order, the full one BF16, the
/// coded one affine with one group on both sides; the tile exists.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c,popcnt")]
pub(in crate::attention) unsafe fn demote(
    full: &RowPageCodec,
    full_page: &[u8],
    coded: &RowPageCodec,
    coded_page: &mut [u8],
    tile: usize,
) -> bool {
    let d = full.head_dim();
    let zero = || Rows {
        x: [0.0; TILE_TOKENS * MAX_DIM],
        magnitudes: [0; TILE_TOKENS * MAX_DIM],
        scale: [0.0; TILE_TOKENS],
        min: [0.0; TILE_TOKENS],
        raw: [0.0; TILE_TOKENS * MAX_DIM],
        levelled: false,
    };
    let (mut keys, mut values) = (zero(), zero());
    let tile_of = |side| {
        let range = full.codes_range(side);
        &full_page[range][tile * 2 * TILE_TOKENS * d..][..2 * TILE_TOKENS * d]
    };
    let (key_spec, value_spec) = (coded.spec(Side::Key), coded.spec(Side::Value));
    keys.load_keys(tile_of(Side::Key), d, order_index(key_spec.clip, d));
    values.load_values(tile_of(Side::Value), d, order_index(value_spec.clip, d));
    if !(keys.key_params(d, key_spec.bits) && values.value_params(d, value_spec.bits)) {
        return false;
    }
    let (key_rounding, value_rounding) = (coded.rounding(Side::Key), coded.rounding(Side::Value));
    if !key_rounding.is_nearest() {
        keys.round_keys(d, key_spec.bits, key_rounding.feedback.as_ref());
        if key_rounding.refits(key_spec.bits) && !keys.refit_keys(d) {
            return false;
        }
    }
    if !value_rounding.is_nearest() {
        values.round_values(d, value_spec.bits);
        if value_rounding.refits(value_spec.bits) && !values.refit_values(d) {
            return false;
        }
    }
    for (side, rows, bits) in [(Side::Key, &keys, key_spec.bits), (Side::Value, &values, value_spec.bits)] {
        let codes = coded.codes_range(side);
        let size = codes.len() / 4;
        let codes = &mut coded_page[codes][tile * size..(tile + 1) * size];
        match bits {
            1 => rows.write_codes::<1>(side, d, codes),
            2 => rows.write_codes::<2>(side, d, codes),
            3 => rows.write_codes::<3>(side, d, codes),
            4 => rows.write_codes::<4>(side, d, codes),
            5 => rows.write_codes::<5>(side, d, codes),
            _ => rows.write_codes::<8>(side, d, codes),
        }
        let params = coded.params_range(side);
        let params = &mut coded_page[params][tile * 64..(tile + 1) * 64];
        rows.write_params(params);
    }
    true
}

/// NaN becomes 0, the rest is clamped to ± the largest magnitude the pair can hold.
#[inline]
#[target_feature(enable = "avx512f")]
fn sanitize(x: __m512) -> __m512 {
    let x = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_ORD_Q>(x, x), x);
    clamp(x, _mm512_set1_ps(SATURATION))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn clamp(x: __m512, limit: __m512) -> __m512 {
    let below = _mm512_sub_ps(_mm512_setzero_ps(), limit);
    _mm512_max_ps(_mm512_min_ps(x, limit), below)
}

/// Magnitudes of BF16 in order: NaN counts as 0, everything that saturates is equal.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn magnitude(bits: __m512i) -> __m512i {
    // 0x4700 is 32768, the first BF16 beyond the saturation value; 0x7f80 is infinity.
    let m = _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff));
    let number = _mm512_cmple_epu16_mask(m, _mm512_set1_epi16(0x7f80));
    _mm512_maskz_min_epu16(number, m, _mm512_set1_epi16(0x4700))
}

/// The value a magnitude stands for.
#[inline]
#[target_feature(enable = "avx512f")]
fn threshold_value(magnitude: __m512i) -> __m512 {
    let value = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(magnitude));
    _mm512_min_ps(value, _mm512_set1_ps(SATURATION))
}

impl Rows {
    /// Widens a tile of keys, `[channel pair][16 tokens][2]`, and clips each row at its order
    /// statistic.
    #[target_feature(enable = "avx512f,avx512bw")]
    fn load_keys(&mut self, tile: &[u8], d: usize, order: Option<usize>) {
        for (pair, line) in tile.chunks_exact(64).enumerate() {
            // SAFETY: lines of 64 bytes; two vectors of sixteen floats for each channel pair of up
            // to 128.
            unsafe {
                let bits = _mm512_loadu_si512(line.as_ptr().cast::<__m512i>());
                _mm512_storeu_si512(self.magnitudes.as_mut_ptr().add(32 * pair).cast(), magnitude(bits));
                let odd = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32 as i32));
                let even = _mm512_slli_epi32::<16>(bits);
                let to = self.x.as_mut_ptr().add(2 * LANES * pair);
                _mm512_storeu_ps(to, sanitize(_mm512_castsi512_ps(even)));
                _mm512_storeu_ps(to.add(LANES), sanitize(_mm512_castsi512_ps(odd)));
            }
        }
        self.raw[..LANES * d].copy_from_slice(&self.x[..LANES * d]);
        let Some(order) = order else { return };
        // Largest t with at most `order` magnitudes below it, bit by bit: that is the order
        // statistic.
        let mut t = _mm512_setzero_si512();
        for bit in (0..15).rev() {
            let candidate = _mm512_or_si512(t, _mm512_set1_epi32(1 << bit));
            let both = _mm512_or_si512(candidate, _mm512_slli_epi32::<16>(candidate));
            let mut below = _mm512_setzero_si512();
            for pair in 0..d / 2 {
                // SAFETY: as stored above.
                let m =
                    unsafe { _mm512_loadu_si512(self.magnitudes.as_ptr().add(32 * pair).cast::<__m512i>()) };
                let less = _mm512_cmplt_epu16_mask(m, both);
                below = _mm512_mask_sub_epi16(below, less, below, _mm512_set1_epi16(-1));
            }
            let low = _mm512_and_si512(below, _mm512_set1_epi32(0xffff));
            let count = _mm512_add_epi32(low, _mm512_srli_epi32::<16>(below));
            let keep = _mm512_cmple_epi32_mask(count, _mm512_set1_epi32(order as i32));
            t = _mm512_mask_mov_epi32(t, keep, candidate);
        }
        let limit = threshold_value(t);
        for channel in self.x[..LANES * d].chunks_exact_mut(LANES) {
            // SAFETY: sixteen floats.
            unsafe {
                let x = _mm512_loadu_ps(channel.as_ptr());
                _mm512_storeu_ps(channel.as_mut_ptr(), clamp(x, limit));
            }
        }
    }

    /// Widens a tile of values, `[token pair][channel][2]`, and clips each row at its order
    /// statistic.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,popcnt")]
    fn load_values(&mut self, tile: &[u8], d: usize, order: Option<usize>) {
        let slabs = d / LANES;
        for (i, line) in tile.chunks_exact(64).enumerate() {
            let (pair, slab) = (i / slabs, i % slabs);
            // SAFETY: lines of 64 bytes; rows of d floats and d magnitudes for each of sixteen
            // tokens.
            unsafe {
                let bits = _mm512_loadu_si512(line.as_ptr().cast::<__m512i>());
                let m = magnitude(bits);
                let odd = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32 as i32));
                let even = _mm512_slli_epi32::<16>(bits);
                let at = 2 * pair * d + LANES * slab;
                _mm512_storeu_ps(self.x.as_mut_ptr().add(at), sanitize(_mm512_castsi512_ps(even)));
                _mm512_storeu_ps(self.x.as_mut_ptr().add(at + d), sanitize(_mm512_castsi512_ps(odd)));
                let to = self.magnitudes.as_mut_ptr();
                _mm256_storeu_si256(to.add(at).cast(), _mm512_cvtepi32_epi16(m));
                let high = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(m));
                _mm256_storeu_si256(to.add(at + d).cast(), high);
            }
        }
        self.raw[..LANES * d].copy_from_slice(&self.x[..LANES * d]);
        let Some(order) = order else { return };
        for token in 0..TILE_TOKENS {
            let row = &self.magnitudes[token * d..(token + 1) * d];
            let mut t = 0_i32;
            for bit in (0..15).rev() {
                let candidate = t | 1 << bit;
                let limit = _mm256_set1_epi16(candidate as i16);
                let mut below = 0;
                for slab in row.chunks_exact(LANES) {
                    // SAFETY: sixteen magnitudes of 2 bytes.
                    let m = unsafe { _mm256_loadu_si256(slab.as_ptr().cast()) };
                    below += _mm256_cmplt_epu16_mask(m, limit).count_ones();
                }
                t = if below as usize <= order { candidate } else { t };
            }
            let limit = threshold_value(_mm512_set1_epi32(t));
            for slab in self.x[token * d..(token + 1) * d].chunks_exact_mut(LANES) {
                // SAFETY: sixteen floats.
                unsafe {
                    let x = _mm512_loadu_ps(slab.as_ptr());
                    _mm512_storeu_ps(slab.as_mut_ptr(), clamp(x, limit));
                }
            }
        }
    }

    /// Scale and minimum of each key row; false if a row must be left to the specification.
    #[target_feature(enable = "avx512f,avx512dq,avx512vl,f16c")]
    fn key_params(&mut self, d: usize, bits: u32) -> bool {
        // SAFETY: a channel is sixteen floats.
        let channel = |c: usize| unsafe { _mm512_loadu_ps(self.x.as_ptr().add(LANES * c)) };
        let (scale, min) = if bits == 1 {
            let n = _mm512_set1_ps(d as f32);
            let mut sums = [_mm512_setzero_ps(); LANES];
            for c in 0..d {
                sums[c % LANES] = _mm512_add_ps(sums[c % LANES], channel(c));
            }
            let mean = _mm512_div_ps(halve(sums), n);
            let mut sums = [_mm512_setzero_ps(); LANES];
            for c in 0..d {
                let distance = _mm512_abs_ps(_mm512_sub_ps(channel(c), mean));
                sums[c % LANES] = _mm512_add_ps(sums[c % LANES], distance);
            }
            let deviation = _mm512_div_ps(halve(sums), n);
            (_mm512_mul_ps(_mm512_set1_ps(2.0), deviation), _mm512_sub_ps(mean, deviation))
        } else {
            let (mut min, mut max) = (channel(0), channel(0));
            for c in 1..d {
                min = _mm512_min_ps(min, channel(c));
                max = _mm512_max_ps(max, channel(c));
            }
            (_mm512_div_ps(_mm512_sub_ps(max, min), _mm512_set1_ps(max_code(bits) as f32)), min)
        };
        // SAFETY: sixteen floats each.
        unsafe {
            _mm512_storeu_ps(self.scale.as_mut_ptr(), scale);
            _mm512_storeu_ps(self.min.as_mut_ptr(), min);
        }
        self.round_params()
    }

    /// Scale and minimum of each value row; false if a row must be left to the specification.
    #[target_feature(enable = "avx512f,avx512dq,avx512vl,f16c")]
    fn value_params(&mut self, d: usize, bits: u32) -> bool {
        for token in 0..TILE_TOKENS {
            let row = &self.x[token * d..(token + 1) * d];
            // SAFETY: a slab is sixteen floats.
            let slab = |s: usize| unsafe { _mm512_loadu_ps(row.as_ptr().add(LANES * s)) };
            (self.scale[token], self.min[token]) = if bits == 1 {
                let n = d as f32;
                let sum = (0..d / LANES).fold(_mm512_setzero_ps(), |sum, s| _mm512_add_ps(sum, slab(s)));
                let mean = halve_lanes(sum) / n;
                let sum = (0..d / LANES).fold(_mm512_setzero_ps(), |sum, s| {
                    _mm512_add_ps(sum, _mm512_abs_ps(_mm512_sub_ps(slab(s), _mm512_set1_ps(mean))))
                });
                let deviation = halve_lanes(sum) / n;
                (2.0 * deviation, mean - deviation)
            } else {
                let (mut min, mut max) = (slab(0), slab(0));
                for s in 1..d / LANES {
                    min = _mm512_min_ps(min, slab(s));
                    max = _mm512_max_ps(max, slab(s));
                }
                let (min, max) = (_mm512_reduce_min_ps(min), _mm512_reduce_max_ps(max));
                ((max - min) / max_code(bits) as f32, min)
            };
        }
        self.round_params()
    }

    /// Rounds the pairs to fp16 and back; false if a minimum is not a normal number.
    #[inline]
    #[target_feature(enable = "avx512f,f16c")]
    fn round_params(&mut self) -> bool {
        let regular = self.min.iter().all(|min| min.is_normal());
        for values in [&mut self.scale, &mut self.min] {
            // SAFETY: sixteen floats.
            unsafe {
                let half = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_loadu_ps(values.as_ptr()));
                _mm512_storeu_ps(values.as_mut_ptr(), _mm512_cvtph_ps(half));
            }
        }
        regular
    }

    #[target_feature(enable = "avx512f,f16c")]
    fn write_params(&self, params: &mut [u8]) {
        for (values, bytes) in [&self.scale, &self.min].into_iter().zip(params.chunks_exact_mut(32)) {
            // SAFETY: sixteen floats to sixteen fp16 of 2 bytes; the values are fp16 already.
            unsafe {
                let half = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_loadu_ps(values.as_ptr()));
                _mm256_storeu_si256(bytes.as_mut_ptr().cast(), half);
            }
        }
    }

    /// Quantizes and packs all units of the tile.
    #[target_feature(enable = "avx512f,avx512dq,avx512bw")]
    fn write_codes<const BITS: u32>(&self, side: Side, d: usize, codes: &mut [u8]) {
        let mut store = |base: usize, line: usize, v: __m512i| {
            let bytes = &mut codes[base + 64 * line..][..64];
            // SAFETY: 64 bytes.
            unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), v) };
        };
        let zero = _mm512_setzero_si512();
        let mut one_bit = zero;
        for unit in 0..d / LANES {
            let mut lines = [zero; 4];
            let start = 4 * (unit % 2);
            if unit % 2 == 0 {
                one_bit = zero;
            }
            for e in 0..LANES {
                let code = self.quantize::<BITS>(side, d, unit, e);
                let (quad, byte) = (e / 4, 8 * (e % 4));
                let put = |line: __m512i, v: __m512i, shift: usize| {
                    _mm512_or_si512(line, _mm512_sll_epi32(v, _mm_cvtsi32_si128(shift as i32)))
                };
                match BITS {
                    1 => one_bit = put(one_bit, code, byte + start + quad),
                    2 => lines[0] = put(lines[0], code, byte + 2 * quad),
                    3 => {
                        let low = _mm512_and_si512(code, _mm512_set1_epi32(3));
                        lines[0] = put(lines[0], low, byte + 2 * quad);
                        one_bit = put(one_bit, _mm512_srli_epi32::<2>(code), byte + start + quad);
                    }
                    4 => lines[quad / 2] = put(lines[quad / 2], code, byte + 4 * (quad % 2)),
                    5 => {
                        let low = _mm512_and_si512(code, _mm512_set1_epi32(15));
                        lines[quad / 2] = put(lines[quad / 2], low, byte + 4 * (quad % 2));
                        one_bit = put(one_bit, _mm512_srli_epi32::<4>(code), byte + start + quad);
                    }
                    _ => lines[quad] = put(lines[quad], code, byte),
                }
            }
            match BITS {
                1 => store(0, unit / 2, one_bit),
                2 => store(0, unit, lines[0]),
                3 => {
                    store(0, unit, lines[0]);
                    store(4 * d, unit / 2, one_bit);
                }
                4 => (0..2).for_each(|i| store(0, 2 * unit + i, lines[i])),
                5 => {
                    (0..2).for_each(|i| store(0, 2 * unit + i, lines[i]));
                    store(8 * d, unit / 2, one_bit);
                }
                _ => (0..4).for_each(|i| store(0, 4 * unit + i, lines[i])),
            }
        }
    }

    /// Codes of element `e` of a unit: one channel of sixteen tokens, or one token of sixteen
    /// channels.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    fn quantize<const BITS: u32>(&self, side: Side, d: usize, unit: usize, e: usize) -> __m512i {
        // SAFETY: sixteen floats of an existing channel or token.
        let (x, scale, min) = unsafe {
            match side {
                Side::Key => (
                    _mm512_loadu_ps(self.x.as_ptr().add(LANES * (LANES * unit + e))),
                    _mm512_loadu_ps(self.scale.as_ptr()),
                    _mm512_loadu_ps(self.min.as_ptr()),
                ),
                Side::Value => (
                    _mm512_loadu_ps(self.x.as_ptr().add(e * d + LANES * unit)),
                    _mm512_set1_ps(self.scale[e]),
                    _mm512_set1_ps(self.min[e]),
                ),
            }
        };
        let level = if self.levelled { x } else { level(x, scale, min, max_code(BITS) as f32) };
        _mm512_cvttps_epi32(level)
    }
}

/// The nearest level, or 0 where the row has no spread: `AffineParams::code` before it becomes an
/// integer.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(in crate::attention) fn level(x: __m512, scale: __m512, min: __m512, top: f32) -> __m512 {
    let spread = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(scale, _mm512_setzero_ps());
    let level = _mm512_add_ps(_mm512_div_ps(_mm512_sub_ps(x, min), scale), _mm512_set1_ps(0.5));
    let level = _mm512_roundscale_ps::<0x09>(level);
    let level = _mm512_max_ps(level, _mm512_setzero_ps());
    _mm512_maskz_min_ps(spread, level, _mm512_set1_ps(top))
}

/// Halves added to halves, vector by vector: the end of `oscar_codec::affine::lane_sum`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::attention) fn halve(mut sums: [__m512; LANES]) -> __m512 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            sums[i] = _mm512_add_ps(sums[i], sums[i + half]);
        }
        half /= 2;
    }
    sums[0]
}

/// The same within one vector.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::attention) fn halve_lanes(sum: __m512) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    // SAFETY: sixteen floats.
    unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), sum) };
    affine::halve(lanes)
}
