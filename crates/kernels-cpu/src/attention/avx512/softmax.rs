//! The softmax of a page on AVX-512, shared by the code and BF16 kernels of the AVX-512 and AMX
//! variants.
//!
//! Weights of a page are taken relative to the page's own maximum, `p = 2^(s − page max)`, and the
//! page enters the running state by one factor a row, `2^(page max − running max)`. So the
//! precision of a weight never depends on pages read before, and a long flat tail keeps its mass.

use std::arch::x86_64::*;

use crate::attention::block::{FIXED_MAX, LANES, NEGLIGIBLE, ROWS, RowBlock, TINY, middle_code};
use crate::attention::page::PageView;

/// 2^x to about one unit in the last place; 0 for NaN and for x below −126 or so.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::attention) fn exp2(x: __m512) -> __m512 {
    // The second operand wins where the first is NaN.
    let x = _mm512_max_ps(x, _mm512_set1_ps(-200.0));
    let whole = _mm512_roundscale_ps::<0x08>(x);
    let part = _mm512_sub_ps(x, whole);
    let mut y = _mm512_set1_ps(1.535_336_2e-4);
    for c in [1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 2.402_264_8e-1, 6.931_472e-1, 1.0] {
        y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(c));
    }
    _mm512_scalef_ps(y, whole)
}

/// How a page enters the running state of each row, a lane a row.
struct Factors {
    page_max: [f32; LANES],
    /// Factor of the page's weights; zero leaves the page out.
    page: __m512,
}

/// The 16 tokens of a tile that a row reads.
#[inline]
pub(in crate::attention) fn tile_mask(mask: u64, tile: usize) -> __mmask16 {
    (mask >> (16 * tile)) as u16
}

/// The largest element of each of up to eight vectors, in the lane of its number. Lanes beyond
/// repeat others.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::attention) fn maxima<const R: usize>(v: &[__m512; R]) -> __m512 {
    let at = |i: usize| v[i % R];
    let pair = |a: __m512, b: __m512| _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let four = |i: usize| {
        let a = _mm512_castps_pd(pair(at(i), at(i + 1)));
        let b = _mm512_castps_pd(pair(at(i + 2), at(i + 3)));
        let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
        _mm512_max_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))
    };
    // Each quarter of `low` has four rows' maxima of a quarter; quarters are folded next.
    let (low, high) = (four(0), four(4));
    let even = _mm512_shuffle_f32x4::<0x88>(low, high);
    let halves = _mm512_max_ps(even, _mm512_shuffle_f32x4::<0xdd>(low, high));
    let all = _mm512_max_ps(halves, _mm512_shuffle_f32x4::<0xb1>(halves, halves));
    _mm512_shuffle_f32x4::<0x88>(all, all)
}

/// Finds the page's maximum of each row and how the page enters by it.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn factors<const R: usize>(block: &mut RowBlock) -> Factors {
    let lowest = _mm512_set1_ps(f32::NEG_INFINITY);
    let mut row_maxima = [lowest; R];
    for (row, max) in row_maxima.iter_mut().enumerate() {
        let scores = block.scores[row].as_ptr();
        for tile in 0..4 {
            // SAFETY: 64 scores are four vectors.
            let s = unsafe { _mm512_loadu_ps(scores.add(16 * tile)) };
            *max = _mm512_mask_max_ps(*max, tile_mask(block.masks[row], tile), *max, s);
        }
    }
    let page_max = maxima(&row_maxima);
    let moves = move_maxima(block, page_max);
    let (mut all, mut fading) = (Factors { page_max: [0.0; LANES], page: moves.page }, [0.0; LANES]);
    // SAFETY: sixteen floats each.
    unsafe {
        _mm512_storeu_ps(all.page_max.as_mut_ptr(), page_max);
        _mm512_storeu_ps(fading.as_mut_ptr(), moves.fading);
    }
    fade_rows::<R>(block, moves.moved, &fading);
    all
}

/// The effect of a page's maxima on the running ones, one lane for each row.
pub(in crate::attention) struct Moves {
    /// Factor of the page's weights; zero leaves the page out.
    pub page: __m512,
    /// Factor of the sums of earlier pages, for the rows in `moved`.
    pub fading: __m512,
    pub moved: __mmask16,
}

/// Moves the running maxima to a page's, a lane a row. Rows that read nothing of the page keep
/// their state: their page factor is 0.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(in crate::attention) fn move_maxima(block: &mut RowBlock, page_max: __m512) -> Moves {
    // SAFETY: an array of sixteen floats.
    let (before, now) = unsafe {
        let before = _mm512_loadu_ps(block.max.as_ptr());
        let now = _mm512_max_ps(before, page_max);
        _mm512_storeu_ps(block.max.as_mut_ptr(), now);
        (before, now)
    };
    let distance = _mm512_sub_ps(page_max, now);
    // False for NaN too: −∞ − −∞ of a row that has read nothing yet.
    let counts = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(distance, _mm512_set1_ps(NEGLIGIBLE));
    block.any_weight = counts != 0;
    // Either the page or the earlier pages have the new maximum; the other is this far below.
    let below = exp2(_mm512_min_ps(distance, _mm512_sub_ps(before, now)));
    let moved = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(page_max, before);
    Moves {
        page: _mm512_maskz_mov_ps(counts, _mm512_mask_mov_ps(below, moved, _mm512_set1_ps(1.0))),
        fading: below,
        moved,
    }
}

/// Scales down sums that were accumulated below maxima that moved.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::attention) fn fade_rows<const R: usize>(
    block: &mut RowBlock,
    moved: __mmask16,
    fading: &[f32; LANES],
) {
    if moved != 0 {
        (0..R).filter(|row| moved >> row & 1 == 1).for_each(|row| fade(block, row, fading[row]));
    }
}

/// Multiplies what a row has accumulated by `factor`.
#[inline]
#[target_feature(enable = "avx512f")]
fn fade(block: &mut RowBlock, row: usize, factor: f32) {
    let f = _mm512_set1_ps(factor);
    let out = block.out[row].as_mut_ptr();
    for slab in 0..block.head_dim / LANES {
        // SAFETY: the head's channels are inside the row.
        unsafe {
            let at = out.add(LANES * slab);
            _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), f));
        }
    }
    for sums in [&mut block.sum[row], &mut block.shared[row]] {
        // SAFETY: sixteen floats.
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), _mm512_mul_ps(_mm512_loadu_ps(sums.as_ptr()), f)) };
    }
}

/// Weights of a page's tokens relative to the page's maximum, zero where masked.
#[inline]
#[target_feature(enable = "avx512f")]
fn weights(block: &RowBlock, row: usize, page_max: f32) -> [__m512; 4] {
    let (scores, mask) = (block.scores[row].as_ptr(), block.masks[row]);
    let max = _mm512_set1_ps(page_max);
    std::array::from_fn(|tile| {
        // SAFETY: 64 scores are four vectors.
        let s = unsafe { _mm512_loadu_ps(scores.add(16 * tile)) };
        _mm512_maskz_mov_ps(tile_mask(mask, tile), exp2(_mm512_sub_ps(s, max)))
    })
}

/// Adds `factor · v` to sixteen partial sums.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::attention) fn accumulate(sums: &mut [f32; LANES], factor: f32, v: __m512) {
    // SAFETY: sixteen floats.
    unsafe {
        let sum = _mm512_fmadd_ps(_mm512_set1_ps(factor), v, _mm512_loadu_ps(sums.as_ptr()));
        _mm512_storeu_ps(sums.as_mut_ptr(), sum);
    }
}

/// Scores to fixed-point weights `p · scale` of the value codes, with `Σ p` and `Σ p·min` on the
/// side.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,f16c")]
pub(in crate::attention) fn weigh_codes<const BITS: u32, const R: usize>(
    block: &mut RowBlock,
    view: &PageView<'_>,
) {
    assert!(R <= ROWS && view.value_params.len() == 256);
    let params = view.value_params.as_ptr();
    prefetch(params, view.ahead, 256);
    // SAFETY: a page has 64 scales and 64 minima of 2 bytes, by tiles of 16 scales and 16 minima.
    let (scales, minima_of_rows): ([__m512; 4], [__m512; 4]) = unsafe {
        let load = |at: usize| _mm512_cvtph_ps(_mm256_loadu_si256(params.add(at).cast()));
        (std::array::from_fn(|tile| load(64 * tile)), std::array::from_fn(|tile| load(64 * tile + 32)))
    };
    let factors = factors::<R>(block);
    if !block.any_weight {
        return;
    }
    let mut page = [0.0; LANES];
    // SAFETY: sixteen floats.
    unsafe { _mm512_storeu_ps(page.as_mut_ptr(), factors.page) };

    // A row that leaves the page out goes through the same arithmetic with a factor of 0, which
    // changes nothing.
    let mut largest = [_mm512_setzero_ps(); R];
    let mut shared = [_mm512_setzero_ps(); R];
    for row in 0..R {
        let mask = block.masks[row];
        let p = weights(block, row, factors.page_max[row]);
        for tile in 0..4 {
            // Parameters of masked tokens may be anything.
            let tokens = tile_mask(mask, tile);
            shared[row] = _mm512_mask3_fmadd_ps(p[tile], minima_of_rows[tile], shared[row], tokens);
            let w = _mm512_maskz_mul_ps(tokens, p[tile], scales[tile]);
            largest[row] = _mm512_max_ps(largest[row], w);
            // SAFETY: the scores have been read; their place holds the weights.
            unsafe { _mm512_storeu_ps(block.scores[row].as_mut_ptr().add(16 * tile), w) };
        }
        let total = _mm512_add_ps(_mm512_add_ps(p[0], p[1]), _mm512_add_ps(p[2], p[3]));
        accumulate(&mut block.sum[row], page[row], total);
    }

    // `fixed_point_step` of every row at once.
    let (mut steps, mut inverses) = ([0.0; LANES], [0.0; LANES]);
    let largest = maxima(&largest);
    let some = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(largest, _mm512_set1_ps(TINY));
    let full = _mm512_set1_ps(FIXED_MAX);
    let step = _mm512_maskz_div_ps(some, largest, full);
    // SAFETY: sixteen floats each.
    unsafe {
        _mm512_storeu_ps(steps.as_mut_ptr(), step);
        _mm512_storeu_ps(inverses.as_mut_ptr(), _mm512_maskz_div_ps(some, full, largest));
        _mm512_storeu_ps(block.w_step.as_mut_ptr(), _mm512_mul_ps(step, factors.page));
    }
    for row in 0..R {
        let rest = split_weights(block, row, steps[row], inverses[row]);
        let shared = _mm512_fmadd_ps(rest, _mm512_set1_ps(middle_code(BITS)), shared[row]);
        accumulate(&mut block.shared[row], page[row], shared);
    }
}

/// Rounds a row's weights to fixed point, writes both bytes, and returns partial sums of the
/// rounding errors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn split_weights(block: &mut RowBlock, row: usize, step: f32, inverse: f32) -> __m512 {
    /// Even elements of two vectors in order: the low halves of 32-bit lanes, or the low bytes of
    /// 16-bit ones.
    const EVEN_WORDS: [u16; 32] = {
        let mut index = [0; 32];
        let mut i = 0;
        while i < 32 {
            index[i] = 2 * i as u16;
            i += 1;
        }
        index
    };
    const EVEN_BYTES: [u8; 64] = {
        let mut index = [0; 64];
        let mut i = 0;
        while i < 64 {
            index[i] = 2 * i as u8;
            i += 1;
        }
        index
    };
    let (step, inverse) = (_mm512_set1_ps(step), _mm512_set1_ps(inverse));
    let mut rest = _mm512_setzero_ps();
    let mut fixed = [_mm512_setzero_si512(); 4];
    for (tile, fixed) in fixed.iter_mut().enumerate() {
        // SAFETY: 64 weights are four vectors.
        let w = unsafe { _mm512_loadu_ps(block.scores[row].as_ptr().add(16 * tile)) };
        *fixed = _mm512_cvtps_epi32(_mm512_mul_ps(w, inverse));
        rest = _mm512_add_ps(rest, _mm512_fnmadd_ps(_mm512_cvtepi32_ps(*fixed), step, w));
    }
    // SAFETY: constants and rows of 64 bytes.
    unsafe {
        let words = _mm512_loadu_si512(EVEN_WORDS.as_ptr().cast::<__m512i>());
        let bytes = _mm512_loadu_si512(EVEN_BYTES.as_ptr().cast::<__m512i>());
        let a = _mm512_permutex2var_epi16(fixed[0], words, fixed[1]);
        let b = _mm512_permutex2var_epi16(fixed[2], words, fixed[3]);
        // The low byte as it is, signed; the high byte of what is then left, `(fixed + 128) / 256`.
        let lo = _mm512_permutex2var_epi8(a, bytes, b);
        let round = _mm512_set1_epi16(128);
        let (a, b) = (_mm512_add_epi16(a, round), _mm512_add_epi16(b, round));
        let odd = _mm512_add_epi8(bytes, _mm512_set1_epi8(1));
        let hi = _mm512_permutex2var_epi8(a, odd, b);
        _mm512_storeu_si512(block.w_codes[2 * row].as_mut_ptr().cast(), hi);
        _mm512_storeu_si512(block.w_codes[2 * row + 1].as_mut_ptr().cast(), lo);
    }
    rest
}

/// Scores to BF16 weights. The sum is that of the rounded weights, so that rounding does not change
/// the total.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(in crate::attention) fn weigh_bf16<const R: usize>(block: &mut RowBlock, _: &PageView<'_>) {
    assert!(R <= ROWS);
    let factors = factors::<R>(block);
    // SAFETY: sixteen floats.
    unsafe { _mm512_storeu_ps(block.w_step.as_mut_ptr(), factors.page) };
    for row in 0..R {
        let p = weights(block, row, factors.page_max[row]);
        let mut total = _mm512_setzero_ps();
        for tile in 0..4 {
            // SAFETY: a vector of sixteen BF16 is 256 bits; a row of 64 holds four of them.
            unsafe {
                let rounded: __m256i = std::mem::transmute(_mm512_cvtneps_pbh(p[tile]));
                _mm256_storeu_si256(block.w_bf16[row].as_mut_ptr().add(16 * tile).cast(), rounded);
                let back = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(rounded));
                total = _mm512_add_ps(total, _mm512_castsi512_ps(back));
            }
        }
        let page = block.w_step[row];
        accumulate(&mut block.sum[row], page, total);
    }
}

/// Asks for `bytes` bytes at `ahead` bytes from `at`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::attention) fn prefetch(at: *const u8, ahead: isize, bytes: usize) {
    let mut line = 0;
    while line < bytes {
        // SAFETY: a prefetch reads nothing and never faults, whatever the address. (Newer compilers
        // call it safe.)
        #[allow(unused_unsafe)]
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(at.wrapping_offset(ahead).wrapping_add(line).cast());
        }
        line += 64;
    }
}
