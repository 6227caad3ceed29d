//! Mixtral: the attention of Mistral; every layer has experts chosen by softmax.

use serde::Deserialize;

use super::{CommonFields, number};
use crate::config::{DecoderConfig, Family, MoeConfig};
use crate::error::LoadError;
use crate::tensor_names::ExpertNames;

pub(crate) const NAMES: (&str, &str) = ("MixtralForCausalLM", "mixtral");

#[derive(Debug, Deserialize)]
pub(crate) struct MixtralConfig {
    #[serde(flatten)]
    common: CommonFields,
    #[serde(default = "number::<8>")]
    num_local_experts: usize,
    #[serde(default = "number::<2>")]
    num_experts_per_tok: usize,
    sliding_window: Option<usize>,
}

impl MixtralConfig {
    pub(crate) fn lower(self) -> Result<DecoderConfig, LoadError> {
        let base = self.common.lower(Family::Mixtral)?;
        let (experts, chosen) = (self.num_local_experts, self.num_experts_per_tok);
        let moe = MoeConfig::new(experts, chosen, base.intermediate_size, ExpertNames::BlockSparse);
        Ok(DecoderConfig { moe: Some(moe), sliding_window: self.sliding_window, ..base })
    }
}

#[cfg(test)]
mod tests {
    use crate::LoadError;
    use crate::families::test_support::{parse, with};
    use serde_json::json;

    #[test]
    fn published_config_parses() {
        // mistralai/Mixtral-8x7B-Instruct-v0.1.
        let published = json!({
            "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
            "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
            "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
            "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
            "vocab_size": 32000
        });
        let config = parse(&published).unwrap();
        let moe = config.moe.as_ref().unwrap();
        assert_eq!((moe.experts, moe.width, moe.rule.chosen, config.head_dim), (8, 14336, 2, 128));
        assert!(moe.rule.normalize && !config.has_dense_layers());
        assert!((config.matrix_parameters() as f64 / 1e9 - 46.57).abs() < 0.02);

        let windowed = parse(&with(published, json!({"sliding_window": 4096})));
        assert!(matches!(windowed, Err(LoadError::SlidingWindow { window: 4096, .. })));
    }
}
