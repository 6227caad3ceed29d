//! `oscar calibrate`: rotations for a model from a little text.

use crate::commands::bits;
use crate::cpu_experts::{self, WeightBytes};
use crate::options::{ModelArgs, OpenModel};
use anyhow::{Context, Result, bail};
use oscar_backend::Backend;
use oscar_calibrate::{
    CalibratedModel, CalibrationOptions, ClipPolicy, Granularity, Input, ModelOptions, RotationFile,
    Statistic, Subject, calibrate_model, write_report,
};
use oscar_codec::Composition;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Where to write the rotations
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Calibration text, several files allowed: plain text, JSON Lines (`text` or `messages` in
    /// each line), or chat JSON. It should resemble your traffic and must not be the evaluation
    /// set; text that ships with oscar if absent
    #[arg(long, value_name = "FILE", num_args = 1..)]
    text: Vec<PathBuf>,
    /// Maximum number of tokens to run
    #[arg(long, value_name = "N", default_value_t = 16384)]
    tokens: usize,
    /// Longest piece of text to run at once
    #[arg(long, value_name = "N", default_value_t = 2048)]
    sequence: usize,
    /// One rotation for each KV head, or one for a layer
    #[arg(long, value_name = "head|layer", default_value = "head")]
    granularity: Granularity,
    /// Value statistic: `paper` (attention outputs, one pass), `coded` (that of the official code,
    /// two passes), `plain` (values alone)
    #[arg(long, value_name = "paper|coded|plain", default_value = "paper")]
    statistic: Statistic,
    /// How eigenbasis (r), Hadamard (h) and bit reversal (pbr) combine, by the official names
    #[arg(long, value_name = "NAME", default_value = "r_h_pbr")]
    composition: Composition,
    /// Do not subtract the mean key
    #[arg(long)]
    no_centring: bool,
    /// Fit a clip ratio for each layer, head and side instead of the official 0.96 / 0.92
    #[arg(long)]
    fit_clip: bool,
    /// The published recipe: one rotation for each layer, `coded` statistic, no centring, official
    /// clip
    #[arg(long, conflicts_with_all = ["granularity", "statistic", "no_centring", "fit_clip"])]
    official: bool,
    /// Seed of the shipped text and of the sample for fitting clip ratios
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Also write report.html and report.json into this directory
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
    /// Start from these rotations instead of making new ones (with --bits)
    #[arg(long, value_name = "FILE", requires = "bits")]
    rotations: Option<PathBuf>,
    #[command(flatten)]
    bits: bits::BitsArgs,
    /// One JSON object with the result
    #[arg(long)]
    json: bool,
}

/// Refuses a place where the result could not be written, before it is computed.
fn check_out(out: &Path) -> Result<()> {
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        bail!("--out {}: there is no folder {}", out.display(), folder.display());
    }
    if out.exists()
        && let Err(error) = RotationFile::load(out)
    {
        bail!("--out {} exists and holds no rotations ({error}): choose another name", out.display());
    }
    Ok(())
}

pub fn run(args: &Args) -> Result<()> {
    let started = Instant::now();
    check_out(&args.out)?;
    let model = args.model.open()?;
    let text = model.text()?;
    if let Some(experts) = args.model.cpu_experts {
        // Weights are loaded several times here, each time beside other memory.
        let Some(layers) = experts.layers() else {
            bail!("--cpu-experts auto is not possible in this command: give a number of layers, or all");
        };
        cpu_experts::check_host(WeightBytes::of(&model, true, args.model.holding(true)).last(layers))?;
    }
    let backend = Arc::new(args.model.backend()?);
    let subject = Subject {
        backend: &backend,
        config: &model.config,
        weights: &model.weights,
        text: &text,
        name: &model.name,
    };
    let mut widths = args.bits.options()?;
    if let (Some(widths), Some(free)) = (&mut widths, backend.free_memory()?) {
        // The weights come after this, and caches that verify tables.
        widths.memory = free / 4;
    }
    let tokens = widths.as_ref().map_or(0, |w| 2 * w.probes * w.probe_tokens).max(args.tokens);
    let options = ModelOptions { rotations: rotation_options(args), widths, text: inputs(args, tokens)? };
    let start = args.rotations.as_deref().map(RotationFile::load).transpose()?;
    let cancelled = AtomicBool::new(false);
    let watch = bits::Bars::default();
    let result = calibrate_model(&subject, start, &options, &checkpoint(&args.out), &watch, &cancelled)?;
    finish(args, &model, &result, started)
}

fn rotation_options(args: &Args) -> CalibrationOptions {
    let base = if args.official { CalibrationOptions::official() } else { CalibrationOptions::default() };
    CalibrationOptions {
        tokens: args.tokens,
        sequence_len: args.sequence,
        composition: args.composition,
        seed: args.seed,
        granularity: if args.official { base.granularity } else { args.granularity },
        statistic: if args.official { base.statistic } else { args.statistic },
        centre_keys: base.centre_keys && !args.no_centring,
        clip: if args.fit_clip { ClipPolicy::Fit } else { ClipPolicy::Official },
        ..base
    }
}

/// Where the results of finished probes are stored until the file is written.
fn checkpoint(out: &Path) -> PathBuf {
    let mut name = out.as_os_str().to_owned();
    name.push(".harm.jsonl");
    name.into()
}

/// Writes file and report and prints a summary.
fn finish(args: &Args, model: &OpenModel, result: &CalibratedModel, started: Instant) -> Result<()> {
    let (chosen, refused) = (&result.chosen, &result.refused);
    result.file.save(&args.out)?;
    if !args.bits.bits.is_empty() {
        // The harms are in the file now. Before that, losing them would cost the whole measurement.
        let _ = std::fs::remove_file(checkpoint(&args.out));
    }
    if let Some(dir) = &args.report {
        let Some(report) = &result.report else {
            bail!("--report needs the statistics of a calibration: leave out --rotations");
        };
        let [page, _] = write_report(dir, report).with_context(|| format!("--report {}", dir.display()))?;
        eprintln!("report: {}", page.display());
    }
    let m = &result.file.metadata;
    if args.json {
        println!(
            "{}",
            json!({"out": args.out, "tokens": m.tokens, "sequences": m.sequences, "seconds": started.elapsed().as_secs_f64(),
                   "granularity": m.granularity.name(), "statistic": m.statistic, "composition": m.composition,
                   "centred": m.centred, "clip": m.clip, "extra_memory_bytes": result.extra_memory,
                   "refused": refused.iter().map(|r| json!({"bits": r.mean.bits(), "reason": r.reason})).collect::<Vec<_>>(),
                   "widths": chosen.iter().map(|c| json!({"bits": c.mean.bits(), "table": c.table.describe(&result.file.bits.layers),
                       "harm": c.harm()})).collect::<Vec<_>>()})
        );
    } else {
        println!(
            "{}: rotations of {} layers × {} KV heads from {} tokens in {:.1} s ({} statistic, {}, {} clip{})",
            args.out.display(),
            model.config.cache_layers(),
            model.config.kv_heads,
            m.tokens,
            started.elapsed().as_secs_f64(),
            m.statistic,
            m.composition,
            m.clip,
            if m.centred { ", keys centred" } else { "" },
        );
        if !chosen.is_empty() || !refused.is_empty() {
            println!("{}", bits::describe(result));
        }
    }
    Ok(())
}

/// The text of `--text`, enough for this many tokens; none if the shipped text is used.
fn inputs(args: &Args, tokens: usize) -> Result<Vec<Input>> {
    let mut all = Vec::new();
    for path in &args.text {
        let name = path.display();
        let file = std::fs::File::open(path).with_context(|| format!("--text {name}"))?;
        match path.extension().and_then(|e| e.to_str()) {
            Some("jsonl" | "ndjson") => {
                // Line by line: only text that the budget can use is kept.
                let mut kept = 0;
                for (i, line) in BufReader::new(file).lines().enumerate() {
                    let line = line.with_context(|| format!("{name}, line {}", i + 1))?;
                    if line.trim().is_empty() {
                        continue;
                    }
                    let value: Value =
                        serde_json::from_str(&line).with_context(|| format!("{name}, line {}", i + 1))?;
                    all.push(input(&value).with_context(|| format!("{name}, line {}", i + 1))?);
                    kept += line.len();
                    if kept > enough_bytes(tokens) {
                        break;
                    }
                }
            }
            Some("json") => {
                let value: Value = serde_json::from_reader(BufReader::new(file))
                    .with_context(|| format!("{name} is not JSON"))?;
                let is_chat =
                    |v: &Value| v.is_array() && v[0].get("role").is_some() || v.get("messages").is_some();
                match value.as_array().filter(|_| !is_chat(&value)) {
                    Some(list) => {
                        for (i, item) in list.iter().enumerate() {
                            all.push(input(item).with_context(|| format!("{name}, entry {i}"))?);
                        }
                    }
                    None => all.push(input(&value).with_context(|| name.to_string())?),
                }
            }
            _ => {
                let mut bytes = Vec::new();
                file.take(enough_bytes(tokens) as u64)
                    .read_to_end(&mut bytes)
                    .with_context(|| format!("--text {name}"))?;
                all.push(Input::Text(
                    text_prefix(bytes).with_context(|| format!("--text {name} is not UTF-8"))?,
                ));
            }
        }
    }
    Ok(all)
}

/// More bytes of text than `tokens` tokens ever need: tokens of plain text are far shorter than 16 bytes on average.
fn enough_bytes(tokens: usize) -> usize {
    tokens.saturating_mul(16).saturating_add(64 << 10)
}

/// The bytes as text; a character cut off at the end is dropped.
fn text_prefix(bytes: Vec<u8>) -> Result<String, std::string::FromUtf8Error> {
    String::from_utf8(bytes).or_else(|error| {
        let (valid, cut) = (error.utf8_error().valid_up_to(), error.utf8_error().error_len().is_none());
        if !cut {
            return Err(error);
        }
        let mut bytes = error.into_bytes();
        bytes.truncate(valid);
        String::from_utf8(bytes)
    })
}

/// Text or a conversation, from a string, `{"text": …}`, a list of messages, or `{"messages": …}`.
fn input(value: &Value) -> Result<Input> {
    if let Some(text) = value.as_str().or_else(|| value.get("text")?.as_str()) {
        return Ok(Input::Text(text.to_owned()));
    }
    let messages = if value.is_array() { value } else { &value["messages"] };
    let Some(list) = messages.as_array() else {
        bail!("expected a string, an object with `text`, a list of messages, or an object with `messages`");
    };
    if let Some(bad) = list.iter().find(|m| !m["role"].is_string()) {
        bail!("a message needs a `role`: {bad}");
    }
    Ok(Input::Messages(messages.clone()))
}
