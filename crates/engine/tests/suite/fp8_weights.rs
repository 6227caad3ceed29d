//! A model with FP8 weights answers as the model of the weights they stand for, to the bit.

use crate::support::{Setup, all_logits, bits};
use oscar_backend::WeightFormat;
use oscar_codec::{CacheLayout, CodeLayout, KvFormat, Windows};
use oscar_kernels_cpu::Kernels;
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_models::tiny::fp8::{Twin, write_twin};
use oscar_models::tiny::{WriteOptions, tiny_config, write_random_model};
use oscar_models::{DecoderConfig, Family, ModelSource, Weights};
use oscar_runner::{KvMemory, Runner, RunnerOptions};

/// Two models: one whose stacked matrices have seams on blocks, one of odd sizes with biases.
fn configs() -> [DecoderConfig; 2] {
    let aligned = DecoderConfig {
        hidden_size: 256,
        intermediate_size: 384,
        head_dim: 64,
        query_heads: 4,
        kv_heads: 2,
        ..tiny_config(Family::Qwen3)
    };
    let odd = DecoderConfig { hidden_size: 136, intermediate_size: 200, ..tiny_config(Family::Qwen2) };
    [aligned, odd]
}

struct Twins {
    dir: tempfile::TempDir,
}

impl Twins {
    fn of(config: &DecoderConfig) -> Self {
        let dir = tempfile::tempdir().unwrap();
        write_random_model(&dir.path().join("plain"), config, WriteOptions::default(), 11).unwrap();
        Self { dir }
    }

    fn source(&self, twin: Twin) -> ModelSource {
        let to = self.dir.path().join(format!("{twin:?}"));
        write_twin(&self.dir.path().join("plain"), &to, twin).unwrap();
        ModelSource::Dir(to)
    }
}

#[test]
fn fp8_answers_as_what_it_expands_to() {
    let prompt: Vec<u32> = (0..150).map(|i| i * 37 % 126).collect();
    for config in configs() {
        let twins = Twins::of(&config);
        let setup = |format, precision| {
            let windows = Windows::new(16, 32).unwrap();
            Setup { format, windows, precision, context: 512, kv_memory: 64 << 20, ..Setup::default() }
        };
        let logits = |twin, format, precision| {
            bits(&all_logits(&mut setup(format, precision).runner(&twins.source(twin)), &prompt, 40))
        };
        let same = |coded, plain, format, precision| {
            let (coded_logits, plain_logits) =
                (logits(coded, format, precision), logits(plain, format, precision));
            assert!(coded_logits == plain_logits, "{coded:?} and {plain:?}, {format}, {precision:?}");
        };
        same(Twin::Blocks, Twin::BlocksInBf16, KvFormat::Bf16, Mode::Bf16);
        same(Twin::Blocks, Twin::BlocksInF32, KvFormat::Bf16, Mode::F32);
        same(Twin::PerTensor, Twin::PerTensorInF32, KvFormat::Bf16, Mode::Bf16);
        // Rotations are folded into the weights before anything is rounded.
        same(Twin::Blocks, Twin::BlocksInF32, KvFormat::OSCAR2, Mode::Bf16);
        let (blocks, one) = (Twin::Blocks, Twin::PerTensor);
        assert!(logits(blocks, KvFormat::Bf16, Mode::Bf16) != logits(one, KvFormat::Bf16, Mode::Bf16));
    }
}

#[test]
fn weights_quantized_while_loading_are_those_of_the_fp8_checkpoint() {
    let prompt: Vec<u32> = (0..60).map(|i| i * 37 % 126).collect();
    let config = &configs()[0];
    let twins = Twins::of(config);
    let run = |source: &ModelSource, wanted: Option<WeightFormat>| {
        let mut weights = Weights::open(source).unwrap();
        if let Some(format) = wanted {
            weights = weights.delivered_as(format);
        }
        let config = DecoderConfig::load(source).unwrap();
        let (l, h, d) = (config.layers, config.kv_heads, config.head_dim);
        let windows = Windows::default();
        let layout = CacheLayout::new(KvFormat::Bf16, l, h, d, windows, CodeLayout::CpuTile).unwrap();
        let kv_memory = KvMemory::Bytes(64 << 20);
        let options = RunnerOptions { layout, rotations: None, context: 256, kv_memory, prefill_chunk: 64 };
        let backend = CpuBackend::new(Kernels::chosen().unwrap(), 2, Mode::Bf16).unwrap();
        let mut runner = Runner::load(backend, &config, &weights, options, |_| {}).unwrap();
        (bits(&all_logits(&mut runner, &prompt, 60)), runner.weight_bytes(1))
    };
    let plain = twins.source(Twin::Unquantized);
    let (quantized, bytes) = run(&plain, Some(WeightFormat::Fp8));
    let stored = twins.source(Twin::Blocks);
    assert!(quantized == run(&stored, None).0);
    assert!(quantized != run(&plain, None).0);
    assert!(run(&stored, Some(WeightFormat::Bf16)).0 == quantized);
    // The CPU expands: two bytes a weight of the matrices, the head included.
    let parameters = config.matrix_parameters();
    assert_eq!(bytes, 2 * parameters);
}
