//! The embedded model on both devices: the same prompts, the same tokens, logits beside each other.

use super::{Extent, Report, largest_difference};
use crate::device::AnyBackend;
use crate::options::{CacheArgs, Device, ModelArgs, OpenModel, PrecisionArg, WeightsArg};
use anyhow::{Context, Result};
use oscar_backend::{Pick, pick};
use oscar_codec::KvFormat;
use oscar_engine::{Logits, Runner, Sequence, StepRequest};
use oscar_kernels_cuda::storage::Storage;

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

/// Those that are also run with FP8 weights: one that leaves all matrices FP8, one that folds a rotation into attention's.
const FP8_FORMATS: [&str; 2] = ["bf16", "oscar2"];

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

/// Sink and recent tokens of caches that have history after few.
pub(super) const NARROW: (usize, usize) = (16, 48);

/// How much is run, of how many of the formats.
struct Amount {
    formats: usize,
    /// Sink and recent tokens, if not the formats' own.
    windows: Option<(usize, usize)>,
    /// Texts, and how often each is repeated.
    prompts: Vec<(&'static str, usize)>,
    /// Tokens after each.
    generated: usize,
    /// How often the text is repeated behind which tokens are picked, and how many are.
    picked: (usize, usize),
    /// Steps that follow one another as foreseen.
    foreseen: usize,
}

pub fn check(extent: Extent, report: &mut Report) -> Result<()> {
    let args = ModelArgs {
        model: None,
        device: Device::Cpu,
        threads: None,
        precision: PrecisionArg::Bf16,
        weights: None,
    };
    let amount = match extent.small {
        true => Amount {
            formats: 2,
            windows: Some(NARROW),
            prompts: vec![(PROMPTS[3].0, 5)],
            generated: 2,
            picked: (5, 2),
            foreseen: 3,
        },
        false => Amount {
            formats: usize::MAX,
            windows: None,
            prompts: PROMPTS.to_vec(),
            generated: 48,
            picked: (12, 12),
            foreseen: 70,
        },
    };
    check_formats(&args, &FORMATS, &amount, "model", report)?;
    // What is foreseen of a step does not depend on its weights.
    let (fp8, amount) =
        (ModelArgs { weights: Some(WeightsArg::Fp8), ..args }, Amount { foreseen: 0, ..amount });
    check_formats(&fp8, &FP8_FORMATS, &amount, "FP8 model", report)
}

fn check_formats(
    args: &ModelArgs,
    formats: &[&str],
    amount: &Amount,
    model_name: &str,
    report: &mut Report,
) -> Result<()> {
    let model = args.open()?;
    let tokenizer = model.text()?.tokenizer;
    for name in formats.iter().take(amount.formats) {
        let format: KvFormat = name.parse()?;
        let mut cpu = runner(&model, format, amount.windows, args.backend()?)?;
        let mut gpu = runner(&model, format, amount.windows, AnyBackend::cuda()?)?;
        for (text, times) in &amount.prompts {
            let prompt = tokenizer.encode(&text.repeat(*times), false)?;
            let what = || format!("{format}, prompt of {} tokens", prompt.len());
            let generated = amount.generated;
            compare(&mut cpu, &mut gpu, &prompt, generated, format, model_name, report).with_context(what)?;
        }
        let (times, steps) = amount.picked;
        let prompt = tokenizer.encode(&PROMPTS[2].0.repeat(times), false)?;
        picked(&mut gpu, &prompt, steps, format, report)
            .with_context(|| format!("{format}, picked tokens"))?;
        // Formats without kernels go through the host, and nothing of their steps is foreseen.
        if amount.foreseen > 0 && Storage::of(gpu.layout())? != Storage::Decoded {
            let text = tokenizer.encode(&PROMPTS[3].0.repeat(10), false)?;
            drop((cpu, gpu));
            let mut gpu = runner(&model, format, Some(NARROW), AnyBackend::cuda()?)?;
            foreseen(&mut gpu, &text, amount.foreseen, format, report)
                .with_context(|| format!("{format}, steps that were foreseen"))?;
        }
    }
    Ok(())
}

pub(super) fn runner(
    model: &OpenModel,
    format: KvFormat,
    windows: Option<(usize, usize)>,
    backend: AnyBackend,
) -> Result<Runner<AnyBackend>> {
    let (sink, recent) = windows.unzip();
    let cache_args = CacheArgs { rotations: None, sink, recent, prefill_chunk: 300, kv_memory: None };
    let cache = model.cache(format, &cache_args)?;
    cache.runner(model, backend, &cache_args, 4096.min(model.config.max_position_embeddings), 1, |_| {})
}

/// Both devices read the prompt and then the CPU's greedy continuation; each step's logits are compared.
fn compare(
    cpu: &mut Runner<AnyBackend>,
    gpu: &mut Runner<AnyBackend>,
    prompt: &[u32],
    generated: usize,
    format: KvFormat,
    model_name: &str,
    report: &mut Report,
) -> Result<()> {
    let (mut on_cpu, mut on_gpu) = (Sequence::new(), Sequence::new());
    let (mut expected, mut found) = (Vec::new(), Vec::new());
    cpu.prefill(&mut on_cpu, prompt, &mut expected, |_| {})?;
    gpu.prefill(&mut on_gpu, prompt, &mut found, |_| {})?;
    for step in 0..generated {
        let what = || format!("{format}, prompt of {} tokens, token {step}", prompt.len());
        let difference = expected.iter().zip(&found).map(|(&e, &f)| f64::from((e - f).abs())).fold(
            if expected.len() == found.len() { 0.0 } else { f64::INFINITY },
            |a, d| {
                if d.is_nan() { f64::INFINITY } else { a.max(d) }
            },
        );
        report.case(&format!("{model_name} logits, {format}"), difference, allowed(format), what);
        let (token, choice) = (argmax(&expected), argmax(&found));
        // Where the devices choose differently, the CPU must have found the two tokens nearly equal.
        let gap = f64::from(expected[token] - expected[choice]);
        report.case(&format!("{model_name} greedy tokens, {format}"), gap, allowed(format) / 8.0, what);
        let token = [token as u32];
        let request = |sequence| StepRequest { sequence, tokens: &token, logits: Logits::Last };
        cpu.step(&mut [request(&mut on_cpu)], &mut expected)?;
        let request = |sequence| StepRequest { sequence, tokens: &token, logits: Logits::Last };
        gpu.step(&mut [request(&mut on_gpu)], &mut found)?;
    }
    Ok(())
}

/// Two sequences of the same tokens in one step: of one the logits are read, of the other only a list of tokens, which must
/// be what the logits say; then a step whose logits never leave the device.
pub(super) fn picked(
    gpu: &mut Runner<AnyBackend>,
    prompt: &[u32],
    steps: usize,
    format: KvFormat,
    report: &mut Report,
) -> Result<()> {
    // The two share a step, not the way it is divided: rounding may differ in the last bits of a layer's output.
    const ALLOWED: f64 = 0.05;
    let (mut whole, mut listed) = (Sequence::new(), Sequence::new());
    let (mut logits, mut lists) = (Vec::new(), Vec::new());
    gpu.prefill(&mut whole, prompt, &mut logits, |_| {})?;
    gpu.prefill(&mut listed, prompt, &mut logits, |_| {})?;
    let name = format!("model picked tokens, {format}");
    for step in 0..steps {
        let what = if step % 2 == 0 { Pick::Top(20) } else { Pick::Greedy };
        let token = [argmax(&logits) as u32];
        let mut requests = [
            StepRequest { sequence: &mut whole, tokens: &token, logits: Logits::Last },
            StepRequest { sequence: &mut listed, tokens: &token, logits: Logits::Pick(what) },
        ];
        gpu.step_picking(&mut requests, &mut logits, &mut lists)?;
        let expected = pick(&logits, what);
        let found = lists.first().map(Vec::as_slice).unwrap_or_default();
        let mut difference = if found.len() == expected.len() { 0.0 } else { f64::INFINITY };
        for ((logit, token), (wanted, _)) in found.iter().zip(&expected) {
            // Its own logit, and the one that belongs at this place of the list.
            let own = logits.get(*token as usize).copied().unwrap_or(f32::NAN);
            for other in [own, *wanted] {
                let apart = f64::from((logit - other).abs());
                difference = if apart.is_nan() { f64::INFINITY } else { apart.max(difference) };
            }
        }
        report.case(&name, difference, ALLOWED, || format!("{what:?}, token {step}"));
    }
    for step in 0..steps / 3 + 1 {
        let token = [argmax(&logits) as u32];
        let mut requests = [
            StepRequest { sequence: &mut whole, tokens: &token, logits: Logits::Pick(Pick::Greedy) },
            StepRequest { sequence: &mut listed, tokens: &token, logits: Logits::Pick(Pick::Top(20)) },
        ];
        let mut none = Vec::new();
        gpu.step_picking(&mut requests, &mut none, &mut lists)?;
        let best = |i: usize| lists.get(i).and_then(|list| list.first()).map_or(f32::NAN, |best| best.0);
        let apart = f64::from((best(0) - best(1)).abs()) + none.len() as f64;
        report.case(&name, apart, ALLOWED, || format!("no logits read, token {step}"));
    }
    Ok(())
}

/// A device may prepare, and code, what the next step will probably be while it is at one whose tokens it picks itself. The answers
/// must be those of steps whose logits are read, where it does not, also where another step comes in between. The cache's windows
/// must be [`NARROW`].
pub(super) fn foreseen(
    gpu: &mut Runner<AnyBackend>,
    text: &[u32],
    steps: usize,
    format: KvFormat,
    report: &mut Report,
) -> Result<()> {
    // The steps are the same to the launch; only the time at which tiles are coded is not.
    const ALLOWED: f64 = 1e-3;
    // With narrow windows each codes a tile in its second step, of a page that has codes already.
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
            let prompt = text.get(..length).context("a text that is long enough")?;
            gpu.prefill(sequence, prompt, &mut Vec::new(), |_| {})?;
        }
        let mut other = Sequence::new();
        let (mut logits, mut lists, mut best) = (Vec::new(), Vec::new(), Vec::new());
        for step in 0..steps {
            if way == Way::Disturbed && step % 3 == 1 {
                let request = StepRequest { sequence: &mut other, tokens: &text[..2], logits: Logits::Last };
                gpu.step(&mut [request], &mut logits)?;
            }
            let token = [text[step]];
            let wanted = if way == Way::Read { Logits::Last } else { Logits::Pick(Pick::Greedy) };
            let request = |sequence| StepRequest { sequence, tokens: &token, logits: wanted };
            gpu.step_picking(&mut sequences.each_mut().map(request), &mut logits, &mut lists)?;
            match way {
                Way::Read => {
                    let rows = logits.chunks_exact(logits.len() / LENGTHS.len());
                    best.extend(rows.map(|row| row[argmax(row)]));
                }
                _ => best.extend(lists.iter().flatten().map(|(logit, _)| logit)),
            }
        }
        Ok(best)
    };
    // Pages go from one run to the next with what they hold: always the other text's.
    let backwards: Vec<u32> = text.iter().rev().copied().collect();
    let expected = [best_logits(text, Way::Read)?, best_logits(&backwards, Way::Read)?];
    for (text, way, expected) in
        [(text, Way::Picked, &expected[0]), (&backwards, Way::Disturbed, &expected[1])]
    {
        let found = best_logits(text, way)?;
        let expected: Vec<f64> = expected.iter().copied().map(f64::from).collect();
        let difference = largest_difference(&found, &expected);
        report.case(&format!("model foreseen steps, {format}"), difference, ALLOWED, || format!("{way:?}"));
    }
    Ok(())
}

fn argmax(logits: &[f32]) -> usize {
    logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(i, _)| i)
}
