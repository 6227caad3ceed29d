//! Families against goldens of Hugging Face transformers, on tiny checkpoints under the publishers'
//! tensor names: mixtures of experts (BF16, FP8 in blocks, FP8 by channels), Gemma 3, gpt-oss (BF16,
//! MXFP4), latent attention (BF16, FP8 in blocks), gated delta nets.
//!
//! `OSCAR_FAMILIES` names a folder with further checkpoints of the same form.

use crate::support::{all_logits, bits, greedy};
use oscar_backend::argmax;
use oscar_codec::{CodeLayout, KvFormat, RotationSet, Windows};
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_kernels_cpu::{Kernels, Variant};
use oscar_models::{DecoderConfig, ModelSource, Weights};
use oscar_runner::{KvMemory, Logits, Runner, RunnerOptions, Sequence, StepOutput, StepRequest};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families").join(name)
}

fn folders() -> Vec<PathBuf> {
    let names = [
        "mixtral",
        "qwen3_moe_fp8",
        "glm4_moe_fp8",
        "minimax_m2_fp8",
        "gemma3_text",
        "gpt_oss",
        "gpt_oss_mxfp4",
        "deepseek_v3",
        "deepseek_v3_fp8",
        "glm4_moe_lite",
        "qwen3_next",
        "qwen3_5_text",
        "qwen3_5_moe_text",
    ];
    let mut all: Vec<PathBuf> = names.iter().map(|name| shipped(name)).collect();
    if let Some(more) = std::env::var_os("OSCAR_FAMILIES") {
        let entries = std::fs::read_dir(more).unwrap().map(|entry| entry.unwrap().path());
        all.extend(entries.filter(|path| path.join("goldens.json").exists()));
    }
    all
}

pub struct Fixture {
    pub name: String,
    pub source: ModelSource,
    pub goldens: Value,
}

fn read(folder: PathBuf) -> Fixture {
    Fixture {
        name: folder.file_name().unwrap().to_string_lossy().into_owned(),
        goldens: serde_json::from_slice(&std::fs::read(folder.join("goldens.json")).unwrap()).unwrap(),
        source: ModelSource::Dir(folder),
    }
}

/// A shipped checkpoint.
pub fn fixture(name: &str) -> Fixture {
    read(shipped(name))
}

fn fixtures() -> Vec<Fixture> {
    folders().into_iter().map(read).collect()
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

pub fn runner(
    source: &ModelSource,
    variant: Variant,
    mode: Mode,
    format: KvFormat,
) -> Option<Runner<CpuBackend>> {
    let config = DecoderConfig::load(source).unwrap();
    // Latent rows are never quantized.
    if format.is_coded() && config.latent.is_some() {
        return None;
    }
    let rotations =
        format.rotation().data_free(config.cache_layers(), config.kv_heads, config.head_dim).unwrap();
    runner_with(source, variant, mode, format, Windows::new(16, 32).unwrap(), rotations.as_ref())
}

pub fn runner_with(
    source: &ModelSource,
    variant: Variant,
    mode: Mode,
    format: KvFormat,
    windows: Windows,
    rotations: Option<&RotationSet>,
) -> Option<Runner<CpuBackend>> {
    let kernels = Kernels::for_variant(variant).map_err(|error| eprintln!("SKIPPED: {error}")).ok()?;
    let (config, weights) = (DecoderConfig::load(source).unwrap(), Weights::open(source).unwrap());
    let layout = config.cache_layout(format, windows, CodeLayout::CpuTile).unwrap();
    let options = RunnerOptions {
        layout,
        rotations,
        context: 256,
        kv_memory: KvMemory::Bytes(64 << 20),
        prefill_chunk: 64,
    };
    Some(
        Runner::load(CpuBackend::new(kernels, 2, mode).unwrap(), &config, &weights, options, |_| {}).unwrap(),
    )
}

/// Largest difference of any golden number of a prompt, over all positions.
pub fn largest_difference(prompt: &Value, logits: &[f32], vocab: usize) -> f32 {
    let positions = &prompt["positions"];
    let mut largest = 0f32;
    for (position, row) in logits.chunks_exact(vocab).enumerate() {
        let four = numbers(&positions["logits_of_tokens_5_to_8"][position]);
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|&l| f64::from(l - top).exp()).sum();
        let found = [top, top + sum.ln() as f32].into_iter().chain(row[5..9].iter().copied());
        let number = |field: &str| positions[field][position].as_f64().unwrap() as f32;
        let wanted = [number("max"), number("logsumexp")].into_iter().chain(four);
        largest = found.zip(wanted).map(|(f, w)| (f - w).abs()).fold(largest, f32::max);
        assert_eq!(u64::from(argmax(row)), positions["argmax"][position].as_u64().unwrap(), "{position}");
    }
    let last = numbers(&prompt["last_logits"]);
    let ours = &logits[logits.len() - vocab..];
    ours.iter().zip(&last).map(|(f, w)| (f - w).abs()).fold(largest, f32::max)
}

#[test]
fn logits_of_all_positions_and_greedy_tokens_are_those_of_transformers() {
    for Fixture { name, source, goldens } in fixtures() {
        for variant in Variant::ALL {
            let Some(mut runner) = runner(&source, variant, Mode::F32, KvFormat::F32) else { continue };
            let vocab = runner.config().vocab_size;
            for prompt in goldens["prompts"].as_array().unwrap() {
                let tokens = ids(&prompt["ids"]);
                let logits = all_logits(&mut runner, &tokens, 64);
                let difference = largest_difference(prompt, &logits, vocab);
                assert!(difference < 1e-3, "{name} {variant}: {difference}");
                assert_eq!(greedy(&mut runner, &tokens, 16, &[]), ids(&prompt["greedy"]), "{name} {variant}");
            }
        }
    }
}

/// BF16 weights (FP8 is expanded or kept as codes): the goldens whose weights were rounded to BF16.
#[test]
fn bf16_weights_stay_near_transformers() {
    for Fixture { name, source, goldens } in fixtures() {
        let rounded = &goldens["dequantized_then_rounded_to_bf16"]["prompts"];
        let prompts = if rounded.is_null() { &goldens["prompts"] } else { rounded };
        for variant in Variant::ALL {
            let Some(mut runner) = runner(&source, variant, Mode::Bf16, KvFormat::F32) else { continue };
            let vocab = runner.config().vocab_size;
            for prompt in prompts.as_array().unwrap() {
                let logits = all_logits(&mut runner, &ids(&prompt["ids"]), 64);
                let difference = largest_difference(prompt, &logits, vocab);
                // Activations keep 16 bits of mantissa.
                assert!(difference < 3e-3, "{name} {variant}: {difference}");
            }
        }
    }
}

#[test]
fn chunks_batches_and_single_tokens_agree_to_the_bit() {
    for Fixture { name, source, goldens } in fixtures() {
        let tokens = ids(&goldens["prompts"][1]["ids"]);
        let other = ids(&goldens["prompts"][0]["ids"]);
        for variant in Variant::ALL {
            for (mode, format) in [(Mode::Bf16, KvFormat::Bf16), (Mode::Fast, KvFormat::OSCAR2)] {
                let Some(mut runner) = runner(&source, variant, mode, format) else { continue };
                let whole = all_logits(&mut runner, &tokens, tokens.len());
                for chunk in [1, 7, 64] {
                    let chunked = all_logits(&mut runner, &tokens, chunk);
                    assert!(bits(&chunked) == bits(&whole), "{name} {variant}, chunks of {chunk}");
                }
                let mut sequences: Vec<Sequence> = (0..5).map(|_| Sequence::new()).collect();
                let mut requests: Vec<StepRequest<'_>> = sequences
                    .iter_mut()
                    .enumerate()
                    .map(|(i, sequence)| {
                        let tokens = if i == 2 { &tokens[..] } else { &other[i..] };
                        StepRequest {
                            sequence,
                            tokens,
                            logits: if i == 2 { Logits::All } else { Logits::None },
                        }
                    })
                    .collect();
                let mut output = StepOutput::default();
                runner.step(&mut requests, &mut output).unwrap();
                assert!(bits(&output.logits) == bits(&whole), "{name} {variant}, in a batch");
            }
        }
    }
}

/// A quantized cache gives what the codec's reference (the scalar kernels) gives on the same model,
/// up to the rounding of fast kernels.
#[test]
fn quantized_caches_answer_as_the_scalar_kernels_do() {
    for Fixture { name, source, goldens } in fixtures() {
        let prompt = ids(&goldens["prompts"][1]["ids"]);
        for format in [KvFormat::Bf16, KvFormat::Oscar { bits: 4 }, KvFormat::OSCAR2] {
            let logits = |variant| {
                let runner = runner(&source, variant, Mode::Bf16, format);
                runner.map(|mut runner| (all_logits(&mut runner, &prompt, 64), runner.config().vocab_size))
            };
            let best = Variant::ALL.into_iter().rfind(|v| v.is_available()).unwrap();
            let (Some((reference, vocab)), Some((fast, _))) = (logits(Variant::Scalar), logits(best)) else {
                continue;
            };
            let scale = reference.iter().map(|l| l.abs()).fold(0.0, f32::max);
            // Means and most positions: rounding may choose another expert for a row.
            let differences = reference.iter().zip(&fast).map(|(w, f)| f64::from((w - f).abs()));
            let mean = differences.sum::<f64>() / reference.len() as f64;
            assert!(mean < 0.01 * f64::from(scale), "{name} {format}: {mean} of {scale}");
            let rows = reference.chunks(vocab).zip(fast.chunks(vocab));
            let same = rows.filter(|(wanted, found)| argmax(wanted) == argmax(found)).count();
            assert!(same * 10 >= prompt.len() * 9, "{name} {format}: {same} of {}", prompt.len());
        }
    }
}
