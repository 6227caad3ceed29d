//! Llama 2 and 3, and the many models published in their form.

use serde::Deserialize;

use super::CommonFields;
use crate::config::{DecoderConfig, Family};
use crate::error::LoadError;

pub(crate) const NAMES: (&str, &str) = ("LlamaForCausalLM", "llama");

#[derive(Debug, Deserialize)]
pub(crate) struct LlamaConfig {
    #[serde(flatten)]
    common: CommonFields,
    /// On all four attention projections.
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
}

impl LlamaConfig {
    pub(crate) fn lower(mut self) -> Result<DecoderConfig, LoadError> {
        // Files older than grouped-query attention give every query head its own key and value.
        self.common.num_key_value_heads.get_or_insert(self.common.num_attention_heads);
        let base = self.common.lower(Family::Llama)?;
        Ok(DecoderConfig {
            qkv_bias: self.attention_bias,
            output_bias: self.attention_bias,
            mlp_bias: self.mlp_bias,
            ..base
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::families::test_support::{parse, with};
    use crate::{Family, QkNorm, RopeScaling};
    use serde_json::{Value, json};

    /// The published values of meta-llama/Llama-3.1-8B-Instruct.
    fn llama_3_1_8b() -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
            "use_cache": true, "vocab_size": 128256
        })
    }

    #[test]
    fn published_config_parses() {
        let config = parse(&llama_3_1_8b()).unwrap();
        assert_eq!(config.family, Family::Llama);
        assert_eq!((config.hidden_size, config.intermediate_size, config.layers), (4096, 14336, 32));
        assert_eq!((config.query_heads, config.kv_heads, config.head_dim), (32, 8, 128));
        assert_eq!(config.rms_norm_eps, 1e-5);
        assert_eq!(config.eos_token_ids, [128_001, 128_008, 128_009]);
        assert_eq!(config.rope.theta, 500_000.0);
        assert_eq!(
            config.rope.scaling,
            RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8192
            }
        );
        assert!(config.qk_norm == QkNorm::None);
        assert!(!(config.qkv_bias || config.output_bias || config.mlp_bias));
    }

    #[test]
    fn missing_key_value_heads_mean_one_each() {
        let mut json = llama_3_1_8b();
        json.as_object_mut().unwrap().remove("num_key_value_heads");
        assert_eq!(parse(&json).unwrap().kv_heads, 32);
    }

    #[test]
    fn biases_are_taken_from_the_file() {
        let config = parse(&with(llama_3_1_8b(), json!({"attention_bias": true, "mlp_bias": true}))).unwrap();
        assert!(config.qkv_bias && config.output_bias && config.mlp_bias);
    }
}
