//! Pages dequantized to f32: the scalar variant, and every codec that has no kernel of its own.
//!
//! One body, compiled once for each instruction set. Dot products are sixteen strided sums, so that
//! the compiler can use vectors without changing the order of additions.

use oscar_codec::PAGE_TOKENS;

use super::block::{LANES, NEGLIGIBLE, RowBlock};
use super::page::{PageView, Stages};
use crate::cpu::Variant;

pub(super) fn stages(variant: Variant) -> Stages {
    match variant {
        #[cfg(target_arch = "x86_64")]
        Variant::Avx2 => Stages { score: score_avx2, weigh, add_values: add_values_avx2, find_maxima: None },
        #[cfg(target_arch = "x86_64")]
        Variant::Avx512 | Variant::Amx => {
            Stages { score: score_avx512, weigh, add_values: add_values_avx512, find_maxima: None }
        }
        _ => Stages { score, weigh, add_values, find_maxima: None },
    }
}

#[inline(always)]
fn score_body(block: &mut RowBlock, view: &PageView<'_>) {
    let d = block.head_dim;
    let keys = &view.dequantized.expect("a dequantized page").keys;
    for (token, key) in keys.chunks_exact(d).enumerate() {
        for row in 0..block.rows {
            let mut lanes = [0.0_f32; LANES];
            for (q, k) in block.q[row][..d].chunks_exact(LANES).zip(key.chunks_exact(LANES)) {
                for i in 0..LANES {
                    lanes[i] += q[i] * k[i];
                }
            }
            block.scores[row][token] = lanes.iter().sum();
        }
    }
}

#[inline(always)]
fn add_values_body(block: &mut RowBlock, view: &PageView<'_>) {
    let d = block.head_dim;
    let values = &view.dequantized.expect("a dequantized page").values;
    for (token, value) in values.chunks_exact(d).enumerate() {
        for row in 0..block.rows {
            let weight = block.scores[row][token];
            if weight != 0.0 {
                for (o, v) in block.out[row][..d].iter_mut().zip(value) {
                    *o += weight * v;
                }
            }
        }
    }
}

fn score(block: &mut RowBlock, view: &PageView<'_>) {
    score_body(block, view);
}

fn add_values(block: &mut RowBlock, view: &PageView<'_>) {
    add_values_body(block, view);
}

/// Turns the scores of the page into weights relative to the running maximum.
fn weigh(block: &mut RowBlock, _: &PageView<'_>) {
    block.any_weight = false;
    for row in 0..block.rows {
        let mask = block.masks[row];
        let scores = &mut block.scores[row];
        let read = |token: usize| mask >> token & 1 == 1;
        let page_max = (0..PAGE_TOKENS).filter(|&t| read(t)).fold(f32::NEG_INFINITY, |m, t| m.max(scores[t]));
        if page_max == f32::NEG_INFINITY || page_max - block.max[row] < NEGLIGIBLE {
            scores.fill(0.0);
            continue;
        }
        block.any_weight = true;
        if page_max > block.max[row] {
            let factor = (block.max[row] - page_max).exp2();
            block.max[row] = page_max;
            block.sum[row][0] *= factor;
            block.shared[row].iter_mut().for_each(|s| *s *= factor);
            block.sum[row][1..].iter_mut().for_each(|s| *s *= factor);
            block.out[row][..block.head_dim].iter_mut().for_each(|o| *o *= factor);
        }
        for (token, score) in scores.iter_mut().enumerate() {
            *score = if read(token) { (*score - block.max[row]).exp2() } else { 0.0 };
            block.sum[row][0] += *score;
        }
    }
}

macro_rules! compiled_for {
    ($features:literal, $score:ident, $add_values:ident) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = $features)]
        fn $score(block: &mut RowBlock, view: &PageView<'_>) {
            score_body(block, view);
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = $features)]
        fn $add_values(block: &mut RowBlock, view: &PageView<'_>) {
            add_values_body(block, view);
        }
    };
}

compiled_for!("avx2", score_avx2, add_values_avx2);
compiled_for!("avx512f,avx512vl", score_avx512, add_values_avx512);
