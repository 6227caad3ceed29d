//! Query and key heads on their way to the cache: QK-norm, RoPE, key mean, rotation, store.

use super::pages::HeadPages;
use super::{CpuBackend, CpuRope, CpuRows};
use crate::attention;
use crate::{Epilogue, GemmScratch, Kernels, PackedMatrix, Precision, ThreadPool, Weights};
use oscar_backend::{BackendError, HeadShape, LayerHeads, Result, SequenceRows};
use oscar_codec::{HeadRotations, PAGE_TOKENS, RowPageCodec};
use std::ops::Range;

/// Key rotations of a layer, one for each KV head, ready for [`PackedMatrix::linear`].
pub struct LayerRotation {
    heads: Vec<HeadRotation>,
}

struct HeadRotation {
    /// `Rᵀ` as `[out][in]`, in f32: keys are rounded once, when they are stored.
    matrix: PackedMatrix,
    mean: Option<Vec<f32>>,
}

impl LayerRotation {
    pub fn new(pool: &ThreadPool, heads: &[HeadRotations]) -> Result<Self> {
        let heads = heads
            .iter()
            .map(|head| {
                let d = head.key.head_dim();
                let mut transposed = vec![0.0; d * d];
                for (i, row) in head.key.matrix().chunks_exact(d).enumerate() {
                    for (j, &v) in row.iter().enumerate() {
                        transposed[j * d + i] = v;
                    }
                }
                let matrix =
                    PackedMatrix::pack(pool, Weights::F32(&transposed), d, d, Precision::F32).map_err(
                        |error| BackendError::Shape { what: "a rotation".into(), detail: error.to_string() },
                    )?;
                Ok(HeadRotation { matrix, mean: head.key_mean.clone() })
            })
            .collect::<Result<_>>()?;
        Ok(Self { heads })
    }
}

/// Position of each row of a step.
pub fn positions(sequences: &[SequenceRows<'_>], rows: usize) -> Vec<u32> {
    let mut positions = vec![0; rows];
    for s in sequences {
        for (i, row) in s.rows.clone().enumerate() {
            positions[row] = (s.first_position + i) as u32;
        }
    }
    positions
}

/// QK-norm (where given) and RoPE on query and key heads, in place. A norm with `head_dim` weights
/// normalizes each head; a longer one normalizes all heads of the row together. RoPE turns the first
/// `rotary_dim` channels of a head.
pub fn normalize_and_rope(
    pool: &ThreadPool,
    kernels: &Kernels,
    shape: &HeadShape,
    qk_norm: Option<(&Vec<f32>, &Vec<f32>)>,
    rope: &CpuRope,
    positions: &[u32],
    qkv: &mut CpuRows,
) {
    let d = shape.head_dim;
    let width = qkv.width;
    pool.run_chunks(&mut qkv.values, width, |row, values| {
        let position = positions[row] as usize;
        let cos = &rope.cos[position * rope.half..][..rope.half];
        let sin = &rope.sin[position * rope.half..][..rope.half];
        let (queries, keys) =
            values[..(shape.query_heads + shape.kv_heads) * d].split_at_mut(shape.query_heads * d);
        let mut normed = Vec::new();
        for (heads, norm) in [(queries, qk_norm.map(|n| n.0)), (keys, qk_norm.map(|n| n.1))] {
            if let Some(weight) = norm {
                for part in heads.chunks_exact_mut(weight.len()) {
                    normed.resize(part.len(), 0.0);
                    kernels.rms_norm_row(part, weight, shape.rms_norm_eps, &mut normed);
                    part.copy_from_slice(&normed);
                }
            }
            heads.chunks_exact_mut(d).for_each(|head| kernels.rope_row(&mut head[..2 * rope.half], cos, sin));
        }
    });
}

/// One KV head's share of the way into the cache: where its queries go, and its pages.
pub struct HeadTask<'a> {
    pub head: usize,
    /// `[token][query head of the group][head_dim]`.
    pub queries: &'a mut [f32],
    /// `[token][query head of the group]`; empty in layers without sinks.
    pub sinks: &'a mut [f32],
    pub pages: &'a mut HeadPages,
    /// The pages are those of the sliding layers.
    pub slides: bool,
    pub codec: &'a RowPageCodec,
}

impl HeadTask<'_> {
    pub fn run(
        &mut self,
        pool: &ThreadPool,
        kernels: &Kernels,
        shape: &HeadShape,
        heads: &LayerHeads<'_, CpuBackend>,
        sequences: &[SequenceRows<'_>],
        qkv: &CpuRows,
    ) {
        let (d, group) = (shape.head_dim, shape.query_heads / shape.kv_heads);
        let rows = qkv.count();
        let column = |head: usize| head * d;
        let (query, key, value) = (
            column(self.head * group),
            column(shape.query_heads + self.head),
            column(shape.query_heads + shape.kv_heads + self.head),
        );
        let mut keys = vec![0.0; rows * d];
        for (row, values) in qkv.values.chunks_exact(qkv.width).enumerate() {
            self.queries[row * group * d..][..group * d].copy_from_slice(&values[query..query + group * d]);
            keys[row * d..][..d].copy_from_slice(&values[key..key + d]);
        }
        let rotation = heads.rotation.map(|r| &r.heads[self.head]);
        if let Some(sinks) = heads.sinks {
            let mean = rotation.and_then(|r| r.mean.as_deref());
            self.shift_sinks(&sinks[self.head * group..][..group], mean, shape.scale);
        }
        if let Some(rotation) = rotation {
            if let Some(mean) = &rotation.mean {
                for key in keys.chunks_exact_mut(d) {
                    key.iter_mut().zip(mean).for_each(|(k, m)| *k -= m);
                }
            }
            let mut scratch = GemmScratch::default();
            let mut rotate = |x: &mut [f32]| {
                let original = x.to_vec();
                let m = original.len() / d;
                rotation.matrix.linear(kernels, pool, &original, m, x, Epilogue::default(), &mut scratch);
            };
            rotate(self.queries);
            rotate(&mut keys);
        }
        self.store(sequences, qkv, &keys, value);
    }

    /// The sinks of every row. Centred keys take `scale·q·μ` off all scores, and off the sinks.
    fn shift_sinks(&mut self, sinks: &[f32], mean: Option<&[f32]>, scale: f32) {
        let d = self.codec.head_dim();
        let rows = self.sinks.iter_mut().zip(self.queries.chunks_exact(d)).enumerate();
        for (row, (sink, query)) in rows {
            let shift = mean.map_or(0.0, |mean| query.iter().zip(mean).map(|(q, m)| q * m).sum::<f32>());
            *sink = sinks[row % sinks.len()] - scale * shift;
        }
    }

    /// Stores keys, and the values in the columns from `value` on, in the pages of their positions.
    fn store(&mut self, sequences: &[SequenceRows<'_>], qkv: &CpuRows, keys: &[f32], value: usize) {
        let d = self.codec.head_dim();
        let mut values = Vec::with_capacity(PAGE_TOKENS * d);
        for s in sequences {
            for Run { rows, block, token } in page_runs(s) {
                let full = || s.full[block].map(|id| id.0);
                let id = if self.slides { s.sliding[block].map(|id| id.0) } else { full() };
                let Some(id) = id else { unreachable!("the cache prepares the pages that a step writes") };
                values.clear();
                for r in rows.clone() {
                    values.extend_from_slice(&qkv.values[r * qkv.width + value..][..d]);
                }
                let keys = &keys[rows.start * d..rows.end * d];
                attention::append_rows(self.codec, self.pages.page_mut(id), token, keys, &values)
                    .expect("rows and pages have their codec's sizes");
            }
        }
    }
}

/// Rows of a step that lie in one page.
pub struct Run {
    pub rows: Range<usize>,
    pub block: usize,
    /// The place of the first row in the page.
    pub token: usize,
}

/// The rows of a sequence, page by page.
pub fn page_runs(s: &SequenceRows<'_>) -> impl Iterator<Item = Run> {
    let (first_position, rows) = (s.first_position, s.rows.clone());
    let mut row = rows.start;
    std::iter::from_fn(move || {
        let position = first_position + (row - rows.start);
        let (block, token) = (position / PAGE_TOKENS, position % PAGE_TOKENS);
        let count = (PAGE_TOKENS - token).min(rows.end - row);
        let run = Run { rows: row..row + count, block, token };
        row += count;
        (count > 0).then_some(run)
    })
}
