//! `oscar bench attention --device cuda`: one layer's attention on the GPU, all its launches. In decode the caches rotate, so
//! that the second-level cache never helps.

use super::attention::{Args, Case, Heads, Phase, report_phase, row};
use crate::device::AnyBackend;
use anyhow::{Context, Result, anyhow, bail};
use oscar_backend::{
    Backend, Benchmarks, HeadShape, HostMatrix, HostValues, RowEviction, SequenceRows, Step,
};
use oscar_cache::{PagePool, View, view_end};
use oscar_codec::{BlockCounts, CacheLayout, CodeLayout, CodedPageId, FullPageId, PAGE_TOKENS, Windows};
use oscar_kernels_cpu::bench::Timing;
use oscar_kernels_cuda::{CudaBackend, bench};
use serde_json::json;
use std::time::Duration;

/// Bytes that must lie between two uses of a page.
const COLD_BYTES: usize = 512 << 20;

pub fn run(args: &Args) -> Result<()> {
    let backend = AnyBackend::gpu(AnyBackend::cuda()?, None);
    let ceiling = backend.read_ceiling()?;
    let gpu = backend.as_cuda().context("--device cuda")?;
    let windows = Windows::new(args.sink.unwrap_or(64), args.recent.unwrap_or(256))?;
    let d = args.head_dim;
    let shape_of = |heads: Heads| HeadShape {
        query_heads: heads.query,
        kv_heads: heads.kv,
        head_dim: d,
        rms_norm_eps: 1e-6,
        scale: 1.0 / (d as f32).sqrt(),
    };
    let mut rows = Vec::new();
    for case in args.cases(|heads| gpu.prefill_chunk(&shape_of(heads))) {
        let Case { heads, context, batch, kv, rows: kept, .. } = case;
        let layout = |layers| -> Result<CacheLayout> {
            let order = CodeLayout::Logical;
            Ok(gpu.held_layout(&CacheLayout::new(kv, layers, heads.kv, d, windows, order)?))
        };
        let one = layout(1)?;
        if kept.is_some() {
            one.evicts_rows().map_err(|why| anyhow!("--rows with --kv {kv}: {why}"))?;
            if let RowEviction::Never(why) = gpu.evicts_rows(&one) {
                bail!("--rows with --kv {kv}: {why}");
            }
        }
        let left_out = kept.map_or(0, |kept| left_out(&one, context, kept));
        let bytes = (one.sequence_bytes(context) - left_out * one.coded_block_bytes()) * batch;
        // Prefill waits for arithmetic, not for memory.
        let layers = match args.phase {
            Phase::Decode => COLD_BYTES.div_ceil(bytes) + 1,
            Phase::Prefill => 1,
        };
        let layout = layout(layers)?;
        let kernel = gpu.attention(&layout).description;
        let timing = measure(gpu, &layout, &shape_of(heads), &case, args.repetitions)
            .with_context(|| format!("{kv}, context {context}, batch {batch}"))?;
        let mut extra = json!({"kernel": kernel});
        if let Some(kept) = kept {
            extra["rows"] = json!(kept);
        }
        rows.push(row(args, &case, backend.name(), timing, bytes, bytes, extra));
    }
    if !args.json {
        println!("{}", gpu.describe());
    }
    report_phase(args, &rows, ceiling);
    Ok(())
}

/// Quantized blocks that a view of so many rows saves.
fn left_out(layout: &CacheLayout, context: usize, rows: usize) -> usize {
    let history = view_end(layout, context) - layout.windows().sink();
    (history / PAGE_TOKENS).saturating_sub(rows.min(history).div_ceil(PAGE_TOKENS))
}

/// A view of a sequence that keeps so many rows of every head, spread evenly.
fn view_of(layout: &CacheLayout, pool: &PagePool, context: usize, rows: usize) -> Result<View> {
    let (sink, end) = (layout.windows().sink(), view_end(layout, context));
    let (history, rows) = (end - sink, rows.min(end - sink));
    let kept: Vec<u32> = (0..rows).map(|row| (sink + row * history / rows) as u32).collect();
    Ok(View::new(layout, pool, end, vec![kept; layout.layers() * layout.kv_heads()])?)
}

/// Pages of a sequence in a step of `tokens` new tokens, the last ones of its context; ids count up from `full` and `coded`.
/// Codes before `view_end` lie in a view.
fn pages(
    layout: &CacheLayout,
    context: usize,
    tokens: usize,
    view_end: usize,
    full: &mut u32,
    coded: &mut u32,
) -> (Vec<Option<FullPageId>>, Vec<Option<CodedPageId>>) {
    let windows = layout.windows();
    // The first of the new tokens reads the most in BF16, the last one the most codes.
    let (sink, kept, boundary) =
        (windows.sink(), windows.boundary(context - tokens), windows.boundary(context - 1));
    let next = |counter: &mut u32| {
        *counter += 1;
        *counter - 1
    };
    (0..context.div_ceil(PAGE_TOKENS))
        .map(|b| {
            let (begin, end) = (b * PAGE_TOKENS, (b + 1) * PAGE_TOKENS);
            let needs_full = layout.keeps_full_page(b, kept);
            let needs_coded = layout.coded().is_some() && end > sink.max(view_end) && begin < boundary;
            (needs_full.then(|| FullPageId(next(full))), needs_coded.then(|| CodedPageId(next(coded))))
        })
        .unzip()
}

fn measure(
    gpu: &CudaBackend,
    layout: &CacheLayout,
    shape: &HeadShape,
    case: &Case,
    repetitions: usize,
) -> Result<Timing> {
    let Case { context, tokens, batch, rows, .. } = *case;
    let until = rows.map_or(0, |_| view_end(layout, context));
    let (mut full, mut coded) = (0, 0);
    let tables: Vec<_> =
        (0..batch).map(|_| pages(layout, context, tokens, until, &mut full, &mut coded)).collect();
    // Pages of views come after all others.
    let ids = PagePool::new(layout, usize::MAX / 2);
    let _others = ids.take(BlockCounts { full: 0, coded: coded as usize, sliding: 0, states: 0 })?;
    let views = (0..batch).filter_map(|_| rows.map(|rows| view_of(layout, &ids, context, rows)));
    let views = views.collect::<Result<Vec<View>>>()?;
    let coded = ids.usage().coded_pages;
    let budget = full as usize * layout.full_block_bytes() + coded * layout.coded_block_bytes();
    let mut pool = gpu.pool(layout, shape, budget)?;
    gpu.randomize(&mut pool, full as usize, coded)?;
    let sequences: Vec<SequenceRows<'_>> = tables
        .iter()
        .enumerate()
        .map(|(i, (full, coded))| SequenceRows {
            rows: i * tokens..(i + 1) * tokens,
            first_position: context - tokens,
            full,
            coded,
            sliding: &[],
            demote: 0..0,
            demote_values: 0..0,
            view: views.get(i),
            states: None,
        })
        .collect();
    // A few distinct rows are enough: time does not depend on them.
    const DISTINCT: usize = 64;
    let width = shape.query_heads * shape.head_dim;
    let values: Vec<f32> = (0..DISTINCT * width).map(|i| ((i * 37 % 101) as f32 - 50.0) / 40.0).collect();
    let table = HostMatrix { outputs: DISTINCT, inputs: width, values: HostValues::F32(&values), bias: None };
    let table = gpu.matrix(table)?;
    let (mut queries, mut out) = (gpu.rows(width), gpu.rows(width));
    let ids: Vec<u32> = (0..batch * tokens).map(|row| (row % DISTINCT) as u32).collect();
    let mut step = gpu.step(&sequences, &mut pool)?;
    step.embed(&table, &ids, 1.0, &mut queries)?;
    let launch = |i: usize| Ok(step.attention(i % layout.layers(), &queries, &mut out)?);
    // A launch of a prompt is long enough to be timed by itself.
    let samples = match tokens {
        1 => bench::time_us::<anyhow::Error>(gpu.device(), repetitions, launch),
        _ => bench::time_runs_us::<anyhow::Error>(gpu.device(), repetitions, 1, launch),
    }?;
    let mut samples: Vec<Duration> = samples.iter().map(|us| Duration::from_secs_f64(us / 1e6)).collect();
    Timing::from_samples(&mut samples).context("no repetition was timed")
}
