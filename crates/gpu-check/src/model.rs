//! The embedded model on the GPU and on the CPU: the same prompts and tokens; logits are compared.

use crate::{Extent, Report, largest_difference};
use anyhow::{Context, Result};
use oscar_backend::{Backend, Pick, WeightFormat, argmax, pick};
use oscar_calibrate::RotationFile;
use oscar_codec::{CodeLayout, KvFormat, RotationKind};
use oscar_kernels_cpu::Kernels;
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_kernels_cuda::Storage;
use oscar_models::{DecoderConfig, ModelSource, Weights};
use oscar_runner::{KvMemory, Logits, Runner, RunnerOptions, Sequence, StepOutput, StepRequest};
use oscar_text::{ModelText, Tokenizer};
use std::io::Cursor;

/// The longest sequence, in tokens.
const CONTEXT: usize = 4096;

/// Formats with kernels, then rivals: `saw4` has kernels, the history of the others is dequantized.
const FORMATS: [&str; 11] = [
    "bf16",
    "oscar2",
    "oscar4",
    "oscar1",
    "saw4",
    "int8",
    "quarot2",
    "kivi2-g32",
    "kitty",
    "turboquant3",
    "turboquant-k3v4",
];

/// Formats that are also run with FP8 weights: with `bf16` all matrices stay FP8, with `oscar2` a
/// rotation is folded into those of attention.
const FP8_FORMATS: [&str; 2] = ["bf16", "oscar2"];

/// Prompts of 1 token to several times the windows; only the last has history.
const PROMPTS: [(&str, usize); 4] = [
    ("The", 1),
    ("The history of the city begins with a small market by the river.", 1),
    ("Once upon a time there was a king who had three daughters. ", 12),
    (
        "A list of things to remember: the blue door, the old key, the third step, and the number forty-two. ",
        45,
    ),
];

/// Largest difference of a logit. BF16 rounds activations and cached rows at 2⁻⁸; quantization
/// amplifies a difference that moves a value across the border between two codes.
fn allowed(format: KvFormat) -> f64 {
    if format.is_coded() { 2.0 } else { 0.25 }
}

/// Largest difference of the logits of two tokens that the devices choose between. A CPU with BF16
/// activations is half as far from one with f32 (`the_cpu_passes_the_check_of_models_with_experts`).
fn allowed_gap(format: KvFormat) -> f64 {
    if format.is_coded() { 0.5 } else { 1.0 / 32.0 }
}

/// Sink and recent tokens of a cache that has history after few tokens.
pub const NARROW: (usize, usize) = (16, 48);

/// How much is run.
struct Amount {
    /// How many of the formats, from the first.
    formats: usize,
    /// Sink and recent tokens; the format's own if absent.
    windows: Option<(usize, usize)>,
    /// Texts, and how often each is repeated.
    prompts: Vec<(&'static str, usize)>,
    /// Tokens generated after each prompt.
    generated: usize,
    /// Repetitions of the prompt of `picked`, and its steps.
    picked: (usize, usize),
    /// Steps of `interleaved`.
    interleaved: usize,
}

pub fn check(extent: Extent, report: &mut Report) -> Result<()> {
    let amount = match extent.small {
        true => Amount {
            formats: 2,
            windows: Some(NARROW),
            prompts: vec![(PROMPTS[3].0, 5)],
            generated: 2,
            picked: (5, 2),
            interleaved: 3,
        },
        false => Amount {
            formats: usize::MAX,
            windows: None,
            prompts: PROMPTS.to_vec(),
            generated: 48,
            picked: (12, 12),
            interleaved: 70,
        },
    };
    check_formats(None, &FORMATS, &amount, "model", report)?;
    // Lookahead does not depend on the format of the weights.
    let amount = Amount { interleaved: 0, ..amount };
    check_formats(Some(WeightFormat::Fp8), &FP8_FORMATS, &amount, "FP8 model", report)
}

fn check_formats(
    weights: Option<WeightFormat>,
    formats: &[&str],
    amount: &Amount,
    model_name: &str,
    report: &mut Report,
) -> Result<()> {
    let model = EmbeddedModel::open(weights)?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    for name in formats.iter().take(amount.formats) {
        let format: KvFormat = name.parse()?;
        let cpu = CpuBackend::new(Kernels::chosen()?, threads, Mode::Bf16)?;
        let mut cpu = model.runner(cpu, format, amount.windows)?;
        let mut gpu = model.runner(crate::open()?, format, amount.windows)?;
        for (text, times) in &amount.prompts {
            let prompt = model.tokenizer.encode(&text.repeat(*times), false)?;
            let what = || format!("{format}, prompt of {} tokens", prompt.len());
            let generated = amount.generated;
            compare(&mut cpu, &mut gpu, &prompt, generated, format, model_name, report).with_context(what)?;
        }
        let (times, steps) = amount.picked;
        let prompt = model.tokenizer.encode(&PROMPTS[2].0.repeat(times), false)?;
        picked(&mut gpu, &prompt, steps, format, report)
            .with_context(|| format!("{format}, picked tokens"))?;
        // Dequantized history goes through the host; its steps leave nothing behind.
        if amount.interleaved > 0 && Storage::of(gpu.layout())? != Storage::Dequantized {
            let text = model.tokenizer.encode(&PROMPTS[3].0.repeat(10), false)?;
            drop((cpu, gpu));
            let mut gpu = model.runner(crate::open()?, format, Some(NARROW))?;
            interleaved(&mut gpu, &text, amount.interleaved, format, report)
                .with_context(|| format!("{format}, interleaved steps"))?;
        }
    }
    Ok(())
}

/// The embedded model, opened.
pub struct EmbeddedModel {
    source: ModelSource,
    config: DecoderConfig,
    weights: Weights,
    pub tokenizer: Tokenizer,
}

impl EmbeddedModel {
    /// With weights in this format, or as they are stored.
    pub fn open(format: Option<WeightFormat>) -> Result<Self> {
        let source = ModelSource::Embedded(oscar_embedded::FILES);
        let weights = Weights::open(&source)?;
        Ok(Self {
            config: DecoderConfig::load(&source)?,
            weights: match format {
                Some(format) => weights.delivered_as(format),
                None => weights,
            },
            tokenizer: ModelText::from_files(&source.read_required("tokenizer.json")?, None, None)?.tokenizer,
            source,
        })
    }

    /// The model on a device, with a cache of this format. Calibrated formats use the model's
    /// rotations with the formats' default clip ratios.
    pub fn runner<B: Backend>(
        &self,
        backend: B,
        format: KvFormat,
        windows: Option<(usize, usize)>,
    ) -> Result<Runner<B>> {
        let c = &self.config;
        let (sink, recent) = windows.unzip();
        let windows = format.windows(sink, recent)?;
        let order = CodeLayout::Logical;
        let layout = c.cache_layout(format, windows, order)?;
        let rotations = match format.rotation() {
            RotationKind::Calibrated => {
                let bytes = self.source.read_required("rotations.safetensors")?;
                let length = bytes.len() as u64;
                Some(RotationFile::read(&mut Cursor::new(bytes), length)?.rotations)
            }
            kind => kind.data_free(c.layers, c.kv_heads, c.head_dim)?,
        };
        let context = CONTEXT.min(c.max_position_embeddings);
        let options = RunnerOptions {
            layout,
            rotations: rotations.as_ref(),
            context,
            kv_memory: KvMemory::Sequences { count: 3, tokens: context },
            prefill_chunk: 300,
        };
        Ok(Runner::load(backend, c, &self.weights, options, |_| {})?)
    }
}

/// Both devices read the prompt, then the CPU's greedy continuation. The logits of each step are
/// compared.
pub fn compare<C: Backend, G: Backend>(
    cpu: &mut Runner<C>,
    gpu: &mut Runner<G>,
    prompt: &[u32],
    generated: usize,
    format: KvFormat,
    model_name: &str,
    report: &mut Report,
) -> Result<()> {
    let (mut on_cpu, mut on_gpu) = (Sequence::new(), Sequence::new());
    let (mut cpu_step, mut gpu_step) = (StepOutput::default(), StepOutput::default());
    cpu.prefill(&mut on_cpu, prompt, &mut cpu_step, |_| {})?;
    gpu.prefill(&mut on_gpu, prompt, &mut gpu_step, |_| {})?;
    for step in 0..generated {
        let (expected, found) = (&cpu_step.logits, &gpu_step.logits);
        let what = || format!("{format}, prompt of {} tokens, token {step}", prompt.len());
        let difference = expected.iter().zip(found).map(|(&e, &f)| f64::from((e - f).abs())).fold(
            if expected.len() == found.len() { 0.0 } else { f64::INFINITY },
            |a, d| {
                if d.is_nan() { f64::INFINITY } else { a.max(d) }
            },
        );
        report.case(&format!("{model_name} logits, {format}"), difference, allowed(format), what);
        let (token, choice) = (argmax(expected), argmax(found));
        // Where the devices choose differently, the CPU must have found the two tokens nearly
        // equal.
        let gap = f64::from(expected[token as usize] - expected[choice as usize]);
        report.case(&format!("{model_name} greedy tokens, {format}"), gap, allowed_gap(format), what);
        let token = [token];
        let request = |sequence| StepRequest { sequence, tokens: &token, logits: Logits::Last };
        cpu.step(&mut [request(&mut on_cpu)], &mut cpu_step)?;
        let request = |sequence| StepRequest { sequence, tokens: &token, logits: Logits::Last };
        gpu.step(&mut [request(&mut on_gpu)], &mut gpu_step)?;
    }
    Ok(())
}

/// Two sequences of the same tokens in one step: the logits of one are read, the other gets only a
/// list of tokens, which must follow from the logits. Then steps whose logits never leave the
/// device.
pub fn picked<B: Backend>(
    gpu: &mut Runner<B>,
    prompt: &[u32],
    steps: usize,
    format: KvFormat,
    report: &mut Report,
) -> Result<()> {
    // The two sequences may be divided among thread blocks differently, so the last bits may
    // differ.
    const ALLOWED: f64 = 0.05;
    let (mut whole, mut listed) = (Sequence::new(), Sequence::new());
    let mut output = StepOutput::default();
    gpu.prefill(&mut whole, prompt, &mut output, |_| {})?;
    gpu.prefill(&mut listed, prompt, &mut output, |_| {})?;
    let name = format!("model picked tokens, {format}");
    for step in 0..steps {
        let what = if step % 2 == 0 { Pick::Top(20) } else { Pick::Greedy };
        let token = [argmax(&output.logits)];
        let mut requests = [
            StepRequest { sequence: &mut whole, tokens: &token, logits: Logits::Last },
            StepRequest { sequence: &mut listed, tokens: &token, logits: Logits::Pick(what) },
        ];
        gpu.step(&mut requests, &mut output)?;
        let StepOutput { logits, picked: lists, .. } = &output;
        let expected = pick(logits, what);
        let found = lists.first().map(Vec::as_slice).unwrap_or_default();
        let mut difference = if found.len() == expected.len() { 0.0 } else { f64::INFINITY };
        for ((logit, token), (wanted, _)) in found.iter().zip(&expected) {
            // The token's own logit, and the logit expected at this place of the list.
            let own = logits.get(*token as usize).copied().unwrap_or(f32::NAN);
            for other in [own, *wanted] {
                let apart = f64::from((logit - other).abs());
                difference = if apart.is_nan() { f64::INFINITY } else { apart.max(difference) };
            }
        }
        report.case(&name, difference, ALLOWED, || format!("{what:?}, token {step}"));
    }
    let token = [argmax(&output.logits)];
    for step in 0..steps / 3 + 1 {
        let mut requests = [
            StepRequest { sequence: &mut whole, tokens: &token, logits: Logits::Pick(Pick::Greedy) },
            StepRequest { sequence: &mut listed, tokens: &token, logits: Logits::Pick(Pick::Top(20)) },
        ];
        gpu.step(&mut requests, &mut output)?;
        let StepOutput { logits: none, picked: lists, .. } = &output;
        let best = |i: usize| lists.get(i).and_then(|list| list.first()).map_or(f32::NAN, |best| best.0);
        let apart = f64::from((best(0) - best(1)).abs()) + none.len() as f64;
        report.case(&name, apart, ALLOWED, || format!("no logits read, token {step}"));
    }
    Ok(())
}

/// Steps that share nothing but the device: the logits of a sequence must not depend on whether its
/// tokens are picked on the device or its logits are read, nor on steps of other sequences in
/// between. Tables and scratch memory stay on the device from step to step; this finds stale ones.
/// The cache's windows must be [`NARROW`].
pub fn interleaved<B: Backend>(
    gpu: &mut Runner<B>,
    text: &[u32],
    steps: usize,
    format: KvFormat,
    report: &mut Report,
) -> Result<()> {
    // The launches of a sequence's steps are the same.
    const ALLOWED: f64 = 1e-3;
    // With narrow windows each demotes a tile in its second step, into a page that has codes
    // already.
    const LENGTHS: [usize; 2] = [94, 110];
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Way {
        Read,
        Picked,
        Disturbed,
    }
    let mut best_logits = |text: &[u32], way: Way| -> Result<Vec<f32>> {
        let mut sequences = [Sequence::new(), Sequence::new()];
        for (sequence, length) in sequences.iter_mut().zip(LENGTHS) {
            let prompt = text.get(..length).context("the text is too short")?;
            gpu.prefill(sequence, prompt, &mut StepOutput::default(), |_| {})?;
        }
        let mut other = Sequence::new();
        let (mut output, mut best) = (StepOutput::default(), Vec::new());
        for step in 0..steps {
            if way == Way::Disturbed && step % 3 == 1 {
                let request = StepRequest { sequence: &mut other, tokens: &text[..2], logits: Logits::Last };
                gpu.step(&mut [request], &mut output)?;
            }
            let token = [text[step]];
            let wanted = if way == Way::Read { Logits::Last } else { Logits::Pick(Pick::Greedy) };
            let request = |sequence| StepRequest { sequence, tokens: &token, logits: wanted.clone() };
            gpu.step(&mut sequences.each_mut().map(request), &mut output)?;
            match way {
                Way::Read => {
                    let rows = output.logits.chunks_exact(output.logits.len() / LENGTHS.len());
                    best.extend(rows.map(|row| row[argmax(row) as usize]));
                }
                _ => best.extend(output.picked.iter().flatten().map(|(logit, _)| logit)),
            }
        }
        Ok(best)
    };
    // Pages keep their contents from run to run; alternating texts make stale contents visible.
    let backwards: Vec<u32> = text.iter().rev().copied().collect();
    let expected = [best_logits(text, Way::Read)?, best_logits(&backwards, Way::Read)?];
    for (text, way, expected) in
        [(text, Way::Picked, &expected[0]), (&backwards, Way::Disturbed, &expected[1])]
    {
        let found = best_logits(text, way)?;
        let expected: Vec<f64> = expected.iter().copied().map(f64::from).collect();
        let difference = largest_difference(&found, &expected);
        report
            .case(&format!("model interleaved steps, {format}"), difference, ALLOWED, || format!("{way:?}"));
    }
    Ok(())
}
