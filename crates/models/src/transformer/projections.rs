//! The attention matrices of a layer on their way to a device, with the rotation of a cache folded in.

use super::BuildError;
use super::delta::{DeltaMixer, OutputGate, split_gates};
use super::latent::LatentMixer;
use crate::config::DecoderConfig;
use crate::fold::{rotate_inputs, rotate_outputs};
use crate::matrices::{self, LayerMatrix};
use crate::shard::Shard;
use crate::tensor_names::Projection;
use crate::weights::Weights;
use oscar_backend::{Backend, HostMatrix, HostValues};
use oscar_codec::{Rotation, RotationSet};

/// A layer's attention projections, with the rotation of a cache folded in.
pub(super) struct Projections<B: Backend> {
    pub(super) mixer: Mixer<B>,
    pub(super) output: B::Matrix,
}

/// What a layer's row becomes before it meets the cache.
pub(super) enum Mixer<B: Backend> {
    /// Query, key and value heads.
    Heads { qkv: B::Matrix, rotation: Option<B::LayerRotation>, gate: Option<OutputGate<B>> },
    /// Queries, and one latent row that is key and value of all heads.
    Latent(LatentMixer<B>),
    /// A gated delta net.
    Delta(DeltaMixer<B>),
}

impl<B: Backend> Projections<B> {
    /// All matrices.
    pub(super) fn matrices(&self) -> Vec<&B::Matrix> {
        let mut all = match &self.mixer {
            Mixer::Heads { qkv, gate, .. } => {
                [qkv].into_iter().chain(gate.iter().flat_map(OutputGate::matrices)).collect()
            }
            Mixer::Delta(delta) => delta.matrices(),
            Mixer::Latent(latent) => latent.matrices(),
        };
        all.push(&self.output);
        all
    }
}

impl<B: Backend> Projections<B> {
    pub(super) fn build(
        backend: &B,
        shard: &Shard,
        weights: &Weights,
        rotations: Option<&RotationSet>,
        index: usize,
    ) -> Result<Self, BuildError> {
        let prepare = |matrix| matrices::prepare(backend, shard, weights, index, matrix);
        let config = shard.part();
        if let Some(delta) = config.delta_of(index) {
            let (mixer, output) = DeltaMixer::build(backend, config, delta, weights, index)?;
            return Ok(Self { mixer: Mixer::Delta(mixer), output });
        }
        if rotations.is_none() && !config.output_gate {
            let mixer = match &config.latent {
                Some(latent) => Mixer::Latent(LatentMixer::build(backend, latent, weights, index, prepare)?),
                None => {
                    Mixer::Heads { qkv: prepare(LayerMatrix::QueryKeyValue)?, rotation: None, gate: None }
                }
            };
            return Ok(Self { mixer, output: prepare(LayerMatrix::Output)? });
        }
        let values = value_rotations(shard, rotations, index);
        let mut gate = None;
        let mut matrix =
            Vec::with_capacity((config.query_width() + 2 * config.kv_width()) * config.hidden_size);
        for &projection in LayerMatrix::QueryKeyValue.projections() {
            let mut part = shard.projection(weights, index, projection)?;
            if projection == Projection::Query && config.output_gate {
                let [queries, gates] = split_gates(&part, config.head_dim * config.hidden_size);
                gate = Some(OutputGate::build(backend, config.hidden_size, &gates, &values)?);
                part = queries;
            }
            if projection == Projection::Value && !values.is_empty() {
                rotate_outputs(&mut part, config.hidden_size, &values);
            }
            matrix.extend(part);
        }
        let mut bias = matrices::biases(shard, weights, index, LayerMatrix::QueryKeyValue)?;
        if let Some(bias) = bias.as_mut().filter(|_| !values.is_empty()) {
            let start = config.query_width() + config.kv_width();
            rotate_outputs(&mut bias[start..], 1, &values);
        }
        let qkv = backend.matrix(HostMatrix {
            outputs: config.query_width() + 2 * config.kv_width(),
            inputs: config.hidden_size,
            values: HostValues::F32(&matrix),
            bias: bias.as_deref(),
        })?;
        let mut out = shard.projection(weights, index, Projection::Output)?;
        if gate.is_none() {
            rotate_inputs(&mut out, config.query_width(), config.group_size(), &values);
        }
        let output = backend.matrix(HostMatrix {
            outputs: config.hidden_size,
            inputs: config.query_width(),
            values: HostValues::F32(&out),
            bias: matrices::biases(shard, weights, index, LayerMatrix::Output)?.as_deref(),
        })?;
        let cached = config.cache_layer(index);
        let rotation =
            rotations.map(|set| backend.layer_rotation(shard.rotations(set, cached))).transpose()?;
        Ok(Self { mixer: Mixer::Heads { qkv, rotation, gate }, output })
    }
}

/// The value rotations of this rank's heads of a layer with attention; none without rotations.
pub(super) fn value_rotations<'r>(
    shard: &Shard,
    rotations: Option<&'r RotationSet>,
    layer: usize,
) -> Vec<&'r Rotation> {
    let cached = shard.whole().cache_layer(layer);
    let heads = rotations.map(|set| shard.rotations(set, cached)).unwrap_or_default();
    heads.iter().map(|head| &head.value).collect()
}

/// Rotations must be made for this model's shape.
pub(super) fn check_rotations(
    config: &DecoderConfig,
    rotations: Option<&RotationSet>,
) -> Result<(), BuildError> {
    match rotations {
        Some(_) if config.latent.is_some() => Err(BuildError::LatentRotations),
        Some(set)
            if (set.layers(), set.kv_heads(), set.head_dim())
                != (config.cache_layers(), config.kv_heads, config.head_dim) =>
        {
            Err(BuildError::Rotations {
                found_layers: set.layers(),
                found_heads: set.kv_heads(),
                found_dim: set.head_dim(),
                layers: config.cache_layers(),
                kv_heads: config.kv_heads,
                head_dim: config.head_dim,
            })
        }
        _ => Ok(()),
    }
}
