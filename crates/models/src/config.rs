//! `config.json` of any supported family, lowered into the one [`DecoderConfig`] the rest of the
//! code reads.
//!
//! Invariant: a `DecoderConfig` obtained here has passed [`DecoderConfig::validate`]; every size is
//! positive, heads divide evenly, and a window is either masked layer by layer or masks nothing.

use oscar_backend::{Feature, Gate, RouterRule, RouterScores};
use oscar_codec::{CacheLayout, CodeLayout, CodecError, KvFormat, Windows};
use serde::de::DeserializeOwned;

use crate::delta::DeltaConfig;
use crate::error::LoadError;
use crate::families::deepseek_v3::LatentMoeConfig;
use crate::families::{
    deepseek_v3, gemma3, glm4_moe, glm4_moe_lite, gpt_oss, llama, minimax_m2, mistral, mixtral, qwen2, qwen3,
    qwen3_moe, qwen3_next,
};
pub use crate::family::Family;
use crate::family::Header;
use crate::fp8;
use crate::latent::LatentConfig;
use crate::rope::RopeConfig;
use crate::source::ModelSource;
use crate::tensor::WeightDtype;
use crate::tensor_names::ExpertNames;

/// More layers are refused as those of a corrupt file.
pub(crate) const MOST_LAYERS: usize = 4096;

/// The vectors that the RMSNorm of queries and keys normalizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    None,
    /// Each head by itself, all with the same weights.
    EachHead,
    /// All query heads of a token together, and all its key heads.
    AllHeads,
}

/// The layers whose feed-forward part is a mixture of experts.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig {
    pub experts: usize,
    /// Outputs of an expert's gate.
    pub width: usize,
    /// Outputs of the shared expert's gate; 0 if there is none.
    pub shared_width: usize,
    /// The shared expert has a gate of its own.
    pub shared_gate: bool,
    pub rule: RouterRule,
    /// The router adds a correction to its scores when it chooses.
    pub correction: bool,
    /// The router and the matrices of experts have biases.
    pub biases: bool,
    /// The file holds codes of four bits instead of the experts' weights.
    pub mxfp4: bool,
    /// Layers with a dense feed-forward part instead, ascending.
    pub dense_layers: Vec<usize>,
    pub names: ExpertNames,
}

/// Layers whose queries see only the last positions.
#[derive(Debug, Clone, PartialEq)]
pub struct SlidingLayers {
    /// Positions that a query sees, itself among them.
    pub window: usize,
    /// Ascending.
    pub layers: Vec<usize>,
    /// RoPE of these layers; the other layers' if absent.
    pub rope: Option<RopeConfig>,
}

/// Everything that running a decoder-only transformer needs, for any family.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    pub family: Family,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub layers: usize,
    pub query_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab_size: usize,
    pub rms_norm_eps: f32,
    pub rope: RopeConfig,
    /// Channels of a head that RoPE turns, the first ones; `None`: all.
    pub rotary_dim: Option<usize>,
    /// Latent attention in every layer. Then there is one KV head, whose rows are those of the cache.
    pub latent: Option<LatentConfig>,
    /// Layers with a gated delta net instead of attention.
    pub delta: Option<DeltaConfig>,
    /// A sigmoid gate between attention and its output projection, from further rows of the query
    /// projection.
    pub output_gate: bool,
    /// RMSNorm of queries and keys before RoPE.
    pub qk_norm: QkNorm,
    /// Bias on the query, key and value projections.
    pub qkv_bias: bool,
    /// Bias on the attention output projection.
    pub output_bias: bool,
    /// Bias on the gate, up and down projections.
    pub mlp_bias: bool,
    /// The mixture of experts of all layers that are not dense.
    pub moe: Option<MoeConfig>,
    /// The output projection is the embedding table.
    pub tie_word_embeddings: bool,
    pub max_position_embeddings: usize,
    /// Always at least `max_position_embeddings`, so it never masks anything.
    pub sliding_window: Option<usize>,
    /// Layers with a window that does mask; `None` if every layer sees the whole context.
    pub sliding: Option<SlidingLayers>,
    /// Factor of attention's scores; `1/√head_dim` if absent.
    pub attention_scale: Option<f32>,
    /// Every query head has one more score in its softmax, without a value.
    pub attention_sinks: bool,
    /// Added to the weights of every RMSNorm.
    pub norm_offset: f32,
    /// The results of attention and of the feed-forward part are normalized before they are added.
    pub result_norms: bool,
    /// Factor of the embedding.
    pub embedding_scale: f32,
    /// Between the products of a dense feed-forward part, and of every expert.
    pub gate: Gate,
    pub eos_token_ids: Vec<u32>,
    pub bos_token_id: Option<u32>,
    /// The weight dtype that the file states; the tensors themselves decide.
    pub dtype: Option<WeightDtype>,
    /// The file says that matrices may be FP8 with scales; the tensors decide which.
    pub fp8_weights: bool,
}

fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, LoadError> {
    serde_json::from_slice(bytes).map_err(|source| LoadError::Json { file: "config.json".to_owned(), source })
}

impl MoeConfig {
    /// Experts chosen by a softmax, normalized, in every layer; none is shared.
    pub(crate) fn new(experts: usize, chosen: usize, width: usize, names: ExpertNames) -> Self {
        let scores = RouterScores::Softmax;
        Self {
            experts,
            width,
            shared_width: 0,
            shared_gate: false,
            rule: RouterRule { chosen, scores, normalize: true, factor: 1.0, groups: None },
            correction: false,
            biases: false,
            mxfp4: false,
            dense_layers: Vec::new(),
            names,
        }
    }

    fn validate(&self) -> Result<(), LoadError> {
        const MOST_EXPERTS: usize = 4096;
        const LARGEST_WIDTH: usize = 1 << 26;
        let chosen = self.rule.chosen;
        for (field, value, least, most) in [
            ("the number of experts", self.experts, 1, MOST_EXPERTS),
            ("the width of an expert", self.width, 1, LARGEST_WIDTH),
            ("the width of the shared expert", self.shared_width, 0, LARGEST_WIDTH),
        ] {
            if !(least..=most).contains(&value) {
                return Err(LoadError::config_field(
                    field,
                    format!("is {value}; it must be between {least} and {most}"),
                ));
            }
        }
        if chosen == 0 || chosen > self.experts {
            return Err(LoadError::config_field(
                "num_experts_per_tok",
                format!("is {chosen}, but a layer has {} experts", self.experts),
            ));
        }
        if let Some(groups) = self.rule.groups.filter(|_| chosen > self.rule.candidates(self.experts)) {
            let problem = format!(
                "is {} and topk_group {}: {} experts cannot give {chosen} from groups of equal size",
                groups.count, groups.kept, self.experts
            );
            return Err(LoadError::config_field("n_group", problem));
        }
        if !self.rule.factor.is_finite() {
            return Err(LoadError::config_field("routed_scaling_factor", format!("is {}", self.rule.factor)));
        }
        Ok(())
    }
}

impl DecoderConfig {
    /// Reads `config.json`.
    pub fn load(source: &ModelSource) -> Result<Self, LoadError> {
        Self::from_json(&source.read_required("config.json")?)
    }

    /// Parses the bytes of a `config.json`.
    pub fn from_json(bytes: &[u8]) -> Result<Self, LoadError> {
        let header: Header = read(bytes)?;
        let family = Family::detect(&header)?;
        let method = header.quantization_config.as_ref().and_then(|q| q.get("quant_method"));
        let mxfp4 = family == Family::GptOss && method.is_some_and(|method| method == "mxfp4");
        let fp8 = header.quantization_config.as_ref().filter(|_| !mxfp4);
        fp8.map_or(Ok(()), fp8::check_config)?;
        let mut config = match family {
            Family::Qwen3 => read::<qwen3::Qwen3Config>(bytes)?.lower(),
            Family::Qwen2 => read::<qwen2::Qwen2Config>(bytes)?.lower(),
            Family::Llama => read::<llama::LlamaConfig>(bytes)?.lower(),
            Family::Mistral => read::<mistral::MistralConfig>(bytes)?.lower(),
            Family::Qwen3Moe => read::<qwen3_moe::Qwen3MoeConfig>(bytes)?.lower(),
            Family::Mixtral => read::<mixtral::MixtralConfig>(bytes)?.lower(),
            Family::Glm4Moe => read::<glm4_moe::Glm4MoeConfig>(bytes)?.lower(),
            Family::MiniMaxM2 => read::<minimax_m2::MiniMaxM2Config>(bytes)?.lower(),
            Family::Gemma3 => gemma3::read(read(bytes)?),
            Family::GptOss => {
                gpt_oss::demand(&read(bytes)?)?;
                read::<gpt_oss::GptOssConfig>(bytes)?.lower(mxfp4)
            }
            Family::DeepseekV3 => read::<LatentMoeConfig>(bytes)?.lower(family, deepseek_v3::DEFAULTS),
            Family::Glm4MoeLite => read::<LatentMoeConfig>(bytes)?.lower(family, glm4_moe_lite::DEFAULTS),
            Family::Qwen3Next | Family::Qwen3_5 | Family::Qwen3_5Moe => {
                qwen3_next::read(family, read(bytes)?, fp8.is_some())
            }
        }?;
        config.fp8_weights = fp8.is_some();
        config.validate()?;
        Ok(config)
    }

    /// Query heads that share one key-value head.
    pub fn group_size(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// Width of all query heads together.
    pub fn query_width(&self) -> usize {
        self.query_heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Channels of a head that RoPE turns.
    pub fn rotary_width(&self) -> usize {
        match &self.latent {
            Some(latent) => latent.rotary,
            None => self.rotary_dim.unwrap_or(self.head_dim),
        }
    }

    /// Positions that a query of this layer sees; all if absent.
    pub fn window_of(&self, layer: usize) -> Option<usize> {
        let sliding = self.sliding.as_ref()?;
        sliding.layers.binary_search(&layer).is_ok().then_some(sliding.window)
    }

    /// The layers that see the whole context, as the cache numbers them: all but the sliding ones. Only
    /// their history is quantized.
    pub fn full_attention_layers(&self) -> Vec<usize> {
        let attends = (0..self.layers).filter(|&layer| self.delta_of(layer).is_none());
        let numbered = attends.enumerate().filter(|&(_, layer)| self.window_of(layer).is_none());
        numbered.map(|(cached, _)| cached).collect()
    }

    /// What sliding layers see and what is stored of them.
    pub fn describe_sliding(&self) -> Option<String> {
        let SlidingLayers { window, layers, .. } = self.sliding.as_ref()?;
        Some(format!(
            "{} of {} layers see the last {window} tokens only; they keep no more than that, unquantized",
            layers.len(),
            self.layers
        ))
    }

    /// The cache of this model in a named format; sliding layers form a group of their own.
    pub fn cache_layout(
        &self,
        format: KvFormat,
        windows: Windows,
        order: CodeLayout,
    ) -> Result<CacheLayout, CodecError> {
        if self.latent.is_some() {
            return CacheLayout::latent(format, self.layers, self.head_dim, order);
        }
        let (layers, heads, d) = (self.cache_layers(), self.kv_heads, self.head_dim);
        let layout =
            CacheLayout::new(format, layers, heads, d, windows, order)?.with_states(self.state_bytes());
        match &self.sliding {
            Some(SlidingLayers { window, layers, .. }) => layout.with_sliding_layers(*window, layers),
            None => Ok(layout),
        }
    }

    /// What this model needs of a device beyond what all families need.
    pub fn features(&self) -> Vec<Feature> {
        let needed = [
            (Feature::SlidingWindow, self.sliding.is_some()),
            (Feature::AttentionSinks, self.attention_sinks),
            (Feature::ResultNorm, self.result_norms),
            (Feature::EmbeddingScale, self.embedding_scale != 1.0),
            (Feature::OtherGates, self.gate != Gate::Silu),
            (Feature::ExpertBiases, self.moe.as_ref().is_some_and(|moe| moe.biases)),
            (Feature::ExpertGroups, self.moe.as_ref().is_some_and(|moe| moe.rule.groups.is_some())),
            (Feature::LatentAttention, self.latent.is_some()),
            (Feature::DeltaNet, self.delta.is_some()),
            (Feature::OutputGate, self.output_gate),
            (Feature::SharedExpertGate, self.moe.as_ref().is_some_and(|moe| moe.shared_gate)),
        ];
        needed.into_iter().filter(|(_, needed)| *needed).map(|(feature, _)| feature).collect()
    }

    /// Whether rows of the history can be evicted, and why not.
    pub fn evicts_rows(&self) -> Result<(), &'static str> {
        if self.latent.is_some() {
            return Err(
                "the model has latent attention (MLA), whose rows are not evicted: leave --evict and \
                        --kv-budget out",
            );
        }
        if self.delta.is_some() {
            return Err(
                "the model has layers with a recurrent state (gated delta nets), which cannot forget \
                        single rows: leave --evict and --kv-budget out",
            );
        }
        match self.sliding.is_some() || self.attention_sinks {
            true => Err("the model has layers with sliding windows or attention sinks, whose rows are not \
                         evicted: leave --evict and --kv-budget out"),
            false => Ok(()),
        }
    }

    /// The mixture of experts of a layer; `None` if the layer is dense.
    pub fn moe_of(&self, layer: usize) -> Option<&MoeConfig> {
        self.moe.as_ref().filter(|moe| moe.dense_layers.binary_search(&layer).is_err())
    }

    /// Activations of a row between the products of a feed-forward part: gated ones of a dense layer,
    /// or gated ones and results of all chosen experts.
    pub fn feed_forward_width(&self) -> usize {
        let experts = self.moe.as_ref().map_or(0, |moe| moe.rule.chosen * (moe.width + self.hidden_size));
        let dense = if self.has_dense_layers() { self.intermediate_size } else { 0 };
        experts.max(dense)
    }

    /// The layers with experts, ascending.
    pub fn mixtures(&self) -> impl Iterator<Item = usize> {
        (0..self.layers).filter(|&layer| self.moe_of(layer).is_some())
    }

    /// Whether some layer is dense.
    pub fn has_dense_layers(&self) -> bool {
        (0..self.layers).any(|layer| self.moe_of(layer).is_none())
    }

    /// Refuses sizes that no forward pass can use, and sizes that only a corrupt file states.
    pub fn validate(&self) -> Result<(), LoadError> {
        // Generous bounds that keep every product of two sizes inside 64 bits and every list of
        // layers short.
        const LARGEST_SIZE: usize = 1 << 26;
        // Positions are multiplied as f32, exact up to here.
        const MOST_POSITIONS: usize = 1 << 24;
        self.latent.as_ref().map_or(Ok(()), |latent| latent.validate(self))?;
        let sizes = [
            ("hidden_size", self.hidden_size, LARGEST_SIZE),
            ("intermediate_size", self.intermediate_size, LARGEST_SIZE),
            ("num_hidden_layers", self.layers, MOST_LAYERS),
            ("num_attention_heads", self.query_heads, LARGEST_SIZE),
            ("num_key_value_heads", self.kv_heads, LARGEST_SIZE),
            ("head_dim", self.head_dim, LARGEST_SIZE),
            ("vocab_size", self.vocab_size, LARGEST_SIZE),
            ("max_position_embeddings", self.max_position_embeddings, MOST_POSITIONS),
            ("num_attention_heads * head_dim", self.query_heads.saturating_mul(self.head_dim), LARGEST_SIZE),
        ];
        for (field, value, largest) in sizes {
            if value == 0 || value > largest {
                return Err(LoadError::config_field(
                    field,
                    format!("is {value}; it must be between 1 and {largest}"),
                ));
            }
        }
        if !self.query_heads.is_multiple_of(self.kv_heads) {
            return Err(LoadError::config_field(
                "num_attention_heads",
                format!("is {}, which {} key-value heads do not divide", self.query_heads, self.kv_heads),
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(LoadError::config_field(
                "head_dim",
                format!("is {}; rotary embedding pairs elements, so it must be even", self.head_dim),
            ));
        }
        let rotary = self.rotary_width();
        if rotary == 0 || rotary > self.head_dim || !rotary.is_multiple_of(2) {
            let of = self.head_dim;
            let problem =
                format!("turns {rotary} of {of} channels of a head; it must be an even number of them");
            return Err(LoadError::config_field("partial_rotary_factor", problem));
        }
        self.moe.as_ref().map_or(Ok(()), MoeConfig::validate)?;
        self.delta.as_ref().map_or(Ok(()), |delta| delta.validate(self))?;
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps >= 0.0) {
            return Err(LoadError::config_field("rms_norm_eps", format!("is {}", self.rms_norm_eps)));
        }
        if let Some(SlidingLayers { window: 0, .. }) = &self.sliding {
            return Err(LoadError::config_field("sliding_window", "is 0; a query must see at least itself"));
        }
        if self.sliding.as_ref().is_some_and(|sliding| sliding.layers.len() == self.layers) {
            let problem = "makes every layer slide; the cache needs a layer that sees the whole context";
            return Err(LoadError::config_field("layer_types", problem));
        }
        if self.result_norms && self.moe.is_some() {
            return Err(LoadError::config_field("num_experts", "is given beside norms of results"));
        }
        let scales =
            [("query_pre_attn_scalar", self.attention_scale), ("hidden_size", Some(self.embedding_scale))];
        for (field, scale) in scales {
            if scale.is_some_and(|scale| !(scale.is_finite() && scale > 0.0)) {
                return Err(LoadError::config_field(field, format!("gives a factor of {scale:?}")));
            }
        }
        match self.sliding_window {
            Some(window) if window < self.max_position_embeddings => {
                Err(LoadError::SlidingWindow { window, max_positions: self.max_position_embeddings })
            }
            _ => Ok(()),
        }
    }
}
