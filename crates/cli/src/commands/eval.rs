//! `oscar eval`: what a KV format costs, measured on the user's model and text.

use crate::options::{CacheArgs, ModelArgs};
use crate::{progress, table};
use anyhow::{Context, Result, bail};
use oscar_codec::KvFormat;
use oscar_eval::{PplOptions, evaluate};
use serde_json::json;

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Perplexity, KL and top-1 agreement against BF16 on a text file, all formats in one run
    Ppl(PplArgs),
}

#[derive(clap::Args)]
struct PplArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    /// KV formats; BF16 is always measured and the reference
    #[arg(long, value_name = "FORMAT[,FORMAT…]", value_delimiter = ',', default_values = ["oscar2"])]
    kv: Vec<KvFormat>,
    /// Plain text to predict
    #[arg(long, value_name = "FILE")]
    text: String,
    /// Tokens of a window
    #[arg(long, value_name = "N", default_value_t = 8192)]
    window: usize,
    /// First position of each window that is scored
    #[arg(long, value_name = "N", default_value_t = 512)]
    score_from: usize,
    /// Most windows, spread evenly over the text; 0 takes all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit: usize,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    match &args.what {
        What::Ppl(args) => ppl(args),
    }
}

fn ppl(args: &PplArgs) -> Result<()> {
    let model = args.model.open()?;
    let context = args.window;
    if context > model.config.max_position_embeddings {
        bail!(
            "--window {context}: {} addresses {} positions",
            model.name,
            model.config.max_position_embeddings
        );
    }
    let text = std::fs::read(&args.text).with_context(|| format!("--text {}", args.text))?;
    let text = String::from_utf8(text).with_context(|| format!("--text {} is not UTF-8", args.text))?;
    let tokens = model.text()?.tokenizer.encode(&text, false)?;
    let mut formats = vec![KvFormat::Bf16];
    formats.extend(args.kv.iter().copied().filter(|&f| f != KvFormat::Bf16));
    let mut runners = Vec::new();
    for &format in &formats {
        let cache = model.cache(format, &args.cache)?;
        eprintln!("{format}: rotations: {}", cache.rotation_origin);
        runners.push(cache.runner(&model, args.model.backend()?, &args.cache, context, 1, |_| {})?);
    }
    let options = PplOptions {
        window: args.window,
        score_from: args.score_from,
        limit: args.limit,
        chunk: args.cache.prefill_chunk,
    };
    let bar = progress::bar("scoring", 0);
    let results = evaluate(&mut runners, &tokens, &options, |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    })?;
    bar.finish_and_clear();
    let mut rows = Vec::new();
    for ((format, runner), r) in formats.iter().zip(&runners).zip(&results) {
        let bits = runner.layout().page_bits();
        if args.json {
            println!(
                "{}",
                json!({"kv": format.to_string(), "bits": bits, "context": context, "ppl": r.perplexity, "kl": r.kl,
                       "top1": r.top1, "n": r.scored})
            );
        }
        rows.push(vec![
            format.to_string(),
            format!("{bits:.2}"),
            format!("{:.2}", runner.layout().bits_per_element(context)),
            format!("{:.3}", r.perplexity),
            format!("{:.5}", r.kl),
            format!("{:.4}", r.top1),
            r.scored.to_string(),
        ]);
    }
    if !args.json {
        let header = ["kv", "bits", "bits with windows", "perplexity", "KL to BF16", "top-1", "positions"];
        println!("{}", table::render(&header, &rows));
    }
    Ok(())
}
