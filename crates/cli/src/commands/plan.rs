//! `oscar plan`: what fits in a given memory, exactly, BF16 beside each format.

use crate::commands::bench::subject::{Shape, Subject, shape_parser};
use crate::cpu_experts::{self, WeightBytes};
use crate::options::{Device, ModelArgs, at_least_one, formats, parse_size};
use crate::sizing::FixedMemory;
use crate::{progress, table};
use anyhow::{Result, bail};
use oscar_backend::{StepMemory, StepSize};
use oscar_calibrate::bits::WidthTable;
use oscar_codec::{CacheLayout, CodeLayout, KvFormat, MeanBits, RotationKind};
use oscar_engine::SchedulerOptions;
use oscar_kernels_cpu::backend::PREFILL_CHUNK;
use oscar_kernels_cuda::{AttentionMode, Properties, Storage};
use oscar_models::DecoderConfig;
use oscar_runner::longest_step;
use serde_json::json;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Plan for a published model's shape in BF16 instead of a model's files
    #[arg(long, value_name = "NAME", value_parser = shape_parser(), conflicts_with_all = ["model", "weights"])]
    shape: Option<Shape>,
    /// Memory for weights, activations and cache together, e.g. 24G
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: usize,
    /// KV formats to plan for; if absent bf16, oscar4 and oscar, or bf16 alone for latent attention
    /// (MLA)
    #[arg(long, value_name = "FORMAT[,FORMAT…]", value_delimiter = ',')]
    kv: Vec<KvFormat>,
    /// Contexts for which the largest batch is computed
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_values_t = [4096, 16384, 32768, 131072])]
    context: Vec<usize>,
    /// Tokens at the beginning kept in BF16; 64, or what the format's source publishes, if absent
    #[arg(long)]
    sink: Option<usize>,
    /// Most recent tokens kept in BF16; 256, or what the format's source publishes, if absent
    #[arg(long)]
    recent: Option<usize>,
    /// Prompt tokens processed in one step; as `serve` chooses it for the device if absent
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    prefill_chunk: Option<usize>,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

/// The device that is planned for.
enum Target {
    Cpu,
    Cuda(Properties),
}

impl Target {
    /// The GPU of this machine, or an H200 where `--device cuda` finds none.
    fn of(device: Device) -> Self {
        let here = || oscar_kernels_cuda::Device::open(0).map(|gpu| gpu.properties().clone());
        match device {
            Device::Cpu => Self::Cpu,
            Device::Auto => here().map_or(Self::Cpu, Self::Cuda),
            Device::Cuda => Self::Cuda(here().unwrap_or_else(|error| {
                let gpu = Properties::h200();
                eprintln!("note: steps are planned for an {}: {error}", gpu.name);
                gpu
            })),
        }
    }

    fn is_gpu(&self) -> bool {
        matches!(self, Self::Cuda(_))
    }

    fn prefill_chunk(&self, c: &DecoderConfig) -> usize {
        match self {
            Self::Cpu => PREFILL_CHUNK,
            Self::Cuda(gpu) => AttentionMode::default().prefill_chunk(gpu, &c.heads()),
        }
    }

    fn step_memory(&self, size: &StepSize) -> StepMemory {
        match self {
            Self::Cpu => oscar_kernels_cpu::backend::step_memory(size),
            Self::Cuda(gpu) => oscar_kernels_cuda::step_memory(gpu, AttentionMode::default(), size),
        }
    }
}

/// What is left for the cache, with some formats.
struct Budget {
    fixed: FixedMemory,
    free: usize,
    formats: Vec<String>,
    /// What becomes of FP8 weights.
    fp8: Option<String>,
}

pub fn run(args: &Args) -> Result<()> {
    let model = Subject::open(&args.model, args.shape.as_ref())?;
    let c = model.config();
    for note in c.describe_sliding().into_iter().chain(c.describe_delta()) {
        eprintln!("note: {note}");
    }
    let contexts = contexts(args, &model)?;
    let target = Target::of(args.model.device);
    let holding = args.model.holding(target.is_gpu());
    let longest = contexts.iter().copied().max().unwrap_or(0);
    let chunk = args.prefill_chunk.unwrap_or_else(|| target.prefill_chunk(c));
    let steps = SchedulerOptions { prefill_chunk: chunk, ..SchedulerOptions::default() };
    let (mut rows, mut budgets): (Vec<Vec<String>>, Vec<Budget>) = Default::default();
    let mut too_large = Vec::new();
    if target.is_gpu() && c.latent.is_some() {
        bail!("{} has latent attention (MLA), which GPUs do not compute: use --device cpu", model.name());
    }
    if target.is_gpu() && c.delta.is_some() {
        bail!("{} has gated delta nets, which GPUs do not compute: use --device cpu", model.name());
    }
    for format in formats(c, &args.kv, &["bf16", "oscar4", "oscar"])? {
        let rotates = format.rotation() != RotationKind::None;
        let layout = layout(args, c, format, target.is_gpu())?;
        let (size, fp8) = match &model {
            Subject::Open(model) => (
                model.step_size(&steps, &layout, longest),
                model.weights.describe_fp8(c, rotates, holding.fp8),
            ),
            Subject::Random { .. } => {
                let size = c.step_size(steps.most_rows(), steps.max_batch, longest);
                (StepSize { quantized: layout.coded().is_some(), ..size }, None)
            }
        };
        let step = target.step_memory(&size);
        let weights = match &model {
            Subject::Open(model) => WeightBytes::of(model, rotates, holding),
            Subject::Random { weights, .. } => WeightBytes::of_shape(c, *weights),
        };
        let host_layers = host_layers(
            args,
            &target,
            &weights,
            step.total(),
            layout.working_bytes(longest, longest_step(chunk)),
        )?;
        let fixed = FixedMemory::of(&weights, host_layers, step);
        let Some(free) = args.memory.checked_sub(fixed.total()).filter(|&f| f > 0) else {
            too_large.push(format!(
                "{} with {format} does not fit: {} (steps of up to {} tokens); --memory allows {}",
                model.name(),
                fixed.describe(),
                steps.most_rows(),
                progress::bytes(args.memory)
            ));
            continue;
        };
        match budgets.iter_mut().find(|b| b.fixed == fixed && b.fp8 == fp8) {
            Some(budget) => budget.formats.push(format.to_string()),
            None => budgets.push(Budget { fixed, free, formats: vec![format.to_string()], fp8 }),
        }
        rows.extend(plan(args, &layout, &contexts, &fixed, free, chunk));
    }
    match too_large.as_slice() {
        [first, ..] if budgets.is_empty() => bail!("{first}"),
        some => some.iter().for_each(|line| eprintln!("note: {line}")),
    }
    if !args.json {
        print_budgets(args, &model, &budgets);
        let header = ["format", "context", "bits/element", "a sequence", "sequences", "longest single"];
        println!("\n{}", table::render(&header, &rows));
    }
    Ok(())
}

/// Layers whose experts are in host memory beside a GPU.
fn host_layers(args: &Args, target: &Target, weights: &WeightBytes, step: usize, kv: usize) -> Result<usize> {
    Ok(match args.model.cpu_experts {
        None => 0,
        Some(_) if !target.is_gpu() => {
            bail!("--cpu-experts: no GPU is planned for, so all experts are on the CPU anyway; leave it out")
        }
        Some(asked) => asked
            .layers()
            .unwrap_or_else(|| weights.fewest(step + cpu_experts::kv_reserve(kv, args.memory), args.memory)),
    })
}

/// The contexts that the model can address.
fn contexts(args: &Args, model: &Subject) -> Result<Vec<usize>> {
    let positions = model.config().max_position_embeddings;
    if let Some(bad) = args.context.iter().find(|&&n| n == 0 || n > 1 << 32) {
        bail!("--context {bad}: between 1 and 2³² tokens");
    }
    let (contexts, beyond): (Vec<usize>, Vec<usize>) = args.context.iter().partition(|&&n| n <= positions);
    if !beyond.is_empty() {
        let beyond: Vec<String> = beyond.iter().map(usize::to_string).collect();
        eprintln!("note: {} addresses {positions} positions; left out: {}", model.name(), beyond.join(", "));
    }
    // The longest one that there is, rather than none.
    Ok(if contexts.is_empty() { vec![positions] } else { contexts })
}

/// The cache as the device stores it.
fn layout(args: &Args, c: &DecoderConfig, format: KvFormat, on_gpu: bool) -> Result<CacheLayout> {
    let windows = format.windows(args.sink, args.recent)?;
    let mut layout = c.cache_layout(format, windows, CodeLayout::Logical)?;
    if let KvFormat::OscarMixed { mean } = format {
        let mean = mean.unwrap_or(MeanBits::DEFAULT);
        let layers = c.full_attention_layers().len();
        let formats = WidthTable::of_mean(layers, c.kv_heads, c.head_dim, mean).formats(&layout)?;
        layout = layout.with_coded_table(formats);
    }
    if on_gpu {
        if Storage::of(&layout)? == Storage::Dequantized {
            eprintln!(
                "note: {format} has no CUDA kernels: its history is dequantized on the CPU and kept in BF16"
            );
        }
        layout = Storage::held(&layout);
    }
    Ok(layout)
}

/// A row for each context; with `--json` they are also printed.
fn plan(
    args: &Args,
    layout: &CacheLayout,
    contexts: &[usize],
    fixed: &FixedMemory,
    free: usize,
    chunk: usize,
) -> Vec<Vec<String>> {
    let kv = layout.format().to_string();
    let longest = layout.longest_context(free, longest_step(chunk));
    let row = |&context: &usize| {
        let fit = layout.capacity(free, context, longest_step(chunk));
        let bits = layout.bits_per_element(context);
        if args.json {
            println!(
                "{}",
                json!({
                    "kv": kv, "context": context, "batch": fit.sequences, "sequence_bytes": fit.sequence_bytes,
                    "prefill_bytes": fit.prefill_bytes, "bits": bits, "longest_context": longest,
                    "weight_bytes": fixed.weights, "cpu_expert_layers": fixed.host.layers,
                    "cpu_expert_bytes": fixed.host.bytes, "step_bytes": fixed.step.total(),
                    "prefill_chunk": chunk, "memory_bytes": args.memory,
                })
            );
        }
        vec![
            kv.clone(),
            context.to_string(),
            format!("{bits:.2}"),
            progress::bytes(fit.sequence_bytes),
            fit.sequences.to_string(),
            longest.to_string(),
        ]
    };
    contexts.iter().map(row).collect()
}

fn print_budgets(args: &Args, model: &Subject, budgets: &[Budget]) {
    for budget in budgets {
        // Formats differ in this only where a rotation is folded into weights that would be FP8
        // without it.
        let with =
            if budgets.len() > 1 { format!(" with {}", budget.formats.join(", ")) } else { String::new() };
        println!(
            "{}{with}: {}; {} left of {} for the cache; the model addresses {} positions",
            model.name(),
            budget.fixed.describe(),
            progress::bytes(budget.free),
            progress::bytes(args.memory),
            model.config().max_position_embeddings
        );
        if let Some(fp8) = &budget.fp8 {
            println!("  {fp8}");
        }
    }
}
