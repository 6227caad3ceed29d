//! BF16 pages on AVX-512: `vdpbf16ps` with keys `[channel pair][16 tokens][2]` and values
//! `[token pair][channel][2]`.
//!
//! Queries and weights are rounded to BF16, products are exact and sums are f32. Each sum takes its
//! pairs in order, whatever the number of rows.

use std::arch::x86_64::*;

use super::codes::by_rows;
use super::softmax::weigh_bf16;
use crate::attention::block::{LANES, MAX_ROW, RowBlock};
use crate::attention::page::{PageView, Stages};
use oscar_codec::PAGE_TOKENS;

pub(in crate::attention) fn stages(rows: usize) -> Stages {
    Stages {
        score: by_rows!(rows, score),
        weigh: by_rows!(rows, weigh_bf16),
        add_values: by_rows!(rows, add_values),
        find_maxima: None,
    }
}

/// Two BF16 as the bits of one lane, in every lane.
///
/// # Safety
/// `at` and the element after it must be readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn broadcast(at: *const u16) -> __m512bh {
    // SAFETY: as the caller vouches; both types are 512 plain bits.
    unsafe { std::mem::transmute(_mm512_set1_epi32(at.cast::<i32>().read_unaligned())) }
}

/// # Safety
/// 64 bytes must be readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn load(at: *const u8) -> __m512bh {
    // SAFETY: as the caller vouches; both types are 512 plain bits.
    unsafe { std::mem::transmute(_mm512_loadu_si512(at.cast::<__m512i>())) }
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn score<const R: usize>(block: &mut RowBlock, view: &PageView<'_>) {
    assert_eq!(view.keys.len(), PAGE_TOKENS * block.head_dim * 2);
    // SAFETY: the page's four tiles, as asserted.
    unsafe {
        if R <= 4 {
            score_tiles::<R, 4>(block, view, 0);
        } else {
            score_tiles::<R, 2>(block, view, 0);
            score_tiles::<R, 2>(block, view, 2);
        }
    }
}

/// # Safety
/// Keys of tiles `first..first + T` must be in the page.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn score_tiles<const R: usize, const T: usize>(
    block: &mut RowBlock,
    view: &PageView<'_>,
    first: usize,
) {
    let d = block.head_dim;
    let mut sums = [[_mm512_setzero_ps(); T]; R];
    let queries = block.q_bf16.as_ptr().cast::<u16>();
    for pair in 0..d / 2 {
        // SAFETY: a tile is d/2 lines of 64 bytes; rows of queries hold MAX_ROW elements.
        // Prefetches never fault.
        unsafe {
            let keys: [__m512bh; T] = std::array::from_fn(|t| {
                let at = view.keys.as_ptr().add((first + t) * 32 * d + 64 * pair);
                // The values of this page are next: a line of them for each line of keys.
                let offset = (first + t) * 32 * d + 64 * pair;
                _mm_prefetch::<_MM_HINT_T1>(view.values.as_ptr().wrapping_add(offset).cast());
                load(at)
            });
            for row in 0..R {
                let q = broadcast(queries.add(row * MAX_ROW + 2 * pair));
                for t in 0..T {
                    sums[row][t] = _mm512_dpbf16_ps(sums[row][t], keys[t], q);
                }
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        for (t, sum) in sums.iter().enumerate() {
            // SAFETY: room for 64 scores.
            unsafe { _mm512_storeu_ps(block.scores[row].as_mut_ptr().add(LANES * (first + t)), *sum) };
        }
    }
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn add_values<const R: usize>(block: &mut RowBlock, view: &PageView<'_>) {
    let slabs = block.head_dim / LANES;
    assert_eq!(view.values.len(), PAGE_TOKENS * block.head_dim * 2);
    let mut slab = 0;
    macro_rules! slabs_at_once {
        ($count:literal) => {
            while slabs - slab >= $count {
                // SAFETY: the slabs are in the page, as asserted.
                unsafe { value_slabs::<R, $count>(block, view, slab) };
                slab += $count;
            }
        };
    }
    if R <= 2 {
        slabs_at_once!(8);
    }
    if R <= 4 {
        slabs_at_once!(4);
    }
    slabs_at_once!(2);
    slabs_at_once!(1);
}

/// # Safety
/// Values of slabs `first..first + S` must be in the page.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn value_slabs<const R: usize, const S: usize>(
    block: &mut RowBlock,
    view: &PageView<'_>,
    first: usize,
) {
    let d = block.head_dim;
    let mut sums = [[_mm512_setzero_ps(); S]; R];
    let weights = block.w_bf16.as_ptr().cast::<u16>();
    for pair in 0..PAGE_TOKENS / 2 {
        // SAFETY: a token pair is d lanes of 4 bytes; rows of weights hold 64 elements.
        unsafe {
            let values: [__m512bh; S] = std::array::from_fn(|s| {
                let offset = 4 * (pair * d + LANES * (first + s));
                // The keys of the next page are next.
                let next = view.keys.as_ptr().wrapping_offset(view.ahead).wrapping_add(offset);
                _mm_prefetch::<_MM_HINT_T1>(next.cast());
                load(view.values.as_ptr().add(offset))
            });
            for row in 0..R {
                let w = broadcast(weights.add(row * PAGE_TOKENS + 2 * pair));
                for s in 0..S {
                    sums[row][s] = _mm512_dpbf16_ps(sums[row][s], values[s], w);
                }
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        let step = _mm512_set1_ps(block.w_step[row]);
        for (s, sum) in sums.iter().enumerate() {
            // SAFETY: the slab is within the head, which is within the row.
            unsafe {
                let at = block.out[row].as_mut_ptr().add(LANES * (first + s));
                _mm512_storeu_ps(at, _mm512_fmadd_ps(*sum, step, _mm512_loadu_ps(at)));
            }
        }
    }
}
