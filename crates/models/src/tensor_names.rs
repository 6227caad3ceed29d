//! The names and shapes of a decoder's weights. Tensor names are spelled only here.

use crate::config::DecoderConfig;

/// The seven matrices of a layer, in the order a layer applies them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Projection {
    Query,
    Key,
    Value,
    Output,
    Gate,
    Up,
    Down,
}

impl Projection {
    pub const ALL: [Projection; 7] =
        [Self::Query, Self::Key, Self::Value, Self::Output, Self::Gate, Self::Up, Self::Down];

    fn path(self) -> &'static str {
        match self {
            Self::Query => "self_attn.q_proj",
            Self::Key => "self_attn.k_proj",
            Self::Value => "self_attn.v_proj",
            Self::Output => "self_attn.o_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::Down => "mlp.down_proj",
        }
    }

    /// Rows (outputs) and columns (inputs) of the matrix as stored.
    pub fn shape(self, config: &DecoderConfig) -> [usize; 2] {
        let hidden = config.hidden_size;
        match self {
            Self::Query => [config.query_width(), hidden],
            Self::Key | Self::Value => [config.kv_width(), hidden],
            Self::Output => [hidden, config.query_width()],
            Self::Gate | Self::Up => [config.intermediate_size, hidden],
            Self::Down => [hidden, config.intermediate_size],
        }
    }

    /// Whether this model adds a bias after the matrix.
    pub fn has_bias(self, config: &DecoderConfig) -> bool {
        match self {
            Self::Query | Self::Key | Self::Value => config.qkv_bias,
            Self::Output => config.output_bias,
            Self::Gate | Self::Up | Self::Down => config.mlp_bias,
        }
    }
}

/// The names in one checkpoint: usually under `model.`, without it when the bare decoder was saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorNames {
    prefix: &'static str,
}

impl TensorNames {
    /// Names as a causal language model saves them.
    pub const PREFIXED: Self = Self { prefix: "model." };
    /// Names as the decoder inside it saves them.
    pub const BARE: Self = Self { prefix: "" };

    /// The spelling a checkpoint uses.
    pub(crate) fn detect(contains: impl Fn(&str) -> bool) -> Self {
        let bare = !contains(&Self::PREFIXED.embedding()) && contains(&Self::BARE.embedding());
        if bare { Self::BARE } else { Self::PREFIXED }
    }

    pub fn embedding(&self) -> String {
        format!("{}embed_tokens.weight", self.prefix)
    }

    pub fn final_norm(&self) -> String {
        format!("{}norm.weight", self.prefix)
    }

    /// The output projection of models that do not tie it to the embedding; never prefixed.
    pub fn lm_head(&self) -> String {
        "lm_head.weight".to_owned()
    }

    /// RMSNorm before attention.
    pub fn input_norm(&self, layer: usize) -> String {
        self.in_layer(layer, "input_layernorm.weight")
    }

    /// RMSNorm before the feed-forward part.
    pub fn post_attention_norm(&self, layer: usize) -> String {
        self.in_layer(layer, "post_attention_layernorm.weight")
    }

    /// RMSNorm of every query head.
    pub fn query_norm(&self, layer: usize) -> String {
        self.in_layer(layer, "self_attn.q_norm.weight")
    }

    /// RMSNorm of every key head.
    pub fn key_norm(&self, layer: usize) -> String {
        self.in_layer(layer, "self_attn.k_norm.weight")
    }

    pub fn weight(&self, layer: usize, projection: Projection) -> String {
        self.in_layer(layer, &format!("{}.weight", projection.path()))
    }

    pub fn bias(&self, layer: usize, projection: Projection) -> String {
        self.in_layer(layer, &format!("{}.bias", projection.path()))
    }

    fn in_layer(&self, layer: usize, rest: &str) -> String {
        format!("{}layers.{layer}.{rest}", self.prefix)
    }
}

/// Whether this is the weight of a layer's projection.
pub(crate) fn is_projection(name: &str) -> bool {
    let module = name.strip_suffix(".weight").unwrap_or_default();
    Projection::ALL.iter().any(|p| module.strip_suffix(p.path()).is_some_and(|layer| layer.ends_with('.')))
}

/// A tensor the forward pass will ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequiredTensor {
    pub name: String,
    pub shape: Vec<usize>,
}

/// Every tensor a model of this configuration needs, in the order the forward pass meets them.
pub fn required_tensors(config: &DecoderConfig, names: &TensorNames) -> Vec<RequiredTensor> {
    let mut required = Vec::new();
    let mut need =
        |name: String, shape: &[usize]| required.push(RequiredTensor { name, shape: shape.to_vec() });
    let hidden = config.hidden_size;
    need(names.embedding(), &[config.vocab_size, hidden]);
    for layer in 0..config.layers {
        need(names.input_norm(layer), &[hidden]);
        for projection in Projection::ALL {
            if projection == Projection::Gate {
                need(names.post_attention_norm(layer), &[hidden]);
            }
            let shape = projection.shape(config);
            need(names.weight(layer, projection), &shape);
            if projection.has_bias(config) {
                need(names.bias(layer, projection), &shape[..1]);
            }
        }
        if config.qk_norm {
            need(names.query_norm(layer), &[config.head_dim]);
            need(names.key_norm(layer), &[config.head_dim]);
        }
    }
    need(names.final_norm(), &[hidden]);
    if !config.tie_word_embeddings {
        need(names.lm_head(), &[config.vocab_size, hidden]);
    }
    required
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Family;
    use crate::tiny::tiny_config;

    fn names_of(config: &DecoderConfig) -> Vec<String> {
        required_tensors(config, &TensorNames::PREFIXED).into_iter().map(|tensor| tensor.name).collect()
    }

    #[test]
    fn families_differ_where_they_should() {
        let qwen3 = names_of(&tiny_config(Family::Qwen3));
        assert!(qwen3.contains(&"model.layers.1.self_attn.k_norm.weight".to_owned()));
        assert!(!qwen3.iter().any(|name| name.ends_with(".bias")));

        let qwen2 = names_of(&tiny_config(Family::Qwen2));
        assert!(qwen2.contains(&"model.layers.0.self_attn.v_proj.bias".to_owned()));
        assert!(!qwen2.contains(&"model.layers.0.self_attn.o_proj.bias".to_owned()));
        assert!(!qwen2.iter().any(|name| name.contains("q_norm")));
    }

    #[test]
    fn published_parameter_count_is_reproduced() {
        // Qwen3-8B has 8,190,735,360 parameters.
        let config = DecoderConfig {
            hidden_size: 4096,
            intermediate_size: 12288,
            layers: 36,
            query_heads: 32,
            kv_heads: 8,
            head_dim: 128,
            vocab_size: 151_936,
            tie_word_embeddings: false,
            ..tiny_config(Family::Qwen3)
        };
        let tensors = required_tensors(&config, &TensorNames::PREFIXED);
        let total: usize = tensors.iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum();
        assert_eq!(total, 8_190_735_360);
        assert_eq!(tensors.len(), 399);
    }
}
