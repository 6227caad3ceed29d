//! The processor beside a device that is the processor itself: answers must be the processor's, bit
//! for bit, wherever experts are.

use oscar_backend::{
    Backend, Benchmarks, ExpertFormat, ExpertId, ExpertsShape, Gate, RouterRule, RouterScores,
};
use oscar_codec::{CodeLayout, KvFormat, Windows};
use oscar_hybrid::HybridBackend;
use oscar_kernels_cpu::Kernels;
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_models::tiny::fp8::{Twin, write_twin};
use oscar_models::tiny::{WriteOptions, tiny_config, write_random_model};
use oscar_models::{DecoderConfig, Family, ModelSource, Weights};
use oscar_runner::{KvMemory, Logits, Runner, RunnerOptions, Sequence, StepOutput, StepRequest};
use std::path::Path;

fn cpu(mode: Mode) -> CpuBackend {
    CpuBackend::new(Kernels::chosen().unwrap(), 2, mode).unwrap()
}

/// The processor beside itself, with the experts of the last `layers` layers on the second one.
fn hybrid(mode: Mode, layers: usize) -> HybridBackend<CpuBackend> {
    let hybrid = HybridBackend::with_host(cpu(mode), cpu(mode));
    hybrid.place(layers);
    hybrid
}

/// Bits of all logits of a prompt in chunks, and of steps of two sequences.
fn logits<B: Backend>(backend: B, folder: &Path) -> Vec<u32> {
    let source = ModelSource::Dir(folder.to_owned());
    let (config, weights) = (DecoderConfig::load(&source).unwrap(), Weights::open(&source).unwrap());
    let layout = config.cache_layout(KvFormat::Bf16, Windows::default(), CodeLayout::Logical).unwrap();
    let options = RunnerOptions {
        layout,
        rotations: None,
        context: 256,
        kv_memory: KvMemory::Sequences { count: 2, tokens: 256 },
        prefill_chunk: 40,
    };
    let mut runner = Runner::load(backend, &config, &weights, options, |_| {}).unwrap();
    let (mut bits, mut out) = (Vec::new(), StepOutput::default());
    let mut sequences = [Sequence::new(), Sequence::new()];
    for (index, sequence) in sequences.iter_mut().enumerate() {
        let tokens: Vec<u32> = (0..60).map(|i| (i * 37 + 11 * index as u32) % 128).collect();
        for tokens in tokens.chunks(40) {
            let request = StepRequest { sequence, tokens, logits: Logits::All };
            runner.step(&mut [request], &mut out).unwrap();
            bits.extend(out.logits.iter().map(|logit| logit.to_bits()));
        }
    }
    for token in 0..4 {
        let tokens = [token];
        let mut requests: Vec<_> = sequences
            .iter_mut()
            .map(|sequence| StepRequest { sequence, tokens: &tokens, logits: Logits::Last })
            .collect();
        runner.step(&mut requests, &mut out).unwrap();
        bits.extend(out.logits.iter().map(|logit| logit.to_bits()));
    }
    bits
}

fn folder(family: Family) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let config = DecoderConfig { layers: 4, ..tiny_config(family) };
    write_random_model(dir.path(), &config, WriteOptions::default(), 7).unwrap();
    dir
}

/// Compares all placements with the processor alone.
fn compare(what: &str, folder: &Path) {
    for mode in [Mode::Bf16, Mode::F32] {
        let alone = logits(cpu(mode), folder);
        assert!(alone.len() > 128 * 120, "{what}");
        for layers in [0, 1, 2, usize::MAX] {
            assert!(logits(hybrid(mode, layers), folder) == alone, "{what}, {mode:?}, {layers} layers");
        }
    }
}

#[test]
fn every_family_has_the_same_logits_wherever_experts_are() {
    for family in [
        Family::Qwen3Moe,
        Family::Mixtral,
        Family::Glm4Moe,
        Family::MiniMaxM2,
        Family::GptOss,
        Family::DeepseekV3,
        Family::Qwen3,
    ] {
        compare(family.architecture(), folder(family).path());
    }
}

#[test]
fn codes_give_the_same_logits_wherever_experts_are() {
    let (plain, dir) = (folder(Family::Glm4Moe), tempfile::tempdir().unwrap());
    write_twin(plain.path(), dir.path(), Twin::Blocks).unwrap();
    compare("FP8", dir.path());
}

fn shape(router: &[f32], following: usize, format: ExpertFormat) -> ExpertsShape<'_> {
    let rule =
        RouterRule { chosen: 2, scores: RouterScores::Softmax, normalize: true, factor: 1.0, groups: None };
    ExpertsShape {
        following,
        experts: 4,
        hidden: 256,
        width: 128,
        shared_width: 128,
        format,
        rule,
        gate: Gate::Silu,
        router,
        correction: None,
        router_bias: None,
        shared_gate: None,
    }
}

#[test]
fn the_last_layers_are_on_the_host() {
    let router = vec![0.5; 4 * 256];
    let on_host = |backend: &HybridBackend<CpuBackend>| -> Vec<bool> {
        let experts = |following| backend.experts(&shape(&router, following, ExpertFormat::Bf16)).unwrap();
        (0..4).map(|following| experts(following).is_host()).collect()
    };
    assert_eq!(on_host(&hybrid(Mode::Bf16, 2)), [true, true, false, false]);
    assert_eq!(on_host(&hybrid(Mode::Bf16, 0)), [false; 4]);
    assert_eq!(on_host(&hybrid(Mode::Bf16, usize::MAX)), [true; 4]);
    assert_eq!(on_host(&HybridBackend::alone(cpu(Mode::Bf16))), [false; 4]);
}

#[test]
fn an_undecided_number_of_layers_is_an_error_that_says_what_to_do() {
    let backend = HybridBackend::with_host(cpu(Mode::Bf16), cpu(Mode::Bf16));
    let error = backend.experts(&shape(&[0.5; 4 * 256], 0, ExpertFormat::Bf16)).err().unwrap().to_string();
    assert!(error.contains("--cpu-experts"), "{error}");
    assert!(backend.describe().contains("some layers") && backend.host_layers().is_none());
    backend.place(3);
    assert!(backend.describe().contains("the last 3 layers"), "{}", backend.describe());
}

#[test]
fn random_experts_fill_a_layer_in_every_format() {
    let router: Vec<f32> = (0..4 * 256).map(|i| (i * 7 % 13) as f32 / 13.0 - 0.5).collect();
    let ids: Vec<ExpertId> = (0..4).map(ExpertId::Routed).chain([ExpertId::Shared]).collect();
    let cpu = cpu(Mode::Bf16);
    for format in
        [ExpertFormat::Bf16, ExpertFormat::Fp8Blocks, ExpertFormat::Fp8Channels, ExpertFormat::Mxfp4]
    {
        let experts = cpu.random_experts(&shape(&router, 0, format), &ids, 3).unwrap();
        let mut x: Vec<f32> = (0..3 * 256).map(|i| (i * 31 % 17) as f32 / 17.0 - 0.5).collect();
        let before = x.clone();
        cpu.add_experts(&experts, (&[1.0; 256], 1e-6), &mut x).unwrap();
        let change = x.iter().zip(&before).map(|(x, b)| f64::from(x - b).powi(2)).sum::<f64>() / 768.0;
        assert!((0.01..10.0).contains(&change), "{format:?}: mean square {change}");
    }
}
