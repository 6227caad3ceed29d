//! `oscar eval humaneval|math|aime|gpqa`: benchmarks from the user's own files.

use super::session::Session;
use super::{AskArgs, check_seed, digest, report};
use crate::options::{OpenModel, parse_size};
use anyhow::{Result, bail};
use oscar_eval::benchmarks::Benchmark;
use oscar_eval::sandbox::{Limits, Sandbox};
use oscar_eval::{Journal, Prompts};
use serde_json::json;
use std::path::PathBuf;
use std::time::Duration;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    ask: AskArgs,
    /// The benchmark's problems, JSON lines as publicly distributed
    #[arg(long, value_name = "FILE")]
    file: PathBuf,
    /// Most problems, from the beginning of the file; 0 takes all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit: usize,
    /// Answers to each problem, with seeds 0, 1, …; pass@1 is their mean
    #[arg(long, value_name = "N", default_value_t = 1)]
    seeds: usize,
    /// Most tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 4096)]
    max_tokens: usize,
    /// Longest sequence in tokens; the model's own limit if absent
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// 0 picks the most likely token; the model's recommendation if absent
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Keep the smallest set of tokens whose probability reaches this
    #[arg(long, value_name = "X")]
    top_p: Option<f32>,
    /// Keep the k most likely tokens; 0 keeps all
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
}

#[derive(clap::Args)]
pub struct HumanEvalArgs {
    #[command(flatten)]
    benchmark: Args,
    /// Run the model's code: in a process of its own, without network, with limits of time and memory. It can reach
    /// your files; use a machine or a user account that has none to lose
    #[arg(long)]
    allow_code_execution: bool,
    /// Seconds a program may run
    #[arg(long, value_name = "N", default_value_t = 10)]
    code_seconds: u64,
    /// Memory a program may take
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "2G")]
    code_memory: usize,
}

pub fn human_eval(args: &HumanEvalArgs) -> Result<()> {
    if !args.allow_code_execution {
        bail!(
            "HumanEval runs code that the model writes: give --allow-code-execution if this machine is one where that may \
             happen"
        );
    }
    let limits =
        Limits { time: Duration::from_secs(args.code_seconds.max(1)), memory_bytes: args.code_memory as u64 };
    // The file is read first: a wrong one should not cost a process.
    run(&args.benchmark, Benchmark::HumanEval, Some(limits))
}

pub fn run(args: &Args, benchmark: Benchmark, code: Option<Limits>) -> Result<()> {
    args.ask.check()?;
    check_seed(0, args.seeds)?;
    if args.seeds == 0 || args.max_tokens == 0 {
        bail!("--seeds and --max-tokens must be at least 1");
    }
    let mut problems = benchmark.load(&args.file, 0)?;
    if args.limit > 0 {
        problems.truncate(args.limit);
    }
    let sandbox = code.map(Sandbox::new).transpose()?;
    let common = &args.ask.common;
    let session = Session::open(&common.model, &common.cache, args.context, "--context")?;
    let context = session.context;
    let mut sampling = OpenModel::default_sampling(&session.model.generation()?);
    sampling.temperature = args.temperature.unwrap_or(sampling.temperature);
    sampling.top_p = args.top_p.unwrap_or(sampling.top_p);
    sampling.top_k = args.top_k.unwrap_or(sampling.top_k);
    // Refuses settings out of range before anything is computed.
    oscar_engine::Sampler::new(sampling.clone())?;
    if args.seeds > 1 && sampling.temperature == 0.0 {
        bail!("--seeds {}: greedy decoding gives the same answer every time; give --temperature", args.seeds);
    }
    let prompts = Prompts::new(&session.text, args.ask.raw);
    let formats = session.prepare(&common.kv)?;
    let text = std::fs::read_to_string(&args.file)?;
    let config = session.config(json!({
        "file": digest(&text), "raw": prompts.is_raw(), "temperature": sampling.temperature, "top_p": sampling.top_p,
        "top_k": sampling.top_k, "max_tokens": args.max_tokens, "context": context,
    }));
    let mut journal = Journal::open(common.out.as_deref(), &format!("eval {}", benchmark.name()), &config)?;
    let seeds: Vec<u64> = (0..args.seeds as u64).collect();
    let cases = benchmark.cases(&prompts, &problems, &sampling, &seeds, context, args.max_tokens)?;
    let (batch, sandbox) = (args.ask.batch, sandbox.as_ref());
    let rows = session.ask("answering", &cases, &formats, batch, &prompts, sandbox, &mut journal)?;
    report(&rows, common.json, "pass@1 over seeds");
    Ok(())
}
