//! `oscar calibrate --bits`: widths for each layer, head and side, by the harm they do to text and
//! to answers.

use crate::options::OpenModel;
use crate::progress;
use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use oscar_backend::{Backend, Calibrates};
use oscar_calibrate::bits::{BitPlan, Chosen, Freedom, HarmOptions, Judge, Probe, Scores, Search, Watch};
use oscar_calibrate::{CodeRounding, RotationFile, RotationFileError};
use oscar_codec::{MeanBits, Rounding, Side, Windows};
use oscar_models::Transformer;
use oscar_tasks::{CALIBRATION_SEEDS_FROM, GrammarFiller, Task, Turn};
use oscar_text::{ChatInput, ModelText};
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// What the harm is measured on besides text. Long copying is indispensable: the heads that carry
/// it are quiet in everything else.
const TASKS: [Task; 4] = [Task::Copy, Task::RunningSum, Task::NiahUuid, Task::NiahLines];

/// Tokens before the scored ones, at least: twice what the BF16 windows keep, so that codes are
/// what is read.
const LEAST_HISTORY: usize = 640;
/// Most positions of an answer that are scored, and positions of a text.
const SCORED: usize = 128;
const TEXT_SCORED: usize = 256;

#[derive(clap::Args)]
pub struct BitsArgs {
    /// Also choose a code width of 1 to 4 bits for each layer, head and side, at these mean sizes
    /// (bits an element with scale and minimum, 1.25 to 4.25); `--kv oscar` then uses the table of
    /// 2.25, `--kv oscar:1.75` that of 1.75
    #[arg(long, value_name = "MEAN[,MEAN…]", value_delimiter = ',')]
    pub bits: Vec<MeanBits>,
    /// Tokens of a probe: text or a task with its answer
    #[arg(long, value_name = "N", default_value_t = 3072)]
    pub probe_tokens: usize,
    /// Probes of each kind: text, copy, running_sum, niah_uuid, niah_lines
    #[arg(long, value_name = "N", default_value_t = 6)]
    pub probes: usize,
    /// Widths that are measured; the others follow from the codes' error. For large models one or
    /// two are enough
    #[arg(long, value_name = "WIDTH[,WIDTH…]", value_delimiter = ',', default_values_t = [1, 2, 3, 4])]
    pub harm_widths: Vec<u32>,
    /// Kinds of probes
    #[arg(long, value_name = "KIND[,KIND…]", value_delimiter = ',')]
    pub probe_kinds: Vec<String>,
    /// Passes in which bits are moved between units that interact; 0 keeps the table the single
    /// harms give. 1 if absent, or 0 where --widths, --widths-by or --widths-of bind the table
    #[arg(long, value_name = "N")]
    pub refine: Option<usize>,
    /// Take the harms that the file of --rotations holds instead of measuring them: other means in
    /// seconds; its tables of means that are not asked for stay
    #[arg(long, requires = "rotations")]
    pub reuse_harms: bool,
    /// How codes are rounded: query-aware (`shaped`, the default if the rotations allow it)
    /// or to the nearest level
    #[arg(long, value_name = "nearest|shaped")]
    pub rounding: Option<CodeRounding>,
    /// Widths a unit may have; with 0, a head may keep no history and read its BF16 windows alone
    #[arg(long, value_name = "WIDTH[,WIDTH…]", value_delimiter = ',', default_values_t = [0, 1, 2, 3, 4])]
    pub widths: Vec<u32>,
    /// Units that have a width of their own: each head, or all heads of a layer and side together
    #[arg(long, value_enum, value_name = "UNIT", default_value_t = WidthsBy::Head)]
    pub widths_by: WidthsBy,
    /// Sides whose widths differ; the other side has the mean width everywhere
    #[arg(long, value_enum, value_name = "SIDE", default_value_t = WidthsOf::Both)]
    pub widths_of: WidthsOf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum WidthsBy {
    Head,
    Layer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum WidthsOf {
    Both,
    Keys,
    Values,
}

impl BitsArgs {
    fn freedom(&self) -> Freedom {
        Freedom {
            widths: self.widths.clone(),
            by_layer: self.widths_by == WidthsBy::Layer,
            side: match self.widths_of {
                WidthsOf::Both => None,
                WidthsOf::Keys => Some(Side::Key),
                WidthsOf::Values => Some(Side::Value),
            },
        }
    }

    /// The rounding asked for; by default the best that the file allows.
    fn roundings(&self, file: &RotationFile) -> Result<(CodeRounding, Vec<Rounding>)> {
        let known = file.bits.harm.as_ref().map(|_| file.bits.rounding).filter(|_| self.reuse_harms);
        if let (Some(asked), Some(known)) = (self.rounding, known)
            && asked != known
        {
            bail!(
                "--rounding {asked}: the harms of the file are those of {known} codes: leave out --reuse-harms"
            );
        }
        match self.rounding.or(known) {
            Some(rounding) => Ok((rounding, file.roundings(rounding)?)),
            None => match file.roundings(CodeRounding::Shaped) {
                Ok(roundings) => Ok((CodeRounding::Shaped, roundings)),
                Err(RotationFileError::NoSpectrum) => {
                    eprintln!(
                        "note: the rotations come without a spectrum of the queries: codes are rounded to the nearest"
                    );
                    Ok((CodeRounding::Nearest, file.roundings(CodeRounding::Nearest)?))
                }
                Err(error) => Err(error.into()),
            },
        }
    }

    fn check_probe_tokens(&self, model: &OpenModel) -> Result<()> {
        let (tokens, least) = (self.probe_tokens, LEAST_HISTORY + TEXT_SCORED);
        let positions = model.config.max_position_embeddings;
        if tokens < least {
            bail!("--probe-tokens {tokens}: at least {least}, or nothing would be quantized");
        }
        if tokens > positions {
            bail!("--probe-tokens {tokens}: {} addresses {positions} positions", model.name);
        }
        Ok(())
    }

    /// Moving single bits would break what binds the table.
    fn refine_rounds(&self, freedom: &Freedom) -> Result<usize> {
        match (self.refine, *freedom == Freedom::default()) {
            (Some(rounds @ 1..), false) => bail!(
                "--refine {rounds} moves bits between any two units: leave it out with --widths, --widths-by or --widths-of"
            ),
            (given, free) => Ok(given.unwrap_or(usize::from(free))),
        }
    }
}

/// Everything that choosing widths starts from.
pub struct Material<'a, B: Backend> {
    pub model: &'a OpenModel,
    pub text: &'a ModelText,
    pub backend: &'a Arc<B>,
    /// What text probes are cut from.
    pub probe_text: &'a [u32],
    pub seed: u64,
    /// Where finished probes are noted, so that an interrupted run goes on.
    pub checkpoint: PathBuf,
}

/// Measures harms, solves for every mean and verifies the tables; puts them into the file.
pub fn choose<B: Calibrates>(
    args: &BitsArgs,
    material: &Material<'_, B>,
    file: &mut RotationFile,
) -> Result<Vec<Chosen>> {
    let config = &material.model.config;
    let harm = HarmOptions { measured: args.harm_widths.clone(), ..HarmOptions::default() };
    harm.check()?;
    let freedom = args.freedom();
    // A mean out of reach is refused now, not after minutes of measuring.
    freedom.check_means(config.layers, config.kv_heads, config.head_dim, &args.bits)?;
    let refine_rounds = args.refine_rounds(&freedom)?;
    args.check_probe_tokens(material.model)?;
    let kinds = kinds(&args.probe_kinds)?;
    let (rounding, roundings) = args.roundings(file)?;
    let transformer = Transformer::build(
        &**material.backend,
        config,
        &material.model.weights,
        Some(&file.rotations),
        args.probe_tokens + 64,
        |_| {},
    )?;
    let cancelled = AtomicBool::new(false);
    let judge = Judge {
        backend: material.backend,
        transformer: &transformer,
        windows: Windows::default(),
        roundings: &roundings,
        chunk: 512,
        cancelled: &cancelled,
    };
    // Tables are chosen on one half of the seeds and verified on the other.
    let (probes, fresh) = (probes(args, material, &kinds, 0)?, probes(args, material, &kinds, 1)?);
    let watch = Bars::default();
    let search = Search {
        judge,
        harm,
        freedom,
        refine_rounds,
        rounding,
        probes: &probes,
        fresh: &fresh,
        watch: &watch,
    };
    let map = match args.reuse_harms {
        true => file.bits.harm.clone().context(
            "--reuse-harms: the file of --rotations holds no harms: make it with `oscar calibrate --bits`",
        )?,
        false => search.measure_harms(&file.metadata, &material.checkpoint)?,
    };
    let chosen = search.choose(&map, &args.bits)?;
    for c in chosen.iter().filter(|c| c.harm() >= 1.0 && c.mean >= MeanBits::DEFAULT) {
        eprintln!(
            "warning: on fresh probes the table of {} bits is no better than two bits everywhere: measure with more \
             --probes, longer --probe-tokens or other --probe-kinds",
            c.mean
        );
    }
    let mut tables: Vec<_> = chosen.iter().map(|c| (c.mean, c.table.clone())).collect();
    if args.reuse_harms {
        // Of the same harms and the same codes: they stay, for the means that were not asked for.
        let kept = file.bits.tables.iter().filter(|(mean, _)| !args.bits.contains(mean));
        tables.extend(kept.cloned());
    }
    file.bits = BitPlan { tables, harm: Some(map), rounding };
    Ok(chosen)
}

/// The search on the terminal.
#[derive(Default)]
struct Bars(RefCell<Option<ProgressBar>>);

impl Watch for Bars {
    fn begin(&self, stage: &'static str, passes: usize) {
        *self.0.borrow_mut() = Some(progress::bar(stage, passes as u64));
    }

    fn advance(&self, passes: usize) {
        if let Some(bar) = &*self.0.borrow() {
            bar.inc(passes as u64);
        }
    }

    fn end(&self) {
        if let Some(bar) = self.0.take() {
            bar.finish_and_clear();
        }
    }

    fn note(&self, text: String) {
        eprintln!("{text}");
    }
}

/// Which probes to make: `text` and names of tasks.
fn kinds(names: &[String]) -> Result<Vec<Option<Task>>> {
    if names.is_empty() {
        return Ok(std::iter::once(None).chain(TASKS.map(Some)).collect());
    }
    names
        .iter()
        .map(|name| match name.as_str() {
            "text" => Ok(None),
            name => Ok(Some(Task::parse(name).with_context(|| format!("--probe-kinds {name} (or `text`)"))?)),
        })
        .collect()
}

fn probes<B: Backend>(
    args: &BitsArgs,
    material: &Material<'_, B>,
    kinds: &[Option<Task>],
    half: usize,
) -> Result<Vec<Probe>> {
    let mut all = Vec::new();
    for kind in kinds {
        match kind {
            None => all.extend(text_probes(args, material.probe_text, half)?),
            Some(task) => {
                for i in 0..args.probes {
                    // Far from the cases of the calibration text, which count up from zero.
                    let seed = CALIBRATION_SEEDS_FROM
                        + (material.seed << 20)
                        + (1 << 19)
                        + (half * args.probes + i) as u64;
                    let at = (i as f64 + 0.5 * half as f64) / args.probes as f64;
                    all.push(task_probe(args, material, *task, seed, at)?);
                }
            }
        }
    }
    Ok(all)
}

/// Windows over the text; the last positions of each are scored. The halves take every other
/// window.
fn text_probes(args: &BitsArgs, text: &[u32], half: usize) -> Result<Vec<Probe>> {
    let window = args.probe_tokens.min(text.len() / (2 * args.probes).max(1));
    if window < LEAST_HISTORY + TEXT_SCORED {
        bail!(
            "the text has {} tokens, too few for {} text probes: give more with --text, lower --probes, or leave `text` out of \
             --probe-kinds",
            text.len(),
            2 * args.probes
        );
    }
    let windows = text.chunks_exact(window).skip(half).step_by(2).take(args.probes);
    Ok(windows
        .map(|tokens| Probe {
            group: "text".into(),
            tokens: tokens.to_vec(),
            scored: window - TEXT_SCORED..window,
        })
        .collect())
}

/// A task of about the wanted length, scored on a part of its right answer that begins at the share
/// `at`.
fn task_probe<B: Backend>(
    args: &BitsArgs,
    material: &Material<'_, B>,
    task: Task,
    seed: u64,
    at: f64,
) -> Result<Probe> {
    // Characters a token differ by model and by task, and some tasks draw a short case now and
    // then: go down from a size that is too long until one fits.
    let mut characters = args.probe_tokens * 8;
    while characters > args.probe_tokens {
        let case = task.case(seed, characters, &GrammarFiller)?;
        characters = characters * 31 / 32;
        let prompt = prompt_tokens(material.text, case.question())?;
        let answer = material.text.tokenizer.encode(&case.answer, false)?;
        let first = (answer.len().saturating_sub(SCORED) as f64 * at) as usize;
        // The last scored position predicts what follows the answer.
        let tokens: Vec<u32> =
            prompt.iter().chain(&answer).copied().take(prompt.len() + first + SCORED).collect();
        if tokens.len() <= args.probe_tokens && prompt.len() + first >= LEAST_HISTORY {
            let scored = prompt.len() + first - 1..tokens.len();
            return Ok(Probe { group: task.name().into(), scored, tokens });
        }
    }
    bail!(
        "no {} task fits {} tokens: raise --probe-tokens or leave it out of --probe-kinds",
        task.name(),
        args.probe_tokens
    )
}

/// A conversation as the model reads it; models without a chat template get it as plain text.
fn prompt_tokens(text: &ModelText, turns: &[Turn]) -> Result<Vec<u32>> {
    let rendered = match &text.chat {
        Some(template) => {
            let messages: Value =
                turns.iter().map(|t| json!({"role": t.role.as_str(), "content": t.text})).collect();
            let extra = Map::from_iter([("enable_thinking".to_owned(), json!(false))]);
            template.render(&ChatInput { extra: Some(&extra), ..ChatInput::new(&messages) })?
        }
        None => {
            let turns: Vec<&str> = turns.iter().map(|t| t.text.as_str()).collect();
            format!("{}\n\nAnswer: ", turns.join("\n\n"))
        }
    };
    Ok(text.tokenizer.encode(&rendered, text.chat.is_none())?)
}

/// The verified tables for people.
pub fn describe(chosen: &[Chosen]) -> String {
    let mut header = vec!["cache".to_owned(), "bits".to_owned(), "harm".to_owned()];
    let mut rows = Vec::new();
    for (index, c) in chosen.iter().enumerate() {
        if index == 0 {
            header.extend(c.uniform.groups().map(|(name, ..)| format!("KL {name}")));
            rows.push(row("oscar2".into(), c.uniform.relative_to(&c.uniform), 2.25, &c.uniform));
        }
        rows.push(row(format!("oscar:{}", c.mean), c.harm(), c.mean.bits(), &c.scores));
    }
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let mut out = crate::table::render(&header, &rows);
    for c in chosen {
        out.push_str(&format!("\noscar:{} = {} ({} tables tried)", c.mean, c.table.describe(), c.tried));
    }
    out
}

fn row(name: String, harm: f64, bits: f64, scores: &Scores) -> Vec<String> {
    let mut row = vec![name, format!("{bits:.2}"), format!("{harm:.3}")];
    row.extend(scores.groups().map(|(_, kl, _)| format!("{kl:.5}")));
    row
}
