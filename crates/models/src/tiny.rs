//! Writes complete random models of any supported family, small enough for tests of every crate.
//!
//! Invariant: the same configuration, options and seed give the same files on every machine, and a
//! tensor's values depend only on the seed and its name, so sharding or dropping the prefix does
//! not change the model.

mod delta;
pub mod fp8;
pub mod large;

use std::fs;
use std::path::Path;

use half::{bf16, f16};
use oscar_backend::{ExpertGroups, Gate, MXFP4_GROUP, RouterRule, RouterScores};
use oscar_codec::random::SplitMix64;
use safetensors::tensor::{Dtype, TensorView as StoredTensor};
use serde_json::{Value, json};

use crate::config::{DecoderConfig, Family, MoeConfig, QkNorm, SlidingLayers};
use crate::error::LoadError;
use crate::fused::is_scales;
use crate::latent::LatentConfig;
use crate::rope::{RopeConfig, RopeScaling};
use crate::tensor::WeightDtype;
use crate::tensor_names::{ExpertNames, RequiredTensor, TensorNames, required_tensors};
use crate::weights::{INDEX_FILE, SINGLE_FILE};

/// A configuration that exercises its family's particulars and runs in milliseconds.
pub fn tiny_config(family: Family) -> DecoderConfig {
    let latent = tiny_latent(family);
    DecoderConfig {
        family,
        hidden_size: 64,
        intermediate_size: 96,
        layers: 2,
        query_heads: 4,
        kv_heads: if latent.is_some() { 1 } else { 2 },
        // Wider than an even share of the hidden size, as in the small Qwen3 models.
        head_dim: latent.as_ref().map_or(32, LatentConfig::row),
        vocab_size: 128,
        rms_norm_eps: 1e-6,
        rope: RopeConfig::plain(10_000.0),
        rotary_dim: match family {
            Family::Glm4Moe | Family::MiniMaxM2 => Some(16),
            _ => delta::has_delta(family).then_some(8),
        },
        qk_norm: match family {
            Family::Qwen3 | Family::Qwen3Moe | Family::Glm4Moe | Family::Gemma3 => QkNorm::EachHead,
            Family::Qwen3Next | Family::Qwen3_5 | Family::Qwen3_5Moe => QkNorm::EachHead,
            Family::MiniMaxM2 => QkNorm::AllHeads,
            Family::Qwen2 | Family::Llama | Family::Mistral | Family::Mixtral | Family::GptOss => {
                QkNorm::None
            }
            Family::DeepseekV3 | Family::Glm4MoeLite => QkNorm::None,
        },
        latent,
        delta: delta::tiny_delta(family),
        output_gate: delta::has_delta(family),
        qkv_bias: matches!(family, Family::Qwen2 | Family::Glm4Moe | Family::GptOss),
        output_bias: family == Family::GptOss,
        mlp_bias: false,
        moe: tiny_moe(family),
        tie_word_embeddings: matches!(family, Family::Qwen3 | Family::Qwen2 | Family::Gemma3),
        max_position_embeddings: 2048,
        sliding_window: None,
        sliding: matches!(family, Family::Gemma3 | Family::GptOss).then(|| SlidingLayers {
            window: 24,
            layers: vec![0],
            rope: (family == Family::Gemma3).then(|| RopeConfig::plain(5_000.0)),
        }),
        attention_scale: (family == Family::Gemma3).then_some(0.2),
        attention_sinks: family == Family::GptOss,
        norm_offset: if family == Family::Gemma3 || delta::has_delta(family) { 1.0 } else { 0.0 },
        result_norms: family == Family::Gemma3,
        embedding_scale: if family == Family::Gemma3 { 8.0 } else { 1.0 },
        gate: match family {
            Family::Gemma3 => Gate::GeluTanh,
            Family::GptOss => Gate::Clamped,
            _ => Gate::Silu,
        },
        eos_token_ids: vec![2],
        bos_token_id: Some(1),
        dtype: Some(WeightDtype::Bf16),
        fp8_weights: false,
    }
}

/// The latent attention of [`tiny_config`]. One of the families has a latent of queries too.
fn tiny_latent(family: Family) -> Option<LatentConfig> {
    let query_rank = match family {
        Family::DeepseekV3 => Some(40),
        Family::Glm4MoeLite => None,
        _ => return None,
    };
    Some(LatentConfig {
        query_rank,
        rank: 48,
        key: 24,
        rotary: 16,
        value: 32,
        interleaved: true,
        norm_eps: 1e-6,
    })
}

/// The mixture of experts of [`tiny_config`].
fn tiny_moe(family: Family) -> Option<MoeConfig> {
    let softmax =
        matches!(family, Family::Qwen3Moe | Family::Mixtral | Family::GptOss) || delta::has_delta(family);
    let (width, shared_width, dense_layers, names) = match family {
        Family::Qwen3Moe => (40, 0, vec![1], ExpertNames::Mlp),
        Family::Glm4Moe | Family::DeepseekV3 | Family::Glm4MoeLite => (48, 48, vec![0], ExpertNames::Mlp),
        // Their `intermediate_size` is the width of an expert.
        Family::Mixtral | Family::MiniMaxM2 => (96, 0, Vec::new(), ExpertNames::BlockSparse),
        Family::GptOss => (96, 0, Vec::new(), ExpertNames::Fused),
        Family::Qwen3Next => (40, 24, Vec::new(), ExpertNames::Qwen),
        Family::Qwen3_5Moe => (40, 24, Vec::new(), ExpertNames::QwenFused),
        Family::Qwen3_5 => return None,
        Family::Qwen3 | Family::Qwen2 | Family::Llama | Family::Mistral | Family::Gemma3 => return None,
    };
    let experts = if family == Family::DeepseekV3 { 6 } else { 5 };
    let plain = MoeConfig::new(experts, 2, width, names);
    Some(MoeConfig {
        shared_width,
        shared_gate: delta::has_delta(family),
        rule: RouterRule {
            scores: if softmax { RouterScores::Softmax } else { RouterScores::Sigmoid },
            factor: if family == Family::Glm4Moe { 2.5 } else { 1.0 },
            groups: (family == Family::DeepseekV3).then_some(ExpertGroups { count: 3, kept: 2 }),
            ..plain.rule
        },
        correction: !softmax,
        biases: family == Family::GptOss,
        dense_layers,
        ..plain
    })
}

/// How the files are laid out.
#[derive(Debug, Clone, Copy)]
pub struct WriteOptions {
    /// More than one writes an index and that many files.
    pub shards: usize,
    /// Name tensors `model.…`; without it the checkpoint looks like a saved bare decoder.
    pub prefixed: bool,
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self { shards: 1, prefixed: true }
    }
}

/// Writes `config.json`, `generation_config.json` and the weights (in `config.dtype`, BF16 if it is
/// `None`) into `dir`, which is created. There is no tokenizer: callers that need text bring their
/// own.
pub fn write_random_model(
    dir: &Path,
    config: &DecoderConfig,
    options: WriteOptions,
    seed: u64,
) -> Result<(), LoadError> {
    let unwritable =
        |problem: String| LoadError::UnwritableModel { family: config.family.model_type(), problem };
    config.validate()?;
    let config_json = config_json(config).to_string();
    if DecoderConfig::from_json(config_json.as_bytes())? != *config {
        return Err(unwritable("its config.json cannot express this combination of settings".to_owned()));
    }
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.join(name);
        fs::write(&path, bytes).map_err(|error| LoadError::io(path, error))
    };
    fs::create_dir_all(dir).map_err(|error| LoadError::io(dir, error))?;
    write("config.json", config_json.as_bytes())?;
    let generation = json!({"do_sample": false, "eos_token_id": config.eos_token_ids});
    write("generation_config.json", generation.to_string().as_bytes())?;

    let dtype = config.dtype.unwrap_or(WeightDtype::Bf16);
    let tensors = random_tensors(config, options, dtype, seed);
    let serialize = |part: &[RandomTensor]| {
        let views: Result<Vec<_>, _> = part
            .iter()
            .map(|tensor| {
                StoredTensor::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes)
                    .map(|view| (tensor.name.as_str(), view))
            })
            .collect();
        views
            .and_then(|views| safetensors::serialize(views, None))
            .map_err(|error| unwritable(error.to_string()))
    };
    if options.shards <= 1 {
        return write(SINGLE_FILE, &serialize(&tensors)?);
    }
    let total_size: usize = tensors.iter().map(|tensor| tensor.bytes.len()).sum();
    let parts: Vec<&[RandomTensor]> = tensors.chunks(tensors.len().div_ceil(options.shards)).collect();
    let mut weight_map = serde_json::Map::new();
    for (index, part) in parts.iter().enumerate() {
        let shard = format!("model-{:05}-of-{:05}.safetensors", index + 1, parts.len());
        write(&shard, &serialize(part)?)?;
        weight_map.extend(part.iter().map(|tensor| (tensor.name.clone(), Value::from(shard.clone()))));
    }
    let index = json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
    write(INDEX_FILE, index.to_string().as_bytes())
}

/// The `config.json` of a configuration, in its family's words.
fn config_json(config: &DecoderConfig) -> Value {
    let mut json = json!({
        "architectures": [config.family.architecture()],
        "model_type": config.family.model_type(),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": rope_scaling_json(&config.rope.scaling),
        "hidden_act": "silu",
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "sliding_window": config.sliding_window,
        "eos_token_id": config.eos_token_ids,
        "bos_token_id": config.bos_token_id,
        "torch_dtype": config.dtype.map(WeightDtype::torch_name),
    });
    if matches!(config.family, Family::Qwen3 | Family::Qwen2) {
        json["use_sliding_window"] = Value::from(config.sliding_window.is_some());
    }
    if config.moe.as_ref().is_some_and(|moe| moe.mxfp4) {
        json["quantization_config"] = json!({"quant_method": "mxfp4"});
    }
    let moe = config.moe.as_ref().map(|moe| moe_json(config, moe));
    let sliding = config.sliding.as_ref().map(|sliding| sliding_json(config, sliding));
    let latent = config.latent.as_ref().map(|latent| latent_json(config, latent));
    let delta = config.delta.as_ref().map(|delta| delta::delta_json(config, delta));
    for fields in [moe, sliding, latent, delta].into_iter().flatten() {
        for (field, value) in fields.as_object().into_iter().flatten() {
            json[field] = value.clone();
        }
    }
    json
}

/// The fields of a mixture of experts, in its family's words.
fn moe_json(config: &DecoderConfig, moe: &MoeConfig) -> Value {
    let normed = config.qk_norm != QkNorm::None;
    match config.family {
        Family::Qwen3Moe => json!({
            "num_experts": moe.experts,
            "num_experts_per_tok": moe.rule.chosen,
            "moe_intermediate_size": moe.width,
            "norm_topk_prob": moe.rule.normalize,
            "mlp_only_layers": moe.dense_layers,
        }),
        Family::Glm4Moe | Family::DeepseekV3 | Family::Glm4MoeLite => json!({
            "n_routed_experts": moe.experts,
            "num_experts_per_tok": moe.rule.chosen,
            "moe_intermediate_size": moe.width,
            "n_shared_experts": moe.shared_width / moe.width.max(1),
            "norm_topk_prob": moe.rule.normalize,
            "routed_scaling_factor": moe.rule.factor,
            "first_k_dense_replace": moe.dense_layers.len(),
            "n_group": moe.rule.groups.map_or(1, |groups| groups.count),
            "topk_group": moe.rule.groups.map_or(1, |groups| groups.kept),
            "use_qk_norm": normed,
            "attention_bias": config.qkv_bias,
            "partial_rotary_factor": match &config.latent {
                Some(_) => 1.0,
                None => config.rotary_width() as f64 / config.head_dim as f64,
            },
        }),
        _ => json!({
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.rule.chosen,
            "use_qk_norm": normed,
            "use_routing_bias": moe.correction,
            "rotary_dim": config.rotary_dim,
        }),
    }
}

/// The fields of latent attention. Files state a key and value head for each query head.
fn latent_json(config: &DecoderConfig, latent: &LatentConfig) -> Value {
    json!({
        "num_key_value_heads": config.query_heads,
        "head_dim": latent.rotary,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank,
        "qk_nope_head_dim": latent.key,
        "qk_rope_head_dim": latent.rotary,
        "v_head_dim": latent.value,
        "rope_interleave": latent.interleaved,
    })
}

/// The fields of sliding layers, in their family's words.
fn sliding_json(config: &DecoderConfig, sliding: &SlidingLayers) -> Value {
    let kind = |layer| if config.window_of(layer).is_some() { "sliding_attention" } else { "full_attention" };
    let scale = f64::from(config.attention_scale.unwrap_or(1.0));
    json!({
        "sliding_window": sliding.window,
        "layer_types": (0..config.layers).map(kind).collect::<Vec<_>>(),
        "rope_local_base_freq": sliding.rope.as_ref().map(|rope| rope.theta),
        "query_pre_attn_scalar": 1.0 / (scale * scale),
    })
}

fn rope_scaling_json(scaling: &RopeScaling) -> Value {
    match scaling {
        RopeScaling::None => Value::Null,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_position_embeddings,
        }),
        RopeScaling::Yarn {
            factor,
            original_max_position_embeddings,
            beta_fast,
            beta_slow,
            attention_factor,
            mscale,
            mscale_all_dim,
            truncate,
        } => json!({
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original_max_position_embeddings,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "attention_factor": attention_factor,
            "mscale": mscale,
            "mscale_all_dim": mscale_all_dim,
            "truncate": truncate,
        }),
    }
}

struct RandomTensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Matrices keep the variance of their inputs, norms stay near one, biases small: activations have
/// the size of a trained model's, so that numerical tests mean something.
fn random_tensors(
    config: &DecoderConfig,
    options: WriteOptions,
    dtype: WeightDtype,
    seed: u64,
) -> Vec<RandomTensor> {
    let names = if options.prefixed { TensorNames::PREFIXED } else { TensorNames::BARE };
    // Values are drawn under the bare name, so that the prefix does not change them.
    let seeds =
        required_tensors(config, &TensorNames::BARE).into_iter().map(|tensor| name_hash(&tensor.name));
    required_tensors(config, &names)
        .into_iter()
        .zip(seeds)
        .map(|(tensor, name_seed)| {
            let mut random = SplitMix64::new(seed ^ name_seed);
            if tensor.packed {
                let bytes = mxfp4_bytes(&tensor, &mut random);
                return RandomTensor { name: tensor.name, dtype: Dtype::U8, shape: tensor.shape, bytes };
            }
            let (center, spread) = match tensor.shape[..] {
                _ if tensor.name.ends_with("bias") || tensor.name.ends_with("sinks") => (0.0, 0.2),
                // The experts of gpt-oss have their inputs before their outputs.
                [_, inputs] | [_, inputs, _] => (0.0, (3.0 / inputs as f32).sqrt()),
                // This norm has no offset.
                _ if tensor.name.ends_with("linear_attn.norm.weight") => (1.0, 0.2),
                _ => (1.0 - config.norm_offset, 0.2),
            };
            let elements: usize = tensor.shape.iter().product();
            let mut bytes = Vec::with_capacity(elements * dtype.size());
            for _ in 0..elements {
                let value = center + spread * random.symmetric();
                match dtype {
                    WeightDtype::Bf16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
                    WeightDtype::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
                    WeightDtype::F32 => bytes.extend(value.to_le_bytes()),
                }
            }
            RandomTensor { name: tensor.name, dtype: dtype.to_safetensors(), shape: tensor.shape, bytes }
        })
        .collect()
}

/// Random codes of MXFP4, or scales that keep the variance of a matrix's inputs.
fn mxfp4_bytes(tensor: &RequiredTensor, random: &mut SplitMix64) -> Vec<u8> {
    let count: usize = tensor.shape.iter().product();
    let [.., groups] = tensor.shape[..] else { return Vec::new() };
    if !is_scales(&tensor.name) {
        return (0..count).map(|_| random.below(256) as u8).collect();
    }
    // The root mean square of a random code is 2.9.
    let shrink = (2.9 * ((groups * MXFP4_GROUP) as f32).sqrt()).log2() as u8;
    (0..count).map(|_| 127 - shrink - random.below(2) as u8).collect()
}

/// FNV-1a, 64 bits.
fn name_hash(name: &str) -> u64 {
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
