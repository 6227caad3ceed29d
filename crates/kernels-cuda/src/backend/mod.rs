//! The GPU as a [`Backend`]: everything is enqueued on one stream; the host waits when it reads.

mod calibration;
mod constants;
mod expert_limits;
mod experts;
mod experts_grouped;
mod experts_single;
mod host_rows;
mod launches;
mod picks;
mod prepare_heads;
mod products;
mod random;
mod rows;
mod scores;
mod sizing;
mod sliding;
mod step;
mod tapped;
mod views;

pub use constants::{CudaRope, CudaRotation, CudaVector};
pub use experts::CudaExperts;
pub(crate) use experts::LAYOUTS as EXPERT_LAYOUTS;
pub(crate) use launches::LAYOUTS;
pub use rows::CudaRows;
pub(crate) use rows::grow;
pub(crate) use scores::LAYOUTS as SCORE_LAYOUTS;
pub use sizing::step_memory;
pub use step::CudaStep;
pub(crate) use views::LAYOUTS as VIEW_LAYOUTS;

use crate::attention::AttentionMode;
use crate::attention::decode::DecodeMemory;
use crate::attention::hopper::HopperMemory;
use crate::blocks::BlockCopies;
use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::gemm::{CublasLt, CudaMatrix, Fp8Kernels, Fp8Operands, Fp8Products, Skinny};
use crate::kernels::Kernels;
use crate::memory::{Buffer, DevicePtr};
use crate::nccl::NcclRank;
use crate::pages::CudaPages;
use crate::staging::Staging;
use crate::step::StepPlanner;
use crate::storage::Storage;
use crate::transfers::Transfers;
use experts::ExpertsMemory;
use launches::Launches;
use oscar_backend::{
    AttentionKernels, Backend, Benchmarks, BlockId, Communicator, ExpertId, ExpertsShape, Feature,
    HeadHistory, HeadShape, HistoryRows, HostMatrix, PrefillWave, Result as BackendResult, RowEviction,
    SequenceRows, StepMemory, StepSize, StepTimes, View, WeightFormat,
};
use oscar_codec::{CacheLayout, HeadRotations};
use scores::ScoreMemory;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// The parts of models that only some families have and that GPUs compute.
const FEATURES: [Feature; 6] = [
    Feature::SlidingWindow,
    Feature::AttentionSinks,
    Feature::ResultNorm,
    Feature::EmbeddingScale,
    Feature::OtherGates,
    Feature::ExpertBiases,
];

/// Runs models on one GPU.
pub struct CudaBackend {
    device: Device,
    kernels: Kernels,
    launches: Launches,
    attention: AttentionMode,
    skinny: Skinny,
    /// Made for the first FP8 matrix.
    fp8: OnceLock<Fp8Kernels>,
    /// Prompts multiply FP8 weights with FP8 activations.
    fp8_activations: Option<Fp8Products>,
    /// For weights and blocks on their way.
    staging: Staging,
    copies: BlockCopies,
    /// The other GPUs of a model that is split.
    ranks: Option<NcclRank>,
    /// A step holds the lock until it ends.
    state: Mutex<State>,
}

/// Memory on the device that is kept from step to step.
struct State {
    cublaslt: CublasLt,
    transfers: Transfers,
    planner: StepPlanner,
    decode: DecodeMemory,
    prefill: HopperMemory,
    /// Token ids, row numbers and row weights: a buffer for each [`Index`], because copies do not wait
    /// for launches that are being recorded.
    indices: [Indices; Index::COUNT],
    /// Rotated queries of a layer.
    queries: CudaRows,
    /// Rows between a norm and a product, and between a product and a gate.
    normed: CudaRows,
    gate_up: CudaRows,
    /// Rows between a product and the norm of its result.
    result: CudaRows,
    /// Attention sinks by row.
    sinks: Option<Buffer>,
    /// Rows on their way to the host.
    selected: CudaRows,
    /// BF16 copies of activations, and the remainders of their rounding.
    high: Option<Buffer>,
    low: Option<Buffer>,
    /// FP8 weights expanded for a product of many rows.
    expanded: Option<Buffer>,
    /// FP8 activations and weights of a product of many rows.
    fp8_operands: Fp8Operands,
    gram: Option<Buffer>,
    /// Keys of the most likely tokens of slices of rows.
    picked: Option<Buffer>,
    /// Divergences of rows.
    compared: Option<Buffer>,
    /// Rows of history that are copied or read, and those that were read.
    row_sources: Option<Buffer>,
    history: Option<Buffer>,
    scores: ScoreMemory,
    experts: ExpertsMemory,
}

/// Numbers on the device.
#[derive(Default)]
struct Indices {
    buffer: Option<Buffer>,
    /// The numbers that the buffer holds once the stream has run the copies enqueued so far.
    sent: Vec<u32>,
    /// Whether launches of the current step read the buffer.
    used: bool,
}

/// The use of an index buffer.
#[derive(Clone, Copy)]
enum Index {
    Tokens,
    Rows,
    Weights,
    Picks,
    Masks,
    Recoded,
}

impl Index {
    const COUNT: usize = Self::Recoded as usize + 1;
}

impl CudaBackend {
    /// Opens GPU `index` with everything it needs, or says what is missing.
    pub fn open(index: usize) -> Result<Self> {
        Self::open_with(index, AttentionMode::from_environment()?)
    }

    /// [`CudaBackend::open`] with these kernels for attention.
    pub fn open_with(index: usize, attention: AttentionMode) -> Result<Self> {
        let device = Device::open(index)?;
        let kernels = Kernels::new(&device)?;
        let state = State {
            cublaslt: CublasLt::open(&device)?,
            transfers: Transfers::new(&device)?,
            planner: StepPlanner::default(),
            decode: DecodeMemory::default(),
            prefill: HopperMemory::default(),
            indices: Default::default(),
            queries: CudaRows::default(),
            normed: CudaRows::default(),
            gate_up: CudaRows::default(),
            result: CudaRows::default(),
            sinks: None,
            selected: CudaRows::default(),
            high: None,
            low: None,
            expanded: None,
            fp8_operands: Fp8Operands::default(),
            gram: None,
            picked: None,
            compared: None,
            row_sources: None,
            history: None,
            scores: ScoreMemory::default(),
            experts: ExpertsMemory::default(),
        };
        Ok(Self {
            launches: Launches::new(&device, &kernels)?,
            attention,
            skinny: Skinny::new(&device, &kernels, WeightFormat::Bf16)?,
            fp8: OnceLock::new(),
            fp8_activations: None,
            staging: Staging::new(&device),
            copies: BlockCopies::default(),
            ranks: None,
            device,
            kernels,
            state: Mutex::new(state),
        })
    }

    /// Lets prompts multiply FP8 weights with activations that are quantized to FP8 as they come. Steps
    /// of few rows and the output head do not.
    pub fn quantize_activations(&mut self) -> Result<()> {
        self.fp8_activations = Some(Fp8Products::new(&self.device, &self.kernels)?);
        Ok(())
    }

    /// Keys of at most this many bits are multiplied in E4M3 by prompts, in heads of 128 channels and more:
    /// for checks.
    pub fn e4m3_key_bits(&self) -> u32 {
        self.attention.e4m3_key_bits(self.device.properties())
    }

    /// The same GPU as a rank of a model.
    pub fn with_ranks(self, ranks: NcclRank) -> Self {
        Self { ranks: Some(ranks), ..self }
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether steps of this many rows carry BF16 copies of activations.
    fn rounds(rows: usize) -> bool {
        rows > crate::gemm::MOST_ROWS
    }

    /// Sends numbers unless the device already has them: steps of the same sequences use the same
    /// rows.
    fn send_indices(&self, state: &mut State, index: Index, values: &[u32]) -> Result<DevicePtr<u32>> {
        let Indices { buffer, sent, used } = &mut state.indices[index as usize];
        let (buffer, moved) = grow(&self.device, buffer, values.len() * 4, "row numbers")?;
        let used = std::mem::replace(used, true);
        if moved || sent != values {
            if used {
                // A launch that is only noted must not find the new numbers.
                self.device.flush()?;
            }
            sent.clear();
            state.transfers.enqueue(values, buffer.slice())?;
            sent.extend_from_slice(values);
        }
        Ok(buffer.ptr())
    }
}

impl Backend for CudaBackend {
    type Rows = CudaRows;
    type Matrix = CudaMatrix;
    type Vector = CudaVector;
    type Rope = CudaRope;
    type LayerRotation = CudaRotation;
    type Experts = CudaExperts;
    type Pool = CudaPages;
    type Step<'s> = CudaStep<'s>;

    fn describe(&self) -> String {
        let p = self.device.properties();
        format!(
            "cuda, {} (sm_{}{}, {:.0} GiB, driver CUDA {}.{}, {}), BF16 or FP8 weights, 16-bit activations \
             up to {} rows, BF16 above",
            p.name,
            p.major,
            p.minor,
            p.memory as f64 / (1u64 << 30) as f64,
            p.driver.0,
            p.driver.1,
            self.kernels.images().describe(),
            crate::gemm::MOST_ROWS,
        )
    }

    fn attention(&self, layout: &CacheLayout) -> AttentionKernels {
        self.attention.describe(&self.device, layout)
    }

    fn held_layout(&self, layout: &CacheLayout) -> CacheLayout {
        Storage::held(layout)
    }

    fn reads_codes_in_window(&self, layout: &CacheLayout) -> bool {
        Storage::of(layout).is_ok_and(|storage| storage == Storage::Codes)
            && layout.keeps_all_history()
            && self.attention.reads_codes_in_window(&self.device, layout.head_dim())
    }

    fn multiplies_fp8(&self) -> bool {
        true
    }

    fn computes(&self, feature: Feature) -> bool {
        FEATURES.contains(&feature)
    }

    fn prefill_chunk(&self, heads: &HeadShape) -> usize {
        self.attention.prefill_chunk(self.device.properties(), heads)
    }

    fn prefill_wave(&self, heads: &HeadShape) -> PrefillWave {
        self.attention.prefill_wave(self.device.properties(), heads)
    }

    fn wait(&self) -> BackendResult<()> {
        Ok(self.device.synchronize()?)
    }

    fn step_memory(&self, size: &StepSize) -> StepMemory {
        step_memory(self.device.properties(), self.attention, size)
    }

    fn free_memory(&self) -> BackendResult<Option<usize>> {
        Ok(Some(self.device.memory()?.0))
    }

    fn communicator(&self) -> Option<&dyn Communicator> {
        self.ranks.as_ref().map(|ranks| ranks as &dyn Communicator)
    }

    fn matrix(&self, weights: HostMatrix<'_>) -> BackendResult<CudaMatrix> {
        let matrix = CudaMatrix::upload(&self.device, &self.staging, &weights)?;
        if matrix.format() == WeightFormat::Fp8 {
            // Compiled now rather than in the middle of a step.
            self.fp8_kernels()?;
        }
        Ok(matrix)
    }

    fn matrix_bytes(&self, matrix: &CudaMatrix) -> usize {
        matrix.bytes()
    }

    fn vector(&self, values: &[f32]) -> BackendResult<CudaVector> {
        Ok(CudaVector { values: self.device.upload_new(values, "norm weights")?, len: values.len() })
    }

    fn rope(&self, cos: &[f32], sin: &[f32], rotary_dim: usize) -> BackendResult<CudaRope> {
        Ok(CudaRope {
            cosines: self.device.upload_new(cos, "the RoPE table")?,
            sines: self.device.upload_new(sin, "the RoPE table")?,
            rotary_dim,
            positions: cos.len().min(sin.len()) / (rotary_dim / 2).max(1),
            still: OnceLock::new(),
        })
    }

    fn experts(&self, shape: &ExpertsShape<'_>) -> BackendResult<CudaExperts> {
        if self.ranks.is_some() {
            let why = "mixtures of experts are not split over GPUs yet; use --device cpu";
            return Err(CudaError::Unsupported(why.into()).into());
        }
        shape.check()?;
        Ok(CudaExperts::new(&self.device, &self.kernels, shape)?)
    }

    fn load_expert(
        &self,
        experts: &mut CudaExperts,
        id: ExpertId,
        parts: [HostMatrix<'_>; 3],
    ) -> BackendResult<()> {
        Ok(self.put_expert(experts, id, &parts)?)
    }

    fn expert_bytes(&self, experts: &CudaExperts) -> (usize, usize) {
        experts.bytes()
    }

    fn layer_rotation(&self, heads: &[HeadRotations]) -> BackendResult<CudaRotation> {
        Ok(CudaRotation::upload(&self.device, heads)?)
    }

    fn rows(&self, width: usize) -> CudaRows {
        CudaRows::new(width)
    }

    fn pool(&self, layout: &CacheLayout, heads: &HeadShape, budget: usize) -> BackendResult<CudaPages> {
        Ok(CudaPages::reserve(&self.device, &self.kernels, self.attention, layout, heads, budget)?)
    }

    fn step<'s>(
        &'s self,
        sequences: &'s [SequenceRows<'s>],
        pool: &'s mut CudaPages,
    ) -> BackendResult<CudaStep<'s>> {
        let mut state = self.state();
        state.indices.iter_mut().for_each(|indices| indices.used = false);
        Ok(CudaStep::new(self, state, sequences, pool))
    }

    fn copies_blocks(&self) -> bool {
        // A rank has only its own heads of a block.
        self.ranks.is_none()
    }

    fn read_blocks(&self, pool: &CudaPages, blocks: &mut [(BlockId, &mut Vec<u8>)]) -> BackendResult<()> {
        // No step runs meanwhile.
        let _state = self.state();
        Ok(self.copies.read(&self.kernels, &self.staging, pool, blocks)?)
    }

    fn write_blocks(&self, pool: &mut CudaPages, blocks: &[(BlockId, &[u8])]) -> BackendResult<()> {
        let _state = self.state();
        Ok(self.copies.write(&self.kernels, &self.staging, pool, blocks)?)
    }

    fn evicts_rows(&self, layout: &CacheLayout) -> RowEviction {
        match Storage::of(layout) {
            Ok(Storage::Codes) => RowEviction::ByScores,
            _ => RowEviction::Never(
                "it keeps rows of this format dequantized, and these are not evicted: choose --kv oscar, or use --device cpu",
            ),
        }
    }

    fn gather(&self, from: &SequenceRows<'_>, view: &View, pool: &mut CudaPages) -> BackendResult<()> {
        Ok(self.gather_rows(from, view, pool)?)
    }

    fn history(
        &self,
        from: &SequenceRows<'_>,
        rows: HeadHistory,
        pool: &CudaPages,
    ) -> BackendResult<HistoryRows> {
        Ok(self.read_rows(from, rows, pool)?)
    }
}

impl Benchmarks for CudaBackend {
    fn random_matrix(
        &self,
        format: WeightFormat,
        outputs: usize,
        inputs: usize,
        seed: u64,
    ) -> BackendResult<CudaMatrix> {
        Ok(self.random_weights(format, outputs, inputs, seed)?)
    }

    fn random_experts(
        &self,
        shape: &ExpertsShape<'_>,
        _ids: &[ExpertId],
        seed: u64,
    ) -> BackendResult<CudaExperts> {
        shape.check()?;
        Ok(self.random_expert_weights(shape, seed)?)
    }

    fn randomize(&self, pool: &mut CudaPages, full: usize, coded: usize) -> BackendResult<bool> {
        self.randomize_pages(pool, full, coded)?;
        Ok(true)
    }

    fn time_steps(&self, on: bool) -> BackendResult<Option<StepTimes>> {
        Ok(self.device.set_profiling(on)?.map(|profile| profile.parts()))
    }
}
