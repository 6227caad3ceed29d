//! Multi-head latent attention: what goldens do not show.

use crate::families::{Fixture, fixture, runner};
use crate::support::{Setup, all_logits, bits, fork_equals_a_cold_run, tiny_model};
use oscar_backend::{WeightFormat, argmax};
use oscar_codec::{CodeLayout, KvFormat, Windows};
use oscar_engine::{EVICT_BLOCK, Eviction, RowCap};
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_kernels_cpu::{Kernels, Variant};
use oscar_models::{DecoderConfig, Family, MoeConfig, shapes};
use oscar_runner::{KvMemory, Runner, RunnerOptions, Sequence, StepOutput};
use oscar_views::{Evict, Policy};
use serde_json::Value;

const NAMES: [&str; 3] = ["deepseek_v3", "deepseek_v3_fp8", "glm4_moe_lite"];

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

/// A BF16 cache rounds latents to eight bits of mantissa: logits move a little, and a few routers choose
/// another expert.
#[test]
fn a_bf16_cache_stays_near_an_exact_one() {
    for name in NAMES {
        let Fixture { source, goldens, .. } = fixture(name);
        let prompt = ids(&goldens["prompts"][1]["ids"]);
        for variant in Variant::ALL {
            let logits = |format| {
                let runner = runner(&source, variant, Mode::F32, format);
                runner.map(|mut runner| (all_logits(&mut runner, &prompt, 64), runner.config().vocab_size))
            };
            let (Some((exact, vocab)), Some((rounded, _))) = (logits(KvFormat::F32), logits(KvFormat::Bf16))
            else {
                continue;
            };
            let differences = exact.iter().zip(&rounded).map(|(e, r)| f64::from((e - r).abs()));
            let mean = differences.sum::<f64>() / exact.len() as f64;
            assert!(mean < 0.02, "{name} {variant}: {mean}");
            let rows = exact.chunks(vocab).zip(rounded.chunks(vocab));
            let same = rows.filter(|(exact, rounded)| argmax(exact) == argmax(rounded)).count();
            assert!(same * 20 >= prompt.len() * 19, "{name} {variant}: {same} of {}", prompt.len());
        }
    }
}

/// A continuation of stored pages answers as a cold run does.
#[test]
fn a_prefix_gives_the_same_logits_to_the_bit() {
    for name in NAMES {
        let Fixture { source, goldens, .. } = fixture(name);
        let prompt = ids(&goldens["prompts"][1]["ids"]);
        for variant in Variant::ALL {
            let Some(mut runner) = runner(&source, variant, Mode::Bf16, KvFormat::Bf16) else { continue };
            assert!(fork_equals_a_cold_run(&mut runner, &prompt), "{name} {variant}");
        }
    }
}

/// One row a token and layer: keys and values are not stored twice.
#[test]
fn a_sequence_holds_one_row_a_token_and_layer() {
    let (_folder, model) = tiny_model(Family::DeepseekV3);
    let mut runner = Setup { context: 2048, ..Setup::default() }.runner(&model);
    let (mut sequence, mut output) = (Sequence::new(), StepOutput::default());
    let tokens: Vec<u32> = (0..192).map(|i| i * 31 % 6000 + 3).collect();
    runner.prefill(&mut sequence, &tokens, &mut output, |_| {}).unwrap();
    let row = runner.config().latent.as_ref().unwrap().row();
    assert_eq!(runner.usage().bytes, 192 * 2 * row * 2, "tokens, layers, channels, bytes of BF16");
    drop(sequence);
    assert_eq!(runner.usage().bytes, 0);
}

#[test]
fn eviction_ranks_and_quantized_caches_are_refused_by_name() {
    let (_folder, model) = tiny_model(Family::Glm4MoeLite);
    let mut runner = Setup { context: 256, ..Setup::default() }.runner(&model);
    let (evict, budget) = (Evict::SnapKv, "256".parse().unwrap());
    let policy = Policy { evict, budget, heads: Eviction::Scorer(evict).default_split() };
    let message = RowCap::new(&runner, policy, EVICT_BLOCK).unwrap_err();
    assert!(message.contains("latent attention (MLA)"), "{message}");
    let error = runner.derive(&Sequence::new(), 64, Vec::new()).err().unwrap().to_string();
    assert!(error.contains("latent attention (MLA)"), "{error}");
    let config = runner.config();
    for format in [KvFormat::OSCAR, KvFormat::OSCAR2, "int8".parse().unwrap(), "fp8".parse().unwrap()] {
        let error = config.cache_layout(format, Windows::default(), CodeLayout::CpuTile).unwrap_err();
        assert!(error.to_string().contains(&format!("--kv {format} is not offered")), "{error}");
    }
    let error = oscar_models::Shard::new(0, 2, config).unwrap_err().to_string();
    assert!(error.contains("latent attention (MLA)"), "{error}");
}

/// Random weights of the published shapes, in small: for benchmarks.
#[test]
fn random_models_of_the_shapes_run() {
    for name in ["glm-4.7-flash", "deepseek-v3"] {
        let published = shapes::shape(name).unwrap();
        let small = DecoderConfig {
            hidden_size: 64,
            intermediate_size: 64,
            layers: 2,
            query_heads: 3,
            vocab_size: 64,
            moe: published.moe.clone().map(|moe| MoeConfig { width: 32, shared_width: 32, ..moe }),
            ..published
        };
        let layout = small.cache_layout(KvFormat::Bf16, Windows::default(), CodeLayout::Logical).unwrap();
        let kv_memory = KvMemory::Sequences { count: 1, tokens: 200 };
        let options = RunnerOptions { layout, rotations: None, context: 200, kv_memory, prefill_chunk: 64 };
        let backend = CpuBackend::new(Kernels::chosen().unwrap(), 2, Mode::Bf16).unwrap();
        let mut runner = Runner::random(backend, &small, WeightFormat::Bf16, 0.0, options).unwrap();
        let tokens: Vec<u32> = (0..200).map(|i| i * 7 % 64).collect();
        let logits = all_logits(&mut runner, &tokens, 64);
        assert!(logits.iter().all(|logit| logit.is_finite()), "{name}");
        assert!(bits(&all_logits(&mut runner, &tokens, 1)) == bits(&logits), "{name}: one by one");
    }
}
