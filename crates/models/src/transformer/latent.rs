//! The attention of layers with a latent, in the absorbed form.
//!
//! ```text
//! q  = Wqb · norm(Wqa · norm(x))    or    Wq · norm(x)          [head][key | rotary]
//! kv = Wkva · norm(x)                                           [latent | rotary]
//! attended = attend_latent(q, kv)
//! ```
//!
//! The file's `kv_b_proj` holds, for each head, the rows `U` that make its key from the latent and the
//! rows `V` that make its value. `Uᵀ` goes before attention and `V` behind it, so that attention itself
//! reads latents only.

use super::{BuildError, Transformer, Workspace};
use crate::config::DecoderConfig;
use crate::error::LoadError;
use crate::latent::LatentConfig;
use crate::matrices::LayerMatrix;
use crate::tensor_names::Projection;
use crate::weights::Weights;
use oscar_backend::{
    Backend, BackendError, Benchmarks, HostMatrix, HostValues, LatentHeads, Output, Product, Step, Tap,
    WeightFormat,
};

/// The matrices and norms of one layer before its output projection.
pub(super) struct LatentMixer<B: Backend> {
    /// To the latent of queries, and its norm; absent if queries are made from the row itself.
    query_down: Option<(B::Matrix, B::Vector)>,
    query: B::Matrix,
    latent_down: B::Matrix,
    latent_norm: B::Vector,
    /// `Uᵀ` and `V` of each head.
    key_up: Vec<B::Matrix>,
    value_up: Vec<B::Matrix>,
}

/// Activations of latent attention.
pub(super) struct LatentRows<B: Backend> {
    query: B::Rows,
    latent: B::Rows,
}

impl<B: Backend> LatentRows<B> {
    /// Empty ones in models without latent attention.
    pub(super) fn new(backend: &B, config: Option<&LatentConfig>) -> Self {
        let width = |width: Option<usize>| backend.rows(width.unwrap_or(1));
        Self {
            query: width(config.and_then(|latent| latent.query_rank)),
            latent: width(config.map(LatentConfig::row)),
        }
    }
}

impl<B: Backend> LatentMixer<B> {
    pub(super) fn build(
        backend: &B,
        config: &LatentConfig,
        weights: &Weights,
        layer: usize,
        prepare: impl Fn(LayerMatrix) -> Result<B::Matrix, BuildError>,
    ) -> Result<Self, BuildError> {
        let names = weights.names();
        let vector =
            |name: String| -> Result<B::Vector, BuildError> { Ok(backend.vector(&weights.vector(&name)?)?) };
        let (query_down, query) = match config.query_rank {
            Some(_) => {
                let down = (prepare(LayerMatrix::QueryDown)?, vector(names.query_latent_norm(layer))?);
                (Some(down), prepare(LayerMatrix::QueryUp)?)
            }
            None => (None, prepare(LayerMatrix::Query)?),
        };
        let name = names.weight(layer, Projection::LatentUp);
        let up = weights.matrix(&name)?.to_f32_vec();
        let (rank, heads) = (config.rank, up.chunks_exact((config.key + config.value) * config.rank));
        if heads.len() == 0 || !heads.remainder().is_empty() {
            return Err(LoadError::TensorMissing { name }.into());
        }
        let (mut key_up, mut value_up) = (Vec::new(), Vec::new());
        for head in heads {
            let (keys, values) = head.split_at(config.key * rank);
            let turned = transposed(keys, rank);
            key_up.push(matrix(backend, rank, config.key, &turned)?);
            value_up.push(matrix(backend, config.value, rank, values)?);
        }
        Ok(Self {
            query_down,
            query,
            latent_down: prepare(LayerMatrix::LatentDown)?,
            latent_norm: vector(names.latent_norm(layer))?,
            key_up,
            value_up,
        })
    }

    /// A layer of random weights: for benchmarks.
    pub(super) fn random(
        backend: &B,
        config: &DecoderConfig,
        latent: &LatentConfig,
        matrix: impl Fn(Projection) -> Result<B::Matrix, BackendError>,
    ) -> Result<Self, BackendError>
    where
        B: Benchmarks,
    {
        let ones = |len: usize| backend.vector(&vec![1.0; len]);
        let each_head = |outputs, inputs, seed: usize| -> Result<Vec<B::Matrix>, BackendError> {
            let seeds = (0..config.query_heads).map(|head| (seed + head) as u64);
            seeds.map(|seed| backend.random_matrix(WeightFormat::Bf16, outputs, inputs, seed)).collect()
        };
        let (query_down, query) = match latent.query_rank {
            Some(rank) => (Some((matrix(Projection::QueryDown)?, ones(rank)?)), matrix(Projection::QueryUp)?),
            None => (None, matrix(Projection::Query)?),
        };
        Ok(Self {
            query_down,
            query,
            latent_down: matrix(Projection::LatentDown)?,
            latent_norm: ones(latent.rank)?,
            key_up: each_head(latent.rank, latent.key, 1 << 20)?,
            value_up: each_head(latent.value, latent.rank, 2 << 20)?,
        })
    }

    pub(super) fn matrices(&self) -> Vec<&B::Matrix> {
        let down = self.query_down.iter().map(|(matrix, _)| matrix);
        down.chain([&self.query, &self.latent_down]).chain(&self.key_up).chain(&self.value_up).collect()
    }
}

impl<B: Backend> Transformer<B> {
    /// Latent attention: from `w.hidden` to `w.attended`.
    pub(super) fn attend_latent(
        &self,
        step: &mut B::Step<'_>,
        index: usize,
        mixer: &LatentMixer<B>,
        w: &mut Workspace<B>,
        tap: Option<&mut dyn Tap>,
    ) -> Result<(), BackendError> {
        let (body, config) = (&*self.body, &self.body.config);
        let (Some(latent), None) = (&config.latent, tap) else {
            let why = "latent attention (MLA) is neither calibrated nor scored for eviction";
            return Err(BackendError::Unsupported { device: "every device".into(), why: why.into() });
        };
        let norm = &body.layers[index].input_norm;
        let of_hidden = |matrix| Product::of_normed(norm, config.rms_norm_eps, matrix, Output::Replace);
        match &mixer.query_down {
            Some((down, norm)) => {
                step.product(of_hidden(down), &w.hidden, &mut w.latent.query)?;
                let up = Product::of_normed(norm, latent.norm_eps, &mixer.query, Output::Replace);
                step.product(up, &w.latent.query, &mut w.qkv)?;
            }
            None => step.product(of_hidden(&mixer.query), &w.hidden, &mut w.qkv)?,
        }
        step.product(of_hidden(&mixer.latent_down), &w.hidden, &mut w.latent.latent)?;
        let [key_up, value_up] = [&mixer.key_up, &mixer.value_up].map(|up| up.iter().collect::<Vec<_>>());
        let heads = LatentHeads {
            layer: index,
            shape: latent.shape(),
            norm: (&mixer.latent_norm, latent.norm_eps),
            rope: &body.rope,
            key_up: &key_up,
            value_up: &value_up,
        };
        step.attend_latent(heads, &w.qkv, &w.latent.latent, &mut w.attended)
    }
}

/// An unquantized matrix of these weights.
fn matrix<B: Backend>(
    backend: &B,
    outputs: usize,
    inputs: usize,
    values: &[f32],
) -> Result<B::Matrix, BackendError> {
    backend.matrix(HostMatrix { outputs, inputs, values: HostValues::F32(values), bias: None })
}

/// Rows of `width` as columns.
fn transposed(rows: &[f32], width: usize) -> Vec<f32> {
    let count = rows.len() / width;
    (0..rows.len()).map(|i| rows[i % count * width + i / count]).collect()
}
