//! `oscar bench attention`: decode attention of one layer, cold caches, random pages.

use super::{ceiling, report};
use crate::options::Device;
use anyhow::{Context, Result, bail};
use oscar_bench::Row;
use oscar_bench::attention::{Shape, measure};
use oscar_codec::{CacheLayout, CodeLayout, FormatTable, KvFormat};
use oscar_kernels_cpu::attention::{AttentionPrecision, kernel_name};
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
                    device: "cpu",
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
