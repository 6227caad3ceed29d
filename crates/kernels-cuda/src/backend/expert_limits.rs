//! Which mixtures of experts have kernels.

use crate::error::{CudaError, Result};
use oscar_backend::{ExpertsShape, Feature, Gate, HostMatrix, WeightFormat};

// Limits of `experts.cu`.
const MOST_EXPERTS: usize = 256;
const MOST_CHOSEN: usize = 32;

/// The kernels of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    /// The format in which they read weights.
    pub weights: WeightFormat,
    /// Whether they take biases and gates other than silu.
    pub general: bool,
}

/// Refuses a layer without kernels.
pub(super) fn check(shape: &ExpertsShape<'_>) -> Result<Form> {
    let ExpertsShape { experts, hidden, width, format, rule, .. } = *shape;
    if rule.groups.is_some() {
        return Err(CudaError::lacks(Feature::ExpertGroups));
    }
    if shape.shared_gate.is_some() {
        return Err(CudaError::lacks(Feature::SharedExpertGate));
    }
    // MXFP4 is expanded on arrival.
    let weights = format.weights().unwrap_or(WeightFormat::Bf16);
    let general = shape.gate != Gate::Silu || shape.router_bias.is_some();
    if general && shape.shared_width > 0 {
        return Err(CudaError::Unsupported(format!(
            "shared experts beside experts with biases or {:?} gates are computed with --device cpu only",
            shape.gate
        )));
    }
    let chunk = if weights == WeightFormat::Bf16 { 32 } else { 64 };
    let fits = hidden.is_multiple_of(chunk) && width.is_multiple_of(chunk);
    if !fits || experts > MOST_EXPERTS || rule.chosen > MOST_CHOSEN {
        return Err(CudaError::Unsupported(format!(
            "{} of {experts} experts of {width} × {hidden} ({format:?}): up to {MOST_CHOSEN} of {MOST_EXPERTS} \
             whose sizes are multiples of {chunk} are computed there; use --device cpu",
            rule.chosen
        )));
    }
    Ok(Form { weights, general })
}

/// Refuses biases of an expert whose layer's kernels take none, or of wrong lengths.
pub(super) fn check_parts(parts: &[HostMatrix<'_>; 3], general: bool) -> Result<()> {
    if !general && parts.iter().any(|part| part.bias.is_some()) {
        return Err(CudaError::lacks(Feature::ExpertBiases));
    }
    match parts.iter().find(|part| part.bias.is_some_and(|bias| bias.len() != part.outputs)) {
        Some(part) => {
            let detail = format!("{:?} biases for {} outputs", part.bias.map(<[f32]>::len), part.outputs);
            Err(CudaError::Shape { what: "an expert", detail })
        }
        None => Ok(()),
    }
}
