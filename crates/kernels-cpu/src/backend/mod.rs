//! The CPU as a [`Backend`]: the kernels of this crate, a thread pool and page storage put together.

mod demotion;
mod heads;
mod pages;
mod products;
mod region;

use demotion::demote_sides;
pub use pages::CpuPages;

use crate::attention::{self, AttendTask};
use crate::{GemmScratch, Kernels, PackedMatrix, Precision, ThreadPool, Weights};
use heads::{HeadTask, LayerRotation};

use oscar_backend::{
    Backend, BackendError, CacheHead, Candidate, HeadPreparation, HeadShape, HostMatrix, HostValues, Pick,
    Result, SequenceRows, Write,
};
use oscar_codec::attention::PagedContext;
use oscar_codec::{CacheLayout, CodeLayout, FullPageId, HeadRotations, PAGE_TOKENS, PageCodec, Side};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Runs models on the processor.
pub struct CpuBackend {
    kernels: &'static Kernels,
    pool: ThreadPool,
    mode: Mode,
    scratch: Mutex<Scratch>,
}

/// Precision of weights and activations in matrix products; sums are always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// BF16 weights, activations as the sum of two BF16 (16 bits of mantissa): free in decode, which waits for
    /// memory, twice the arithmetic in prefill.
    Bf16,
    /// BF16 weights and activations, but for the output head.
    Fast,
    /// Everything in f32.
    F32,
}

impl Mode {
    fn weights(self) -> Precision {
        if self == Self::F32 { Precision::F32 } else { Precision::Bf16 }
    }
}

#[derive(Default)]
struct Scratch {
    gemm: GemmScratch,
    attention: attention::Scratch,
    /// Rows of split activations and their products.
    parts: Vec<f32>,
    sums: Vec<f32>,
    /// Attention outputs in task order, before they are dealt to their rows.
    outputs: Vec<f32>,
}

/// Activations: `rows × width`, row-major.
pub struct CpuRows {
    width: usize,
    values: Vec<f32>,
}

impl CpuRows {
    pub fn width(&self) -> usize {
        self.width
    }

    pub fn count(&self) -> usize {
        self.values.len() / self.width
    }

    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Makes it `rows` long; what it held is not kept in any useful form.
    fn resize(&mut self, rows: usize) {
        self.values.resize(rows * self.width, 0.0);
    }
}

/// A packed matrix and its bias.
pub struct CpuMatrix {
    packed: PackedMatrix,
    bias: Option<Vec<f32>>,
}

/// Cosines and sines, `[position][head_dim / 2]`.
pub struct CpuRope {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

impl CpuBackend {
    pub fn new(kernels: &'static Kernels, threads: usize, mode: Mode) -> std::io::Result<Self> {
        // A wrong OSCAR_ATTENTION is refused here, once, before any kernel could ignore it.
        attention::AttentionPrecision::chosen().map_err(std::io::Error::other)?;
        Ok(Self { kernels, pool: ThreadPool::new(threads)?, mode, scratch: Mutex::default() })
    }

    pub fn kernels(&self) -> &'static Kernels {
        self.kernels
    }

    pub fn threads(&self) -> &ThreadPool {
        &self.pool
    }

    fn scratch(&self) -> MutexGuard<'_, Scratch> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shape_error(what: &str, detail: impl ToString) -> BackendError {
        BackendError::Shape { what: what.into(), detail: detail.to_string() }
    }
}

impl Backend for CpuBackend {
    type Rows = CpuRows;
    type Matrix = CpuMatrix;
    type Vector = Vec<f32>;
    type Rope = CpuRope;
    type LayerRotation = LayerRotation;
    type Pool = CpuPages;

    fn describe(&self) -> String {
        let weights = match self.mode {
            Mode::Bf16 => "BF16 weights, 16-bit activations",
            Mode::Fast => "BF16 weights and activations",
            Mode::F32 => "F32 weights and activations",
        };
        format!("cpu, {} kernels, {} threads, {weights}", self.kernels.variant(), self.pool.threads())
    }

    fn describe_attention(&self, layout: &CacheLayout) -> String {
        let name = |table: &oscar_codec::FormatTable| {
            let mut names: Vec<&str> = (0..table.layers())
                .flat_map(|l| (0..table.kv_heads()).map(move |h| (l, h)))
                .map(|(l, h)| attention::kernel_name(self.kernels.variant(), table.codec(l, h)))
                .collect();
            names.sort_unstable();
            names.dedup();
            names.join(" + ")
        };
        match layout.coded() {
            Some(coded) => format!("{} over history, {} over windows", name(coded), name(layout.full())),
            None => name(layout.full()),
        }
    }

    fn page_order(&self) -> CodeLayout {
        CodeLayout::CpuTile
    }

    fn matrix(&self, weights: HostMatrix<'_>) -> Result<CpuMatrix> {
        let values = match weights.values {
            HostValues::Bf16(v) => Weights::Bf16(v),
            HostValues::F16(v) => Weights::F16(v),
            HostValues::F32(v) => Weights::F32(v),
            HostValues::Fp8(v) => Weights::Fp8(v),
        };
        let packed =
            PackedMatrix::pack(&self.pool, values, weights.outputs, weights.inputs, self.mode.weights())
                .map_err(|error| Self::shape_error("a weight matrix", error))?;
        if let Some(bias) = weights.bias.filter(|b| b.len() != weights.outputs) {
            return Err(Self::shape_error(
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

    fn rope(&self, cos: &[f32], sin: &[f32], head_dim: usize) -> Result<CpuRope> {
        Ok(CpuRope { cos: cos.to_vec(), sin: sin.to_vec(), half: head_dim / 2 })
    }

    fn layer_rotation(&self, heads: &[HeadRotations]) -> Result<LayerRotation> {
        LayerRotation::new(&self.pool, heads)
    }

    fn pool(&self, layout: &CacheLayout, budget: usize) -> Result<CpuPages> {
        CpuPages::reserve(layout, budget)
    }

    fn rows(&self, width: usize) -> CpuRows {
        CpuRows { width, values: Vec::new() }
    }

    fn embed(&self, table: &CpuMatrix, tokens: &[u32], out: &mut CpuRows) {
        out.resize(tokens.len());
        let width = out.width;
        self.pool.run_chunks(&mut out.values, width, |row, values| {
            table.packed.read_row(tokens[row] as usize, values)
        });
    }

    fn rms_norm(&self, x: &CpuRows, weight: &Vec<f32>, eps: f32, out: &mut CpuRows) {
        out.resize(x.count());
        self.kernels.rms_norm(&self.pool, &x.values, weight, eps, &mut out.values);
    }

    fn linear(&self, weight: &CpuMatrix, x: &CpuRows, out: &mut CpuRows, write: Write) {
        if write == Write::Replace {
            out.resize(x.count());
        }
        match self.mode {
            Mode::Bf16 => self.split_linear(weight, x, out, write),
            Mode::Fast | Mode::F32 => self.plain_linear(weight, x, out, write),
        }
    }

    fn logits(&self, weight: &CpuMatrix, x: &CpuRows, out: &mut CpuRows) {
        out.resize(x.count());
        match self.mode {
            Mode::Bf16 | Mode::Fast => self.split_linear(weight, x, out, Write::Replace),
            Mode::F32 => self.plain_linear(weight, x, out, Write::Replace),
        }
    }

    fn swiglu(&self, gate_up: &CpuRows, out: &mut CpuRows) {
        out.resize(gate_up.count());
        self.kernels.swiglu_rows(&self.pool, &gate_up.values, out.width, &mut out.values);
    }

    fn select(&self, x: &CpuRows, rows: &[usize], out: &mut CpuRows) {
        out.resize(rows.len());
        for (&row, target) in rows.iter().zip(out.values.chunks_exact_mut(x.width)) {
            target.copy_from_slice(&x.values[row * x.width..][..x.width]);
        }
    }

    fn read(&self, x: &CpuRows, out: &mut Vec<f32>) -> Result<()> {
        out.extend_from_slice(&x.values);
        Ok(())
    }

    fn picks(&self) -> bool {
        true
    }

    fn pick(&self, logits: &CpuRows, rows: &[(usize, Pick)], out: &mut Vec<Vec<Candidate>>) -> Result<()> {
        for &(row, what) in rows {
            let logits = logits.values.chunks_exact(logits.width).nth(row);
            let logits =
                logits.ok_or_else(|| Self::shape_error("a pick", format!("there is no row {row}")))?;
            out.push(oscar_backend::pick(logits, what));
        }
        Ok(())
    }

    fn accumulate_gram(
        &self,
        x: &CpuRows,
        first: usize,
        width: usize,
        weights: Option<&[f32]>,
        gram: &mut [f64],
    ) -> Result<()> {
        self.kernels.accumulate_gram(&self.pool, &x.values, x.width, first, width, weights, gram);
        Ok(())
    }

    fn append(
        &self,
        layer: usize,
        shape: &HeadShape,
        heads: HeadPreparation<'_, Self>,
        rope: &CpuRope,
        sequences: &[SequenceRows<'_>],
        qkv: &mut CpuRows,
        queries: &mut CpuRows,
        pool: &mut CpuPages,
    ) -> Result<()> {
        let positions = heads::positions(sequences, qkv.count());
        heads::normalize_and_rope(&self.pool, self.kernels, shape, heads.qk_norm, rope, &positions, qkv);

        queries.resize(qkv.count());
        let per_head = qkv.count() * (shape.query_heads / shape.kv_heads) * shape.head_dim;
        let (layout, full, _) = pool.layer_mut(layer);
        let mut tasks: Vec<HeadTask<'_>> = queries
            .values
            .chunks_exact_mut(per_head)
            .zip(full)
            .enumerate()
            .map(|(head, (queries, pages))| HeadTask {
                head,
                queries,
                pages,
                codec: layout.full().codec(layer, head),
            })
            .collect();
        let qkv = &*qkv;
        self.pool.run_chunks(&mut tasks, 1, |_, task| {
            task[0].run(&self.pool, self.kernels, shape, heads.rotation, sequences, qkv);
        });
        Ok(())
    }

    fn reads_demoted_tails(&self, layout: &CacheLayout) -> bool {
        layout.keeps_all_history()
    }

    fn demote(&self, layer: usize, sequences: &[SequenceRows<'_>], pool: &mut CpuPages) -> Result<()> {
        if sequences.iter().all(|s| s.demote.is_empty() && s.demote_values.is_empty()) {
            return Ok(());
        }
        let (layout, full, coded) = pool.layer_mut(layer);
        let Some(table) = layout.coded() else { return Ok(()) };
        let mut tasks: Vec<_> = full.iter().zip(coded).enumerate().collect();
        self.pool.run_chunks(&mut tasks, 1, |_, task| {
            let (head, (full, coded)) = &mut task[0];
            let codecs = attention::DemotionCodecs {
                full: layout.full().codec(layer, *head),
                coded: table.codec(layer, *head),
            };
            let by_tiles = layout.windows().sides_agree() && codecs.coded.token_groups(Side::Key).is_none();
            for sequence in sequences {
                if by_tiles {
                    self.demote_tiles(codecs, sequence, full, coded);
                } else {
                    demote_sides(codecs, sequence, full, coded);
                }
            }
        });
        Ok(())
    }

    fn read_full_rows(
        &self,
        head: CacheHead,
        full: &[Option<FullPageId>],
        positions: Range<usize>,
        pool: &CpuPages,
        keys: &mut Vec<f32>,
        values: &mut Vec<f32>,
    ) -> Result<()> {
        let codec = pool.full_codec(head.layer, head.kv_head);
        let d = codec.head_dim();
        keys.resize(positions.len() * d, 0.0);
        values.resize(positions.len() * d, 0.0);
        for (row, position) in positions.enumerate() {
            let page = pool.full_page(head.layer, head.kv_head, held_page(full, position)?);
            codec.decode_row(Side::Key, page, position % PAGE_TOKENS, &mut keys[row * d..][..d]);
            codec.decode_row(Side::Value, page, position % PAGE_TOKENS, &mut values[row * d..][..d]);
        }
        Ok(())
    }

    fn write_full_rows(
        &self,
        head: CacheHead,
        full: &[Option<FullPageId>],
        first: usize,
        keys: &[f32],
        values: &[f32],
        pool: &mut CpuPages,
    ) -> Result<()> {
        let (layout, pages, _) = pool.layer_mut(head.layer);
        let codec = layout.full().codec(head.layer, head.kv_head);
        let d = codec.head_dim();
        for (row, (key, value)) in keys.chunks_exact(d).zip(values.chunks_exact(d)).enumerate() {
            let position = first + row;
            let page = pages[head.kv_head].page_mut(held_page(full, position)?.0);
            attention::append_rows(codec, page, position % PAGE_TOKENS, key, value).map_err(|error| {
                BackendError::Shape { what: "rows of the cache".into(), detail: error.to_string() }
            })?;
        }
        Ok(())
    }

    fn attention(
        &self,
        layer: usize,
        shape: &HeadShape,
        sequences: &[SequenceRows<'_>],
        queries: &CpuRows,
        pool: &CpuPages,
        out: &mut CpuRows,
    ) -> Result<()> {
        let (d, group, rows) = (shape.head_dim, shape.query_heads / shape.kv_heads, queries.count());
        let scratch = &mut *self.scratch();
        let (outputs, attention) = (&mut scratch.outputs, &mut scratch.attention);
        outputs.resize(rows * shape.query_heads * d, 0.0);

        // One page list for each sequence and head; each row of a token comes once for every query head.
        type Pages<'p> = Vec<Option<&'p [u8]>>;
        let mut lists: Vec<(Pages<'_>, Pages<'_>)> = Vec::with_capacity(shape.kv_heads * sequences.len());
        for head in 0..shape.kv_heads {
            for s in sequences {
                let full = s.full.iter().map(|id| id.map(|id| pool.full_page(layer, head, id))).collect();
                let coded = s.coded.iter().map(|id| id.map(|id| pool.coded_page(layer, head, id))).collect();
                lists.push((full, coded));
            }
        }
        let contexts: Vec<PagedContext<'_>> = lists
            .iter()
            .enumerate()
            .map(|(i, (full, coded))| PagedContext {
                full_codec: pool.full_codec(layer, i / sequences.len()),
                coded_codec: pool.coded_codec(layer, i / sequences.len()),
                full,
                coded,
            })
            .collect();
        let positions: Vec<u32> = heads::positions(sequences, rows)
            .into_iter()
            .flat_map(|p| std::iter::repeat_n(p, group))
            .collect();
        let mut tasks = Vec::with_capacity(contexts.len());
        let mut free = outputs.as_mut_slice();
        for (i, context) in contexts.iter().enumerate() {
            let (head, s) = (i / sequences.len(), &sequences[i % sequences.len()]);
            let range = s.rows.start * group..s.rows.end * group;
            let start = head * rows * group * d;
            let (mine, rest) = free.split_at_mut(range.len() * d);
            free = rest;
            tasks.push(AttendTask {
                queries: &queries.values[start + range.start * d..start + range.end * d],
                positions: &positions[range],
                scale: shape.scale,
                windows: pool.layout().windows(),
                context,
                out: mine,
            });
        }
        attention::attend(self.kernels.variant(), &self.pool, &mut tasks, attention);
        drop(tasks);

        out.resize(rows);
        let width = group * d;
        let total: usize = sequences.iter().map(|s| s.rows.len()).sum();
        let mut row_of = Vec::with_capacity(total);
        for s in sequences {
            row_of.extend(s.rows.clone());
        }
        for head in 0..shape.kv_heads {
            for (i, &row) in row_of.iter().enumerate() {
                let source = &outputs[(head * total + i) * width..][..width];
                out.values[row * out.width + head * width..][..width].copy_from_slice(source);
            }
        }
        Ok(())
    }
}

/// The full page that holds a position.
fn held_page(full: &[Option<FullPageId>], position: usize) -> Result<FullPageId> {
    full.get(position / PAGE_TOKENS).copied().flatten().ok_or_else(|| BackendError::Shape {
        what: "page table".into(),
        detail: format!("position {position} has no full page"),
    })
}
