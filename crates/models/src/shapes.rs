//! Shapes of published models, for benchmarks that need a model's sizes but not its weights.

use oscar_backend::{HeadShape, StepSize};
use serde_json::{Value, json};

use crate::config::{DecoderConfig, MoeConfig};

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

/// The configuration of a published model. What its file leaves out are the defaults of its family.
pub fn shape(name: &str) -> Option<DecoderConfig> {
    let mut file = published(name)?;
    // Benchmarks use longer contexts than the models were trained for.
    file["max_position_embeddings"] = json!(1 << 20);
    file["eos_token_id"] = json!(151_645);
    file["torch_dtype"] = json!("bfloat16");
    DecoderConfig::from_json(file.to_string().as_bytes()).ok()
}

/// What the `config.json` of a model says, as far as sizes depend on it.
fn published(name: &str) -> Option<Value> {
    let qwen3 = |hidden: usize, intermediate: usize, layers: usize, heads: usize| {
        json!({
            "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": intermediate,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
            "vocab_size": 151_936, "rope_theta": 1e6, "tie_word_embeddings": hidden < 4096,
        })
    };
    let gemma = |hidden: usize, intermediate: usize, layers: usize, heads: [usize; 3], scalar: usize| {
        let [query_heads, kv_heads, head_dim] = heads;
        json!({
            "model_type": "gemma3_text", "hidden_size": hidden, "intermediate_size": intermediate,
            "num_hidden_layers": layers, "num_attention_heads": query_heads, "num_key_value_heads": kv_heads,
            "head_dim": head_dim, "query_pre_attn_scalar": scalar, "sliding_window": 1024,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        })
    };
    Some(match name {
        "qwen3-0.6b" => qwen3(1024, 3072, 28, 16),
        "qwen3-4b" => qwen3(2560, 9728, 36, 32),
        "qwen3-8b" => qwen3(4096, 12_288, 36, 32),
        "qwen3-32b" => qwen3(5120, 25_600, 64, 64),
        "qwen3-30b-a3b" => json!({
            "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
            "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "vocab_size": 151_936, "rope_theta": 1e6, "norm_topk_prob": true,
        }),
        "glm-4.7" => json!({
            "model_type": "glm4_moe", "hidden_size": 5120, "intermediate_size": 12_288,
            "num_hidden_layers": 92, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 151_552, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "attention_bias": true,
            "use_qk_norm": true, "n_routed_experts": 160, "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
        }),
        "minimax-m2.7" => json!({
            "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536,
            "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 200_064, "rope_theta": 5e6, "rotary_dim": 64, "num_local_experts": 256,
            "num_experts_per_tok": 8,
        }),
        "gpt-oss-20b" => json!({
            "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
            "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            // Its YaRN changes no size.
            "vocab_size": 201_088, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "rope_scaling": null,
            "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4,
        }),
        "gemma-3-4b" => gemma(2560, 10_240, 34, [8, 4, 256], 256),
        "gemma-3-27b" => gemma(5376, 21_504, 62, [32, 16, 128], 168),
        "glm-4.7-flash" => json!({
            "model_type": "glm4_moe_lite", "hidden_size": 2048, "intermediate_size": 10_240,
            "num_hidden_layers": 47, "num_attention_heads": 20, "vocab_size": 154_880,
            "rms_norm_eps": 1e-5, "rope_theta": 1e6, "q_lora_rank": 768, "kv_lora_rank": 512,
            "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
            "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
        }),
        "deepseek-v3" => json!({
            "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18_432,
            "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129_280,
            // Its YaRN changes no size either.
            "rope_theta": 1e4, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
            "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        }),
        "qwen3-next-80b-a3b" => json!({
            "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48,
            "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151_936, "rope_theta": 1e7,
        }),
        "qwen3.5-35b-a3b" => json!({
            "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
            "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 248_320, "rope_theta": 1e7,
        }),
        _ => return None,
    })
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
            result_norms: self.result_norms,
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
