//! The fields of multi-head latent attention, which DeepSeek and GLM-4.7-Flash spell alike.

use serde::Deserialize;

use super::{CommonFields, refuse_unless};
use crate::config::{DecoderConfig, Family};
use crate::error::LoadError;
use crate::latent::LatentConfig;

/// Epsilon of the norms of both latents, whatever `rms_norm_eps` says: transformers computes them so.
const NORM_EPS: f32 = 1e-6;

#[derive(Debug, Deserialize)]
pub(crate) struct LatentFields {
    q_lora_rank: Option<usize>,
    kv_lora_rank: usize,
    qk_nope_head_dim: usize,
    qk_rope_head_dim: usize,
    v_head_dim: usize,
    rope_interleave: Option<bool>,
    #[serde(default)]
    attention_bias: bool,
}

impl LatentFields {
    /// A decoder with this attention in every layer.
    pub(crate) fn lower(self, family: Family, mut common: CommonFields) -> Result<DecoderConfig, LoadError> {
        refuse_unless(!self.attention_bias, "attention_bias", self.attention_bias, "false")?;
        let (heads, kv_heads) = (common.num_attention_heads, common.num_key_value_heads);
        let one_each = kv_heads.is_none_or(|kv_heads| kv_heads == heads);
        refuse_unless(one_each, "num_key_value_heads", kv_heads.unwrap_or(0), "num_attention_heads")?;
        let latent = LatentConfig {
            query_rank: self.q_lora_rank,
            rank: self.kv_lora_rank,
            key: self.qk_nope_head_dim,
            rotary: self.qk_rope_head_dim,
            value: self.v_head_dim,
            interleaved: self.rope_interleave.unwrap_or(true),
            norm_eps: NORM_EPS,
        };
        (common.num_key_value_heads, common.head_dim) = (Some(1), Some(latent.rotary));
        let base = common.lower(family)?;
        let turned = base.rotary_width();
        let whole = base.rotary_dim.is_none();
        refuse_unless(whole, "partial_rotary_factor", format!("a turn of {turned} channels"), "1")?;
        let head_dim = latent.rank.saturating_add(latent.rotary);
        Ok(DecoderConfig { head_dim, latent: Some(latent), ..base })
    }
}
