//! The embedded model on both devices: the same prompts, the same tokens, logits beside each other.

use super::Report;
use crate::device::AnyBackend;
use crate::options::{CacheArgs, Device, ModelArgs, OpenModel, PrecisionArg};
use anyhow::{Context, Result};
use oscar_codec::KvFormat;
use oscar_engine::{Logits, Runner, Sequence, StepRequest};

/// Those that have kernels, then rivals: `saw4` by the kernels of plain codes, the others by the generic path.
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

/// Tokens generated after each prompt.
const GENERATED: usize = 48;

/// Prompts of 1 token to several times the windows: the last crosses from BF16 into code.
const PROMPTS: [(&str, usize); 4] = [
    ("The", 1),
    ("The history of the city begins with a small market by the river.", 1),
    ("Once upon a time there was a king who had three daughters. ", 12),
    (
        "A list of things to remember: the blue door, the old key, the third step, and the number forty-two. ",
        45,
    ),
];

/// Largest difference of a logit: BF16 rounds activations and cached rows at 2⁻⁸, and coded rows amplify a difference
/// that moves a value across the border between two codes.
fn allowed(format: KvFormat) -> f64 {
    if format.is_coded() { 2.0 } else { 0.25 }
}

pub fn check(report: &mut Report) -> Result<()> {
    let args = ModelArgs { model: None, device: Device::Cpu, threads: None, precision: PrecisionArg::Bf16 };
    let model = args.open()?;
    let tokenizer = model.text()?.tokenizer;
    for name in FORMATS {
        let format: KvFormat = name.parse()?;
        let mut cpu = runner(&model, format, args.backend()?)?;
        let mut gpu = runner(&model, format, AnyBackend::cuda()?)?;
        for (text, times) in PROMPTS {
            let prompt = tokenizer.encode(&text.repeat(times), false)?;
            let what = || format!("{format}, prompt of {} tokens", prompt.len());
            compare(&mut cpu, &mut gpu, &prompt, format, report).with_context(what)?;
        }
    }
    Ok(())
}

fn runner(model: &OpenModel, format: KvFormat, backend: AnyBackend) -> Result<Runner<AnyBackend>> {
    let cache_args =
        CacheArgs { rotations: None, sink: None, recent: None, prefill_chunk: 300, kv_memory: None };
    let cache = model.cache(format, &cache_args)?;
    cache.runner(model, backend, &cache_args, 4096.min(model.config.max_position_embeddings), 1, |_| {})
}

/// Both devices read the prompt and then the CPU's greedy continuation; each step's logits are compared.
fn compare(
    cpu: &mut Runner<AnyBackend>,
    gpu: &mut Runner<AnyBackend>,
    prompt: &[u32],
    format: KvFormat,
    report: &mut Report,
) -> Result<()> {
    let (mut on_cpu, mut on_gpu) = (Sequence::new(), Sequence::new());
    let (mut expected, mut found) = (Vec::new(), Vec::new());
    cpu.prefill(&mut on_cpu, prompt, &mut expected, |_| {})?;
    gpu.prefill(&mut on_gpu, prompt, &mut found, |_| {})?;
    for step in 0..GENERATED {
        let what = || format!("{format}, prompt of {} tokens, token {step}", prompt.len());
        let difference = expected.iter().zip(&found).map(|(&e, &f)| f64::from((e - f).abs())).fold(
            if expected.len() == found.len() { 0.0 } else { f64::INFINITY },
            |a, d| {
                if d.is_nan() { f64::INFINITY } else { a.max(d) }
            },
        );
        report.case(&format!("model logits, {format}"), difference, allowed(format), what);
        let (token, choice) = (argmax(&expected), argmax(&found));
        // Where the devices choose differently, the CPU must have found the two tokens nearly equal.
        let gap = f64::from(expected[token] - expected[choice]);
        report.case(&format!("model greedy tokens, {format}"), gap, allowed(format) / 8.0, what);
        let token = [token as u32];
        let request = |sequence| StepRequest { sequence, tokens: &token, logits: Logits::Last };
        cpu.step(&mut [request(&mut on_cpu)], &mut expected)?;
        let request = |sequence| StepRequest { sequence, tokens: &token, logits: Logits::Last };
        gpu.step(&mut [request(&mut on_gpu)], &mut found)?;
    }
    Ok(())
}

fn argmax(logits: &[f32]) -> usize {
    logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(i, _)| i)
}
