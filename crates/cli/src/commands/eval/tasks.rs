//! `oscar eval tasks`: chat tasks with one right answer.

use super::session::Session;
use super::{AskArgs, check_seed, filler, report};
use crate::progress;
use anyhow::{Result, bail};
use oscar_eval::cases::chat_cases;
use oscar_eval::{Journal, Prompts};
use oscar_tasks::Task;
use serde_json::json;

/// The tasks if the user names none: each kind of use, and none that other tasks already cover.
pub const DEFAULT_TASKS: [&str; 9] = [
    "niah_single",
    "niah_lines",
    "niah_uuid",
    "niah_multiquery",
    "vt",
    "running_sum",
    "program",
    "copy",
    "memory",
];

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    ask: AskArgs,
    /// Tasks by name
    #[arg(long, value_name = "TASK[,TASK…]", value_delimiter = ',', default_values = DEFAULT_TASKS)]
    tasks: Vec<String>,
    /// Tokens of a conversation, its answer included
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_values_t = [4096])]
    context: Vec<usize>,
    /// Cases of each task and context
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: usize,
    /// Seed of the first case; the others follow
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Haystack text instead of generated paragraphs
    #[arg(long, value_name = "FILE")]
    text: Option<String>,
}

pub fn run(args: &Args) -> Result<()> {
    args.ask.check_generated(args.limit)?;
    check_seed(args.seed, args.limit)?;
    let tasks = args.tasks.iter().map(|name| Task::parse(name)).collect::<Result<Vec<_>, _>>()?;
    let Some(&longest) = args.context.iter().max() else { bail!("--context: give at least one") };
    let common = &args.ask.common;
    let (filler, text_digest) = filler(args.text.as_deref(), "--text")?;
    let session = Session::open(&common.model, &common.cache, Some(longest), "--context")?;
    if args.ask.raw || session.text.chat.is_none() {
        bail!(
            "the chat tasks are conversations and need a chat template; `oscar eval ruler --raw` asks base models"
        );
    }
    let prompts = Prompts::new(&session.text, false);
    let formats = session.prepare(&common.kv)?;
    let config = session.config(json!({"text": text_digest}));
    let mut journal = Journal::open(common.out.as_deref(), "eval tasks", &config)?;

    let bar = progress::bar("writing the cases", (tasks.len() * args.context.len() * args.limit) as u64);
    let mut cases = Vec::new();
    for &context in &args.context {
        cases.extend(chat_cases(&prompts, &tasks, context, args.seed, args.limit, &*filler, || bar.inc(1))?);
    }
    bar.finish_and_clear();
    let rows = session.ask("answering", &cases, &formats, args.ask.batch, &prompts, None, &mut journal)?;
    report(&rows, common.json, "exact match of the whole answer");
    Ok(())
}
