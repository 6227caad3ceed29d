//! Shapes of published models, for benchmarks that need a model's sizes but not its weights.

use crate::config::{DecoderConfig, Family};
use crate::rope::RopeConfig;
use crate::tensor::WeightDtype;

/// Names that [`shape`] knows.
pub const NAMES: [&str; 4] = ["qwen3-0.6b", "qwen3-4b", "qwen3-8b", "qwen3-32b"];

/// The configuration of a published model.
pub fn shape(name: &str) -> Option<DecoderConfig> {
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
        qk_norm: true,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        tie_word_embeddings: tied,
        // Benchmarks use longer contexts than the models were trained for.
        max_position_embeddings: 1 << 20,
        sliding_window: None,
        eos_token_ids: vec![151_645],
        bos_token_id: None,
        dtype: Some(WeightDtype::Bf16),
        fp8_weights: false,
    })
}

impl DecoderConfig {
    /// Parameters of the matrices that multiply every token: all except the embedding, unless it is
    /// also the head.
    pub fn matrix_parameters(&self) -> usize {
        let attention = self.hidden_size * (2 * self.query_width() + 2 * self.kv_width());
        let mlp = 3 * self.hidden_size * self.intermediate_size;
        self.layers * (attention + mlp) + self.hidden_size * self.vocab_size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_valid_and_have_their_published_sizes() {
        for (name, billions) in [("qwen3-4b", 4.02), ("qwen3-8b", 7.57), ("qwen3-32b", 31.98)] {
            let config = shape(name).unwrap();
            config.validate().unwrap();
            let found = config.matrix_parameters() as f64 / 1e9;
            assert!((found - billions).abs() < 0.02, "{name}: {found}");
        }
        assert!(NAMES.iter().all(|name| shape(name).is_some()) && shape("gpt-5").is_none());
    }
}
