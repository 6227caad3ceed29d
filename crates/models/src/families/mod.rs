//! One file for each model family: its `config.json` as published, and how it lowers into a
//! [`DecoderConfig`](crate::DecoderConfig).
//!
//! [`CommonFields`] holds the fields that all families share. A family's own file holds only its
//! particular fields and their defaults (those of its configuration class in transformers).

mod corrected_router;
pub(crate) mod deepseek_v3;
pub(crate) mod gemma3;
pub(crate) mod glm4_moe;
pub(crate) mod glm4_moe_lite;
pub(crate) mod gpt_oss;
mod latent_fields;
pub(crate) mod llama;
pub(crate) mod minimax_m2;
pub(crate) mod mistral;
pub(crate) mod mixtral;
pub(crate) mod qwen2;
pub(crate) mod qwen3;
pub(crate) mod qwen3_moe;
pub(crate) mod qwen3_next;

use oscar_backend::Gate;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::config::{DecoderConfig, Family, MOST_LAYERS, QkNorm};
use crate::error::LoadError;
use crate::rope_fields::RopeFields;
use crate::tensor::WeightDtype;

/// The fields that every family spells alike.
#[derive(Debug, Deserialize)]
pub(crate) struct CommonFields {
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    vocab_size: usize,
    max_position_embeddings: usize,
    #[serde(default = "default_rms_norm_eps")]
    rms_norm_eps: f64,
    #[serde(default = "default_hidden_act")]
    hidden_act: String,
    #[serde(default)]
    tie_word_embeddings: bool,
    head_dim: Option<usize>,
    num_key_value_heads: Option<usize>,
    eos_token_id: Option<TokenIds>,
    bos_token_id: Option<u32>,
    torch_dtype: Option<String>,
    dtype: Option<String>,
    #[serde(flatten)]
    rope: RopeFields,
}

/// A token id field that may be one number or a list of them.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(crate) enum TokenIds {
    One(u32),
    Many(Vec<u32>),
}

impl TokenIds {
    pub(crate) fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

/// The default of a field that a file leaves out.
fn number<const N: usize>() -> usize {
    N
}

/// The same for a field that is true.
fn yes() -> bool {
    true
}

fn default_rms_norm_eps() -> f64 {
    1e-6
}

fn default_hidden_act() -> String {
    "silu".to_owned()
}

impl CommonFields {
    /// A decoder without biases, head norms or window; the family adds its own.
    fn lower(self, family: Family) -> Result<DecoderConfig, LoadError> {
        if !matches!(self.hidden_act.as_str(), "silu" | "swish") {
            return Err(LoadError::config_field(
                "hidden_act",
                format!("is `{}`; only silu is computed", self.hidden_act),
            ));
        }
        let heads = self.num_attention_heads;
        let head_dim = match self.head_dim {
            Some(given) => given,
            None if heads > 0 && self.hidden_size.is_multiple_of(heads) => self.hidden_size / heads,
            None => {
                return Err(LoadError::config_field(
                    "hidden_size",
                    format!(
                        "is {}, which {heads} heads do not divide; head_dim must be given",
                        self.hidden_size
                    ),
                ));
            }
        };
        let Some(kv_heads) = self.num_key_value_heads else {
            return Err(LoadError::config_field("num_key_value_heads", "must be given"));
        };
        let (rope, rotary_dim) = self.rope.lower(self.max_position_embeddings, head_dim)?;
        Ok(DecoderConfig {
            family,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            layers: self.num_hidden_layers,
            query_heads: heads,
            kv_heads,
            head_dim,
            vocab_size: self.vocab_size,
            rms_norm_eps: self.rms_norm_eps as f32,
            rope,
            rotary_dim,
            latent: None,
            delta: None,
            output_gate: false,
            qk_norm: QkNorm::None,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            moe: None,
            tie_word_embeddings: self.tie_word_embeddings,
            max_position_embeddings: self.max_position_embeddings,
            sliding_window: None,
            sliding: None,
            attention_scale: None,
            attention_sinks: false,
            norm_offset: 0.0,
            result_norms: false,
            embedding_scale: 1.0,
            gate: Gate::Silu,
            eos_token_ids: self.eos_token_id.map(TokenIds::into_vec).unwrap_or_default(),
            bos_token_id: self.bos_token_id,
            dtype: self.dtype.or(self.torch_dtype).as_deref().and_then(WeightDtype::from_torch_name),
            fp8_weights: false,
        })
    }
}

/// The fields of the text model: those of `text_config` if it is nested, with what only the outer file
/// says and with `defaults` for what nobody says.
fn text_fields(file: Value, defaults: &Value) -> Result<Map<String, Value>, LoadError> {
    let bad = |field, problem| LoadError::config_field(field, problem);
    let Value::Object(outer) = file else { return Err(bad("", "is no object")) };
    let mut text = match outer.get("text_config") {
        None => outer.clone(),
        Some(Value::Object(inner)) => inner.clone(),
        Some(_) => return Err(bad("text_config", "is no object")),
    };
    // Null means that the file does not say.
    let is_unsaid = |text: &Map<String, Value>, field: &str| text.get(field).is_none_or(Value::is_null);
    for field in ["torch_dtype", "dtype", "eos_token_id", "bos_token_id", "tie_word_embeddings"] {
        if let (true, Some(value)) = (is_unsaid(&text, field), outer.get(field)) {
            text.insert(field.to_owned(), value.clone());
        }
    }
    for (field, value) in defaults.as_object().into_iter().flatten() {
        if is_unsaid(&text, field) {
            text.insert(field.clone(), value.clone());
        }
    }
    Ok(text)
}

/// Refuses a field whose value changes the forward pass in a way that is not computed.
pub(crate) fn refuse_unless(
    fits: bool,
    field: &str,
    value: impl std::fmt::Display,
    reads: &str,
) -> Result<(), LoadError> {
    match fits {
        true => Ok(()),
        false => Err(LoadError::config_field(field, format!("is {value}; only {reads} is computed"))),
    }
}

/// The layers that slide: those that `layer_types` names, or those that `otherwise` says.
fn sliding_layers(
    layers: usize,
    layer_types: Option<Vec<String>>,
    otherwise: impl Fn(usize) -> bool,
) -> Result<Vec<usize>, LoadError> {
    let Some(kinds) = layer_types else {
        // More layers are refused by `validate`, but not before they are listed.
        return Ok((0..layers.min(MOST_LAYERS)).filter(|&layer| otherwise(layer)).collect());
    };
    if kinds.len() != layers {
        return Err(LoadError::config_field(
            "layer_types",
            format!("has {} entries for {layers} layers", kinds.len()),
        ));
    }
    for kind in &kinds {
        let known = matches!(kind.as_str(), "sliding_attention" | "full_attention");
        refuse_unless(known, "layer_types", format!("`{kind}`"), "sliding_attention or full_attention")?;
    }
    Ok((0..layers).filter(|&layer| kinds[layer] == "sliding_attention").collect())
}

/// Qwen's window: declared in every file, active only if it is switched on and reaches some layer.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct QwenWindow {
    #[serde(default)]
    use_sliding_window: bool,
    sliding_window: Option<usize>,
    /// Layers from this one on slide, unless `layer_types` lists them one by one.
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
}

impl QwenWindow {
    fn active(self, layers: usize) -> Option<usize> {
        let some_layer_slides = match self.layer_types {
            Some(kinds) => kinds.iter().any(|kind| kind == "sliding_attention"),
            None => self.max_window_layers.is_none_or(|first| first < layers),
        };
        self.sliding_window.filter(|_| self.use_sliding_window && some_layer_slides)
    }
}

#[cfg(test)]
pub(crate) mod test_support {
    use serde_json::Value;

    use crate::{DecoderConfig, LoadError};

    pub(crate) fn parse(json: &Value) -> Result<DecoderConfig, LoadError> {
        DecoderConfig::from_json(json.to_string().as_bytes())
    }

    /// `base` with the fields of `changes` put over it.
    pub(crate) fn with(mut base: Value, changes: Value) -> Value {
        for (field, value) in changes.as_object().unwrap() {
            base[field] = value.clone();
        }
        base
    }
}

#[cfg(test)]
mod tests {
    use super::test_support::{parse, with};
    use crate::LoadError;
    use serde_json::{Value, json};

    fn small() -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
            "max_position_embeddings": 512
        })
    }

    #[test]
    fn head_dim_defaults_to_an_even_share() {
        assert_eq!(parse(&small()).unwrap().head_dim, 16);
        let error = parse(&with(small(), json!({"hidden_size": 66}))).unwrap_err().to_string();
        assert!(error.contains("head_dim must be given"), "{error}");
    }

    #[test]
    fn model_type_decides_without_architectures() {
        let mut json = with(small(), json!({"model_type": "qwen2"}));
        json.as_object_mut().unwrap().remove("architectures");
        assert!(parse(&json).unwrap().qkv_bias);
        json.as_object_mut().unwrap().remove("model_type");
        assert!(parse(&json).unwrap_err().to_string().contains("architectures"));
    }

    #[test]
    fn an_unknown_architecture_is_named_beside_the_known() {
        let json = with(small(), json!({"architectures": ["MambaForCausalLM"]}));
        let message = parse(&json).unwrap_err().to_string();
        for name in [
            "MambaForCausalLM",
            "DeepseekV3ForCausalLM",
            "GptOssForCausalLM",
            "Qwen3ForCausalLM",
            "Glm4MoeForCausalLM",
        ] {
            assert!(message.contains(name), "{message}");
        }
    }

    #[test]
    fn quantized_checkpoints_are_refused_by_method() {
        for method in ["mxfp4", "gptq", "awq"] {
            let json = with(small(), json!({"quantization_config": {"quant_method": method, "bits": 4}}));
            let error = parse(&json).unwrap_err();
            assert!(matches!(&error, LoadError::Quantized { method: m } if m == method), "{error}");
        }
    }

    #[test]
    fn impossible_sizes_name_their_field() {
        let cases = [
            (json!({"num_key_value_heads": 3}), "num_attention_heads"),
            (json!({"num_key_value_heads": 0}), "num_key_value_heads"),
            (json!({"num_attention_heads": 0}), "heads"),
            (json!({"head_dim": 15}), "head_dim"),
            (json!({"hidden_size": 0}), "hidden_size"),
            (json!({"num_hidden_layers": 0}), "num_hidden_layers"),
            (json!({"vocab_size": 9_000_000_000_000u64}), "vocab_size"),
            (json!({"max_position_embeddings": 1u64 << 40}), "max_position_embeddings"),
            (
                json!({"num_attention_heads": 1 << 20, "num_key_value_heads": 1, "head_dim": 1 << 20}),
                "head_dim",
            ),
            (json!({"hidden_act": "gelu"}), "hidden_act"),
            (json!({"rms_norm_eps": -1.0}), "rms_norm_eps"),
            (json!({"hidden_size": "wide"}), "config.json"),
        ];
        for (change, field) in cases {
            let message = parse(&with(small(), change.clone())).unwrap_err().to_string();
            assert!(message.contains(field), "{change}: {message}");
        }
    }

    #[test]
    fn a_missing_field_is_named() {
        let mut json = small();
        json.as_object_mut().unwrap().remove("vocab_size");
        assert!(parse(&json).unwrap_err().to_string().contains("vocab_size"));
    }
}
