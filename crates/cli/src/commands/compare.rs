//! `oscar compare`: methods side by side on one model, in one run.
//!
//! Stages: text (KL, perplexity, top-1), decode speed in turns, then tasks and needles by questions and answers. Every
//! result is recorded at once, so an interrupted comparison continues where it stopped.

use super::eval::session::{Format, Prepared, Session};
use super::eval::{check_seed, conversations, digest, read_text};
use crate::options::{CacheArgs, ModelArgs};
use crate::{progress, table};
use anyhow::{Context, Result, bail};
use oscar_backend::AttentionPath;
use oscar_eval::cases::{Case, chat_cases, needle_cases};
use oscar_eval::compare::speed::{ROUNDS, recorded_speeds};
use oscar_eval::compare::{Comparison, MethodResult, Size, Text};
use oscar_eval::conversations::{Arm, Arms, ConversationRow, Unit, conversation_cases};
use oscar_eval::ppl::{score_recorded, windows};
use oscar_eval::run::Row;
use oscar_eval::{Journal, PplOptions, PplResult, Prompts};
use oscar_figures::write_whole;
use oscar_tasks::chat::sessions::Variant;
use oscar_tasks::{Filler, GrammarFiller, RulerConfig, RulerGenerator, Task};
use oscar_views::EpisodeOptions;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// What is compared where the user names nothing.
pub const DEFAULT_FORMATS: [&str; 14] = [
    "bf16",
    "oscar",
    "oscar2",
    "oscar2-official",
    "oscar3",
    "oscar4",
    "saw4",
    "turboquant3",
    "turboquant2",
    "kivi2-g32",
    "kivi2-g128",
    "quarot2",
    "naive2",
    "int8",
];

/// Tasks of a comparison: retrieval among look-alikes, memory, chained arithmetic and copying.
const DEFAULT_TASKS: [&str; 5] = ["niah_lines", "niah_uuid", "memory", "running_sum", "copy"];

/// Seed of the generated text, so that it is the same in every comparison.
const TEXT_SEED: u64 = 2_605;
/// Room behind the longest context for those steps.
const SPEED_ROOM: usize = 32;
/// Answers of BF16 from this many tokens on count as long.
const LONG_ANSWER: usize = 100;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    /// KV formats; BF16 is always measured and the reference
    #[arg(long, value_name = "FORMAT[,FORMAT…]", value_delimiter = ',', default_values = DEFAULT_FORMATS)]
    kv: Vec<Format>,
    /// Contexts of needles, bits and memory, ascending; text and speed are measured at the last
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_values_t = [1024, 2048, 4096])]
    context: Vec<usize>,
    /// Text to predict; generated paragraphs if absent
    #[arg(long, value_name = "FILE")]
    text: Option<String>,
    /// Windows of text
    #[arg(long, value_name = "N", default_value_t = 2)]
    windows: usize,
    /// First position of each window that is scored
    #[arg(long, value_name = "N", default_value_t = 512)]
    score_from: usize,
    /// Chat tasks; `none` leaves them out
    #[arg(long, value_name = "TASK[,TASK…]", value_delimiter = ',', default_values = DEFAULT_TASKS)]
    tasks: Vec<String>,
    /// Tokens of a task, its answer included
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_values_t = [2048])]
    task_context: Vec<usize>,
    /// Cases of each task
    #[arg(long, value_name = "N", default_value_t = 4)]
    limit: usize,
    /// Eviction policies, each a row at every --rows: --limit conversations of --task-context tokens under the first
    /// format of --kv whose rows can be evicted. `oscar eval conversations` measures more of them
    #[arg(long, value_name = "POLICY[,POLICY…]", value_delimiter = ',')]
    policies: Vec<String>,
    /// Rows that --policies keep, in percent of the history
    #[arg(long, value_name = "PERCENT[,PERCENT…]", value_delimiter = ',', default_values_t = [50.0, 25.0, 12.5])]
    rows: Vec<f64>,
    /// Depths of needles, in percent of the context
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_values_t = [10, 30, 50, 70, 90])]
    depths: Vec<usize>,
    /// Haystacks of each context; 0 leaves needles out
    #[arg(long, value_name = "N", default_value_t = 1)]
    haystacks: usize,
    /// Seed of tasks and needles
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Sequences answered at once; answers do not depend on it
    #[arg(long, value_name = "N", default_value_t = 8)]
    batch: usize,
    /// Folder for report.html, compare.json and the record of results, which a rerun goes on from
    #[arg(long, value_name = "DIR", default_value = "oscar-compare")]
    out: PathBuf,
    /// Also write the picture of bits against KL and accuracy (SVG)
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

impl Args {
    fn check(&self) -> Result<()> {
        check_seed(self.seed, self.limit)?;
        if self.context.is_empty() || !self.context.is_sorted() {
            bail!("--context: give contexts in ascending order");
        }
        if self.score_from + 1 >= self.longest() {
            bail!("--score-from {}: the longest --context has {} tokens", self.score_from, self.longest());
        }
        if self.windows == 0 || self.batch == 0 || self.limit == 0 {
            bail!("--windows, --limit and --batch must be at least 1");
        }
        if let Some(percent) = self.rows.iter().find(|p| !(**p > 0.0 && **p <= 100.0)) {
            bail!("--rows {percent}: give a share of the history above 0 and up to 100 percent");
        }
        if self.depths.is_empty() || !self.depths.is_sorted() || self.depths.iter().any(|&d| d > 100) {
            bail!("--depths: give percentages from 0 to 100 in ascending order");
        }
        Ok(())
    }

    fn tasks(&self) -> Result<Vec<Task>> {
        if self.tasks == ["none"] {
            return Ok(Vec::new());
        }
        Ok(self.tasks.iter().map(|name| Task::parse(name)).collect::<Result<_, _>>()?)
    }

    fn longest(&self) -> usize {
        self.context.last().copied().unwrap_or(0)
    }
}

pub fn run(args: &Args) -> Result<()> {
    args.check()?;
    let tasks = args.tasks()?;
    let text = match &args.text {
        Some(path) => read_text(path, "--text")?,
        // A word is at least a token.
        None => GrammarFiller.essay(args.windows * args.longest(), TEXT_SEED),
    };
    let told = args.task_context.iter().copied().max().unwrap_or(0);
    let told = if args.policies.is_empty() { told } else { conversations::positions(told) };
    let longest = told.max(args.longest() + SPEED_ROOM);
    let session =
        Session::open(&args.model, &args.cache, Some(longest), "--context (with room for the speed steps)")?;
    // Some formats of the default list fit heads of 128 alone.
    let formats = match args.kv.iter().map(|format| format.name.as_str()).eq(DEFAULT_FORMATS) {
        true => session.prepare_fitting(&args.kv)?,
        false => session.prepare(&args.kv)?,
    };
    let mut methods: Vec<MethodResult> =
        formats.iter().map(|f| describe(&session, f, &args.context)).collect();
    std::fs::create_dir_all(&args.out).with_context(|| format!("--out {}", args.out.display()))?;
    let config = session.config(json!({
        "text": digest(&text), "window": args.longest(), "windows": args.windows, "score_from": args.score_from,
        "policies": args.policies, "rows": args.rows,
    }));
    let mut journal = Journal::open(Some(&args.out.join("cases.jsonl")), "compare", &config)?;
    if !journal.is_empty() {
        eprintln!("going on with {} results in {}", journal.len(), args.out.join("cases.jsonl").display());
    }

    let started = Instant::now();
    measure_text(args, &session, &formats, &text, &mut journal, &mut methods)?;
    eprintln!("text and speed: {:.0} s", started.elapsed().as_secs_f64());
    let started = Instant::now();
    ask(args, &session, &formats, &tasks, &mut journal, &mut methods)?;
    eprintln!("tasks and needles: {:.0} s", started.elapsed().as_secs_f64());
    let policies = evict(args, &session, &formats, &mut journal)?;

    let comparison = Comparison {
        model: session.model.name.clone(),
        device: session.describe(&formats[0]).0,
        command: command_line(),
        notes: notes(args, &tasks),
        contexts: args.context.clone(),
        methods,
        policies,
    };
    write(&args.out.join("compare.json"), &serde_json::to_string_pretty(&comparison)?)?;
    let report = args.out.join("report.html");
    write(&report, &comparison.to_html())?;
    if let Some(path) = &args.picture {
        write(path, &comparison.to_picture())?;
    }
    if args.json {
        let rows = comparison.methods.iter().flat_map(|m| m.json_rows(args.longest()));
        rows.for_each(|row| println!("{row}"));
        comparison.policies.iter().for_each(|row| println!("{}", json!(row)));
    } else {
        let (header, rows) = comparison.table();
        println!("{}", table::render(&header, &rows));
        println!(
            "\nspeed is against BF16 in the same run, and noisy; dequantized first: no kernel of its own"
        );
        let (header, rows) = comparison.policy_table();
        if !rows.is_empty() {
            println!("\n{}", table::render(&header, &rows));
        }
    }
    eprintln!("report: {}", report.display());
    Ok(())
}

/// What is known of a format before anything is measured.
fn describe(session: &Session, format: &Prepared, contexts: &[usize]) -> MethodResult {
    let layout = &format.cache.layout;
    let kernels = session.describe(format).1;
    let size = |&context: &usize| Size {
        context,
        bits: layout.bits_per_element(context),
        bytes: layout.sequence_bytes(context),
    };
    MethodResult {
        kv: format.name.clone(),
        description: layout.format().describe(),
        rotations: format.cache.rotation_origin.clone(),
        dequantized: kernels.path != AttentionPath::Native,
        kernel: kernels.description,
        bits: layout.page_bits(),
        sizes: contexts.iter().map(size).collect(),
        ..MethodResult::default()
    }
}

/// KL, perplexity and top-1 on text; then, from the same filled caches, decode speed.
fn measure_text(
    args: &Args,
    session: &Session,
    formats: &[Prepared],
    text: &str,
    journal: &mut Journal,
    methods: &mut [MethodResult],
) -> Result<()> {
    let tokens = session.text.tokenizer.encode(text, false)?;
    let options = PplOptions {
        window: args.longest(),
        score_from: args.score_from,
        limit: args.windows,
        // Every row's logits are kept until the chunk is scored.
        chunk: session.prefill_chunk().min(512),
    };
    let windows = windows(&tokens, &options)?;
    let names: Vec<&str> = formats.iter().map(|f| f.name.as_str()).collect();
    let mut runners = formats.iter().map(|f| session.runner(f, 1)).collect::<Result<Vec<_>>>()?;
    let bar = progress::bar("text", (windows.len() * options.window) as u64);
    let tick = |tokens| bar.set_position(tokens as u64);
    let (sums, sequences) = score_recorded(journal, &names, &mut runners, &windows, &options, tick)?;
    bar.finish_and_clear();
    for (method, sums) in methods.iter_mut().zip(&sums) {
        method.text = Some(Text::new(options.window, PplResult::of(sums)));
    }
    let last = windows.last().copied().unwrap_or_default();
    let speeds = recorded_speeds(journal, &names, &mut runners, sequences, last)?;
    methods.iter_mut().zip(speeds).for_each(|(method, speed)| method.speed = speed);
    Ok(())
}

/// Tasks and needles under every format.
fn ask(
    args: &Args,
    session: &Session,
    formats: &[Prepared],
    tasks: &[Task],
    journal: &mut Journal,
    results: &mut [MethodResult],
) -> Result<()> {
    let prompts = Prompts::new(&session.text, false);
    let mut cases: Vec<Case> = Vec::new();
    if !tasks.is_empty() && prompts.is_raw() {
        bail!("{} has no chat template, which the tasks need: give --tasks none", session.model.name);
    }
    for &context in args.task_context.iter().filter(|_| !tasks.is_empty()) {
        cases.extend(chat_cases(&prompts, tasks, context, args.seed, args.limit, &GrammarFiller, || {})?);
    }
    let count = |text: &str| prompts.count(text);
    let reserved_tokens = prompts.overhead()?;
    let mut group = 0;
    for &length in args.context.iter().filter(|_| args.haystacks > 0) {
        let config = RulerConfig { max_seq_length: length, reserved_tokens, seed: args.seed };
        let generator = RulerGenerator::new(config, &GrammarFiller, &count);
        cases.extend(needle_cases(&prompts, &generator, &args.depths, args.haystacks, &mut group)?);
    }
    let rows = session.ask("tasks and needles", &cases, formats, args.batch, &prompts, None, journal)?;
    let long = |row: &Row| row.tokens.len() >= LONG_ANSWER;
    for (result, answers) in results.iter_mut().zip(&rows) {
        result.add_answers(answers, &rows[0], long);
    }
    Ok(())
}

/// Eviction policies on conversations.
fn evict(
    args: &Args,
    session: &Session,
    formats: &[Prepared],
    journal: &mut Journal,
) -> Result<Vec<ConversationRow>> {
    let policies: Vec<Arm> =
        args.policies.iter().map(|name| conversations::arm(name)).collect::<Result<_>>()?;
    let Some(&longest) = args.task_context.iter().max().filter(|_| !policies.is_empty()) else {
        return Ok(Vec::new());
    };
    conversations::check_room(session, longest, "--task-context")?;
    let Some(format) = formats.iter().find(|format| format.cache.layout.evicts_rows().is_ok()) else {
        bail!("--policies: rows of none of these formats can be evicted; add --kv oscar");
    };
    let prompts = Prompts::new(&session.text, false);
    let variants = [Variant::Sessions, Variant::Update, Variant::Cross];
    let mut cases = Vec::new();
    for &context in &args.task_context {
        cases.extend(conversation_cases(
            &prompts,
            &variants,
            context,
            args.seed,
            args.limit,
            &GrammarFiller,
        )?);
    }
    let budgets = args.rows.iter().map(|percent| (Unit::Rows, *percent)).collect();
    let arms = Arms { policies, budgets, episodes: EpisodeOptions::default() };
    conversations::measure(session, &[format], &cases, &arms, journal)
}

fn notes(args: &Args, tasks: &[Task]) -> Vec<String> {
    let list = |numbers: &[usize]| numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    let mut notes = vec![format!(
        "Text: {} windows of {} tokens of {}, scored from position {}; KL and top-1 against BF16 in the same run.",
        args.windows,
        args.longest(),
        args.text.as_deref().unwrap_or("generated paragraphs that calibration does not use"),
        args.score_from
    )];
    if !tasks.is_empty() {
        let names: Vec<&str> = tasks.iter().map(|t| t.name()).collect();
        notes.push(format!(
            "Tasks: {}; {} cases each at {} tokens, greedy, exact match of the whole answer.",
            names.join(", "),
            args.limit,
            list(&args.task_context)
        ));
        notes.push(format!("Long answers: those of {LONG_ANSWER} tokens or more under BF16."));
    }
    if args.haystacks > 0 {
        notes.push(format!(
            "Needles: {} haystack(s) at each of {} tokens with a needle at every depth ({} percent), each asked for.",
            args.haystacks,
            list(&args.context),
            list(&args.depths)
        ));
    }
    let windows = |tokens: Option<usize>| tokens.map_or("each format's own".to_owned(), |n| n.to_string());
    notes.push(format!(
        "Tokens kept in BF16: sink {}, recent {}. Speed: median of {ROUNDS} steps, formats in turns.",
        windows(args.cache.sink),
        windows(args.cache.recent)
    ));
    notes
}

/// The command as it was typed, without its path.
fn command_line() -> String {
    let quoted = |word: String| if word.contains(char::is_whitespace) { format!("'{word}'") } else { word };
    let mut words = vec!["oscar".to_owned()];
    words.extend(std::env::args().skip(1).map(quoted));
    words.join(" ")
}

fn write(path: &Path, text: &str) -> Result<()> {
    write_whole(path, text).with_context(|| format!("{} could not be written", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_formats_and_tasks_exist() {
        for name in DEFAULT_FORMATS {
            assert_eq!(name.parse::<Format>().unwrap().name, name);
        }
        for name in DEFAULT_TASKS {
            Task::parse(name).unwrap();
        }
    }
}
