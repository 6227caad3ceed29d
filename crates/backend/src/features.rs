//! Parts of a model that not every device computes.

use std::fmt;

/// A part that only some families have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// Layers whose queries see only the last positions.
    SlidingWindow,
    /// A score without a value in every softmax of attention.
    AttentionSinks,
    /// An RMSNorm of a product's result before it is added to the residual.
    ResultNorm,
    /// A factor on the embedding.
    EmbeddingScale,
    /// A gate other than `silu(gate) · up`.
    OtherGates,
    /// Biases of experts and of their router.
    ExpertBiases,
    /// A router that chooses experts from the strongest groups only.
    ExpertGroups,
    /// Keys and values of all heads from one latent row a token.
    LatentAttention,
    /// Layers with a recurrent state.
    DeltaNet,
    /// A gate between attention and its output projection.
    OutputGate,
    /// A gate on the shared expert.
    SharedExpertGate,
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SlidingWindow => "sliding windows",
            Self::AttentionSinks => "attention sinks",
            Self::ResultNorm => "norms behind attention and feed-forward parts",
            Self::EmbeddingScale => "scaled embeddings",
            Self::OtherGates => "gates other than silu",
            Self::ExpertBiases => "experts with biases",
            Self::ExpertGroups => "groups of experts",
            Self::LatentAttention => "latent attention (MLA)",
            Self::DeltaNet => "gated delta nets",
            Self::OutputGate => "gated attention",
            Self::SharedExpertGate => "gated shared experts",
        })
    }
}
