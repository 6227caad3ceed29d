//! `oscar bench`: timings with warm-up, median, mean and spread, beside a memory-read ceiling measured in the same run.

mod attention;
mod attention_gpu;
mod gemm;
mod model;
mod serve;

use crate::table;
use anyhow::Result;
use oscar_kernels_cpu::bench::Timing;
use oscar_kernels_cpu::{Kernels, ThreadPool, bandwidth};
use serde_json::{Value, json};
use std::time::Duration;

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Matrix products at BF16 and F32: GFLOP/s, and GB/s of the matrix-vector product
    Gemm(gemm::Args),
    /// One layer's decode attention over a cache of random pages
    Attention(attention::Args),
    /// A whole model reading a prompt
    Prefill(model::Args),
    /// A whole model generating at a given context and batch
    Decode(model::Args),
    /// Many clients at once under one KV budget: throughput, latencies, prefix hits
    Serve(serve::Args),
}

pub fn run(args: &Args) -> Result<()> {
    match &args.what {
        What::Gemm(args) => gemm::run(args),
        What::Attention(args) => attention::run(args),
        What::Prefill(args) => model::prefill(args),
        What::Decode(args) => model::decode(args),
        What::Serve(args) => serve::run(args),
    }
}

/// One measured row, with the field names that scripts rely on.
struct Row {
    kv: String,
    context: usize,
    batch: usize,
    timing: Timing,
    /// What a repetition counts for: the median, or the mean where some of them have more to do than others.
    typical: Duration,
    /// Tokens that a repetition brings.
    tokens: usize,
    /// Bytes that must be read for one repetition.
    bytes: usize,
    cache_bytes: usize,
    extra: Value,
}

impl Row {
    fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.typical.as_secs_f64()
    }
}

/// Prints rows as a table or as JSON lines.
fn report(rows: &[Row], ceiling: f64, json_output: bool) {
    // Ratios are between formats at the same context and batch.
    let first_of = |row: &Row| {
        let same = |r: &&Row| (r.context, r.batch) == (row.context, row.batch);
        rows.iter().find(same).map(Row::tokens_per_s)
    };
    let mut lines = Vec::new();
    for row in rows {
        let [us, us_mean, us_min, us_max] =
            [row.timing.median, row.timing.mean, row.timing.min, row.timing.max]
                .map(|t| t.as_secs_f64() * 1e6);
        let gbps = row.bytes as f64 / row.typical.as_secs_f64() / 1e9;
        // What reading them once would take at the ceiling.
        let floor_us = row.bytes as f64 / ceiling / 1e3;
        if json_output {
            let mut object = json!({
                "kv": row.kv, "device": "cpu", "context": row.context, "batch": row.batch, "us": us,
                "us_mean": us_mean, "us_min": us_min, "us_max": us_max,
                "tokens_per_s": row.tokens_per_s(), "gbps": gbps, "ceiling_gbps": ceiling, "floor_us": floor_us,
                "cache_bytes": row.cache_bytes,
            });
            if let (Some(object), Some(extra)) = (object.as_object_mut(), row.extra.as_object()) {
                object.extend(extra.clone());
            }
            println!("{object}");
        }
        lines.push(vec![
            row.kv.clone(),
            row.context.to_string(),
            row.batch.to_string(),
            format!("{us:.1}"),
            format!("{us_mean:.1}"),
            format!("{floor_us:.1}"),
            format!("{:.0} %", row.timing.spread * 100.0),
            format!("{:.0}", row.tokens_per_s()),
            first_of(row).map_or(String::new(), |f| format!("{:.2}×", row.tokens_per_s() / f)),
            format!("{gbps:.2}"),
            format!("{:.0} %", gbps / ceiling * 100.0),
            crate::progress::bytes(row.cache_bytes),
        ]);
    }
    if !json_output {
        println!("read ceiling measured in this run: {ceiling:.1} GB/s\n");
        let header = [
            "kv",
            "context",
            "batch",
            "median µs",
            "mean µs",
            "floor µs",
            "spread",
            "tokens/s",
            "× first",
            "GB/s",
            "of ceiling",
            "cache",
        ];
        println!("{}", table::render(&header, &lines));
    }
}

/// Plain streaming read over a buffer far larger than the caches.
fn ceiling(kernels: &Kernels, pool: &ThreadPool) -> f64 {
    bandwidth::read_ceiling(kernels, pool, 512 << 20, 5)
}
