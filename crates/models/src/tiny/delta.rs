//! Tiny models with gated delta nets.

use oscar_backend::DeltaShape;
use serde_json::{Value, json};

use crate::config::{DecoderConfig, Family};
use crate::delta::DeltaConfig;

/// Whether the family's layers are gated delta nets, most of them.
pub(super) fn has_delta(family: Family) -> bool {
    matches!(family, Family::Qwen3Next | Family::Qwen3_5 | Family::Qwen3_5Moe)
}

/// The delta net of the first of two layers.
pub(super) fn tiny_delta(family: Family) -> Option<DeltaConfig> {
    let shape = DeltaShape { key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 24, taps: 4 };
    has_delta(family).then(|| DeltaConfig { shape, layers: vec![0], joined: family == Family::Qwen3Next })
}

/// The fields of delta nets and of what comes with them.
pub(super) fn delta_json(config: &DecoderConfig, delta: &DeltaConfig) -> Value {
    let DeltaShape { key_heads, value_heads, key_dim, value_dim, taps } = delta.shape;
    let kind = |layer| if config.delta_of(layer).is_some() { "linear_attention" } else { "full_attention" };
    let mut fields = json!({
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": taps,
        "layer_types": (0..config.layers).map(kind).collect::<Vec<_>>(),
        "partial_rotary_factor": config.rotary_width() as f64 / config.head_dim as f64,
    });
    if let Some(moe) = &config.moe {
        for (field, value) in [
            ("num_experts", moe.experts),
            ("num_experts_per_tok", moe.rule.chosen),
            ("moe_intermediate_size", moe.width),
            ("shared_expert_intermediate_size", moe.shared_width),
        ] {
            fields[field] = json!(value);
        }
        fields["mlp_only_layers"] = json!(moe.dense_layers);
    }
    fields
}
