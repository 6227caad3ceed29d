//! Tiny random models of the families with experts, on the GPU and on the CPU: the same prompts, the same
//! tokens one by one, and several sequences in one step. Logits are compared.

use crate::{Extent, Report};
use anyhow::{Context, Result};
use oscar_backend::{Backend, RouterScores};
use oscar_codec::random::SplitMix64;
use oscar_codec::{CodeLayout, KvFormat};
use oscar_kernels_cpu::Kernels;
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_kernels_cuda::CudaBackend;
use oscar_models::tiny::fp8::{Twin, write_twin};
use oscar_models::tiny::{WriteOptions, tiny_config, write_random_model};
use oscar_models::{DecoderConfig, Family, ModelSource, Weights};
use oscar_runner::{KvMemory, Logits, Runner, RunnerOptions, Sequence, StepOutput, StepRequest};
use std::path::Path;

/// Families with query heads for each key and value head, as their published models have them.
const FAMILIES: [(Family, usize); 4] =
    [(Family::Qwen3Moe, 8), (Family::Glm4Moe, 12), (Family::MiniMaxM2, 6), (Family::Mixtral, 4)];

/// Prompts by their lengths: a step of one row, of few, of many, and three chunks.
const PROMPTS: [usize; 4] = [1, 12, 120, 700];
const CHUNK: usize = 300;
const CONTEXT: usize = 768;
const GENERATED: usize = 6;
/// Sequences that are decoded together: steps of few rows and of many.
const BATCHES: [usize; 2] = [5, 24];

/// Sink and recent tokens.
const WINDOWS: (usize, usize) = (16, 48);

/// Largest distance of two rows of logits, as a share of their length. BF16 rounds activations and
/// cached rows at 2⁻⁸; a router whose scores are nearly equal may then choose another expert, and a
/// cached number may get another code.
fn allowed(format: KvFormat) -> f64 {
    if format.is_coded() { 0.3 } else { 0.15 }
}

/// A model whose sizes GPU kernels have.
fn config(family: Family, group: usize) -> DecoderConfig {
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
        moe.experts = 16;
        moe.rule.chosen = if moe.rule.scores == RouterScores::Softmax { 4 } else { 6 };
    }
    config
}

pub fn check(extent: Extent, report: &mut Report) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let cpu = || Ok(CpuBackend::new(Kernels::chosen()?, threads, Mode::Bf16)?);
    check_on(cpu, || Ok(CudaBackend::open(0)?), extent, report)
}

/// The same check between any two backends.
pub fn check_on<C: Backend, G: Backend>(
    cpu: impl Fn() -> Result<C>,
    gpu: impl Fn() -> Result<G>,
    extent: Extent,
    report: &mut Report,
) -> Result<()> {
    let folder = tempfile::tempdir().context("a folder for tiny models")?;
    for (index, (family, group)) in FAMILIES.into_iter().enumerate() {
        if extent.small && index > 0 {
            continue;
        }
        let written = folder.path().join(format!("{index}"));
        write_random_model(&written, &config(family, group), WriteOptions::default(), 7)?;
        for (name, twin) in [("BF16", Twin::BlocksInBf16), ("FP8", Twin::Blocks)] {
            let model = folder.path().join(format!("{index}-{name}"));
            write_twin(&written, &model, twin)?;
            for format in ["bf16", "oscar2"] {
                let format: KvFormat = format.parse()?;
                let what = format!("{} {name}, {format}", family.model_type());
                let mut cpu = runner(cpu()?, &model, format).with_context(|| what.clone())?;
                let mut gpu = runner(gpu()?, &model, format).with_context(|| what.clone())?;
                let mut compared = Compared { name: what, allowed: allowed(format), report };
                for length in PROMPTS {
                    compared.one(&mut cpu, &mut gpu, length)?;
                }
                for batch in BATCHES {
                    compared.batch(&mut cpu, &mut gpu, batch)?;
                }
            }
        }
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

/// Logits of the same steps on two backends.
struct Compared<'a> {
    name: String,
    allowed: f64,
    report: &'a mut Report,
}

impl Compared<'_> {
    fn logits(&mut self, expected: &[f32], found: &[f32], what: impl FnOnce() -> String) {
        let square =
            |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
        let apart = square(&mut expected.iter().zip(found).map(|(e, f)| e - f));
        let size = square(&mut expected.iter().copied());
        let share = if expected.len() == found.len() { (apart / size).sqrt() } else { f64::INFINITY };
        self.report.case(&self.name, share, self.allowed, what);
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
