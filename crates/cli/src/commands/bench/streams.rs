//! `oscar bench streams`: the latency of running streams while a long prompt is read, and what they cost the prompt.

use super::subject::{Shape, Subject, shape_parser};
use crate::options::{CacheArgs, ModelArgs, at_least_one};
use crate::{progress, table};
use anyhow::{Context, Result, bail};
use oscar_backend::Backend;
use oscar_bench::{Streams, StreamsOutcome, random_tokens};
use oscar_codec::KvFormat;
use oscar_engine::{Engine, EngineOptions, SchedulerOptions};
use oscar_runner::longest_step;
use serde_json::json;
use std::time::Duration;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    /// Random weights of a published model's shape instead of a model
    #[arg(long, value_name = "NAME", conflicts_with = "model", value_parser = shape_parser())]
    shape: Option<Shape>,
    /// KV formats, measured one after the other
    #[arg(long, value_name = "FORMAT[,FORMAT…]", value_delimiter = ',', default_values = ["bf16", "oscar"])]
    kv: Vec<KvFormat>,
    /// Streams that decode
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one)]
    streams: usize,
    /// Prompt tokens of each stream
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = at_least_one)]
    context: usize,
    /// Most tokens that a stream generates
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least_one)]
    stream_tokens: usize,
    /// Tokens of the prompt that is read beside them
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = at_least_one)]
    prompt_tokens: usize,
    /// Milliseconds that a step may take while streams decode
    #[arg(long, value_name = "MS", value_parser = at_least_one, default_value_t = 80)]
    inter_token_target: usize,
    /// Milliseconds for which the streams run by themselves first
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = at_least_one)]
    quiet: usize,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let subject = Subject::open(&args.model, args.shape.as_ref())?;
    let context = (args.context + args.stream_tokens).max(args.prompt_tokens + 1);
    subject.check_context(context)?;
    let mut results = Vec::new();
    for &kv in &args.kv {
        let outcome = measure(args, &subject, kv, context).with_context(|| format!("--kv {kv}"))?;
        if args.json {
            println!("{}", json_row(args, kv, &outcome));
        }
        results.push((kv, outcome));
    }
    if !args.json {
        println!(
            "{} streams at {} tokens, a prompt of {} tokens beside them; a step may take {} ms\n\n{}",
            args.streams,
            args.context,
            args.prompt_tokens,
            args.inter_token_target,
            render(&results)
        );
    }
    Ok(())
}

fn measure(args: &Args, subject: &Subject, kv: KvFormat, context: usize) -> Result<StreamsOutcome> {
    let cache = subject.cache(kv, &args.cache)?;
    let backend = args.model.backend()?;
    let held = backend.held_layout(&cache.layout);
    let chunk = longest_step(args.cache.prefill_chunk(&backend, subject.config()));
    let stream = args.context + args.stream_tokens;
    let needed = args.streams * held.working_bytes(stream, chunk)
        + 2 * held.working_bytes(args.prompt_tokens + 1, chunk);
    if let Some(given) = args.cache.kv_memory.filter(|&given| given < needed) {
        bail!(
            "--kv-memory {}: the streams and the prompt need {}",
            progress::bytes(given),
            progress::bytes(needed)
        );
    }
    let cache_args = CacheArgs { kv_memory: args.cache.kv_memory.or(Some(needed)), ..args.cache.clone() };
    if !args.json {
        eprintln!("{kv}: {}; {}", backend.describe(), backend.attention(&cache.layout).description);
    }
    let runner = subject.runner(&cache, backend, &cache_args, context, 1)?;
    let vocab = runner.config().vocab_size;
    let standard = SchedulerOptions::default();
    let options = EngineOptions {
        scheduler: SchedulerOptions {
            max_batch: standard.max_batch.max(args.streams + 1),
            prefill_chunk: usize::MAX,
            inter_token_target: args.inter_token_target as f64 / 1e3,
            ..standard
        },
        ..EngineOptions::new(subject.name())
    };
    let engine = Engine::start(runner, options).context("the engine thread could not start")?;
    let streams = Streams {
        prompts: (0..args.streams).map(|i| random_tokens(args.context, vocab, i as u64 + 2)).collect(),
        stream_tokens: args.stream_tokens,
        long_prompt: random_tokens(args.prompt_tokens, vocab, 1),
        quiet: Duration::from_millis(args.quiet as u64),
    };
    let outcome = streams.drive(&engine);
    engine.shutdown();
    outcome
}

fn json_row(args: &Args, kv: KvFormat, o: &StreamsOutcome) -> serde_json::Value {
    json!({
        "bench": "streams", "kv": kv.to_string(), "streams": args.streams, "context": args.context,
        "prompt_tokens": args.prompt_tokens, "inter_token_target_ms": args.inter_token_target,
        "ttft_ms_alone": o.alone_ttft_ms, "ttft_ms_beside": o.beside_ttft_ms,
        "ttft_ratio": o.beside_ttft_ms / o.alone_ttft_ms,
        "quiet_ms_p50": o.quiet_ms.p50, "quiet_ms_p99": o.quiet_ms.p99,
        "busy_ms_p50": o.busy_ms.p50, "busy_ms_p90": o.busy_ms.p90, "busy_ms_p99": o.busy_ms.p99,
        "busy_ms_max": o.worst_ms, "worst_after_ms": o.worst_after_ms, "busy_tokens": o.busy_tokens,
    })
}

fn render(results: &[(KvFormat, StreamsOutcome)]) -> String {
    table::by_columns(
        results,
        &[
            ("kv", &|(kv, _)| kv.to_string()),
            ("TTFT alone ms", &|(_, o)| format!("{:.1}", o.alone_ttft_ms)),
            ("beside ms", &|(_, o)| format!("{:.1}", o.beside_ttft_ms)),
            ("grows by", &|(_, o)| format!("{:+.0} %", (o.beside_ttft_ms / o.alone_ttft_ms - 1.0) * 100.0)),
            ("between tokens, quiet ms p50/p99", &|(_, o)| {
                format!("{:.1} / {:.1}", o.quiet_ms.p50, o.quiet_ms.p99)
            }),
            ("beside the prompt ms p50/p99/worst", &|(_, o)| {
                format!("{:.1} / {:.1} / {:.1}", o.busy_ms.p50, o.busy_ms.p99, o.worst_ms)
            }),
            ("worst after s", &|(_, o)| format!("{:.2}", o.worst_after_ms / 1e3)),
            ("tokens", &|(_, o)| o.busy_tokens.to_string()),
        ],
    )
}
