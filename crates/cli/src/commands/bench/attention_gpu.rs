//! `oscar bench attention --device cuda`: one layer's decode attention on the GPU, the complete launch, over caches that
//! rotate so that the second-level cache never helps.

use super::attention::Args;
use super::report;
use crate::device::AnyBackend;
use anyhow::{Context, Result};
use oscar_backend::{Backend, Benchmarks, HeadShape, HostMatrix, HostValues, SequenceRows, Step};
use oscar_bench::Row;
use oscar_codec::{CacheLayout, CodeLayout, CodedPageId, FullPageId, PAGE_TOKENS, Windows};
use oscar_kernels_cpu::bench::Timing;
use oscar_kernels_cuda::CudaBackend;
use serde_json::json;
use std::time::Duration;

/// Bytes that must lie between two uses of a page.
const COLD_BYTES: usize = 512 << 20;

pub fn run(args: &Args, query_heads: usize, kv_heads: usize) -> Result<()> {
    let backend = AnyBackend::cuda()?;
    let ceiling = backend.read_ceiling()?;
    let gpu = backend.as_cuda().context("--device cuda")?;
    let windows = Windows::new(args.sink.unwrap_or(64), args.recent.unwrap_or(256))?;
    let mut rows = Vec::new();
    for &context in &args.context {
        for &batch in &args.batch {
            for &format in &args.kv {
                let d = args.head_dim;
                let layout = |layers| -> Result<CacheLayout> {
                    let order = CodeLayout::Logical;
                    Ok(gpu.held_layout(&CacheLayout::new(format, layers, kv_heads, d, windows, order)?))
                };
                let bytes = layout(1)?.sequence_bytes(context) * batch;
                let layout = layout(COLD_BYTES.div_ceil(bytes) + 1)?;
                let kernel = gpu.attention(&layout).description;
                let shape = HeadShape {
                    query_heads,
                    kv_heads,
                    head_dim: d,
                    rms_norm_eps: 1e-6,
                    scale: 1.0 / (d as f32).sqrt(),
                };
                let timing = measure(gpu, &layout, &shape, context, batch, args.repetitions)
                    .with_context(|| format!("{format}, context {context}, batch {batch}"))?;
                rows.push(Row {
                    kv: format.to_string(),
                    device: backend.name(),
                    context,
                    batch,
                    tokens: context * batch,
                    typical: timing.median,
                    timing,
                    bytes,
                    cache_bytes: bytes,
                    extra: json!({"heads": args.heads, "head_dim": d, "kernel": kernel}),
                });
            }
        }
    }
    if !args.json {
        println!("{}", gpu.describe());
    }
    report(&rows, ceiling, args.json);
    Ok(())
}

/// Pages of a sequence as the cache holds them between two steps; ids count up from `full` and `coded`.
fn pages(
    layout: &CacheLayout,
    context: usize,
    full: &mut u32,
    coded: &mut u32,
) -> (Vec<Option<FullPageId>>, Vec<Option<CodedPageId>>) {
    let windows = layout.windows();
    let (sink, boundary) = (windows.sink(), windows.boundary(context - 1));
    let next = |counter: &mut u32| {
        *counter += 1;
        *counter - 1
    };
    (0..context.div_ceil(PAGE_TOKENS))
        .map(|b| {
            let (begin, end) = (b * PAGE_TOKENS, (b + 1) * PAGE_TOKENS);
            let needs_full = layout.keeps_full_page(b, boundary);
            let needs_coded = layout.coded().is_some() && end > sink && begin < boundary;
            (needs_full.then(|| FullPageId(next(full))), needs_coded.then(|| CodedPageId(next(coded))))
        })
        .unzip()
}

fn measure(
    gpu: &CudaBackend,
    layout: &CacheLayout,
    shape: &HeadShape,
    context: usize,
    batch: usize,
    repetitions: usize,
) -> Result<Timing> {
    let (mut full, mut coded) = (0, 0);
    let tables: Vec<_> = (0..batch).map(|_| pages(layout, context, &mut full, &mut coded)).collect();
    let budget = full as usize * layout.full_block_bytes() + coded as usize * layout.coded_block_bytes();
    let mut pool = gpu.pool(layout, shape, budget)?;
    gpu.randomize(&mut pool, full as usize, coded as usize)?;
    let sequences: Vec<SequenceRows<'_>> = tables
        .iter()
        .enumerate()
        .map(|(i, (full, coded))| SequenceRows {
            rows: i..i + 1,
            first_position: context - 1,
            full,
            coded,
            demote: 0..0,
            demote_values: 0..0,
        })
        .collect();
    let width = shape.query_heads * shape.head_dim;
    let values: Vec<f32> = (0..batch * width).map(|i| ((i * 37 % 101) as f32 - 50.0) / 40.0).collect();
    let table = HostMatrix { outputs: batch, inputs: width, values: HostValues::F32(&values), bias: None };
    let table = gpu.matrix(table)?;
    let (mut queries, mut out) = (gpu.rows(width), gpu.rows(width));
    let tokens: Vec<u32> = (0..batch as u32).collect();
    let mut step = gpu.step(&sequences, &mut pool)?;
    step.embed(&table, &tokens, &mut queries)?;
    let samples = oscar_kernels_cuda::bench::time_us::<anyhow::Error>(gpu.device(), repetitions, |i| {
        Ok(step.attention(i % layout.layers(), &queries, &mut out)?)
    })?;
    let mut samples: Vec<Duration> = samples.iter().map(|us| Duration::from_secs_f64(us / 1e6)).collect();
    Timing::from_samples(&mut samples).context("no repetition was timed")
}
