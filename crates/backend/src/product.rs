//! Matrix products with the operations that models put before and after them.

use crate::{Backend, Gate};

/// `out ← gate(norm(x) · weightᵀ + bias)` or `out ← out + norm(x · weightᵀ + bias)`, with the optional
/// parts left out.
pub struct Product<'a, B: Backend> {
    pub weight: &'a B::Matrix,
    /// RMSNorm of `x` before the product: weights and epsilon.
    pub norm: Option<(&'a B::Vector, f32)>,
    /// What becomes of the result.
    pub output: Output,
    /// RMSNorm of the result before it is added to `out`; only with [`Output::Add`].
    pub result_norm: Option<(&'a B::Vector, f32)>,
}

/// What becomes of a product's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    Replace,
    /// Added to `out`: the residual.
    Add,
    /// Rows of the result are `[gate | up]`; `out` gets what the gate makes of both.
    Gated(Gate),
    /// Like `Replace`, and activations keep at least 16 bits of mantissa: nothing after the output
    /// head averages its rounding out.
    Logits,
}

impl<'a, B: Backend> Product<'a, B> {
    /// The product alone.
    pub fn of(weight: &'a B::Matrix, output: Output) -> Self {
        Self { weight, norm: None, output, result_norm: None }
    }

    /// The product of normalized rows.
    pub fn of_normed(norm: &'a B::Vector, eps: f32, weight: &'a B::Matrix, output: Output) -> Self {
        Self { weight, norm: Some((norm, eps)), output, result_norm: None }
    }

    /// The product with its result normalized before it is added.
    pub fn then_norm(self, norm: Option<&'a B::Vector>, eps: f32) -> Self {
        Self { result_norm: norm.map(|norm| (norm, eps)), ..self }
    }
}
