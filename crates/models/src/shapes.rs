//! Shapes of published models, for benchmarks that need a model's sizes but not its weights.

use oscar_backend::{DeltaShape, ExpertGroups, Gate, HeadShape, RouterRule, RouterScores, StepSize};

use crate::config::{DecoderConfig, Family, MoeConfig, QkNorm, SlidingLayers};
use crate::delta::DeltaConfig;
use crate::latent::LatentConfig;
use crate::rope::{RopeConfig, RopeScaling};
use crate::tensor::WeightDtype;
use crate::tensor_names::ExpertNames;

/// Names that [`shape`] knows.
pub const NAMES: [&str; 14] = [
    "qwen3-0.6b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "glm-4.7",
    "minimax-m2.7",
    "gpt-oss-20b",
    "gemma-3-4b",
    "gemma-3-27b",
    "glm-4.7-flash",
    "deepseek-v3",
    "qwen3-next-80b-a3b",
    "qwen3.5-35b-a3b",
];

/// The configuration of a published model.
pub fn shape(name: &str) -> Option<DecoderConfig> {
    dense_shape(name)
        .or_else(|| expert_shape(name))
        .or_else(|| gemma_shape(name))
        .or_else(|| latent_shape(name))
        .or_else(|| delta_shape(name))
}

fn dense_shape(name: &str) -> Option<DecoderConfig> {
    let (hidden_size, intermediate_size, layers, query_heads, tied) = match name {
        "qwen3-0.6b" => (1024, 3072, 28, 16, true),
        "qwen3-4b" => (2560, 9728, 36, 32, true),
        "qwen3-8b" => (4096, 12288, 36, 32, false),
        "qwen3-32b" => (5120, 25600, 64, 64, false),
        _ => return None,
    };
    Some(DecoderConfig {
        family: Family::Qwen3,
        hidden_size,
        intermediate_size,
        layers,
        query_heads,
        kv_heads: 8,
        head_dim: 128,
        vocab_size: 151_936,
        rms_norm_eps: 1e-6,
        rope: RopeConfig::plain(1_000_000.0),
        rotary_dim: None,
        latent: None,
        delta: None,
        output_gate: false,
        qk_norm: QkNorm::EachHead,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        moe: None,
        tie_word_embeddings: tied,
        // Benchmarks use longer contexts than the models were trained for.
        max_position_embeddings: 1 << 20,
        sliding_window: None,
        sliding: None,
        attention_scale: None,
        attention_sinks: false,
        norm_offset: 0.0,
        result_norms: false,
        embedding_scale: 1.0,
        gate: Gate::Silu,
        eos_token_ids: vec![151_645],
        bos_token_id: None,
        dtype: Some(WeightDtype::Bf16),
        fp8_weights: false,
    })
}

/// Models with experts, as variations of a dense one.
fn expert_shape(name: &str) -> Option<DecoderConfig> {
    let base = dense_shape("qwen3-8b")?;
    let rule =
        RouterRule { chosen: 8, scores: RouterScores::Softmax, normalize: true, factor: 1.0, groups: None };
    let moe = MoeConfig {
        experts: 128,
        width: 768,
        shared_width: 0,
        shared_gate: false,
        rule,
        correction: false,
        biases: false,
        mxfp4: false,
        dense_layers: Vec::new(),
        names: ExpertNames::Mlp,
    };
    let corrected = RouterRule { scores: RouterScores::Sigmoid, ..rule };
    Some(match name {
        "qwen3-30b-a3b" => DecoderConfig {
            family: Family::Qwen3Moe,
            hidden_size: 2048,
            intermediate_size: 6144,
            layers: 48,
            query_heads: 32,
            kv_heads: 4,
            moe: Some(moe),
            ..base
        },
        "glm-4.7" => DecoderConfig {
            family: Family::Glm4Moe,
            hidden_size: 5120,
            intermediate_size: 12288,
            layers: 92,
            query_heads: 96,
            vocab_size: 151_552,
            rms_norm_eps: 1e-5,
            rotary_dim: Some(64),
            qkv_bias: true,
            moe: Some(MoeConfig {
                experts: 160,
                width: 1536,
                shared_width: 1536,
                rule: RouterRule { factor: 2.5, ..corrected },
                correction: true,
                dense_layers: vec![0, 1, 2],
                ..moe
            }),
            ..base
        },
        "minimax-m2.7" => DecoderConfig {
            family: Family::MiniMaxM2,
            hidden_size: 3072,
            intermediate_size: 1536,
            layers: 62,
            query_heads: 48,
            vocab_size: 200_064,
            rope: RopeConfig::plain(5_000_000.0),
            rotary_dim: Some(64),
            qk_norm: QkNorm::AllHeads,
            moe: Some(MoeConfig {
                experts: 256,
                width: 1536,
                rule: corrected,
                correction: true,
                names: ExpertNames::BlockSparse,
                ..moe
            }),
            ..base
        },
        "gpt-oss-20b" => DecoderConfig {
            family: Family::GptOss,
            hidden_size: 2880,
            intermediate_size: 2880,
            layers: 24,
            query_heads: 64,
            head_dim: 64,
            vocab_size: 201_088,
            rms_norm_eps: 1e-5,
            rope: RopeConfig::plain(150_000.0),
            qk_norm: QkNorm::None,
            qkv_bias: true,
            output_bias: true,
            moe: Some(MoeConfig {
                experts: 32,
                width: 2880,
                rule: RouterRule { chosen: 4, ..rule },
                biases: true,
                names: ExpertNames::Fused,
                ..moe
            }),
            sliding: sliding(24, 128, |layer| layer.is_multiple_of(2), None),
            attention_sinks: true,
            gate: Gate::Clamped,
            ..base
        },
        _ => return None,
    })
}

/// Gemma 3, as a variation of a dense model: five layers of six slide.
fn gemma_shape(name: &str) -> Option<DecoderConfig> {
    let (hidden_size, intermediate_size, layers, query_heads, kv_heads, head_dim, scalar) = match name {
        "gemma-3-4b" => (2560, 10_240, 34, 8, 4, 256, 256f32),
        "gemma-3-27b" => (5376, 21_504, 62, 32, 16, 128, 168f32),
        _ => return None,
    };
    let rope = RopeConfig { scaling: RopeScaling::Linear { factor: 8.0 }, ..RopeConfig::plain(1e6) };
    let slides = |layer: usize| !(layer + 1).is_multiple_of(6);
    Some(DecoderConfig {
        family: Family::Gemma3,
        hidden_size,
        intermediate_size,
        layers,
        query_heads,
        kv_heads,
        head_dim,
        vocab_size: 262_208,
        rope,
        tie_word_embeddings: true,
        sliding: sliding(layers, 1024, slides, Some(RopeConfig::plain(1e4))),
        attention_scale: Some(1.0 / scalar.sqrt()),
        norm_offset: 1.0,
        result_norms: true,
        embedding_scale: (hidden_size as f32).sqrt(),
        gate: Gate::GeluTanh,
        ..dense_shape("qwen3-8b")?
    })
}

/// Models with latent attention, as variations of GLM-4.7.
fn latent_shape(name: &str) -> Option<DecoderConfig> {
    let base = expert_shape("glm-4.7")?;
    let moe = base.moe.clone()?;
    let latent = LatentConfig {
        query_rank: Some(1536),
        rank: 512,
        key: 128,
        rotary: 64,
        value: 128,
        interleaved: true,
        norm_eps: 1e-6,
    };
    let base = DecoderConfig {
        kv_heads: 1,
        head_dim: latent.row(),
        rotary_dim: None,
        qk_norm: QkNorm::None,
        qkv_bias: false,
        ..base
    };
    Some(match name {
        "glm-4.7-flash" => DecoderConfig {
            family: Family::Glm4MoeLite,
            hidden_size: 2048,
            intermediate_size: 10_240,
            layers: 47,
            query_heads: 20,
            vocab_size: 154_880,
            latent: Some(LatentConfig { query_rank: Some(768), key: 192, value: 256, ..latent }),
            moe: Some(MoeConfig {
                experts: 64,
                rule: RouterRule { chosen: 4, factor: 1.8, ..moe.rule },
                dense_layers: vec![0],
                ..moe
            }),
            ..base
        },
        "deepseek-v3" => DecoderConfig {
            family: Family::DeepseekV3,
            hidden_size: 7168,
            intermediate_size: 18_432,
            layers: 61,
            query_heads: 128,
            vocab_size: 129_280,
            rms_norm_eps: 1e-6,
            // Benchmarks use the scores as they are: YaRN changes no size.
            rope: RopeConfig::plain(1e4),
            latent: Some(latent),
            moe: Some(MoeConfig {
                experts: 256,
                width: 2048,
                shared_width: 2048,
                rule: RouterRule { groups: Some(ExpertGroups { count: 8, kept: 4 }), ..moe.rule },
                ..moe
            }),
            ..base
        },
        _ => return None,
    })
}

/// Models with gated delta nets, as variations of one with experts.
fn delta_shape(name: &str) -> Option<DecoderConfig> {
    let base = expert_shape("qwen3-30b-a3b")?;
    let (family, layers, experts, chosen, vocab_size) = match name {
        "qwen3-next-80b-a3b" => (Family::Qwen3Next, 48, 512, 10, 151_936),
        "qwen3.5-35b-a3b" => (Family::Qwen3_5Moe, 40, 256, 8, 248_320),
        _ => return None,
    };
    let moe = base.moe.clone()?;
    let shape = DeltaShape { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, taps: 4 };
    Some(DecoderConfig {
        family,
        layers,
        query_heads: 16,
        kv_heads: 2,
        head_dim: 256,
        vocab_size,
        rope: RopeConfig::plain(1e7),
        rotary_dim: Some(64),
        norm_offset: 1.0,
        output_gate: true,
        delta: Some(DeltaConfig {
            shape,
            layers: (0..layers).filter(|layer| layer % 4 != 3).collect(),
            joined: family == Family::Qwen3Next,
        }),
        moe: Some(MoeConfig {
            experts,
            width: 512,
            shared_width: 512,
            shared_gate: true,
            rule: RouterRule { chosen, ..moe.rule },
            names: ExpertNames::Qwen,
            ..moe
        }),
        ..base
    })
}

fn sliding(
    layers: usize,
    window: usize,
    slides: impl Fn(usize) -> bool,
    rope: Option<RopeConfig>,
) -> Option<SlidingLayers> {
    Some(SlidingLayers { window, layers: (0..layers).filter(|&layer| slides(layer)).collect(), rope })
}

impl DecoderConfig {
    /// The heads of every layer.
    pub fn heads(&self) -> HeadShape {
        let scale = match &self.latent {
            Some(latent) => Some(latent.scale(&self.rope)),
            None => self.attention_scale,
        };
        HeadShape {
            query_heads: self.query_heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            rms_norm_eps: self.rms_norm_eps,
            scale: scale.unwrap_or((1.0 / (self.head_dim as f64).sqrt()) as f32),
        }
    }

    /// A step of this model with `rows` rows, `logits` of them with logits, and sequences of up to
    /// `context` tokens.
    pub fn step_size(&self, rows: usize, logits: usize, context: usize) -> StepSize {
        StepSize {
            rows,
            logits,
            context: context.min(self.max_position_embeddings),
            heads: self.heads(),
            rope_tables: 1 + usize::from(self.sliding.as_ref().is_some_and(|sliding| sliding.rope.is_some())),
            rotary: self.rotary_width(),
            hidden: self.hidden_size,
            intermediate: self.feed_forward_width(),
            vocab: self.vocab_size,
            fp8: self.fp8_weights,
            quantized: true,
        }
    }

    /// Bytes of all matrices in BF16.
    pub fn bf16_bytes(&self) -> usize {
        let embedding = if self.tie_word_embeddings { 0 } else { self.hidden_size * self.vocab_size };
        2 * (self.matrix_parameters() + embedding)
    }

    /// Parameters of all matrices except the embedding, unless it is also the head.
    pub fn matrix_parameters(&self) -> usize {
        self.parameters_with(|moe| moe.experts)
    }

    /// Parameters of the matrices that multiply one token.
    pub fn active_parameters(&self) -> usize {
        self.parameters_with(|moe| moe.rule.chosen)
    }

    fn parameters_with(&self, experts: impl Fn(&MoeConfig) -> usize) -> usize {
        let gates = if self.output_gate { self.query_width() } else { 0 };
        let attention = match &self.latent {
            Some(latent) => latent.parameters(self.hidden_size, self.query_heads),
            None => self.hidden_size * (2 * self.query_width() + 2 * self.kv_width() + gates),
        };
        let mixer =
            |layer| self.delta_of(layer).map_or(attention, |delta| delta.parameters(self.hidden_size));
        let feed_forward = |layer| match self.moe_of(layer) {
            None => 3 * self.hidden_size * self.intermediate_size,
            Some(moe) => {
                let expert = 3 * (experts(moe) * moe.width + moe.shared_width);
                self.hidden_size * (expert + moe.experts)
            }
        };
        let layers: usize = (0..self.layers).map(|layer| mixer(layer) + feed_forward(layer)).sum();
        layers + self.hidden_size * self.vocab_size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_valid_and_have_their_published_sizes() {
        for (name, billions) in [
            ("qwen3-4b", 4.02),
            ("qwen3-8b", 7.57),
            ("qwen3-32b", 31.98),
            ("qwen3-30b-a3b", 30.22),
            ("gpt-oss-20b", 20.33),
            ("gemma-3-4b", 3.88),
            ("gemma-3-27b", 27.0),
            ("glm-4.7-flash", 29.62),
            ("deepseek-v3", 670.1),
            ("qwen3-next-80b-a3b", 79.36),
            ("qwen3.5-35b-a3b", 34.15),
        ] {
            let config = shape(name).unwrap();
            config.validate().unwrap();
            let found = config.matrix_parameters() as f64 / 1e9;
            assert!((found - billions).abs() < 0.02, "{name}: {found}");
        }
        // Bytes a token that grows, and those of the windows, in BF16.
        for (name, grows, windows) in [
            ("gpt-oss-20b", 24_576, 3_145_728),
            ("gemma-3-4b", 20_480, 121_634_816),
            ("gemma-3-27b", 81_920, 436_207_616),
        ] {
            let config = shape(name).unwrap();
            let sliding = config.sliding.as_ref().unwrap();
            let token = 4 * config.kv_width();
            assert_eq!((config.layers - sliding.layers.len()) * token, grows, "{name}");
            assert_eq!(sliding.layers.len() * token * sliding.window, windows, "{name}");
        }
        assert!(NAMES.iter().all(|name| shape(name).is_some()) && shape("gpt-5").is_none());
    }
}
