//! `oscar eval ppl`: next-token distributions on text.

use super::session::Session;
use super::{Common, digest, read_text};
use crate::{progress, table};
use anyhow::Result;
use oscar_eval::ppl::{score_recorded, windows};
use oscar_eval::{Journal, PplOptions, PplResult};
use serde_json::json;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    /// Text to predict
    #[arg(long, value_name = "FILE")]
    text: String,
    /// Tokens of a window
    #[arg(long, value_name = "N", default_value_t = 8192)]
    window: usize,
    /// First position of each window that is scored
    #[arg(long, value_name = "N", default_value_t = 512)]
    score_from: usize,
    /// Maximum number of windows, spread evenly over the text; 0 takes all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit: usize,
}

pub fn run(args: &Args) -> Result<()> {
    let common = &args.common;
    let text = read_text(&args.text, "--text")?;
    let session = Session::open(&common.model, &common.cache, Some(args.window), "--window")?;
    let tokens = session.text.tokenizer.encode(&text, false)?;
    let options = PplOptions {
        window: args.window,
        score_from: args.score_from,
        limit: args.limit,
        // Every row's logits are kept until the chunk is scored.
        chunk: session.prefill_chunk().min(512),
    };
    let windows = windows(&tokens, &options)?;
    let formats = session.prepare(&common.kv)?;
    let mut runners = Vec::new();
    for format in &formats {
        eprintln!("{}: rotations: {}", format.name, format.cache.rotation_origin);
        runners.push(session.runner(format, 1)?);
    }
    let config = session.config(json!({
        "text": digest(&text), "window": args.window, "score_from": args.score_from, "limit": args.limit,
    }));
    let mut journal = Journal::open(common.out.as_deref(), "eval ppl", &config)?;
    let names: Vec<&str> = formats.iter().map(|f| f.name.as_str()).collect();
    let bar = progress::bar("scoring", (windows.len() * args.window) as u64);
    let tick = |tokens| bar.set_position(tokens as u64);
    let (sums, _) = score_recorded(&mut journal, &names, &mut runners, &windows, &options, tick)?;
    bar.finish_and_clear();

    let mut rows = Vec::new();
    for ((format, runner), sums) in formats.iter().zip(&runners).zip(&sums) {
        let (r, bits) = (PplResult::of(sums), runner.layout().page_bits());
        if common.json {
            println!(
                "{}",
                json!({"kv": format.name, "bits": bits, "context": args.window, "ppl": r.perplexity, "kl": r.kl,
                       "top1": r.top1, "n": r.scored})
            );
        }
        rows.push(vec![
            format.name.clone(),
            format!("{bits:.2}"),
            format!("{:.2}", runner.layout().bits_per_element(args.window)),
            format!("{:.3}", r.perplexity),
            format!("{:.5}", r.kl),
            format!("{:.4}", r.top1),
            r.scored.to_string(),
        ]);
    }
    if !common.json {
        let header = ["kv", "bits", "bits with windows", "perplexity", "KL to BF16", "top-1", "positions"];
        println!("{}", table::render(&header, &rows));
    }
    Ok(())
}
