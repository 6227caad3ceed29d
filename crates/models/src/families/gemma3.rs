//! Gemma 3, text only: most layers see a sliding window and have a RoPE of their own; results are
//! normalized before they are added; the vision tower of larger models is passed over.

use oscar_backend::Gate;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{CommonFields, refuse_unless, sliding_layers, text_fields};
use crate::config::{DecoderConfig, Family, QkNorm, SlidingLayers};
use crate::error::LoadError;
use crate::rope_fields::RopeFields;

pub(crate) const NAMES: (&str, &str) = ("Gemma3ForCausalLM", "gemma3_text");
/// Models with a vision tower: their `text_config` is read.
pub(crate) const WRAPPER: (&str, &str) = ("Gemma3ForConditionalGeneration", "gemma3");

#[derive(Debug, Deserialize)]
struct Gemma3Config {
    #[serde(flatten)]
    common: CommonFields,
    sliding_window: usize,
    /// Every layer of this number sees the whole context.
    sliding_window_pattern: usize,
    layer_types: Option<Vec<String>>,
    /// Base of the sliding layers, which are never scaled.
    rope_local_base_freq: f64,
    /// Newer files: all rotary fields of the sliding layers.
    sliding_rope: Option<RopeFields>,
    query_pre_attn_scalar: f64,
    hidden_activation: String,
    attention_bias: bool,
    attn_logit_softcapping: Option<f64>,
    final_logit_softcapping: Option<f64>,
    #[serde(default)]
    use_bidirectional_attention: bool,
}

/// The defaults of the configuration class: published files leave out what equals them.
fn defaults() -> Value {
    json!({
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "tie_word_embeddings": true,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": false
    })
}

/// Reads a `config.json` of either class.
pub(crate) fn read(file: Value) -> Result<DecoderConfig, LoadError> {
    let mut text = text_fields(file, &defaults())?;
    split_rope(&mut text);
    let config: Gemma3Config = serde_json::from_value(Value::Object(text))
        .map_err(|source| LoadError::Json { file: "config.json".to_owned(), source })?;
    config.lower()
}

/// Newer files give rotary parameters by kind of layer.
fn split_rope(text: &mut Map<String, Value>) {
    let Some(Value::Object(kinds)) = text.get_mut("rope_parameters") else { return };
    let (full, sliding) = (kinds.remove("full_attention"), kinds.remove("sliding_attention"));
    if let Some(full) = full {
        text.insert("rope_parameters".to_owned(), full);
    }
    if let Some(sliding) = sliding {
        text.insert("sliding_rope".to_owned(), json!({"rope_parameters": sliding}));
    }
}

impl Gemma3Config {
    fn lower(self) -> Result<DecoderConfig, LoadError> {
        let base = self.common.lower(Family::Gemma3)?;
        let activation = self.hidden_activation.as_str();
        refuse_unless(
            activation == "gelu_pytorch_tanh",
            "hidden_activation",
            activation,
            "gelu_pytorch_tanh",
        )?;
        for (field, cap) in [
            ("attn_logit_softcapping", self.attn_logit_softcapping),
            ("final_logit_softcapping", self.final_logit_softcapping),
        ] {
            refuse_unless(cap.is_none(), field, cap.unwrap_or_default(), "null")?;
        }
        let both_ways = self.use_bidirectional_attention;
        refuse_unless(!both_ways, "use_bidirectional_attention", both_ways, "false")?;
        let pattern = self.sliding_window_pattern;
        if pattern == 0 {
            return Err(LoadError::config_field("sliding_window_pattern", "is 0; it must be at least 1"));
        }
        let fields = match self.sliding_rope {
            Some(fields) => fields,
            None => RopeFields::of_theta(self.rope_local_base_freq),
        };
        let (rope, _) = fields.lower(base.max_position_embeddings, base.head_dim)?;
        let layers =
            sliding_layers(base.layers, self.layer_types, |layer| !(layer + 1).is_multiple_of(pattern))?;
        Ok(DecoderConfig {
            qk_norm: QkNorm::EachHead,
            qkv_bias: self.attention_bias,
            output_bias: self.attention_bias,
            sliding: Some(SlidingLayers { window: self.sliding_window, layers, rope: Some(rope) })
                .filter(|sliding| !sliding.layers.is_empty()),
            attention_scale: Some((1.0 / self.query_pre_attn_scalar.sqrt()) as f32),
            norm_offset: 1.0,
            result_norms: true,
            embedding_scale: (base.hidden_size as f32).sqrt(),
            gate: Gate::GeluTanh,
            ..base
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::families::test_support::{parse, with};
    use crate::{QkNorm, RopeConfig, RopeScaling};
    use serde_json::{Value, json};

    /// The published values of google/gemma-3-4b-it: what equals the class's defaults is left out.
    fn gemma_3_4b() -> Value {
        json!({
            "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
            "mm_tokens_per_image": 256, "model_type": "gemma3", "torch_dtype": "bfloat16",
            "text_config": {
                "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024
            },
            "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"}
        })
    }

    #[test]
    fn a_published_nested_config_parses() {
        let config = parse(&gemma_3_4b()).unwrap();
        assert_eq!((config.layers, config.query_heads, config.kv_heads, config.head_dim), (34, 8, 4, 256));
        assert_eq!((config.vocab_size, config.max_position_embeddings), (262_208, 131_072));
        assert_eq!(config.eos_token_ids, [1, 106]);
        assert!(config.tie_word_embeddings && config.result_norms && config.qk_norm == QkNorm::EachHead);
        assert_eq!(config.rope.scaling, RopeScaling::Linear { factor: 8.0 });
        assert_eq!((config.attention_scale, config.norm_offset), (Some(0.0625), 1.0));
        let sliding = config.sliding.as_ref().unwrap();
        assert_eq!((sliding.window, sliding.rope.clone()), (1024, Some(RopeConfig::plain(1e4))));
        let full: Vec<usize> = (0..34).filter(|&layer| config.window_of(layer).is_none()).collect();
        assert_eq!(full, [5, 11, 17, 23, 29]);
        assert!((config.matrix_parameters() as f64 / 1e9 - 3.88).abs() < 0.01);
    }

    #[test]
    fn newer_files_give_rotary_parameters_by_kind_of_layer() {
        let mut newer = gemma_3_4b();
        newer["text_config"].as_object_mut().unwrap().remove("rope_scaling");
        newer["text_config"]["rope_parameters"] = json!({
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}
        });
        newer["text_config"]["layer_types"] = json!(
            (0..34)
                .map(|i| if (i + 1) % 6 == 0 { "full_attention" } else { "sliding_attention" })
                .collect::<Vec<_>>()
        );
        assert_eq!(parse(&newer).unwrap(), parse(&gemma_3_4b()).unwrap());
    }

    #[test]
    fn hostile_values_are_refused_by_field() {
        for (change, says) in [
            (json!({"sliding_window": 0}), "sliding_window` is 0"),
            (json!({"sliding_window_pattern": 0}), "sliding_window_pattern"),
            (json!({"layer_types": vec!["full_attention"; 3]}), "layer_types` has 3 entries for 34 layers"),
            (json!({"layer_types": vec!["chunked_attention"; 34]}), "`chunked_attention`"),
            (json!({"layer_types": vec!["sliding_attention"; 34]}), "layer_types` makes every layer slide"),
            (json!({"final_logit_softcapping": 30.0}), "final_logit_softcapping"),
            (json!({"attn_logit_softcapping": 50.0}), "attn_logit_softcapping"),
            (json!({"hidden_activation": "gelu"}), "hidden_activation"),
            (json!({"query_pre_attn_scalar": -1}), "query_pre_attn_scalar"),
            (json!({"rope_local_base_freq": 0}), "rope_theta"),
            (json!({"use_bidirectional_attention": true}), "use_bidirectional_attention"),
        ] {
            let mut file = gemma_3_4b();
            file["text_config"] = with(file["text_config"].clone(), change.clone());
            let message = parse(&file).unwrap_err().to_string();
            assert!(message.contains(says), "{change}: {message}");
        }
        let message = parse(&with(gemma_3_4b(), json!({"text_config": 7}))).unwrap_err().to_string();
        assert!(message.contains("text_config"), "{message}");
    }
}
