//! The definition of an attention score: the weight that one query gives to each row it reads.
//!
//! Eviction ranks rows by such weights. The softmax may run over some of the positions only: a
//! scorer that asks which rows of one chunk matter leaves the other chunks out.

use crate::attention::PagedContext;
use crate::page::{PAGE_TOKENS, Side};
use crate::window::Windows;
use std::ops::Range;

/// The softmax weights of the query at `position`, by place of the compact sequence. It runs over
/// the places in `over`, all that the query sees if absent; other places weigh nothing.
///
/// # Panics
/// If a page that the rule of [`Windows`] needs is absent, as in `attend_context`.
pub fn key_weights(
    query: &[f32],
    scale: f32,
    position: usize,
    windows: &Windows,
    context: &PagedContext<'_>,
    over: Option<&[Range<usize>]>,
) -> Vec<f32> {
    let (shift, hole) = context.compaction(windows.sink());
    let end = position + 1 - shift;
    let boundary = (windows.side_boundary(Side::Key, position) - shift).max(context.coded_until());
    let first = windows.first_visible(position);
    let is_read = |place: usize| {
        place >= first
            && !hole.contains(&place)
            && over.is_none_or(|over| over.iter().any(|range| range.contains(&place)))
    };
    let mut row = vec![0.0; query.len()];
    let scores: Vec<f32> = (0..end)
        .map(|place| {
            let is_coded = place >= windows.sink() && place < boundary;
            if !is_read(place) || is_coded && !context.coded_codec.keeps_history() {
                return f32::NEG_INFINITY;
            }
            let (codec, pages) = match is_coded {
                true => (context.coded_codec, context.coded),
                false => (context.full_codec, context.full),
            };
            let page = pages.get(place / PAGE_TOKENS).copied().flatten();
            let page = page.unwrap_or_else(|| panic!("the page of place {place} is absent"));
            codec.dequantize_row(Side::Key, page, place % PAGE_TOKENS, &mut row);
            scale * query.iter().zip(&row).map(|(q, k)| q * k).sum::<f32>()
        })
        .collect();
    softmax(scores)
}

/// Weights of scores; −∞ weighs nothing, also if all are.
pub fn softmax(mut scores: Vec<f32>) -> Vec<f32> {
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if largest == f32::NEG_INFINITY {
        scores.fill(0.0);
        return scores;
    }
    let mut sum = 0.0;
    for score in &mut scores {
        *score = (*score - largest).exp();
        sum += *score;
    }
    scores.iter_mut().for_each(|weight| *weight /= sum);
    scores
}
