//! `oscar eval ruler`: the thirteen RULER tasks with their official wordings and scores.

use super::session::Session;
use super::{AskArgs, check_seed, digest, filler, read_text, report};
use crate::progress;
use anyhow::{Context, Result, bail};
use oscar_eval::cases::ruler_cases;
use oscar_eval::{Journal, Prompts};
use oscar_tasks::{QaSet, RulerConfig, RulerGenerator, RulerTask, TaskError};
use serde_json::json;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    ask: AskArgs,
    /// Tasks by their official names; all that need no file if absent
    #[arg(long, value_name = "TASK[,TASK…]", value_delimiter = ',')]
    tasks: Vec<String>,
    /// Sequence lengths: prompt and answer together
    #[arg(long, visible_alias = "context", value_name = "N[,N…]", value_delimiter = ',', default_values_t = [4096])]
    lengths: Vec<usize>,
    /// Cases of each task and length (the official runs take 500)
    #[arg(long, visible_alias = "samples", value_name = "N", default_value_t = 20)]
    limit: usize,
    /// Seeds; each gives cases of its own
    #[arg(long, visible_alias = "seed", value_name = "N[,N…]", value_delimiter = ',', default_values_t = [42])]
    seeds: Vec<u64>,
    /// Give chat models the beginning of the answer, as the official runs do; raw prompts (--raw)
    /// always end with it
    #[arg(long)]
    answer_prefix: bool,
    /// SQuAD development set (dev-v2.0.json), for qa_1
    #[arg(long, value_name = "FILE")]
    squad: Option<String>,
    /// HotpotQA development set (distractor setting), for qa_2
    #[arg(long, value_name = "FILE")]
    hotpotqa: Option<String>,
    /// Essay text for the haystacks (officially Paul Graham's essays); generated paragraphs if absent
    #[arg(long, value_name = "FILE")]
    text: Option<String>,
}

pub fn run(args: &Args) -> Result<()> {
    args.ask.check_generated(args.limit)?;
    args.seeds.iter().try_for_each(|&seed| check_seed(seed, 0))?;
    let mut tasks = args.tasks.iter().map(|name| RulerTask::parse(name)).collect::<Result<Vec<_>, _>>()?;
    if tasks.is_empty() {
        tasks.extend(RulerTask::without_data());
        tasks.extend(args.squad.is_some().then_some(RulerTask::Qa1));
        tasks.extend(args.hotpotqa.is_some().then_some(RulerTask::Qa2));
    }
    for (task, file, flag) in
        [(RulerTask::Qa1, &args.squad, "--squad"), (RulerTask::Qa2, &args.hotpotqa, "--hotpotqa")]
    {
        if tasks.contains(&task) && file.is_none() {
            bail!("{} needs its questions: give {flag} FILE", task.name());
        }
    }
    let Some(&longest) = args.lengths.iter().max() else { bail!("--lengths: give at least one") };
    let (squad, squad_digest) = questions(args.squad.as_deref(), "--squad", QaSet::squad)?;
    let (hotpot, hotpot_digest) = questions(args.hotpotqa.as_deref(), "--hotpotqa", QaSet::hotpotqa)?;
    let (filler, text_digest) = filler(args.text.as_deref(), "--text")?;
    let common = &args.ask.common;
    let session = Session::open(&common.model, &common.cache, Some(longest), "--lengths")?;
    let prompts = Prompts::new(&session.text, args.ask.raw);
    let formats = session.prepare(&common.kv)?;
    let config = session.config(json!({
        "text": text_digest, "raw": prompts.is_raw(), "answer_prefix": args.answer_prefix, "squad": squad_digest, "hotpotqa": hotpot_digest,
    }));
    let mut journal = Journal::open(common.out.as_deref(), "eval ruler", &config)?;

    let planned = tasks.len() * args.lengths.len() * args.seeds.len() * args.limit;
    let bar = progress::bar("writing the cases", planned as u64);
    let count = |text: &str| prompts.count(text);
    let reserved_tokens = prompts.overhead()?;
    let mut cases = Vec::new();
    for &length in &args.lengths {
        for &seed in &args.seeds {
            let config = RulerConfig { max_seq_length: length, reserved_tokens, seed };
            let generator = RulerGenerator::new(config, &*filler, &count);
            let generator = generator.with_qa_1(squad.clone()).with_qa_2(hotpot.clone());
            let (limit, prefix) = (args.limit, args.answer_prefix);
            cases.extend(ruler_cases(&prompts, &generator, &tasks, limit, prefix, || bar.inc(1))?);
        }
    }
    bar.finish_and_clear();
    let rows = session.ask("answering", &cases, &formats, args.ask.batch, &prompts, None, &mut journal)?;
    report(&rows, common.json, "RULER scores (string match)");
    Ok(())
}

/// A question set and the digest of its file, where one is given.
fn questions(
    path: Option<&str>,
    flag: &str,
    read: fn(&str) -> Result<QaSet, TaskError>,
) -> Result<(Option<QaSet>, Option<String>)> {
    let Some(path) = path else { return Ok((None, None)) };
    let text = read_text(path, flag)?;
    let set = read(&text).with_context(|| format!("{flag} {path}"))?;
    Ok((Some(set), Some(digest(&text))))
}
