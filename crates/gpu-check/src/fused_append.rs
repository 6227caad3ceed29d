//! Checks of decode attention that also appends the new token (`FROM_PROJECTIONS`): its queries and
//! cache rows must be those of the separate `append` kernel, which [`heads`](crate::heads) checks.

use crate::growing::rows_of;
use crate::{Extent, Numbers, Report, heads::rotated_heads, largest_difference, read_all, upload};
use anyhow::{Context, Result};
use oscar_backend::{Backend, HeadShape, LayerHeads, Result as BackendResult, Step, Tap, TappedRows};
use oscar_cache::{PagePool, SequencePages};
use oscar_codec::{CacheLayout, CodeLayout, KvFormat, PAGE_TOKENS, Side, Windows};
use oscar_kernels_cuda::CudaBackend;
use oscar_kernels_cuda::CudaPages;

const KV_HEADS: usize = 2;
/// Largest difference of an output, as a share of the largest output: the two kernels divide the
/// context among thread blocks differently.
const ALLOWED: f64 = 1e-3;
/// Rows of a step up to which `append` itself appends them.
const EXACT_ROWS: usize = 16;

/// The inputs of a case.
struct Case {
    layout: CacheLayout,
    shape: HeadShape,
    /// Tokens of each sequence before the first single one.
    lengths: Vec<usize>,
    normed: bool,
    rotated: bool,
}

/// One of the two ways to append, with its own pages.
struct Way<'a> {
    case: &'a Case,
    gpu: &'a CudaBackend,
    page_pool: PagePool,
    pool: CudaPages,
    pages: Vec<SequencePages>,
}

impl<'a> Way<'a> {
    fn new(gpu: &'a CudaBackend, case: &'a Case) -> Result<Self> {
        let layout = &case.layout;
        let blocks = case.lengths.iter().map(|l| l / PAGE_TOKENS + 4).sum::<usize>();
        let budget = (layout.full_block_bytes() + layout.coded_block_bytes()) * blocks;
        let pages = case.lengths.iter().map(|_| SequencePages::new()).collect();
        Ok(Self {
            case,
            gpu,
            page_pool: PagePool::new(layout, budget),
            pool: gpu.pool(layout, &case.shape, budget)?,
            pages,
        })
    }

    /// A step of `rows[i]` rows of sequence `i`; with `apart`, `append` has its own launch.
    fn step(
        &mut self,
        rows: &[usize],
        values: &[f32],
        heads: LayerHeads<'_, CudaBackend>,
        apart: bool,
    ) -> Result<Vec<f32>> {
        let Case { layout, shape, .. } = self.case;
        let (gpu, pool) = (self.gpu, &mut self.pool);
        let mut plans = Vec::new();
        for (pages, &rows) in self.pages.iter_mut().zip(rows) {
            plans.push(pages.prepare(layout, &self.page_pool, rows)?);
        }
        let sequences = rows_of(&self.pages, &plans);
        let width = (shape.query_heads + 2 * shape.kv_heads) * shape.head_dim;
        let mut qkv = upload(gpu, values, width)?;
        let mut attended = gpu.rows(shape.query_heads * shape.head_dim);
        let mut step = gpu.step(&sequences, pool)?;
        let tap: Option<&mut dyn Tap> = if apart { Some(&mut NoLook) } else { None };
        step.attend(heads, &mut qkv, &mut attended, tap)?;
        let found = read_all::<CudaBackend>(&mut step, &attended, rows.iter().sum())?;
        step.finish()?;
        for (pages, plan) in self.pages.iter_mut().zip(&plans) {
            pages.commit(layout, plan);
        }
        Ok(found)
    }

    /// A sequence's last token as it is stored.
    fn last_row(&self, sequence: usize, tokens: usize, head: usize, side: Side) -> Result<Vec<f32>> {
        let id = self.pages[sequence].full()[(tokens - 1) / PAGE_TOKENS].context("the last page")?;
        let page = self.pool.read_page(0, head, id.0, false)?;
        let mut row = vec![0.0; self.case.shape.head_dim];
        self.case.layout.full().codec(0, head).dequantize_row(
            side,
            &page,
            (tokens - 1) % PAGE_TOKENS,
            &mut row,
        );
        Ok(row)
    }
}

/// A tap that looks at nothing. With a tap, `append` has its own launch.
struct NoLook;

impl Tap for NoLook {
    fn heads(&mut self, _: usize, _: &mut dyn TappedRows) -> BackendResult<()> {
        Ok(())
    }

    fn attended(&mut self, _: usize, _: &mut dyn TappedRows) -> BackendResult<()> {
        Ok(())
    }
}

pub fn check(gpu: &CudaBackend, extent: Extent, report: &mut Report) -> Result<()> {
    let mut index = 0;
    // Enough steps to demote a tile.
    let steps = if extent.small { 3 } else { 19 };
    // Workers are assigned by length; every sequence has at least one.
    let uneven = vec![6000, 20, 1, 900];
    // Many sequences, whose items fill the thread blocks of an H200 evenly.
    let many: Vec<usize> = (0..16).map(|i| 700 - 3 * i).collect();
    for d in [64, 128] {
        for group in [1, 3, 4, 5, 8] {
            for format in [KvFormat::Bf16, KvFormat::OSCAR2] {
                for lengths in
                    [vec![1], vec![63, 64, 15, 335, 1200], vec![4321], uneven.clone(), many.clone()]
                {
                    index += 1;
                    let longest = lengths.iter().max().copied().unwrap_or(0);
                    if !extent.takes(index) || !extent.fits(longest, 1200) {
                        continue;
                    }
                    let windows = Windows::default();
                    let layout = CacheLayout::new(format, 1, KV_HEADS, d, windows, CodeLayout::GpuTile)?;
                    let shape = HeadShape {
                        query_heads: KV_HEADS * group,
                        kv_heads: KV_HEADS,
                        head_dim: d,
                        rms_norm_eps: 1e-6,
                        scale: 1.0 / (d as f32).sqrt(),
                    };
                    let (normed, rotated) = (index % 3 != 0, index % 7 != 0);
                    run(gpu, &Case { layout, shape, lengths, normed, rotated }, steps, index, report)?;
                }
            }
        }
    }
    Ok(())
}

fn run(gpu: &CudaBackend, case: &Case, steps: usize, seed: u64, report: &mut Report) -> Result<()> {
    let mut numbers = Numbers::new(seed);
    let (d, shape) = (case.shape.head_dim, &case.shape);
    let heads = rotated_heads(&mut numbers, KV_HEADS, d)?;
    let norms = (gpu.vector(&numbers.vector(d))?, gpu.vector(&numbers.vector(d))?);
    let layer = gpu.layer_rotation(&heads)?;
    let longest = case.lengths.iter().max().copied().unwrap_or(0) + steps;
    let angles: Vec<f32> = (0..longest * d / 2).map(|_| numbers.unit() * 3.0).collect();
    let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
    let rope = gpu.rope(&cos, &sin, d)?;
    let layer_heads = || LayerHeads {
        layer: 0,
        qk_norm: case.normed.then_some((&norms.0, &norms.1)),
        rope: &rope,
        rotation: case.rotated.then_some(&layer),
        window: None,
        sinks: None,
    };
    let width = (shape.query_heads + 2 * KV_HEADS) * d;
    let (mut together, mut apart) = (Way::new(gpu, case)?, Way::new(gpu, case)?);
    for step in 0..=steps {
        let rows = if step == 0 { case.lengths.clone() } else { vec![1; case.lengths.len()] };
        let values = numbers.vector(rows.iter().sum::<usize>() * width);
        // Prompts fill both caches by the same kernel: without a tap their rows are rotated in FP16.
        let prompt = rows.iter().sum::<usize>() > EXACT_ROWS;
        let found = together.step(&rows, &values, layer_heads(), prompt)?;
        let expected = apart.step(&rows, &values, layer_heads(), true)?;
        let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
        let largest = expected.iter().fold(0f64, |a, b| a.max(b.abs()));
        let difference = largest_difference(&found, &expected);
        let what = || {
            let Case { lengths, normed, rotated, layout, .. } = case;
            format!(
                "{}, head {d}, group {}, after {lengths:?} tokens, step {step}, norm {normed}, rotation {rotated}",
                layout.format(),
                shape.query_heads / KV_HEADS
            )
        };
        report.case("fused append, attention", difference, largest * ALLOWED, what);
        for (sequence, length) in case.lengths.iter().enumerate() {
            for (head, side) in (0..KV_HEADS).flat_map(|head| [(head, Side::Key), (head, Side::Value)]) {
                let [a, b] = [&together, &apart].map(|way| way.last_row(sequence, length + step, head, side));
                let differing = a?.iter().zip(&b?).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                report.case("fused append, rows of the cache", differing as f64, 0.0, what);
            }
        }
    }
    Ok(())
}
