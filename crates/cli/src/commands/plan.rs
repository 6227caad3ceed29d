//! `oscar plan`: what fits in a given memory, exactly, BF16 beside each format.

use crate::options::{Device, ModelArgs, PrecisionArg, parse_size};
use crate::{progress, table};
use anyhow::{Result, bail};
use oscar_calibrate::bits::WidthTable;
use oscar_codec::{CacheLayout, CodeLayout, KvFormat, MeanBits, RotationKind};
use oscar_kernels_cuda::storage::Storage;
use oscar_models::Holding;
use oscar_runner::working_bytes;
use serde_json::json;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Memory for weights and cache together, e.g. 24G
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: usize,
    /// KV formats to plan for
    #[arg(long, value_name = "FORMAT[,FORMAT…]", value_delimiter = ',', default_values = ["bf16", "oscar4", "oscar"])]
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
    /// Prompt tokens processed in one step
    #[arg(long, value_name = "N", default_value_t = 512)]
    prefill_chunk: usize,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

/// What is left beside the weights, with some formats.
struct Budget {
    weights: usize,
    free: usize,
    formats: Vec<String>,
    /// What becomes of FP8 weights.
    fp8: Option<String>,
}

pub fn run(args: &Args) -> Result<()> {
    let model = args.model.open()?;
    let c = &model.config;
    // What the device holds: F32 mode widens every weight, a GPU keeps FP8 as it is.
    let element_bytes = if args.model.precision == PrecisionArg::F32 { 4 } else { 2 };
    let holding = Holding { fp8: args.model.device == Device::Cuda, element_bytes };
    let rotates = |format: KvFormat| format.rotation() != RotationKind::None;
    let weights_of = |format| model.weights.held_bytes(c, rotates(format), holding) as usize;
    if let Some(bad) = args.context.iter().find(|&&n| n == 0 || n > 1 << 32) {
        bail!("--context {bad}: between 1 and 2³² tokens");
    }
    let (contexts, beyond): (Vec<usize>, Vec<usize>) =
        args.context.iter().partition(|&&n| n <= c.max_position_embeddings);
    if !beyond.is_empty() {
        eprintln!(
            "note: {} addresses {} positions; left out: {beyond:?}",
            model.name, c.max_position_embeddings
        );
    }
    if contexts.is_empty() {
        bail!("--context: {} addresses only {} positions", model.name, c.max_position_embeddings);
    }
    if args.model.device == Device::Auto && model.weights.describe_fp8(c, false, true).is_some() {
        eprintln!("note: weights are counted as on the CPU, which expands FP8; --device cuda counts a GPU's");
    }
    let (mut rows, mut budgets): (Vec<Vec<String>>, Vec<Budget>) = Default::default();
    let mut too_large = Vec::new();
    for &format in &args.kv {
        let weights = weights_of(format);
        let Some(free) = args.memory.checked_sub(weights).filter(|&f| f > 0) else {
            too_large.push(format!(
                "{} with {format} does not fit: its weights take {}, --memory allows {}",
                model.name,
                progress::bytes(weights),
                progress::bytes(args.memory)
            ));
            continue;
        };
        let fp8 = model.weights.describe_fp8(c, rotates(format), holding.fp8);
        match budgets.iter_mut().find(|b| b.weights == weights && b.fp8 == fp8) {
            Some(budget) => budget.formats.push(format.to_string()),
            None => budgets.push(Budget { weights, free, formats: vec![format.to_string()], fp8 }),
        }
        let windows = format.windows(args.sink, args.recent)?;
        let mut layout =
            CacheLayout::new(format, c.layers, c.kv_heads, c.head_dim, windows, CodeLayout::Logical)?;
        if let KvFormat::OscarMixed { mean } = format {
            let mean = mean.unwrap_or(MeanBits::DEFAULT);
            let table = WidthTable::of_mean(c.layers, c.kv_heads, c.head_dim, mean);
            layout = layout.with_coded_table(table.formats(c.head_dim, CodeLayout::Logical)?);
        }
        if args.model.device == Device::Cuda {
            if Storage::of(&layout)? == Storage::Decoded {
                eprintln!("note: {format} has no CUDA kernels: its history is kept decoded there, in BF16");
            }
            layout = Storage::held(&layout);
        }
        // While a prompt is read, one chunk of it is held in BF16 besides.
        let longest = longest_context(free, |n| working_bytes(&layout, n, args.prefill_chunk));
        for &context in &contexts {
            let each = layout.peak_bytes(context);
            let reading = working_bytes(&layout, context, args.prefill_chunk) - each;
            let batch = free.saturating_sub(reading) / each;
            if args.json {
                println!(
                    "{}",
                    json!({
                        "kv": format.to_string(), "context": context, "batch": batch, "sequence_bytes": each,
                        "prefill_bytes": reading,
                        "bits": layout.bits_per_element(context), "longest_context": longest,
                        "weight_bytes": weights, "memory_bytes": args.memory,
                    })
                );
            }
            rows.push(vec![
                format.to_string(),
                context.to_string(),
                format!("{:.2}", layout.bits_per_element(context)),
                progress::bytes(each),
                batch.to_string(),
                longest.to_string(),
            ]);
        }
    }
    match too_large.as_slice() {
        [first, ..] if budgets.is_empty() => bail!("{first}"),
        some => some.iter().for_each(|line| eprintln!("note: {line}")),
    }
    if !args.json {
        for budget in &budgets {
            // Formats differ in this only where a rotation is folded into weights that would be FP8 without it.
            let with = if budgets.len() > 1 {
                format!(" with {}", budget.formats.join(", "))
            } else {
                String::new()
            };
            println!(
                "{}{with}: weights {}, {} left of {} for the cache; the model addresses {} positions",
                model.name,
                progress::bytes(budget.weights),
                progress::bytes(budget.free),
                progress::bytes(args.memory),
                c.max_position_embeddings
            );
            if let Some(fp8) = &budget.fp8 {
                println!("  {fp8}");
            }
        }
        println!();
        println!(
            "{}",
            table::render(
                &["format", "context", "bits/element", "a sequence", "sequences", "longest single"],
                &rows
            )
        );
    }
    Ok(())
}

/// Most tokens of one sequence whose `size` is within `bytes`.
pub(super) fn longest_context(bytes: usize, size: impl Fn(usize) -> usize) -> usize {
    let (mut fits, mut fails) = (0, 1);
    while size(fails) <= bytes && fails < 1 << 40 {
        (fits, fails) = (fails, fails * 2);
    }
    while fails - fits > 1 {
        let middle = fits + (fails - fits) / 2;
        if size(middle) <= bytes { fits = middle } else { fails = middle }
    }
    fits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_context_fits_and_one_more_token_does_not() {
        for format in [KvFormat::Bf16, KvFormat::OSCAR2] {
            let layout =
                CacheLayout::new(format, 6, 2, 128, oscar_codec::Windows::default(), CodeLayout::Logical)
                    .unwrap();
            for bytes in [layout.full_block_bytes(), 5 << 20, 1 << 30] {
                let n = longest_context(bytes, |n| layout.peak_bytes(n));
                assert!(
                    layout.peak_bytes(n) <= bytes && layout.peak_bytes(n + 1) > bytes,
                    "{format} {bytes} {n}"
                );
            }
        }
    }
}
