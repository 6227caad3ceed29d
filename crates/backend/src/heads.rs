//! The heads of a model, and what attention applies to them.

use crate::{Backend, BackendError, Feature};

/// The heads of every layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadShape {
    pub query_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub rms_norm_eps: f32,
    /// Factor of the scores, usually `1/√head_dim`.
    pub scale: f32,
}

impl HeadShape {
    /// Query heads that share a KV head.
    pub fn group(&self) -> usize {
        self.query_heads / self.kv_heads.max(1)
    }
}

/// What [`Step::attend`](crate::Step::attend) applies to the heads of one layer.
pub struct LayerHeads<'a, B: Backend> {
    pub layer: usize,
    /// RMSNorm weights of queries and keys, in families that have them. `head_dim` weights normalize
    /// each head; one weight for each channel of the row normalizes all heads together.
    pub qk_norm: Option<(&'a B::Vector, &'a B::Vector)>,
    pub rope: &'a B::Rope,
    pub rotation: Option<&'a B::LayerRotation>,
    /// Positions that a query sees, itself among them; all if absent. `oscar_codec::window` is the
    /// rule.
    pub window: Option<usize>,
    /// One more score for each query head in the softmax, without a value.
    pub sinks: Option<&'a B::Vector>,
}

/// Sizes of latent attention. A row of the cache is `[latent | rotary key]`, one for all heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentShape {
    /// Channels of the latent.
    pub rank: usize,
    /// Channels of a head's query that meet the latent.
    pub key: usize,
    /// Channels that RoPE turns.
    pub rotary: usize,
    /// Channels of a head's output.
    pub value: usize,
    /// RoPE pairs neighbouring channels, not halves.
    pub interleaved: bool,
}

/// What [`Step::attend_latent`](crate::Step::attend_latent) applies to the heads of one layer, in the
/// absorbed form. Rows of `queries` are `[key | rotary]` for each head, rows of `latent` are
/// `[latent | rotary]`. The cache has one head, whose rows are as wide as `latent` and are stored once.
///
/// 1. The latent is normalized; RoPE turns the rotary parts of queries and of `latent`. The row
///    `c = [latent | rotary]` is stored in the full page of its position.
/// 2. The query of head `h` becomes `q = [key_up_h · key | rotary]`.
/// 3. `out` gets `value_up_h · Σ p c` for each head, where `p` is the softmax of `scale · q · c` over
///    the positions so far, and the rotary part of the sum is left out.
pub struct LatentHeads<'a, B: Backend> {
    pub layer: usize,
    pub shape: LatentShape,
    /// RMSNorm of the latent: weights and epsilon.
    pub norm: (&'a B::Vector, f32),
    /// Tables of `rotary` channels.
    pub rope: &'a B::Rope,
    /// For each head, from the key part of its query to the latent: `rank` outputs, `key` inputs.
    pub key_up: &'a [&'a B::Matrix],
    /// For each head, from the latent to its output: `value` outputs, `rank` inputs.
    pub value_up: &'a [&'a B::Matrix],
}

/// The answer of a device that does not compute latent attention.
pub fn latent_refusal() -> BackendError {
    let why = format!("{} is not computed there; use --device cpu", Feature::LatentAttention);
    BackendError::Unsupported { device: "this device".into(), why }
}
