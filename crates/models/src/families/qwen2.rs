//! Qwen2 and Qwen2.5 (dense): biases on query, key and value, none on the output projection.

use serde::Deserialize;

use super::{CommonFields, QwenWindow};
use crate::config::{DecoderConfig, Family};
use crate::error::LoadError;

pub(crate) const NAMES: (&str, &str) = ("Qwen2ForCausalLM", "qwen2");

#[derive(Debug, Deserialize)]
pub(crate) struct Qwen2Config {
    #[serde(flatten)]
    common: CommonFields,
    #[serde(flatten)]
    window: QwenWindow,
}

impl Qwen2Config {
    pub(crate) fn lower(self) -> Result<DecoderConfig, LoadError> {
        let base = self.common.lower(Family::Qwen2)?;
        Ok(DecoderConfig { qkv_bias: true, sliding_window: self.window.active(base.layers), ..base })
    }
}

#[cfg(test)]
mod tests {
    use crate::families::test_support::{parse, with};
    use crate::{Family, LoadError, QkNorm, RopeConfig};
    use serde_json::{Value, json};

    /// The published values of Qwen/Qwen2.5-7B-Instruct.
    fn qwen2_5_7b() -> Value {
        json!({
            "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
            "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
            "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
            "sliding_window": 131072, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
            "use_cache": true, "use_sliding_window": false, "vocab_size": 152064
        })
    }

    #[test]
    fn published_config_parses() {
        let config = parse(&qwen2_5_7b()).unwrap();
        assert_eq!(config.family, Family::Qwen2);
        assert_eq!((config.hidden_size, config.intermediate_size, config.layers), (3584, 18944, 28));
        assert_eq!((config.query_heads, config.kv_heads, config.head_dim), (28, 4, 128));
        assert!(config.qkv_bias && !config.output_bias && config.qk_norm == QkNorm::None);
        assert_eq!((config.rope, config.sliding_window), (RopeConfig::plain(1e6), None));
    }

    #[test]
    fn the_window_counts_only_when_some_layer_uses_it() {
        let switched_on = with(qwen2_5_7b(), json!({"use_sliding_window": true, "sliding_window": 4096}));
        assert_eq!(parse(&switched_on).unwrap().sliding_window, None, "28 full layers of 28");

        let some_slide = with(switched_on.clone(), json!({"max_window_layers": 21}));
        assert!(matches!(parse(&some_slide), Err(LoadError::SlidingWindow { window: 4096, .. })));

        let listed = with(switched_on, json!({"layer_types": ["full_attention", "sliding_attention"]}));
        assert!(matches!(parse(&listed), Err(LoadError::SlidingWindow { .. })));

        let wide = with(some_slide, json!({"sliding_window": 131072}));
        assert_eq!(parse(&wide).unwrap().sliding_window, Some(131_072));
    }
}
