//! The decoder all supported families share, written once against the backend contract.
//!
//! ```text
//! x = embed(token)
//! for each layer:  x += Wo · attend(Wqkv · norm(x))
//!                  x += Wdown · gate(Wgate_up · norm(x))    or    x += experts(norm(x))
//! logits = Whead · norm(x)
//! ```
//!
//! Layers with latent attention ([`latent`]) have other products before `Wo`, layers with a gated delta
//! net ([`delta`]) a recurrent state instead of attention.
//!
//! Families that normalize results add `norm(Wo · …)` and `norm(Wdown · …)` instead.
//!
//! Where a model is split over several ranks ([`Shard`]), each rank runs these lines over its own
//! part, and both results that are added to `x` are summed over the ranks.
//!
//! The value rotation of the cache is folded into `Wv` and `Wo` when the weights are loaded, so it
//! costs nothing at run time. The key rotation cannot be folded, because QK-norm and RoPE stand
//! between; it is part of `attend`.

mod delta;
mod forward;
mod latent;
mod layer;
mod projections;

pub use forward::{StepInput, StepOutput};

use crate::config::{DecoderConfig, QkNorm};
use crate::error::LoadError;
use crate::experts;
use crate::matrices;
use crate::parallel::in_parallel;
use crate::shard::Shard;
use crate::tensor_names::Projection;
use crate::weights::Weights;
use delta::{DeltaMixer, DeltaRows, OutputGate};
use latent::{LatentMixer, LatentRows};
use layer::{check_features, norm_weights, ropes};
use oscar_backend::{Backend, BackendError, Benchmarks, HeadShape, WeightFormat};
use oscar_codec::RotationSet;
use projections::{Mixer, Projections, check_rotations};
use std::sync::Arc;

/// Errors of bringing a model onto a device.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error(
        "a step of {rows} prompt tokens needs {} MiB on the device and the KV pages {} MiB, but {} MiB are free: \
         lower --prefill-chunk or --kv-memory",
        needed >> 20, pages >> 20, free >> 20
    )]
    StepMemory { rows: usize, needed: usize, pages: usize, free: usize },
    #[error(
        "the rotations are for {found_layers} layers and {found_heads} KV heads of {found_dim}, the model has \
         {layers} layers and {kv_heads} KV heads of {head_dim}: calibrate this model or give its own file"
    )]
    Rotations {
        found_layers: usize,
        found_heads: usize,
        found_dim: usize,
        layers: usize,
        kv_heads: usize,
        head_dim: usize,
    },
    #[error("latent attention (MLA) takes no rotations: use --kv bf16")]
    LatentRotations,
    #[error("the model cannot be split over {ranks} ranks (--tensor-parallel): {why}")]
    Ranks { ranks: usize, why: String },
}

/// The parts of a layer that do not depend on the cache: its feed-forward matrices and its norms.
struct Layer<B: Backend> {
    input_norm: B::Vector,
    qk_norm: Option<(B::Vector, B::Vector)>,
    post_norm: B::Vector,
    /// Norms of the results of attention and of the feed-forward part.
    result_norms: Option<[B::Vector; 2]>,
    sinks: Option<B::Vector>,
    feed_forward: FeedForward<B>,
}

/// The second half of a layer.
enum FeedForward<B: Backend> {
    Dense { gate_up: B::Matrix, down: B::Matrix },
    Experts(B::Experts),
}

/// The parts that models with different caches share.
struct Body<B: Backend> {
    /// The whole model's.
    config: DecoderConfig,
    shard: Shard,
    /// The heads of this rank.
    shape: HeadShape,
    max_positions: usize,
    rope: B::Rope,
    /// That of sliding layers, if they have their own.
    sliding_rope: Option<B::Rope>,
    embedding: B::Matrix,
    layers: Vec<Layer<B>>,
    final_norm: B::Vector,
    /// The same on the host.
    final_norm_values: Vec<f32>,
    /// This rank's rows of the head; `None` when tied to the embedding, and whole.
    head: Option<B::Matrix>,
}

/// A model on a device, prepared for one set of rotations.
pub struct Transformer<B: Backend> {
    body: Arc<Body<B>>,
    projections: Arc<Vec<Projections<B>>>,
    rotations: Option<RotationSet>,
}

/// Activations of a step, kept from step to step.
pub struct Workspace<B: Backend> {
    hidden: B::Rows,
    /// Query, key and value heads; in models with latent attention, the query heads.
    qkv: B::Rows,
    latent: LatentRows<B>,
    attended: B::Rows,
    delta: DeltaRows<B>,
    gated: B::Rows,
    selected: B::Rows,
    /// The logits that this rank computes, if there are others.
    logits_part: B::Rows,
    logits: B::Rows,
}

impl<B: Backend> Workspace<B> {
    /// Rows between layers.
    pub fn hidden(&mut self) -> &mut B::Rows {
        &mut self.hidden
    }

    /// The logits of the last step that made some.
    pub fn logits(&mut self) -> &mut B::Rows {
        &mut self.logits
    }
}

/// Clones share the weights.
impl<B: Backend> Clone for Transformer<B> {
    fn clone(&self) -> Self {
        let Self { body, projections, rotations } = self;
        Self { body: body.clone(), projections: projections.clone(), rotations: rotations.clone() }
    }
}

impl<B: Backend> Transformer<B> {
    /// Brings the weights onto the device, on several threads. `rotations` are those of the cache that
    /// will be used; `context` bounds the positions (and the size of the RoPE table). `progress` is
    /// called with the bytes of the files that are done, at last with [`Weights::total_bytes`].
    pub fn build(
        backend: &B,
        config: &DecoderConfig,
        weights: &Weights,
        rotations: Option<&RotationSet>,
        context: usize,
        mut progress: impl FnMut(usize),
    ) -> Result<Self, BuildError> {
        check_features(backend, config)?;
        weights.check(config)?;
        check_rotations(config, rotations)?;
        let shard = Shard::of(backend, config)?;
        let names = weights.names();
        let max_positions = context.min(config.max_position_embeddings);
        let (rope, sliding_rope) = ropes(backend, config, max_positions)?;
        let parts = Part::all(&shard);
        let build = |index: usize| parts[index].build(backend, &shard, weights, rotations);
        let mut done = 0;
        let built = in_parallel(parts.len(), build, |index| {
            done += parts[index].bytes(weights);
            progress(done as usize);
        })?;
        progress(weights.total_bytes() as usize);
        let (mut layers, mut projections, mut vocabulary) = (Vec::new(), Vec::new(), Vec::new());
        for built in built {
            match built {
                Built::Vocabulary(matrix) => vocabulary.push(matrix),
                Built::Layer(layer) => layers.push(layer),
                Built::Projections(matrices) => projections.push(matrices),
            }
        }
        let final_norm_values = norm_weights(config, weights, &names.final_norm())?;
        let final_norm = backend.vector(&final_norm_values)?;
        let (config, shape) = (config.clone(), shard.part().heads());
        let mut vocabulary = vocabulary.into_iter();
        let (Some(embedding), head) = (vocabulary.next(), vocabulary.next()) else {
            return Err(LoadError::TensorMissing { name: names.embedding() }.into());
        };
        let body = Body {
            config,
            shard,
            shape,
            max_positions,
            rope,
            sliding_rope,
            embedding,
            layers,
            final_norm,
            final_norm_values,
            head,
        };
        Ok(Self { body: Arc::new(body), projections: Arc::new(projections), rotations: rotations.cloned() })
    }

    /// The same model for a cache with other rotations. Everything that does not depend on them is
    /// shared: equal rotations cost no memory, others only the attention projections they are
    /// folded into.
    pub fn with_rotations(
        &self,
        backend: &B,
        weights: &Weights,
        rotations: Option<&RotationSet>,
    ) -> Result<Self, BuildError> {
        let projections = if self.rotations.as_ref() == rotations {
            self.projections.clone()
        } else {
            let (config, shard) = (self.config(), &self.body.shard);
            weights.check(config)?;
            check_rotations(config, rotations)?;
            let build = |index| Projections::build(backend, shard, weights, rotations, index);
            Arc::new(in_parallel(config.layers, build, |_| {})?)
        };
        Ok(Self { body: self.body.clone(), projections, rotations: rotations.cloned() })
    }

    /// A model of this shape with random weights, made on the device: for benchmarks. `weights`
    /// does not apply to the embedding, the head and the matrices that rotations are folded into.
    /// `skew` makes some experts more frequent than others ([`experts::random`]).
    pub fn random(
        backend: &B,
        config: &DecoderConfig,
        weights: WeightFormat,
        skew: f32,
        rotations: Option<&RotationSet>,
        context: usize,
    ) -> Result<Self, BuildError>
    where
        B: Benchmarks,
    {
        check_features(backend, config)?;
        check_rotations(config, rotations)?;
        let shard = Shard::of(backend, config)?;
        let config = shard.part();
        let hidden = config.hidden_size;
        let (rope, sliding_rope) = ropes(backend, config, context)?;
        let ones = |len: usize| backend.vector(&vec![1.0; len]);
        let (mut layers, mut projections) = (Vec::new(), Vec::new());
        for index in 0..config.layers {
            let matrix = |which, format, outputs, inputs| {
                backend.random_matrix(format, outputs, inputs, (4 * index + which) as u64)
            };
            let folded = if rotations.is_some() { WeightFormat::Bf16 } else { weights };
            let norms = |query: usize, key: usize| Ok::<_, BackendError>((ones(query)?, ones(key)?));
            let cached = config.cache_layer(index);
            let rotation = |set: &RotationSet| backend.layer_rotation(shard.rotations(set, cached));
            let random = |part: Projection| {
                let [outputs, inputs] = part.shape(config);
                matrix(1, folded, outputs, inputs)
            };
            let qkv = || matrix(0, folded, config.query_width() + 2 * config.kv_width(), hidden);
            projections.push(match (config.delta_of(index), &config.latent) {
                (Some(delta), _) => {
                    let (mixer, output) = DeltaMixer::random(backend, delta, hidden, 4 * index)?;
                    Projections { mixer: Mixer::Delta(mixer), output }
                }
                (None, Some(latent)) => {
                    let mixer = Mixer::Latent(LatentMixer::random(backend, config, latent, random)?);
                    Projections { mixer, output: random(Projection::Output)? }
                }
                (None, None) => {
                    let values = projections::value_rotations(&shard, rotations, index);
                    let gate =
                        config.output_gate.then(|| OutputGate::random(backend, config, &values, index));
                    let (rotation, gate) = (rotations.map(rotation).transpose()?, gate.transpose()?);
                    let mixer = Mixer::Heads { qkv: qkv()?, rotation, gate };
                    Projections { mixer, output: random(Projection::Output)? }
                }
            });
            layers.push(Layer {
                input_norm: ones(hidden)?,
                qk_norm: match config.qk_norm {
                    QkNorm::None => None,
                    QkNorm::EachHead => Some(norms(config.head_dim, config.head_dim)?),
                    QkNorm::AllHeads => Some(norms(config.query_width(), config.kv_width())?),
                },
                post_norm: ones(hidden)?,
                result_norms: match config.result_norms {
                    true => Some([ones(hidden)?, ones(hidden)?]),
                    false => None,
                },
                sinks: config.attention_sinks.then(|| ones(config.query_heads)).transpose()?,
                feed_forward: match config.moe_of(index) {
                    Some(moe) => {
                        FeedForward::Experts(experts::random(backend, config, moe, weights, skew, index)?)
                    }
                    None => FeedForward::Dense {
                        gate_up: matrix(2, weights, 2 * config.intermediate_size, hidden)?,
                        down: matrix(3, weights, hidden, config.intermediate_size)?,
                    },
                },
            });
        }
        let vocabulary = |rows, seed| backend.random_matrix(WeightFormat::Bf16, rows, hidden, seed);
        let has_head = shard.is_split() || !config.tie_word_embeddings;
        let body = Body {
            shape: config.heads(),
            max_positions: context,
            rope,
            sliding_rope,
            embedding: vocabulary(config.vocab_size, 1 << 32)?,
            layers,
            final_norm: ones(hidden)?,
            final_norm_values: vec![1.0; hidden],
            head: has_head.then(|| vocabulary(shard.vocabulary().len(), 2 << 32)).transpose()?,
            config: shard.whole().clone(),
            shard,
        };
        Ok(Self { body: Arc::new(body), projections: Arc::new(projections), rotations: rotations.cloned() })
    }

    /// The whole model's configuration.
    pub fn config(&self) -> &DecoderConfig {
        &self.body.config
    }

    /// The heads of every layer on this rank.
    pub fn heads(&self) -> &HeadShape {
        &self.body.shape
    }

    /// Rotations that are folded in.
    pub fn rotations(&self) -> Option<&RotationSet> {
        self.rotations.as_ref()
    }

    /// The experts of each layer that has some, with the number of different ones that a step of this
    /// many rows is expected to choose.
    pub fn experts(&self, rows: usize) -> impl Iterator<Item = (&B::Experts, f64)> {
        let body = &*self.body;
        body.layers.iter().enumerate().filter_map(move |(index, layer)| match &layer.feed_forward {
            FeedForward::Dense { .. } => None,
            FeedForward::Experts(experts) => {
                Some((experts, body.config.moe_of(index).map_or(0.0, |moe| moe.distinct_experts(rows))))
            }
        })
    }

    /// Bytes of this rank's matrices that a step of this many rows reads. Experts are counted as
    /// often as a router that takes all of them equally often would choose them.
    pub fn matrix_bytes(&self, backend: &B, rows: usize) -> usize {
        let body = &*self.body;
        let dense = body.layers.iter().filter_map(|layer| match &layer.feed_forward {
            FeedForward::Dense { gate_up, down } => Some([gate_up, down]),
            FeedForward::Experts(_) => None,
        });
        let experts = self.experts(rows).map(|(experts, distinct)| {
            let (each, always) = backend.expert_bytes(experts);
            always + (each as f64 * distinct) as usize
        });
        let attention = self.projections.iter().flat_map(Projections::matrices);
        let head = body.head.as_ref().unwrap_or(&body.embedding);
        let matrices = attention.chain([head]).chain(dense.flatten());
        experts.sum::<usize>() + matrices.map(|matrix| backend.matrix_bytes(matrix)).sum::<usize>()
    }

    /// Positions this instance can address.
    pub fn max_positions(&self) -> usize {
        self.body.max_positions
    }

    pub fn workspace(&self, backend: &B) -> Workspace<B> {
        let (c, shard) = (self.body.shard.part(), &self.body.shard);
        Workspace {
            hidden: backend.rows(c.hidden_size),
            qkv: backend.rows(match &c.latent {
                Some(latent) => c.query_heads * latent.query(),
                None => c.query_width() + 2 * c.kv_width(),
            }),
            latent: LatentRows::new(backend, c.latent.as_ref()),
            attended: backend.rows(Projection::Output.shape(c)[1]),
            delta: DeltaRows::new(backend, c),
            gated: backend.rows(c.intermediate_size),
            selected: backend.rows(c.hidden_size),
            logits_part: backend.rows(shard.vocabulary().len()),
            logits: backend.rows(c.vocab_size),
        }
    }
}

/// A part of a model that is loaded by itself.
enum Part {
    Embedding,
    Head,
    Layer(usize),
    Projections(usize),
}

/// A part on the device.
enum Built<B: Backend> {
    /// The embedding, or the head.
    Vocabulary(B::Matrix),
    Layer(Layer<B>),
    Projections(Projections<B>),
}

impl Part {
    /// All parts of a model; the largest come first, so that no thread is left with one at the end.
    fn all(shard: &Shard) -> Vec<Self> {
        let head = (shard.is_split() || !shard.whole().tie_word_embeddings).then_some(Self::Head);
        let layers =
            (0..shard.whole().layers).flat_map(|layer| [Self::Layer(layer), Self::Projections(layer)]);
        [Self::Embedding].into_iter().chain(head).chain(layers).collect()
    }

    fn build<B: Backend>(
        &self,
        backend: &B,
        shard: &Shard,
        weights: &Weights,
        rotations: Option<&RotationSet>,
    ) -> Result<Built<B>, BuildError> {
        Ok(match *self {
            Self::Embedding => Built::Vocabulary(matrices::prepare_embedding(backend, weights)?),
            Self::Head => Built::Vocabulary(matrices::prepare_head(backend, shard, weights)?),
            Self::Layer(layer) => Built::Layer(Layer::build(backend, shard, weights, layer)?),
            Self::Projections(layer) => {
                Built::Projections(Projections::build(backend, shard, weights, rotations, layer)?)
            }
        })
    }

    /// Bytes of its tensors in the files.
    fn bytes(&self, weights: &Weights) -> u64 {
        let names = weights.names();
        let mixes = |name: &str| name.contains(".self_attn.") || name.contains(".linear_attn.");
        match *self {
            Self::Embedding => weights.bytes_of(|name| name == names.embedding()),
            Self::Head => weights.bytes_of(|name| name == names.lm_head()),
            Self::Layer(layer) => {
                let prefix = names.layer(layer);
                weights.bytes_of(|name| name.starts_with(&prefix) && !mixes(name))
            }
            Self::Projections(layer) => {
                let prefix = names.layer(layer);
                weights.bytes_of(|name| name.starts_with(&prefix) && mixes(name))
            }
        }
    }
}
