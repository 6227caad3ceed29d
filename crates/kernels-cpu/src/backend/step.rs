//! One step on the CPU: every operation is done when its call returns.

use super::heads::{self, HeadTask};
use super::views::HeadContext;
use super::{CpuBackend, CpuExperts, CpuMatrix, CpuPages, CpuRows, Scratch, shape_error};
use crate::attention::{self, AttendTask};
use oscar_backend::{
    BackendError, Candidate, Communicator, HostRows, LatentHeads, LayerHeads, Pick, Product, Result,
    SequenceRows, Step, Tap,
};
use oscar_codec::attention::PagedContext;
use std::sync::MutexGuard;
use std::time::Instant;

/// A step in progress.
pub struct CpuStep<'s> {
    pub(super) backend: &'s CpuBackend,
    pub(super) scratch: MutexGuard<'s, Scratch>,
    pub(super) sequences: &'s [SequenceRows<'s>],
    pub(super) pool: &'s mut CpuPages,
}

impl Step<CpuBackend> for CpuStep<'_> {
    fn embed(&mut self, table: &CpuMatrix, tokens: &[u32], scale: f32, out: &mut CpuRows) -> Result<()> {
        let (rows, width) = (table.packed.outputs(), out.width);
        if table.packed.inputs() != width || tokens.iter().any(|&t| t as usize >= rows) {
            let detail = format!("{tokens:?} of a table of {rows} rows of {}", table.packed.inputs());
            return Err(shape_error("an embedding", detail));
        }
        out.resize(tokens.len());
        self.backend.pool.run_chunks(&mut out.values, width, |row, values| {
            table.packed.read_row(tokens[row] as usize, values);
            if scale != 1.0 {
                values.iter_mut().for_each(|value| *value *= scale);
            }
        });
        Ok(())
    }

    fn select(&mut self, x: &CpuRows, rows: &[usize], out: &mut CpuRows) -> Result<()> {
        check_rows(x, rows)?;
        out.resize(rows.len());
        for (&row, target) in rows.iter().zip(out.values.chunks_exact_mut(x.width)) {
            target.copy_from_slice(&x.values[row * x.width..][..x.width]);
        }
        Ok(())
    }

    fn product(&mut self, product: Product<'_, CpuBackend>, x: &CpuRows, out: &mut CpuRows) -> Result<()> {
        let began = Instant::now();
        self.backend.product(&mut self.scratch.products, product, x, out)?;
        self.scratch.count(began, |times| &mut times.products);
        Ok(())
    }

    fn experts(&mut self, experts: &CpuExperts, norm: (&Vec<f32>, f32), x: &mut CpuRows) -> Result<()> {
        if x.width != experts.hidden() {
            let detail = format!("rows of {} for experts of {}", x.width, experts.hidden());
            return Err(shape_error("a mixture of experts", detail));
        }
        self.backend.run_experts(&mut self.scratch.experts, experts, (norm.0, norm.1), &mut x.values)
    }

    fn attend(
        &mut self,
        heads: LayerHeads<'_, CpuBackend>,
        qkv: &mut CpuRows,
        out: &mut CpuRows,
        mut tap: Option<&mut dyn Tap>,
    ) -> Result<()> {
        let (layer, began) = (heads.layer, Instant::now());
        let narrowed = heads.window.is_some() || heads.sinks.is_some();
        if narrowed && tap.as_deref_mut().is_some_and(|tap| tap.scoring().is_some()) {
            let why = "rows are not scored for eviction in layers with sliding windows or attention sinks";
            return Err(BackendError::Unsupported { device: "cpu".into(), why: why.into() });
        }
        self.append(&heads, qkv);
        self.scratch.count(began, |times| &mut times.coding);
        if let Some(tap) = tap.as_deref_mut() {
            tap.heads(layer, &mut self.backend.tapped(qkv))?;
        }
        let began = Instant::now();
        self.backend.demote_layer(layer, self.sequences, self.pool);
        self.scratch.count(began, |times| &mut times.coding);
        let began = Instant::now();
        self.attention(layer, heads.window, heads.sinks.is_some(), qkv.count());
        self.collect_outputs(out);
        self.scratch.count(began, |times| &mut times.attention);
        let Some(tap) = tap else { return Ok(()) };
        if let Some(scoring) = tap.scoring() {
            self.score(layer, qkv.count(), scoring)?;
        }
        tap.attended(layer, &mut self.backend.tapped(out))
    }

    fn attend_latent(
        &mut self,
        heads: LatentHeads<'_, CpuBackend>,
        queries: &CpuRows,
        latent: &CpuRows,
        out: &mut CpuRows,
    ) -> Result<()> {
        self.latent_attention(&heads, queries, latent, out)
    }

    fn all_reduce(&mut self, x: &mut CpuRows) -> Result<()> {
        self.backend.ranks()?.all_reduce(&mut x.values)
    }

    fn all_gather(&mut self, part: &CpuRows, whole: &mut CpuRows) -> Result<()> {
        let (rows, width) = (part.count(), whole.width);
        whole.resize(rows);
        let mut column = 0;
        self.backend.ranks()?.all_gather(&part.values, &mut |_, part| {
            let columns = part.len() / rows.max(1);
            if column + columns <= width {
                for (row, part) in part.chunks_exact(columns.max(1)).enumerate() {
                    whole.values[row * width + column..][..columns].copy_from_slice(part);
                }
            }
            column += columns;
        })?;
        match column == width || rows == 0 {
            true => Ok(()),
            false => Err(shape_error("gathered rows", format!("{column} columns of all ranks for {width}"))),
        }
    }

    fn read(&mut self, x: &CpuRows, rows: &[usize], out: &mut Vec<f32>) -> Result<()> {
        check_rows(x, rows)?;
        rows.iter().for_each(|row| out.extend_from_slice(&x.values[row * x.width..][..x.width]));
        Ok(())
    }

    fn pick(
        &mut self,
        logits: &CpuRows,
        rows: &[(usize, Pick)],
        out: &mut Vec<Vec<Candidate>>,
    ) -> Result<()> {
        for &(row, what) in rows {
            check_rows(logits, &[row])?;
            out.push(oscar_backend::pick(&logits.values[row * logits.width..][..logits.width], what));
        }
        Ok(())
    }

    fn finish(self) -> Result<()> {
        Ok(())
    }
}

impl HostRows for CpuBackend {
    fn read_rows(_: &mut CpuStep<'_>, x: &CpuRows, out: &mut Vec<f32>) -> Result<()> {
        out.extend_from_slice(&x.values);
        Ok(())
    }

    fn write_rows(_: &mut CpuStep<'_>, values: &[f32], x: &mut CpuRows) -> Result<()> {
        if !values.len().is_multiple_of(x.width) {
            return Err(shape_error("rows", format!("{} values of rows of {}", values.len(), x.width)));
        }
        x.resize(values.len() / x.width);
        x.values.copy_from_slice(values);
        Ok(())
    }
}

impl CpuBackend {
    /// The ranks of a step that has some.
    fn ranks(&self) -> Result<&dyn Communicator> {
        self.communicator.as_deref().ok_or_else(|| shape_error("a step of one rank", "it has no other ranks"))
    }
}

fn check_rows(x: &CpuRows, rows: &[usize]) -> Result<()> {
    match rows.iter().find(|&&row| row >= x.count()) {
        Some(row) => Err(shape_error("a choice of rows", format!("row {row} of {}", x.count()))),
        None => Ok(()),
    }
}

impl CpuStep<'_> {
    /// Normalizes, ropes and rotates heads, stores keys and values, and leaves the rotated queries
    /// in the scratch memory.
    fn append(&mut self, heads: &LayerHeads<'_, CpuBackend>, qkv: &mut CpuRows) {
        let (backend, sequences, layer) = (self.backend, self.sequences, heads.layer);
        let shape = *self.pool.heads();
        let positions = heads::positions(sequences, qkv.count());
        let (threads, kernels) = (&backend.pool, backend.kernels);
        heads::normalize_and_rope(threads, kernels, &shape, heads.qk_norm, heads.rope, &positions, qkv);

        let per_head = qkv.count() * shape.group() * shape.head_dim;
        let Scratch { queries, sinks, .. } = &mut *self.scratch;
        queries.resize(per_head * shape.kv_heads, 0.0);
        // Empty lists if the layer has no sinks.
        let sinks_per_head = if heads.sinks.is_some() { per_head / shape.head_dim } else { 0 };
        sinks.resize(sinks_per_head * shape.kv_heads, 0.0);
        let mut sinks = sinks.as_mut_slice();
        let (layout, full, _) = self.pool.layer_mut(layer);
        let mut tasks: Vec<HeadTask<'_>> = queries
            .chunks_exact_mut(per_head.max(1))
            .zip(full)
            .enumerate()
            .map(|(head, (queries, pages))| HeadTask {
                head,
                queries,
                sinks: sinks.split_off_mut(..sinks_per_head).unwrap_or_default(),
                pages,
                slides: layout.slides(layer),
                codec: layout.full().codec(layer, head),
            })
            .collect();
        let qkv = &*qkv;
        threads.run_chunks(&mut tasks, 1, |_, task| {
            task[0].run(threads, kernels, &shape, heads, sequences, qkv);
        });
    }

    /// Attention of the queries that are in the scratch memory, where it leaves the outputs. With
    /// `sinks`, those are there as well.
    pub(super) fn attention(&mut self, layer: usize, window: Option<usize>, with_sinks: bool, rows: usize) {
        let (backend, sequences, pool) = (self.backend, self.sequences, &*self.pool);
        let shape = pool.heads();
        let (d, group) = (shape.head_dim, shape.group());
        let windows = pool.layout().layer_windows(layer).sliding(window);
        let Scratch { outputs, attention, queries, sinks, .. } = &mut *self.scratch;
        outputs.resize(rows * shape.query_heads * d, 0.0);

        // One page list for each sequence and head; each row of a token comes once for every query
        // head.
        let lists: Vec<HeadContext<'_>> = (0..shape.kv_heads)
            .flat_map(|head| sequences.iter().map(move |s| HeadContext::new(pool, layer, head, s)))
            .collect();
        let contexts: Vec<PagedContext<'_>> = lists.iter().map(HeadContext::pages).collect();
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
                queries: &queries[start + range.start * d..start + range.end * d],
                positions: &positions[range.clone()],
                scale: shape.scale,
                windows: &windows,
                context,
                sinks: with_sinks.then(|| &sinks[head * rows * group..][range]),
                out: mine,
            });
        }
        attention::attend(backend.kernels.variant(), &backend.pool, &mut tasks, attention);
    }

    /// The row of each output that `attention` leaves for a KV head, in their order.
    pub(super) fn output_rows(&self) -> Vec<usize> {
        self.sequences.iter().flat_map(|s| s.rows.clone()).collect()
    }

    /// Copies the outputs that `attention` left to their rows.
    fn collect_outputs(&self, out: &mut CpuRows) {
        let (shape, rows) = (self.pool.heads(), self.output_rows());
        out.resize(rows.len());
        let width = shape.group() * shape.head_dim;
        for head in 0..shape.kv_heads {
            for (i, &row) in rows.iter().enumerate() {
                let source = &self.scratch.outputs[(head * rows.len() + i) * width..][..width];
                out.values[row * out.width + head * width..][..width].copy_from_slice(source);
            }
        }
    }
}
