//! Tiny random models of the families with experts or sliding windows, on the GPU and on the CPU: the same
//! prompts, the same tokens one by one, and several sequences in one step. Logits are compared.

use crate::{Extent, Report};
use anyhow::{Context, Result};
use oscar_backend::{Backend, RouterScores};
use oscar_codec::random::SplitMix64;
use oscar_codec::{CodeLayout, KvFormat};
use oscar_kernels_cpu::Kernels;
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_models::tiny::fp8::{Twin, write_twin};
use oscar_models::tiny::{WriteOptions, tiny_config, write_random_model};
use oscar_models::{DecoderConfig, Family, ModelSource, Weights};
use oscar_runner::{KvMemory, Logits, Runner, RunnerOptions, Sequence, StepOutput, StepRequest};
use std::path::Path;

/// Families with query heads for each key and value head, as their published models have them.
const FAMILIES: [(Family, usize); 4] =
    [(Family::Qwen3Moe, 8), (Family::Glm4Moe, 12), (Family::MiniMaxM2, 6), (Family::Mixtral, 4)];

/// Models with sliding windows, in which the first and the last of three layers slide.
const SLIDING: [Sliding; 6] = [
    Sliding { head_dim: 256, group: 4, window: 40, ..Sliding::of(Family::Gemma3) },
    Sliding { head_dim: 128, group: 2, window: 100, ..Sliding::of(Family::Gemma3) },
    Sliding { window: 128, ..Sliding::of(Family::GptOss) },
    Sliding { window: 40, chosen: Chosen::Some, ..Sliding::of(Family::GptOss) },
    Sliding { window: 128, mxfp4: true, ..Sliding::of(Family::GptOss) },
    Sliding { window: 40, chosen: Chosen::Some, mxfp4: true, ..Sliding::of(Family::GptOss) },
];

#[derive(Clone, Copy)]
struct Sliding {
    family: Family,
    head_dim: usize,
    group: usize,
    /// Shorter than most prompts.
    window: usize,
    chosen: Chosen,
    /// Experts in MXFP4.
    mxfp4: bool,
}

impl Sliding {
    const fn of(family: Family) -> Self {
        Self { family, head_dim: 64, group: 8, window: 0, chosen: Chosen::All, mxfp4: false }
    }

    fn config(&self) -> DecoderConfig {
        let mut config = config(self.family, self.group, self.chosen);
        config.head_dim = self.head_dim;
        config.layers = 3;
        if self.family == Family::Gemma3 {
            config.embedding_scale = (config.hidden_size as f32).sqrt();
        }
        if let Some(sliding) = &mut config.sliding {
            (sliding.window, sliding.layers) = (self.window, vec![0, 2]);
        }
        if let Some(moe) = &mut config.moe {
            moe.mxfp4 = self.mxfp4;
        }
        config
    }

    fn describe(&self) -> String {
        let weights = if self.mxfp4 { "MXFP4" } else { "BF16" };
        let experts =
            if self.family == Family::GptOss && self.chosen == Chosen::All { ", all experts" } else { "" };
        let family = self.family.model_type();
        format!("{family} {weights}{experts}, head {}, window {}", self.head_dim, self.window)
    }
}

/// Prompts by their lengths: a step of one row, of few, of many, and three chunks.
const PROMPTS: [usize; 4] = [1, 12, 120, 700];
const CHUNK: usize = 300;
const CONTEXT: usize = 768;
const GENERATED: usize = 6;
/// Sequences that are decoded together: steps of few rows and of many.
const BATCHES: [usize; 2] = [5, 24];

/// Sink and recent tokens.
const WINDOWS: (usize, usize) = (16, 48);

/// How many experts a row is sent to.
#[derive(Clone, Copy, PartialEq)]
enum Chosen {
    /// All of them, or there are none. Rounding moves their weights a little, so every row is near.
    All,
    /// Some. Between nearly equal scores rounding decides, and a row then goes another way: most rows
    /// are near. A CPU with BF16 activations is .6 away from one with f32 in the worst of 200 rows.
    Some,
}

/// Largest distances of two rows of logits, as shares of their length. The same distances of a CPU
/// with BF16 activations and one with f32 are in brackets (`the_cpu_passes_the_check_of_families`).
const HALF_OF_THE_ROWS: f64 = 0.05; // (.012)
const NINE_OF_TEN_ROWS: f64 = 0.3; // (.14)

/// All rows where every expert is chosen. A cached number between two codes may get either.
fn every_row(format: KvFormat) -> f64 {
    if format.is_coded() { 0.4 } else { 0.07 } // (.23; .023 for Gemma 3, .017 for the others)
}

/// A model whose sizes GPU kernels have.
fn config(family: Family, group: usize, chosen: Chosen) -> DecoderConfig {
    let mut config = tiny_config(family);
    let (kv_heads, head_dim, width) = (2, 64, 128);
    config.hidden_size = 256;
    config.intermediate_size = width;
    (config.kv_heads, config.query_heads, config.head_dim) = (kv_heads, kv_heads * group, head_dim);
    config.rotary_dim = config.rotary_dim.map(|_| head_dim / 2);
    config.vocab_size = 512;
    if let Some(moe) = &mut config.moe {
        moe.width = width;
        moe.shared_width = if moe.shared_width > 0 { width } else { 0 };
        let some = if moe.rule.scores == RouterScores::Softmax { 4 } else { 6 };
        (moe.experts, moe.rule.chosen) = match chosen {
            Chosen::All => (8, 8),
            Chosen::Some => (16, some),
        };
    }
    config
}

pub fn check(extent: Extent, report: &mut Report) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let cpu = || Ok(CpuBackend::new(Kernels::chosen()?, threads, Mode::Bf16)?);
    check_on(cpu, || Ok(crate::open()?), extent, report)?;
    check_sliding_on(cpu, || Ok(crate::open()?), extent, report)
}

/// The check of models with experts between any two backends.
pub fn check_on<C: Backend, G: Backend>(
    cpu: impl Fn() -> Result<C>,
    gpu: impl Fn() -> Result<G>,
    extent: Extent,
    report: &mut Report,
) -> Result<()> {
    let folder = tempfile::tempdir().context("a folder for tiny models")?;
    let models = FAMILIES.into_iter().flat_map(|of| [(of, Chosen::All), (of, Chosen::Some)]);
    for (index, ((family, group), chosen)) in models.enumerate() {
        if extent.small && index > 1 || !extent.takes(index as u64) {
            continue;
        }
        let written = folder.path().join(format!("{index}"));
        write_random_model(&written, &config(family, group, chosen), WriteOptions::default(), 7)?;
        for (name, twin) in [("BF16", Twin::BlocksInBf16), ("FP8", Twin::Blocks)] {
            let model = folder.path().join(format!("{index}-{name}"));
            write_twin(&written, &model, twin)?;
            let experts = if chosen == Chosen::All { ", all experts" } else { "" };
            let what = format!("{} {name}{experts}", family.model_type());
            compare(&cpu, &gpu, &model, &what, chosen, report)?;
        }
    }
    Ok(())
}

/// The check of models with sliding windows between any two backends.
pub fn check_sliding_on<C: Backend, G: Backend>(
    cpu: impl Fn() -> Result<C>,
    gpu: impl Fn() -> Result<G>,
    extent: Extent,
    report: &mut Report,
) -> Result<()> {
    let folder = tempfile::tempdir().context("a folder for tiny models")?;
    for (index, sliding) in SLIDING.iter().enumerate() {
        if extent.small && index % 2 == 1 || !extent.takes(index as u64) {
            continue;
        }
        let model = folder.path().join(format!("sliding-{index}"));
        write_random_model(&model, &sliding.config(), WriteOptions::default(), 7)?;
        compare(&cpu, &gpu, &model, &sliding.describe(), sliding.chosen, report)?;
    }
    Ok(())
}

/// Compares a model over BF16 and over coded caches. If it cannot run, that is a failure of its own, and
/// the other models go on.
fn compare<C: Backend, G: Backend>(
    cpu: &impl Fn() -> Result<C>,
    gpu: &impl Fn() -> Result<G>,
    model: &Path,
    what: &str,
    chosen: Chosen,
    report: &mut Report,
) -> Result<()> {
    for format in ["bf16", "oscar2"] {
        let format: KvFormat = format.parse()?;
        let what = format!("{what}, {format}");
        report.part(&what, |report| {
            let mut cpu = runner(cpu()?, model, format)?;
            let mut gpu = runner(gpu()?, model, format)?;
            let compared = Compared::new(&mut cpu, &mut gpu)?;
            compared.judge(&what, chosen, format, report);
            Ok(())
        });
    }
    Ok(())
}

fn runner<B: Backend>(backend: B, model: &Path, format: KvFormat) -> Result<Runner<B>> {
    let source = ModelSource::Dir(model.to_owned());
    let (config, weights) = (DecoderConfig::load(&source)?, Weights::open(&source)?);
    let rotations = format.rotation().data_free(config.layers, config.kv_heads, config.head_dim)?;
    let windows = format.windows(Some(WINDOWS.0), Some(WINDOWS.1))?;
    let options = RunnerOptions {
        layout: config.cache_layout(format, windows, CodeLayout::Logical)?,
        rotations: rotations.as_ref(),
        context: CONTEXT,
        kv_memory: KvMemory::Sequences { count: BATCHES[1], tokens: CONTEXT },
        prefill_chunk: CHUNK,
    };
    Ok(Runner::load(backend, &config, &weights, options, |_| {})?)
}

fn tokens(seed: usize, length: usize) -> Vec<u32> {
    let mut random = SplitMix64::new(seed as u64);
    (0..length).map(|_| random.below(512) as u32).collect()
}

/// Distances of logits of the same steps on two backends, each with its step.
#[derive(Default)]
struct Compared {
    rows: Vec<(f64, String)>,
}

impl Compared {
    fn new<C: Backend, G: Backend>(cpu: &mut Runner<C>, gpu: &mut Runner<G>) -> Result<Self> {
        let mut compared = Self::default();
        for length in PROMPTS {
            compared.one(cpu, gpu, length)?;
        }
        for batch in BATCHES {
            compared.batch(cpu, gpu, batch)?;
        }
        Ok(compared)
    }

    fn logits(&mut self, expected: &[f32], found: &[f32], what: impl FnOnce() -> String) {
        let square =
            |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
        let apart = square(&mut expected.iter().zip(found).map(|(e, f)| e - f));
        let size = square(&mut expected.iter().copied());
        let share = if expected.len() == found.len() { (apart / size).sqrt() } else { f64::INFINITY };
        // NaN is the largest distance of all.
        self.rows.push((if share.is_nan() { f64::INFINITY } else { share }, what()));
    }

    fn judge(mut self, name: &str, chosen: Chosen, format: KvFormat, report: &mut Report) {
        if chosen == Chosen::All {
            for (share, what) in self.rows {
                report.case(name, share, every_row(format), || what);
            }
            return;
        }
        self.rows.sort_by(|a, b| a.0.total_cmp(&b.0));
        let count = self.rows.len();
        for (parts, of, allowed) in [(1, 2, HALF_OF_THE_ROWS), (9, 10, NINE_OF_TEN_ROWS)] {
            let (share, what) = &self.rows[(count * parts).div_ceil(of) - 1];
            report.case(name, *share, allowed, || format!("{parts} of {of} of {count} rows, up to {what}"));
        }
    }

    /// A prompt, then tokens one by one.
    fn one<C: Backend, G: Backend>(
        &mut self,
        cpu: &mut Runner<C>,
        gpu: &mut Runner<G>,
        length: usize,
    ) -> Result<()> {
        let all = tokens(length, length + GENERATED);
        let (mut on_cpu, mut on_gpu) = (Sequence::new(), Sequence::new());
        let (mut expected, mut found) = (StepOutput::default(), StepOutput::default());
        cpu.prefill(&mut on_cpu, &all[..length], &mut expected, |_| {})?;
        gpu.prefill(&mut on_gpu, &all[..length], &mut found, |_| {})?;
        self.logits(&expected.logits, &found.logits, || format!("a prompt of {length} tokens"));
        for (index, token) in all[length..].iter().enumerate() {
            let token = [*token];
            let request = |sequence| StepRequest { sequence, tokens: &token, logits: Logits::Last };
            cpu.step(&mut [request(&mut on_cpu)], &mut expected)?;
            gpu.step(&mut [request(&mut on_gpu)], &mut found)?;
            self.logits(&expected.logits, &found.logits, || format!("token {index} after {length}"));
        }
        Ok(())
    }

    /// Several sequences, each with a token in every step.
    fn batch<C: Backend, G: Backend>(
        &mut self,
        cpu: &mut Runner<C>,
        gpu: &mut Runner<G>,
        count: usize,
    ) -> Result<()> {
        let texts: Vec<Vec<u32>> = (0..count).map(|s| tokens(100 + s, 20 + s + GENERATED)).collect();
        let mut sequences: Vec<_> = (0..count).map(|_| (Sequence::new(), Sequence::new())).collect();
        let (mut expected, mut found) = (StepOutput::default(), StepOutput::default());
        for (text, (on_cpu, on_gpu)) in texts.iter().zip(&mut sequences) {
            let prompt = &text[..text.len() - GENERATED];
            cpu.prefill(on_cpu, prompt, &mut expected, |_| {})?;
            gpu.prefill(on_gpu, prompt, &mut found, |_| {})?;
        }
        for step in 0..GENERATED {
            let next: Vec<[u32; 1]> =
                texts.iter().map(|text| [text[text.len() - GENERATED + step]]).collect();
            let (on_cpu, on_gpu): (Vec<_>, Vec<_>) = sequences.iter_mut().map(|(c, g)| (c, g)).unzip();
            let requests = |sequences: Vec<_>| -> Vec<StepRequest<'_>> {
                let pairs = sequences.into_iter().zip(&next);
                pairs
                    .map(|(sequence, tokens)| StepRequest { sequence, tokens, logits: Logits::Last })
                    .collect()
            };
            cpu.step(&mut requests(on_cpu), &mut expected)?;
            gpu.step(&mut requests(on_gpu), &mut found)?;
            let width = expected.logits.len() / count;
            let rows = expected.logits.chunks_exact(width).zip(found.logits.chunks(width));
            for (sequence, (expected, found)) in rows.enumerate() {
                self.logits(expected, found, || format!("step {step}, sequence {sequence} of {count}"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_kernels_cpu::Variant;

    /// A model with one expert fewer for each row is far beyond what the check allows.
    #[test]
    fn a_missing_expert_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let [right, wrong] = [4, 3].map(|chosen| {
            let mut config = config(Family::Qwen3Moe, 8, Chosen::Some);
            config.moe.as_mut().unwrap().rule.chosen = chosen;
            let model = folder.path().join(format!("{chosen}"));
            write_random_model(&model, &config, WriteOptions::default(), 7).unwrap();
            let cpu = CpuBackend::new(Kernels::for_variant(Variant::Scalar).unwrap(), 2, Mode::F32).unwrap();
            runner(cpu, &model, KvFormat::Bf16).unwrap()
        });
        let (mut right, mut wrong) = (right, wrong);
        let mut report = Report::default();
        let compared = Compared::new(&mut right, &mut wrong).unwrap();
        compared.judge("one fewer", Chosen::Some, KvFormat::Bf16, &mut report);
        assert_eq!(report.failures().count(), 1, "{report:?}");
    }
}
