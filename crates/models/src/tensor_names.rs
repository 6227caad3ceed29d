//! The names and shapes of a decoder's weights. Tensor names are spelled only here.

use oscar_backend::ExpertId;

use crate::config::{DecoderConfig, MoeConfig, QkNorm};
use crate::fused;
use crate::latent::LatentConfig;

/// The matrices of a layer. Layers with heads have query, key and value; those with latent attention
/// have the two of the latent, and a query that goes through a latent of its own or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Projection {
    Query,
    Key,
    Value,
    /// To the latent of queries, and from there to all query heads.
    QueryDown,
    QueryUp,
    /// To the latent and the rotary key, and from the latent to keys and values, head by head.
    LatentDown,
    LatentUp,
    Output,
    Gate,
    Up,
    Down,
}

impl Projection {
    const ALL: [Projection; 11] = [
        Self::Query,
        Self::Key,
        Self::Value,
        Self::QueryDown,
        Self::QueryUp,
        Self::LatentDown,
        Self::LatentUp,
        Self::Output,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];

    /// The matrices of a feed-forward part, and of an expert.
    pub const FEED_FORWARD: [Projection; 3] = [Self::Gate, Self::Up, Self::Down];

    /// The attention matrices of a model's layers, in the order a layer applies them.
    pub fn attention(config: &DecoderConfig) -> &'static [Projection] {
        match &config.latent {
            None => &[Self::Query, Self::Key, Self::Value, Self::Output],
            Some(LatentConfig { query_rank: None, .. }) => {
                &[Self::Query, Self::LatentDown, Self::LatentUp, Self::Output]
            }
            Some(_) => &[Self::QueryDown, Self::QueryUp, Self::LatentDown, Self::LatentUp, Self::Output],
        }
    }

    /// The matrices of a dense layer, in the order it applies them.
    pub fn of(config: &DecoderConfig) -> impl Iterator<Item = Projection> {
        Self::attention(config).iter().copied().chain(Self::FEED_FORWARD)
    }

    fn path(self) -> &'static str {
        match self {
            Self::Query => "self_attn.q_proj",
            Self::Key => "self_attn.k_proj",
            Self::Value => "self_attn.v_proj",
            Self::QueryDown => "self_attn.q_a_proj",
            Self::QueryUp => "self_attn.q_b_proj",
            Self::LatentDown => "self_attn.kv_a_proj_with_mqa",
            Self::LatentUp => "self_attn.kv_b_proj",
            Self::Output => "self_attn.o_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::Down => "mlp.down_proj",
        }
    }

    /// Rows (outputs) and columns (inputs) of the matrix as stored; `[0, 0]` if the model has none.
    pub fn shape(self, config: &DecoderConfig) -> [usize; 2] {
        let (hidden, heads) = (config.hidden_size, config.query_heads);
        match (self, &config.latent) {
            (Self::Gate | Self::Up, _) => [config.intermediate_size, hidden],
            (Self::Down, _) => [hidden, config.intermediate_size],
            // With the gates of the heads, if they have some.
            (Self::Query, None) => [config.query_width() * (1 + usize::from(config.output_gate)), hidden],
            (Self::Key | Self::Value, None) => [config.kv_width(), hidden],
            (Self::Output, None) => [hidden, config.query_width()],
            (Self::Query, Some(latent)) => [heads * latent.query(), hidden],
            (Self::QueryDown, Some(latent)) => [latent.query_rank.unwrap_or(0), hidden],
            (Self::QueryUp, Some(latent)) => [heads * latent.query(), latent.query_rank.unwrap_or(0)],
            (Self::LatentDown, Some(latent)) => [latent.row(), hidden],
            (Self::LatentUp, Some(latent)) => [heads * (latent.key + latent.value), latent.rank],
            (Self::Output, Some(latent)) => [hidden, heads * latent.value],
            (Self::Key | Self::Value, Some(_)) => [0, 0],
            (Self::QueryDown | Self::QueryUp | Self::LatentDown | Self::LatentUp, None) => [0, 0],
        }
    }

    /// Whether this model adds a bias after the matrix.
    pub fn has_bias(self, config: &DecoderConfig) -> bool {
        match self {
            Self::Query | Self::Key | Self::Value => config.qkv_bias,
            Self::QueryDown | Self::QueryUp | Self::LatentDown | Self::LatentUp => false,
            Self::Output => config.output_bias,
            Self::Gate | Self::Up | Self::Down => config.mlp_bias,
        }
    }
}

/// How a family names the parts of its mixtures of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertNames {
    /// `mlp.experts.E.gate_proj` (Qwen3-MoE, GLM).
    Mlp,
    /// `block_sparse_moe.experts.E.w1` (Mixtral, MiniMax).
    BlockSparse,
    /// `mlp.experts.gate_up_proj`: all experts of a layer in one tensor (gpt-oss).
    Fused,
    /// `mlp.experts.E.gate_proj`, `mlp.shared_expert.gate_proj` (Qwen3-Next).
    Qwen,
    /// The same with all routed experts in one tensor, outputs before inputs (Qwen3.5).
    QwenFused,
}

impl ExpertNames {
    pub const ALL: [Self; 5] = [Self::Mlp, Self::BlockSparse, Self::Fused, Self::Qwen, Self::QwenFused];

    fn router(self) -> &'static str {
        match self {
            Self::Mlp | Self::Qwen | Self::QwenFused => "mlp.gate.weight",
            Self::BlockSparse => "block_sparse_moe.gate.weight",
            Self::Fused => "mlp.router.weight",
        }
    }

    fn correction(self) -> &'static str {
        match self {
            Self::BlockSparse => "block_sparse_moe.e_score_correction_bias",
            _ => "mlp.gate.e_score_correction_bias",
        }
    }

    /// The folder of all experts.
    fn experts(self) -> &'static str {
        match self {
            Self::BlockSparse => "block_sparse_moe.experts",
            _ => "mlp.experts",
        }
    }

    fn shared(self) -> &'static str {
        match self {
            Self::Mlp | Self::Fused => "mlp.shared_experts",
            Self::Qwen | Self::QwenFused => "mlp.shared_expert",
            Self::BlockSparse => "block_sparse_moe.shared_experts",
        }
    }

    /// A matrix of an expert; one of [`Projection::FEED_FORWARD`].
    fn part(self, part: Projection) -> &'static str {
        match (self, part) {
            (Self::BlockSparse, Projection::Gate) => "w1",
            (Self::BlockSparse, Projection::Up) => "w3",
            (Self::BlockSparse, Projection::Down) => "w2",
            _ => part.path().rsplit('.').next().unwrap_or_default(),
        }
    }
}

/// The names in one checkpoint: usually under `model.`, without it when the bare decoder was saved,
/// and under a longer name beside a vision tower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorNames {
    prefix: &'static str,
}

impl TensorNames {
    /// Names as a causal language model saves them.
    pub const PREFIXED: Self = Self { prefix: "model." };
    /// Names as the decoder inside it saves them.
    pub const BARE: Self = Self { prefix: "" };

    /// Names beside a vision tower, as older and newer releases of transformers save them.
    const NESTED: [Self; 2] =
        [Self { prefix: "language_model.model." }, Self { prefix: "model.language_model." }];

    /// The spelling a checkpoint uses.
    pub(crate) fn detect(contains: impl Fn(&str) -> bool) -> Self {
        let mut known = [Self::PREFIXED, Self::BARE].into_iter().chain(Self::NESTED);
        known.find(|names| contains(&names.embedding())).unwrap_or(Self::PREFIXED)
    }

    pub fn embedding(&self) -> String {
        format!("{}embed_tokens.weight", self.prefix)
    }

    pub fn final_norm(&self) -> String {
        format!("{}norm.weight", self.prefix)
    }

    /// The output projection of models that do not tie it to the embedding; beside the decoder.
    pub fn lm_head(&self) -> String {
        let outer = if self.prefix == "language_model.model." { "language_model." } else { "" };
        format!("{outer}lm_head.weight")
    }

    /// The beginning of the names of a layer's tensors.
    pub(crate) fn layer(&self, layer: usize) -> String {
        self.in_layer(layer, "")
    }

    /// RMSNorm before attention.
    pub fn input_norm(&self, layer: usize) -> String {
        self.in_layer(layer, "input_layernorm.weight")
    }

    /// RMSNorm before the feed-forward part. Families that also normalize results call it otherwise.
    pub fn feed_forward_norm(&self, layer: usize, config: &DecoderConfig) -> String {
        let name = if config.result_norms { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
        self.in_layer(layer, &format!("{name}.weight"))
    }

    /// RMSNorms of the results of attention and of the feed-forward part.
    pub fn result_norms(&self, layer: usize) -> [String; 2] {
        ["post_attention_layernorm", "post_feedforward_layernorm"]
            .map(|name| self.in_layer(layer, &format!("{name}.weight")))
    }

    /// The attention sinks of a layer.
    pub fn sinks(&self, layer: usize) -> String {
        self.in_layer(layer, "self_attn.sinks")
    }

    /// RMSNorm of every query head.
    pub fn query_norm(&self, layer: usize) -> String {
        self.in_layer(layer, "self_attn.q_norm.weight")
    }

    /// RMSNorm of every key head.
    pub fn key_norm(&self, layer: usize) -> String {
        self.in_layer(layer, "self_attn.k_norm.weight")
    }

    /// RMSNorm of the latent of queries.
    pub fn query_latent_norm(&self, layer: usize) -> String {
        self.in_layer(layer, "self_attn.q_a_layernorm.weight")
    }

    /// RMSNorm of the latent of keys and values.
    pub fn latent_norm(&self, layer: usize) -> String {
        self.in_layer(layer, "self_attn.kv_a_layernorm.weight")
    }

    pub fn weight(&self, layer: usize, projection: Projection) -> String {
        self.in_layer(layer, &format!("{}.weight", projection.path()))
    }

    pub fn bias(&self, layer: usize, projection: Projection) -> String {
        self.in_layer(layer, &format!("{}.bias", projection.path()))
    }

    /// The weights of a layer's router.
    pub fn router(&self, layer: usize, moe: &MoeConfig) -> String {
        self.in_layer(layer, moe.names.router())
    }

    /// The correction of a router's scores.
    pub fn correction(&self, layer: usize, moe: &MoeConfig) -> String {
        self.in_layer(layer, moe.names.correction())
    }

    /// The gate, up or down matrix of an expert.
    pub fn expert(&self, layer: usize, moe: &MoeConfig, id: ExpertId, part: Projection) -> String {
        let (names, part) = (moe.names, moe.names.part(part));
        match id {
            ExpertId::Routed(index) => {
                self.in_layer(layer, &format!("{}.{index}.{part}.weight", names.experts()))
            }
            ExpertId::Shared => self.in_layer(layer, &format!("{}.{part}.weight", names.shared())),
        }
    }

    /// The bias of a layer's router.
    pub fn router_bias(&self, layer: usize) -> String {
        self.in_layer(layer, "mlp.router.bias")
    }

    /// The tensors of all experts of a layer: gate and up together, and down.
    pub(crate) fn fused(&self, layer: usize) -> [String; 2] {
        ["gate_up_proj", "down_proj"].map(|name| self.in_layer(layer, &format!("mlp.experts.{name}")))
    }

    /// The gate on the shared expert.
    pub fn shared_gate(&self, layer: usize) -> String {
        self.in_layer(layer, "mlp.shared_expert_gate.weight")
    }

    pub(crate) fn in_layer(&self, layer: usize, rest: &str) -> String {
        format!("{}layers.{layer}.{rest}", self.prefix)
    }
}

/// Whether this is the weight of a layer's projection or of an expert.
pub(crate) fn is_projection(name: &str) -> bool {
    let module = name.strip_suffix(".weight").unwrap_or_default();
    let dense = |p: &Projection| module.strip_suffix(p.path()).is_some_and(|layer| layer.ends_with('.'));
    Projection::ALL.iter().any(dense) || name.ends_with(".weight") && is_expert(name)
}

/// Whether this tensor belongs to an expert: its weights or their scales.
pub(crate) fn is_expert(name: &str) -> bool {
    let folders = ExpertNames::ALL.iter().flat_map(|names| [names.experts(), names.shared()]);
    folders.into_iter().any(|folder| name.split_once(folder).is_some_and(|(_, rest)| rest.starts_with('.')))
}

/// The layer that a tensor belongs to.
pub(crate) fn layer_of(name: &str) -> Option<usize> {
    let (_, rest) = name.split_once("layers.")?;
    rest.split('.').next()?.parse().ok()
}

/// A tensor the forward pass will ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequiredTensor {
    pub name: String,
    pub shape: Vec<usize>,
    /// Bytes of MXFP4 codes or scales instead of numbers.
    pub packed: bool,
}

/// Every tensor a model of this configuration needs, in the order the forward pass meets them.
pub fn required_tensors(config: &DecoderConfig, names: &TensorNames) -> Vec<RequiredTensor> {
    let mut required = Vec::new();
    let mut need = |name: String, shape: &[usize]| {
        let packed = fused::is_packed(&name);
        required.push(RequiredTensor { name, shape: shape.to_vec(), packed });
    };
    let hidden = config.hidden_size;
    need(names.embedding(), &[config.vocab_size, hidden]);
    for layer in 0..config.layers {
        need(names.input_norm(layer), &[hidden]);
        let moe = config.moe_of(layer);
        let delta = config.delta_of(layer);
        let dense = Projection::FEED_FORWARD.into_iter().filter(|_| moe.is_none());
        let attention = Projection::attention(config).iter().copied().filter(|_| delta.is_none());
        let of_delta = delta.map(|delta| delta.required(names, layer, hidden));
        of_delta.into_iter().flatten().for_each(|(name, shape)| need(name, &shape));
        for projection in attention.chain(dense) {
            if projection == Projection::Gate {
                need(names.feed_forward_norm(layer, config), &[hidden]);
            }
            let shape = projection.shape(config);
            need(names.weight(layer, projection), &shape);
            if projection.has_bias(config) {
                need(names.bias(layer, projection), &shape[..1]);
            }
        }
        if let Some(moe) = moe {
            need(names.feed_forward_norm(layer, config), &[hidden]);
            need(names.router(layer, moe), &[moe.experts, hidden]);
            if moe.correction {
                need(names.correction(layer, moe), &[moe.experts]);
            }
            if moe.biases {
                need(names.router_bias(layer), &[moe.experts]);
            }
            if moe.shared_gate {
                need(names.shared_gate(layer), &[1, hidden]);
            }
            let tensors = fused::required(names, layer, moe, hidden);
            tensors.into_iter().for_each(|(name, shape)| need(name, &shape));
            for id in moe.ids().filter(|&id| !moe.names.joins(id)) {
                for part in Projection::FEED_FORWARD {
                    need(names.expert(layer, moe, id, part), &moe.shape(id, part, hidden));
                }
            }
        }
        let norms = match config.qk_norm {
            _ if delta.is_some() => None,
            QkNorm::None => None,
            QkNorm::EachHead => Some((config.head_dim, config.head_dim)),
            QkNorm::AllHeads => Some((config.query_width(), config.kv_width())),
        };
        if let Some((query, key)) = norms {
            need(names.query_norm(layer), &[query]);
            need(names.key_norm(layer), &[key]);
        }
        if let Some(latent) = &config.latent {
            latent.query_rank.into_iter().for_each(|rank| need(names.query_latent_norm(layer), &[rank]));
            need(names.latent_norm(layer), &[latent.rank]);
        }
        if config.attention_sinks {
            need(names.sinks(layer), &[config.query_heads]);
        }
        if config.result_norms {
            names.result_norms(layer).into_iter().for_each(|name| need(name, &[hidden]));
        }
    }
    need(names.final_norm(), &[hidden]);
    if !config.tie_word_embeddings {
        need(names.lm_head(), &[config.vocab_size, hidden]);
    }
    required
}

impl MoeConfig {
    /// All experts of a layer, the shared one last.
    pub fn ids(&self) -> impl Iterator<Item = ExpertId> {
        let shared = (self.shared_width > 0).then_some(ExpertId::Shared);
        (0..self.experts).map(ExpertId::Routed).chain(shared)
    }

    /// Outputs and inputs of an expert's matrix.
    pub fn shape(&self, id: ExpertId, part: Projection, hidden: usize) -> [usize; 2] {
        let width = match id {
            ExpertId::Routed(_) => self.width,
            ExpertId::Shared => self.shared_width,
        };
        if part == Projection::Down { [hidden, width] } else { [width, hidden] }
    }
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
    fn experts_have_their_family_s_names() {
        let glm = names_of(&tiny_config(Family::Glm4Moe));
        for name in ["mlp.experts.3.down_proj.weight", "mlp.shared_experts.up_proj.weight", "mlp.gate.weight"]
        {
            assert!(glm.contains(&format!("model.layers.1.{name}")), "{name}");
        }
        assert!(glm.contains(&"model.layers.0.mlp.gate_proj.weight".to_owned()));
        assert!(!glm.contains(&"model.layers.1.mlp.gate_proj.weight".to_owned()));
        let minimax = names_of(&tiny_config(Family::MiniMaxM2));
        for name in ["block_sparse_moe.experts.0.w3.weight", "block_sparse_moe.e_score_correction_bias"] {
            assert!(minimax.contains(&format!("model.layers.0.{name}")), "{name}");
        }
        for (name, projection, expert) in [
            ("model.layers.0.mlp.gate_proj.weight", true, false),
            ("model.layers.0.mlp.gate.weight", false, false),
            ("model.layers.0.mlp.experts.7.gate_proj.weight", true, true),
            ("model.layers.0.mlp.experts.7.gate_proj.weight_scale_inv", false, true),
            ("model.layers.61.block_sparse_moe.experts.255.w2.weight", true, true),
            ("model.layers.3.mlp.shared_experts.down_proj.weight", true, true),
            ("model.embed_tokens.weight", false, false),
        ] {
            assert_eq!((is_projection(name), is_expert(name)), (projection, expert), "{name}");
        }
        assert_eq!(
            (layer_of("model.layers.92.eh_proj.weight"), layer_of("model.norm.weight")),
            (Some(92), None)
        );
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
