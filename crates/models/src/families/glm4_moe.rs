//! GLM-4.5, 4.6 and 4.7: half of each head turns; the first layers are dense, the others have experts
//! chosen by corrected sigmoids and a shared expert.

use serde::Deserialize;

use super::CommonFields;
use super::corrected_router::{CorrectedRouter, RouterDefaults};
use crate::config::{DecoderConfig, Family, QkNorm};
use crate::error::LoadError;

pub(crate) const NAMES: (&str, &str) = ("Glm4MoeForCausalLM", "glm4_moe");

/// The share of a head that turns when the file names none.
const DEFAULT_ROTARY_FACTOR: f64 = 0.5;

#[derive(Debug, Deserialize)]
pub(crate) struct Glm4MoeConfig {
    #[serde(flatten)]
    common: CommonFields,
    /// On query, key and value; never on the output projection.
    #[serde(default)]
    attention_bias: bool,
    /// True in GLM-4.5 to 4.7, false in Air.
    #[serde(default)]
    use_qk_norm: bool,
    #[serde(flatten)]
    router: CorrectedRouter,
}

/// What a file means that does not say.
const DEFAULTS: RouterDefaults = RouterDefaults { dense_layers: 1, groups: 1, kept_groups: 1, factor: 1.0 };

impl Glm4MoeConfig {
    pub(crate) fn lower(mut self) -> Result<DecoderConfig, LoadError> {
        self.common.rope.partial_rotary_factor.get_or_insert(DEFAULT_ROTARY_FACTOR);
        let base = self.common.lower(Family::Glm4Moe)?;
        let moe = self.router.lower(base.layers, DEFAULTS)?;
        Ok(DecoderConfig {
            qk_norm: if self.use_qk_norm { QkNorm::EachHead } else { QkNorm::None },
            qkv_bias: self.attention_bias,
            moe: Some(moe),
            ..base
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::QkNorm;
    use crate::families::test_support::parse;
    use serde_json::{Value, json};

    /// The published values of zai-org/GLM-4.7.
    fn glm_4_7() -> Value {
        json!({
            "architectures": ["Glm4MoeForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
            "pad_token_id": 151329, "eos_token_id": [151329, 151336, 151338], "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 5120, "partial_rotary_factor": 0.5,
            "intermediate_size": 12288, "max_position_embeddings": 202752, "model_type": "glm4_moe",
            "moe_intermediate_size": 1536, "norm_topk_prob": true, "num_attention_heads": 96,
            "n_group": 1, "topk_group": 1, "n_routed_experts": 160, "n_shared_experts": 1,
            "routed_scaling_factor": 2.5, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
            "num_hidden_layers": 92, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 1000000,
            "tie_word_embeddings": false, "dtype": "bfloat16", "use_qk_norm": true, "vocab_size": 151552
        })
    }

    #[test]
    fn published_config_parses() {
        let config = parse(&glm_4_7()).unwrap();
        let moe = config.moe.as_ref().unwrap();
        assert_eq!((moe.experts, moe.width, moe.shared_width, moe.rule.factor), (160, 1536, 1536, 2.5));
        assert_eq!((moe.dense_layers.as_slice(), moe.correction), (&[0, 1, 2][..], true));
        assert_eq!((config.rotary_dim, config.group_size()), (Some(64), 12));
        assert!(config.qkv_bias && !config.output_bias && config.qk_norm == QkNorm::EachHead);
        assert_eq!(config.eos_token_ids, [151_329, 151_336, 151_338]);
        assert!((config.matrix_parameters() as f64 / 1e9 - 352.0).abs() < 1.0);
        assert!((config.active_parameters() as f64 / 1e9 - 32.9).abs() < 0.2);
    }

    #[test]
    fn half_of_a_head_turns_even_if_the_file_does_not_say_so() {
        let mut unstated = glm_4_7();
        unstated.as_object_mut().unwrap().remove("partial_rotary_factor");
        unstated.as_object_mut().unwrap().remove("use_qk_norm");
        let config = parse(&unstated).unwrap();
        assert_eq!((config.rotary_dim, config.qk_norm), (Some(64), QkNorm::None));
    }
}
