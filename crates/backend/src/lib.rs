//! The contract between model code and the devices that run it, at the granularity of a model.
//!
//! A model asks for whole operations (project, normalize, append to the cache, demote, attend); a backend decides
//! instructions, memory and parallelism. Activations are rows of f32 that stay on the device between operations.
//!
//! **Invariants:** a backend knows no model, no request and no HTTP. The result of a row depends on that row and
//! its own sequence alone: not on the other rows of the step, not on the number of threads.

mod candidates;
mod fp8;

pub use candidates::{Candidate, MOST_CANDIDATES, Pick, argmax, candidate_key, candidate_of, pick};
pub use fp8::{FP8_BLOCK, Fp8Blocks, Fp8Matrix, fp8_blocks, fp8_multiplied};

use half::{bf16, f16};
use oscar_codec::random::SplitMix64;
use oscar_codec::{CacheLayout, CodeLayout, CodedPageId, FullPageId, HeadRotations};
use std::ops::Range;

/// What a device can refuse.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error("not enough memory on {device}: {bytes} bytes for {what}")]
    OutOfMemory { device: String, what: String, bytes: usize },
    #[error("{device} cannot do this: {why}")]
    Unsupported { device: String, why: String },
    /// The device, its driver or one of its libraries failed; what it holds is lost.
    #[error("{device} failed: {why}")]
    Device { device: String, why: String },
    #[error("{what} has a wrong shape: {detail}")]
    Shape { what: String, detail: String },
}

pub type Result<T> = std::result::Result<T, BackendError>;

/// A weight matrix as the checkpoint holds it, `[outputs][inputs]` row-major.
#[derive(Clone, Copy, Debug)]
pub struct HostMatrix<'a> {
    pub outputs: usize,
    pub inputs: usize,
    pub values: HostValues<'a>,
    pub bias: Option<&'a [f32]>,
}

#[derive(Clone, Copy, Debug)]
pub enum HostValues<'a> {
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
    F32(&'a [f32]),
    /// Kept as it is by devices that multiply with it, expanded by the others.
    Fp8(Fp8Blocks<'a>),
}

/// How the weights of a matrix are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    Bf16,
    /// E4M3 with a scale for every block of 128 × 128; activations are not quantized.
    Fp8,
}

/// Does an operation replace its output or add to it (the residual)?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    Replace,
    Add,
}

/// The rows one sequence brings to a step: consecutive positions, and the pages that hold its context.
#[derive(Clone, Debug)]
pub struct SequenceRows<'a> {
    /// Rows of the step that belong to this sequence.
    pub rows: Range<usize>,
    pub first_position: usize,
    pub full: &'a [Option<FullPageId>],
    pub coded: &'a [Option<CodedPageId>],
    /// Positions whose keys are coded in this step, before anyone attends.
    pub demote: Range<usize>,
    /// Positions whose values are: the same, unless the windows of the two sides differ.
    pub demote_values: Range<usize>,
}

/// One layer's KV head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheHead {
    pub layer: usize,
    pub kv_head: usize,
}

impl SequenceRows<'_> {
    /// End of the last block that has codes and no full page: every query reads everything before it but the sink as
    /// code, also where the windows alone would say BF16 (the tail of a stored prefix that was demoted to make
    /// room). Never beyond the windows' own boundary otherwise.
    pub fn coded_until(&self) -> usize {
        let blocks = self.full.len().min(self.coded.len());
        let only_code = |&b: &usize| self.full[b].is_none() && self.coded[b].is_some();
        (0..blocks).rev().find(only_code).map_or(0, |block| (block + 1) * oscar_codec::PAGE_TOKENS)
    }
}

/// How heads are laid out and prepared before they meet the cache; the same for every layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadShape {
    pub query_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub rms_norm_eps: f32,
    /// Factor of the scores, usually `1/√head_dim`.
    pub scale: f32,
}

/// What [`Backend::append`] applies to one layer's heads.
pub struct HeadPreparation<'a, B: Backend + ?Sized> {
    /// RMSNorm weights of query and key heads, where the family has them.
    pub qk_norm: Option<(&'a B::Vector, &'a B::Vector)>,
    pub rotation: Option<&'a B::LayerRotation>,
}

/// Amplitude of uniform random weights whose outputs have about the variance of their inputs.
pub fn random_amplitude(inputs: usize) -> f32 {
    (3.0 / inputs.max(1) as f32).sqrt()
}

/// A device that runs models.
///
/// A device may run behind the caller: operations without a result are enqueued, and what fails in one is reported
/// by the next operation that has a result, [`Backend::read`] at the latest.
pub trait Backend: Send + Sync {
    /// Activations, `rows × width`.
    type Rows: Send;
    type Matrix: Send + Sync;
    type Vector: Send + Sync;
    /// Cosines and sines by position.
    type Rope: Send + Sync;
    /// Key rotations and means of a layer's heads, in the device's form.
    type LayerRotation: Send + Sync;
    /// Storage of the pages.
    type Pool: Send;

    /// One line for the start banner: device, instruction set, threads.
    fn describe(&self) -> String;
    /// The kernels that read this cache, so that no slow path is silent.
    fn describe_attention(&self, layout: &CacheLayout) -> String;

    /// The order of bytes in pages that this device's kernels read fastest.
    fn page_order(&self) -> CodeLayout;
    /// The cache as this device will keep it: bytes in its order, blocks of the size they really take there. Budgets
    /// and page tables are made for this layout.
    fn held_layout(&self, layout: &CacheLayout) -> CacheLayout {
        layout.clone()
    }

    /// Are products made with FP8 weights as they are? Other devices expand them when they get them.
    fn multiplies_fp8(&self) -> bool {
        false
    }
    fn matrix(&self, weights: HostMatrix<'_>) -> Result<Self::Matrix>;
    /// Bytes of weights that one pass over the matrix reads, as this device holds it.
    fn matrix_bytes(&self, matrix: &Self::Matrix) -> usize;
    /// A matrix of random weights, for benchmarks that need a model's shape but not its contents.
    fn random_matrix(
        &self,
        format: WeightFormat,
        outputs: usize,
        inputs: usize,
        seed: u64,
    ) -> Result<Self::Matrix> {
        let amplitude = random_amplitude(inputs);
        let mut random = SplitMix64::new(seed);
        let values: Vec<bf16> =
            (0..outputs * inputs).map(|_| bf16::from_f32(random.symmetric() * amplitude)).collect();
        match format {
            WeightFormat::Bf16 => {
                self.matrix(HostMatrix { outputs, inputs, values: HostValues::Bf16(&values), bias: None })
            }
            WeightFormat::Fp8 => {
                let values: Vec<f32> = values.iter().map(|v| v.to_f32()).collect();
                self.matrix(Fp8Matrix::quantize(&values, outputs, inputs).host(outputs, inputs))
            }
        }
    }
    fn vector(&self, values: &[f32]) -> Result<Self::Vector>;
    fn rope(&self, cos: &[f32], sin: &[f32], head_dim: usize) -> Result<Self::Rope>;
    fn layer_rotation(&self, heads: &[HeadRotations]) -> Result<Self::LayerRotation>;
    /// Reserves page storage of up to `budget` bytes; memory is touched as pages are used.
    fn pool(&self, layout: &CacheLayout, budget: usize) -> Result<Self::Pool>;
    /// Puts random rows and codes into the pages up to these ids that were never used, for benchmarks of long contexts;
    /// `false` if this device does not.
    fn randomize(&self, pool: &mut Self::Pool, full: usize, coded: usize) -> Result<bool> {
        let _ = (pool, full, coded);
        Ok(false)
    }
    fn rows(&self, width: usize) -> Self::Rows;

    /// Hears of a step before its first operation on the cache: page tables and positions can go to the device once for all layers.
    /// The operations up to the next call bring the same sequences.
    fn begin_step(&self, sequences: &[SequenceRows<'_>], pool: &mut Self::Pool) -> Result<()> {
        let _ = (sequences, pool);
        Ok(())
    }

    /// Hears that the step's last operation was asked for: what failed in one of them is reported now, to those whose
    /// step it is.
    fn end_step(&self) -> Result<()> {
        Ok(())
    }

    /// `out ← table[token]` for each token: the first operation of a step.
    fn embed(&self, table: &Self::Matrix, tokens: &[u32], out: &mut Self::Rows);
    fn rms_norm(&self, x: &Self::Rows, weight: &Self::Vector, eps: f32, out: &mut Self::Rows);
    /// `out ← x · Wᵀ (+ bias)`, or added to it.
    fn linear(&self, weight: &Self::Matrix, x: &Self::Rows, out: &mut Self::Rows, write: Write);
    /// [`Backend::linear`] for the output head: activations keep at least 16 bits of mantissa, because nothing
    /// after the head averages its rounding out.
    fn logits(&self, weight: &Self::Matrix, x: &Self::Rows, out: &mut Self::Rows);
    /// Each row of `gate_up` is `[gate | up]`; `out ← silu(gate) · up`.
    fn swiglu(&self, gate_up: &Self::Rows, out: &mut Self::Rows);
    /// [`Backend::linear`] and [`Backend::swiglu`] in one, where a device gains by it; `gate_up` is room for what lies
    /// between and may stay untouched.
    fn gated_linear(
        &self,
        weight: &Self::Matrix,
        x: &Self::Rows,
        gate_up: &mut Self::Rows,
        out: &mut Self::Rows,
    ) {
        if !self.fused_gate(weight, x, out) {
            self.linear(weight, x, gate_up, Write::Replace);
            self.swiglu(gate_up, out);
        }
    }
    /// [`Backend::rms_norm`] and [`Backend::linear`] in one, where a device gains by it; `normed` is room for what lies
    /// between and may stay untouched.
    fn norm_linear(
        &self,
        norm: &Self::Vector,
        eps: f32,
        weight: &Self::Matrix,
        x: &Self::Rows,
        normed: &mut Self::Rows,
        out: &mut Self::Rows,
    ) {
        if !self.fused_norm(norm, eps, weight, x, out, false) {
            self.rms_norm(x, norm, eps, normed);
            self.linear(weight, normed, out, Write::Replace);
        }
    }
    /// [`Backend::rms_norm`] and [`Backend::gated_linear`] in one, likewise.
    fn norm_gated_linear(
        &self,
        norm: &Self::Vector,
        eps: f32,
        weight: &Self::Matrix,
        x: &Self::Rows,
        normed: &mut Self::Rows,
        gate_up: &mut Self::Rows,
        out: &mut Self::Rows,
    ) {
        if !self.fused_norm(norm, eps, weight, x, out, true) {
            self.rms_norm(x, norm, eps, normed);
            self.gated_linear(weight, normed, gate_up, out);
        }
    }
    /// The whole of [`Backend::gated_linear`] in one operation of the device; `false`, and nothing done, where it has none.
    fn fused_gate(&self, _weight: &Self::Matrix, _x: &Self::Rows, _out: &mut Self::Rows) -> bool {
        false
    }
    /// The same of [`Backend::norm_linear`], or of [`Backend::norm_gated_linear`] where `gated`.
    fn fused_norm(
        &self,
        _norm: &Self::Vector,
        _eps: f32,
        _weight: &Self::Matrix,
        _x: &Self::Rows,
        _out: &mut Self::Rows,
        _gated: bool,
    ) -> bool {
        false
    }
    /// Keeps the rows named, in that order.
    fn select(&self, x: &Self::Rows, rows: &[usize], out: &mut Self::Rows);
    /// Copies rows to the host, behind what `out` holds, once everything enqueued is done.
    fn read(&self, x: &Self::Rows, out: &mut Vec<f32>) -> Result<()>;
    /// Does [`Backend::pick`] save anything here?
    fn picks(&self) -> bool {
        false
    }
    /// Lists, once everything enqueued is done, the most likely tokens of the rows of logits named: exactly those of
    /// [`pick`]. They go behind what `out` holds, one list for each entry of `rows`.
    fn pick(&self, logits: &Self::Rows, rows: &[(usize, Pick)], out: &mut Vec<Vec<Candidate>>) -> Result<()> {
        let _ = (logits, rows, out);
        Err(self.cannot("picking tokens"))
    }
    /// Adds `Σ_r w_r · xᵀx` to `gram` (`width × width`, row-major, symmetric), `x` being columns
    /// `first..first + width` of row `r`; without weights every row counts once. The statistic of calibration.
    fn accumulate_gram(
        &self,
        x: &Self::Rows,
        first: usize,
        width: usize,
        weights: Option<&[f32]>,
        gram: &mut [f64],
    ) -> Result<()>;

    /// Rows of `qkv` are `[queries | keys | values]`. Applies QK-norm and RoPE to query and key heads in place;
    /// then takes the key mean off, rotates queries and keys into the cache's basis, stores keys and values in the
    /// full pages of their positions and leaves the rotated queries in `queries`, in an order of the device's own.
    ///
    /// A device may leave this to the [`Backend::attention`] of the layer that follows, which takes the queries once; after it
    /// `qkv` and `queries` hold anything. Until then nothing that is given here may be dropped.
    fn append(
        &self,
        layer: usize,
        shape: &HeadShape,
        heads: HeadPreparation<'_, Self>,
        rope: &Self::Rope,
        sequences: &[SequenceRows<'_>],
        qkv: &mut Self::Rows,
        queries: &mut Self::Rows,
        pool: &mut Self::Pool,
    ) -> Result<()>;
    /// Does attention over this cache keep to [`SequenceRows::coded_until`]? Tails of stored prefixes are demoted only
    /// if so.
    fn reads_demoted_tails(&self, layout: &CacheLayout) -> bool {
        let _ = layout;
        false
    }
    /// Hears of rows that are coded outside of a step, before [`Backend::demote`] is asked to, layer by layer.
    fn begin_demotion(&self, sequences: &[SequenceRows<'_>], pool: &mut Self::Pool) -> Result<()> {
        let _ = (sequences, pool);
        Ok(())
    }
    /// Codes the keys of every sequence's `demote` range of one layer and the values of its `demote_values`.
    fn demote(&self, layer: usize, sequences: &[SequenceRows<'_>], pool: &mut Self::Pool) -> Result<()>;
    /// Attention of the queries that `append` prepared over their contexts; rows of `out` hold all query heads.
    fn attention(
        &self,
        layer: usize,
        shape: &HeadShape,
        sequences: &[SequenceRows<'_>],
        queries: &Self::Rows,
        pool: &Self::Pool,
        out: &mut Self::Rows,
    ) -> Result<()>;

    /// Reads the keys and values of one layer and KV head at `positions` from full pages, row by row, as f32.
    /// Calibration looks at the cache with it; the default refuses.
    fn read_full_rows(
        &self,
        _head: CacheHead,
        _full: &[Option<FullPageId>],
        _positions: Range<usize>,
        _pool: &Self::Pool,
        _keys: &mut Vec<f32>,
        _values: &mut Vec<f32>,
    ) -> Result<()> {
        Err(self.cannot("reading rows of the cache"))
    }

    /// Replaces keys and values of one layer and KV head from position `first` on, in full pages.
    fn write_full_rows(
        &self,
        _head: CacheHead,
        _full: &[Option<FullPageId>],
        _first: usize,
        _keys: &[f32],
        _values: &[f32],
        _pool: &mut Self::Pool,
    ) -> Result<()> {
        Err(self.cannot("replacing rows of the cache"))
    }

    /// The error of an operation that this backend does not have.
    fn cannot(&self, what: &str) -> BackendError {
        BackendError::Unsupported {
            device: self.describe(),
            why: format!("{what} is not implemented there; use --device cpu for this"),
        }
    }
}
