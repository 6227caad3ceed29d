//! The softmax of a page on AVX-512 with weights of one byte.
//!
//! As in [`super::softmax`] everything is relative to the page's own maximum. The weights `p ·
//! scale` of a row are rounded to 0..=255 of their largest. The rounding error of their sum is
//! added back at the middle code, so that a flat tail keeps its mass even if its weights round to
//! zero.

use std::arch::x86_64::*;

use super::softmax::{accumulate, exp2, fade_rows, maxima, move_maxima, prefetch, tile_mask};
use crate::attention::block::{BYTE_MAX, ROWS, RowBlock, middle_code};
use crate::attention::page::PageView;

/// Limit, in log2, of how far the page's largest weight may lie below its largest score. Scales are
/// fp16, so beyond this the weights belong to tokens that hardly count.
const LARGEST_LEAD: f32 = 30.0;

/// 2^x for x in −126..=0 to 1.1e-4, a fortieth of a byte's step, and 2^-126 for NaN and all below.
#[inline]
#[target_feature(enable = "avx512f")]
fn exp2_coarse(x: __m512) -> __m512i {
    // Adding it rounds to an integer in the low bits of the float.
    let magic = _mm512_set1_ps(12_582_912.0);
    // The second operand wins where the first is NaN.
    let x = _mm512_max_ps(x, _mm512_set1_ps(-126.0));
    let whole = _mm512_add_ps(x, magic);
    let part = _mm512_sub_ps(x, _mm512_sub_ps(whole, magic));
    let mut y = _mm512_set1_ps(5.500_893e-2);
    for c in [2.422_11e-1, 6.932_829e-1, 1.0] {
        y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(c));
    }
    // The integer goes to the exponent; what is above it in the magic number leaves at the top.
    _mm512_add_epi32(_mm512_castps_si512(y), _mm512_slli_epi32::<23>(_mm512_castps_si512(whole)))
}

/// log2 to 0.006; −∞ for 0.
#[inline]
#[target_feature(enable = "avx512f")]
fn log2_rough(x: __m512) -> __m512 {
    let m = _mm512_getmant_ps::<_MM_MANT_NORM_1_2, _MM_MANT_SIGN_ZERO>(x);
    let y = _mm512_fmadd_ps(m, _mm512_set1_ps(-0.335_828_8), _mm512_set1_ps(2.0));
    let y = _mm512_fmadd_ps(y, m, _mm512_set1_ps(-1.658_710_2));
    _mm512_add_ps(y, _mm512_getexp_ps(x))
}

/// Whether every row reads every token, so that nothing has to be masked. Padding rows may then
/// come to anything.
#[inline]
fn reads_whole_page(block: &RowBlock) -> bool {
    block.masks[..block.rows.min(ROWS)].iter().all(|&mask| mask == u64::MAX)
}

/// The largest scores of the page's tokens, and the largest of their weights `p · scale` as log2, a
/// lane a row.
#[inline]
#[target_feature(enable = "avx512f")]
fn largest<const R: usize, const WHOLE: bool>(block: &RowBlock, scales: &[__m512; 4]) -> (__m512, __m512) {
    let lowest = _mm512_set1_ps(f32::NEG_INFINITY);
    let (mut scores, mut weights) = ([lowest; R], [lowest; R]);
    let log_scales: [__m512; 4] = std::array::from_fn(|tile| log2_rough(scales[tile]));
    for row in 0..R {
        for tile in 0..4 {
            // SAFETY: 64 scores are four vectors.
            let s = unsafe { _mm512_loadu_ps(block.scores[row].as_ptr().add(16 * tile)) };
            let tokens = if WHOLE { u16::MAX } else { tile_mask(block.masks[row], tile) };
            let w = _mm512_add_ps(s, log_scales[tile]);
            scores[row] = _mm512_mask_max_ps(scores[row], tokens, scores[row], s);
            weights[row] = _mm512_mask_max_ps(weights[row], tokens, weights[row], w);
        }
    }
    (maxima(&scores), maxima(&weights))
}

/// Scales and minima of a page's values.
#[inline]
#[target_feature(enable = "avx512f,f16c")]
fn value_params(view: &PageView<'_>, minima: bool) -> [__m512; 4] {
    assert_eq!(view.value_params.len(), 256);
    let first = if minima { 32 } else { 0 };
    // SAFETY: a page has 64 scales and 64 minima of 2 bytes, by tiles of 16 scales and 16 minima.
    std::array::from_fn(|tile| unsafe {
        _mm512_cvtph_ps(_mm256_loadu_si256(view.value_params.as_ptr().add(64 * tile + first).cast()))
    })
}

/// Moves the running maxima to the page's and says in `entry` how the page enters. What was
/// accumulated is left as it is, and so are the weights of the page before.
///
/// The largest weight is known before the weights are, to half a percent, from scores and
/// logarithms: a weight is rounded as soon as it is computed, and one that comes out above 255 is
/// cut, which the correction of the sum covers.
#[target_feature(enable = "avx512f,avx512dq,f16c")]
pub(in crate::attention) fn find_maxima<const R: usize>(block: &mut RowBlock, view: &PageView<'_>) {
    prefetch(view.value_params.as_ptr(), view.ahead, 256);
    let scales = value_params(view, false);
    let (page_max, largest) = match reads_whole_page(block) {
        true => largest::<R, true>(block, &scales),
        false => largest::<R, false>(block, &scales),
    };
    let moves = move_maxima(block, page_max);
    // Rows without any weight may have any factor.
    let lead = _mm512_min_ps(_mm512_sub_ps(page_max, largest), _mm512_set1_ps(LARGEST_LEAD));
    let up = _mm512_mul_ps(exp2(lead), _mm512_set1_ps(BYTE_MAX));
    let down = _mm512_div_ps(_mm512_set1_ps(1.0), up);
    let entry = &mut block.entry;
    entry.moved = moves.moved;
    for (to, from) in [
        (&mut entry.page_max, page_max),
        (&mut entry.factor, moves.page),
        (&mut entry.fading, moves.fading),
        (&mut entry.to_bytes, up),
        (&mut entry.from_bytes, down),
    ] {
        // SAFETY: sixteen floats.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), from) };
    }
}

/// Scores to weights `p · scale` as bytes of the page's largest, with `Σ p` and `Σ p·min` on the
/// side, once [`find_maxima`] has filled `entry`.
///
/// The bytes of a row lie in the first of its two rows of `w_codes`, four tokens together, by quads
/// of a tile and then by tiles: packing within quarters of a register leaves them so.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
pub(in crate::attention) fn weigh_codes<const BITS: u32, const R: usize>(
    block: &mut RowBlock,
    view: &PageView<'_>,
) {
    match reads_whole_page(block) {
        true => weigh::<BITS, R, true>(block, view),
        false => weigh::<BITS, R, false>(block, view),
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
fn weigh<const BITS: u32, const R: usize, const WHOLE: bool>(block: &mut RowBlock, view: &PageView<'_>) {
    assert!(R <= ROWS);
    let scales = value_params(view, false);
    // The value of the middle code: all weights are first counted at it.
    let mut middles = value_params(view, true);
    let middle = _mm512_set1_ps(middle_code(BITS));
    for (middle_value, &scale) in middles.iter_mut().zip(&scales) {
        *middle_value = _mm512_fmadd_ps(scale, middle, *middle_value);
    }
    let fading = block.entry.fading;
    fade_rows::<R>(block, block.entry.moved, &fading);
    // SAFETY: sixteen floats each.
    unsafe {
        let down = _mm512_loadu_ps(block.entry.from_bytes.as_ptr());
        let step = _mm512_mul_ps(down, _mm512_loadu_ps(block.entry.factor.as_ptr()));
        _mm512_storeu_ps(block.w_step.as_mut_ptr(), step);
    }

    // A row that leaves the page out goes through the same arithmetic with a factor of 0, which
    // changes nothing.
    for row in 0..R {
        let entry = &block.entry;
        let (max, up) = (_mm512_set1_ps(entry.page_max[row]), _mm512_set1_ps(entry.to_bytes[row]));
        let (factor, down) = (entry.factor[row], middle_code(BITS) * entry.from_bytes[row]);
        let zero = _mm512_setzero_ps();
        let (mut total, mut shared) = (zero, zero);
        let mut fixed = [_mm512_setzero_si512(); 4];
        for (tile, fixed) in fixed.iter_mut().enumerate() {
            // SAFETY: 64 scores are four vectors.
            let s = unsafe { _mm512_loadu_ps(block.scores[row].as_ptr().add(16 * tile)) };
            // Scores and parameters of masked tokens may be anything.
            let tokens = if WHOLE { u16::MAX } else { tile_mask(block.masks[row], tile) };
            let bits = exp2_coarse(_mm512_sub_ps(s, max));
            let p = _mm512_castsi512_ps(_mm512_maskz_mov_epi32(tokens, bits));
            total = _mm512_add_ps(total, p);
            shared = _mm512_mask3_fmadd_ps(p, middles[tile], shared, tokens);
            let w = _mm512_maskz_mul_ps(tokens, p, scales[tile]);
            *fixed = _mm512_cvtps_epi32(_mm512_mul_ps(w, up));
        }
        let (a, b) = (_mm512_packus_epi32(fixed[0], fixed[1]), _mm512_packus_epi32(fixed[2], fixed[3]));
        let bytes = _mm512_packus_epi16(a, b);
        // SAFETY: a row of bytes is one vector.
        unsafe { _mm512_storeu_si512(block.w_codes[2 * row].as_mut_ptr().cast(), bytes) };
        let kept = _mm512_dpbusd_epi32(_mm512_setzero_si512(), bytes, _mm512_set1_epi8(1));
        // What goes by its codes is taken back.
        let shared = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(kept), _mm512_set1_ps(down), shared);
        accumulate(&mut block.sum[row], factor, total);
        accumulate(&mut block.shared[row], factor, shared);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Variant;

    #[target_feature(enable = "avx512f")]
    fn check_approximations() {
        let exp2 = |x: f32| _mm512_cvtss_f32(_mm512_castsi512_ps(exp2_coarse(_mm512_set1_ps(x))));
        for i in 0..12600 {
            let x = -(i as f32) * 0.01;
            let (ours, exact) = (exp2(x), f64::from(x).exp2() as f32);
            assert!((ours - exact).abs() <= exact * 1.1e-4, "2^{x}: {ours} {exact}");
        }
        assert_eq!(exp2(0.0), 1.0);
        for i in 1..4000 {
            let x = i as f32 * i as f32 * 6e-8;
            let ours = _mm512_cvtss_f32(log2_rough(_mm512_set1_ps(x)));
            assert!((ours - x.log2()).abs() < 6e-3, "log2 {x}: {ours}");
        }
        assert_eq!(_mm512_cvtss_f32(log2_rough(_mm512_setzero_ps())), f32::NEG_INFINITY);
        for x in [-127.0, -1e9, f32::MIN, f32::NEG_INFINITY, f32::NAN] {
            assert_eq!(exp2(x), f32::MIN_POSITIVE, "2^{x}");
        }
    }

    #[test]
    fn approximations_are_as_good_as_they_say() {
        if Variant::Avx512.is_available() {
            // SAFETY: the variant is available.
            unsafe { check_approximations() };
        }
    }
}
