//! Qwen3-MoE: the attention of Qwen3; most layers have experts chosen by softmax.

use oscar_backend::RouterRule;
use serde::Deserialize;

use super::{CommonFields, QwenWindow, number};
use crate::config::{DecoderConfig, Family, MOST_LAYERS, MoeConfig, QkNorm};
use crate::error::LoadError;
use crate::tensor_names::ExpertNames;

pub(crate) const NAMES: (&str, &str) = ("Qwen3MoeForCausalLM", "qwen3_moe");

#[derive(Debug, Deserialize)]
pub(crate) struct Qwen3MoeConfig {
    #[serde(flatten)]
    common: CommonFields,
    #[serde(flatten)]
    window: QwenWindow,
    /// On all four attention projections.
    #[serde(default)]
    attention_bias: bool,
    #[serde(default = "number::<128>")]
    num_experts: usize,
    #[serde(default = "number::<8>")]
    num_experts_per_tok: usize,
    #[serde(default = "number::<768>")]
    moe_intermediate_size: usize,
    /// The class default; published files state `true`.
    #[serde(default)]
    norm_topk_prob: bool,
    /// Every layer whose number, counted from 1, is a multiple has experts.
    #[serde(default = "number::<1>")]
    decoder_sparse_step: usize,
    #[serde(default)]
    mlp_only_layers: Vec<usize>,
}

impl Qwen3MoeConfig {
    pub(crate) fn lower(self) -> Result<DecoderConfig, LoadError> {
        let base = self.common.lower(Family::Qwen3Moe)?;
        if self.decoder_sparse_step == 0 {
            return Err(LoadError::config_field("decoder_sparse_step", "is 0; it must be at least 1"));
        }
        let dense = |layer: &usize| {
            self.mlp_only_layers.contains(layer) || !(layer + 1).is_multiple_of(self.decoder_sparse_step)
        };
        let (experts, chosen, width) =
            (self.num_experts, self.num_experts_per_tok, self.moe_intermediate_size);
        let plain = MoeConfig::new(experts, chosen, width, ExpertNames::Mlp);
        let moe = MoeConfig {
            rule: RouterRule { normalize: self.norm_topk_prob, ..plain.rule },
            dense_layers: (0..base.layers.min(MOST_LAYERS)).filter(dense).collect(),
            ..plain
        };
        Ok(DecoderConfig {
            qk_norm: QkNorm::EachHead,
            qkv_bias: self.attention_bias,
            output_bias: self.attention_bias,
            sliding_window: self.window.active(base.layers),
            moe: Some(moe),
            ..base
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::QkNorm;
    use crate::families::test_support::{parse, with};
    use serde_json::{Value, json};

    /// The published values of Qwen/Qwen3-30B-A3B.
    fn qwen3_30b_a3b() -> Value {
        json!({
            "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "decoder_sparse_step": 1,
            "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
            "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
            "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
            "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": null,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_sliding_window": false,
            "vocab_size": 151936
        })
    }

    #[test]
    fn published_config_parses() {
        let config = parse(&qwen3_30b_a3b()).unwrap();
        let moe = config.moe.as_ref().unwrap();
        assert_eq!((moe.experts, moe.width, moe.rule.chosen, moe.shared_width), (128, 768, 8, 0));
        assert!(moe.rule.normalize && !moe.correction && moe.dense_layers.is_empty());
        assert_eq!((config.qk_norm, config.rotary_dim, config.group_size()), (QkNorm::EachHead, None, 8));
        // 30.5 billion parameters, 3.3 of them active (3.0 without the embedding).
        assert!((config.matrix_parameters() as f64 / 1e9 - 30.22).abs() < 0.02);
        assert!((config.active_parameters() as f64 / 1e9 - 3.04).abs() < 0.02);
    }

    #[test]
    fn layers_are_dense_where_the_file_says() {
        let changed = with(qwen3_30b_a3b(), json!({"mlp_only_layers": [1], "decoder_sparse_step": 2}));
        let config = parse(&changed).unwrap();
        assert!([0, 1, 2].iter().all(|&layer| config.moe_of(layer).is_none()));
        assert!(config.moe_of(3).is_some() && config.has_dense_layers());
        let mut unstated = qwen3_30b_a3b();
        unstated.as_object_mut().unwrap().remove("norm_topk_prob");
        assert!(!parse(&unstated).unwrap().moe.unwrap().rule.normalize);
    }

    #[test]
    fn a_router_with_fewer_experts_than_it_chooses_is_refused() {
        let message = parse(&with(qwen3_30b_a3b(), json!({"num_experts": 4}))).unwrap_err().to_string();
        assert!(message.contains("num_experts_per_tok` is 8, but a layer has 4 experts"), "{message}");
        for (field, value) in [("num_experts", 0), ("moe_intermediate_size", 0), ("decoder_sparse_step", 0)] {
            parse(&with(qwen3_30b_a3b(), json!({field: value}))).unwrap_err();
        }
    }
}
