//! Gemma 3, gpt-oss and latent attention: nested files, and checkpoints that are damaged.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use oscar_models::tiny::{WriteOptions, tiny_config, write_random_model};
use oscar_models::{DecoderConfig, Family, ModelSource, Projection, Weights};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;
type Damage = fn(&mut Tensors);

/// The model in `from` with changed tensors and another `config.json`, in a folder of its own.
fn changed(
    from: &Path,
    config: impl FnOnce(Value) -> Value,
    change: impl FnOnce(&mut Tensors),
) -> (tempfile::TempDir, ModelSource) {
    let dir = tempfile::tempdir().unwrap();
    let text = fs::read(from.join("config.json")).unwrap();
    fs::write(dir.path().join("config.json"), config(serde_json::from_slice(&text).unwrap()).to_string())
        .unwrap();
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Tensors = file
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    fs::write(dir.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    let source = ModelSource::Dir(dir.path().to_owned());
    (dir, source)
}

#[test]
fn a_text_model_beside_a_vision_tower_is_the_same_model() {
    let plain = tempfile::tempdir().unwrap();
    let config = tiny_config(Family::Gemma3);
    write_random_model(plain.path(), &config, WriteOptions::default(), 3).unwrap();
    let original = Weights::open(&ModelSource::Dir(plain.path().to_owned())).unwrap();
    for prefix in ["language_model.model.", "model.language_model."] {
        let nested = |mut text: Value| {
            text.as_object_mut().unwrap().remove("architectures");
            json!({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
                   "text_config": text, "vision_config": {"hidden_size": 8}})
        };
        let (_dir, source) = changed(plain.path(), nested, |tensors| {
            let norm = tensors["model.norm.weight"].clone();
            *tensors = std::mem::take(tensors)
                .into_iter()
                .map(|(name, tensor)| (name.replacen("model.", prefix, 1), tensor))
                .collect();
            for name in ["vision_tower.a.weight", "vision_tower.b.weight", "multi_modal_projector.mm.weight"]
            {
                tensors.insert(name.to_owned(), norm.clone());
            }
        });
        assert_eq!(DecoderConfig::load(&source).unwrap(), config);
        let weights = Weights::open(&source).unwrap();
        weights.check(&config).unwrap();
        assert_eq!(weights.ignored(&config), ["the vision tower: 3"]);
        let value = |weights: &Weights| {
            weights.tensor(&weights.names().weight(1, Projection::Value)).unwrap().bytes.to_vec()
        };
        assert_eq!(value(&weights), value(&original));
    }
}

fn refusal(source: &ModelSource) -> String {
    let config = DecoderConfig::load(source).unwrap();
    Weights::open(source).unwrap().check(&config).unwrap_err().to_string()
}

fn mxfp4() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/fixtures/families/gpt_oss_mxfp4")
}

#[test]
fn damaged_tensors_are_named() {
    const BLOCKS: &str = "model.layers.1.mlp.experts.down_proj_blocks";
    let damages: [(Damage, &str); 4] = [
        (
            |tensors| {
                tensors.remove("model.layers.0.self_attn.sinks").unwrap();
            },
            "model.layers.0.self_attn.sinks is missing",
        ),
        (
            |tensors| {
                let blocks = tensors.get_mut(BLOCKS).unwrap();
                blocks.1 = vec![8, 128, 1, 8];
                blocks.2.truncate(8 * 128 * 8);
            },
            "down_proj_blocks is [8, 128, 1, 8], the configuration needs [8, 128, 1, 16]",
        ),
        (
            |tensors| {
                let blocks = tensors.get_mut(BLOCKS).unwrap();
                (blocks.0, blocks.1) = (Dtype::F16, vec![8, 128, 1, 8]);
            },
            "down_proj_blocks is F16; codes and scales of MXFP4 are U8",
        ),
        (
            |tensors| {
                tensors.remove("model.layers.1.mlp.experts.gate_up_proj_scales").unwrap();
            },
            "gate_up_proj_scales is missing",
        ),
    ];
    for (damage, says) in damages {
        let (_dir, source) = changed(&mxfp4(), |config| config, damage);
        let message = refusal(&source);
        assert!(message.contains(says), "{message}");
    }
    // MXFP4 tensors that the configuration does not announce.
    let plain = |mut config: Value| {
        config.as_object_mut().unwrap().remove("quantization_config");
        config
    };
    let (_dir, source) = changed(&mxfp4(), plain, |_| {});
    assert!(refusal(&source).contains("mlp.experts.gate_up_proj is missing"));
}

/// Latent attention: missing and misshapen tensors are listed before anything is loaded, and further
/// layers are left out.
#[test]
fn damaged_latents_are_named() {
    let folder = |name: &str| mxfp4().parent().unwrap().join(name);
    let damages: [(Damage, &str); 4] = [
        (
            |tensors| {
                tensors.remove("model.layers.1.self_attn.kv_b_proj.weight").unwrap();
            },
            "model.layers.1.self_attn.kv_b_proj.weight is missing",
        ),
        (
            |tensors| {
                tensors.remove("model.layers.0.self_attn.kv_a_layernorm.weight").unwrap();
            },
            "model.layers.0.self_attn.kv_a_layernorm.weight is missing",
        ),
        (
            |tensors| {
                let down = tensors.get_mut("model.layers.0.self_attn.kv_a_proj_with_mqa.weight").unwrap();
                down.1[0] = 64;
                down.2.truncate(64 * 128);
            },
            "kv_a_proj_with_mqa.weight is [64, 128], the configuration needs [80, 128]",
        ),
        (
            |tensors| {
                tensors.remove("model.layers.1.self_attn.kv_b_proj.weight_scale_inv").unwrap();
            },
            "kv_b_proj.weight is FP8 without its scales",
        ),
    ];
    for (damage, says) in damages {
        let (_dir, source) = changed(&folder("deepseek_v3_fp8"), |config| config, damage);
        let message = refusal(&source);
        assert!(message.contains(says), "{message}");
    }
    // Queries without a latent of their own need another matrix.
    let direct = |mut config: Value| {
        config["q_lora_rank"] = Value::Null;
        config
    };
    let (_dir, source) = changed(&folder("deepseek_v3"), direct, |_| {});
    assert!(refusal(&source).contains("model.layers.0.self_attn.q_proj.weight is missing"));

    let source = ModelSource::Dir(folder("deepseek_v3"));
    let (config, weights) = (DecoderConfig::load(&source).unwrap(), Weights::open(&source).unwrap());
    weights.check(&config).unwrap();
    assert_eq!(weights.ignored(&config), ["layer 2 (multi-token prediction): 7"]);
}

#[test]
fn parameters_in_codes_are_counted() {
    let count = |name: &str| {
        let folder = mxfp4().parent().unwrap().join(name);
        Weights::open(&ModelSource::Dir(folder)).unwrap().parameter_count()
    };
    assert_eq!(count("gpt_oss_mxfp4"), count("gpt_oss"));
}
