//! `oscar eval agent`: tasks of several tool calls, each with exact arguments out of a long context.

use super::session::Session;
use super::{AskArgs, check_seed, filler, report};
use crate::progress;
use anyhow::{Result, bail};
use oscar_eval::agent::{CallForm, agent_cases, whole_tasks};
use oscar_eval::{Journal, Prompts};
use oscar_tasks::AgentTask;
use serde_json::json;

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Calls {
    /// The arguments alone, for small models
    Bare,
    /// A JSON call between tags
    Json,
}

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    ask: AskArgs,
    /// Tasks by name: lookup (three calls), copy_id (two calls with ids from far back), arguments (four exact ones)
    #[arg(long, value_name = "TASK[,TASK…]", value_delimiter = ',', default_values = ["lookup", "copy_id", "arguments"])]
    tasks: Vec<String>,
    /// Tokens of a conversation, its calls included
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_values_t = [8192])]
    context: Vec<usize>,
    /// Cases of each task and context
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: usize,
    /// Seed of the first case; the others follow
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// How calls are written. Decoding is constrained to this form
    #[arg(long, value_enum, default_value_t = Calls::Bare)]
    calls: Calls,
    /// Text around the records instead of generated paragraphs
    #[arg(long, value_name = "FILE")]
    text: Option<String>,
}

pub fn run(args: &Args) -> Result<()> {
    args.ask.check_generated(args.limit)?;
    check_seed(args.seed, args.limit)?;
    let tasks = args.tasks.iter().map(|name| AgentTask::parse(name)).collect::<Result<Vec<_>, _>>()?;
    let Some(&longest) = args.context.iter().max() else { bail!("--context: give at least one") };
    let common = &args.ask.common;
    let (filler, text_digest) = filler(args.text.as_deref(), "--text")?;
    let session = Session::open(&common.model, &common.cache, Some(longest), "--context")?;
    if args.ask.raw || session.text.chat.is_none() {
        bail!("agent tasks are conversations and need a chat template");
    }
    let form = match args.calls {
        Calls::Bare => CallForm::Bare,
        Calls::Json => CallForm::Json,
    };
    let prompts = Prompts::new(&session.text, false);
    let formats = session.prepare(&common.kv)?;
    let config = session.config(json!({"text": text_digest, "calls": format!("{form:?}")}));
    let mut journal = Journal::open(common.out.as_deref(), "eval agent", &config)?;

    let bar = progress::bar("writing the cases", (tasks.len() * args.context.len() * args.limit) as u64);
    let (mut cases, mut group) = (Vec::new(), 0);
    for &context in &args.context {
        let seed = args.seed;
        cases.extend(agent_cases(
            &prompts,
            &tasks,
            context,
            seed,
            args.limit,
            form,
            &*filler,
            &mut group,
            || bar.inc(1),
        )?);
    }
    bar.finish_and_clear();
    let rows = session.ask("calling", &cases, &formats, args.ask.batch, &prompts, None, &mut journal)?;
    let whole: Vec<_> = rows.iter().map(|rows| whole_tasks(rows)).collect();
    report(&whole, common.json, "tasks whose calls all have exactly the right arguments");
    Ok(())
}
