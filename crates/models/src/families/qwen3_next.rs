//! Qwen3-Next and Qwen3.5 (also 3.6): most layers are gated delta nets, every fourth has attention with
//! an output gate. Of Qwen3.5 the text model is read, dense or with experts; the vision tower and the
//! layers for multi-token prediction are passed over.

use oscar_backend::{DeltaShape, RouterRule};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{CommonFields, refuse_unless, text_fields};
use crate::config::{DecoderConfig, Family, MOST_LAYERS, MoeConfig, QkNorm};
use crate::delta::DeltaConfig;
use crate::error::LoadError;
use crate::tensor_names::ExpertNames;

pub(crate) const NAMES: (&str, &str) = ("Qwen3NextForCausalLM", "qwen3_next");
pub(crate) const NAMES_3_5: (&str, &str) = ("Qwen3_5ForCausalLM", "qwen3_5_text");
pub(crate) const NAMES_3_5_MOE: (&str, &str) = ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text");
/// Models with a vision tower: their `text_config` is read.
pub(crate) const WRAPPER_3_5: (&str, &str) = ("Qwen3_5ForConditionalGeneration", "qwen3_5");
pub(crate) const WRAPPER_3_5_MOE: (&str, &str) = ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe");

#[derive(Debug, Deserialize)]
struct Qwen3NextConfig {
    #[serde(flatten)]
    common: CommonFields,
    linear_conv_kernel_dim: usize,
    linear_key_head_dim: usize,
    linear_value_head_dim: usize,
    linear_num_key_heads: usize,
    linear_num_value_heads: usize,
    /// Every layer of this number has attention, unless `layer_types` lists them one by one.
    full_attention_interval: usize,
    layer_types: Option<Vec<String>>,
    attn_output_gate: bool,
    attention_bias: bool,
    // Of models with experts.
    num_experts: usize,
    num_experts_per_tok: usize,
    moe_intermediate_size: usize,
    shared_expert_intermediate_size: usize,
    norm_topk_prob: bool,
    decoder_sparse_step: usize,
    mlp_only_layers: Vec<usize>,
}

/// The defaults of the configuration classes.
fn defaults(family: Family) -> Value {
    let mut fields = json!({
        "head_dim": 256, "intermediate_size": 5632, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4,
        "attn_output_gate": true, "attention_bias": false, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": true,
        "decoder_sparse_step": 1, "mlp_only_layers": []
    });
    if family == Family::Qwen3_5Moe {
        (fields["num_experts"], fields["num_experts_per_tok"]) = (json!(256), json!(8));
    }
    fields
}

/// Reads a `config.json` of any of the classes. `fp8`: the file holds FP8 weights, whose experts are
/// tensors of their own in every family.
pub(crate) fn read(family: Family, file: Value, fp8: bool) -> Result<DecoderConfig, LoadError> {
    let text = text_fields(file, &defaults(family))?;
    let config: Qwen3NextConfig = serde_json::from_value(Value::Object(text))
        .map_err(|source| LoadError::Json { file: "config.json".to_owned(), source })?;
    config.lower(family, fp8)
}

impl Qwen3NextConfig {
    fn lower(self, family: Family, fp8: bool) -> Result<DecoderConfig, LoadError> {
        refuse_unless(self.attn_output_gate, "attn_output_gate", self.attn_output_gate, "true")?;
        refuse_unless(!self.attention_bias, "attention_bias", self.attention_bias, "false")?;
        let layers = self.common.num_hidden_layers;
        let (delta, moe) = (self.delta(family, layers)?, self.moe(family, layers, fp8)?);
        Ok(DecoderConfig {
            qk_norm: QkNorm::EachHead,
            delta: Some(delta),
            output_gate: true,
            norm_offset: 1.0,
            moe,
            ..self.common.lower(family)?
        })
    }

    fn delta(&self, family: Family, layers: usize) -> Result<DeltaConfig, LoadError> {
        if self.full_attention_interval == 0 {
            return Err(LoadError::config_field("full_attention_interval", "is 0; it must be at least 1"));
        }
        let layers = match &self.layer_types {
            // More layers are refused by `validate`, but not before they are listed.
            None => (0..layers.min(MOST_LAYERS))
                .filter(|layer| !(layer + 1).is_multiple_of(self.full_attention_interval))
                .collect(),
            Some(kinds) if kinds.len() != layers => {
                let problem = format!("has {} entries for {layers} layers", kinds.len());
                return Err(LoadError::config_field("layer_types", problem));
            }
            Some(kinds) => {
                let known = |kind: &str| matches!(kind, "linear_attention" | "full_attention");
                if let Some(kind) = kinds.iter().find(|kind| !known(kind)) {
                    let reads = "linear_attention or full_attention";
                    refuse_unless(false, "layer_types", format!("`{kind}`"), reads)?;
                }
                (0..layers).filter(|&layer| kinds[layer] == "linear_attention").collect()
            }
        };
        let shape = DeltaShape {
            key_heads: self.linear_num_key_heads,
            value_heads: self.linear_num_value_heads,
            key_dim: self.linear_key_head_dim,
            value_dim: self.linear_value_head_dim,
            taps: self.linear_conv_kernel_dim,
        };
        Ok(DeltaConfig { shape, layers, joined: family == Family::Qwen3Next })
    }

    fn moe(&self, family: Family, layers: usize, fp8: bool) -> Result<Option<MoeConfig>, LoadError> {
        let next = family == Family::Qwen3Next;
        if family == Family::Qwen3_5 || next && self.num_experts == 0 {
            return Ok(None);
        }
        if self.decoder_sparse_step == 0 {
            return Err(LoadError::config_field("decoder_sparse_step", "is 0; it must be at least 1"));
        }
        let dense = |layer: &usize| {
            next && (self.mlp_only_layers.contains(layer)
                || !(layer + 1).is_multiple_of(self.decoder_sparse_step))
        };
        let names = if next || fp8 { ExpertNames::Qwen } else { ExpertNames::QwenFused };
        let (experts, chosen, width) =
            (self.num_experts, self.num_experts_per_tok, self.moe_intermediate_size);
        let plain = MoeConfig::new(experts, chosen, width, names);
        Ok(Some(MoeConfig {
            shared_width: self.shared_expert_intermediate_size,
            shared_gate: self.shared_expert_intermediate_size > 0,
            // Qwen3.5 always normalizes.
            rule: RouterRule { normalize: self.norm_topk_prob || !next, ..plain.rule },
            dense_layers: (0..layers.min(MOST_LAYERS)).filter(dense).collect(),
            ..plain
        }))
    }
}

#[cfg(test)]
mod tests {
    use crate::families::test_support::{parse, with};
    use crate::{ExpertNames, Family};
    use serde_json::{Value, json};

    /// The published values of Qwen/Qwen3-Next-80B-A3B-Instruct.
    fn qwen3_next() -> Value {
        json!({
            "architectures": ["Qwen3NextForCausalLM"], "attention_bias": false, "bos_token_id": 151643,
            "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256,
            "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
            "mlp_only_layers": [], "model_type": "qwen3_next", "moe_intermediate_size": 512,
            "norm_topk_prob": true, "num_attention_heads": 16, "num_experts": 512,
            "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
            "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": null,
            "rope_theta": 10000000, "shared_expert_intermediate_size": 512, "tie_word_embeddings": false,
            "torch_dtype": "bfloat16", "use_sliding_window": false, "vocab_size": 151936
        })
    }

    /// A dense Qwen3.5 beside its vision tower.
    fn qwen3_5() -> Value {
        json!({
            "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
            "tie_word_embeddings": true, "vision_config": {"depth": 24},
            "text_config": {
                "model_type": "qwen3_5_text", "attn_output_gate": true, "dtype": "bfloat16",
                "eos_token_id": 248044, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2560,
                "intermediate_size": 9216,
                "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
                "max_position_embeddings": 262144, "num_attention_heads": 16, "num_hidden_layers": 4,
                "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "vocab_size": 248320,
                "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10],
                    "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"}
            }
        })
    }

    #[test]
    fn published_config_parses() {
        let config = parse(&qwen3_next()).unwrap();
        assert_eq!((config.rotary_width(), config.head_dim, config.group_size()), (64, 256, 8));
        let (delta, moe) = (config.delta.as_ref().unwrap(), config.moe.as_ref().unwrap());
        assert_eq!((delta.layers.len(), delta.layers[..4].to_vec()), (36, vec![0, 1, 2, 4]));
        assert_eq!((delta.shape.channels(), delta.shape.projected()), (8192, 12352));
        assert_eq!((moe.experts, moe.width, moe.shared_width, moe.shared_gate), (512, 512, 512, true));
        assert!(config.output_gate && delta.joined && config.norm_offset == 1.0);
        // 79.7 billion parameters, 3.6 of them active without the embedding.
        assert!((config.matrix_parameters() as f64 / 1e9 - 79.36).abs() < 0.05);
        assert!((config.active_parameters() as f64 / 1e9 - 3.56).abs() < 0.05);
    }

    #[test]
    fn a_nested_text_model_parses() {
        let config = parse(&qwen3_5()).unwrap();
        assert_eq!((config.family, config.layers, config.rotary_width()), (Family::Qwen3_5, 4, 64));
        assert!(config.moe.is_none() && config.tie_word_embeddings && config.rope.theta == 1e7);
        assert_eq!(config.delta.as_ref().unwrap().layers, [0, 1, 2]);
        let mut moe = with(qwen3_5(), json!({"architectures": ["Qwen3_5MoeForConditionalGeneration"]}));
        moe["text_config"].as_object_mut().unwrap().remove("intermediate_size");
        let config = parse(&moe).unwrap();
        let experts = config.moe.as_ref().unwrap();
        assert_eq!((experts.experts, experts.rule.chosen, experts.names), (256, 8, ExpertNames::QwenFused));
        assert!(!config.has_dense_layers());
    }

    #[test]
    fn hostile_values_are_refused_by_field() {
        for (field, value) in [
            ("linear_num_key_heads", json!(0)),
            ("linear_num_value_heads", json!(24)),
            ("linear_key_head_dim", json!(1u64 << 40)),
            ("linear_conv_kernel_dim", json!(0)),
            ("full_attention_interval", json!(0)),
            ("layer_types", json!(["linear_attention"])),
            ("layer_types", json!(vec!["sliding_attention"; 48])),
            ("layer_types", json!(vec!["linear_attention"; 48])),
            ("layer_types", json!(vec!["full_attention"; 48])),
            ("attn_output_gate", json!(false)),
            ("attention_bias", json!(true)),
            ("num_experts_per_tok", json!(513)),
            ("decoder_sparse_step", json!(0)),
        ] {
            let message = parse(&with(qwen3_next(), json!({field: value}))).unwrap_err().to_string();
            assert!(message.contains(field), "{field}: {message}");
        }
    }
}
