//! Qwen3 (dense): grouped-query attention, RMSNorm on every query and key head before RoPE.

use serde::Deserialize;

use super::{CommonFields, QwenWindow};
use crate::config::{DecoderConfig, Family, QkNorm};
use crate::error::LoadError;

pub(crate) const NAMES: (&str, &str) = ("Qwen3ForCausalLM", "qwen3");

/// Qwen3 heads are 128 wide for every hidden size, unless the file says otherwise.
const DEFAULT_HEAD_DIM: usize = 128;

#[derive(Debug, Deserialize)]
pub(crate) struct Qwen3Config {
    #[serde(flatten)]
    common: CommonFields,
    #[serde(flatten)]
    window: QwenWindow,
    /// On all four attention projections.
    #[serde(default)]
    attention_bias: bool,
}

impl Qwen3Config {
    pub(crate) fn lower(mut self) -> Result<DecoderConfig, LoadError> {
        self.common.head_dim.get_or_insert(DEFAULT_HEAD_DIM);
        let base = self.common.lower(Family::Qwen3)?;
        Ok(DecoderConfig {
            qk_norm: QkNorm::EachHead,
            qkv_bias: self.attention_bias,
            output_bias: self.attention_bias,
            sliding_window: self.window.active(base.layers),
            ..base
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::families::test_support::{parse, with};
    use crate::{Family, LoadError, QkNorm, RopeConfig, RopeScaling, WeightDtype};
    use serde_json::{Value, json};

    /// The published values of Qwen/Qwen3-8B.
    fn qwen3_8b() -> Value {
        json!({
            "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
            "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
            "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
            "use_sliding_window": false, "vocab_size": 151936
        })
    }

    #[test]
    fn published_config_parses() {
        let config = parse(&qwen3_8b()).unwrap();
        assert_eq!(config.family, Family::Qwen3);
        assert_eq!((config.hidden_size, config.intermediate_size, config.layers), (4096, 12288, 36));
        assert_eq!((config.query_heads, config.kv_heads, config.head_dim), (32, 8, 128));
        assert_eq!((config.group_size(), config.query_width(), config.kv_width()), (4, 4096, 1024));
        assert_eq!((config.vocab_size, config.max_position_embeddings), (151_936, 40_960));
        assert!(
            config.qk_norm == QkNorm::EachHead
                && !config.qkv_bias
                && !config.output_bias
                && !config.tie_word_embeddings
        );
        assert_eq!(config.rope, RopeConfig::plain(1e6));
        assert_eq!((config.eos_token_ids, config.bos_token_id), (vec![151_645], Some(151_643)));
        assert_eq!(config.dtype, Some(WeightDtype::Bf16));
    }

    #[test]
    fn head_dim_is_not_tied_to_the_hidden_size() {
        // Qwen3-0.6B: 16 heads of 128 over a hidden size of 1024.
        let small = json!({"hidden_size": 1024, "num_attention_heads": 16, "tie_word_embeddings": true});
        let mut json = with(qwen3_8b(), small);
        assert_eq!(parse(&json).unwrap().query_width(), 2048);
        json.as_object_mut().unwrap().remove("head_dim");
        assert_eq!(parse(&json).unwrap().head_dim, 128);
    }

    #[test]
    fn new_style_rope_and_dtype_parse() {
        let mut json = with(
            qwen3_8b(),
            json!({"dtype": "float16", "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000.0,
                "factor": 4.0, "original_max_position_embeddings": 32768}}),
        );
        json.as_object_mut().unwrap().remove("rope_theta");
        let config = parse(&json).unwrap();
        assert_eq!((config.rope.theta, config.dtype), (1e6, Some(WeightDtype::F16)));
        assert!(matches!(config.rope.scaling, RopeScaling::Yarn { factor: 4.0, .. }));
    }

    #[test]
    fn an_active_window_is_refused() {
        let on = json!({"use_sliding_window": true, "sliding_window": 4096, "max_window_layers": 20});
        let error = parse(&with(qwen3_8b(), on)).unwrap_err();
        assert!(matches!(error, LoadError::SlidingWindow { window: 4096, max_positions: 40960 }), "{error}");
    }
}
