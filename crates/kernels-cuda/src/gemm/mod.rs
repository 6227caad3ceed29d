//! Matrix products. Few rows: `skinny_gemm.cu`, which reads the weights once at memory speed and
//! keeps 16 bits of the activations' mantissa. Many rows: cuBLASLt on BF16. FP8 weights stay FP8
//! for few rows; for many they are expanded panel by panel.

mod cublaslt;
mod fp8;
mod fp8_products;
mod skinny;

pub(crate) use cublaslt::{CublasLt, Product, ROW_GROUP, ScaledFp8, Sums, WORKSPACE};
pub(crate) use fp8::{Fp8Kernels, WORD_CODES, arrange, random_scale};
pub(crate) use fp8_products::{Fp8Operands, Fp8Products};
pub(crate) use skinny::{MOST_ROWS, Skinny, SkinnyProduct, SkinnyShape};

use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::layout::Layout;
use crate::memory::{Buffer, DeviceSlice};
use crate::staging::Staging;
use half::bf16;
use oscar_backend::{Fp8Blocks, HostMatrix, HostValues, WeightFormat, fp8_blocks};
use std::ops::Range;

pub(crate) const LAYOUTS: &[Layout] = &[
    fp8::ExpandParams::LAYOUT,
    fp8_products::QuantizeRowsParams::LAYOUT,
    fp8_products::PlainCodesParams::LAYOUT,
    skinny::SkinnyParams::LAYOUT,
];

/// Bytes of BF16 weights that FP8 ones are expanded to at a time.
pub(crate) const PANEL_BYTES: usize = 128 << 20;

/// Whether the kernel for few rows takes matrices of this shape.
pub fn multiplies_few_rows(format: WeightFormat, outputs: usize, inputs: usize) -> bool {
    Skinny::multiplies(format, outputs, inputs)
}

/// Weights on the device, `[outputs][inputs]`, and their bias.
pub struct CudaMatrix {
    /// BF16, or FP8 codes in the kernels' arrangement.
    pub(crate) weights: Buffer,
    /// Scales of FP8 weights.
    pub(crate) scales: Option<Buffer>,
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

    pub fn format(&self) -> WeightFormat {
        if self.scales.is_some() { WeightFormat::Fp8 } else { WeightFormat::Bf16 }
    }

    /// Bytes of weights and scales.
    pub fn bytes(&self) -> usize {
        self.weights.bytes() + self.scales.as_ref().map_or(0, Buffer::bytes)
    }

    /// BF16 weights with undefined contents.
    pub(crate) fn uninitialized(device: &Device, outputs: usize, inputs: usize) -> Result<Self> {
        let weights = device.alloc(outputs * inputs * 2, "weights")?;
        Ok(Self { weights, scales: None, bias: None, outputs, inputs })
    }

    /// FP8 weights with undefined contents.
    pub(crate) fn uninitialized_fp8(
        device: &Device,
        outputs: usize,
        inputs: usize,
        scales: &[f32],
    ) -> Result<Self> {
        if !Skinny::multiplies(WeightFormat::Fp8, outputs, inputs)
            || scales.len() != fp8_blocks(outputs) * fp8_blocks(inputs)
        {
            let detail = format!(
                "{outputs} × {inputs} with {} scales: outputs must be a multiple of 8, inputs of 64, \
                 with a scale for each 128 × 128",
                scales.len()
            );
            return Err(CudaError::Shape { what: "an FP8 matrix", detail });
        }
        let weights = device.alloc(outputs * inputs, "weights")?;
        let scales = Some(device.upload_new(scales, "the scales of weights")?);
        Ok(Self { weights, scales, bias: None, outputs, inputs })
    }

    pub(crate) fn upload(device: &Device, staging: &Staging, matrix: &HostMatrix<'_>) -> Result<Self> {
        let HostMatrix { outputs, inputs, values, bias } = *matrix;
        let given = match values {
            HostValues::Bf16(v) => v.len(),
            HostValues::F16(v) => v.len(),
            HostValues::F32(v) => v.len(),
            HostValues::Fp8(v) => v.codes.len(),
            HostValues::Mxfp4(v) => 2 * v.codes.len(),
        };
        if given != outputs * inputs || bias.is_some_and(|b| b.len() != outputs) {
            let detail = format!("{given} values for {outputs} × {inputs}");
            return Err(CudaError::Shape { what: "a weight matrix", detail });
        }
        let mut uploaded = match values {
            HostValues::Fp8(v) => Self::upload_fp8(device, staging, &v, outputs, inputs)?,
            HostValues::Mxfp4(_) => {
                return Err(CudaError::Unsupported(
                    "MXFP4 weights are computed with --device cpu only".into(),
                ));
            }
            HostValues::Bf16(v) => {
                let uploaded = Self::uninitialized(device, outputs, inputs)?;
                staging.send_plain(v, uploaded.weights.slice().part(0..v.len())?)?;
                uploaded
            }
            HostValues::F16(v) => {
                let uploaded = Self::uninitialized(device, outputs, inputs)?;
                convert(staging, v, 1, uploaded.weights.slice(), |x| bf16::from_f32(x[0].to_f32()))?;
                uploaded
            }
            HostValues::F32(v) => {
                let uploaded = Self::uninitialized(device, outputs, inputs)?;
                convert(staging, v, 1, uploaded.weights.slice(), |x| bf16::from_f32(x[0]))?;
                uploaded
            }
        };
        uploaded.bias = bias.map(|b| device.upload_new(b, "a bias")).transpose()?;
        Ok(uploaded)
    }

    /// FP8 if the kernels take such a matrix, expanded to BF16 otherwise.
    fn upload_fp8(
        device: &Device,
        staging: &Staging,
        matrix: &Fp8Blocks<'_>,
        outputs: usize,
        inputs: usize,
    ) -> Result<Self> {
        if let Err(error) = matrix.check(outputs, inputs) {
            return Err(CudaError::Shape { what: "an FP8 matrix", detail: error.to_string() });
        }
        if Skinny::multiplies(WeightFormat::Fp8, outputs, inputs) {
            let uploaded = Self::uninitialized_fp8(device, outputs, inputs, matrix.scales)?;
            convert(staging, matrix.codes, fp8::WORD_CODES, uploaded.weights.slice(), fp8::arrange)?;
            return Ok(uploaded);
        }
        let uploaded = Self::uninitialized(device, outputs, inputs)?;
        let weights = matrix.expand(inputs);
        convert(staging, &weights, 1, uploaded.weights.slice(), |x| bf16::from_f32(x[0]))?;
        Ok(uploaded)
    }

    /// Ranges of outputs that are multiplied at a time: all outputs for BF16. FP8 weights are expanded
    /// first, so a range is limited by the memory for expanded weights.
    pub(crate) fn panels(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let outputs = self.outputs;
        let step = match self.format() {
            WeightFormat::Bf16 => outputs,
            WeightFormat::Fp8 => (PANEL_BYTES / (2 * self.inputs) / 128 * 128).clamp(128, outputs.max(128)),
        };
        (0..outputs).step_by(step.max(1)).map(move |first| first..outputs.min(first + step))
    }
}

/// Converts values and sends them; `group` of them become one.
pub(crate) fn convert<T: Sync, U: bytemuck::Pod>(
    staging: &Staging,
    values: &[T],
    group: usize,
    to: DeviceSlice<'_, U>,
    convert: impl Fn(&[T]) -> U,
) -> Result<()> {
    let to = to.part(0..values.len() / group)?;
    staging.send(to, |range, place| {
        let values = values[range.start * group..range.end * group].chunks_exact(group);
        for (to, from) in place.iter_mut().zip(values) {
            *to = convert(from);
        }
    })
}
