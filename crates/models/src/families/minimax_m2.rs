//! MiniMax-M2, M2.1, M2.5 and M2.7: QK-norm over all heads, part of each head turns, every layer has
//! experts chosen by corrected sigmoids.

use oscar_backend::{RouterRule, RouterScores};
use serde::Deserialize;

use super::{CommonFields, refuse_unless, yes};
use crate::config::{DecoderConfig, Family, MoeConfig, QkNorm};
use crate::error::LoadError;
use crate::tensor_names::ExpertNames;

pub(crate) const NAMES: (&str, &str) = ("MiniMaxM2ForCausalLM", "minimax_m2");

#[derive(Debug, Deserialize)]
pub(crate) struct MiniMaxM2Config {
    /// `intermediate_size` is the width of an expert.
    #[serde(flatten)]
    common: CommonFields,
    num_local_experts: usize,
    num_experts_per_tok: usize,
    #[serde(default = "yes")]
    use_qk_norm: bool,
    qk_norm_type: Option<String>,
    scoring_func: Option<String>,
    #[serde(default = "yes")]
    use_routing_bias: bool,
    #[serde(default)]
    shared_intermediate_size: usize,
    #[serde(default)]
    attn_type_list: Vec<u32>,
}

impl MiniMaxM2Config {
    pub(crate) fn lower(self) -> Result<DecoderConfig, LoadError> {
        let base = self.common.lower(Family::MiniMaxM2)?;
        let scores = self.scoring_func.as_deref().unwrap_or("sigmoid");
        let norm = self.qk_norm_type.as_deref().unwrap_or("per_layer");
        let other = self.attn_type_list.iter().find(|kind| **kind != 1);
        refuse_unless(other.is_none(), "attn_type_list", format!("{other:?}"), "1 (full attention)")?;
        refuse_unless(scores == "sigmoid", "scoring_func", scores, "sigmoid")?;
        refuse_unless(norm == "per_layer", "qk_norm_type", norm, "per_layer")?;
        let shared = self.shared_intermediate_size;
        refuse_unless(shared == 0, "shared_intermediate_size", shared, "0")?;
        let (experts, chosen) = (self.num_local_experts, self.num_experts_per_tok);
        let plain = MoeConfig::new(experts, chosen, base.intermediate_size, ExpertNames::BlockSparse);
        let moe = MoeConfig {
            rule: RouterRule { scores: RouterScores::Sigmoid, ..plain.rule },
            correction: self.use_routing_bias,
            ..plain
        };
        let qk_norm = if self.use_qk_norm { QkNorm::AllHeads } else { QkNorm::None };
        Ok(DecoderConfig { qk_norm, moe: Some(moe), ..base })
    }
}

#[cfg(test)]
mod tests {
    use crate::QkNorm;
    use crate::families::test_support::{parse, with};
    use serde_json::{Value, json};

    /// The values of MiniMaxAI/MiniMax-M2.
    fn minimax_m2() -> Value {
        json!({
            "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1, 1], "bos_token_id": 1,
            "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
            "intermediate_size": 1536, "max_position_embeddings": 196608, "model_type": "minimax_m2",
            "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62,
            "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3,
            "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64,
            "scoring_func": "sigmoid", "shared_intermediate_size": 0, "tie_word_embeddings": false,
            "use_mtp": true, "use_qk_norm": true, "use_routing_bias": true, "vocab_size": 200064
        })
    }

    #[test]
    fn published_config_parses() {
        let config = parse(&minimax_m2()).unwrap();
        let moe = config.moe.as_ref().unwrap();
        assert_eq!((moe.experts, moe.width, moe.rule.chosen), (256, 1536, 8));
        assert!(moe.correction && moe.rule.normalize && !config.has_dense_layers());
        assert_eq!((config.qk_norm, config.rotary_dim, config.group_size()), (QkNorm::AllHeads, Some(64), 6));
        assert!((config.matrix_parameters() as f64 / 1e9 - 228.1).abs() < 0.5);
        assert!((config.active_parameters() as f64 / 1e9 - 10.0).abs() < 0.5);
    }

    #[test]
    fn other_values_are_refused_by_field() {
        for (field, value) in [
            ("attn_type_list", json!([1, 0])),
            ("scoring_func", json!("softmax")),
            ("qk_norm_type", json!("per_head")),
            ("shared_intermediate_size", json!(64)),
        ] {
            let message = parse(&with(minimax_m2(), json!({field: value}))).unwrap_err().to_string();
            assert!(message.contains(field), "{message}");
        }
    }
}
