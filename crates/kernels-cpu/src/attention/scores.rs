//! Attention weights by row of history, for eviction: `oscar_codec::scores` in f32, by matrix
//! products over dequantized keys.
//!
//! Invariant: the weights of a query depend on that query, its position and the pages alone.

use std::ops::Range;

use oscar_codec::attention::PagedContext;
use oscar_codec::{PAGE_TOKENS, RowPageCodec, Side, Windows};

use super::block::MAX_DIM;
use super::dequantize::{SidePage, dequantize_page};
use crate::gemm::{Epilogue, GemmScratch, PackedMatrix, Precision, Weights};
use crate::kernels::Kernels;
use crate::ops::exp::exp;
use crate::pool::ThreadPool;

/// Query rows whose weights are in memory at once.
const ROWS: usize = 256;
/// Scores that one piece of work adds to.
const COLUMNS: usize = 512;

/// The queries of one sequence and KV head.
pub struct ScoreTask<'a> {
    /// Rows × head size, rotated, not yet scaled.
    pub queries: &'a [f32],
    /// One position a row, non-decreasing.
    pub positions: &'a [u32],
    pub scale: f32,
    pub windows: &'a Windows,
    pub context: &'a PagedContext<'a>,
    /// Places that the softmax runs over; all that a query sees if absent.
    pub over: Option<&'a [Range<usize>]>,
}

/// Keys of some places in f32, ready for products.
struct Keys {
    places: Vec<usize>,
    matrix: Option<PackedMatrix>,
}

impl Keys {
    fn load(
        kernels: &Kernels,
        pool: &ThreadPool,
        codec: &RowPageCodec,
        pages: &[Option<&[u8]>],
        places: Vec<usize>,
    ) -> Self {
        let d = codec.head_dim();
        let mut rows = vec![0.0; places.len() * d];
        let (mut page, mut codes) = (vec![0.0; PAGE_TOKENS * d], Box::new([0; MAX_DIM]));
        let mut loaded = usize::MAX;
        for (row, &place) in rows.chunks_exact_mut(d).zip(&places) {
            let (block, token) = (place / PAGE_TOKENS, place % PAGE_TOKENS);
            if block != loaded {
                let side = SidePage { codec, side: Side::Key, pages, block, origin: 0 };
                dequantize_page(kernels.variant(), side, u64::MAX, &mut page, &mut codes);
                loaded = block;
            }
            row.copy_from_slice(&page[token * d..][..d]);
        }
        let matrix = (!places.is_empty()).then(|| {
            PackedMatrix::pack(pool, Weights::F32(&rows), places.len(), d, Precision::F32)
                .expect("keys are a matrix")
        });
        Self { places, matrix }
    }

    /// `queries · keysᵀ`.
    fn products(&self, kernels: &Kernels, pool: &ThreadPool, queries: &[f32], rows: usize) -> Vec<f32> {
        let mut out = vec![0.0; rows * self.places.len()];
        if let Some(matrix) = &self.matrix {
            let mut scratch = GemmScratch::default();
            matrix.linear(kernels, pool, queries, rows, &mut out, Epilogue::default(), &mut scratch);
        }
        out
    }
}

/// Hands the weights that each query gives to the scored places `scored[i]` to `add(&mut scores[i],
/// weight)`. `scored` ascends.
pub fn add_scores(
    kernels: &Kernels,
    pool: &ThreadPool,
    task: &ScoreTask<'_>,
    scored: &[usize],
    scores: &mut [u64],
    add: impl Fn(&mut u64, f32) + Sync,
) {
    assert_eq!(scored.len(), scores.len(), "a score for each place");
    let ScoreTask { queries, positions, windows, context, .. } = *task;
    let (Some(&first), Some(&last)) = (positions.first(), positions.last()) else { return };
    let d = context.full_codec.head_dim();
    let (shift, hole) = context.compaction(windows.sink());
    let (sink, coded_until) = (windows.sink(), context.coded_until());
    let boundary = |t: u32| (windows.side_boundary(Side::Key, t as usize) - shift).max(coded_until);
    let is_over = |place: &usize| task.over.is_none_or(|over| over.iter().any(|range| range.contains(place)));
    let end = last as usize + 1 - shift;
    let most_coded = if context.coded_codec.keeps_history() { boundary(last) } else { sink };
    let coded = (sink..most_coded).filter(|place| !hole.contains(place)).filter(is_over).collect();
    let full = (0..sink.min(end)).chain(boundary(first)..end).filter(is_over).collect();
    let coded = Keys::load(kernels, pool, context.coded_codec, context.coded, coded);
    let full = Keys::load(kernels, pool, context.full_codec, context.full, full);
    // Where the weight of a scored place stands among those of coded and of full keys.
    let places: Vec<[Option<usize>; 2]> = scored
        .iter()
        .map(|place| [&coded, &full].map(|keys| keys.places.binary_search(place).ok()))
        .collect();
    for start in (0..positions.len()).step_by(ROWS) {
        let positions = &positions[start..positions.len().min(start + ROWS)];
        let rows = positions.len();
        let queries = &queries[start * d..(start + rows) * d];
        let mut weights = [&coded, &full].map(|keys| keys.products(kernels, pool, queries, rows));
        let [coded_weights, full_weights] = &mut weights;
        let mut pairs: Vec<(&mut [f32], &mut [f32])> = Vec::with_capacity(rows);
        let (mut left, mut right) = (coded_weights.as_mut_slice(), full_weights.as_mut_slice());
        for _ in 0..rows {
            let (a, rest) = std::mem::take(&mut left).split_at_mut(coded.places.len());
            left = rest;
            let (b, rest) = std::mem::take(&mut right).split_at_mut(full.places.len());
            right = rest;
            pairs.push((a, b));
        }
        pool.run_chunks(&mut pairs, 8, |chunk, pairs| {
            for (i, (a, b)) in pairs.iter_mut().enumerate() {
                let t = positions[chunk * 8 + i];
                let (boundary, end) = (boundary(t), t as usize + 1 - shift);
                let read = coded.places.partition_point(|&place| place < boundary);
                let (a, unread) = a.split_at_mut(read);
                unread.fill(0.0);
                for (score, &place) in b.iter_mut().zip(&full.places) {
                    let is_read = place < sink || (boundary..end).contains(&place);
                    *score = if is_read { *score } else { f32::NEG_INFINITY };
                }
                softmax(a, b, task.scale);
            }
        });
        pool.run_chunks(scores, COLUMNS, |chunk, scores| {
            for (score, place) in scores.iter_mut().zip(&places[chunk * COLUMNS..]) {
                for (keys, weights) in [&coded, &full].into_iter().zip(&weights).zip(place).filter_map(
                    |((keys, weights), place)| place.map(|at| (keys.places.len(), &weights[at..])),
                ) {
                    weights.iter().step_by(keys).for_each(|&weight| add(score, weight));
                }
            }
        });
    }
}

/// Softmax over both parts together, in place.
fn softmax(a: &mut [f32], b: &mut [f32], scale: f32) {
    let largest = |scores: &[f32]| scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let max = largest(a).max(largest(b));
    if max == f32::NEG_INFINITY {
        a.fill(0.0);
        return b.fill(0.0);
    }
    let mut sums = [0.0f32; 16];
    for part in [&mut *a, &mut *b] {
        for chunk in part.chunks_mut(16) {
            for (score, sum) in chunk.iter_mut().zip(&mut sums) {
                // The exponential is exact to rounding down to −87; below that a weight is nothing.
                let x = (*score - max) * scale;
                *score = if x > -80.0 { exp(x) } else { 0.0 };
                *sum += *score;
            }
        }
    }
    let norm = 1.0 / sums.iter().sum::<f32>();
    for part in [a, b] {
        part.iter_mut().for_each(|weight| *weight *= norm);
    }
}
