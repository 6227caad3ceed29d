//! Models that must load.

use std::fs;
use std::path::{Path, PathBuf};

use oscar_models::tiny::{WriteOptions, tiny_config, write_random_model};
use oscar_models::{
    DecoderConfig, Family, GenerationConfig, ModelSource, MoeConfig, Projection, QkNorm, RopeConfig,
    RopeScaling, WeightDtype, Weights,
};
use proptest::prelude::*;

fn written(config: &DecoderConfig, options: WriteOptions, seed: u64) -> (tempfile::TempDir, ModelSource) {
    let dir = tempfile::tempdir().unwrap();
    write_random_model(dir.path(), config, options, seed).unwrap();
    let source = ModelSource::Dir(dir.path().to_owned());
    (dir, source)
}

fn shipped_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/oscar-15m")
}

#[test]
fn every_family_dtype_and_layout_loads() {
    for family in Family::ALL {
        for dtype in [WeightDtype::Bf16, WeightDtype::F16, WeightDtype::F32] {
            for (shards, prefixed) in [(1, true), (3, true), (1, false)] {
                let config = DecoderConfig { dtype: Some(dtype), ..tiny_config(family) };
                let (_dir, source) = written(&config, WriteOptions { shards, prefixed }, 7);
                assert_eq!(DecoderConfig::load(&source).unwrap(), config);
                let weights = Weights::open(&source).unwrap();
                weights.check(&config).unwrap();
                assert_eq!(weights.total_bytes(), weights.parameter_count() * dtype.size() as u64);

                let name = weights.names().weight(1, Projection::Output);
                let tensor = weights.tensor(&name).unwrap();
                assert_eq!((tensor.dtype, tensor.shape), (dtype, &[64, 128][..]));
                let values = tensor.to_f32_vec();
                let variance = values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32;
                assert!((variance * 128.0 - 1.0).abs() < 0.1, "variance times inputs: {}", variance * 128.0);
            }
        }
    }
}

#[test]
fn layout_changes_neither_values_nor_fingerprint() {
    let config = tiny_config(Family::Llama);
    let (_a, whole) = written(&config, WriteOptions::default(), 1);
    let (_b, sharded) = written(&config, WriteOptions { shards: 4, prefixed: true }, 1);
    let (_c, bare) = written(&config, WriteOptions { shards: 1, prefixed: false }, 1);
    let (_d, other) = written(&config, WriteOptions::default(), 2);
    let open = |source: &ModelSource| Weights::open(source).unwrap();
    let key = |weights: &Weights| {
        let name = weights.names().weight(0, Projection::Key);
        weights.tensor(&name).unwrap().bytes.to_vec()
    };
    assert_eq!(open(&whole).fingerprint(), open(&sharded).fingerprint());
    assert_ne!(open(&whole).fingerprint(), open(&other).fingerprint());
    assert_eq!(key(&open(&whole)), key(&open(&bare)));
    assert_ne!(key(&open(&whole)), key(&open(&other)));
}

#[test]
fn one_changed_weight_changes_the_fingerprint() {
    let (dir, source) = written(&tiny_config(Family::Qwen2), WriteOptions::default(), 3);
    let before = Weights::open(&source).unwrap().fingerprint();
    let path = dir.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    // Replaced, not edited in place: the rule for files that may be mapped.
    fs::remove_file(&path).unwrap();
    fs::write(&path, bytes).unwrap();
    assert_ne!(before, Weights::open(&source).unwrap().fingerprint());
}

#[test]
fn the_shipped_model_loads_from_disk_and_from_the_binary() {
    static FILES: &[(&str, &[u8])] = &[
        ("config.json", include_bytes!("../../../../models/oscar-15m/config.json")),
        ("generation_config.json", include_bytes!("../../../../models/oscar-15m/generation_config.json")),
        ("model.safetensors", include_bytes!("../../../../models/oscar-15m/model.safetensors")),
    ];
    let disk = ModelSource::resolve(shipped_model().to_str().unwrap()).unwrap();
    let embedded = ModelSource::Embedded(FILES);
    let mut fingerprints = Vec::new();
    for source in [disk, embedded] {
        let config = DecoderConfig::load(&source).unwrap();
        assert_eq!((config.family, config.layers, config.head_dim), (Family::Qwen3, 6, 128));
        assert!(config.qk_norm == QkNorm::EachHead && config.tie_word_embeddings);
        let weights = Weights::open(&source).unwrap();
        weights.check(&config).unwrap();
        assert_eq!(weights.total_bytes(), 2 * weights.parameter_count());
        let generation = GenerationConfig::load(&source).unwrap();
        assert_eq!(generation.stop_token_ids(&config), [2, 0]);
        fingerprints.push(weights.fingerprint());
    }
    assert_eq!(fingerprints[0], fingerprints[1]);
}

#[test]
fn a_model_without_generation_config_recommends_nothing() {
    let (dir, source) = written(&tiny_config(Family::Mistral), WriteOptions::default(), 3);
    fs::remove_file(dir.path().join("generation_config.json")).unwrap();
    let generation = GenerationConfig::load(&source).unwrap();
    assert_eq!(generation, GenerationConfig::default());
    assert_eq!(generation.stop_token_ids(&tiny_config(Family::Mistral)), [2]);
}

#[test]
fn settings_a_family_cannot_express_are_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let config = DecoderConfig { qk_norm: QkNorm::EachHead, ..tiny_config(Family::Llama) };
    let error = write_random_model(dir.path(), &config, WriteOptions::default(), 0).unwrap_err();
    assert!(error.to_string().contains("random llama model"), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

fn scalings() -> impl Strategy<Value = RopeScaling> {
    prop_oneof![
        Just(RopeScaling::None),
        (1.0..16.0).prop_map(|factor| RopeScaling::Linear { factor }),
        (1.0..16.0, 0.5..2.0, 3.0..8.0, 1usize..9000).prop_map(|(factor, low, high, original)| {
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            }
        }),
        (1.0..16.0, 1usize..9000, prop::option::of(0.5..2.0), any::<bool>()).prop_map(
            |(factor, original, attention_factor, truncate)| RopeScaling::Yarn {
                factor,
                original_max_position_embeddings: original,
                beta_fast: 32.0,
                beta_slow: 1.0,
                attention_factor,
                mscale: None,
                mscale_all_dim: None,
                truncate,
            }
        ),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// What is written is what is read, for any sizes; and its tensors always fit it.
    #[test]
    fn random_configurations_round_trip(
        family in prop::sample::select(Family::ALL.to_vec()),
        hidden in 1usize..40,
        intermediate in 1usize..40,
        kv_heads in 1usize..4,
        group in 1usize..4,
        half_head in 1usize..9,
        layers in 1usize..4,
        vocab in 1usize..50,
        tied in any::<bool>(),
        scaling in scalings(),
        shards in 1usize..5,
        prefixed in any::<bool>(),
    ) {
        let base = tiny_config(family);
        // One layer at least sees the whole context, and one has a delta net if the family has them.
        let layers = layers + usize::from(base.sliding.is_some() || base.delta.is_some());
        let expert_width = match family {
            Family::Mixtral | Family::MiniMaxM2 | Family::GptOss => intermediate,
            _ => base.moe.as_ref().map_or(0, |moe| moe.width),
        };
        let dense = |moe: &MoeConfig| moe.dense_layers.iter().copied().filter(|&l| l < layers).collect();
        let config = DecoderConfig {
            rotary_dim: base.rotary_dim.map(|_| 2).filter(|_| half_head > 1),
            moe: base.moe.clone().map(|moe| {
                MoeConfig { width: expert_width, dense_layers: dense(&moe), ..moe }
            }),
            embedding_scale: if family == Family::Gemma3 { (hidden as f32).sqrt() } else { 1.0 },
            hidden_size: hidden,
            intermediate_size: intermediate,
            layers,
            query_heads: kv_heads * group,
            // Latent attention has one KV head, as wide as its rows.
            kv_heads: if base.latent.is_some() { 1 } else { kv_heads },
            head_dim: base.latent.as_ref().map_or(2 * half_head, |latent| latent.row()),
            vocab_size: vocab,
            tie_word_embeddings: tied,
            rope: RopeConfig { theta: 50_000.0, scaling },
            ..base
        };
        let (_dir, source) = written(&config, WriteOptions { shards, prefixed }, 11);
        prop_assert_eq!(&DecoderConfig::load(&source).unwrap(), &config);
        Weights::open(&source).unwrap().check(&config).unwrap();
    }
}
