//! The softmax of a page on AVX2, shared by the code and BF16 kernels: as in the AVX-512 variant,
//! weights of a page are relative to the page's own maximum.

use std::arch::x86_64::*;

use crate::attention::block::{
    BYTE_MAX, FIXED_MAX, LANES, NEGLIGIBLE, RowBlock, fixed_point_step, middle_code,
};
use crate::attention::page::PageView;
use oscar_codec::PAGE_TOKENS;

/// 32-bit lanes of a vector.
const WIDTH: usize = 8;
/// Vectors of a page's tokens.
const VECTORS: usize = PAGE_TOKENS / WIDTH;

type Page = [__m256; VECTORS];

/// 2^x for x ≤ 0 to about one unit in the last place; 0 for NaN and below −126.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn exp2(x: __m256) -> __m256 {
    let lowest = _mm256_set1_ps(-126.0);
    let normal = _mm256_cmp_ps::<_CMP_GT_OQ>(x, lowest);
    // The second operand wins where the first is NaN.
    let x = _mm256_max_ps(x, lowest);
    let whole = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let part = _mm256_sub_ps(x, whole);
    let mut y = _mm256_set1_ps(1.535_336_2e-4);
    for c in [1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 2.402_264_8e-1, 6.931_472e-1, 1.0] {
        y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(c));
    }
    let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    let power = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent));
    _mm256_and_ps(normal, _mm256_mul_ps(y, power))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn exp2_one(x: f32) -> f32 {
    _mm256_cvtss_f32(exp2(_mm256_set1_ps(x)))
}

/// All ones in the lanes of vector `i` whose tokens are in the mask.
#[inline]
#[target_feature(enable = "avx2")]
fn lanes_in(mask: u64, i: usize) -> __m256 {
    let bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    let byte = _mm256_set1_epi32((mask >> (WIDTH * i) & 0xff) as i32);
    _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(byte, bits), bits))
}

#[inline]
#[target_feature(enable = "avx2")]
fn largest_lane(v: __m256) -> f32 {
    let half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
    _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps::<1>(pair, pair)))
}

/// Adds `factor · v` to sixteen partial sums.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn accumulate(sums: &mut [f32; LANES], factor: f32, v: [__m256; 2]) {
    for (i, v) in v.into_iter().enumerate() {
        // SAFETY: two vectors of eight floats.
        unsafe {
            let at = sums.as_mut_ptr().add(WIDTH * i);
            _mm256_storeu_ps(at, _mm256_fmadd_ps(_mm256_set1_ps(factor), v, _mm256_loadu_ps(at)));
        }
    }
}

/// Moves a row's maximum, fading what was accumulated below it, and returns the page's factor and
/// its weights; `None` if the row gives the page no weight.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn weigh_row(block: &mut RowBlock, row: usize) -> Option<(f32, Page)> {
    let mask = block.masks[row];
    let lowest = _mm256_set1_ps(f32::NEG_INFINITY);
    let mut max = lowest;
    let scores: Page = std::array::from_fn(|i| {
        // SAFETY: 64 scores are eight vectors.
        let s = unsafe { _mm256_loadu_ps(block.scores[row].as_ptr().add(WIDTH * i)) };
        let s = _mm256_blendv_ps(lowest, s, lanes_in(mask, i));
        max = _mm256_max_ps(max, s);
        s
    });
    let (page_max, before) = (largest_lane(max), block.max[row]);
    if page_max == f32::NEG_INFINITY || page_max - before < NEGLIGIBLE {
        return None;
    }
    let mut factor = 1.0;
    if page_max > before {
        let fading = exp2_one(before - page_max);
        block.max[row] = page_max;
        block.sum[row].iter_mut().for_each(|s| *s *= fading);
        block.shared[row].iter_mut().for_each(|s| *s *= fading);
        block.out[row][..block.head_dim].iter_mut().for_each(|o| *o *= fading);
    } else {
        factor = exp2_one(page_max - before);
    }
    let mut totals = [_mm256_setzero_ps(); 2];
    let p: Page = std::array::from_fn(|i| {
        let p = exp2(_mm256_sub_ps(scores[i], _mm256_set1_ps(page_max)));
        totals[i % 2] = _mm256_add_ps(totals[i % 2], p);
        p
    });
    accumulate(&mut block.sum[row], factor, totals);
    Some((factor, p))
}

/// Scores to f32 weights, for BF16 pages.
#[target_feature(enable = "avx2,fma")]
pub(in crate::attention) fn weigh_f32(block: &mut RowBlock, _: &PageView<'_>) {
    block.any_weight = false;
    for row in 0..block.rows {
        let weighed = weigh_row(block, row);
        block.any_weight |= weighed.is_some();
        let (factor, p) = weighed.unwrap_or((0.0, [_mm256_setzero_ps(); VECTORS]));
        block.w_step[row] = factor;
        for (i, p) in p.into_iter().enumerate() {
            // SAFETY: room for 64 floats is eight vectors.
            unsafe { _mm256_storeu_ps(block.scores[row].as_mut_ptr().add(WIDTH * i), p) };
        }
    }
}

/// Scores to fixed-point weights `p · scale` of the value codes, with `Σ p` and `Σ p·min` on the
/// side: two bytes each,
/// `256·hi + lo`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::attention) fn weigh_codes<const BITS: u32>(block: &mut RowBlock, view: &PageView<'_>) {
    weigh_fixed::<BITS>(block, view, FIXED_MAX, |rows, fixed| {
        for half in 0..2 {
            let hi: [__m256i; 4] = std::array::from_fn(|i| {
                _mm256_srai_epi32::<8>(_mm256_add_epi32(fixed[4 * half + i], _mm256_set1_epi32(128)))
            });
            // The low byte, signed.
            let lo: [__m256i; 4] = std::array::from_fn(|i| {
                _mm256_srai_epi32::<24>(_mm256_slli_epi32::<24>(fixed[4 * half + i]))
            });
            for (which, quarters) in [hi, lo].into_iter().enumerate() {
                let to = rows[which].as_mut_ptr();
                // SAFETY: a row of 64 bytes has two halves of 32.
                unsafe { _mm256_storeu_si256(to.add(32 * half).cast(), bytes_of(quarters)) };
            }
        }
    });
}

/// The same with one unsigned byte, in the first of a row's two rows of `w_codes`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::attention) fn weigh_bytes<const BITS: u32>(block: &mut RowBlock, view: &PageView<'_>) {
    weigh_fixed::<BITS>(block, view, BYTE_MAX, |rows, fixed| {
        for half in 0..2 {
            let quarters = std::array::from_fn(|i| fixed[4 * half + i]);
            // SAFETY: as in `weigh_codes`.
            unsafe {
                let to = rows[0].as_mut_ptr().add(32 * half);
                _mm256_storeu_si256(to.cast(), unsigned_bytes_of(quarters));
            }
        }
    });
}

/// Weights as integers up to `fixed_max`, the page's largest of each row. `store` writes a row's
/// two rows of bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn weigh_fixed<const BITS: u32>(
    block: &mut RowBlock,
    view: &PageView<'_>,
    fixed_max: f32,
    store: impl Fn(&mut [[i8; PAGE_TOKENS]], [__m256i; VECTORS]),
) {
    assert_eq!(view.value_params.len(), 4 * PAGE_TOKENS);
    // SAFETY: tiles of 16 scales and 16 minima of 2 bytes, eight at a time.
    let load = |i: usize, which: usize| unsafe {
        let at = view.value_params.as_ptr().add(64 * (i / 2) + 32 * which + 16 * (i % 2));
        _mm256_cvtph_ps(_mm_loadu_si128(at.cast()))
    };
    let scales: Page = std::array::from_fn(|i| load(i, 0));
    let minima: Page = std::array::from_fn(|i| load(i, 1));
    block.any_weight = false;
    for row in 0..block.rows {
        let Some((factor, p)) = weigh_row(block, row) else {
            block.w_step[row] = 0.0;
            block.w_codes[2 * row].fill(0);
            block.w_codes[2 * row + 1].fill(0);
            continue;
        };
        block.any_weight = true;
        let mut shared = [_mm256_setzero_ps(); 2];
        let mut largest = _mm256_setzero_ps();
        let w: Page = std::array::from_fn(|i| {
            // Parameters of masked tokens may be anything.
            let read = lanes_in(block.masks[row], i);
            let w = _mm256_and_ps(read, _mm256_mul_ps(p[i], scales[i]));
            shared[i % 2] = _mm256_add_ps(shared[i % 2], _mm256_and_ps(read, _mm256_mul_ps(p[i], minima[i])));
            largest = _mm256_max_ps(largest, w);
            w
        });
        let (step, inverse) = fixed_point_step(largest_lane(largest), fixed_max);
        block.w_step[row] = factor * step;
        let mut rest = [_mm256_setzero_ps(); 2];
        let fixed: [__m256i; VECTORS] = std::array::from_fn(|i| {
            let fixed = _mm256_cvtps_epi32(_mm256_mul_ps(w[i], _mm256_set1_ps(inverse)));
            let lost = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(fixed), _mm256_set1_ps(step), w[i]);
            rest[i % 2] = _mm256_add_ps(rest[i % 2], lost);
            fixed
        });
        let middle = _mm256_set1_ps(middle_code(BITS));
        let shared = std::array::from_fn(|i| _mm256_fmadd_ps(rest[i], middle, shared[i]));
        accumulate(&mut block.shared[row], factor, shared);
        store(&mut block.w_codes[2 * row..2 * row + 2], fixed);
    }
}

/// 32 integers that fit a byte as bytes, in order.
#[inline]
#[target_feature(enable = "avx2")]
fn bytes_of(v: [__m256i; 4]) -> __m256i {
    let (a, b) = (_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    // Packing works within halves of a register: put the quarters back in order.
    _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
}

/// The same for integers in 0..=255.
#[inline]
#[target_feature(enable = "avx2")]
fn unsigned_bytes_of(v: [__m256i; 4]) -> __m256i {
    let (a, b) = (_mm256_packus_epi32(v[0], v[1]), _mm256_packus_epi32(v[2], v[3]));
    _mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, b), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Variant;

    #[target_feature(enable = "avx2,fma")]
    fn check_exp2() {
        for i in 0..4000 {
            let x = -(i as f32) * 0.0301;
            let (ours, exact) = (exp2_one(x), f64::from(x).exp2() as f32);
            assert!((ours - exact).abs() <= exact * 3e-7, "2^{x}: {ours} {exact}");
        }
        assert_eq!((exp2_one(f32::NEG_INFINITY), exp2_one(f32::NAN), exp2_one(0.0)), (0.0, 0.0, 1.0));
    }

    #[test]
    fn exp2_is_accurate() {
        if Variant::Avx2.is_available() {
            // SAFETY: the variant is available.
            unsafe { check_exp2() };
        }
    }
}
