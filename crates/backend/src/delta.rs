//! The gated delta net: a layer with a recurrent state instead of rows in the cache. And the gate that
//! its families put behind attention.

use crate::{Backend, BackendError, Feature, Result};

/// Sizes of a layer with a delta net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    pub key_heads: usize,
    /// A multiple of `key_heads`: neighbours share a key head.
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Rows that the convolution sees, its own among them.
    pub taps: usize,
}

impl DeltaShape {
    /// Added to the squares of a query or key before its length divides it.
    pub const EPS: f32 = 1e-6;

    /// The order of a state's numbers. DO NOT CHANGE the order without the text: stored states have it,
    /// and their fingerprint has the text.
    pub const STATE_ORDER: &str =
        "f32 by layer: [value head][key channel][value channel], then [row][channel] of the convolution";

    /// Width of all queries, and of all keys.
    pub fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Width of all values.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Channels that the convolution mixes: queries, keys and values.
    pub fn channels(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// Width of a projected row.
    pub fn projected(&self) -> usize {
        self.channels() + self.value_width() + 2 * self.value_heads
    }

    /// Numbers of a layer's state: a matrix for each value head, and the rows before the next one.
    pub fn state_len(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim + (self.taps - 1) * self.channels()
    }

    /// Bytes of a layer's state.
    pub fn state_bytes(&self) -> usize {
        4 * self.state_len()
    }
}

/// What [`DeltaStep::mix_delta`] applies to one layer. Projected rows are `[q | k | v | z | b | a]`, by
/// head: queries, keys, values, gates of the output; then a number of `b` and of `a` for each value head.
///
/// 1. `[q | k | v] ← silu(conv([q | k | v]))`, each channel by itself over the last `taps` rows of the
///    sequence; rows before the first one are zero.
/// 2. `q` and `k` get length 1, `x / √(Σx² + EPS)`; `q` is divided by `√key_dim`.
/// 3. For each value head, with the state `S` (`[key_dim][value_dim]`, zero at the start):
///    `S ← exp(decay · softplus(a + time_bias)) · S`, `S ← S + k ⊗ σ(b)·(v − Sᵀk)`, `o = Sᵀq`.
/// 4. `out` gets `norm(o) · silu(z)`, where the RMSNorm is of each head.
///
/// The state of a sequence, `[layer][value head][key_dim][value_dim]` and for each layer then
/// `[taps − 1][channels]`, the projected rows before the next one, goes from
/// [`StepStates`](oscar_cache::StepStates)`::from` to `to`.
pub struct DeltaLayer<'a, B: Backend> {
    /// Counted among the layers with a delta net.
    pub layer: usize,
    pub shape: DeltaShape,
    /// Weights `[tap][channel]`, those of the oldest row first.
    pub conv: &'a B::Vector,
    /// Factor of the time steps, for each value head; negative.
    pub decay: &'a B::Vector,
    pub time_bias: &'a B::Vector,
    /// RMSNorm of a head's output: weights and epsilon.
    pub norm: (&'a B::Vector, f32),
}

/// Parts of a step for models with a delta net.
pub trait DeltaStep<B: Backend> {
    /// The whole delta net of one layer between its projections. Only on a device that computes
    /// [`Feature::DeltaNet`].
    fn mix_delta(
        &mut self,
        _layer: DeltaLayer<'_, B>,
        _projected: &B::Rows,
        _out: &mut B::Rows,
    ) -> Result<()> {
        Err(refusal(Feature::DeltaNet))
    }
    /// `attended ← unrotated(attended) · σ(gates)`. `unrotate` has a matrix for each KV head that undoes
    /// the value rotation of the cache, or none if there is no rotation. Only on a device that computes
    /// [`Feature::OutputGate`].
    fn gate_heads(
        &mut self,
        _unrotate: &[&B::Matrix],
        _gates: &B::Rows,
        _attended: &mut B::Rows,
    ) -> Result<()> {
        Err(refusal(Feature::OutputGate))
    }
}

/// The answer of a device that does not compute a part.
fn refusal(feature: Feature) -> BackendError {
    let why = format!("{feature} is not computed there; use --device cpu");
    BackendError::Unsupported { device: "this device".into(), why }
}
