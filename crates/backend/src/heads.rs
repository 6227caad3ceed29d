//! The heads of a model, and what attention applies to them.

use crate::Backend;

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
