//! Mixtures of experts that are damaged, or as large as published ones: one clear error, before any
//! memory is spent.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use oscar_models::tiny::fp8::{Twin, write_twin};
use oscar_models::tiny::{WriteOptions, tiny_config, write_random_model};
use oscar_models::{DecoderConfig, Family, ModelSource, Weights, required_tensors};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

/// A tiny FP8 model with experts, whose tensors `change` alters.
fn damaged(
    change: impl FnOnce(&mut BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>),
) -> (tempfile::TempDir, ModelSource) {
    let (plain, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_random_model(plain.path(), &tiny_config(Family::Glm4Moe), WriteOptions::default(), 5).unwrap();
    write_twin(plain.path(), dir.path(), Twin::Blocks).unwrap();
    let path = dir.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: BTreeMap<_, _> = file
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    let source = ModelSource::Dir(dir.path().to_owned());
    (dir, source)
}

fn refusal(source: &ModelSource) -> String {
    let config = DecoderConfig::load(source).unwrap();
    Weights::open(source).unwrap().check(&config).unwrap_err().to_string()
}

const SCALE: &str = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv";

#[test]
fn an_expert_without_its_scale_is_named() {
    let (_dir, source) = damaged(|tensors| {
        tensors.remove(SCALE).unwrap();
    });
    let message = refusal(&source);
    assert!(message.contains("experts.3.up_proj.weight is FP8 without its scales"), "{message}");
}

#[test]
fn scales_that_are_no_numbers_are_named() {
    let (_dir, source) = damaged(|tensors| {
        tensors.get_mut(SCALE).unwrap().2[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    let message = refusal(&source);
    assert!(message.contains(SCALE) && message.contains("one of them is NaN"), "{message}");
}

#[test]
fn a_missing_expert_and_a_short_router_are_named() {
    let (_dir, source) = damaged(|tensors| {
        tensors.remove("model.layers.1.mlp.experts.4.down_proj.weight").unwrap();
        let router = tensors.get_mut("model.layers.1.mlp.gate.weight").unwrap();
        router.1[0] = 4;
        router.2.truncate(4 * 64 * 2);
    });
    let message = refusal(&source);
    assert!(message.contains("experts.4.down_proj.weight is missing"), "{message}");
    assert!(message.contains("mlp.gate.weight is [4, 64], the configuration needs [5, 64]"), "{message}");
}

#[test]
fn tensors_of_no_use_are_listed_once() {
    let (_dir, source) = damaged(|tensors| {
        let norm = tensors["model.norm.weight"].clone();
        for name in ["model.layers.2.enorm.weight", "model.layers.2.hnorm.weight", "model.visual.x"] {
            tensors.insert(name.to_owned(), norm.clone());
        }
        tensors.insert("model.layers.1.mlp.experts.0.up_proj.input_scale".to_owned(), norm);
    });
    let config = DecoderConfig::load(&source).unwrap();
    let weights = Weights::open(&source).unwrap();
    weights.check(&config).unwrap();
    let ignored = weights.ignored(&config);
    assert_eq!(ignored, ["*.input_scale", "layer 2 (multi-token prediction): 2", "the vision tower"]);
}

/// `config.json` of MiniMax-M2 with this many layers, and its weights as one sparse file: names and
/// sizes, no data.
fn write_minimax(dir: &Path, layers: usize) -> DecoderConfig {
    let config_json = serde_json::json!({
        "architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 128, "hidden_size": 3072,
        "intermediate_size": 1536, "max_position_embeddings": 196_608, "num_attention_heads": 48,
        "num_experts_per_tok": 8, "num_hidden_layers": layers, "num_key_value_heads": 8,
        "num_local_experts": 256, "rms_norm_eps": 1e-06, "rope_theta": 5_000_000, "rotary_dim": 64,
        "vocab_size": 200_064,
        "quantization_config": {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]}
    });
    fs::write(dir.join("config.json"), config_json.to_string()).unwrap();
    let config = DecoderConfig::from_json(config_json.to_string().as_bytes()).unwrap();
    let (mut header, mut at) = (serde_json::Map::new(), 0u64);
    let mut put = |name: &str, dtype: &str, size: u64, shape: &[usize]| {
        let end = at + size * shape.iter().product::<usize>() as u64;
        header.insert(
            name.to_owned(),
            serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]}),
        );
        at = end;
    };
    for tensor in required_tensors(&config, &oscar_models::TensorNames::PREFIXED) {
        if tensor.name.contains(".experts.") {
            let scales = [tensor.shape[0].div_ceil(128), tensor.shape[1].div_ceil(128)];
            put(&tensor.name, "F8_E4M3", 1, &tensor.shape);
            put(&tensor.name.replace(".weight", ".weight_scale_inv"), "F32", 4, &scales);
        } else {
            put(&tensor.name, "BF16", 2, &tensor.shape);
        }
    }
    let json = serde_json::to_vec(&header).unwrap();
    let path = dir.join("model.safetensors");
    let mut head = (json.len() as u64).to_le_bytes().to_vec();
    head.extend(json);
    fs::write(&path, &head).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(head.len() as u64 + at).unwrap();
    config
}

/// 230 GB in 95,000 tensors: opened and identified by headers and a few pages.
#[test]
fn a_checkpoint_of_230_gb_is_identified_without_reading_it() {
    let dir = tempfile::tempdir().unwrap();
    write_minimax(dir.path(), 62);
    let began = std::time::Instant::now();
    let weights = Weights::open(&ModelSource::Dir(dir.path().to_owned())).unwrap();
    assert!(weights.tensor_names().count() > 95_000 && weights.total_bytes() > 225_000_000_000);
    let opened = began.elapsed();
    assert_eq!(weights.fingerprint().len(), 64);
    eprintln!("opened in {opened:?}, identified in {:?}", began.elapsed() - opened);
}

#[test]
fn a_large_checkpoint_is_checked_without_reading_it() {
    let dir = tempfile::tempdir().unwrap();
    let config = write_minimax(dir.path(), 2);
    let source = ModelSource::Dir(dir.path().to_owned());
    let weights = Weights::open(&source).unwrap();
    weights.check(&config).unwrap();
    assert!(weights.ignored(&config).is_empty());
    // One layer more than the file has: one error that counts the hundreds of missing names.
    let deeper = DecoderConfig { layers: 3, ..config };
    let message = weights.check(&deeper).unwrap_err().to_string();
    assert!(message.contains("more (") && message.lines().count() < 20, "{message}");

    // A shard that is cut short.
    let path = dir.path().join("model.safetensors");
    let length = fs::metadata(&path).unwrap().len();
    drop(weights);
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length - 1).unwrap();
    let message = Weights::open(&source).unwrap_err().to_string();
    assert!(message.contains("cut short"), "{message}");
}
