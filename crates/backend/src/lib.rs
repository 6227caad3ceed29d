//! The contract between models and the devices that run them.
//!
//! A [`Backend`] makes what lives on a device: matrices, page storage, rows of activations. It also
//! states facts about the device. A [`Step`] runs one pass of a model over some sequences. It
//! borrows their page tables and the page storage until it ends, so nothing else can touch them.
//! Operations are as large as a model's: a device chooses instructions, memory and parallelism.
//!
//! **Invariants:** a backend knows no model, no request and no HTTP. The result of a row depends on
//! that row and its own sequence alone: not on the other rows of the step, not on the number of
//! threads.

mod blocks;
mod candidates;
mod communicator;
mod delta;
mod error;
mod experts;
mod extensions;
mod features;
mod fp8;
mod gate;
mod heads;
mod kernels;
mod matrix;
mod mxfp4;
mod product;
mod sizing;
mod views;

pub use blocks::BlockId;
pub use candidates::{
    Candidate, MOST_CANDIDATES, Pick, TokenMask, allows, argmax, candidate_key, candidate_of, pick,
};
pub use communicator::{Communicator, HeldExperts};
pub use delta::{DeltaLayer, DeltaShape, DeltaStep};
pub use error::{BackendError, Result};
pub use experts::{ExpertFormat, ExpertGroups, ExpertId, ExpertsShape, RouterRule, RouterScores, route};
pub use extensions::{
    Benchmarks, CacheHead, Calibrates, Divergence, HostRows, StepTimes, Tap, TappedRows, random_amplitude,
};
pub use features::Feature;
pub use fp8::{FP8_BLOCK, Fp8Blocks, Fp8Matrix, ScaleGrid, fp8_blocks, fp8_multiplied};
pub use gate::Gate;
pub use heads::{HeadShape, LatentHeads, LatentShape, LayerHeads, latent_refusal};
pub use kernels::{AttentionKernels, AttentionPath};
pub use matrix::{HostMatrix, HostValues, WeightFormat};
pub use mxfp4::{MXFP4_GROUP, MXFP4_LARGEST_SCALE, Mxfp4Blocks, mxfp4_factor};
pub use oscar_cache::{SequenceRows, StepStates, View};
pub use product::{Output, Product};
pub use sizing::{PrefillWave, StepMemory, StepSize};
pub use views::{HeadHistory, HistoryRows, NO_ROW_EVICTION, Reduce, RowEviction, Scoring, eviction_refusal};

use oscar_codec::{CacheLayout, HeadRotations};

/// A device that runs models: construction and facts.
pub trait Backend: Send + Sync + Sized {
    /// Activations, `rows × width`, in f32.
    type Rows: Send;
    type Matrix: Send + Sync;
    type Vector: Send + Sync;
    /// Cosines and sines by position.
    type Rope: Send + Sync;
    /// Key rotations and key means of one layer's heads.
    type LayerRotation: Send + Sync;
    /// The experts of one layer and their router.
    type Experts: Send + Sync;
    /// Storage of the KV pages.
    type Pool: Send;
    type Step<'s>: Step<Self>
    where
        Self: 's;

    /// One line for the start banner: device, instruction set, threads.
    fn describe(&self) -> String;
    /// The kernels that read this cache, so that no slow path is silent.
    fn attention(&self, layout: &CacheLayout) -> AttentionKernels;
    /// This cache as the device keeps it: bytes in its own order, blocks of the size they take there.
    /// Budgets, page tables and [`Backend::pool`] use the layout that this returns.
    fn held_layout(&self, layout: &CacheLayout) -> CacheLayout;
    /// Whether attention over this cache honours [`SequenceRows::coded_until`]. If not, there are no
    /// approximate prefix hits.
    fn reads_codes_in_window(&self, layout: &CacheLayout) -> bool;
    /// Whether products use FP8 weights as they are. Other devices expand them on arrival.
    fn multiplies_fp8(&self) -> bool;
    /// Whether steps compute a part that only some families have. A model that needs another is
    /// refused before anything is loaded.
    fn computes(&self, feature: Feature) -> bool;
    /// Prompt tokens of one step that suit this device and a model with these heads.
    fn prefill_chunk(&self, heads: &HeadShape) -> usize;
    /// How the attention of a prompt is divided among the parts of the device.
    fn prefill_wave(&self, heads: &HeadShape) -> PrefillWave;
    /// Bytes that steps up to this size take, beside weights and pages.
    fn step_memory(&self, size: &StepSize) -> StepMemory;
    /// Bytes free on the device; `None` where the system decides.
    fn free_memory(&self) -> Result<Option<usize>>;
    /// The other ranks, if this device holds only a part of each model that it runs.
    fn communicator(&self) -> Option<&dyn Communicator> {
        None
    }

    fn matrix(&self, weights: HostMatrix<'_>) -> Result<Self::Matrix>;
    /// Bytes of weights that one pass over the matrix reads, as this device holds it.
    fn matrix_bytes(&self, matrix: &Self::Matrix) -> usize;
    fn vector(&self, values: &[f32]) -> Result<Self::Vector>;
    /// Tables `[position][rotary_dim / 2]`: RoPE turns the first `rotary_dim` channels of a head.
    fn rope(&self, cos: &[f32], sin: &[f32], rotary_dim: usize) -> Result<Self::Rope>;
    /// Room for the experts of one layer; [`Backend::load_expert`] then fills it.
    fn experts(&self, shape: &ExpertsShape<'_>) -> Result<Self::Experts>;
    /// Stores the gate, up and down matrices of one expert, which have the layer's format.
    fn load_expert(
        &self,
        experts: &mut Self::Experts,
        id: ExpertId,
        parts: [HostMatrix<'_>; 3],
    ) -> Result<()>;
    /// Bytes of weights that a step reads for one expert, and for the router and the shared expert.
    fn expert_bytes(&self, experts: &Self::Experts) -> (usize, usize);
    fn layer_rotation(&self, heads: &[HeadRotations]) -> Result<Self::LayerRotation>;
    /// Empty rows; operations that write to them give them their length.
    fn rows(&self, width: usize) -> Self::Rows;
    /// Reserves page storage of up to `budget` bytes for a model with these heads. Memory is touched
    /// as pages are used. `layout` must come from [`Backend::held_layout`].
    fn pool(&self, layout: &CacheLayout, heads: &HeadShape, budget: usize) -> Result<Self::Pool>;

    /// Begins a step over `sequences`, whose pages lie in `pool`. A device runs one step at a time: a
    /// second call waits until the first step is dropped, so a thread must not hold two.
    fn step<'s>(
        &'s self,
        sequences: &'s [SequenceRows<'s>],
        pool: &'s mut Self::Pool,
    ) -> Result<Self::Step<'s>>;
    /// Waits until the device has run all steps.
    fn wait(&self) -> Result<()>;

    /// Whether [`Backend::read_blocks`] and [`Backend::write_blocks`] work.
    fn copies_blocks(&self) -> bool {
        false
    }
    /// Appends the bytes of each block to its `Vec`, in the device's own order, outside of any step.
    fn read_blocks(&self, _pool: &Self::Pool, _blocks: &mut [(BlockId, &mut Vec<u8>)]) -> Result<()> {
        Err(BackendError::copies_no_blocks(self.describe()))
    }
    /// Replaces the bytes of blocks by those that [`Backend::read_blocks`] gave, outside of any step.
    fn write_blocks(&self, _pool: &mut Self::Pool, _blocks: &[(BlockId, &[u8])]) -> Result<()> {
        Err(BackendError::copies_no_blocks(self.describe()))
    }
    /// What works over this cache of [`Backend::gather`], [`Backend::history`] and scores.
    fn evicts_rows(&self, _: &CacheLayout) -> RowEviction {
        RowEviction::Never(NO_ROW_EVICTION)
    }
    /// Copies the rows that `view` keeps of a sequence's history into the pages of the view.
    fn gather(&self, _: &SequenceRows<'_>, _: &View, _: &mut Self::Pool) -> Result<()> {
        Err(eviction_refusal(self, NO_ROW_EVICTION))
    }
    /// Dequantizes rows of a sequence's history.
    fn history(&self, _: &SequenceRows<'_>, _: HeadHistory, _: &Self::Pool) -> Result<HistoryRows> {
        Err(eviction_refusal(self, NO_ROW_EVICTION))
    }
}

/// One pass over the rows of some sequences.
///
/// Operations take effect in the order of the calls. A failure is reported at the latest by the next
/// call that returns data. Then the step must be dropped; the sequences' new positions hold nothing.
pub trait Step<B: Backend>: DeltaStep<B> {
    /// `out ← scale · table[token]` for each token.
    fn embed(&mut self, table: &B::Matrix, tokens: &[u32], scale: f32, out: &mut B::Rows) -> Result<()>;
    /// `out ← x[rows]`, in that order.
    fn select(&mut self, x: &B::Rows, rows: &[usize], out: &mut B::Rows) -> Result<()>;
    /// A matrix product with what models do before and after it.
    fn product(&mut self, product: Product<'_, B>, x: &B::Rows, out: &mut B::Rows) -> Result<()>;
    /// The experts of one layer as [`route`] chooses them: `x += experts(norm(x))`; ranks: [`HeldExperts`].
    fn experts(&mut self, experts: &B::Experts, norm: (&B::Vector, f32), x: &mut B::Rows) -> Result<()>;
    /// The whole attention of one layer. Rows of `qkv` are `[queries | keys | values]`.
    ///
    /// 1. Query and key heads get QK-norm and RoPE; `tap` then sees `qkv`.
    /// 2. The key mean is subtracted; queries and keys are rotated into the cache's basis; keys and
    ///    values are stored in the full pages of their positions, those of a sliding layer in the
    ///    pages of its group.
    /// 3. The positions that leave the recent window in this step are quantized, except in sliding
    ///    layers.
    /// 4. `out` gets the attention output of all query heads over the positions that the layer sees,
    ///    with its sinks. A sink moves with the scores that the key mean shifts. If `tap` asks for
    ///    scores, they are added up; `tap` then sees `out`.
    ///
    /// Afterwards `qkv` holds nothing of use.
    fn attend(
        &mut self,
        heads: LayerHeads<'_, B>,
        qkv: &mut B::Rows,
        out: &mut B::Rows,
        tap: Option<&mut dyn Tap>,
    ) -> Result<()>;
    /// The whole latent attention of one layer, as [`LatentHeads`] describes it. Only on a device that
    /// computes [`Feature::LatentAttention`].
    fn attend_latent(
        &mut self,
        _heads: LatentHeads<'_, B>,
        _queries: &B::Rows,
        _latent: &B::Rows,
        _out: &mut B::Rows,
    ) -> Result<()> {
        Err(latent_refusal())
    }
    /// `x ← Σ x` over all ranks, in rank order. Only on a device with a communicator.
    fn all_reduce(&mut self, _x: &mut B::Rows) -> Result<()> {
        communicator::no_ranks()
    }
    /// `whole ← [part of rank 0 | part of rank 1 | …]`, row by row. Only on a device with a communicator.
    fn all_gather(&mut self, _part: &B::Rows, _whole: &mut B::Rows) -> Result<()> {
        communicator::no_ranks()
    }
    /// Waits for the device and appends these rows of `x` to `out`.
    fn read(&mut self, x: &B::Rows, rows: &[usize], out: &mut Vec<f32>) -> Result<()>;
    /// Waits and appends the most likely tokens of each of these rows, exactly as [`pick`] lists them.
    fn pick(&mut self, logits: &B::Rows, rows: &[(usize, Pick)], out: &mut Vec<Vec<Candidate>>)
    -> Result<()>;
    /// Submits the remaining operations. Dropping a step does the same and hides the error.
    fn finish(self) -> Result<()>;
}
