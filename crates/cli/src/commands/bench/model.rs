//! `oscar bench decode`: steps of whole models; and the models of both benchmarks.

use super::report;
use super::subject::{Shape, Subject, shape_parser};
use crate::device::{AnyBackend, On};
use crate::options::{CacheArgs, ModelArgs, formats};
use crate::parallel::ParallelArgs;
use crate::progress;
use anyhow::{Result, bail};
use oscar_backend::{Backend, Pick};
use oscar_bench::{Row, random_tokens};
use oscar_codec::{CacheLayout, KvFormat, PAGE_TOKENS};
use oscar_hybrid::HybridExperts;
use oscar_kernels_cpu::bandwidth;
use oscar_kernels_cpu::bench::time_median;
use oscar_kernels_cuda::{HostTimes, Profile};
use oscar_models::DecoderConfig;
use oscar_runner::{Logits, Runner, Sequence, StepOutput, StepRequest};
use serde_json::json;
use std::fmt;
use std::time::Duration;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub(super) model: ModelArgs,
    #[command(flatten)]
    pub(super) parallel: ParallelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    /// Random weights of a published model's shape instead of a model
    #[arg(long, value_name = "NAME", conflicts_with = "model", value_parser = shape_parser())]
    shape: Option<Shape>,
    /// Layers of --shape, if not all: large models are measured by some of their layers
    #[arg(long, value_name = "N", requires = "shape")]
    layers: Option<usize>,
    /// Preference of some experts of --shape, added to the router's scores: 0 takes all equally often, 0.05 is skewed
    /// like a real router of 128 experts
    #[arg(long, value_name = "SCORE", default_value_t = 0.0)]
    routing_skew: f32,
    /// KV formats to compare; ratios are against the first. If absent bf16, oscar2 and oscar, or bf16 alone for latent
    /// attention (MLA)
    #[arg(long, value_name = "FORMAT[,FORMAT…]", value_delimiter = ',')]
    kv: Vec<KvFormat>,
    /// Tokens in the cache
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_values_t = [4096])]
    pub(super) context: Vec<usize>,
    /// Sequences decoded together (decode only)
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_values_t = [1])]
    pub(super) batch: Vec<usize>,
    /// Timed repetitions: decode steps (64 if absent, after which coding and pages are where they were) or whole prompts (3 if
    /// absent)
    #[arg(long, value_name = "N")]
    pub(super) repetitions: Option<usize>,
    /// Also print where the time goes, by kernel (GPUs): of a decode step, or of a whole prompt
    #[arg(long)]
    pub(super) profile: bool,
    /// One JSON object a line
    #[arg(long)]
    pub(super) json: bool,
}

impl Args {
    pub(super) fn check(&self) -> Result<()> {
        if self.context.contains(&0) || self.batch.contains(&0) || self.repetitions == Some(0) {
            bail!("--context, --batch and --repetitions must be at least 1");
        }
        Ok(())
    }

    /// The formats to compare.
    pub(super) fn formats(&self) -> Result<Vec<KvFormat>> {
        const DEFAULT: [&str; 3] = ["bf16", "oscar2", "oscar"];
        match &self.shape {
            Some(shape) => formats(&shape.config, &self.kv, &DEFAULT),
            None => formats(&self.model.open()?.config, &self.kv, &DEFAULT),
        }
    }

    pub(super) fn runner(
        &self,
        format: KvFormat,
        context: usize,
        batch: usize,
    ) -> Result<Runner<AnyBackend>> {
        let shape = self.shape.as_ref().map(|shape| self.shortened(shape)).transpose()?;
        let mut subject = Subject::open(&self.model, shape.as_ref())?;
        if let Subject::Random { routing_skew, .. } = &mut subject {
            *routing_skew = self.routing_skew;
        }
        let limit = subject.config().max_position_embeddings;
        if matches!(subject, Subject::Open(_)) && context > limit {
            bail!("--context {context}: {} addresses {limit} positions", subject.name());
        }
        let cache = subject.cache(format, &self.cache)?;
        let ranks = self.parallel.ranks(&self.model, subject.config())?;
        let backend = ranks.lead().clone();
        let attention = backend.attention(&cache.layout).description;
        match &subject {
            _ if self.json => {}
            Subject::Open(model) => {
                eprintln!("{format}: {attention}; rotations: {}", cache.rotation_origin);
                model.describe_weights(&cache, &backend).inspect(|weights| eprintln!("{weights}"));
            }
            Subject::Random { .. } => eprintln!("{format}: {}, {attention}", backend.describe()),
        }
        subject.runner(&cache, ranks, &self.cache, context, batch)
    }

    /// The first `--layers` layers of a shape.
    fn shortened(&self, shape: &Shape) -> Result<Shape> {
        let all = shape.config.layers;
        let of = |layers| {
            let config = DecoderConfig { layers, ..shape.config.clone() };
            Shape { name: shape.name.clone(), config }
        };
        let short = of(self.layers.unwrap_or(all).clamp(1, all));
        if short.config.cache_layers() == 0 {
            let least = (1..=all).find(|&layers| of(layers).config.cache_layers() > 0).unwrap_or(all);
            bail!(
                "--layers {}: no attention is among the first layers of {}; give at least {least}",
                short.config.layers,
                shape.name
            );
        }
        Ok(short)
    }

    /// Sequences of these lengths. A random model gets random pages where the device can make them; otherwise prefill fills them.
    fn fill(&self, runner: &mut Runner<AnyBackend>, lengths: &[usize]) -> Result<Vec<Sequence>> {
        let vocab = runner.config().vocab_size;
        let bar = progress::bar("filling the cache", lengths.iter().sum::<usize>() as u64);
        let mut sequences = Vec::new();
        let mut before = 0;
        for (b, &tokens) in lengths.iter().enumerate() {
            let mut sequence = Sequence::new();
            if !(self.shape.is_some() && runner.pretend(&mut sequence, tokens)?) {
                let prompt = random_tokens(tokens, vocab, b as u64 + 1);
                runner.prefill(&mut sequence, &prompt, &mut StepOutput::default(), |n| {
                    bar.set_position((before + n) as u64)
                })?;
            }
            before += tokens;
            sequences.push(sequence);
        }
        bar.finish_and_clear();
        Ok(sequences)
    }
}

/// How far a sequence of a batch lags behind the first: every place of a page and of a tile is taken before one is taken twice.
fn stagger(sequence: usize) -> usize {
    sequence * 9 % PAGE_TOKENS
}

/// A timed step ends with the choice of a token, as it does in serving.
const GREEDY: Logits = Logits::Pick(Pick::Greedy);

pub fn decode(args: &Args) -> Result<()> {
    args.check()?;
    let mut rows = Vec::new();
    let mut capacity: Vec<Capacity> = Vec::new();
    let (mut limit, formats) = (0.0, args.formats()?);
    for &context in &args.context {
        for &batch in &args.batch {
            for &format in &formats {
                // The timed steps are the last ones before `context`. Sequences of a batch are not at the same place of a
                // page: in serving they hardly ever code their tokens in the same steps.
                let repetitions = args.repetitions.unwrap_or(PAGE_TOKENS);
                let steps = repetitions + 3 + usize::from(args.profile);
                let ends: Vec<usize> = (0..batch).map(|b| context.saturating_sub(stagger(b))).collect();
                let lengths: Vec<usize> = ends.iter().map(|end| end.saturating_sub(steps)).collect();
                if lengths.contains(&0) {
                    bail!(
                        "--context {context} leaves no room for {steps} decode steps of {batch} sequences: lower --repetitions, \
                         or --batch, whose sequences are up to {} tokens apart",
                        PAGE_TOKENS - 1
                    );
                }
                let mut runner = args.runner(format, context, batch)?;
                if limit == 0.0 {
                    limit = match runner.ranks() {
                        1 => runner.backend().read_ceiling()?,
                        // A rank has only its share of the threads.
                        _ => args.model.backend()?.read_ceiling()?,
                    };
                }
                if let Some(free) = runner.backend().free_memory()? {
                    capacity.push(Capacity::of(runner.layout(), context, runner.prefill_chunk(), free));
                }
                let vocab = runner.config().vocab_size;
                let mut sequences = args.fill(&mut runner, &lengths)?;
                let mut output = StepOutput::default();
                let mut step = 0;
                let mut failure = None;
                if let Some(cuda) = runner.backend().as_cuda() {
                    cuda.device().take_host_times();
                }
                let timing = time_median(3, repetitions, || {
                    step += 1;
                    let token = [(step * 7919 % vocab) as u32];
                    let mut requests: Vec<StepRequest<'_>> = sequences
                        .iter_mut()
                        .map(|sequence| StepRequest { sequence, tokens: &token, logits: GREEDY })
                        .collect();
                    if let Err(error) = runner.step(&mut requests, &mut output) {
                        failure.get_or_insert(error);
                    }
                });
                if let Some(error) = failure {
                    return Err(error.into());
                }
                if args.profile {
                    let what = format!("{format}, context {context}, batch {batch}");
                    profile_step(&what, &mut runner, &mut sequences, &mut output)?;
                }
                let cache_bytes = runner.usage().bytes;
                let host = HostReads::of(&runner, batch);
                if let (Some(host), false) = (&host, args.json) {
                    eprintln!("{host}");
                }
                let host_bytes = host.as_ref().map_or(0, |host| host.bytes);
                rows.push(Row {
                    kv: format.to_string(),
                    device: runner.backend().name(),
                    context,
                    batch,
                    tokens: batch,
                    // Steps that code tokens, or take a page, are some of what tokens wait for.
                    typical: timing.mean,
                    timing,
                    bytes: ends.iter().map(|&end| runner.layout().sequence_bytes(end)).sum::<usize>()
                        + runner.weight_bytes(batch)
                        - host_bytes,
                    host_floor_us: host.as_ref().map_or(0.0, HostReads::floor_us),
                    cache_bytes,
                    extra: json!({"bench": "decode", "weight_bytes": runner.weight_bytes(batch), "weights": args.model.weights,
                                  "ranks": runner.ranks(), "cpu_expert_layers": host.as_ref().map_or(0, |host| host.layers),
                                  "host_bytes": host_bytes, "host_ceiling_gbps": host.as_ref().map(|host| host.ceiling),
                                  "threads": runner.backend().as_cpu().map(|cpu| cpu.threads().threads() * runner.ranks())}),
                });
            }
        }
    }
    report(&rows, limit, args.json);
    capacity.dedup();
    for c in &capacity {
        c.print(args.json);
    }
    Ok(())
}

/// Decodes one more token of each sequence and prints where the time goes (GPUs). The host's times
/// are those of the steps before.
fn profile_step(
    what: &str,
    runner: &mut Runner<AnyBackend>,
    sequences: &mut [Sequence],
    output: &mut StepOutput,
) -> Result<()> {
    let Some(cuda) = runner.backend().as_cuda() else { return Ok(()) };
    let device = cuda.device().clone();
    let host = device.take_host_times();
    device.set_profiling(true)?;
    let mut requests: Vec<StepRequest<'_>> =
        sequences.iter_mut().map(|sequence| StepRequest { sequence, tokens: &[1], logits: GREEDY }).collect();
    runner.step(&mut requests, output)?;
    print_profile(what, device.set_profiling(false)?);
    print_host_times(&host);
    Ok(())
}

/// What the processor beside a GPU reads in a step: the experts that are expected to be chosen.
struct HostReads {
    layers: usize,
    bytes: usize,
    /// GB/s of plain reading, measured now.
    ceiling: f64,
}

impl HostReads {
    fn of(runner: &Runner<AnyBackend>, rows: usize) -> Option<Self> {
        let backend = runner.backend();
        let cpu = backend.as_hybrid()?.host()?;
        let on_host = |(experts, distinct): (&On<_, HybridExperts<_>>, f64)| match experts {
            On::Cuda(HybridExperts::Host(_)) => {
                let (each, always) = backend.expert_bytes(experts);
                Some(always + (each as f64 * distinct) as usize)
            }
            _ => None,
        };
        let bytes: Vec<usize> = runner.experts(rows).filter_map(on_host).collect();
        let ceiling = bandwidth::read_ceiling(cpu.kernels(), cpu.threads(), 2 << 30, 3);
        Some(Self { layers: bytes.len(), bytes: bytes.iter().sum(), ceiling })
    }

    fn floor_us(&self) -> f64 {
        self.bytes as f64 / self.ceiling / 1e3
    }
}

impl fmt::Display for HostReads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (layers, bytes, ceiling) = (self.layers, progress::bytes(self.bytes), self.ceiling);
        let us = self.floor_us();
        write!(
            f,
            "CPU: experts of {layers} layers, {bytes} a step, {us:.0} µs at its read ceiling of {ceiling:.1} GB/s"
        )
    }
}

/// Kernels of some steps, the longest first.
pub(super) fn print_profile(what: &str, profile: Option<Profile>) {
    let Some(profile) = profile else { return };
    let mut kernels: Vec<_> = profile.kernels.into_iter().collect();
    kernels.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
    eprintln!("{what}, launches timed one by one:");
    for (name, (count, us)) in kernels {
        eprintln!("  {us:9.1} µs  {count:4} × {:7.2} µs  {}", us / count as f64, name.to_string_lossy());
    }
    eprintln!("  {:9.1} µs  between launches", profile.idle);
}

fn print_host_times(host: &HostTimes) {
    let each = |time: Duration| time.as_secs_f64() * 1e6 / host.steps.max(1) as f64;
    eprintln!(
        "  host, mean of {} steps: {:.1} µs for tables, {:.1} µs for launches; {} graphs made",
        host.steps,
        each(host.tables),
        each(host.launches),
        host.captures
    );
}

/// What fits on a device beside the weights.
#[derive(PartialEq)]
struct Capacity {
    kv: KvFormat,
    free: usize,
    longest: usize,
    context: usize,
    batch: usize,
}

impl Capacity {
    fn of(layout: &CacheLayout, context: usize, chunk: usize, free: usize) -> Self {
        Self {
            kv: layout.format(),
            free,
            longest: layout.longest_context(free, chunk),
            context,
            batch: layout.capacity(free, context, chunk).sequences,
        }
    }

    fn print(&self, json_output: bool) {
        let Self { kv, free, longest, context, batch } = self;
        if json_output {
            println!(
                "{}",
                json!({"bench": "capacity", "kv": kv.to_string(), "free_bytes": free, "longest_context": longest,
                       "context": context, "batch": batch})
            );
        } else {
            println!(
                "capacity {kv}: {} free beside the weights hold one context of {longest} tokens, or {batch} of {context}",
                progress::bytes(*free)
            );
        }
    }
}
