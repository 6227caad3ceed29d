//! Models with sliding windows and attention sinks: what goldens on short windows do not show.

use crate::families::{Fixture, fixture, largest_difference, runner, runner_with};
use crate::support::{Setup, all_logits, bits, fork_equals_a_cold_run, greedy, sliding_model};
use oscar_backend::{WeightFormat, argmax};
use oscar_codec::{CacheLayout, CodeLayout, HeadRotations, KvFormat, RotationSet, Windows};
use oscar_engine::{EVICT_BLOCK, Eviction, RowCap};
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_kernels_cpu::{Kernels, Variant};
use oscar_models::{DecoderConfig, Family, ModelSource, MoeConfig, SlidingLayers, Weights, shapes};
use oscar_runner::{KvMemory, Logits, Runner, RunnerOptions, Sequence, StepOutput, StepRequest};
use oscar_views::{Evict, Policy};
use serde_json::Value;

const NAMES: [&str; 3] = ["gemma3_text", "gpt_oss", "gpt_oss_mxfp4"];

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

/// The model with another window, in a folder of its own.
fn with_window(source: &ModelSource, window: usize) -> (tempfile::TempDir, ModelSource) {
    let ModelSource::Dir(folder) = source else { panic!("a folder") };
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read(folder.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    config["sliding_window"] = window.into();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    std::fs::copy(folder.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    let source = ModelSource::Dir(dir.path().to_owned());
    (dir, source)
}

/// Centring takes `scale·q·μ` off every score and must take it off the sinks too.
#[test]
fn rotated_and_centred_keys_change_nothing() {
    for name in NAMES {
        let Fixture { source, goldens, .. } = fixture(name);
        let config = DecoderConfig::load(&source).unwrap();
        let (l, h, d) = (config.layers, config.kv_heads, config.head_dim);
        let plain = RotationSet::hadamard(l, h, d).unwrap();
        let heads = plain.heads().iter().enumerate().map(|(i, head)| HeadRotations {
            key_mean: Some((0..d).map(|c| ((i * 31 + c * 17) % 23) as f32 / 5.0 - 2.0).collect()),
            ..head.clone()
        });
        let centred = RotationSet::per_head(l, h, d, heads.collect()).unwrap();
        for variant in Variant::ALL {
            let windows = Windows::new(16, 32).unwrap();
            let Some(mut runner) =
                runner_with(&source, variant, Mode::F32, KvFormat::F32, windows, Some(&centred))
            else {
                continue;
            };
            let vocab = config.vocab_size;
            for prompt in goldens["prompts"].as_array().unwrap() {
                let logits = all_logits(&mut runner, &ids(&prompt["ids"]), 33);
                let difference = largest_difference(prompt, &logits, vocab);
                assert!(difference < 1e-3, "{name} {variant}: {difference}");
            }
        }
    }
}

/// Windows that reach beyond the recent tokens: full layers read codes, sliding layers BF16 pages that
/// come and go. Fast kernels choose the reference's greedy tokens, except where its two best are
/// within rounding.
#[test]
fn sliding_layers_beside_codes_answer_as_the_scalar_kernels_do() {
    const CLOSE: f32 = 0.2;
    for name in NAMES {
        let Fixture { source, goldens, .. } = fixture(name);
        let prompt = ids(&goldens["prompts"][1]["ids"]);
        let (_dir, source) = with_window(&source, 50);
        let windows = Windows::new(16, 16).unwrap();
        for format in [KvFormat::Bf16, KvFormat::Oscar { bits: 4 }] {
            let rotations = format.rotation().data_free(2, 2, 64).unwrap();
            let on = |variant| runner_with(&source, variant, Mode::F32, format, windows, rotations.as_ref());
            let mut reference = on(Variant::Scalar).unwrap();
            let answer = greedy(&mut reference, &prompt, 16, &[]);
            let tokens = [&prompt[..], &answer].concat();
            let expected = all_logits(&mut reference, &tokens, 64);
            let vocab = reference.config().vocab_size;
            let is_clear = |row: &[f32]| {
                let best = argmax(row) as usize;
                row.iter().enumerate().all(|(token, logit)| token == best || logit + CLOSE < row[best])
            };
            for variant in Variant::ALL {
                let Some(mut runner) = on(variant) else { continue };
                let found = all_logits(&mut runner, &tokens, 64);
                let rows = expected.chunks(vocab).zip(found.chunks(vocab));
                let clear: Vec<_> = rows.filter(|(expected, _)| is_clear(expected)).collect();
                assert!(2 * clear.len() > tokens.len(), "{name}: {} clear rows", clear.len());
                for (row, (expected, found)) in clear.into_iter().enumerate() {
                    assert_eq!(argmax(found), argmax(expected), "{name} {variant} {format}, row {row}");
                }
            }
        }
    }
}

/// Sliding layers read the same rows in pages of their own as in pages that hold everything.
#[test]
fn pages_of_their_own_change_no_bit() {
    for name in NAMES {
        let Fixture { source, goldens, .. } = fixture(name);
        let prompt: Vec<u32> = ids(&goldens["prompts"][1]["ids"]).repeat(3);
        for window in [8, 100] {
            let (_dir, source) = with_window(&source, window);
            let config = DecoderConfig::load(&source).unwrap();
            let weights = Weights::open(&source).unwrap();
            let (l, h, d) = (config.layers, config.kv_heads, config.head_dim);
            let all = |layout| {
                let kernels = Kernels::chosen().unwrap();
                let options = RunnerOptions {
                    layout,
                    rotations: None,
                    context: 256,
                    kv_memory: KvMemory::Bytes(64 << 20),
                    prefill_chunk: 64,
                };
                let backend = CpuBackend::new(kernels, 2, Mode::Bf16).unwrap();
                let mut runner = Runner::load(backend, &config, &weights, options, |_| {}).unwrap();
                [1, 77, 256].map(|chunk| bits(&all_logits(&mut runner, &prompt, chunk)))
            };
            let (windows, order) = (Windows::unlimited(), CodeLayout::CpuTile);
            let together = all(CacheLayout::new(KvFormat::Bf16, l, h, d, windows, order).unwrap());
            let apart = all(config.cache_layout(KvFormat::Bf16, windows, order).unwrap());
            assert!(together[1..].iter().chain(&apart).all(|bits| *bits == together[0]), "{name} {window}");
        }
    }
}

/// A step holds the pages of its chunk, the time between two steps what the layout says.
#[test]
fn a_sequence_holds_what_the_layout_counts() {
    let (_folder, model) = sliding_model(Family::Gemma3, 100);
    for format in [KvFormat::Bf16, KvFormat::OSCAR2] {
        let setup = Setup { format, windows: Windows::new(64, 128).unwrap(), ..Setup::default() };
        let mut runner = Setup { context: 2048, ..setup }.runner(&model);
        let (mut sequence, mut output) = (Sequence::new(), StepOutput::default());
        for chunk in [1, 63, 200, 7, 513, 1, 1, 64, 150] {
            let tokens: Vec<u32> = (0..chunk).map(|i| (i * 31 % 6000) as u32 + 3).collect();
            let request = StepRequest { sequence: &mut sequence, tokens: &tokens, logits: Logits::None };
            runner.step(&mut [request], &mut output).unwrap();
            let layout = runner.layout();
            assert_eq!(runner.usage().bytes, layout.sequence_bytes(sequence.len()), "{format} {chunk}");
            let last = layout.sliding_blocks(sequence.len());
            assert_eq!(runner.usage().sliding_pages, last.len());
            assert!(last.len() <= 3, "a window of 100 tokens");
        }
        drop(sequence);
        assert_eq!(runner.usage().bytes, 0);
    }
}

/// A model gets the groups of its own layers or one group for all, nothing else.
#[test]
fn other_groups_than_the_models_are_refused() {
    let (_folder, model) = sliding_model(Family::GptOss, 100);
    let (config, weights) = (DecoderConfig::load(&model).unwrap(), Weights::open(&model).unwrap());
    let (l, h, d) = (config.layers, config.kv_heads, config.head_dim);
    let plain =
        || CacheLayout::new(KvFormat::Bf16, l, h, d, Windows::unlimited(), CodeLayout::CpuTile).unwrap();
    let sliding = config.sliding.as_ref().unwrap().layers.clone();
    let others: Vec<usize> = (0..l).filter(|layer| !sliding.contains(layer)).collect();
    for (window, layers, works) in [(100, &sliding, true), (99, &sliding, false), (100, &others, false)] {
        let layout = plain().with_sliding_layers(window, layers).unwrap();
        let kv_memory = KvMemory::Bytes(1 << 20);
        let options = RunnerOptions { layout, rotations: None, context: 64, kv_memory, prefill_chunk: 64 };
        let backend = CpuBackend::new(Kernels::chosen().unwrap(), 1, Mode::Bf16).unwrap();
        let loaded = Runner::load(backend, &config, &weights, options, |_| {}).map(|_| ());
        let error = loaded.err().map(|error| error.to_string()).unwrap_or_default();
        assert_eq!(error.contains("sliding layers"), !works, "{window}: {error}");
    }
}

/// Random weights of the published shapes, in small: for benchmarks.
#[test]
fn random_models_of_the_shapes_run() {
    for name in ["gpt-oss-20b", "gemma-3-4b"] {
        let published = shapes::shape(name).unwrap();
        let sliding = published.sliding.clone().map(|sliding| SlidingLayers { layers: vec![0], ..sliding });
        let small = DecoderConfig {
            hidden_size: 64,
            intermediate_size: 64,
            layers: 2,
            vocab_size: 64,
            moe: published.moe.clone().map(|moe| MoeConfig { width: 32, ..moe }),
            sliding,
            ..published
        };
        let layout = small.cache_layout(KvFormat::OSCAR2, Windows::default(), CodeLayout::Logical).unwrap();
        let rotations = RotationSet::hadamard(2, small.kv_heads, small.head_dim).unwrap();
        let kv_memory = KvMemory::Sequences { count: 1, tokens: 400 };
        let rotations = Some(&rotations);
        let options = RunnerOptions { layout, rotations, context: 400, kv_memory, prefill_chunk: 64 };
        let backend = CpuBackend::new(Kernels::chosen().unwrap(), 2, Mode::Bf16).unwrap();
        let mut runner = Runner::random(backend, &small, WeightFormat::Bf16, 0.0, options).unwrap();
        let tokens: Vec<u32> = (0..400).map(|i| i * 7 % 64).collect();
        let logits = all_logits(&mut runner, &tokens, 64);
        assert!(logits.iter().all(|logit| logit.is_finite()), "{name}");
    }
}

/// A continuation of stored pages answers as a cold run does.
#[test]
fn a_prefix_gives_the_same_logits_to_the_bit() {
    for name in NAMES {
        let Fixture { source, goldens, .. } = fixture(name);
        let prompt = ids(&goldens["prompts"][1]["ids"]);
        for format in [KvFormat::Bf16, KvFormat::OSCAR2] {
            let best = Variant::ALL.into_iter().rfind(|v| v.is_available()).unwrap();
            let mut runner = runner(&source, best, Mode::Bf16, format).unwrap();
            assert!(fork_equals_a_cold_run(&mut runner, &prompt), "{name} {format}");
        }
    }
}

#[test]
fn eviction_is_refused_by_name() {
    for name in NAMES {
        let source = fixture(name).source;
        let mut runner = runner(&source, Variant::Scalar, Mode::Bf16, KvFormat::OSCAR2).unwrap();
        let (evict, budget) = (Evict::SnapKv, "256".parse().unwrap());
        let policy = Policy { evict, budget, heads: Eviction::Scorer(evict).default_split() };
        let message = RowCap::new(&runner, policy, EVICT_BLOCK).unwrap_err();
        assert!(message.contains("sliding windows or attention sinks"), "{message}");
        let error = runner.derive(&Sequence::new(), 64, Vec::new()).err().unwrap().to_string();
        assert!(error.contains("sliding windows or attention sinks"), "{error}");
    }
}
