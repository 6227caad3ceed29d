//! Models with sliding windows and attention sinks: what goldens on short windows do not show.

use crate::families::{Fixture, fixture, largest_difference, runner, runner_with};
use crate::support::{all_logits, greedy};
use oscar_backend::argmax;
use oscar_codec::{HeadRotations, KvFormat, RotationSet, Windows};
use oscar_engine::{EVICT_BLOCK, Eviction, RowCap};
use oscar_kernels_cpu::Variant;
use oscar_kernels_cpu::backend::Mode;
use oscar_models::ModelSource;
use oscar_runner::{Logits, Sequence, StepOutput, StepRequest};
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
        let config = oscar_models::DecoderConfig::load(&source).unwrap();
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

/// Windows that reach beyond the recent tokens: sliding layers read codes, and drop the sink. Fast
/// kernels choose the reference's greedy tokens, except where its two best are within rounding.
#[test]
fn sliding_layers_read_codes_as_the_scalar_kernels_do() {
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

/// A continuation of stored pages answers as a cold run does.
#[test]
fn a_prefix_gives_the_same_logits_to_the_bit() {
    for name in NAMES {
        let Fixture { source, goldens, .. } = fixture(name);
        let prompt = ids(&goldens["prompts"][1]["ids"]);
        for format in [KvFormat::Bf16, KvFormat::OSCAR2] {
            let best = Variant::ALL.into_iter().rfind(|v| v.is_available()).unwrap();
            let mut runner = runner(&source, best, Mode::Bf16, format).unwrap();
            let cold = all_logits(&mut runner, &prompt, prompt.len());
            let mut sequence = Sequence::forkable(&runner);
            let mut output = StepOutput::default();
            runner.prefill(&mut sequence, &prompt, &mut output, |_| {}).unwrap();
            let mut warm = runner.fork(&sequence, 64).unwrap();
            let request = StepRequest { sequence: &mut warm, tokens: &prompt[64..], logits: Logits::All };
            runner.step(&mut [request], &mut output).unwrap();
            let vocab = runner.config().vocab_size;
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert!(bits(&output.logits) == bits(&cold[64 * vocab..]), "{name} {format}");
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
