//! Weight matrices on their way to a device.

use crate::{Fp8Blocks, Mxfp4Blocks};
use half::{bf16, f16};

/// A weight matrix as the checkpoint holds it, `[outputs][inputs]` row-major.
#[derive(Clone, Copy, Debug)]
pub struct HostMatrix<'a> {
    pub outputs: usize,
    pub inputs: usize,
    pub values: HostValues<'a>,
    pub bias: Option<&'a [f32]>,
}

#[derive(Clone, Copy, Debug)]
pub enum HostValues<'a> {
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
    F32(&'a [f32]),
    /// Devices that multiply with FP8 keep it as it is; the others expand it.
    Fp8(Fp8Blocks<'a>),
    /// Codes of four bits; only experts keep them as they are.
    Mxfp4(Mxfp4Blocks<'a>),
}

/// How the weights of a matrix are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    Bf16,
    /// E4M3 with a scale for every block of 128 × 128. Activations are not quantized.
    Fp8,
}
