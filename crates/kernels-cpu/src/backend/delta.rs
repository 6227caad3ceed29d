//! The gated delta net, and the gate behind attention.
//!
//! A prompt runs the same recurrence as single tokens: rows one after the other, value heads in parallel.
//! So the result of a row depends on its own sequence alone, in any chunks.

use super::pages::HeadPages;
use super::step::CpuStep;
use super::{CpuBackend, CpuMatrix, CpuRows, Scratch, shape_error};
use crate::ops::DeltaRow;
use oscar_backend::{DeltaLayer, DeltaShape, DeltaStep, Result, SequenceRows, StepStates};
use oscar_codec::StateId;
use std::ops::Range;
use std::time::Instant;

/// Buffers of delta nets, kept from step to step.
#[derive(Default)]
pub(super) struct DeltaScratch {
    /// Queries, keys and values behind the convolution, `[row][channel]`.
    mixed: Vec<f32>,
    /// Outputs of the heads, `[sequence][value head][row][value_dim]`.
    outputs: Vec<f32>,
}

/// A sequence of a step and its part of a layer's state.
struct Part<'a> {
    rows: Range<usize>,
    /// `[value head][key_dim][value_dim]`.
    heads: &'a mut [f32],
    /// The projected rows before the step, `[taps − 1][channels]`.
    tail: &'a mut [f32],
}

impl DeltaStep<CpuBackend> for CpuStep<'_> {
    fn mix_delta(
        &mut self,
        layer: DeltaLayer<'_, CpuBackend>,
        projected: &CpuRows,
        out: &mut CpuRows,
    ) -> Result<()> {
        self.check_delta(&layer, projected, out)?;
        let began = Instant::now();
        let (backend, shape) = (self.backend, layer.shape);
        let Scratch { delta: DeltaScratch { mixed, outputs }, .. } = &mut *self.scratch;
        let mut parts = parts(self.sequences, self.pool.states_mut(), &layer)?;
        mixed.resize(projected.count() * shape.channels(), 0.0);
        backend.mix_rows(&layer, &parts, projected, mixed);
        parts.iter_mut().for_each(|part| part.keep_tail(&shape, projected));
        outputs.resize(projected.count() * shape.value_width(), 0.0);
        backend.run_heads(&layer, &mut parts, projected, mixed, outputs);
        let rows: Vec<Range<usize>> = parts.into_iter().map(|part| part.rows).collect();
        out.resize(projected.count());
        backend.finish_rows(&layer, &rows, projected, outputs, out);
        self.scratch.count(began, |times| &mut times.attention);
        Ok(())
    }

    fn gate_heads(&mut self, unrotate: &[&CpuMatrix], gates: &CpuRows, attended: &mut CpuRows) -> Result<()> {
        let heads = *self.pool.heads();
        let (d, group) = (heads.head_dim, heads.group());
        let sized = unrotate.iter().all(|m| (m.packed.outputs(), m.packed.inputs()) == (d, d));
        let counted = unrotate.is_empty() || unrotate.len() == heads.kv_heads;
        if !(sized && counted) || (gates.width, gates.count()) != (attended.width, attended.count()) {
            let detail =
                format!("{} matrices, rows of {} and {}", unrotate.len(), gates.width, attended.width);
            return Err(shape_error("an output gate", detail));
        }
        let backend = self.backend;
        if !unrotate.is_empty() {
            // The heads of a group are neighbours: a row has `group` inputs of one matrix.
            backend.pool.run_chunks(&mut attended.values, attended.width, |_, row| {
                let mut turned = vec![0.0; group * d];
                for (part, matrix) in row.chunks_exact_mut(group * d).zip(unrotate) {
                    backend.small_product(matrix, part, &mut turned);
                    part.copy_from_slice(&turned);
                }
            });
        }
        let width = attended.width;
        backend.pool.run_chunks(&mut attended.values, width, |row, x| {
            backend.kernels.sigmoid_gate(&gates.values[row * width..][..width], x);
        });
        Ok(())
    }
}

impl CpuStep<'_> {
    fn check_delta(
        &self,
        layer: &DeltaLayer<'_, CpuBackend>,
        projected: &CpuRows,
        out: &CpuRows,
    ) -> Result<()> {
        let DeltaLayer { layer: index, shape, conv, decay, time_bias, norm } = *layer;
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, taps } = shape;
        let sized = [key_heads, value_heads, key_dim, value_dim, taps].iter().all(|&n| n > 0)
            && value_heads.is_multiple_of(key_heads);
        let fits = sized
            && (projected.width, out.width) == (shape.projected(), shape.value_width())
            && (conv.len(), norm.0.len()) == (taps * shape.channels(), value_dim)
            && (decay.len(), time_bias.len()) == (value_heads, value_heads)
            && (index + 1) * shape.state_bytes() <= self.pool.layout().state_bytes();
        match fits {
            true => Ok(()),
            false => Err(shape_error(
                "a delta net",
                format!(
                    "layer {index} of {shape:?}, rows of {} and {}, states of {} bytes",
                    projected.width,
                    out.width,
                    self.pool.layout().state_bytes()
                ),
            )),
        }
    }
}

/// The sequences of a step that have rows, each with its part of a layer's states, which begin as the step
/// finds them.
fn parts<'a>(
    sequences: &[SequenceRows<'_>],
    states: &'a mut HeadPages,
    layer: &DeltaLayer<'_, CpuBackend>,
) -> Result<Vec<Part<'a>>> {
    let shape = layer.shape;
    let mut wanted: Vec<(Range<usize>, StateId)> = Vec::with_capacity(sequences.len());
    for s in sequences.iter().filter(|s| !s.rows.is_empty()) {
        let Some(StepStates { from, to }) = s.states else {
            return Err(shape_error("a delta net", "a sequence without a state"));
        };
        let part = layer.layer * shape.state_bytes()..(layer.layer + 1) * shape.state_bytes();
        match from {
            None => states.page_mut(to.0)[part].fill(0),
            Some(from) if from != to => {
                let (old, new) = states.pair(from.0, to.0);
                new[part.clone()].copy_from_slice(&old[part]);
            }
            Some(_) => {}
        }
        wanted.push((s.rows.clone(), to));
    }
    wanted.sort_by_key(|(_, id)| *id);
    if wanted.windows(2).any(|two| two[0].1 == two[1].1) {
        return Err(shape_error("a delta net", "two sequences with one state"));
    }
    let size = states.page_bytes();
    let (mut rest, mut before) = (states.bytes_mut(), 0);
    let mut parts = Vec::with_capacity(wanted.len());
    for (rows, id) in wanted {
        let start = id.0 as usize * size;
        let (state, behind) = rest[start - before..].split_at_mut(size);
        (rest, before) = (behind, start + size);
        let state: &mut [f32] = bytemuck::cast_slice_mut(state);
        let state = &mut state[layer.layer * shape.state_len()..][..shape.state_len()];
        let (heads, tail) = state.split_at_mut(shape.value_heads * shape.key_dim * shape.value_dim);
        parts.push(Part { rows, heads, tail });
    }
    Ok(parts)
}

impl Part<'_> {
    /// The channels of the row `back` rows before row `index` of the sequence's part of the step.
    fn row<'r>(&'r self, shape: &DeltaShape, projected: &'r CpuRows, index: usize, back: usize) -> &'r [f32] {
        let channels = shape.channels();
        match index.checked_sub(back) {
            Some(index) => &projected.values[(self.rows.start + index) * projected.width..][..channels],
            None => &self.tail[(shape.taps - 1 + index - back) * channels..][..channels],
        }
    }

    /// Keeps the last rows for the next step.
    fn keep_tail(&mut self, shape: &DeltaShape, projected: &CpuRows) {
        let (channels, kept) = (shape.channels(), shape.taps - 1);
        let new = self.rows.len().min(kept);
        self.tail.copy_within(new * channels.., 0);
        for i in kept - new..kept {
            let row = self.rows.end + i - kept;
            self.tail[i * channels..][..channels]
                .copy_from_slice(&projected.values[row * projected.width..][..channels]);
        }
    }
}

impl CpuBackend {
    /// The convolution of every row, and its queries and keys at length 1.
    fn mix_rows(
        &self,
        layer: &DeltaLayer<'_, Self>,
        parts: &[Part<'_>],
        projected: &CpuRows,
        mixed: &mut [f32],
    ) {
        let (shape, d) = (layer.shape, layer.shape.key_dim);
        // As an RMSNorm: x / √(mean x² + eps/d) · 1/√d.
        let unit = vec![1.0 / (d as f32).sqrt(); d];
        let query = vec![1.0 / d as f32; d];
        let eps = DeltaShape::EPS / d as f32;
        self.pool.run_chunks(mixed, shape.channels(), |row, mixed| {
            let Some(part) = parts.iter().find(|part| part.rows.contains(&row)) else { return };
            let index = row - part.rows.start;
            let rows: Vec<&[f32]> =
                (0..shape.taps).rev().map(|back| part.row(&shape, projected, index, back)).collect();
            self.kernels.conv_row(&rows, layer.conv, mixed);
            let mut normed = vec![0.0; d];
            let keys = &mut mixed[..2 * shape.key_width()];
            for (head, x) in keys.chunks_exact_mut(d).enumerate() {
                let weight = if head < shape.key_heads { &query } else { &unit };
                self.kernels.rms_norm_row(x, weight, eps, &mut normed);
                x.copy_from_slice(&normed);
            }
        });
    }

    /// The recurrence: a task for each sequence and value head.
    fn run_heads(
        &self,
        layer: &DeltaLayer<'_, Self>,
        parts: &mut [Part<'_>],
        projected: &CpuRows,
        mixed: &[f32],
        outputs: &mut [f32],
    ) {
        let shape = layer.shape;
        let DeltaShape { key_dim, value_dim, value_heads, .. } = shape;
        struct Task<'t> {
            head: usize,
            rows: Range<usize>,
            state: &'t mut [f32],
            out: &'t mut [f32],
        }
        let mut tasks = Vec::with_capacity(parts.len() * value_heads);
        let mut free = outputs;
        for part in parts {
            for (head, state) in part.heads.chunks_exact_mut(key_dim * value_dim).enumerate() {
                let (out, rest) = free.split_at_mut(part.rows.len() * value_dim);
                free = rest;
                tasks.push(Task { head, rows: part.rows.clone(), state, out });
            }
        }
        let shared = value_heads / shape.key_heads;
        let (keys, values) = (shape.key_width(), 2 * shape.key_width());
        let numbers = shape.channels() + shape.value_width();
        self.pool.run_chunks(&mut tasks, 1, |_, task| {
            let Task { head, rows, state, out } = &mut task[0];
            let (head, key_head) = (*head, *head / shared);
            let mut error = vec![0.0; value_dim];
            for (row, out) in rows.clone().zip(out.chunks_exact_mut(value_dim)) {
                let mixed = &mixed[row * shape.channels()..][..shape.channels()];
                let [b, a] = [0, value_heads]
                    .map(|part| projected.values[row * projected.width + numbers + part + head]);
                let step = softplus(a + layer.time_bias[head]);
                let row = DeltaRow {
                    query: &mixed[key_head * key_dim..][..key_dim],
                    key: &mixed[keys + key_head * key_dim..][..key_dim],
                    value: &mixed[values + head * value_dim..][..value_dim],
                    decay: (layer.decay[head] * step).exp(),
                    beta: 1.0 / (1.0 + (-b).exp()),
                };
                self.kernels.delta_row(&row, state, &mut error, out);
            }
        });
    }

    /// The norm of the heads' outputs and their gate.
    fn finish_rows(
        &self,
        layer: &DeltaLayer<'_, Self>,
        parts: &[Range<usize>],
        projected: &CpuRows,
        outputs: &[f32],
        out: &mut CpuRows,
    ) {
        let (shape, d) = (layer.shape, layer.shape.value_dim);
        let (weight, eps) = layer.norm;
        let mut starts = Vec::with_capacity(parts.len());
        let mut start = 0;
        for rows in parts {
            starts.push(start);
            start += rows.len() * shape.value_width();
        }
        self.pool.run_chunks(&mut out.values, out.width, |row, out| {
            let Some(part) = parts.iter().position(|rows| rows.contains(&row)) else { return };
            let (index, count) = (row - parts[part].start, parts[part].len());
            let gates = &projected.values[row * projected.width + shape.channels()..][..shape.value_width()];
            let mut normed = vec![0.0; d];
            for (head, (out, gate)) in out.chunks_exact_mut(d).zip(gates.chunks_exact(d)).enumerate() {
                let output = &outputs[starts[part] + (head * count + index) * d..][..d];
                self.kernels.rms_norm_row(output, weight, eps, &mut normed);
                self.kernels.gate_row(oscar_backend::Gate::Silu, gate, &normed, out);
            }
        });
    }
}

/// `ln(1 + eˣ)`.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}
