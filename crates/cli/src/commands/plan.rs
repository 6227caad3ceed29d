//! `oscar plan`: what fits in a given memory, exactly, BF16 beside each format.

use crate::options::{ModelArgs, parse_size};
use crate::{progress, table};
use anyhow::{Result, bail};
use oscar_codec::{CacheLayout, CodeLayout, KvFormat, Windows};
use serde_json::json;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Memory for weights and cache together, e.g. 24G
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: usize,
    /// KV formats to plan for
    #[arg(long, value_name = "FORMAT[,FORMAT…]", value_delimiter = ',', default_values = ["bf16", "oscar4", "oscar2"])]
    kv: Vec<KvFormat>,
    /// Contexts for which the largest batch is computed
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_values_t = [4096, 16384, 32768, 131072])]
    context: Vec<usize>,
    /// Tokens at the beginning kept in BF16
    #[arg(long, default_value_t = 64)]
    sink: usize,
    /// Most recent tokens kept in BF16
    #[arg(long, default_value_t = 256)]
    recent: usize,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let model = args.model.open()?;
    let c = &model.config;
    let weights = model.weights.total_bytes() as usize;
    let Some(free) = args.memory.checked_sub(weights).filter(|&f| f > 0) else {
        bail!(
            "{} does not fit: its weights take {}, --memory allows {}",
            model.name,
            progress::bytes(weights),
            progress::bytes(args.memory)
        );
    };
    let windows = Windows::new(args.sink, args.recent)?;
    let mut rows = Vec::new();
    for &format in &args.kv {
        let layout =
            CacheLayout::new(format, c.layers, c.kv_heads, c.head_dim, windows, CodeLayout::Logical)?;
        let longest = longest_context(&layout, free);
        for &context in args.context.iter().filter(|&&n| n > 0) {
            let each = layout.peak_bytes(context);
            let batch = free / each;
            if args.json {
                println!(
                    "{}",
                    json!({
                        "kv": format.to_string(), "context": context, "batch": batch, "sequence_bytes": each,
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
    if !args.json {
        println!(
            "{}: weights {}, {} left of {} for the cache; the model addresses {} positions\n",
            model.name,
            progress::bytes(weights),
            progress::bytes(free),
            progress::bytes(args.memory),
            c.max_position_embeddings
        );
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

/// Most tokens of one sequence that fit in `bytes`.
fn longest_context(layout: &CacheLayout, bytes: usize) -> usize {
    let (mut fits, mut fails) = (0, 1);
    while layout.peak_bytes(fails) <= bytes && fails < 1 << 40 {
        (fits, fails) = (fails, fails * 2);
    }
    while fails - fits > 1 {
        let middle = fits + (fails - fits) / 2;
        if layout.peak_bytes(middle) <= bytes { fits = middle } else { fails = middle }
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
                CacheLayout::new(format, 6, 2, 128, Windows::default(), CodeLayout::Logical).unwrap();
            for bytes in [layout.full_block_bytes(), 5 << 20, 1 << 30] {
                let n = longest_context(&layout, bytes);
                assert!(
                    layout.peak_bytes(n) <= bytes && layout.peak_bytes(n + 1) > bytes,
                    "{format} {bytes} {n}"
                );
            }
        }
    }
}
