//! `oscar bench attention`: decode attention of one layer, cold caches, random pages.

use super::{Row, ceiling, report};
use crate::options::Device;
use anyhow::{Context, Result, bail};
use oscar_codec::attention::PagedContext;
use oscar_codec::random::SplitMix64;
use oscar_codec::{CacheLayout, CodeLayout, FormatTable, KvFormat, PAGE_TOKENS, PageCodec, Side};
use oscar_kernels_cpu::attention::{AttendTask, AttentionPrecision, Scratch, attend, kernel_name};
use oscar_kernels_cpu::bench::time_median;
use oscar_kernels_cpu::{Kernels, ThreadPool};
use serde_json::json;

#[derive(clap::Args)]
pub struct Args {
    /// Where to measure
    #[arg(long, value_enum, default_value = "cpu")]
    device: Device,
    /// KV formats to compare; ratios are against the first
    #[arg(long, value_name = "FORMAT[,FORMAT…]", value_delimiter = ',', default_values = ["bf16", "oscar2"])]
    pub(super) kv: Vec<KvFormat>,
    /// Query heads / KV heads
    #[arg(long, value_name = "Q/KV", default_value = "32/8")]
    pub(super) heads: String,
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(super) head_dim: usize,
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_values_t = [8192, 32768])]
    pub(super) context: Vec<usize>,
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_values_t = [1])]
    pub(super) batch: Vec<usize>,
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,
    /// Tokens at the beginning kept in BF16; 64, or what the format's source publishes, if absent
    #[arg(long)]
    pub(super) sink: Option<usize>,
    /// Most recent tokens kept in BF16; 256, or what the format's source publishes, if absent
    #[arg(long)]
    pub(super) recent: Option<usize>,
    /// Timed repetitions
    #[arg(long, value_name = "N", default_value_t = 15)]
    pub(super) repetitions: usize,
    /// One JSON object a line
    #[arg(long)]
    pub(super) json: bool,
}

/// Copies of the cache are cycled through until this much memory lies between two uses of a page, so that no
/// repetition finds its data in a cache.
const COLD_BYTES: usize = 256 << 20;
/// Distinct random pages; the rest repeat their bytes at other addresses.
const DISTINCT_PAGES: usize = 64;

pub fn run(args: &Args) -> Result<()> {
    let (query_heads, kv_heads) = args
        .heads
        .split_once('/')
        .and_then(|(q, k)| Some((q.parse::<usize>().ok()?, k.parse::<usize>().ok()?)))
        .filter(|(q, k)| *q > 0 && *k > 0 && q % k == 0)
        .with_context(|| {
            format!(
                "--heads {}: write query heads / KV heads, e.g. 32/8, the first a multiple of the second",
                args.heads
            )
        })?;
    if args.context.contains(&0) || args.batch.contains(&0) || args.threads == 0 {
        bail!("--context, --batch and --threads must be at least 1");
    }
    crate::options::check_threads(args.threads)?;
    AttentionPrecision::chosen()?;
    let most = args
        .context
        .iter()
        .max()
        .zip(args.batch.iter().max())
        .and_then(|(c, b)| c.checked_mul(*b)?.checked_mul(kv_heads));
    // A GPU has the memory for more than a CPU has the patience for.
    let limit = if args.device == Device::Cuda { 1 << 30 } else { 1 << 26 };
    if most.is_none_or(|tokens| tokens > limit) {
        bail!("--context × --batch × KV heads: more than {limit} tokens are not measured");
    }
    if args.device == Device::Cuda {
        return super::attention_gpu::run(args, query_heads, kv_heads);
    }
    let kernels = Kernels::chosen()?;
    let pool = ThreadPool::new(args.threads)?;
    let ceiling = ceiling(kernels, &pool);
    let mut rows = Vec::new();
    for &context in &args.context {
        for &batch in &args.batch {
            for &format in &args.kv {
                let windows = format.windows(args.sink, args.recent)?;
                let mut layout =
                    CacheLayout::new(format, 1, kv_heads, args.head_dim, windows, CodeLayout::CpuTile)?;
                if format.boundary_layers() > 0 {
                    // The layer measured is an inner one.
                    let codec = format.codec(args.head_dim, CodeLayout::CpuTile)?;
                    layout = layout.with_coded_table(FormatTable::new(1, kv_heads, vec![codec; kv_heads])?);
                }
                let codec = layout.coded().unwrap_or(layout.full()).codec(0, 0);
                let name = kernel_name(kernels.variant(), codec);
                if !args.json {
                    eprintln!("{format}: {name}");
                }
                let shape = Shape {
                    group: query_heads / kv_heads,
                    kv_heads,
                    context,
                    batch,
                    repetitions: args.repetitions,
                };
                let (timing, bytes) = measure(kernels, &pool, &layout, &shape);
                rows.push(Row {
                    kv: format.to_string(),
                    context,
                    batch,
                    typical: timing.median,
                    timing,
                    tokens: context * batch,
                    bytes,
                    cache_bytes: layout.sequence_bytes(context) * batch,
                    extra: json!({"heads": args.heads, "head_dim": args.head_dim, "threads": args.threads, "kernel": name}),
                });
            }
        }
    }
    report(&rows, ceiling, args.json);
    Ok(())
}

struct Shape {
    group: usize,
    kv_heads: usize,
    context: usize,
    batch: usize,
    repetitions: usize,
}

/// Median time of the attention of all heads and sequences, and the page bytes it reads.
fn measure(
    kernels: &Kernels,
    pool: &ThreadPool,
    layout: &CacheLayout,
    shape: &Shape,
) -> (oscar_kernels_cpu::bench::Timing, usize) {
    let d = layout.head_dim();
    let position = shape.context - 1;
    let windows = layout.windows();
    let (sink, boundary, frontier) = (windows.sink(), windows.boundary(position), windows.frontier(position));
    let full_codec = layout.full().codec(0, 0);
    let coded_codec = layout.coded().unwrap_or(layout.full()).codec(0, 0);
    let blocks = shape.context.div_ceil(PAGE_TOKENS);
    let coded_blocks =
        if layout.coded().is_some() { sink / PAGE_TOKENS..frontier.div_ceil(PAGE_TOKENS) } else { 0..0 };
    let needs_full =
        |b: usize| layout.coded().is_none() || b * PAGE_TOKENS < sink || (b + 1) * PAGE_TOKENS > boundary;

    let (full_bytes, coded_bytes) = (full_codec.page_bytes(), coded_codec.page_bytes());
    let head_bytes =
        (0..blocks).filter(|&b| needs_full(b)).count() * full_bytes + coded_blocks.len() * coded_bytes;
    let copy_bytes = head_bytes * shape.kv_heads * shape.batch;
    let copies = COLD_BYTES.div_ceil(copy_bytes) + 1;

    let templates = |codec: &oscar_codec::RowPageCodec| -> Vec<Vec<u8>> {
        let mut random = SplitMix64::new(1);
        (0..DISTINCT_PAGES)
            .map(|_| {
                let mut rows =
                    || -> Vec<f32> { (0..PAGE_TOKENS * d).map(|_| random.symmetric() * 2.0).collect() };
                let (keys, values) = (rows(), rows());
                let mut page = vec![0; codec.page_bytes()];
                // The sizes are the codec's own. Keys in groups of tokens stay zero: reading them costs the same.
                for (side, rows) in [(Side::Key, &keys), (Side::Value, &values)] {
                    let _ = codec.encode_side_rows(side, 0, rows, &mut page);
                }
                page
            })
            .collect()
    };
    let fill = |templates: &[Vec<u8>], pages: usize| -> Vec<u8> {
        (0..pages).flat_map(|i| templates[i % templates.len()].iter().copied()).collect()
    };
    let streams = shape.kv_heads * shape.batch * copies;
    let (full_templates, coded_templates) = (templates(full_codec), templates(coded_codec));
    let full_per_stream = (0..blocks).filter(|&b| needs_full(b)).count();
    let full_memory = fill(&full_templates, full_per_stream * streams);
    let coded_memory = fill(&coded_templates, coded_blocks.len() * streams);

    type Pages<'a> = Vec<Option<&'a [u8]>>;
    let lists: Vec<(Pages<'_>, Pages<'_>)> = (0..streams)
        .map(|s| {
            let mut full = full_memory[s * full_per_stream * full_bytes..].chunks_exact(full_bytes);
            let mut coded = coded_memory[s * coded_blocks.len() * coded_bytes..].chunks_exact(coded_bytes);
            let full = (0..blocks).map(|b| if needs_full(b) { full.next() } else { None }).collect();
            let coded =
                (0..blocks).map(|b| if coded_blocks.contains(&b) { coded.next() } else { None }).collect();
            (full, coded)
        })
        .collect();
    let contexts: Vec<PagedContext<'_>> =
        lists.iter().map(|(full, coded)| PagedContext { full_codec, coded_codec, full, coded }).collect();

    let queries: Vec<f32> = (0..shape.group * d).map(|i| ((i * 37 % 101) as f32 - 50.0) / 40.0).collect();
    let positions = vec![position as u32; shape.group];
    let per_copy = shape.kv_heads * shape.batch;
    let mut outputs = vec![0.0; per_copy * shape.group * d];
    let mut scratch = Scratch::default();
    let mut copy = 0;
    let timing = time_median(2, shape.repetitions, || {
        let mut tasks: Vec<AttendTask<'_>> = contexts[copy * per_copy..(copy + 1) * per_copy]
            .iter()
            .zip(outputs.chunks_exact_mut(shape.group * d))
            .map(|(context, out)| AttendTask {
                queries: &queries,
                positions: &positions,
                scale: 1.0 / (d as f32).sqrt(),
                windows,
                context,
                out,
            })
            .collect();
        attend(kernels.variant(), pool, &mut tasks, &mut scratch);
        copy = (copy + 1) % copies;
    });
    (timing, copy_bytes)
}
