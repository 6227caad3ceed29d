//! `oscar eval`: what a KV format costs, measured on the user's model, text and tasks.

mod agent;
pub mod conversations;
mod files;
pub mod ppl;
mod ruler;
pub mod session;
mod tasks;

use crate::options::{CacheArgs, ModelArgs};
use crate::table;
use anyhow::{Context, Result, bail};
use oscar_eval::run::{Row, Summary, summarize};
use oscar_tasks::{CALIBRATION_SEEDS_FROM, Filler, GrammarFiller, ParagraphFiller};
use serde_json::json;
use session::Format;
use std::path::PathBuf;

#[derive(clap::Subcommand)]
pub enum What {
    /// Perplexity, KL and top-1 agreement against BF16 on a text file, all formats in one run
    Ppl(ppl::Args),
    /// The RULER benchmark: needles, variable tracking, word counts, and questions from your files
    Ruler(ruler::Args),
    /// Chat tasks: retrieval, tracking, chained arithmetic, copying, conversation memory
    Tasks(tasks::Args),
    /// Eviction policies on long conversations: which keep the facts that are asked for later
    Conversations(conversations::Args),
    /// Agent tasks: several tool calls, each with exact arguments out of a long context
    Agent(agent::Args),
    /// HumanEval from its JSONL file: functions the model writes, run against their tests (pass@1)
    Humaneval(files::HumanEvalArgs),
    /// MATH or MATH-500 from a JSONL file (pass@1)
    Math(files::Args),
    /// AIME from a JSONL file (pass@1)
    Aime(files::Args),
    /// GPQA from a JSONL file (pass@1)
    Gpqa(files::Args),
}

pub fn run(what: &What) -> Result<()> {
    use oscar_eval::benchmarks::Benchmark;
    match what {
        What::Ppl(args) => ppl::run(args),
        What::Ruler(args) => ruler::run(args),
        What::Tasks(args) => tasks::run(args),
        What::Conversations(args) => conversations::run(args),
        What::Agent(args) => agent::run(args),
        What::Humaneval(args) => files::human_eval(args),
        What::Math(args) => files::run(args, Benchmark::Math, None),
        What::Aime(args) => files::run(args, Benchmark::Aime, None),
        What::Gpqa(args) => files::run(args, Benchmark::Gpqa, None),
    }
}

/// What every evaluation takes.
#[derive(clap::Args)]
pub struct Common {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub cache: CacheArgs,
    /// KV formats; BF16 is always measured and the reference
    #[arg(long, value_name = "FORMAT[,FORMAT…]", value_delimiter = ',', default_values = ["oscar", "oscar2"])]
    pub kv: Vec<Format>,
    /// Record each result in this file, one JSON object a line; a rerun goes on where it stopped
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// What every evaluation by questions and answers takes.
#[derive(clap::Args)]
pub struct AskArgs {
    #[command(flatten)]
    pub common: Common,
    /// Sequences answered at once; answers do not depend on it
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub batch: usize,
    /// Plain text instead of the chat template, for base models
    #[arg(long)]
    pub raw: bool,
}

impl AskArgs {
    fn check(&self) -> Result<()> {
        if self.batch == 0 {
            bail!("--batch 0: at least one sequence must be answered at a time");
        }
        Ok(())
    }

    /// [`AskArgs::check`] where cases are generated, so that 0 cannot mean all of them.
    fn check_generated(&self, limit: usize) -> Result<()> {
        if limit == 0 {
            bail!("--limit 0: at least one case of each task must be asked");
        }
        self.check()
    }
}

/// Seeds of calibration would measure on what rotations were fitted to.
pub fn check_seed(seed: u64, count: usize) -> Result<()> {
    if seed.saturating_add(count as u64) >= CALIBRATION_SEEDS_FROM {
        bail!(
            "--seed {seed}: seeds from {CALIBRATION_SEEDS_FROM} on belong to calibration; give a smaller one"
        );
    }
    Ok(())
}

/// Haystack paragraphs, those of a file or generated ones, and the digest of the file.
pub fn filler(path: Option<&str>, flag: &str) -> Result<(Box<dyn Filler>, Option<String>)> {
    let Some(path) = path else { return Ok((Box::new(GrammarFiller), None)) };
    let text = read_text(path, flag)?;
    let filler = ParagraphFiller::from_text(&text).with_context(|| format!("{flag} {path}"))?;
    Ok((Box::new(filler), Some(digest(&text))))
}

/// Names a text or a file in a configuration.
pub fn digest(contents: impl AsRef<[u8]>) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(contents).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// A text file that must exist, be UTF-8 and not be empty.
pub fn read_text(path: &str, flag: &str) -> Result<String> {
    let bytes = std::fs::read(path).with_context(|| format!("{flag} {path}"))?;
    let text = String::from_utf8(bytes).with_context(|| format!("{flag} {path} is not UTF-8 text"))?;
    if text.trim().is_empty() {
        bail!("{flag} {path} is empty");
    }
    Ok(text)
}

/// Prints results: one line a format, context and task as JSON, or a table with a column for each task.
pub fn report(rows: &[Vec<Row>], json: bool, accuracy: &str) {
    let all: Vec<Row> = rows.iter().flatten().cloned().collect();
    let summaries = summarize(&all);
    if json {
        for summary in &summaries {
            println!("{}", json!(summary));
        }
        return;
    }
    let mut tasks: Vec<&str> = Vec::new();
    let mut lines: Vec<(&Summary, Vec<&Summary>)> = Vec::new();
    for summary in &summaries {
        if !tasks.contains(&summary.task.as_str()) {
            tasks.push(&summary.task);
        }
        match lines.iter_mut().find(|(first, _)| (&first.kv, first.context) == (&summary.kv, summary.context))
        {
            Some((_, line)) => line.push(summary),
            None => lines.push((summary, vec![summary])),
        }
    }
    let mut header = vec!["kv", "bits", "context"];
    header.extend(&tasks);
    header.extend(["mean", "same as BF16", "first divergence", "cases"]);
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    let table: Vec<Vec<String>> = lines
        .iter()
        .map(|(first, line)| {
            let percent = |value: f64| format!("{:.1}", 100.0 * value);
            let of = |task: &str| line.iter().find(|s| s.task == task);
            let mut cells = vec![first.kv.clone(), format!("{:.2}", first.bits), first.context.to_string()];
            cells.extend(tasks.iter().map(|task| of(task).map_or("".into(), |s| percent(s.accuracy))));
            cells.push(percent(mean(&line.iter().map(|s| s.accuracy).collect::<Vec<_>>())));
            let same: Vec<f64> = line.iter().filter_map(|s| s.same_as_bf16).collect();
            cells.push(if same.is_empty() { String::new() } else { percent(mean(&same)) });
            let divergence: Vec<f64> = line.iter().filter_map(|s| s.first_divergence).collect();
            cells.push(if divergence.is_empty() {
                String::new()
            } else {
                format!("{:.0}", mean(&divergence))
            });
            cells.push(line.iter().map(|s| s.n).sum::<usize>().to_string());
            cells
        })
        .collect();
    println!("{}", table::render(&header, &table));
    println!(
        "\n{accuracy}, in percent; same as BF16: share of answers equal to BF16's token for token; first divergence: mean \
         token where the others leave it"
    );
}
