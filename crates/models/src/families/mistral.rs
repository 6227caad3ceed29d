//! Mistral (dense): Llama's shape, and in its first version a sliding window.

use serde::{Deserialize, Deserializer};

use super::CommonFields;
use crate::config::{DecoderConfig, Family};
use crate::error::LoadError;

pub(crate) const NAMES: (&str, &str) = ("MistralForCausalLM", "mistral");

#[derive(Debug, Deserialize)]
pub(crate) struct MistralConfig {
    #[serde(flatten)]
    common: CommonFields,
    /// `null` switches the window off; leaving the field out means the first release's 4096.
    #[serde(default = "window_of_the_first_release", deserialize_with = "nullable")]
    sliding_window: Option<usize>,
}

fn window_of_the_first_release() -> Option<usize> {
    Some(4096)
}

fn nullable<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    Option::deserialize(deserializer)
}

impl MistralConfig {
    pub(crate) fn lower(self) -> Result<DecoderConfig, LoadError> {
        let base = self.common.lower(Family::Mistral)?;
        Ok(DecoderConfig { sliding_window: self.sliding_window, ..base })
    }
}

#[cfg(test)]
mod tests {
    use crate::families::test_support::{parse, with};
    use crate::{Family, LoadError, QkNorm, RopeConfig};
    use serde_json::{Value, json};

    /// The published values of mistralai/Mistral-7B-Instruct-v0.3.
    fn mistral_7b_v0_3() -> Value {
        json!({
            "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
            "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 32768
        })
    }

    #[test]
    fn published_config_parses() {
        let config = parse(&mistral_7b_v0_3()).unwrap();
        assert_eq!(config.family, Family::Mistral);
        assert_eq!((config.hidden_size, config.intermediate_size, config.layers), (4096, 14336, 32));
        assert_eq!((config.query_heads, config.kv_heads, config.head_dim), (32, 8, 128));
        assert_eq!((config.rope, config.sliding_window), (RopeConfig::plain(1e6), None));
        assert!(!config.qkv_bias && config.qk_norm == QkNorm::None);
    }

    #[test]
    fn the_first_release_is_refused_for_its_window() {
        // Mistral-7B-v0.1: the same shape with a window of 4096 over 32768 positions.
        let windowed = with(mistral_7b_v0_3(), json!({"sliding_window": 4096, "rope_theta": 10000.0}));
        let message = parse(&windowed).unwrap_err().to_string();
        assert!(message.contains("sliding window of 4096") && message.contains("32768"), "{message}");

        let mut unstated = mistral_7b_v0_3();
        unstated.as_object_mut().unwrap().remove("sliding_window");
        assert!(matches!(parse(&unstated), Err(LoadError::SlidingWindow { window: 4096, .. })));

        let short = with(windowed, json!({"max_position_embeddings": 4096}));
        assert_eq!(parse(&short).unwrap().sliding_window, Some(4096));
    }
}
