//! The definition of attention over pages.
//!
//! Each piece of the context, in any format, updates a running state (largest score, sum of
//! weights, weighted sum of values). States of disjoint pieces merge in any order. Rows are
//! dequantized before they are multiplied. Fast kernels multiply raw codes and apply scale and
//! minimum outside the inner loop, `q·k̂ = s·(q·c) + z·Σq` and `Σ p·v̂ = Σ (p·s)·c + Σ p·z`; a test
//! compares that form with this one.

use crate::page::{PAGE_TOKENS, RowPageCodec, Side};
use crate::view::Survivors;
use crate::window::Windows;
use std::ops::Range;

/// Running softmax state of one query head.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionState {
    /// Largest score so far; −∞ if nothing was read.
    pub max: f32,
    /// Σ exp(score − max).
    pub sum: f32,
    /// Σ exp(score − max) · value, not yet divided by `sum`.
    pub out: Vec<f32>,
}

impl AttentionState {
    pub fn empty(head_dim: usize) -> Self {
        Self { max: f32::NEG_INFINITY, sum: 0.0, out: vec![0.0; head_dim] }
    }

    /// Raises the reference score to `max`: everything accumulated so far is expressed relative to
    /// it.
    fn rescale(&mut self, max: f32) {
        if max > self.max {
            let factor = if self.max == f32::NEG_INFINITY { 0.0 } else { (self.max - max).exp() };
            self.sum *= factor;
            self.out.iter_mut().for_each(|o| *o *= factor);
            self.max = max;
        }
    }

    /// Adds the state of a disjoint piece of the context. Associative and commutative up to
    /// rounding.
    pub fn merge(&mut self, other: &Self) {
        if other.max == f32::NEG_INFINITY {
            return;
        }
        self.rescale(other.max);
        let factor = (other.max - self.max).exp();
        self.sum += other.sum * factor;
        for (o, v) in self.out.iter_mut().zip(&other.out) {
            *o += v * factor;
        }
    }

    /// Adds an attention sink: one more score in the softmax, without a value. Centred keys
    /// (`k − μ`) take `scale·q·μ` off every score, so the caller takes it off the sink too.
    pub fn add_sink(&mut self, score: f32) {
        self.rescale(score);
        self.sum += (score - self.max).exp();
    }

    /// The attention output; zeros if nothing was read.
    pub fn finish(&self, out: &mut [f32]) {
        let norm = if self.sum > 0.0 { 1.0 / self.sum } else { 0.0 };
        for (o, v) in out.iter_mut().zip(&self.out) {
            *o = v * norm;
        }
    }
}

/// Reads tokens `tokens` of one page with one query (`scale` is usually `1/√d`) into `state`.
pub fn attend_page(
    query: &[f32],
    scale: f32,
    codec: &RowPageCodec,
    page: &[u8],
    tokens: Range<usize>,
    state: &mut AttentionState,
) {
    if !codec.keeps_history() {
        return;
    }
    let d = codec.head_dim();
    assert!(query.len() == d && tokens.end <= PAGE_TOKENS && page.len() == codec.page_bytes());
    let mut row = vec![0.0; d];
    let mut scores = Vec::new();
    for t in tokens.clone() {
        codec.dequantize_row(Side::Key, page, t, &mut row);
        scores.push(scale * query.iter().zip(&row).map(|(q, k)| q * k).sum::<f32>());
    }
    let Some(max) = scores.iter().copied().reduce(f32::max) else { return };
    state.rescale(max);
    for (t, s) in tokens.zip(scores) {
        let p = (s - state.max).exp();
        state.sum += p;
        codec.dequantize_row(Side::Value, page, t, &mut row);
        state.out.iter_mut().zip(&row).for_each(|(o, v)| *o += p * v);
    }
}

/// A context as the cache holds it: block `b` covers positions `64·b ..` and has a BF16 page, a
/// quantized page or both. With a view, the lists are those of the compact sequence
/// ([`view`](crate::view)): the quantized blocks after the sink are the view's pages.
pub struct PagedContext<'a> {
    pub full_codec: &'a RowPageCodec,
    pub coded_codec: &'a RowPageCodec,
    pub full: &'a [Option<&'a [u8]>],
    pub coded: &'a [Option<&'a [u8]>],
    /// The head's rows of the view that the context begins with.
    pub view: Option<Survivors>,
}

impl PagedContext<'_> {
    /// How far positions behind the view move in the compact sequence, and its places without a
    /// row.
    pub fn compaction(&self, sink: usize) -> (usize, Range<usize>) {
        self.view.map_or((0, sink..sink), |view| (view.shift(sink), view.hole(sink)))
    }

    /// End of the last block that has a quantized page and no full page. Everything before it
    /// except the sink is read quantized: by the rule of [`Windows`], or, if the tail of the
    /// context was demoted to save memory, instead of it.
    pub fn coded_until(&self) -> usize {
        let only_code = |(full, coded): (&Option<&[u8]>, &Option<&[u8]>)| full.is_none() && coded.is_some();
        let blocks = self.full.len().min(self.coded.len());
        let last = self.full[..blocks].iter().zip(&self.coded[..blocks]).rposition(only_code);
        last.map_or(0, |block| (block + 1) * PAGE_TOKENS)
    }
}

/// Attention of the query at `position` over all positions that it may see, by the rule of
/// [`Windows`].
///
/// # Panics
/// If a page that the rule needs is absent, or a layer with a sliding window has a view. That is a
/// bug in the caller's bookkeeping, never caused by user input.
pub fn attend_context(
    query: &[f32],
    scale: f32,
    position: usize,
    windows: &Windows,
    context: &PagedContext<'_>,
) -> AttentionState {
    let mut state = AttentionState::empty(query.len());
    let sink = windows.sink();
    let (shift, hole) = context.compaction(sink);
    let (first, end) = (windows.first_visible(position), position + 1 - shift);
    assert!(first == 0 || context.view.is_none(), "a sliding window over a view");
    let boundary = |side| (windows.side_boundary(side, position) - shift).max(context.coded_until());
    let (key, value) = (boundary(Side::Key), boundary(Side::Value));
    let row_by_row = context.coded_codec.token_groups(Side::Key).is_none();
    let (both, either) = (key.min(value), key.max(value));
    let pieces = [
        (Reading { keys_coded: false, values_coded: false }, 0..sink.min(end)),
        (Reading { keys_coded: true, values_coded: true }, sink..hole.start),
        (Reading { keys_coded: true, values_coded: true }, hole.end..both),
        (Reading { keys_coded: key > value, values_coded: value > key }, both..either),
        (Reading { keys_coded: false, values_coded: false }, either..end),
    ];
    for (reading, range) in pieces {
        let range = range.start.max(first)..range.end;
        if (reading.keys_coded || reading.values_coded) && !context.coded_codec.keeps_history() {
            continue;
        }
        if reading.keys_coded != reading.values_coded || reading.keys_coded && !row_by_row {
            attend_tokens(query, scale, sink, context, range, reading, &mut state);
            continue;
        }
        let mut at = range.start;
        while at < range.end {
            let block = at / PAGE_TOKENS;
            let stop = range.end.min((block + 1) * PAGE_TOKENS);
            let tokens = at % PAGE_TOKENS..stop - block * PAGE_TOKENS;
            let (codec, pages) = context.source(reading.keys_coded);
            let page = pages.get(block).copied().flatten();
            let page = page.unwrap_or_else(|| {
                panic!("block {block} (coded: {}) is absent for position {position}", reading.keys_coded)
            });
            attend_page(query, scale, codec, page, tokens, &mut state);
            at = stop;
        }
    }
    state
}

/// Which sides of a token are read quantized.
#[derive(Clone, Copy)]
struct Reading {
    keys_coded: bool,
    values_coded: bool,
}

impl<'a> PagedContext<'a> {
    fn source(&self, coded: bool) -> (&'a RowPageCodec, &'a [Option<&'a [u8]>]) {
        if coded { (self.coded_codec, self.coded) } else { (self.full_codec, self.full) }
    }
}

/// Token by token: for keys and values read from different pages, and for codes in groups of
/// tokens.
fn attend_tokens(
    query: &[f32],
    scale: f32,
    origin: usize,
    context: &PagedContext<'_>,
    positions: Range<usize>,
    reading: Reading,
    state: &mut AttentionState,
) {
    let mut row = vec![0.0; query.len()];
    let mut read = |side, coded, position| {
        let (codec, pages) = context.source(coded);
        codec
            .dequantize_token(side, pages, origin, position, &mut row)
            .unwrap_or_else(|error| panic!("position {position} cannot be read: {error}"));
        row.clone()
    };
    for position in positions {
        let key = read(Side::Key, reading.keys_coded, position);
        let score = scale * query.iter().zip(&key).map(|(q, k)| q * k).sum::<f32>();
        state.rescale(score);
        let p = (score - state.max).exp();
        state.sum += p;
        let value = read(Side::Value, reading.values_coded, position);
        state.out.iter_mut().zip(&value).for_each(|(o, v)| *o += p * v);
    }
}
