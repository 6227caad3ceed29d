//! `oscar eval conversations`: which eviction policy keeps the facts of long conversations.

use super::session::{Prepared, Session};
use super::{Common, check_seed, filler};
use crate::episodes::{EpisodeArgs, probe};
use crate::{progress, table};
use anyhow::{Context, Result, bail};
use oscar_eval::conversations::{
    Arm, Arms, CaseOutcomes, ConversationCase, ConversationRow, EPISODES, FULL, Outcome, Setting, Unit,
    conversation_cases, run_case, summarize,
};
use oscar_eval::{Journal, Prompts};
use oscar_figures::write_whole;
use oscar_tasks::chat::sessions::Variant;
use oscar_views::{Evict, Eviction, HeadSplit, InputEmbeddings};
use serde_json::json;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    /// Policies: recent, h2o, snapkv, tova, keydiff, expected, kvzip, episodes; with a division of rows among heads
    /// after a colon (uniform, adaptive, global), e.g. kvzip:global
    #[arg(long, value_name = "POLICY[,POLICY…]", value_delimiter = ',',
          default_values = ["recent", "h2o", "snapkv", "tova", "keydiff", "expected", "kvzip", EPISODES])]
    policies: Vec<String>,
    /// Rows kept, in percent of the history
    #[arg(long, value_name = "PERCENT[,PERCENT…]", value_delimiter = ',', default_values_t = [50.0, 25.0, 12.5])]
    rows: Vec<f64>,
    /// Bytes of pages kept, in percent of the history's: these budgets beside those of --rows
    #[arg(long, value_name = "PERCENT[,PERCENT…]", value_delimiter = ',')]
    bytes: Vec<f64>,
    #[command(flatten)]
    episodes: EpisodeArgs,
    /// Conversations: sessions, update, cross, absent, system, late
    #[arg(long, value_name = "NAME[,NAME…]", value_delimiter = ',',
          default_values = ["sessions", "update", "cross", "absent", "system", "late"])]
    variants: Vec<String>,
    /// Tokens of a conversation, its answer included
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_values_t = [4096])]
    context: Vec<usize>,
    /// Conversations of each variant and context; each has up to eight questions
    #[arg(long, value_name = "N", default_value_t = 10)]
    limit: usize,
    /// Seed of the first conversation; the others follow
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Texts to read instead of generated paragraphs
    #[arg(long, value_name = "FILE")]
    text: Option<String>,
    /// Write accuracy by rows kept as an SVG picture
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<()> {
    if args.limit == 0 {
        bail!("--limit 0: at least one conversation of each variant is needed");
    }
    check_seed(args.seed, args.limit)?;
    let rows = args.rows.iter().map(|percent| (Unit::Rows, *percent));
    let budgets: Vec<_> = rows.chain(args.bytes.iter().map(|percent| (Unit::Bytes, *percent))).collect();
    if let Some((_, percent)) = budgets.iter().find(|(_, p)| !(*p > 0.0 && *p <= 100.0)) {
        bail!("--rows or --bytes {percent}: give a share of the history above 0 and up to 100 percent");
    }
    let policies = args.policies.iter().map(|name| arm(name)).collect::<Result<_>>()?;
    let arms = Arms { policies, budgets, episodes: args.episodes.options()? };
    let variants = args.variants.iter().map(|name| Variant::parse(name)).collect::<Result<Vec<_>, _>>()?;
    let Some(&longest) = args.context.iter().max() else { bail!("--context: give at least one") };
    let common = &args.common;
    let (filler, text_digest) = filler(args.text.as_deref(), "--text")?;
    // Room for what `kvzip` repeats behind the conversation.
    let session = Session::open(&common.model, &common.cache, None, "--context")?;
    check_room(&session, longest, "--context")?;
    let prompts = Prompts::new(&session.text, false);
    let options = arms.episodes;
    let config = session.config(json!({
        "text": text_digest, "policies": args.policies, "rows": args.rows, "bytes": args.bytes,
        "episodes": [options.count, options.segment, options.recited],
        "routing": [options.threshold, options.margin],
    }));
    let mut journal = Journal::open(common.out.as_deref(), "eval conversations", &config)?;
    let mut cases = Vec::new();
    for &context in &args.context {
        cases.extend(conversation_cases(&prompts, &variants, context, args.seed, args.limit, &*filler)?);
    }
    let formats = session.prepare(&common.kv)?;
    // Only formats that quantize evict rows; BF16 is not among them.
    let formats: Vec<_> =
        formats.into_iter().filter(|f| common.kv.iter().any(|kv| kv.name == f.name)).collect();
    let formats: Vec<&Prepared> = formats.iter().collect();
    let rows = measure(&session, &formats, &cases, &arms, &mut journal)?;
    if let Some(path) = &args.picture {
        let figure = oscar_eval::conversations::picture(&rows);
        write_whole(path, figure.file())
            .with_context(|| format!("{} could not be written", path.display()))?;
    }
    report(&rows, common.json);
    Ok(())
}

/// Positions beyond a conversation that a probe may take.
const PROBE_ROOM: usize = 2200;

/// Positions that conversations of this length need, those of probes included.
pub fn positions(context: usize) -> usize {
    context + 2 * PROBE_ROOM
}

/// Refuses conversations that the model cannot hold.
pub fn check_room(session: &Session, longest: usize, flag: &str) -> Result<()> {
    if positions(longest) > session.context {
        bail!(
            "{flag} {longest}: {} addresses {} positions, and scoring needs {} beyond the conversation",
            session.model.name,
            session.context,
            2 * PROBE_ROOM
        );
    }
    if session.text.chat.is_none() {
        bail!("conversations need a chat template: use an instruction-tuned model");
    }
    Ok(())
}

/// Runs all cases under every format and arm, as far as the journal does not know them.
pub fn measure(
    session: &Session,
    formats: &[&Prepared],
    cases: &[ConversationCase],
    arms: &Arms,
    journal: &mut Journal,
) -> Result<Vec<ConversationRow>> {
    let (prompts, probe) = (Prompts::new(&session.text, false), probe(&session.text)?);
    let setting = Setting {
        arms,
        probe: &probe,
        prompts: &prompts,
        stops: &session.stop_tokens,
        embeddings: InputEmbeddings::new(session.model.weights.clone())?,
    };
    let bar = progress::bar("asking", (cases.len() * formats.len()) as u64);
    let mut rows = Vec::new();
    for format in formats {
        let mut runner = None;
        let mut results: Vec<(&ConversationCase, Vec<Outcome>)> = Vec::new();
        for case in cases {
            let key = format!("{}/{}", format.name, case.key());
            let CaseOutcomes { outcomes } = match journal.get(&key) {
                Some(known) => known,
                None => {
                    if runner.is_none() {
                        runner = Some(session.runner(format, 3)?);
                    }
                    let Some(runner) = &mut runner else { continue };
                    let outcomes = run_case(runner, case, &setting)
                        .with_context(|| format!("--kv {}, conversation {}", format.name, case.key()))?;
                    let outcomes = CaseOutcomes { outcomes };
                    journal.record(&key, &outcomes)?;
                    outcomes
                }
            };
            results.push((case, outcomes));
            bar.inc(1);
        }
        rows.extend(summarize(&format.name, &results));
    }
    bar.finish_and_clear();
    Ok(rows)
}

/// A policy with its division among heads, its own if none is given.
pub fn arm(name: &str) -> Result<Arm> {
    let (evict, split) = name.split_once(':').map_or((name, None), |(evict, split)| (evict, Some(split)));
    let eviction: Eviction = evict.parse().with_context(|| format!("--policies {name}"))?;
    let split: HeadSplit = split.map_or(Ok(eviction.default_split()), str::parse)?;
    Ok(match eviction {
        Eviction::Episodes => Arm::Episodes(split),
        Eviction::Scorer(evict) => Arm::Scorer(evict, split),
        // Every policy scores the whole history here.
        Eviction::KeyDiffPost => Arm::Scorer(Evict::KeyDiff, split),
    })
}

fn report(rows: &[ConversationRow], json: bool) {
    if json {
        rows.iter().for_each(|row| println!("{}", json!(row)));
        return;
    }
    let mut tasks: Vec<&str> = Vec::new();
    for row in rows {
        if !tasks.contains(&row.task.as_str()) && row.task != "all" && row.task != "absent" {
            tasks.push(&row.task);
        }
    }
    let mut header = vec!["kv", "policy ", "budget", "rows", "MiB", "held", "context"];
    header.extend(&tasks);
    header.extend(["all", "KL", "survival", "routed", "abstains", "length", "probe", "questions"]);
    let mut lines = Vec::new();
    for all in rows.iter().filter(|row| row.task == "all") {
        let same = |row: &&ConversationRow| {
            (&row.kv, &row.policy, row.context, row.unit, row.percent)
                == (&all.kv, &all.policy, all.context, all.unit, all.percent)
        };
        let of = |task: &str| rows.iter().filter(same).find(|row| row.task == task);
        let percent = |value: f64| format!("{:.1}", 100.0 * value);
        let optional = |value: Option<f64>| value.map(percent).unwrap_or_default();
        let rows = if all.policy == FULL { "1".to_owned() } else { format!("{:.3}", all.rows) };
        let mib = |bytes: f64| format!("{:.2}", bytes / f64::from(1 << 20));
        let budget = match all.unit {
            Unit::Rows => format!("{} %", all.percent),
            Unit::Bytes => format!("{} % bytes", all.percent),
        };
        let mut line = vec![all.kv.clone(), all.policy.clone(), budget, rows, mib(all.bytes), mib(all.held)];
        line.push(all.context.to_string());
        line.extend(tasks.iter().map(|task| of(task).map(|row| percent(row.accuracy)).unwrap_or_default()));
        line.extend([percent(all.accuracy), format!("{:.4}", all.kl), optional(all.survival)]);
        line.extend([optional(all.routed), optional(all.abstention)]);
        line.push(all.length.map(|length| format!("{length:.1}")).unwrap_or_default());
        line.extend([format!("{:.0}", all.probe_tokens), all.n.to_string()]);
        lines.push(line);
    }
    println!("{}", table::render(&header, &lines));
    println!(
        "\nright answers in percent; rows: share of the quantized history that is kept; KL: to the whole cache of the same \
         format; survival: share of the asked facts' rows that a head keeps; routed: questions asked of the episode that \
         tells the answer, of those not asked of the global view; held: MiB of all views; abstains, length: questions \
         about facts never told that got no value of the conversation, and tokens of their answers; probe: tokens \
         computed to score"
    );
}
