//! The CPU as a [`Backend`]: the kernels of this crate, a thread pool and page storage.

mod calibration;
mod delta;
mod demotion;
mod experts;
mod heads;
mod latent;
mod pages;
mod products;
mod random;
mod region;
mod step;
mod views;

pub use experts::CpuExperts;
pub use pages::CpuPages;
pub use step::CpuStep;

use crate::attention;
use crate::{Kernels, PackedMatrix, Precision, ThreadPool, Weights};
use delta::DeltaScratch;
use experts::ExpertsScratch;
use heads::LayerRotation;
use oscar_backend::{
    AttentionKernels, AttentionPath, Backend, BackendError, Benchmarks, BlockId, Communicator, ExpertId,
    ExpertsShape, Feature, HeadHistory, HeadShape, HistoryRows, HostMatrix, HostValues, PrefillWave, Result,
    RowEviction, SequenceRows, StepMemory, StepSize, StepTimes, TappedRows, View,
};
use oscar_codec::{CacheLayout, CodeLayout, FormatTable, HeadRotations, RowPageCodec};
use products::ProductScratch;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Prompt tokens of a step; longer steps gain nothing.
pub const PREFILL_CHUNK: usize = 512;

/// Runs models on the processor.
pub struct CpuBackend {
    kernels: &'static Kernels,
    pool: ThreadPool,
    mode: Mode,
    /// The other ranks, if this one holds a part of its models.
    communicator: Option<Box<dyn Communicator>>,
    /// A step holds the lock until it ends.
    scratch: Mutex<Scratch>,
}

/// Precision of weights and activations in matrix products; sums are always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// BF16 weights, activations as the sum of two BF16 (16 bits of mantissa): free in decode,
    /// which waits for memory, twice the arithmetic in prefill.
    Bf16,
    /// BF16 weights and activations, except in the output head.
    Fast,
    /// Everything in f32.
    F32,
}

impl Mode {
    fn weights(self) -> Precision {
        if self == Self::F32 { Precision::F32 } else { Precision::Bf16 }
    }
}

/// Buffers kept from step to step.
#[derive(Default)]
struct Scratch {
    products: ProductScratch,
    experts: ExpertsScratch,
    attention: attention::Scratch,
    /// Rotated queries, `[kv_head][row][query head of the group][head_dim]`.
    queries: Vec<f32>,
    /// Attention sinks of the layer, `[kv_head][row][query head of the group]`.
    sinks: Vec<f32>,
    /// Attention outputs in task order, before they are copied to their rows.
    outputs: Vec<f32>,
    /// Products of single heads, `[head][row][channel]`, in latent attention.
    by_head: Vec<f32>,
    delta: DeltaScratch,
    /// The time of steps so far, if it is wanted.
    times: Option<StepTimes>,
}

impl Scratch {
    /// Counts the time since `began` to one part of a step.
    fn count(&mut self, began: Instant, part: fn(&mut StepTimes) -> &mut f64) {
        if let Some(times) = &mut self.times {
            *part(times) += began.elapsed().as_secs_f64();
        }
    }
}

/// Activations: `rows × width`, row-major.
pub struct CpuRows {
    width: usize,
    values: Vec<f32>,
}

impl CpuRows {
    /// Rows with these values, whose number must be a multiple of `width`.
    pub fn new(width: usize, values: Vec<f32>) -> Self {
        assert!(width > 0 && values.len().is_multiple_of(width), "whole rows");
        Self { width, values }
    }

    pub fn width(&self) -> usize {
        self.width
    }

    pub fn count(&self) -> usize {
        self.values.len() / self.width
    }

    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Makes it `rows` long; the old values are not kept in any useful form.
    fn resize(&mut self, rows: usize) {
        self.values.resize(rows * self.width, 0.0);
    }
}

/// A packed matrix and its bias.
pub struct CpuMatrix {
    packed: PackedMatrix,
    bias: Option<Vec<f32>>,
}

/// Cosines and sines, `[position][rotary_dim / 2]`.
pub struct CpuRope {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

impl CpuBackend {
    pub fn new(kernels: &'static Kernels, threads: usize, mode: Mode) -> std::io::Result<Self> {
        // A wrong OSCAR_ATTENTION is refused here, once, before any kernel could ignore it.
        attention::AttentionPrecision::chosen().map_err(std::io::Error::other)?;
        let pool = ThreadPool::new(threads)?;
        Ok(Self { kernels, pool, mode, communicator: None, scratch: Mutex::default() })
    }

    /// The processor as a helper of a GPU, whose operations its own come between.
    pub fn beside_gpu(kernels: &'static Kernels, threads: usize, mode: Mode) -> std::io::Result<Self> {
        let pool = ThreadPool::beside_gpu(threads)?;
        Ok(Self { kernels, pool, mode, communicator: None, scratch: Mutex::default() })
    }

    /// Packs weights in the precision of the mode. `what` names them in an error.
    fn pack(&self, what: &str, matrix: &HostMatrix<'_>) -> Result<PackedMatrix> {
        let HostMatrix { outputs, inputs, .. } = *matrix;
        let expanded;
        let values = match matrix.values {
            HostValues::Mxfp4(v) => {
                expanded = v.expand(outputs, inputs)?;
                Weights::F32(&expanded)
            }
            HostValues::Bf16(v) => Weights::Bf16(v),
            HostValues::F16(v) => Weights::F16(v),
            HostValues::F32(v) => Weights::F32(v),
            HostValues::Fp8(v) => Weights::Fp8(v),
        };
        PackedMatrix::pack(&self.pool, values, outputs, inputs, self.mode.weights())
            .map_err(|error| shape_error(what, error))
    }

    /// The same processor as one of several ranks: models that it runs are split over them.
    pub fn with_communicator(self, communicator: impl Communicator + 'static) -> Self {
        Self { communicator: Some(Box::new(communicator)), ..self }
    }

    pub fn kernels(&self) -> &'static Kernels {
        self.kernels
    }

    pub fn threads(&self) -> &ThreadPool {
        &self.pool
    }

    /// Rows as a tap sees them.
    pub fn tapped<'a>(&'a self, rows: &'a CpuRows) -> impl TappedRows + 'a {
        CpuTapped { backend: self, rows }
    }
}

/// Bytes that steps up to this size take on any processor: all rows are f32.
pub fn step_memory(size: &StepSize) -> StepMemory {
    let StepSize { rows, logits, hidden, intermediate, vocab, .. } = *size;
    let query = size.query_width();
    // Hidden rows, normed ones and their parts in two precisions; heads; the feed-forward part.
    let row = 4 * hidden + size.qkv_width() + 3 * query + 5 * intermediate;
    StepMemory {
        activations: 4 * (rows * row + logits * (vocab + 2 * hidden)),
        rope: 4 * size.rope_tables * size.context * size.rotary,
        ..StepMemory::default()
    }
}

fn shape_error(what: &str, detail: impl ToString) -> BackendError {
    BackendError::Shape { what: what.into(), detail: detail.to_string() }
}

struct CpuTapped<'a> {
    backend: &'a CpuBackend,
    rows: &'a CpuRows,
}

impl TappedRows for CpuTapped<'_> {
    fn read(&mut self, out: &mut Vec<f32>) -> Result<()> {
        out.extend_from_slice(&self.rows.values);
        Ok(())
    }

    fn accumulate_gram(
        &mut self,
        first: usize,
        width: usize,
        weights: Option<&[f32]>,
        gram: &mut [f64],
    ) -> Result<()> {
        let (backend, x) = (self.backend, self.rows);
        backend.kernels.accumulate_gram(&backend.pool, &x.values, x.width, first, width, weights, gram);
        Ok(())
    }
}

impl Backend for CpuBackend {
    type Rows = CpuRows;
    type Matrix = CpuMatrix;
    type Vector = Vec<f32>;
    type Rope = CpuRope;
    type LayerRotation = LayerRotation;
    type Experts = CpuExperts;
    type Pool = CpuPages;
    type Step<'s> = CpuStep<'s>;

    fn describe(&self) -> String {
        let weights = match self.mode {
            Mode::Bf16 => "BF16 weights, 16-bit activations",
            Mode::Fast => "BF16 weights and activations",
            Mode::F32 => "F32 weights and activations",
        };
        let each = match &self.communicator {
            Some(communicator) => format!("{} ranks, each: ", communicator.ranks()),
            None => String::new(),
        };
        format!("{each}cpu, {} kernels, {} threads, {weights}", self.kernels.variant(), self.pool.threads())
    }

    fn attention(&self, layout: &CacheLayout) -> AttentionKernels {
        let layout = self.held_layout(layout);
        let variant = self.kernels.variant();
        let names = |codecs: &mut dyn Iterator<Item = &RowPageCodec>| {
            let mut names: Vec<String> = codecs.map(|codec| attention::kernel_name(variant, codec)).collect();
            names.sort_unstable();
            names.dedup();
            names.join(" + ")
        };
        let full = names(&mut layout.full().codecs().iter());
        let native =
            |table: &FormatTable| table.codecs().iter().all(|codec| attention::has_kernel(variant, codec));
        let description = match layout.coded() {
            Some(coded) => format!("{} over history, {full} over windows", names(&mut layout.grown(coded))),
            None => full,
        };
        let path = match native(layout.full()) && layout.coded().is_none_or(native) {
            true => AttentionPath::Native,
            false => AttentionPath::Dequantized,
        };
        AttentionKernels { path, description }
    }

    fn held_layout(&self, layout: &CacheLayout) -> CacheLayout {
        // Formats without this order keep their own and are read without kernels of their own.
        layout.with_order(CodeLayout::CpuTile).unwrap_or_else(|_| layout.clone())
    }

    fn reads_codes_in_window(&self, _: &CacheLayout) -> bool {
        true
    }

    fn multiplies_fp8(&self) -> bool {
        false
    }

    fn computes(&self, _: Feature) -> bool {
        true
    }

    fn prefill_chunk(&self, _: &HeadShape) -> usize {
        PREFILL_CHUNK
    }

    fn prefill_wave(&self, _: &HeadShape) -> PrefillWave {
        PrefillWave::NONE
    }

    fn wait(&self) -> Result<()> {
        Ok(())
    }

    fn step_memory(&self, size: &StepSize) -> StepMemory {
        step_memory(size)
    }

    fn free_memory(&self) -> Result<Option<usize>> {
        Ok(None)
    }

    fn communicator(&self) -> Option<&dyn Communicator> {
        self.communicator.as_deref()
    }

    fn matrix(&self, weights: HostMatrix<'_>) -> Result<CpuMatrix> {
        let packed = self.pack("a weight matrix", &weights)?;
        if let Some(bias) = weights.bias.filter(|b| b.len() != weights.outputs) {
            return Err(shape_error(
                "a bias",
                format!("{} values for {} outputs", bias.len(), weights.outputs),
            ));
        }
        Ok(CpuMatrix { packed, bias: weights.bias.map(<[f32]>::to_vec) })
    }

    fn matrix_bytes(&self, matrix: &CpuMatrix) -> usize {
        matrix.packed.bytes()
    }

    fn vector(&self, values: &[f32]) -> Result<Vec<f32>> {
        Ok(values.to_vec())
    }

    fn rope(&self, cos: &[f32], sin: &[f32], rotary_dim: usize) -> Result<CpuRope> {
        Ok(CpuRope { cos: cos.to_vec(), sin: sin.to_vec(), half: rotary_dim / 2 })
    }

    fn experts(&self, shape: &ExpertsShape<'_>) -> Result<CpuExperts> {
        self.make_experts(shape)
    }

    fn load_expert(&self, experts: &mut CpuExperts, id: ExpertId, parts: [HostMatrix<'_>; 3]) -> Result<()> {
        self.put_expert(experts, id, parts)
    }

    fn expert_bytes(&self, experts: &CpuExperts) -> (usize, usize) {
        experts.bytes()
    }

    fn layer_rotation(&self, heads: &[HeadRotations]) -> Result<LayerRotation> {
        LayerRotation::new(&self.pool, heads)
    }

    fn rows(&self, width: usize) -> CpuRows {
        CpuRows { width, values: Vec::new() }
    }

    fn pool(&self, layout: &CacheLayout, heads: &HeadShape, budget: usize) -> Result<CpuPages> {
        CpuPages::reserve(layout, heads, budget)
    }

    fn step<'s>(&'s self, sequences: &'s [SequenceRows<'s>], pool: &'s mut CpuPages) -> Result<CpuStep<'s>> {
        let scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(CpuStep { backend: self, scratch, sequences, pool })
    }

    fn copies_blocks(&self) -> bool {
        // A rank has only its own heads of a block.
        self.communicator.is_none()
    }

    fn read_blocks(&self, pool: &CpuPages, blocks: &mut [(BlockId, &mut Vec<u8>)]) -> Result<()> {
        blocks.iter_mut().for_each(|(block, out)| pool.read_block(*block, out));
        Ok(())
    }

    fn write_blocks(&self, pool: &mut CpuPages, blocks: &[(BlockId, &[u8])]) -> Result<()> {
        blocks.iter().try_for_each(|(block, bytes)| pool.write_block(*block, bytes))
    }

    fn evicts_rows(&self, _: &CacheLayout) -> RowEviction {
        match &self.communicator {
            None => RowEviction::ByScores,
            Some(_) => RowEviction::Never(
                "budgets are divided over the heads of all ranks: leave --kv-budget or --tensor-parallel out",
            ),
        }
    }

    fn gather(&self, from: &SequenceRows<'_>, view: &View, pool: &mut CpuPages) -> Result<()> {
        self.gather_rows(from, view, pool)
    }

    fn history(&self, from: &SequenceRows<'_>, rows: HeadHistory, pool: &CpuPages) -> Result<HistoryRows> {
        self.read_history(from, rows, pool)
    }
}

impl Benchmarks for CpuBackend {
    fn random_experts(&self, shape: &ExpertsShape<'_>, ids: &[ExpertId], seed: u64) -> Result<CpuExperts> {
        self.make_random_experts(shape, ids, seed)
    }

    fn randomize(&self, _pool: &mut CpuPages, _full: usize, _coded: usize) -> Result<bool> {
        Ok(false)
    }

    fn time_steps(&self, on: bool) -> Result<Option<StepTimes>> {
        let times = &mut self.scratch.lock().unwrap_or_else(PoisonError::into_inner).times;
        Ok(std::mem::replace(times, on.then(StepTimes::default)))
    }
}
