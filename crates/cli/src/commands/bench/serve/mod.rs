//! `oscar bench serve`: many clients at once, every KV format under the same memory budget.
//!
//! The engine runs in this process, without HTTP unless `--http` asks what that adds. No token ends an answer, so
//! every format does the same work.

use super::subject::{Shape, Subject, shape_parser};
use crate::cache::Cache;
use crate::device::AnyBackend;
use crate::options::{CacheArgs, ModelArgs};
use crate::{progress, table};
use anyhow::{Context, Result, bail};
use oscar_bench::{
    Arrivals, FormatResult, Load, Percentiles, drive_both, drive_free_and_formed, random_tokens,
};
use oscar_codec::KvFormat;
use oscar_engine::{Engine, EngineOptions, SchedulerOptions};
use oscar_runner::longest_step;
use oscar_text::Grammar;
use serde_json::{Value, json};
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    /// Random weights of a published model's shape instead of a model
    #[arg(long, value_name = "NAME", conflicts_with_all = ["model", "http"], value_parser = shape_parser())]
    shape: Option<Shape>,
    /// KV formats, measured one after the other under the same --kv-memory; ratios are against the first
    #[arg(long, value_name = "FORMAT[,FORMAT…]", value_delimiter = ',', default_values = ["bf16", "oscar"])]
    kv: Vec<KvFormat>,
    /// Conversations in all; each is one request unless --turns says more
    #[arg(long, value_name = "N", default_value_t = 32)]
    requests: usize,
    /// Closed loop: this many clients, each sending its next request when it has its answer [default: 8]
    #[arg(long, value_name = "N", conflicts_with = "rate")]
    concurrency: Option<usize>,
    /// Open loop: conversations a second, arriving at random (Poisson), however slow the answers are
    #[arg(long, value_name = "PER_SECOND")]
    rate: Option<f64>,
    /// Tokens each turn adds before its answer
    #[arg(long, value_name = "N", default_value_t = 512)]
    prompt_tokens: usize,
    /// Tokens of each answer
    #[arg(long, value_name = "N", default_value_t = 64)]
    output_tokens: usize,
    /// Leading tokens of the first prompt that all conversations have in common
    #[arg(long, value_name = "N", default_value_t = 0)]
    shared_prefix: usize,
    /// Requests of a conversation, each continuing the one before
    #[arg(long, value_name = "N", default_value_t = 1)]
    turns: usize,
    /// Before the clock starts, read every first prompt once, one by one, so that the cache holds what fits
    #[arg(long)]
    warm: bool,
    /// Do the same work over HTTP too, streamed, and say what that adds; both in turns, the best of each counts
    #[arg(long, conflicts_with_all = ["rate", "warm"])]
    http: bool,
    /// Do the same work with answers that must fit a JSON schema too, and say what that adds to a token; both in turns,
    /// the best of each counts
    #[arg(long, conflicts_with_all = ["rate", "http"])]
    constrained: bool,
    /// Most sequences running at once [default: 32, or --concurrency if that is more]
    #[arg(long, value_name = "N")]
    max_batch: Option<usize>,
    /// Most tokens of one engine step [default: chosen by predicted time]
    #[arg(long, value_name = "N")]
    step_tokens: Option<usize>,
    /// Seed of prompts and arrival times
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
    /// Draw throughput and latencies into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// BF16 requests of full length that the budget holds when the user names none.
const DEFAULT_BF16_REQUESTS: usize = 4;

/// Clients of a closed loop when the user says nothing.
const DEFAULT_CONCURRENCY: usize = 8;

pub fn run(args: &Args) -> Result<()> {
    let arrivals = args.arrivals()?;
    let model = Subject::open(&args.model, args.shape.as_ref())?;
    let context = args.context(&model)?;
    let caches =
        args.kv.iter().map(|&format| model.cache(format, &args.cache)).collect::<Result<Vec<_>>>()?;
    // The device of the first format also says how many prompt tokens a step has.
    let mut opened = Some(args.model.backend()?);
    let chunk = opened.as_ref().map_or(0, |backend| args.cache.prefill_chunk(backend, model.config()));
    let budget = args.budget(&model, &caches, context, chunk)?;
    let load = args.load(&model, arrivals);
    let mut results = Vec::new();
    for (&kv, cache) in args.kv.iter().zip(&caches) {
        let backend = opened.take().map_or_else(|| args.model.backend(), Ok)?;
        let result = args.measure(&model, kv, cache, backend, context, budget, &load);
        results.push(result.with_context(|| format!("--kv {kv}"))?);
    }
    if let Some(path) = &args.svg {
        let drawing = oscar_bench::draw(&results, &args.headline(budget, arrivals));
        std::fs::write(path, drawing).with_context(|| format!("--svg {}", path.display()))?;
    }
    if args.json {
        results.iter().for_each(|result| println!("{}", args.json_row(result, context, budget, arrivals)));
    } else {
        println!("{}\n\n{}", args.headline(budget, arrivals), render(&results));
        for result in &results {
            if let (Some(http), Some(overhead)) = (&result.over_http, result.http_overhead()) {
                let (bare, http) = (result.outcome.seconds, http.seconds);
                println!("{}: {bare:.3} s, over HTTP {http:.3} s: {:+.1} %", result.kv, overhead * 100.0);
            }
            if let Some(cost) = result.constraint_cost() {
                println!(
                    "{}: a constrained token takes {:+.1} % longer than a free one",
                    result.kv,
                    cost * 100.0
                );
            }
        }
    }
    Ok(())
}

impl Args {
    /// Refuses impossible settings; says how requests arrive.
    fn arrivals(&self) -> Result<Arrivals> {
        for (flag, value) in [
            ("--requests", self.requests),
            ("--prompt-tokens", self.prompt_tokens),
            ("--output-tokens", self.output_tokens),
            ("--turns", self.turns),
            ("--concurrency", self.concurrency.unwrap_or(1)),
            ("--max-batch", self.max_batch.unwrap_or(1)),
            ("--step-tokens", self.step_tokens.unwrap_or(1)),
        ] {
            if value == 0 {
                bail!("{flag} 0: at least 1 is needed");
            }
        }
        if self.http && self.turns > 1 {
            bail!("--http with --turns {}: one turn is measured over HTTP", self.turns);
        }
        if self.shared_prefix > self.prompt_tokens {
            bail!(
                "--shared-prefix {} is longer than the prompt: --prompt-tokens is {}",
                self.shared_prefix,
                self.prompt_tokens
            );
        }
        match self.rate {
            Some(rate) if rate.is_finite() && rate > 0.0 => Ok(Arrivals::Open { rate, seed: self.seed }),
            Some(rate) => bail!("--rate {rate}: give a positive number of conversations a second"),
            None => Ok(Arrivals::Closed { concurrency: self.concurrency.unwrap_or(DEFAULT_CONCURRENCY) }),
        }
    }

    /// Tokens a conversation has at its end.
    fn context(&self, model: &Subject) -> Result<usize> {
        let limit = model.config().max_position_embeddings;
        let context = self
            .prompt_tokens
            .checked_add(self.output_tokens)
            .and_then(|turn| turn.checked_mul(self.turns))
            .unwrap_or(usize::MAX);
        if context > limit {
            bail!(
                "{} turns of {} + {} tokens are longer than the {limit} positions of {}: lower --prompt-tokens, --output-tokens or --turns",
                self.turns,
                self.prompt_tokens,
                self.output_tokens,
                model.name()
            );
        }
        Ok(context)
    }

    /// The KV memory every format gets. A conversation that could not finish alone is refused here, not measured.
    fn budget(&self, model: &Subject, caches: &[Cache], context: usize, chunk: usize) -> Result<usize> {
        let budget = match self.cache.kv_memory {
            Some(bytes) => bytes,
            None => {
                let plain = CacheArgs { rotations: None, ..self.cache.clone() };
                let bf16 = model.cache(KvFormat::Bf16, &plain)?.layout;
                DEFAULT_BF16_REQUESTS * bf16.working_bytes(context, longest_step(chunk))
            }
        };
        for Cache { layout, .. } in caches {
            let needed = layout.least_bytes(context);
            if needed > budget {
                bail!(
                    "--kv-memory {budget}: one conversation of {context} tokens needs {needed} bytes in {}; give more memory or shorten the conversation",
                    layout.format()
                );
            }
        }
        Ok(budget)
    }

    fn load(&self, model: &Subject, arrivals: Arrivals) -> Load {
        let vocab = model.config().vocab_size;
        let shared = random_tokens(self.shared_prefix, vocab, self.seed);
        let own = self.prompt_tokens - self.shared_prefix;
        // Seeds far from each other and from the shared part's.
        let seed_of = |conversation: usize, turn: usize| {
            self.seed ^ ((conversation as u64 + 1) << 24) ^ ((turn as u64 + 1) << 8)
        };
        let turns_of = |conversation: usize| -> Vec<Vec<u32>> {
            let first = random_tokens(own, vocab, seed_of(conversation, 0));
            let later = (1..self.turns)
                .map(|turn| random_tokens(self.prompt_tokens, vocab, seed_of(conversation, turn)));
            std::iter::once([shared.as_slice(), &first].concat()).chain(later).collect()
        };
        Load {
            conversations: (0..self.requests).map(turns_of).collect(),
            output_tokens: self.output_tokens,
            arrivals,
            constraint: None,
        }
    }

    fn measure(
        &self,
        model: &Subject,
        kv: KvFormat,
        cache: &Cache,
        backend: AnyBackend,
        context: usize,
        budget: usize,
        load: &Load,
    ) -> Result<FormatResult> {
        let cache_args = CacheArgs { kv_memory: Some(budget), ..self.cache.clone() };
        let device = backend.name();
        let runner = model.runner(cache, backend, &cache_args, context, 1)?;
        let standard = SchedulerOptions::default();
        let options = EngineOptions {
            scheduler: SchedulerOptions {
                max_batch: self
                    .max_batch
                    .unwrap_or_else(|| standard.max_batch.max(self.concurrency.unwrap_or(0))),
                prefill_chunk: usize::MAX,
                step_tokens: self.step_tokens,
                ..standard
            },
            max_queue: self.requests,
            approximate_hits: true,
            ..EngineOptions::new(model.name())
        };
        let engine = Engine::start(runner, options).context("the engine thread could not start")?;
        if self.warm {
            let bar = progress::bar("warming the prefix cache", self.requests as u64);
            load.warm_up().drive(&engine, |done| bar.set_position(done as u64))?;
            bar.finish_and_clear();
        }
        let bar = progress::bar("serving", (self.requests * self.turns) as u64);
        let progress = |done: usize| bar.set_position(done as u64);
        let mut constrained = None;
        let (outcome, over_http) = if self.constrained {
            let forms = model.forms()?;
            let constraint = Some(forms.constraint(&Grammar::JsonSchema(endless_schema()))?);
            let (free, formed) = drive_free_and_formed(&engine, load, constraint, &progress)?;
            constrained = Some(formed);
            (free, None)
        } else if self.http {
            let (outcome, over_http) = drive_both(&engine, model.text()?, load, &progress)?;
            (outcome, Some(over_http))
        } else {
            (load.drive(&engine, progress)?, None)
        };
        bar.finish_and_clear();
        engine.shutdown();
        Ok(FormatResult { kv, device, outcome, over_http, constrained })
    }

    /// What was asked, in a line.
    fn headline(&self, budget: usize, arrivals: Arrivals) -> String {
        let arriving = match arrivals {
            Arrivals::Closed { concurrency } => format!("{concurrency} clients"),
            Arrivals::Open { rate, .. } => format!("{rate} a second"),
        };
        let turns = if self.turns > 1 { format!(" × {} turns", self.turns) } else { String::new() };
        let shared = match self.shared_prefix {
            0 => String::new(),
            n => format!(", {n} shared"),
        };
        let warm = if self.warm { ", prompts read before" } else { "" };
        format!(
            "{} requests{turns} of {} + {} tokens{shared}{warm}; {arriving}; KV memory {}",
            self.requests,
            self.prompt_tokens,
            self.output_tokens,
            progress::bytes(budget)
        )
    }

    fn json_row(&self, result: &FormatResult, context: usize, budget: usize, arrivals: Arrivals) -> Value {
        let o = &result.outcome;
        let (mode, concurrency, rate) = match arrivals {
            Arrivals::Closed { concurrency } => ("closed", Some(concurrency), None),
            Arrivals::Open { rate, .. } => ("open", None, Some(rate)),
        };
        let (ttft, tpot, between) = (&o.ttft_ms, &o.tpot_ms, &o.inter_token_ms);
        json!({
            "bench": "serve", "kv": result.kv.to_string(), "device": result.device, "context": context, "batch": o.peak_held,
            "mode": mode, "concurrency": concurrency, "rate": rate, "requests": o.requests,
            "prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens,
            "shared_prefix": self.shared_prefix, "turns": self.turns, "warm": self.warm, "kv_memory": budget,
            "shape": self.shape.as_ref().map(|shape| &shape.name),
            "seconds": o.seconds, "requests_per_s": o.requests_per_s(), "tokens_per_s": o.tokens_per_s(),
            "decode_tokens_per_s": o.decode_tokens_per_s(),
            "ttft_ms_p50": ttft.as_ref().map(|p| p.p50), "ttft_ms_p90": ttft.as_ref().map(|p| p.p90),
            "ttft_ms_p99": ttft.as_ref().map(|p| p.p99),
            "tpot_ms_p50": tpot.as_ref().map(|p| p.p50), "tpot_ms_p90": tpot.as_ref().map(|p| p.p90),
            "tpot_ms_p99": tpot.as_ref().map(|p| p.p99),
            "inter_token_ms_p50": between.as_ref().map(|p| p.p50), "inter_token_ms_p99": between.as_ref().map(|p| p.p99),
            "peak_running": o.peak_running, "peak_held": o.peak_held, "prefix_hit_share": o.prefix_hit_share(),
            "http_seconds": result.over_http.as_ref().map(|http| http.seconds), "http_overhead": result.http_overhead(),
            "constrained_decode_tokens_per_s": result.constrained.as_ref().and_then(|o| o.decode_tokens_per_s()),
            "constraint_cost": result.constraint_cost(), "preemptions": o.preemptions,
            "evicted_pages": o.evicted_pages, "cache_bytes": o.peak_cache_bytes,
        })
    }
}

/// A list of records that no answer of a benchmark completes.
fn endless_schema() -> Value {
    let record = json!({"type": "object", "additionalProperties": false, "required": ["name", "kind", "size"],
        "properties": {"name": {"type": "string", "maxLength": 16}, "kind": {"enum": ["red", "green", "blue"]},
            "size": {"type": "integer", "minimum": 0, "maximum": 9999}}});
    json!({"type": "array", "items": record, "minItems": 4096})
}

fn render(results: &[FormatResult]) -> String {
    let first = results.first().map_or(1.0, |r| r.outcome.tokens_per_s());
    let latency = |p: &Option<Percentiles>| match p {
        Some(p) => format!("{:.1} / {:.1} / {:.1}", p.p50, p.p90, p.p99),
        None => "–".into(),
    };
    table::by_columns(
        results,
        &[
            ("kv", &|r| r.kv.to_string()),
            ("requests/s", &|r| format!("{:.2}", r.outcome.requests_per_s())),
            ("tokens/s", &|r| format!("{:.1}", r.outcome.tokens_per_s())),
            ("× first", &|r| format!("{:.2}×", r.outcome.tokens_per_s() / first)),
            ("decode/s", &|r| {
                r.outcome.decode_tokens_per_s().map_or("–".into(), |rate| format!("{rate:.1}"))
            }),
            ("TTFT ms p50/p90/p99", &|r| latency(&r.outcome.ttft_ms)),
            ("TPOT ms p50/p90/p99", &|r| latency(&r.outcome.tpot_ms)),
            ("between tokens ms p50/p90/p99", &|r| latency(&r.outcome.inter_token_ms)),
            ("running", &|r| r.outcome.peak_running.to_string()),
            ("whole prompts", &|r| r.outcome.peak_held.to_string()),
            ("prefix hits", &|r| format!("{:.1} %", r.outcome.prefix_hit_share() * 100.0)),
            ("preempted", &|r| r.outcome.preemptions.to_string()),
            ("peak cache", &|r| progress::bytes(r.outcome.peak_cache_bytes)),
        ],
    )
}
