//! Matrix products: few rows by our own kernel, which reads the weights once at memory speed and keeps 16 bits of the
//! activations' mantissa; many rows by cuBLASLt on BF16.

mod cublaslt;
mod skinny;

pub use cublaslt::{CublasLt, Product};
pub use skinny::{MOST_ROWS, Skinny, SkinnyProduct, SkinnyShape};

use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::memory::Buffer;
use half::bf16;
use oscar_backend::{HostMatrix, HostValues};

/// Weights on the device, BF16 `[outputs][inputs]`, and their bias.
pub struct CudaMatrix {
    pub(crate) weights: Buffer,
    pub(crate) bias: Option<Buffer>,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
}

impl CudaMatrix {
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Room for weights that someone else writes.
    pub(crate) fn uninitialized(device: &Device, outputs: usize, inputs: usize) -> Result<Self> {
        let weights = device.alloc(outputs * inputs * 2, "weights")?;
        Ok(Self { weights, bias: None, outputs, inputs })
    }

    pub fn upload(device: &Device, matrix: &HostMatrix<'_>) -> Result<Self> {
        let HostMatrix { outputs, inputs, values, bias } = *matrix;
        let given = match values {
            HostValues::Bf16(v) => v.len(),
            HostValues::F16(v) => v.len(),
            HostValues::F32(v) => v.len(),
        };
        if given != outputs * inputs || bias.is_some_and(|b| b.len() != outputs) {
            let detail = format!("{given} values for {outputs} × {inputs}");
            return Err(CudaError::Shape { what: "a weight matrix", detail });
        }
        let mut uploaded = Self::uninitialized(device, outputs, inputs)?;
        let to = &uploaded.weights;
        match values {
            HostValues::Bf16(v) => device.upload(bytemuck::cast_slice(v), to, 0)?,
            HostValues::F16(v) => upload_rounded(device, v, to, |x| bf16::from_f32(x.to_f32()))?,
            HostValues::F32(v) => upload_rounded(device, v, to, |x| bf16::from_f32(*x))?,
        }
        uploaded.bias = bias.map(|b| device.upload_new(b, "a bias")).transpose()?;
        Ok(uploaded)
    }
}

/// Rounds and sends a slab at a time, so that no second copy of a large matrix is held.
fn upload_rounded<T>(device: &Device, values: &[T], to: &Buffer, round: impl Fn(&T) -> bf16) -> Result<()> {
    const SLAB: usize = 4 << 20;
    let mut slab = Vec::with_capacity(SLAB.min(values.len()));
    for (index, part) in values.chunks(SLAB).enumerate() {
        slab.clear();
        slab.extend(part.iter().map(&round));
        device.upload(bytemuck::cast_slice(&slab), to, index * SLAB * 2)?;
        // The slab is filled again: the copy must be over.
        device.synchronize()?;
    }
    Ok(())
}
