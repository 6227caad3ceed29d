//! The GPU as a [`Backend`]: everything is enqueued on one stream; the host waits when it reads rows.

mod constants;
mod heads;
mod launches;
mod occasional;
mod picks;
mod products;
mod rows;

pub use constants::{CudaRope, CudaRotation, CudaVector};
pub use rows::CudaRows;

use crate::attention::demote::Demotion;
use crate::attention_paths::{AttentionMode, AttentionPaths};
use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::gemm::{CublasLt, CudaMatrix, Fp8Kernels, Skinny};
use crate::kernels::Kernels;
use crate::memory::Buffer;
use crate::pages::CudaPages;
use crate::sources::{APPEND, DEMOTE};
use crate::step::{StepPlanner, StepTables};
use crate::storage::Storage;
use crate::uploads::Uploads;
use heads::PendingAppend;
use launches::{EMBED_FEW, Embed, Launches, RmsNorm, Select, Swiglu};
use oscar_backend::{
    Backend, CacheHead, Candidate, HeadPreparation, HeadShape, HostMatrix, Pick, Result as BackendResult,
    SequenceRows, WeightFormat, Write,
};
use oscar_codec::{CacheLayout, CodeLayout, FullPageId, HeadRotations};
use rows::grow;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

/// Runs models on one GPU.
pub struct CudaBackend {
    device: Device,
    kernels: Kernels,
    launches: Launches,
    skinny: Skinny,
    /// Made when the first FP8 matrix comes.
    fp8: OnceLock<Fp8Kernels>,
    state: Mutex<State>,
}

struct State {
    cublaslt: CublasLt,
    uploads: Uploads,
    planner: StepPlanner,
    tables: StepTables,
    attention: AttentionPaths,
    /// All layers of the pages that the last step was planned over.
    demotion: Option<Demotion>,
    pending: Option<PendingAppend>,
    /// Token ids, row numbers and row weights on the device: a buffer for each use, because copies do not wait for
    /// launches that are being recorded.
    indices: [Indices; 4],
    /// BF16 copies of activations: rounded, and what the rounding lost.
    high: Option<Buffer>,
    low: Option<Buffer>,
    /// FP8 weights expanded for a product of many rows.
    expanded: Option<Buffer>,
    gram: Option<Buffer>,
    /// Keys of the most likely tokens of slices of rows.
    picked: Option<Buffer>,
    /// What failed in an operation that has no result; reported by the next that has one.
    failed: Option<CudaError>,
}

/// Numbers on the device.
#[derive(Default)]
struct Indices {
    buffer: Option<Buffer>,
    /// What the buffer holds, or will when the stream has come so far.
    sent: Vec<u32>,
}

/// What an index buffer is for.
#[derive(Clone, Copy)]
enum Index {
    Tokens,
    Rows,
    Weights,
    Picks,
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
            uploads: Uploads::new(&device)?,
            planner: StepPlanner::default(),
            tables: StepTables::default(),
            attention: AttentionPaths::new(attention),
            demotion: None,
            pending: None,
            indices: Default::default(),
            high: None,
            low: None,
            expanded: None,
            gram: None,
            picked: None,
            failed: None,
        };
        Ok(Self {
            launches: Launches::new(&device, &kernels)?,
            skinny: Skinny::new(&device, &kernels, WeightFormat::Bf16)?,
            fp8: OnceLock::new(),
            device,
            kernels,
            state: Mutex::new(state),
        })
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

    /// Runs an operation that has no result of its own. After a failure nothing more is enqueued until it was reported.
    fn enqueue(&self, operation: impl FnOnce(&mut State) -> Result<()>) {
        let mut state = self.state();
        if state.failed.is_none()
            && let Err(error) = self.append_now(&mut state).and_then(|()| operation(&mut state))
        {
            state.failed = Some(error);
        }
    }

    /// Runs an operation that has a result, after reporting what failed before it.
    fn run<T>(&self, operation: impl FnOnce(&mut State) -> Result<T>) -> BackendResult<T> {
        self.run_before_append(|state| {
            self.append_now(state)?;
            operation(state)
        })
    }

    /// The same for what takes heads that are not appended yet.
    fn run_before_append<T>(&self, operation: impl FnOnce(&mut State) -> Result<T>) -> BackendResult<T> {
        let mut state = self.state();
        if let Some(error) = state.failed.take() {
            return Err(error.into());
        }
        Ok(operation(&mut state)?)
    }

    /// Do steps of this many rows carry BF16 copies?
    fn rounds(rows: usize) -> bool {
        rows > crate::gemm::MOST_ROWS
    }

    fn send_indices(&self, state: &mut State, use_of: Index, values: &[u32]) -> Result<u64> {
        let Indices { buffer, sent } = &mut state.indices[use_of as usize];
        let before = buffer.as_ref().map_or(0, Buffer::address);
        grow(&self.device, buffer, values.len() * 4, "row numbers")?;
        let to = buffer.as_ref().map_or(0, Buffer::address);
        // Steps of the same sequences want the same rows.
        if to != before || sent != values {
            sent.clear();
            state.uploads.enqueue(bytemuck::cast_slice(values), to)?;
            sent.extend_from_slice(values);
        }
        Ok(to)
    }

    /// Behind the launches of a step and before its result is awaited: sends and plans what will probably be the next, and codes what
    /// that one codes.
    fn foresee_step(&self, state: &mut State) -> Result<()> {
        let State { planner, uploads, attention, demotion, .. } = state;
        if self.device.is_profiling() {
            return Ok(());
        }
        let Some(tables) = planner.foresee(&self.device, uploads)? else { return Ok(()) };
        let coded = demotion.map_or(Ok(()), |all| all.launch(&self.device, &self.kernels, &tables));
        coded
            .and_then(|()| attention.plan_again(&self.device, &self.kernels))
            .inspect_err(|_| planner.forget())
    }
}

impl Backend for CudaBackend {
    type Rows = CudaRows;
    type Matrix = CudaMatrix;
    type Vector = CudaVector;
    type Rope = CudaRope;
    type LayerRotation = CudaRotation;
    type Pool = CudaPages;

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

    fn describe_attention(&self, layout: &CacheLayout) -> String {
        self.state().attention.describe(&self.device, layout)
    }

    fn page_order(&self) -> CodeLayout {
        CodeLayout::GpuTile
    }

    fn multiplies_fp8(&self) -> bool {
        true
    }

    fn matrix(&self, weights: HostMatrix<'_>) -> BackendResult<CudaMatrix> {
        let matrix = CudaMatrix::upload(&self.device, &weights)?;
        if matrix.format() == WeightFormat::Fp8 {
            // Compiled now rather than in the middle of a step.
            self.fp8_kernels()?;
        }
        Ok(matrix)
    }

    fn matrix_bytes(&self, matrix: &CudaMatrix) -> usize {
        matrix.bytes()
    }

    fn random_matrix(
        &self,
        format: WeightFormat,
        outputs: usize,
        inputs: usize,
        seed: u64,
    ) -> BackendResult<CudaMatrix> {
        Ok(self.random_weights(format, outputs, inputs, seed)?)
    }

    fn vector(&self, values: &[f32]) -> BackendResult<CudaVector> {
        Ok(CudaVector { values: self.device.upload_new(values, "norm weights")?, len: values.len() })
    }

    fn rope(&self, cos: &[f32], sin: &[f32], head_dim: usize) -> BackendResult<CudaRope> {
        Ok(CudaRope {
            cosines: self.device.upload_new(cos, "the RoPE table")?,
            sines: self.device.upload_new(sin, "the RoPE table")?,
            positions: cos.len() / (head_dim / 2).max(1),
        })
    }

    fn layer_rotation(&self, heads: &[HeadRotations]) -> BackendResult<CudaRotation> {
        Ok(CudaRotation::upload(&self.device, heads)?)
    }

    fn held_layout(&self, layout: &CacheLayout) -> CacheLayout {
        Storage::held(layout)
    }

    fn pool(&self, layout: &CacheLayout, budget: usize) -> BackendResult<CudaPages> {
        let pages = CudaPages::reserve(&self.device, layout, budget)?;
        // Compiled now rather than in the middle of an answer.
        let by_head = vec![("HEAD_DIM", layout.head_dim())];
        self.kernels.function(&APPEND, &by_head, c"append", launches::append_shared(layout.head_dim()))?;
        if pages.storage() == Storage::Codes {
            self.kernels.function(&DEMOTE, &by_head, c"demote", 0)?;
        }
        self.state().attention.prepare(&self.device, &self.kernels, layout.head_dim(), pages.storage())?;
        Ok(pages)
    }

    fn randomize(&self, pool: &mut CudaPages, full: usize, coded: usize) -> BackendResult<bool> {
        self.randomize_pages(pool, full, coded)?;
        Ok(true)
    }

    fn rows(&self, width: usize) -> CudaRows {
        CudaRows::new(width)
    }

    fn begin_step(&self, sequences: &[SequenceRows<'_>], pool: &mut CudaPages) -> BackendResult<()> {
        self.run_before_append(|state| {
            let began = Instant::now();
            let State { planner, uploads, tables, attention, demotion, .. } = state;
            // Of a step that failed, at most.
            state.pending = None;
            // Recorded launches must be on their way before the tables they read are overwritten.
            self.device.flush()?;
            let all_layers = Demotion::of_all_layers(pool);
            *demotion = Some(all_layers);
            let planned = planner.plan(&self.device, uploads, pool, sequences)?;
            *tables = planned.tables;
            let summary = planner.summary();
            pool.ensure(summary.full_pages, summary.coded_pages)?;
            // Decoded history goes through the host in the middle of a step: there is nothing to record as a whole.
            let whole = pool.storage() != Storage::Decoded;
            if whole && summary.decode && !Self::rounds(summary.rows) {
                self.device.record(began)?;
            }
            // One by one, launches are timed in the step they belong to, also what was done when it was foreseen.
            let again = !planned.foreseen || self.device.is_profiling();
            if let Some(tiles) = planned.ahead.filter(|_| again) {
                // Attention reads codes before it waits for the kernels of its layer: what makes them must be over when the plan,
                // which overlaps with nothing, begins.
                all_layers.launch(&self.device, &self.kernels, &tiles)?;
            }
            // The same launches are noted, and make the same graphs, whether something was coded or planned before them or not.
            self.device.count_launches_from_here();
            if again {
                attention.begin_step(&self.device, &self.kernels, tables, summary, pool)?;
            }
            self.device.count_launches_from_here();
            Ok(())
        })
    }

    fn end_step(&self) -> BackendResult<()> {
        self.run(|_| Ok(()))
    }

    fn embed(&self, table: &CudaMatrix, tokens: &[u32], out: &mut CudaRows) {
        // Of a step that failed, at most: a step begins.
        self.state().pending = None;
        self.enqueue(|state| {
            if let Some(bad) = tokens.iter().find(|&&t| t as usize >= table.outputs) {
                let detail = format!("token {bad} of {}", table.outputs);
                return Err(CudaError::Shape { what: "an embedding", detail });
            }
            if table.format() == WeightFormat::Fp8 {
                let detail = "its rows are read one by one, which FP8's are not".into();
                return Err(CudaError::Shape { what: "an embedding", detail });
            }
            out.resize(&self.device, tokens.len(), true, false)?;
            let mut p = Embed {
                table: table.weights.address(),
                tokens: 0,
                out: out.values(),
                width: out.width() as u32,
                unused: 0,
                few: [0; EMBED_FEW],
            };
            // Parameters of a noted launch had better be those of the last step.
            match p.few.get_mut(..tokens.len()) {
                Some(few) if self.device.launches_at_once() => few.copy_from_slice(tokens),
                _ => p.tokens = self.send_indices(state, Index::Tokens, tokens)?,
            }
            self.launches.embed(tokens.len(), &p)
        });
    }

    fn rms_norm(&self, x: &CudaRows, weight: &CudaVector, eps: f32, out: &mut CudaRows) {
        self.enqueue(|_| {
            if weight.len != x.width() || out.width() != x.width() {
                let detail = format!("{} weights for rows of {}", weight.len, x.width());
                return Err(CudaError::Shape { what: "a norm", detail });
            }
            out.resize(&self.device, x.count(), true, Self::rounds(x.count()))?;
            let p = RmsNorm {
                x: x.values(),
                weight: weight.values.address(),
                out: out.values(),
                rounded: out.rounded(),
                width: x.width() as u32,
                eps,
            };
            self.launches.rms_norm(x.count(), &p)
        });
    }

    fn linear(&self, weight: &CudaMatrix, x: &CudaRows, out: &mut CudaRows, write: Write) {
        self.enqueue(|state| self.product(state, weight, x, out, write == Write::Add, false));
    }

    fn fused_gate(&self, weight: &CudaMatrix, x: &CudaRows, out: &mut CudaRows) -> bool {
        self.fuse(None, weight, x, out, true)
    }

    fn fused_norm(
        &self,
        norm: &CudaVector,
        eps: f32,
        weight: &CudaMatrix,
        x: &CudaRows,
        out: &mut CudaRows,
        gated: bool,
    ) -> bool {
        self.fuse(Some((norm, eps)), weight, x, out, gated)
    }

    fn logits(&self, weight: &CudaMatrix, x: &CudaRows, out: &mut CudaRows) {
        self.enqueue(|state| self.product(state, weight, x, out, false, true));
    }

    fn swiglu(&self, gate_up: &CudaRows, out: &mut CudaRows) {
        self.enqueue(|_| {
            let (rows, rounds) = (gate_up.count(), Self::rounds(gate_up.count()));
            out.resize(&self.device, rows, !rounds, rounds)?;
            let p = Swiglu {
                gate_up: gate_up.values(),
                out: out.values(),
                rounded: out.rounded(),
                width: out.width() as u32,
                rows: rows as u32,
            };
            self.launches.swiglu(&p)
        });
    }

    fn select(&self, x: &CudaRows, rows: &[usize], out: &mut CudaRows) {
        self.enqueue(|state| {
            if let Some(bad) = rows.iter().find(|&&r| r >= x.count()) {
                let detail = format!("row {bad} of {}", x.count());
                return Err(CudaError::Shape { what: "a selection", detail });
            }
            out.resize(&self.device, rows.len(), true, false)?;
            let rows_u32: Vec<u32> = rows.iter().map(|&r| r as u32).collect();
            let ids = self.send_indices(state, Index::Rows, &rows_u32)?;
            let p =
                Select { x: x.values(), rows: ids, out: out.values(), width: x.width() as u32, unused: 0 };
            self.launches.select(rows.len(), &p)
        });
    }

    fn read(&self, x: &CudaRows, out: &mut Vec<f32>) -> BackendResult<()> {
        self.run(|state| {
            if x.values() == 0 && x.count() > 0 {
                let detail = "they are held in BF16 alone".into();
                return Err(CudaError::Shape { what: "rows to read", detail });
            }
            let count = x.count() * x.width();
            state.uploads.download(x.values(), count, out)
        })
    }

    fn picks(&self) -> bool {
        true
    }

    fn pick(
        &self,
        logits: &CudaRows,
        rows: &[(usize, Pick)],
        out: &mut Vec<Vec<Candidate>>,
    ) -> BackendResult<()> {
        self.run(|state| self.list_candidates(state, logits, rows, out))
    }

    fn accumulate_gram(
        &self,
        x: &CudaRows,
        first: usize,
        width: usize,
        weights: Option<&[f32]>,
        gram: &mut [f64],
    ) -> BackendResult<()> {
        self.run(|state| self.add_gram(state, x, first, width, weights, gram))
    }

    fn append(
        &self,
        layer: usize,
        shape: &HeadShape,
        heads: HeadPreparation<'_, Self>,
        rope: &CudaRope,
        _sequences: &[SequenceRows<'_>],
        qkv: &mut CudaRows,
        queries: &mut CudaRows,
        pool: &mut CudaPages,
    ) -> BackendResult<()> {
        self.run(|state| self.append_heads(state, layer, shape, heads, rope, qkv, queries, pool))
    }

    fn read_full_rows(
        &self,
        head: CacheHead,
        full: &[Option<FullPageId>],
        positions: Range<usize>,
        pool: &CudaPages,
        keys: &mut Vec<f32>,
        values: &mut Vec<f32>,
    ) -> BackendResult<()> {
        self.run(|_| pool.read_full_rows(head, full, positions, keys, values))
    }

    fn write_full_rows(
        &self,
        head: CacheHead,
        full: &[Option<FullPageId>],
        first: usize,
        keys: &[f32],
        values: &[f32],
        pool: &mut CudaPages,
    ) -> BackendResult<()> {
        self.run(|state| {
            // What was coded ahead may be of these rows.
            state.planner.forget();
            pool.write_full_rows(head, full, first, keys, values)
        })
    }

    fn reads_demoted_tails(&self, layout: &CacheLayout) -> bool {
        let codes = Storage::of(layout).is_ok_and(|storage| storage == Storage::Codes);
        codes
            && layout.keeps_all_history()
            && self.state().attention.reads_demoted_tails(&self.device, layout.head_dim())
    }

    fn begin_demotion(&self, sequences: &[SequenceRows<'_>], pool: &mut CudaPages) -> BackendResult<()> {
        self.run_before_append(|state| {
            // Of a step that failed, at most.
            state.pending = None;
            let State { planner, uploads, tables, .. } = state;
            self.device.flush()?;
            *tables = planner.plan_demotion(&self.device, uploads, pool.layout().windows(), sequences)?;
            pool.ensure(planner.summary().full_pages, planner.summary().coded_pages)
        })
    }

    fn demote(
        &self,
        layer: usize,
        sequences: &[SequenceRows<'_>],
        pool: &mut CudaPages,
    ) -> BackendResult<()> {
        self.run_before_append(|state| {
            if state.tables.demoted_count == 0 && pool.storage() != Storage::Decoded {
                return Ok(());
            }
            self.append_now(state)?;
            if pool.storage() == Storage::Decoded {
                return crate::decoded::demote(&self.device, layer, sequences, pool);
            }
            Demotion::of_layer(pool, layer).launch(&self.device, &self.kernels, &state.tables)
        })
    }

    fn attention(
        &self,
        layer: usize,
        shape: &HeadShape,
        _sequences: &[SequenceRows<'_>],
        queries: &CudaRows,
        pool: &CudaPages,
        out: &mut CudaRows,
    ) -> BackendResult<()> {
        self.run_before_append(|state| self.attend(state, layer, shape, queries, pool, out))
    }
}
