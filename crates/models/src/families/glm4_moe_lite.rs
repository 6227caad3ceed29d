//! GLM-4.7-Flash: the attention of DeepSeek-V3 with the experts of GLM-4.7.

use super::corrected_router::RouterDefaults;

pub(crate) const NAMES: (&str, &str) = ("Glm4MoeLiteForCausalLM", "glm4_moe_lite");

pub(crate) const DEFAULTS: RouterDefaults =
    RouterDefaults { dense_layers: 1, groups: 1, kept_groups: 1, factor: 1.8 };

#[cfg(test)]
mod tests {
    use crate::families::test_support::parse;
    use serde_json::json;

    #[test]
    fn published_config_parses() {
        // The values of zai-org/GLM-4.7-Flash.
        let config = parse(&json!({
            "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": false, "dtype": "bfloat16",
            "eos_token_id": [154820, 154827, 154829], "first_k_dense_replace": 1, "hidden_act": "silu",
            "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512,
            "max_position_embeddings": 202752, "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536,
            "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": true,
            "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47,
            "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0,
            "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
            "rope_scaling": null, "rope_theta": 1000000, "routed_scaling_factor": 1.8,
            "tie_word_embeddings": false, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256,
            "vocab_size": 154880
        }))
        .unwrap();
        let latent = config.latent.as_ref().unwrap();
        assert_eq!((latent.key, latent.value, latent.row()), (192, 256, 576));
        assert_eq!((config.heads().scale, config.moe.as_ref().unwrap().rule.groups), (0.0625, None));
        assert!((config.matrix_parameters() as f64 / 1e9 - 29.6).abs() < 0.5);
    }
}
