//! Latent attention in the absorbed form: one row `[latent | rotary key]` a token serves all heads as
//! key and as value.
//!
//! The products of single heads are small. They run in parallel over heads and blocks of rows, each on
//! one thread, so the result of a row depends on that row alone.

use super::heads::{self, Run};
use super::step::CpuStep;
use super::{CpuBackend, CpuMatrix, CpuRope, CpuRows, Scratch, shape_error};
use crate::Kernels;
use crate::attention;
use oscar_backend::{LatentHeads, LatentShape, Result};
use std::time::Instant;

/// Rows of one product of a head: enough to use its weights well, few enough for many threads.
const BLOCK: usize = 64;

impl CpuStep<'_> {
    pub(super) fn latent_attention(
        &mut self,
        heads: &LatentHeads<'_, CpuBackend>,
        queries: &CpuRows,
        latent: &CpuRows,
        out: &mut CpuRows,
    ) -> Result<()> {
        let rows = queries.count();
        self.check_latent(heads, queries, latent, out)?;
        let positions = heads::positions(self.sequences, rows);
        let began = Instant::now();
        self.append_latent(heads, latent, &positions);
        self.scratch.count(began, |times| &mut times.coding);
        let began = Instant::now();
        self.absorb_queries(heads, queries, &positions);
        self.scratch.count(began, |times| &mut times.products);
        let began = Instant::now();
        self.attention(heads.layer, None, false, rows);
        self.scratch.count(began, |times| &mut times.attention);
        let began = Instant::now();
        self.expand_outputs(heads, out);
        self.scratch.count(began, |times| &mut times.products);
        Ok(())
    }

    fn check_latent(
        &self,
        heads: &LatentHeads<'_, CpuBackend>,
        queries: &CpuRows,
        latent: &CpuRows,
        out: &CpuRows,
    ) -> Result<()> {
        let LatentShape { rank, key, rotary, value, .. } = heads.shape;
        let (shape, count) = (self.pool.heads(), heads.key_up.len());
        let sized = |all: &[&CpuMatrix], outputs, inputs| {
            all.len() == count
                && all.iter().all(|m| (m.packed.outputs(), m.packed.inputs()) == (outputs, inputs))
        };
        let fits = sized(heads.key_up, rank, key)
            && sized(heads.value_up, value, rank)
            && (shape.query_heads, shape.kv_heads, shape.head_dim) == (count, 1, rank + rotary)
            && (queries.width, latent.width, out.width)
                == (count * (key + rotary), rank + rotary, count * value)
            && queries.count() == latent.count()
            && heads.norm.0.len() == rank
            && 2 * heads.rope.half == rotary;
        match fits && self.pool.layout().shares_rows() {
            true => Ok(()),
            false => Err(shape_error(
                "latent attention",
                format!(
                    "{count} heads of {:?}, rows of {}, {} and {}, a cache of {shape:?}",
                    heads.shape, queries.width, latent.width, out.width
                ),
            )),
        }
    }

    /// Normalizes and turns the new rows and stores them in their pages.
    fn append_latent(&mut self, heads: &LatentHeads<'_, CpuBackend>, latent: &CpuRows, positions: &[u32]) {
        let (backend, shape) = (self.backend, heads.shape);
        let (weights, eps) = heads.norm;
        let mut rows = vec![0.0; latent.values.len()];
        backend.pool.run_chunks(&mut rows, latent.width, |row, values| {
            let source = &latent.values[row * latent.width..][..latent.width];
            let (normed, turned) = values.split_at_mut(shape.rank);
            backend.kernels.rms_norm_row(&source[..shape.rank], weights, eps, normed);
            turn(
                backend.kernels,
                heads.rope,
                positions[row],
                shape.interleaved,
                &source[shape.rank..],
                turned,
            );
        });
        let (layout, pages, _) = self.pool.layer_mut(heads.layer);
        let (codec, d) = (layout.full().codec(heads.layer, 0), latent.width);
        for s in self.sequences {
            for Run { rows: part, block, token } in heads::page_runs(s) {
                let Some(id) = s.full[block] else {
                    unreachable!("the cache prepares the pages that a step writes")
                };
                let rows = &rows[part.start * d..part.end * d];
                attention::append_rows(codec, pages[0].page_mut(id.0), token, rows, rows)
                    .expect("rows and pages have their codec's sizes");
            }
        }
    }

    /// Leaves the queries in the space of the cache's rows in the scratch memory, `[row][head]`.
    fn absorb_queries(&mut self, heads: &LatentHeads<'_, CpuBackend>, queries: &CpuRows, positions: &[u32]) {
        let LatentShape { rank, key, rotary, interleaved, .. } = heads.shape;
        let (backend, rows, count) = (self.backend, queries.count(), heads.key_up.len());
        let Scratch { queries: absorbed, by_head, .. } = &mut *self.scratch;
        backend.products_by_head(heads.key_up, rows, by_head, |head, row| {
            &queries.values[row * queries.width + head * (key + rotary)..][..key]
        });
        let stride = rows.next_multiple_of(block_of(rows)) * rank;
        let width = rank + rotary;
        absorbed.resize(rows * count * width, 0.0);
        backend.pool.run_chunks(absorbed, count * width, |row, absorbed| {
            let projected = &queries.values[row * queries.width..][..queries.width];
            for (head, (query, projected)) in
                absorbed.chunks_exact_mut(width).zip(projected.chunks_exact(key + rotary)).enumerate()
            {
                let (latent, turned) = query.split_at_mut(rank);
                latent.copy_from_slice(&by_head[head * stride + row * rank..][..rank]);
                turn(backend.kernels, heads.rope, positions[row], interleaved, &projected[key..], turned);
            }
        });
    }

    /// From weighted sums of rows to the outputs of the heads.
    fn expand_outputs(&mut self, heads: &LatentHeads<'_, CpuBackend>, out: &mut CpuRows) {
        let LatentShape { rank, rotary, value, .. } = heads.shape;
        let (backend, count, row_of) = (self.backend, heads.value_up.len(), self.output_rows());
        let (rows, width) = (row_of.len(), rank + rotary);
        let Scratch { outputs, by_head, .. } = &mut *self.scratch;
        backend.products_by_head(heads.value_up, rows, by_head, |head, place| {
            &outputs[(place * count + head) * width..][..rank]
        });
        let stride = rows.next_multiple_of(block_of(rows)) * value;
        let mut place_of = vec![0; rows];
        row_of.iter().enumerate().for_each(|(place, &row)| place_of[row] = place);
        out.resize(rows);
        backend.pool.run_chunks(&mut out.values, out.width, |row, out| {
            for (head, out) in out.chunks_exact_mut(value).enumerate() {
                out.copy_from_slice(&by_head[head * stride + place_of[row] * value..][..value]);
            }
        });
    }
}

/// Rows of one product of a head in a step of `rows`.
fn block_of(rows: usize) -> usize {
    BLOCK.min(rows.max(1))
}

impl CpuBackend {
    /// One product for each head: `out[head][row] = matrices[head] · input(head, row)`. Rows of a head
    /// are padded to whole blocks.
    fn products_by_head<'a>(
        &self,
        matrices: &[&CpuMatrix],
        rows: usize,
        out: &mut Vec<f32>,
        input: impl Fn(usize, usize) -> &'a [f32] + Sync,
    ) {
        let Some(first) = matrices.first() else { return };
        let (inputs, outputs, block) = (first.packed.inputs(), first.packed.outputs(), block_of(rows));
        let blocks = rows.div_ceil(block);
        out.resize(matrices.len() * blocks * block * outputs, 0.0);
        self.pool.run_chunks(out, block * outputs, |index, out| {
            let (head, first) = (index / blocks, index % blocks * block);
            let count = block.min(rows - first);
            let mut x = Vec::with_capacity(count * inputs);
            (first..first + count).for_each(|row| x.extend_from_slice(input(head, row)));
            self.small_product(matrices[head], &x, &mut out[..count * outputs]);
        });
    }
}

/// RoPE of `source` into `turned`. Neighbouring pairs are put into halves first; queries and keys agree
/// in that, so scores do not change.
fn turn(
    kernels: &Kernels,
    rope: &CpuRope,
    position: u32,
    interleaved: bool,
    source: &[f32],
    turned: &mut [f32],
) {
    let half = rope.half;
    if interleaved {
        let (first, second) = turned.split_at_mut(half);
        for (pair, (a, b)) in source.chunks_exact(2).zip(first.iter_mut().zip(second)) {
            (*a, *b) = (pair[0], pair[1]);
        }
    } else {
        turned.copy_from_slice(source);
    }
    let at = position as usize * half;
    kernels.rope_row(turned, &rope.cos[at..at + half], &rope.sin[at..at + half]);
}
