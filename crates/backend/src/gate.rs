//! The function between the two products of a feed-forward part.

/// What becomes of the outputs `gate` and `up` of the first product. [`Gate::apply`] is the
/// specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// `silu(gate) · up`.
    Silu,
    /// `gelu(gate) · up`, with the approximation of GELU by tanh (Gemma).
    GeluTanh,
    /// `(up + 1) · gate · σ(1.702 · gate)` with `gate` at most 7 and `up` between −7 and 7 (gpt-oss).
    Clamped,
}

impl Gate {
    pub const ALL: [Self; 3] = [Self::Silu, Self::GeluTanh, Self::Clamped];
    /// Bound of [`Gate::Clamped`].
    pub const CLAMP: f32 = 7.0;
    /// Factor in the sigmoid of [`Gate::Clamped`].
    pub const CLAMPED_SLOPE: f32 = 1.702;

    /// The definition. NaN gives NaN.
    pub fn apply(self, gate: f64, up: f64) -> f64 {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        match self {
            Self::Silu => gate * sigmoid(gate) * up,
            Self::GeluTanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044_715 * gate.powi(3));
                0.5 * gate * (1.0 + inner.tanh()) * up
            }
            Self::Clamped => {
                let limit = f64::from(Self::CLAMP);
                let gate = if gate > limit { limit } else { gate };
                let up = up.clamp(-limit, limit);
                (up + 1.0) * gate * sigmoid(f64::from(Self::CLAMPED_SLOPE) * gate)
            }
        }
    }
}
