//! `oscar bench attention`: attention of one layer, cold caches, random pages.

use super::{ceiling, report};
use crate::options::Device;
use anyhow::{Result, anyhow, bail};
use oscar_bench::Row;
use oscar_bench::attention::{Shape, measure, visible_pairs};
use oscar_codec::{CacheLayout, CodeLayout, FormatTable, KvFormat};
use oscar_kernels_cpu::attention::{AttentionPrecision, kernel_name};
use oscar_kernels_cpu::backend::PREFILL_CHUNK;
use oscar_kernels_cpu::bench::Timing;
use oscar_kernels_cpu::{Kernels, ThreadPool};
use serde_json::{Value, json};

#[derive(clap::Args)]
pub struct Args {
    /// Where to measure
    #[arg(long, value_enum, default_value = "cpu")]
    device: Device,
    /// One new token for each sequence, or a chunk of a prompt
    #[arg(long, value_enum, default_value = "decode")]
    pub(super) phase: Phase,
    /// New tokens of a prompt, the last ones of the context; the device's own chunk if absent
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',')]
    pub(super) chunk: Vec<usize>,
    /// KV formats to compare; ratios are against the first
    #[arg(long, value_name = "FORMAT[,FORMAT…]", value_delimiter = ',', default_values = ["bf16", "oscar2"])]
    pub(super) kv: Vec<KvFormat>,
    /// Query heads / KV heads
    #[arg(long, value_name = "Q/KV[,Q/KV…]", value_delimiter = ',', value_parser = parse_heads, default_value = "32/8")]
    pub(super) heads: Vec<Heads>,
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(super) head_dim: usize,
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_values_t = [8192, 32768])]
    pub(super) context: Vec<usize>,
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_values_t = [1])]
    pub(super) batch: Vec<usize>,
    /// Decode also over views of the quantized formats that keep this many rows of the history
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',')]
    rows: Vec<usize>,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Phase {
    Decode,
    Prefill,
}

/// Query heads and KV heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    pub query: usize,
    pub kv: usize,
}

impl std::fmt::Display for Heads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.query, self.kv)
    }
}

fn parse_heads(text: &str) -> Result<Heads, String> {
    text.split_once('/')
        .and_then(|(q, k)| Some(Heads { query: q.parse().ok()?, kv: k.parse().ok()? }))
        .filter(|heads| heads.query > 0 && heads.kv > 0 && heads.query % heads.kv == 0)
        .ok_or_else(|| "write query heads / KV heads, e.g. 32/8, the first a multiple of the second".into())
}

/// One setting to be measured.
#[derive(Clone, Copy)]
pub struct Case {
    pub heads: Heads,
    pub context: usize,
    /// New tokens of each sequence.
    pub tokens: usize,
    pub batch: usize,
    pub kv: KvFormat,
    /// Rows of the history that a view keeps; all if absent.
    pub rows: Option<usize>,
}

impl Case {
    /// Operations counted as 4 · query heads · head size · visible pairs.
    pub fn operations(&self, head_dim: usize) -> f64 {
        let pairs = visible_pairs(self.context, self.tokens) * self.batch as f64;
        4.0 * self.heads.query as f64 * head_dim as f64 * pairs
    }
}

impl Args {
    /// All settings; `default_chunk` is the device's chunk for these heads.
    pub(super) fn cases(&self, default_chunk: impl Fn(Heads) -> usize) -> Vec<Case> {
        let mut cases = Vec::new();
        for &heads in &self.heads {
            let chunks = match self.phase {
                Phase::Decode => vec![1],
                Phase::Prefill if self.chunk.is_empty() => vec![default_chunk(heads)],
                Phase::Prefill => self.chunk.clone(),
            };
            for &context in &self.context {
                for &tokens in &chunks {
                    let tokens = tokens.min(context);
                    for &batch in &self.batch {
                        let views = |kv: KvFormat| {
                            let rows = self.rows.iter().map(|&rows| Some(rows));
                            [None].into_iter().chain(rows.filter(move |_| kv.is_coded()))
                        };
                        cases.extend(self.kv.iter().flat_map(|&kv| {
                            views(kv).map(move |rows| Case { heads, context, tokens, batch, kv, rows })
                        }));
                    }
                }
            }
        }
        cases
    }

    fn check(&self) -> Result<()> {
        let sizes = [&self.context, &self.batch, &self.chunk];
        if sizes.iter().any(|list| list.contains(&0)) || self.threads == 0 || self.repetitions == 0 {
            bail!("--context, --batch, --chunk, --threads and --repetitions must be at least 1");
        }
        if self.phase == Phase::Decode && !self.chunk.is_empty() {
            bail!("--chunk belongs to --phase prefill");
        }
        if !self.rows.is_empty() && self.phase == Phase::Prefill {
            bail!("--rows: views are measured in decode only");
        }
        crate::options::check_threads(self.threads)?;
        AttentionPrecision::chosen()?;
        let kv_heads = self.heads.iter().map(|heads| heads.kv).max().unwrap_or(1);
        let most = self.context.iter().max().zip(self.batch.iter().max());
        let most = most.and_then(|(c, b)| c.checked_mul(*b)?.checked_mul(kv_heads));
        // A GPU has the memory for more than a CPU has the patience for.
        let limit = if self.device == Device::Cuda { 1 << 30 } else { 1 << 26 };
        if most.is_none_or(|tokens| tokens > limit) {
            bail!("--context × --batch × KV heads: more than {limit} tokens are not measured");
        }
        Ok(())
    }
}

pub fn run(args: &Args) -> Result<()> {
    args.check()?;
    if args.device == Device::Cuda {
        return super::attention_gpu::run(args);
    }
    let kernels = Kernels::chosen()?;
    let pool = ThreadPool::new(args.threads)?;
    let ceiling = ceiling(kernels, &pool);
    let mut rows = Vec::new();
    for case in args.cases(|_| PREFILL_CHUNK) {
        let Case { heads, context, tokens, batch, kv, rows: kept } = case;
        let windows = kv.windows(args.sink, args.recent)?;
        let mut layout = CacheLayout::new(kv, 1, heads.kv, args.head_dim, windows, CodeLayout::CpuTile)?;
        if kv.boundary_layers() > 0 {
            // The layer measured is an inner one.
            let codec = kv.codec(args.head_dim, CodeLayout::CpuTile)?;
            layout = layout.with_coded_table(FormatTable::new(1, heads.kv, vec![codec; heads.kv])?);
        }
        let codec = layout.coded().unwrap_or(layout.full()).codec(0, 0);
        let name = kernel_name(kernels.variant(), codec);
        if !args.json {
            eprintln!("{kv}: {name}");
        }
        let shape = Shape {
            group: heads.query / heads.kv,
            kv_heads: heads.kv,
            context,
            tokens,
            batch,
            rows: kept,
            repetitions: args.repetitions,
        };
        if kept.is_some() {
            layout.evicts_rows().map_err(|why| anyhow!("--rows with --kv {kv}: {why}"))?;
        }
        let (timing, bytes) = measure(kernels, &pool, &layout, &shape);
        let mut extra = json!({"threads": args.threads, "kernel": name});
        if let Some(rows) = kept {
            extra["rows"] = json!(rows);
        }
        let held = if kept.is_some() { bytes } else { layout.sequence_bytes(context) * batch };
        rows.push(row(args, &case, "cpu", timing, bytes, held, extra));
    }
    report_phase(args, &rows, ceiling);
    Ok(())
}

/// A measured case.
pub fn row(
    args: &Args,
    case: &Case,
    device: &'static str,
    timing: Timing,
    bytes: usize,
    cache_bytes: usize,
    mut extra: Value,
) -> Row {
    extra["heads"] = json!(case.heads.to_string());
    extra["head_dim"] = json!(args.head_dim);
    if args.phase == Phase::Prefill {
        extra["phase"] = json!("prefill");
        extra["chunk"] = json!(case.tokens);
        extra["tflops"] = json!(case.operations(args.head_dim) / timing.median.as_secs_f64() / 1e12);
    }
    let tokens = match args.phase {
        Phase::Decode => case.context * case.batch,
        Phase::Prefill => case.tokens * case.batch,
    };
    Row {
        host_floor_us: 0.0,
        kv: match case.rows {
            Some(rows) => format!("{}, {rows} rows", case.kv),
            None => case.kv.to_string(),
        },
        device,
        context: case.context,
        batch: case.batch,
        typical: timing.median,
        timing,
        tokens,
        bytes,
        cache_bytes,
        extra,
    }
}

/// Prints rows in the terms of their phase.
pub fn report_phase(args: &Args, rows: &[Row], ceiling: f64) {
    if args.json || args.phase == Phase::Decode {
        return report(rows, ceiling, args.json);
    }
    let text = |row: &Row, field: &str| match &row.extra[field] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let ms = |time: std::time::Duration| format!("{:.3}", time.as_secs_f64() * 1e3);
    let table = crate::table::by_columns(
        rows,
        &[
            ("kv", &|row| row.kv.clone()),
            ("heads", &|row| text(row, "heads")),
            ("context", &|row| row.context.to_string()),
            ("chunk", &|row| text(row, "chunk")),
            ("batch", &|row| row.batch.to_string()),
            ("median ms", &|row| ms(row.timing.median)),
            ("least ms", &|row| ms(row.timing.min)),
            ("spread", &|row| format!("{:.0} %", row.timing.spread * 100.0)),
            ("TFLOP/s", &|row| format!("{:.4}", row.extra["tflops"].as_f64().unwrap_or(0.0))),
        ],
    );
    println!("{table}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_a_pair_that_divides() {
        assert_eq!(parse_heads("96/8"), Ok(Heads { query: 96, kv: 8 }));
        for bad in ["", "8", "8/0", "0/8", "9/8", "a/b", "32/8/2"] {
            assert!(parse_heads(bad).is_err(), "{bad}");
        }
    }
}
