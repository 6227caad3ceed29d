//! The parts of a layer that do not depend on the cache on their way to a device, and what the whole
//! model needs of it.

use super::{BuildError, FeedForward, Layer};
use crate::config::{DecoderConfig, QkNorm};
use crate::error::LoadError;
use crate::experts;
use crate::matrices::{self, LayerMatrix};
use crate::rope::{RopeConfig, RopeTable};
use crate::shard::Shard;
use crate::weights::Weights;
use oscar_backend::{Backend, BackendError};

impl<B: Backend> Layer<B> {
    pub(super) fn build(
        backend: &B,
        shard: &Shard,
        weights: &Weights,
        index: usize,
    ) -> Result<Self, BuildError> {
        let (config, names) = (shard.whole(), weights.names());
        let vector = |name: String| -> Result<B::Vector, BuildError> {
            Ok(backend.vector(&norm_weights(config, weights, &name)?)?)
        };
        Ok(Self {
            input_norm: vector(names.input_norm(index))?,
            qk_norm: match config.qk_norm {
                _ if config.delta_of(index).is_some() => None,
                QkNorm::None => None,
                QkNorm::EachHead | QkNorm::AllHeads => {
                    Some((vector(names.query_norm(index))?, vector(names.key_norm(index))?))
                }
            },
            post_norm: vector(names.feed_forward_norm(index, config))?,
            result_norms: match config.result_norms {
                true => {
                    let [attention, feed_forward] = names.result_norms(index).map(vector);
                    Some([attention?, feed_forward?])
                }
                false => None,
            },
            sinks: match config.attention_sinks {
                true => Some(backend.vector(&weights.vector(&names.sinks(index))?)?),
                false => None,
            },
            feed_forward: match config.moe_of(index) {
                Some(moe) => FeedForward::Experts(experts::load(backend, config, moe, weights, index)?),
                None => FeedForward::Dense {
                    gate_up: matrices::prepare(backend, shard, weights, index, LayerMatrix::GateUp)?,
                    down: matrices::prepare(backend, shard, weights, index, LayerMatrix::Down)?,
                },
            },
        })
    }
}

/// Refuses a model that the device lacks something for.
pub(super) fn check_features<B: Backend>(backend: &B, config: &DecoderConfig) -> Result<(), BackendError> {
    let missing = config.features().into_iter().filter(|&feature| !backend.computes(feature));
    let missing: Vec<String> = missing.map(|feature| feature.to_string()).collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(BackendError::Unsupported {
            device: backend.describe(),
            why: format!(
                "{} has {}, which it does not compute; use --device cpu",
                config.family.architecture(),
                missing.join(", ")
            ),
        }),
    }
}

/// The RoPE tables of all layers, and those of sliding layers if they have their own.
pub(super) fn ropes<B: Backend>(
    backend: &B,
    config: &DecoderConfig,
    positions: usize,
) -> Result<(B::Rope, Option<B::Rope>), BuildError> {
    let width = config.rotary_width();
    let rope = |rope: &RopeConfig| -> Result<B::Rope, BuildError> {
        let table = RopeTable::try_new(rope, width, positions)
            .map_err(|bytes| LoadError::TooManyPositions { positions, bytes })?;
        Ok(backend.rope(table.cos_rows(), table.sin_rows(), width)?)
    };
    let sliding = config.sliding.as_ref().and_then(|sliding| sliding.rope.as_ref());
    Ok((rope(&config.rope)?, sliding.map(rope).transpose()?))
}

/// The weights of an RMSNorm as they multiply.
pub(super) fn norm_weights(
    config: &DecoderConfig,
    weights: &Weights,
    name: &str,
) -> Result<Vec<f32>, LoadError> {
    let mut values = weights.vector(name)?;
    values.iter_mut().for_each(|value| *value += config.norm_offset);
    Ok(values)
}
