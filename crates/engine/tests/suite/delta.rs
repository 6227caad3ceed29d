//! Gated delta nets: what goldens do not show.

use crate::client::submit;
use crate::families::{Fixture, fixture, largest_difference, runner, runner_with};
use crate::support::{Setup, all_logits, bits, tiny_model};
use oscar_backend::WeightFormat;
use oscar_codec::{CodeLayout, HeadRotations, KvFormat, RotationSet, Windows};
use oscar_engine::{EVICT_BLOCK, Engine, EngineApi, EngineOptions, Eviction, GenerationParams, RowCap};
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_kernels_cpu::{Kernels, Variant};
use oscar_models::{DecoderConfig, Family, MoeConfig, shapes};
use oscar_runner::{KvMemory, Logits, Runner, RunnerOptions, Sequence, StepOutput, StepRequest};
use oscar_views::{Evict, Policy};
use serde_json::Value;

const NAMES: [&str; 3] = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"];

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

/// The gate behind attention meets values in their own basis, whatever the cache rotates.
#[test]
fn rotated_values_and_centred_keys_change_nothing() {
    for name in NAMES {
        let Fixture { source, goldens, .. } = fixture(name);
        let config = DecoderConfig::load(&source).unwrap();
        let (l, h, d) = (config.cache_layers(), config.kv_heads, config.head_dim);
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
            for prompt in goldens["prompts"].as_array().unwrap() {
                let logits = all_logits(&mut runner, &ids(&prompt["ids"]), 33);
                let difference = largest_difference(prompt, &logits, config.vocab_size);
                assert!(difference < 1e-3, "{name} {variant}: {difference}");
            }
        }
    }
}

/// A sequence keeps the state after its last step that ended with a whole page. A fork there answers as a
/// cold run does, and so does the sequence itself, whose state the fork must not change.
#[test]
fn a_fork_continues_from_a_kept_state_only() {
    let Fixture { source, goldens, .. } = fixture("qwen3_next");
    let prompt = ids(&goldens["prompts"][1]["ids"]);
    for format in [KvFormat::Bf16, KvFormat::OSCAR2] {
        let mut runner = runner(&source, Variant::best(), Mode::Bf16, format).unwrap();
        let vocab = runner.config().vocab_size;
        let cold = all_logits(&mut runner, &prompt, prompt.len());
        let (mut sequence, mut output) = (Sequence::forkable(&runner), StepOutput::default());
        let mut feed = |runner: &mut Runner<CpuBackend>, sequence: &mut Sequence, tokens: &[u32]| {
            let request = StepRequest { sequence, tokens, logits: Logits::All };
            runner.step(&mut [request], &mut output).unwrap();
            bits(&output.logits)
        };
        feed(&mut runner, &mut sequence, &prompt);
        assert!(runner.fork(&sequence, 64).is_none(), "no state was kept at 64");
        drop(sequence);
        let mut sequence = Sequence::forkable(&runner);
        feed(&mut runner, &mut sequence, &prompt[..64]);
        let mut first = runner.fork(&sequence, 64).unwrap();
        feed(&mut runner, &mut first, &prompt[..8]);
        let expected = bits(&cold[64 * vocab..]);
        let mut second = runner.fork(&sequence, 64).unwrap();
        assert!(feed(&mut runner, &mut second, &prompt[64..]) == expected, "{format}: a fork");
        assert!(feed(&mut runner, &mut sequence, &prompt[64..]) == expected, "{format}: the sequence");
        drop((sequence, first, second));
        assert_eq!(runner.usage().bytes, 0);
    }
}

#[test]
fn a_sequence_holds_a_state_and_rows_of_layers_with_attention() {
    let (_folder, model) = tiny_model(Family::Qwen3Next);
    let mut runner = Setup { context: 2048, ..Setup::default() }.runner(&model);
    let tokens: Vec<u32> = (0..192).map(|i| i * 31 % 6000 + 3).collect();
    let (mut sequence, mut output) = (Sequence::new(), StepOutput::default());
    runner.prefill(&mut sequence, &tokens, &mut output, |_| {}).unwrap();
    let config = runner.config();
    let rows = 192 * 2 * config.kv_width() * 2;
    assert_eq!(runner.usage().bytes, rows + config.state_bytes(), "tokens, sides, channels, bytes of BF16");
    assert_eq!((runner.usage().states, runner.layout().sequence_bytes(192)), (1, runner.usage().bytes));
    drop(sequence);
    assert_eq!(runner.usage().bytes, 0);
}

/// The same prompt, its continuations and several choices of it find the state at its end; a cache without
/// room for states, or without prefixes, computes everything and answers alike.
#[test]
fn hits_begin_at_kept_states_and_choices_share_them() {
    let (_folder, model) = tiny_model(Family::Qwen3_5Moe);
    let prompt: Vec<u32> = (0..200).map(|i| i * 37 % 6000 + 3).collect();
    let params =
        |choices, max_tokens| GenerationParams { choices, max_tokens, ..GenerationParams::default() };
    let engine = |prefix_cache| {
        let setup = Setup { context: 1024, chunk: 70, ..Setup::default() };
        let options = EngineOptions { prefix_cache, ..EngineOptions::new("test") };
        Engine::start(setup.runner(&model), options).unwrap()
    };
    let (warm, cold) = (engine(true), engine(false));
    assert!(warm.info().state_bytes > 0 && !warm.info().approximate_hits);
    let ask = |engine, prompt: &[u32], choices| {
        let call = submit(engine, prompt, params(choices, 100)).unwrap();
        let outcome = call.finish(engine, None);
        assert_eq!(outcome.failed, None);
        let first = outcome.answers[&0].tokens.clone();
        assert!(outcome.answers.values().all(|answer| answer.tokens == first), "greedy choices are alike");
        (outcome.cached, first)
    };
    let (found, answer) = ask(&warm, &prompt, 3);
    assert_eq!((found, ask(&cold, &prompt, 1)), (0, (0, answer.clone())));
    assert_eq!(ask(&warm, &prompt, 1), (192, answer.clone()), "the end of the prompt in whole pages");
    // The next turn continues the answer: 299 tokens are stored, 256 of them in whole pages.
    let turn = [&prompt[..], &answer, &[7, 8, 9]].concat();
    let (found, second) = ask(&warm, &turn, 1);
    assert_eq!((found, ask(&cold, &turn, 1)), (256, (0, second)));
    // Other ends after the same beginning: the first keeps a state where it branches off.
    for (token, expected) in [(5, 0), (6, 128), (7, 128)] {
        let other = [&prompt[..150], &[token; 40]].concat();
        assert_eq!(ask(&warm, &other, 1), (expected, ask(&cold, &other, 1).1));
    }
    [warm, cold].iter().for_each(|engine| engine.shutdown());
}

#[test]
fn eviction_and_ranks_are_refused_by_name() {
    let (_folder, model) = tiny_model(Family::Qwen3Next);
    let mut runner = Setup { context: 256, ..Setup::default() }.runner(&model);
    let (evict, budget) = (Evict::SnapKv, "256".parse().unwrap());
    let policy = Policy { evict, budget, heads: Eviction::Scorer(evict).default_split() };
    let message = RowCap::new(&runner, policy, EVICT_BLOCK).unwrap_err();
    assert!(message.contains("gated delta nets"), "{message}");
    let error = runner.derive(&Sequence::new(), 64, Vec::new()).err().unwrap().to_string();
    assert!(error.contains("gated delta nets"), "{error}");
    let error = oscar_models::Shard::new(0, 2, runner.config()).unwrap_err().to_string();
    assert!(error.contains("gated delta nets"), "{error}");
    let features: Vec<String> = runner.config().features().iter().map(ToString::to_string).collect();
    assert_eq!(features, ["gated delta nets", "gated attention", "gated shared experts"]);
}

/// Random weights of the published shapes, in small: for benchmarks.
#[test]
fn random_models_of_the_shapes_run() {
    for name in ["qwen3-next-80b-a3b", "qwen3.5-35b-a3b"] {
        let published = shapes::shape(name).unwrap();
        let small = DecoderConfig {
            hidden_size: 64,
            layers: 4,
            query_heads: 4,
            vocab_size: 64,
            moe: published.moe.clone().map(|moe| MoeConfig {
                experts: 16,
                width: 32,
                shared_width: 32,
                ..moe
            }),
            ..published
        };
        let layout = small.cache_layout(KvFormat::Bf16, Windows::default(), CodeLayout::Logical).unwrap();
        let kv_memory = KvMemory::Sequences { count: 2, tokens: 200 };
        let options = RunnerOptions { layout, rotations: None, context: 200, kv_memory, prefill_chunk: 64 };
        let backend = CpuBackend::new(Kernels::chosen().unwrap(), 2, Mode::Bf16).unwrap();
        let mut runner = Runner::random(backend, &small, WeightFormat::Bf16, 0.0, options).unwrap();
        let tokens: Vec<u32> = (0..40).map(|i| i * 7 % 64).collect();
        let logits = all_logits(&mut runner, &tokens, 32);
        assert!(logits.iter().all(|logit| logit.is_finite()), "{name}");
        assert!(bits(&all_logits(&mut runner, &tokens, 1)) == bits(&logits), "{name}: one by one");
    }
}
