//! `oscar bench`: timings with warm-up, median, mean and spread, beside a memory-read ceiling measured in the same run.

mod ask;
mod attention;
mod attention_gpu;
mod gemm;
mod load;
mod model;
mod prefill;
mod serve;
mod store;
mod streams;
pub mod subject;
mod views;

use crate::table;
use anyhow::Result;
use oscar_bench::Row;
use oscar_kernels_cpu::{Kernels, ThreadPool, bandwidth};
use std::time::Duration;

#[derive(clap::Subcommand)]
pub enum What {
    /// Matrix products at BF16 and F32: GFLOP/s, and GB/s of the matrix-vector product
    Gemm(gemm::Args),
    /// One layer's attention over a cache of random pages, in decode or prefill
    Attention(attention::Args),
    /// A whole model reading a prompt
    Prefill(model::Args),
    /// A whole model generating at a given context and batch
    Decode(model::Args),
    /// Many clients at once under one KV budget: throughput, latencies, prefix hits
    Serve(serve::Args),
    /// Streams that decode while a long prompt is read: their latency, and the prompt's time to first token
    Streams(streams::Args),
    /// A prompt whose pages come from disk, beside computing them: time to first token
    Store(store::Args),
    /// A turn on a view of a long history, beside one on the whole of it: time to first token
    Views(views::Args),
    /// Loading a model: seconds until it could serve
    Load(load::Args),
}

pub fn run(what: &What) -> Result<()> {
    match what {
        What::Gemm(args) => gemm::run(args),
        What::Attention(args) => attention::run(args),
        What::Prefill(args) => prefill::run(args),
        What::Decode(args) => model::decode(args),
        What::Serve(args) => serve::run(args),
        What::Streams(args) => streams::run(args),
        What::Store(args) => store::run(args),
        What::Views(args) => views::run(args),
        What::Load(args) => load::run(args),
    }
}

/// Prints rows as a table or as JSON lines.
fn report(rows: &[Row], ceiling: f64, json_output: bool) {
    // Ratios are between formats at the same context and batch.
    let first_of = |row: &Row| {
        let same = |r: &&Row| (r.context, r.batch) == (row.context, row.batch);
        rows.iter().find(same).map(Row::tokens_per_s)
    };
    if json_output {
        rows.iter().for_each(|row| println!("{}", row.json(ceiling)));
        return;
    }
    let us = |time: Duration| format!("{:.1}", time.as_secs_f64() * 1e6);
    println!("read ceiling measured in this run: {ceiling:.1} GB/s\n");
    let table = table::by_columns(
        rows,
        &[
            ("kv", &|row| row.kv.clone()),
            ("context", &|row| row.context.to_string()),
            ("batch", &|row| row.batch.to_string()),
            ("median µs", &|row| us(row.timing.median)),
            ("mean µs", &|row| us(row.timing.mean)),
            ("floor µs", &|row| format!("{:.1}", row.floor_us(ceiling))),
            ("spread", &|row| format!("{:.0} %", row.timing.spread * 100.0)),
            ("tokens/s", &|row| format!("{:.0}", row.tokens_per_s())),
            ("× first", &|row| {
                first_of(row).map_or(String::new(), |f| format!("{:.2}×", row.tokens_per_s() / f))
            }),
            ("GB/s", &|row| format!("{:.2}", row.gbps())),
            ("of ceiling", &|row| format!("{:.0} %", row.of_floor(ceiling) * 100.0)),
            ("cache", &|row| crate::progress::bytes(row.cache_bytes)),
        ],
    );
    println!("{table}");
}

/// Plain streaming read over a buffer far larger than the caches.
fn ceiling(kernels: &Kernels, pool: &ThreadPool) -> f64 {
    bandwidth::read_ceiling(kernels, pool, 512 << 20, 5)
}
