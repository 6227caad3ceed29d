//! AVX-512 expansion of FP8 and MXFP4 weights to BF16, bit for bit as the portable bodies do it.
//!
//! FP8: the products of one scale with the 128 magnitudes of E4M3 are a table of BF16 in four
//! registers, and two permutations look up 64 codes. Where each output has its own scale, the table
//! holds the magnitudes themselves, and the products are rounded by `vcvtneps2bf16`.
//!
//! MXFP4: the 16 values of a code are one register; products with a power of two are exact.

use std::arch::x86_64::*;

use super::portable;

/// Codes in a step: two inputs of 16 outputs.
const STEP: usize = 32;
const MAGNITUDES: usize = 128;
/// `vcvtneps2bf16` takes subnormals for zero. The smallest magnitude of E4M3 is 2⁻⁹, so products
/// with scales from here on are normal.
const SMALLEST_SCALE: f32 = f32::MIN_POSITIVE * 1024.0;

/// The BF16 of all magnitudes times a scale: their low bytes, then their high bytes.
pub(crate) struct Table([[__m512i; 2]; 2]);

impl Table {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    #[inline]
    pub(crate) fn new(scale: f32) -> Self {
        let mut words = [0_u16; MAGNITUDES];
        portable::scaled_magnitudes(scale, &mut words);
        let half = |shift: u32| {
            let bytes: [u8; MAGNITUDES] = std::array::from_fn(|i| (words[i] >> shift) as u8);
            let [first, second] = [&bytes[..64], &bytes[64..]];
            // SAFETY: each half has 64 bytes.
            unsafe { [_mm512_loadu_si512(first.as_ptr().cast()), _mm512_loadu_si512(second.as_ptr().cast())] }
        };
        Self([half(0), half(8)])
    }

    /// The BF16 of two steps of codes.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    #[inline]
    pub(crate) fn look_up(&self, codes: &[u8; 2 * STEP]) -> [__m512i; 2] {
        // Interleaving bytes works inside of quarters, so that each quarter takes eight codes of
        // either step.
        let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        // SAFETY: 64 bytes are read.
        let codes = unsafe { _mm512_loadu_si512(codes.as_ptr().cast()) };
        let codes = _mm512_permutexvar_epi64(order, codes);
        let [low, high] = self.0;
        // A permutation uses the lowest seven bits of a code; bit 7 is the sign.
        let low = _mm512_permutex2var_epi8(low[0], codes, low[1]);
        let high = _mm512_permutex2var_epi8(high[0], codes, high[1]);
        let high = _mm512_xor_si512(high, _mm512_and_si512(codes, _mm512_set1_epi8(i8::MIN)));
        [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
    }
}

/// Calls `expand` for every two steps; the last one may come with a step of zeros.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
#[inline]
fn each_two_steps(codes: &[u8], words: &mut [u32], expand: impl Fn(&[u8; 2 * STEP]) -> [__m512i; 2]) {
    let (pairs, rest) = codes.as_chunks::<{ 2 * STEP }>();
    let (to, last) = words.as_chunks_mut::<STEP>();
    for (codes, words) in pairs.iter().zip(to) {
        let [first, second] = expand(codes);
        // SAFETY: 128 bytes are written.
        unsafe {
            _mm512_storeu_si512(words.as_mut_ptr().cast(), first);
            _mm512_storeu_si512(words.as_mut_ptr().add(STEP / 2).cast(), second);
        }
    }
    if let (Ok(rest), Ok(last)) = (<&[u8; STEP]>::try_from(rest), <&mut [u32; STEP / 2]>::try_from(last)) {
        let mut codes = [0; 2 * STEP];
        codes[..STEP].copy_from_slice(rest);
        // SAFETY: 64 bytes are written.
        unsafe { _mm512_storeu_si512(last.as_mut_ptr().cast(), expand(&codes)[0]) };
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
pub(super) fn fp8(codes: &[u8], scales: &[f32; 16], words: &mut [u32]) {
    if scales.iter().all(|scale| scale.to_bits() == scales[0].to_bits()) {
        let table = Table::new(scales[0]);
        each_two_steps(codes, words, |codes| table.look_up(codes));
    } else if scales.iter().all(|scale| scale.abs() >= SMALLEST_SCALE || *scale == 0.0) {
        let table = Table::new(1.0);
        // SAFETY: 64 bytes are read.
        let scales = unsafe { _mm512_loadu_ps(scales.as_ptr()) };
        each_two_steps(codes, words, |codes| {
            let [first, second] = table.look_up(codes);
            [scaled(first, scales), scaled(second, scales)]
        });
    } else {
        portable::expand_fp8(codes, scales, words);
    }
}

/// Pairs of BF16 times the scale of their output, rounded.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
#[inline]
pub(crate) fn scaled(values: __m512i, scales: __m512) -> __m512i {
    let first = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(values));
    let second = _mm512_castsi512_ps(_mm512_and_si512(values, _mm512_set1_epi32(-1 << 16)));
    let (first, second) = (_mm512_mul_ps(first, scales), _mm512_mul_ps(second, scales));
    let (first, second) = (_mm512_cvtneps_pbh(first), _mm512_cvtneps_pbh(second));
    // SAFETY: both types are 256 plain bits.
    let (first, second) = unsafe {
        (std::mem::transmute::<__m256bh, __m256i>(first), std::mem::transmute::<__m256bh, __m256i>(second))
    };
    let (first, second) = (_mm512_cvtepu16_epi32(first), _mm512_cvtepu16_epi32(second));
    _mm512_or_si512(first, _mm512_slli_epi32::<16>(second))
}

/// The 16 values of an E2M1 code.
#[derive(Clone, Copy)]
pub(crate) struct Mxfp4Values(__m512);

impl Mxfp4Values {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    #[inline]
    pub(crate) fn new() -> Self {
        let values: [f32; 16] = std::array::from_fn(|code| portable::e2m1(code as u32));
        // SAFETY: 64 bytes are read.
        Self(unsafe { _mm512_loadu_ps(values.as_ptr()) })
    }

    /// The factors of 16 scales, as [`oscar_backend::mxfp4_factor`] defines them.
    ///
    /// # Safety
    /// 16 bytes are read.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    #[inline]
    pub(crate) unsafe fn factors(scales: *const u8) -> __m512 {
        // SAFETY: as the caller vouches.
        let scales = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(scales.cast()) });
        let is_zero = _mm512_cmpeq_epi32_mask(scales, _mm512_setzero_si512());
        let subnormal = _mm512_set1_epi32(1 << 22);
        let factors = _mm512_mask_blend_epi32(is_zero, _mm512_slli_epi32::<23>(scales), subnormal);
        _mm512_castsi512_ps(factors)
    }

    /// The BF16 pairs of two steps, a byte for each pair, times the factor of their output.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    #[inline]
    pub(crate) fn expand(self, codes: &[u8; STEP], factors: __m512) -> [__m512i; 2] {
        let [first, second] = [&codes[..16], &codes[16..]];
        // SAFETY: 16 bytes are read.
        let load = |codes: &[u8]| unsafe { _mm_loadu_si128(codes.as_ptr().cast()) };
        [self.step(load(first), factors), self.step(load(second), factors)]
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    #[inline]
    fn step(self, codes: __m128i, factors: __m512) -> __m512i {
        let codes = _mm512_cvtepu8_epi32(codes);
        // A permutation uses the lowest four bits.
        let first = _mm512_mul_ps(_mm512_permutexvar_ps(codes, self.0), factors);
        let second = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32::<4>(codes), self.0), factors);
        let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(first));
        let high = _mm512_and_si512(_mm512_castps_si512(second), _mm512_set1_epi32(-1 << 16));
        _mm512_or_si512(low, high)
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
pub(super) fn mxfp4(codes: &[u8], factors: &[f32; 16], words: &mut [u32]) {
    let values = Mxfp4Values::new();
    // SAFETY: 64 bytes are read.
    let factors = unsafe { _mm512_loadu_ps(factors.as_ptr()) };
    for (codes, words) in codes.as_chunks::<16>().0.iter().zip(words.as_chunks_mut::<16>().0) {
        // SAFETY: 16 bytes are read and 64 written.
        unsafe {
            let codes = _mm_loadu_si128(codes.as_ptr().cast());
            _mm512_storeu_si512(words.as_mut_ptr().cast(), values.step(codes, factors));
        }
    }
}
