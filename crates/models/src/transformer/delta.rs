//! Layers with a gated delta net, and the gate behind attention.
//!
//! ```text
//! projected = Win · norm(x)                        [q | k | v | z | b | a]
//! attended  = mix_delta(projected)                 with the state of the sequence
//!
//! gates     = Wgate · norm(x)                      in layers with attention
//! attended  = unrotated(attended) · σ(gates)
//! ```
//!
//! The gate stands between attention and `Wo`, so the value rotation of a cache cannot be folded into
//! `Wo`: the output of each head is turned back before its gate. `Wv` carries the rotation as usual.

use super::{BuildError, Transformer, Workspace};
use crate::config::DecoderConfig;
use crate::delta::DeltaConfig;
use crate::weights::Weights;
use oscar_backend::{
    Backend, BackendError, Benchmarks, DeltaLayer, DeltaStep, HostMatrix, HostValues, Output, Product, Step,
    WeightFormat,
};
use oscar_codec::Rotation;

/// The matrix and the vectors of one layer before its output projection.
pub(super) struct DeltaMixer<B: Backend> {
    input: B::Matrix,
    conv: B::Vector,
    decay: B::Vector,
    time_bias: B::Vector,
    norm: B::Vector,
}

/// The gate behind attention of one layer.
pub(super) struct OutputGate<B: Backend> {
    gates: B::Matrix,
    /// For each KV head, the matrix that undoes the value rotation; none without rotations.
    unrotate: Vec<B::Matrix>,
}

/// Activations of both.
pub(super) struct DeltaRows<B: Backend> {
    projected: B::Rows,
    mixed: B::Rows,
    gates: B::Rows,
}

impl<B: Backend> DeltaRows<B> {
    /// Empty ones in models without delta nets.
    pub(super) fn new(backend: &B, config: &DecoderConfig) -> Self {
        let shape = config.delta.as_ref().map(|delta| delta.shape);
        Self {
            projected: backend.rows(shape.map_or(1, |shape| shape.projected())),
            mixed: backend.rows(shape.map_or(1, |shape| shape.value_width())),
            gates: backend.rows(if config.output_gate { config.query_width() } else { 1 }),
        }
    }
}

/// An unquantized matrix of these weights.
fn matrix<B: Backend>(backend: &B, inputs: usize, values: &[f32]) -> Result<B::Matrix, BackendError> {
    let outputs = values.len() / inputs;
    backend.matrix(HostMatrix { outputs, inputs, values: HostValues::F32(values), bias: None })
}

impl<B: Backend> DeltaMixer<B> {
    /// The mixer of a layer and its output projection.
    pub(super) fn build(
        backend: &B,
        config: &DecoderConfig,
        delta: &DeltaConfig,
        weights: &Weights,
        layer: usize,
    ) -> Result<(Self, B::Matrix), BuildError> {
        let (shape, hidden) = (&delta.shape, config.hidden_size);
        let [conv, decay, time_bias, norm] = weights.names().delta_vectors(layer);
        let vector = |name: &str| weights.vector(name);
        // From [channel][tap] to [tap][channel].
        let (file, channels) = (vector(&conv)?, shape.channels());
        let conv: Vec<f32> =
            (0..file.len()).map(|i| file[i % channels * shape.taps + i / channels]).collect();
        let decay: Vec<f32> = vector(&decay)?.into_iter().map(|log| -log.exp()).collect();
        let mixer = Self {
            input: matrix(backend, hidden, &delta.input(weights, layer, hidden)?)?,
            conv: backend.vector(&conv)?,
            decay: backend.vector(&decay)?,
            time_bias: backend.vector(&vector(&time_bias)?)?,
            norm: backend.vector(&vector(&norm)?)?,
        };
        let output = delta.matrices(weights.names(), layer, hidden).pop();
        let output = output.map(|(name, _)| name).unwrap_or_default();
        let output = weights.matrix(&output)?.to_f32_vec();
        Ok((mixer, matrix(backend, shape.value_width(), &output)?))
    }

    /// A layer of random weights: for benchmarks.
    pub(super) fn random(
        backend: &B,
        delta: &DeltaConfig,
        hidden: usize,
        seed: usize,
    ) -> Result<(Self, B::Matrix), BackendError>
    where
        B: Benchmarks,
    {
        let (shape, seed) = (&delta.shape, seed as u64);
        let random = |outputs, inputs, seed| backend.random_matrix(WeightFormat::Bf16, outputs, inputs, seed);
        let filled = |value: f32, len: usize| backend.vector(&vec![value; len]);
        let mixer = Self {
            input: random(shape.projected(), hidden, seed)?,
            conv: filled(1.0 / shape.taps as f32, shape.taps * shape.channels())?,
            decay: filled(-0.1, shape.value_heads)?,
            time_bias: filled(0.0, shape.value_heads)?,
            norm: filled(1.0, shape.value_dim)?,
        };
        Ok((mixer, random(hidden, shape.value_width(), seed + 1)?))
    }

    pub(super) fn matrices(&self) -> Vec<&B::Matrix> {
        vec![&self.input]
    }
}

impl<B: Backend> OutputGate<B> {
    /// The gate of a layer from its rows of the query projection.
    pub(super) fn build(
        backend: &B,
        hidden: usize,
        gates: &[f32],
        rotations: &[&Rotation],
    ) -> Result<Self, BackendError> {
        // Rotated values are `v · R`, and `R` is orthogonal: row i of `R` gives channel i back.
        let undo = |rotation: &&Rotation| matrix(backend, rotation.head_dim(), rotation.matrix());
        let unrotate = rotations.iter().map(undo).collect::<Result<_, _>>()?;
        Ok(Self { gates: matrix(backend, hidden, gates)?, unrotate })
    }

    /// A gate of random weights: for benchmarks.
    pub(super) fn random(
        backend: &B,
        config: &DecoderConfig,
        rotations: &[&Rotation],
        seed: usize,
    ) -> Result<Self, BackendError>
    where
        B: Benchmarks,
    {
        let (outputs, hidden) = (config.query_width(), config.hidden_size);
        let gates = backend.random_matrix(WeightFormat::Bf16, outputs, hidden, seed as u64)?;
        let undo = |rotation: &&Rotation| matrix(backend, rotation.head_dim(), rotation.matrix());
        Ok(Self { gates, unrotate: rotations.iter().map(undo).collect::<Result<_, _>>()? })
    }

    pub(super) fn matrices(&self) -> impl Iterator<Item = &B::Matrix> {
        [&self.gates].into_iter().chain(&self.unrotate)
    }
}

/// Queries and gates, which files alternate head by head, `width` numbers each.
pub(super) fn split_gates(rows: &[f32], width: usize) -> [Vec<f32>; 2] {
    [0, 1].map(|first| rows.chunks_exact(width).skip(first).step_by(2).flatten().copied().collect())
}

impl<B: Backend> Transformer<B> {
    /// A delta net: from `w.hidden` to `w.delta.mixed`.
    pub(super) fn mix_delta(
        &self,
        step: &mut B::Step<'_>,
        index: usize,
        mixer: &DeltaMixer<B>,
        w: &mut Workspace<B>,
    ) -> Result<(), BackendError> {
        let (body, config) = (&*self.body, &self.body.config);
        let Some(delta) = config.delta_of(index) else { return Ok(()) };
        let norm = &body.layers[index].input_norm;
        let input = Product::of_normed(norm, config.rms_norm_eps, &mixer.input, Output::Replace);
        step.product(input, &w.hidden, &mut w.delta.projected)?;
        let layer = DeltaLayer {
            layer: config.deltas_before(index),
            shape: delta.shape,
            conv: &mixer.conv,
            decay: &mixer.decay,
            time_bias: &mixer.time_bias,
            norm: (&mixer.norm, config.rms_norm_eps),
        };
        step.mix_delta(layer, &w.delta.projected, &mut w.delta.mixed)
    }

    /// The gate behind attention, on `w.attended`.
    pub(super) fn gate_heads(
        &self,
        step: &mut B::Step<'_>,
        index: usize,
        gate: &OutputGate<B>,
        w: &mut Workspace<B>,
    ) -> Result<(), BackendError> {
        let body = &*self.body;
        let norm = &body.layers[index].input_norm;
        let gates = Product::of_normed(norm, body.config.rms_norm_eps, &gate.gates, Output::Replace);
        step.product(gates, &w.hidden, &mut w.delta.gates)?;
        let unrotate: Vec<&B::Matrix> = gate.unrotate.iter().collect();
        step.gate_heads(&unrotate, &w.delta.gates, &mut w.attended)
    }
}

impl<B: Backend> DeltaRows<B> {
    /// The outputs of the last delta net.
    pub(super) fn mixed(&self) -> &B::Rows {
        &self.mixed
    }
}
