//! One step on the GPU.

use super::launches::{EMBED_FEW, EmbedParams, SelectParams};
use super::scores::ScoredStep;
use super::tapped::CudaTapped;
use super::{CudaBackend, CudaExperts, CudaRows, CudaVector, Index, State};
use crate::attention::append::{HeadConstants, Projections};
use crate::attention::decode::Queries;
use crate::attention::demote::Scope;
use crate::attention::{LayerCall, Path, Sinks};
use crate::error::{CudaError, Result};
use crate::gemm::CudaMatrix;
use crate::nccl::NcclRank;
use crate::pages::CudaPages;
use crate::step::{StepSummary, StepTables};
use crate::storage::Storage;
use oscar_backend::{
    Candidate, DeltaStep, Gate, HeadShape, LayerHeads, Pick, Product, Result as BackendResult, SequenceRows,
    Step, Tap, TappedRows, WeightFormat,
};
use std::sync::MutexGuard;
use std::time::Instant;

/// A step in progress.
///
/// Every call enqueues its launches, or notes them for a graph; the step hands over all of them
/// when it ends. The step's tables are made and sent at the first `attend`, so the GPU already runs
/// the embedding and the first product while the host makes them. Nothing before `attend` reads
/// them.
pub struct CudaStep<'s> {
    pub(super) backend: &'s CudaBackend,
    pub(super) state: MutexGuard<'s, State>,
    pub(super) sequences: &'s [SequenceRows<'s>],
    pub(super) pool: &'s mut CudaPages,
    pub(super) planned: Option<Planned>,
    /// Where attention weights of its rows are added up.
    pub(super) scored: Option<ScoredStep>,
}

/// The part of a step that all its layers share.
pub(super) struct Planned {
    pub tables: StepTables,
    /// Tables for sliding layers.
    pub sliding: Option<StepTables>,
    pub summary: StepSummary,
    pub path: Path,
}

impl Drop for CudaStep<'_> {
    fn drop(&mut self) {
        let _ = self.backend.device.flush();
    }
}

impl<'s> CudaStep<'s> {
    pub(super) fn new(
        backend: &'s CudaBackend,
        state: MutexGuard<'s, State>,
        sequences: &'s [SequenceRows<'s>],
        pool: &'s mut CudaPages,
    ) -> Self {
        Self { backend, state, sequences, pool, planned: None, scored: None }
    }

    /// Memory that is kept from step to step.
    pub(super) fn state(&mut self) -> &mut State {
        &mut self.state
    }

    /// The tables of the step, once it is planned.
    pub(super) fn tables(&self) -> Option<StepTables> {
        self.planned.as_ref().map(|planned| planned.tables)
    }

    /// Makes and sends the tables and chooses the kernels, once.
    fn plan(&mut self, tapped: bool) -> Result<()> {
        if self.planned.is_some() {
            return Ok(());
        }
        let began = Instant::now();
        let Self { backend, state, sequences, pool, .. } = self;
        let (device, State { planner, transfers, decode, .. }) = (&backend.device, &mut **state);
        // No launch of an earlier step is pending: a step hands over all of its launches when it
        // ends.
        let planned = planner.plan(device, transfers, pool, sequences)?;
        let summary = planned.summary;
        pool.ensure(summary.full_pages, summary.coded_pages, summary.sliding_pages)?;
        let path = pool.kernels().choose(device, &summary, pool.layout(), tapped);
        // Dequantized history goes through the host in the middle of a step, so there is no graph.
        let whole = pool.storage() != Storage::Dequantized;
        if whole && summary.decode && !CudaBackend::rounds(summary.rows) {
            device.record(began)?;
        }
        if let Some(tiles) = planned.ahead {
            // Attention reads codes before it waits for the kernels of its layer. The plan does not
            // overlap with other kernels, so the codes are complete when it begins.
            //
            // SAFETY: the tables are of this step, over these pages, which have memory for all its
            // ids.
            unsafe { pool.kernels().demote(device, Scope::AllLayers, &tiles, pool) }?;
        }
        // Launches up to here vary from step to step. Those after are counted from zero, so that
        // the same ones go into the same graphs.
        device.count_launches_from_here();
        if path.decodes() {
            let fused = path == Path::Decode { fused: true };
            // SAFETY: the tables are of this step, over these pages.
            unsafe { LayerCall::plan(device, decode, &planned.tables, pool, fused, summary.views) }?;
        }
        device.count_launches_from_here();
        self.planned = Some(Planned { tables: planned.tables, sliding: planned.sliding, summary, path });
        Ok(())
    }

    /// The rows of one layer and the constants of its heads, checked against the step and the
    /// cache.
    pub(super) fn projections(
        &self,
        heads: &LayerHeads<'_, CudaBackend>,
        qkv: &CudaRows,
    ) -> Result<Projections> {
        let (shape, layout) = (self.pool.shape(), self.pool.layout());
        let d = shape.head_dim;
        let width = (shape.query_heads + 2 * shape.kv_heads) * d;
        let summary = self.planned.as_ref().map(|p| &p.summary);
        let (rows, longest) = summary.map_or((0, 0), |s| (s.rows, s.longest));
        let rotates = |r: &super::CudaRotation| (r.heads, r.head_dim) == (shape.kv_heads, d);
        let fits = heads.layer < layout.layers()
            && (qkv.count(), qkv.width()) == (rows, width)
            && longest <= heads.rope.positions
            && heads.rope.rotary_dim <= d
            && heads.qk_norm.is_none_or(|norms| self.norms_each_head(norms) || self.norms_all_heads(norms))
            && heads.rotation.is_none_or(rotates);
        if !fits {
            let detail = format!(
                "layer {} of {}, {} rows of {} in a step of {rows} rows of {width}, position {longest} of {}",
                heads.layer,
                layout.layers(),
                qkv.count(),
                qkv.width(),
                heads.rope.positions
            );
            return Err(CudaError::Shape { what: "the heads of a layer", detail });
        }
        let prepared = self.needs_preparation(heads);
        let norms = heads.qk_norm.filter(|_| !prepared);
        let (cosines, sines) = match prepared {
            true => {
                let (ones, zeros) = heads.rope.still(&self.backend.device, d)?;
                (ones.ptr(), zeros.ptr())
            }
            false => (heads.rope.cosines.ptr(), heads.rope.sines.ptr()),
        };
        let constants = HeadConstants {
            query_norm: norms.map(|(q, _)| q.values.ptr()),
            key_norm: norms.map(|(_, k)| k.values.ptr()),
            cosines: Some(cosines),
            sines: Some(sines),
            rotation: heads.rotation.map(|r| r.matrices.ptr()),
            mean: heads.rotation.and_then(|r| r.means.as_ref()).map(|means| means.ptr()),
            eps: shape.rms_norm_eps,
        };
        Ok(Projections { rows: qkv.held_values("the heads of a layer")?.ptr(), constants })
    }

    /// The part of `attend` before attention, in a launch of its own. With `tapped`, `qkv` gets
    /// QK-norm and RoPE in place; otherwise it holds nothing of use afterwards.
    pub fn append(
        &mut self,
        heads: &LayerHeads<'_, CudaBackend>,
        qkv: &mut CudaRows,
        queries: &mut CudaRows,
        tapped: bool,
    ) -> Result<()> {
        self.plan(true)?;
        let projections = self.projections(heads, qkv)?;
        let (shape, device) = (self.pool.shape(), &self.backend.device);
        queries.set_width(shape.query_heads * shape.head_dim).resize(device, qkv.count(), true, false)?;
        qkv.drop_rounded();
        let Some(tables) = self.tables_of(heads.layer)? else { return Ok(()) };
        let append = &self.pool.kernels().append;
        let out = queries.held_values("queries")?.ptr();
        // SAFETY: `projections` were checked against the step and the cache; `queries` have as many
        // rows; the tables are those of this step and of the layer's group.
        unsafe { append.launch(device, heads.layer, tables, self.pool, projections, out, tapped) }
    }

    /// The tables whose full pages are those of a layer's group; none before the step is planned.
    pub(super) fn tables_of(&self, layer: usize) -> Result<Option<&StepTables>> {
        let Some(Planned { tables, sliding, .. }) = &self.planned else { return Ok(None) };
        match (self.pool.layout().slides(layer), sliding) {
            (false, _) => Ok(Some(tables)),
            (true, Some(sliding)) => Ok(Some(sliding)),
            // Without sequences there are no pages.
            (true, None) if tables.rows == 0 => Ok(None),
            (true, None) => {
                let detail = "a sliding layer in a step without sliding pages".into();
                Err(CudaError::Shape { what: "a step", detail })
            }
        }
    }

    /// Quantizes the tiles that this layer has to. Sliding layers stay in BF16.
    fn demote(&mut self, layer: usize) -> Result<()> {
        let device = &self.backend.device;
        if self.pool.layout().slides(layer) {
            return Ok(());
        }
        if self.pool.storage() == Storage::Dequantized {
            return crate::dequantized::demote(device, layer, self.sequences, self.pool);
        }
        let Some(Planned { tables, .. }) = &self.planned else { return Ok(()) };
        // SAFETY: the tables are of this step, over these pages, which have memory for all its ids.
        unsafe { self.pool.kernels().demote(device, Scope::Layer(layer), tables, self.pool) }
    }

    /// Attention alone, of rotated queries over pages that hold their keys and values: for
    /// benchmarks.
    pub fn attention(&mut self, layer: usize, queries: &CudaRows, out: &mut CudaRows) -> Result<()> {
        self.plan(true)?;
        let shape = self.pool.shape();
        let rows = self.planned.as_ref().map_or(0, |p| p.summary.rows);
        let width = shape.query_heads * shape.head_dim;
        if layer >= self.pool.layout().layers() || (queries.count(), queries.width()) != (rows, width) {
            let detail = format!("{} rows of {} in layer {layer}", queries.count(), queries.width());
            return Err(CudaError::Shape { what: "queries", detail });
        }
        let queries = Queries::Ready(queries.held_values("queries")?.ptr());
        self.run_attention(layer, queries, rows, Sinks::default(), out, true)
    }

    fn run_attention(
        &mut self,
        layer: usize,
        queries: Queries,
        rows: usize,
        sinks: Sinks,
        out: &mut CudaRows,
        tapped: bool,
    ) -> Result<()> {
        let Self { backend, state, pool, planned, .. } = self;
        let Some(Planned { tables, summary, path, .. }) = planned else { return Ok(()) };
        let shape = pool.shape();
        check_output(shape, out)?;
        // The product after it reads the rounded rows of a prompt.
        let rounds = CudaBackend::rounds(rows);
        out.resize(&backend.device, rows, tapped || !rounds || *path != Path::Prefill, rounds)?;
        let (values, rounded) = (out.values().map(|out| out.ptr()), out.rounded_ptr());
        let call = LayerCall { layer, tables, summary, pages: pool, queries, out: values, rounded, sinks };
        let State { decode, prefill, .. } = &mut **state;
        // SAFETY: the tables are of this step, over these pages; `queries` and `out` have the step's rows
        // (checked by our callers), and the plan is of this step.
        if !unsafe { call.attend(&backend.device, *path, decode, prefill) }? {
            out.drop_rounded();
        }
        Ok(())
    }

    /// RMSNorm alone: for checks.
    pub fn rms_norm(
        &mut self,
        x: &CudaRows,
        weight: &CudaVector,
        eps: f32,
        out: &mut CudaRows,
    ) -> Result<()> {
        self.backend.rms_norm(x, weight, eps, out, true)
    }

    /// A gate alone, of rows of `[gate | up]`: for checks.
    pub fn gate(&mut self, gate: Gate, gate_up: &CudaRows, out: &mut CudaRows) -> Result<()> {
        self.backend.gate(gate, gate_up, out)
    }

    /// Rows as a tap sees them.
    pub fn tapped<'a>(&'a mut self, rows: &'a CudaRows) -> impl TappedRows + 'a {
        CudaTapped { backend: self.backend, state: &mut self.state, rows }
    }

    fn select_rows(&mut self, x: &CudaRows, rows: &[usize], out: &mut CudaRows) -> Result<()> {
        check_rows(x, rows)?;
        let backend = self.backend;
        if out.width() != x.width() {
            let detail = format!("rows of {} to {}", x.width(), out.width());
            return Err(CudaError::Shape { what: "a selection", detail });
        }
        out.resize(&backend.device, rows.len(), true, false)?;
        let rows_u32: Vec<u32> = rows.iter().map(|&r| r as u32).collect();
        let ids = backend.send_indices(&mut self.state, Index::Rows, &rows_u32)?;
        if rows.is_empty() {
            return Ok(());
        }
        let p = SelectParams {
            x: x.values().map(|x| x.ptr()),
            rounded: x.rounded_ptr(),
            rows: ids,
            out: out.held_values("a selection")?.ptr(),
            width: x.width() as u32,
        };
        // SAFETY: the rows are rows of `x` (checked), and `out` has one for each, of the same
        // width.
        unsafe { backend.launches.select(rows.len(), p) }
    }
}

/// Attention writes all query heads of a row.
pub(super) fn check_output(shape: &HeadShape, out: &CudaRows) -> Result<()> {
    if out.width() != shape.query_heads * shape.head_dim {
        let detail = format!("{} for {shape:?}", out.width());
        return Err(CudaError::Shape { what: "the output of attention", detail });
    }
    Ok(())
}

/// Rows that are read one by one must be there, in one of their forms.
fn check_rows(x: &CudaRows, rows: &[usize]) -> Result<()> {
    let held = x.values().is_some() || x.rounded().is_some();
    if let Some(bad) = rows.iter().find(|&&r| r >= x.count() || !held) {
        let detail = format!("row {bad} of {}, which hold something: {held}", x.count());
        return Err(CudaError::Shape { what: "a choice of rows", detail });
    }
    Ok(())
}

impl CudaStep<'_> {
    fn ranks(&self) -> Result<&NcclRank> {
        let alone = || CudaError::Unsupported("this GPU is no rank of a model".into());
        self.backend.ranks.as_ref().ok_or_else(alone)
    }
}

impl DeltaStep<CudaBackend> for CudaStep<'_> {}

impl Step<CudaBackend> for CudaStep<'_> {
    fn embed(
        &mut self,
        table: &CudaMatrix,
        tokens: &[u32],
        scale: f32,
        out: &mut CudaRows,
    ) -> BackendResult<()> {
        let refuse = |detail: String| Err(CudaError::Shape { what: "an embedding", detail }.into());
        if let Some(bad) = tokens.iter().find(|&&t| t as usize >= table.outputs) {
            return refuse(format!("token {bad} of {}", table.outputs));
        }
        if table.format() == WeightFormat::Fp8 || table.inputs != out.width() {
            return refuse(format!("{:?} rows of {} to {}", table.format(), table.inputs, out.width()));
        }
        let backend = self.backend;
        out.resize(&backend.device, tokens.len(), true, false)?;
        let mut p = EmbedParams {
            table: table.weights.ptr(),
            tokens: None,
            out: out.held_values("an embedding")?.ptr(),
            width: out.width() as u32,
            scale,
            few: [0; EMBED_FEW],
        };
        // Parameters of a launch that is noted for a graph should be those of the last step.
        match p.few.get_mut(..tokens.len()) {
            Some(few) if backend.device.launches_at_once() => few.copy_from_slice(tokens),
            _ => p.tokens = Some(backend.send_indices(&mut self.state, Index::Tokens, tokens)?),
        }
        // SAFETY: tokens are rows of the table, whose width is that of `out` (checked); `out` has a
        // row for each.
        Ok(unsafe { backend.launches.embed(tokens.len(), p) }?)
    }

    fn select(&mut self, x: &CudaRows, rows: &[usize], out: &mut CudaRows) -> BackendResult<()> {
        Ok(self.select_rows(x, rows, out)?)
    }

    fn product(
        &mut self,
        product: Product<'_, CudaBackend>,
        x: &CudaRows,
        out: &mut CudaRows,
    ) -> BackendResult<()> {
        Ok(self.backend.product(&mut self.state, product, x, out)?)
    }

    fn experts(
        &mut self,
        experts: &CudaExperts,
        norm: (&CudaVector, f32),
        x: &mut CudaRows,
    ) -> BackendResult<()> {
        Ok(self.backend.run_experts(&mut self.state, experts, norm, x)?)
    }

    fn attend(
        &mut self,
        heads: LayerHeads<'_, CudaBackend>,
        qkv: &mut CudaRows,
        out: &mut CudaRows,
        mut tap: Option<&mut dyn Tap>,
    ) -> BackendResult<()> {
        let layer = heads.layer;
        let slides = self.check_windows(&heads)?;
        let mut queries = std::mem::take(&mut self.state.queries);
        // The fused form adds no sinks.
        let apart = tap.is_some() || heads.sinks.is_some();
        self.plan(apart)?;
        self.prepare_heads(&heads, qkv)?;
        let fused = matches!(self.planned, Some(Planned { path: Path::Decode { fused: true }, .. }));
        let queries_from = match fused && !apart && !slides {
            true => {
                qkv.drop_rounded();
                Queries::FromProjections(self.projections(&heads, qkv)?)
            }
            false => {
                self.append(&heads, qkv, &mut queries, tap.is_some())?;
                Queries::Ready(queries.held_values("queries")?.ptr())
            }
        };
        if let Some(tap) = &mut tap {
            tap.heads(layer, &mut self.tapped(qkv))?;
        }
        self.demote(layer)?;
        let sinks = self.sinks(&heads, &queries)?;
        match slides {
            true => self.slide(layer, queries_from, qkv.count(), sinks, out, tap.is_some())?,
            false => self.run_attention(layer, queries_from, qkv.count(), sinks, out, tap.is_some())?,
        }
        if let Some(tap) = tap {
            if let Some(scoring) = tap.scoring() {
                self.score(layer, &queries, scoring)?;
            }
            tap.attended(layer, &mut self.tapped(out))?;
        }
        self.state.queries = queries;
        Ok(())
    }

    fn all_reduce(&mut self, x: &mut CudaRows) -> BackendResult<()> {
        self.ranks()?.sum(x.held_values("rows to sum over ranks")?)?;
        x.drop_rounded();
        Ok(())
    }

    fn all_gather(&mut self, part: &CudaRows, whole: &mut CudaRows) -> BackendResult<()> {
        let rows = part.count();
        whole.resize(&self.backend.device, rows, true, false)?;
        let whole = whole.held_values("rows of all ranks")?;
        Ok(self.ranks()?.join_rows(rows, part.held_values("a rank's part of rows")?, whole)?)
    }

    fn read(&mut self, x: &CudaRows, rows: &[usize], out: &mut Vec<f32>) -> BackendResult<()> {
        check_rows(x, rows)?;
        if rows.is_empty() {
            return Ok(self.backend.device.synchronize()?);
        }
        if let (Some(values), true) = (x.values(), rows.iter().copied().eq(0..x.count())) {
            return Ok(self.state.transfers.download(values, out)?);
        }
        let mut selected = std::mem::take(&mut self.state.selected);
        let done = self
            .select_rows(x, rows, selected.set_width(x.width()))
            .and_then(|()| self.state.transfers.download(selected.held_values("rows to read")?, out));
        self.state.selected = selected;
        Ok(done?)
    }

    fn pick(
        &mut self,
        logits: &CudaRows,
        rows: &[(usize, Pick)],
        out: &mut Vec<Vec<Candidate>>,
    ) -> BackendResult<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let picks = self.backend.launch_picks(&mut self.state, logits, rows)?;
        Ok(self.backend.read_picks(&mut self.state, &picks, out)?)
    }

    fn finish(self) -> BackendResult<()> {
        Ok(self.backend.device.flush()?)
    }
}
