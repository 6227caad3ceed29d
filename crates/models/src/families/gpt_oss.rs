//! gpt-oss: attention sinks and biases, every second layer sees a sliding window; every layer has
//! experts with a clamped gate, in BF16 or MXFP4.

use oscar_backend::{Gate, MXFP4_GROUP};
use serde::Deserialize;
use serde_json::Value;

use super::{CommonFields, refuse_unless, sliding_layers, yes};
use crate::config::{DecoderConfig, Family, MoeConfig, SlidingLayers};
use crate::error::LoadError;
use crate::tensor_names::ExpertNames;

pub(crate) const NAMES: (&str, &str) = ("GptOssForCausalLM", "gpt_oss");

#[derive(Debug, Deserialize)]
pub(crate) struct GptOssConfig {
    /// `intermediate_size` is the width of an expert.
    #[serde(flatten)]
    common: CommonFields,
    num_local_experts: usize,
    num_experts_per_tok: usize,
    sliding_window: usize,
    layer_types: Option<Vec<String>>,
    #[serde(default = "yes")]
    attention_bias: bool,
    #[serde(default = "default_limit")]
    swiglu_limit: f64,
}

/// Refuses a file that leaves out a field whose default in the published class is another than here.
pub(crate) fn demand(file: &Value) -> Result<(), LoadError> {
    let has = |field: &str| file.get(field).is_some();
    let missing = match has("rope_parameters") || (has("rope_theta") && has("rope_scaling")) {
        false => Some("rope_theta"),
        true => (!has("rms_norm_eps")).then_some("rms_norm_eps"),
    };
    match missing {
        Some(field) => Err(LoadError::config_field(field, "must be given (rope_theta with rope_scaling)")),
        None => Ok(()),
    }
}

fn default_limit() -> f64 {
    f64::from(Gate::CLAMP)
}

impl GptOssConfig {
    pub(crate) fn lower(self, mxfp4: bool) -> Result<DecoderConfig, LoadError> {
        let base = self.common.lower(Family::GptOss)?;
        let limit = self.swiglu_limit;
        refuse_unless(limit == default_limit(), "swiglu_limit", limit, &Gate::CLAMP.to_string())?;
        let bias = self.attention_bias;
        refuse_unless(bias, "attention_bias", bias, "true")?;
        for (field, size) in
            [("hidden_size", base.hidden_size), ("intermediate_size", base.intermediate_size)]
        {
            if mxfp4 && !size.is_multiple_of(MXFP4_GROUP) {
                let problem = format!("is {size}; MXFP4 has a scale for every {MXFP4_GROUP} inputs");
                return Err(LoadError::config_field(field, problem));
            }
        }
        // A softmax over the logits of the chosen alone is that over all of them, normalized.
        let (experts, chosen) = (self.num_local_experts, self.num_experts_per_tok);
        let moe = MoeConfig {
            biases: true,
            mxfp4,
            ..MoeConfig::new(experts, chosen, base.intermediate_size, ExpertNames::Fused)
        };
        let layers = sliding_layers(base.layers, self.layer_types, |layer| layer.is_multiple_of(2))?;
        Ok(DecoderConfig {
            qkv_bias: true,
            output_bias: true,
            moe: Some(moe),
            sliding: Some(SlidingLayers { window: self.sliding_window, layers, rope: None })
                .filter(|sliding| !sliding.layers.is_empty()),
            attention_sinks: true,
            gate: Gate::Clamped,
            ..base
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::RopeScaling;
    use crate::families::test_support::{parse, with};
    use serde_json::{Value, json};

    /// The published values of openai/gpt-oss-20b.
    fn gpt_oss_20b() -> Value {
        let kinds: Vec<&str> =
            (0..24).map(|i| if i % 2 == 0 { "sliding_attention" } else { "full_attention" }).collect();
        json!({
            "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
            "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
            "layer_types": kinds, "max_position_embeddings": 131072, "model_type": "gpt_oss",
            "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
            "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05,
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false},
            "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
            "tie_word_embeddings": false, "vocab_size": 201088,
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        })
    }

    #[test]
    fn published_config_parses() {
        let config = parse(&gpt_oss_20b()).unwrap();
        let moe = config.moe.as_ref().unwrap();
        assert_eq!((moe.experts, moe.width, moe.rule.chosen), (32, 2880, 4));
        assert!(moe.biases && moe.mxfp4 && config.attention_sinks && config.qkv_bias && config.output_bias);
        assert!(!config.fp8_weights && !config.has_dense_layers());
        assert!(matches!(config.rope.scaling, RopeScaling::Yarn { truncate: false, .. }));
        assert_eq!(config.rope.attention_scale(), 1.346_573_6);
        let windows: Vec<Option<usize>> = (0..3).map(|layer| config.window_of(layer)).collect();
        assert_eq!(windows, [Some(128), None, Some(128)]);
        assert!(
            (config.matrix_parameters() as f64 / 1e9 - 20.3).abs() < 0.1,
            "{}",
            config.matrix_parameters()
        );
        let mut unstated = gpt_oss_20b();
        unstated.as_object_mut().unwrap().remove("layer_types");
        assert_eq!(parse(&unstated).unwrap(), config);
    }

    #[test]
    fn hostile_values_are_refused_by_field() {
        for (change, says) in [
            (json!({"sliding_window": 0}), "sliding_window` is 0"),
            (json!({"layer_types": ["sliding_attention"]}), "layer_types` has 1 entries for 24 layers"),
            (json!({"layer_types": vec!["sliding_attention"; 24]}), "layer_types` makes every layer slide"),
            (json!({"swiglu_limit": 5.0}), "swiglu_limit"),
            (json!({"attention_bias": false}), "attention_bias"),
            (json!({"intermediate_size": 2881}), "intermediate_size` is 2881; MXFP4"),
            (json!({"num_experts_per_tok": 33}), "num_experts_per_tok"),
            (json!({"quantization_config": {"quant_method": "gptq"}}), "gptq"),
        ] {
            let message = parse(&with(gpt_oss_20b(), change.clone())).unwrap_err().to_string();
            assert!(message.contains(says), "{change}: {message}");
        }
    }
}
