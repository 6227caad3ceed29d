//! Which mixtures of experts have kernels.

use crate::error::{CudaError, Result};
use oscar_backend::{ExpertFormat, ExpertsShape, Feature, Gate, HostMatrix, WeightFormat};

// Limits of `experts.cu`.
const MOST_EXPERTS: usize = 256;
const MOST_CHOSEN: usize = 32;

/// The answer where nobody asked for kernels whose check of whole models has not run.
pub(super) fn unreleased() -> CudaError {
    CudaError::Unsupported(
        "mixtures of experts are not released on GPUs: their layers pass `oscar gpu-check --only experts`, whole \
         models have not passed `--only families`. Use --cpu-experts all or --device cpu, or set \
         OSCAR_CUDA_EXPERTS=on"
            .into(),
    )
}

/// Refuses a layer without kernels. Returns the format of its weights.
pub(super) fn check(shape: &ExpertsShape<'_>) -> Result<WeightFormat> {
    let ExpertsShape { experts, hidden, width, format, rule, .. } = *shape;
    if shape.gate != Gate::Silu {
        return Err(CudaError::lacks(Feature::OtherGates));
    }
    if shape.router_bias.is_some() {
        return Err(CudaError::lacks(Feature::ExpertBiases));
    }
    if rule.groups.is_some() {
        return Err(CudaError::lacks(Feature::ExpertGroups));
    }
    let Some(weights) = format.weights() else {
        return Err(CudaError::Unsupported("MXFP4 experts are computed with --device cpu only".into()));
    };
    let chunk = if format == ExpertFormat::Bf16 { 32 } else { 64 };
    let fits = hidden.is_multiple_of(chunk) && width.is_multiple_of(chunk);
    if !fits || experts > MOST_EXPERTS || rule.chosen > MOST_CHOSEN {
        return Err(CudaError::Unsupported(format!(
            "{} of {experts} experts of {width} × {hidden} ({format:?}): up to {MOST_CHOSEN} of {MOST_EXPERTS} \
             whose sizes are multiples of {chunk} are computed there; use --device cpu",
            rule.chosen
        )));
    }
    Ok(weights)
}

/// Refuses an expert with biases.
pub(super) fn check_parts(parts: &[HostMatrix<'_>; 3]) -> Result<()> {
    match parts.iter().any(|part| part.bias.is_some()) {
        true => Err(CudaError::lacks(Feature::ExpertBiases)),
        false => Ok(()),
    }
}
