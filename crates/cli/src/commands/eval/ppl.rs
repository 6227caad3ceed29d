//! `oscar eval ppl`: next-token distributions on text.

use super::session::Session;
use super::{Common, digest, read_text};
use crate::device::AnyBackend;
use crate::{progress, table};
use anyhow::Result;
use oscar_eval::ppl::{score_window, windows};
use oscar_eval::{Journal, PplOptions, PplResult, WindowSums};
use oscar_runner::{Runner, Sequence};
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
        chunk: common.cache.prefill_chunk,
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
    let (mut sums, mut sequences) = (vec![Vec::new(); formats.len()], Vec::new());
    for (index, window) in windows.iter().enumerate() {
        let tick = |tokens| bar.set_position((index * args.window + tokens) as u64);
        let scored = recorded_window(
            &mut journal,
            index,
            &names,
            &mut runners,
            &mut sequences,
            window,
            &options,
            tick,
        )?;
        sums.iter_mut().zip(scored).for_each(|(all, one)| all.push(one));
    }
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

/// Scores a window with the formats that are not recorded yet. BF16, the first, is scored too if
/// any is missing. Afterwards the sequences of the scored formats hold the window; the others are
/// empty.
pub fn recorded_window(
    journal: &mut Journal,
    index: usize,
    names: &[&str],
    runners: &mut [Runner<AnyBackend>],
    sequences: &mut Vec<Sequence>,
    window: &[u32],
    options: &PplOptions,
    progress: impl FnMut(usize),
) -> Result<Vec<WindowSums>> {
    let key = |name: &str| format!("{name}/window/{index}");
    let mut sums: Vec<Option<WindowSums>> = names.iter().map(|name| journal.get(&key(name))).collect();
    sequences.clear();
    sequences.resize_with(names.len(), Sequence::new);
    if sums.iter().any(Option::is_none) {
        let missing: Vec<usize> = (0..names.len()).filter(|&i| i == 0 || sums[i].is_none()).collect();
        let mut wanted: Vec<&mut Runner<AnyBackend>> = runners
            .iter_mut()
            .enumerate()
            .filter_map(|(i, runner)| missing.contains(&i).then_some(runner))
            .collect();
        let mut filled: Vec<Sequence> = missing.iter().map(|_| Sequence::new()).collect();
        let scored = score_window(&mut wanted, &mut filled, window, options, progress)?;
        for ((&i, scored), sequence) in missing.iter().zip(scored).zip(filled) {
            if sums[i].is_none() {
                journal.record(&key(names[i]), &scored)?;
            }
            (sums[i], sequences[i]) = (Some(scored), sequence);
        }
    }
    Ok(sums.into_iter().flatten().collect())
}
