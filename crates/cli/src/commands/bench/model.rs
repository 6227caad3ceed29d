//! `oscar bench prefill` and `oscar bench decode`: whole models.

use super::{Row, ceiling, report};
use crate::options::{CacheArgs, ModelArgs};
use crate::progress;
use anyhow::{Context, Result, bail};
use oscar_backend::Backend;
use oscar_codec::KvFormat;
use oscar_engine::{Logits, Runner, Sequence, StepRequest};
use oscar_kernels_cpu::ThreadPool;
use oscar_kernels_cpu::backend::CpuBackend;
use oscar_kernels_cpu::bench::time_median;
use serde_json::json;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    /// KV formats to compare; ratios are against the first
    #[arg(long, value_name = "FORMAT[,FORMAT…]", value_delimiter = ',', default_values = ["bf16", "oscar2", "oscar"])]
    kv: Vec<KvFormat>,
    /// Tokens in the cache
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_values_t = [4096])]
    context: Vec<usize>,
    /// Sequences decoded together (decode only)
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_values_t = [1])]
    batch: Vec<usize>,
    /// Timed repetitions: decode steps (24 if absent) or whole prompts (3 if absent)
    #[arg(long, value_name = "N")]
    repetitions: Option<usize>,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

/// Token ids that look like nothing in particular.
pub(super) fn random_tokens(count: usize, vocab: usize, seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) % vocab as u64) as u32
        })
        .collect()
}

impl Args {
    fn check(&self) -> Result<()> {
        if self.context.contains(&0) || self.batch.contains(&0) || self.repetitions == Some(0) {
            bail!("--context, --batch and --repetitions must be at least 1");
        }
        Ok(())
    }

    fn runner(&self, format: KvFormat, context: usize, batch: usize) -> Result<Runner<CpuBackend>> {
        let model = self.model.open()?;
        if context > model.config.max_position_embeddings {
            bail!(
                "--context {context}: {} addresses {} positions",
                model.name,
                model.config.max_position_embeddings
            );
        }
        let cache = model.cache(format, &self.cache)?;
        let backend = self.model.backend()?;
        if !self.json {
            eprintln!(
                "{format}: {}; rotations: {}",
                backend.describe_attention(&cache.layout),
                cache.rotation_origin
            );
        }
        cache.runner(&model, backend, &self.cache, context, batch, |_| {})
    }
}

pub fn prefill(args: &Args) -> Result<()> {
    args.check()?;
    if args.batch != [1] {
        bail!("--batch: prefill is measured one sequence at a time; leave it out");
    }
    let mut rows = Vec::new();
    let mut pool = None;
    for &context in &args.context {
        for &format in &args.kv {
            let mut runner = args.runner(format, context, 1)?;
            let tokens = random_tokens(context, runner.config().vocab_size, 1);
            let mut cache_bytes = 0;
            let mut failure = None;
            let timing = time_median(1, args.repetitions.unwrap_or(3), || {
                let mut sequence = Sequence::new();
                if let Err(error) = runner.prefill(&mut sequence, &tokens, &mut Vec::new(), |_| {}) {
                    failure.get_or_insert(error);
                }
                cache_bytes = runner.usage().bytes;
            });
            if let Some(error) = failure {
                return Err(error.into());
            }
            pool.get_or_insert((runner.backend().kernels(), runner.backend().threads().threads()));
            rows.push(Row {
                kv: format.to_string(),
                context,
                batch: 1,
                tokens_per_s: context as f64 / timing.median.as_secs_f64(),
                timing,
                bytes: cache_bytes,
                cache_bytes,
                extra: json!({"bench": "prefill", "prefill_chunk": args.cache.prefill_chunk, "peak_rss_bytes": peak_rss()}),
            });
        }
    }
    let peak = peak_rss();
    // The ceiling needs a large buffer of its own, so it is measured after the peak was read.
    let (kernels, threads) = pool.context("no context and format to measure")?;
    let limit = ceiling(kernels, &ThreadPool::new(threads)?);
    report(&rows, limit, args.json);
    if let (false, Some(peak)) = (args.json, peak) {
        println!("\npeak resident memory of this process, all formats above: {}", progress::bytes(peak));
    }
    Ok(())
}

pub fn decode(args: &Args) -> Result<()> {
    args.check()?;
    let mut rows = Vec::new();
    let mut limit = 0.0;
    for &context in &args.context {
        for &batch in &args.batch {
            for &format in &args.kv {
                // The timed steps are the last ones before `context`.
                let repetitions = args.repetitions.unwrap_or(24);
                let steps = repetitions + 3;
                let Some(prompt) = context.checked_sub(steps).filter(|&n| n > 0) else {
                    bail!("--context {context} leaves no room for {steps} decode steps: lower --repetitions");
                };
                let mut runner = args.runner(format, context, batch)?;
                if limit == 0.0 {
                    limit = ceiling(runner.backend().kernels(), runner.backend().threads());
                }
                let vocab = runner.config().vocab_size;
                let bar = progress::bar("filling the cache", (prompt * batch) as u64);
                let mut sequences = Vec::new();
                let mut logits = Vec::new();
                for b in 0..batch {
                    let mut sequence = Sequence::new();
                    let tokens = random_tokens(prompt, vocab, b as u64 + 1);
                    runner.prefill(&mut sequence, &tokens, &mut logits, |n| {
                        bar.set_position((b * prompt + n) as u64)
                    })?;
                    sequences.push(sequence);
                }
                bar.finish_and_clear();
                let mut step = 0;
                let mut failure = None;
                let timing = time_median(3, repetitions, || {
                    step += 1;
                    let token = [(step * 7919 % vocab) as u32];
                    let mut requests: Vec<StepRequest<'_>> = sequences
                        .iter_mut()
                        .map(|sequence| StepRequest { sequence, tokens: &token, logits: Logits::Last })
                        .collect();
                    if let Err(error) = runner.step(&mut requests, &mut logits) {
                        failure.get_or_insert(error);
                    }
                });
                if let Some(error) = failure {
                    return Err(error.into());
                }
                let cache_bytes = runner.usage().bytes;
                rows.push(Row {
                    kv: format.to_string(),
                    context,
                    batch,
                    tokens_per_s: batch as f64 / timing.median.as_secs_f64(),
                    timing,
                    bytes: runner.layout().sequence_bytes(context) * batch + runner.weight_bytes(),
                    cache_bytes,
                    extra: json!({"bench": "decode", "threads": runner.backend().threads().threads()}),
                });
            }
        }
    }
    report(&rows, limit, args.json);
    Ok(())
}

/// High-water mark of resident memory, where the system tells it.
fn peak_rss() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib: usize = status
        .lines()
        .find_map(|l| l.strip_prefix("VmHWM:")?.trim().strip_suffix("kB")?.trim().parse().ok())?;
    Some(kib * 1024)
}
