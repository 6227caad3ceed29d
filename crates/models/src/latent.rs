//! Multi-head latent attention: its sizes, and those that follow from them.
//!
//! A token has one latent `c` of `rank` channels and one rotary key `r`, shared by all heads. Head `h`
//! reads the key `[U_h c | r]` and the value `V_h c`. In the absorbed form the query is `[U_hᵀ q | q_r]`,
//! so that the cache holds one row `[c | r]` a token and the value is its beginning.

use oscar_backend::LatentShape;
use oscar_codec::{CodecError, KvFormat};

use crate::config::DecoderConfig;
use crate::error::LoadError;
use crate::rope::RopeConfig;

/// The latent attention of all layers.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentConfig {
    /// Channels of the latent that queries are made from; `None`: they are made from the row itself.
    pub query_rank: Option<usize>,
    /// Channels of the latent that keys and values are made from.
    pub rank: usize,
    /// Channels of a head's key that are made from the latent.
    pub key: usize,
    /// Channels of a key that RoPE turns; all heads share them.
    pub rotary: usize,
    /// Channels of a head's value.
    pub value: usize,
    /// RoPE pairs neighbouring channels, not halves.
    pub interleaved: bool,
    /// Epsilon of the norms of both latents.
    pub norm_eps: f32,
}

impl LatentConfig {
    /// Channels of a row in the cache.
    pub fn row(&self) -> usize {
        self.rank + self.rotary
    }

    /// Channels of a query head as it is projected.
    pub fn query(&self) -> usize {
        self.key + self.rotary
    }

    /// The sizes as a device needs them.
    pub fn shape(&self) -> LatentShape {
        let Self { rank, key, rotary, value, interleaved, .. } = *self;
        LatentShape { rank, key, rotary, value, interleaved }
    }

    /// Factor of the scores.
    pub fn scale(&self, rope: &RopeConfig) -> f32 {
        (rope.score_factor() / (self.query() as f64).sqrt()) as f32
    }

    /// Parameters of a layer's attention matrices.
    pub(crate) fn parameters(&self, hidden: usize, heads: usize) -> usize {
        let queries = heads * self.query();
        let query = match self.query_rank {
            Some(rank) => rank * (hidden + queries),
            None => hidden * queries,
        };
        let latent = hidden * self.row() + self.rank * heads * (self.key + self.value);
        query + latent + hidden * heads * self.value
    }

    /// Refuses sizes that no forward pass can use, and sizes that only a corrupt file states.
    pub(crate) fn validate(&self, config: &DecoderConfig) -> Result<(), LoadError> {
        const LARGEST: usize = 1 << 20;
        for (field, value) in [
            ("q_lora_rank", self.query_rank.unwrap_or(1)),
            ("kv_lora_rank", self.rank),
            ("qk_nope_head_dim", self.key),
            ("qk_rope_head_dim", self.rotary),
            ("v_head_dim", self.value),
        ] {
            if value == 0 || value > LARGEST {
                let problem = format!("is {value}; it must be between 1 and {LARGEST}");
                return Err(LoadError::config_field(field, problem));
            }
        }
        if !self.rotary.is_multiple_of(2) {
            let problem = format!("is {}; rotary embedding pairs elements, so it must be even", self.rotary);
            return Err(LoadError::config_field("qk_rope_head_dim", problem));
        }
        let consistent = config.kv_heads == 1 && config.head_dim == self.row() && config.rotary_dim.is_none();
        match consistent {
            true => Ok(()),
            false => Err(LoadError::config_field("kv_lora_rank", "does not fit the rows of the cache")),
        }
    }
}

impl DecoderConfig {
    /// Refuses a cache format that is not offered for this model's attention.
    pub fn check_format(&self, format: KvFormat) -> Result<(), CodecError> {
        match self.latent.is_some() && format.is_coded() {
            true => Err(CodecError::LatentFormat(format.to_string())),
            false => Ok(()),
        }
    }
}
