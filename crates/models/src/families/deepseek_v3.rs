//! DeepSeek-V3, R1 and V3.1, Kimi-K2 and Moonlight: multi-head latent attention, the first layers
//! dense, the others with experts of the strongest groups. V3.2 is refused: its indexer chooses the
//! keys that a query reads.

use serde::Deserialize;

use super::CommonFields;
use super::corrected_router::{CorrectedRouter, RouterDefaults};
use super::latent_fields::LatentFields;
use crate::config::{DecoderConfig, Family};
use crate::error::LoadError;

pub(crate) const NAMES: (&str, &str) = ("DeepseekV3ForCausalLM", "deepseek_v3");

/// Its successor, which the file of a V3.2 model names, and why it is refused.
pub(crate) const SUCCESSOR: (&str, &str) = (
    "DeepseekV32ForCausalLM",
    "is DeepSeek-V3.2, whose indexer chooses the keys that a query reads; that is not computed. \
     DeepseekV3ForCausalLM (V3, R1, V3.1) is",
);

pub(crate) const DEFAULTS: RouterDefaults =
    RouterDefaults { dense_layers: 3, groups: 8, kept_groups: 4, factor: 2.5 };

/// A decoder with latent attention and corrected routers.
#[derive(Debug, Deserialize)]
pub(crate) struct LatentMoeConfig {
    #[serde(flatten)]
    common: CommonFields,
    #[serde(flatten)]
    latent: LatentFields,
    #[serde(flatten)]
    router: CorrectedRouter,
}

impl LatentMoeConfig {
    pub(crate) fn lower(self, family: Family, defaults: RouterDefaults) -> Result<DecoderConfig, LoadError> {
        let base = self.latent.lower(family, self.common)?;
        let moe = self.router.lower(base.layers, defaults)?;
        Ok(DecoderConfig { moe: Some(moe), ..base })
    }
}

#[cfg(test)]
mod tests {
    use crate::families::test_support::{parse, with};
    use oscar_backend::ExpertGroups;
    use serde_json::{Value, json};

    /// The published values of deepseek-ai/DeepSeek-V3.
    fn deepseek_v3() -> Value {
        json!({
            "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "bos_token_id": 0,
            "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
            "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
            "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
            "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
            "norm_topk_prob": true, "num_attention_heads": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                "weight_block_size": [128, 128]},
            "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40,
                "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                "type": "yarn"},
            "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
            "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280
        })
    }

    #[test]
    fn published_config_parses() {
        let config = parse(&deepseek_v3()).unwrap();
        let latent = config.latent.as_ref().unwrap();
        assert_eq!((latent.query_rank, latent.row(), latent.interleaved), (Some(1536), 576, true));
        assert_eq!((config.kv_heads, config.head_dim, config.rotary_width()), (1, 576, 64));
        // (0.1 · ln 40 + 1)² / √192
        assert!((config.heads().scale - 0.135_234).abs() < 1e-5, "{}", config.heads().scale);
        assert_eq!(config.rope.attention_scale(), 1.0);
        let moe = config.moe.as_ref().unwrap();
        assert_eq!(moe.rule.groups, Some(ExpertGroups { count: 8, kept: 4 }));
        assert_eq!((moe.dense_layers.as_slice(), moe.shared_width), (&[0, 1, 2][..], 2048));
        assert!((config.matrix_parameters() as f64 / 1e9 - 670.1).abs() < 1.0);
        assert!((config.active_parameters() as f64 / 1e9 - 36.6).abs() < 0.5);
    }

    #[test]
    fn queries_may_have_full_rank() {
        // Moonlight and GLM-4.7-Flash say null; a file may also leave it out.
        let config = parse(&with(deepseek_v3(), json!({"q_lora_rank": null, "n_group": 1}))).unwrap();
        assert_eq!((config.latent.unwrap().query_rank, config.moe.unwrap().rule.groups), (None, None));
    }

    #[test]
    fn hostile_values_are_refused_by_field() {
        for (field, value) in [
            ("kv_lora_rank", json!(0)),
            ("q_lora_rank", json!(0)),
            ("qk_rope_head_dim", json!(63)),
            ("qk_rope_head_dim", json!(0)),
            ("qk_nope_head_dim", json!(0)),
            ("v_head_dim", json!(0)),
            ("kv_lora_rank", json!(1u64 << 60)),
            ("v_head_dim", json!(u64::MAX)),
            ("attention_bias", json!(true)),
            ("num_key_value_heads", json!(8)),
            ("partial_rotary_factor", json!(0.5)),
            ("n_group", json!(7)),
            ("n_group", json!(0)),
            ("topk_group", json!(0)),
            ("rms_norm_eps", json!(-1.0)),
        ] {
            let message = parse(&with(deepseek_v3(), json!({field: value}))).unwrap_err().to_string();
            assert!(message.contains(field), "{field}: {message}");
        }
        let mut missing = deepseek_v3();
        missing.as_object_mut().unwrap().remove("kv_lora_rank");
        let message = parse(&missing).unwrap_err().to_string();
        assert!(message.contains("kv_lora_rank"), "{message}");
    }

    #[test]
    fn v3_2_is_refused_by_name() {
        let v3_2 = json!({"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"});
        let message = parse(&with(deepseek_v3(), v3_2)).unwrap_err().to_string();
        assert!(message.contains("V3.2") && message.contains("indexer"), "{message}");
    }
}
