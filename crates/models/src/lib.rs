//! Loading decoder language models from the files that Hugging Face publishes.
//!
//! The path through this crate: a [`ModelSource`] says where the files are, [`DecoderConfig::load`]
//! lowers the family's `config.json` into one description that all families share,
//! [`Weights::open`] maps the safetensors without copying them, and [`Weights::check`] proves that
//! the two agree before any memory is spent.
//!
//! Invariant: nothing here knows requests, devices or HTTP serving. A model that loads is one whose
//! full attention, rotary scaling and activation we compute exactly; anything else is refused by
//! name.

mod config;
mod delta;
mod error;
mod experts;
mod families;
mod family;
mod fingerprint;
mod fold;
mod fp8;
mod fused;
mod generation;
#[cfg(feature = "hub")]
pub mod hub;
#[cfg(any(feature = "hub", test))]
mod hub_files;
mod latent;
mod matrices;
mod mmap;
mod parallel;
mod rope;
mod rope_fields;
pub mod shapes;
mod shard;
mod source;
mod tensor;
mod tensor_names;
pub mod tiny;
mod transformer;
mod weights;

pub use config::{DecoderConfig, Family, MoeConfig, QkNorm, SlidingLayers};
pub use delta::DeltaConfig;
pub use error::{LineList, LoadError};
pub use fp8::Fp8Weights;
pub use generation::GenerationConfig;
pub use latent::LatentConfig;
pub use matrices::{Holding, LayerMatrix, MatrixView};
pub use rope::{RopeConfig, RopeScaling, RopeTable};
pub use shard::Shard;
pub use source::{EmbeddedFiles, ModelName, ModelSource, hub_cache_folders};
pub use tensor::{TensorView, WeightDtype};
pub use tensor_names::{ExpertNames, Projection, RequiredTensor, TensorNames, required_tensors};
pub use transformer::{BuildError, StepInput, StepOutput, Transformer, Workspace};
pub use weights::Weights;
