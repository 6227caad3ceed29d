//! Products of FP8 weights and FP8 activations, as the published recipe computes them: activations are
//! quantized as they come, 128 inputs of a row under one scale.

use super::{CublasLt, CudaMatrix, Product, ROW_GROUP, ScaledFp8, Sums};
use crate::backend::grow;
use crate::device::{Device, Function, LaunchShape};
use crate::error::{CudaError, Result};
use crate::kernels::Kernels;
use crate::layout::shared_struct;
use crate::memory::{Buffer, DevicePtr, DeviceSlice};
use crate::sources::{FP8_PRODUCTS, HOPPER};
use half::bf16;
use oscar_backend::fp8_blocks;

shared_struct! {
    pub(super) struct QuantizeRowsParams {
        x: DevicePtr<bf16>,
        codes: DevicePtr<u8>,
        scales: DevicePtr<f32>,
        rows: u32,
        stride: u32,
        inputs: u32,
    }
}

shared_struct! {
    pub(super) struct PlainCodesParams {
        codes: DevicePtr<u32>,
        scales: DevicePtr<f32>,
        out: DevicePtr<u8>,
        out_scales: DevicePtr<f32>,
        first: u32,
        count: u32,
        inputs: u32,
        columns: u32,
    }
}

/// The memory of operands, in errors.
const OPERANDS: &str = "FP8 operands of a prompt";

/// The kernels that make the operands.
pub(crate) struct Fp8Products {
    device: Device,
    quantize: Function,
    plain: Function,
}

/// Memory of the operands, kept from product to product.
#[derive(Default)]
pub(crate) struct Fp8Operands {
    codes: Option<Buffer>,
    scales: Option<Buffer>,
    weights: Option<Buffer>,
    weight_scales: Option<Buffer>,
}

impl Fp8Products {
    /// The kernels, if this GPU and its cuBLASLt have block-scaled products.
    pub fn new(device: &Device, kernels: &Kernels) -> Result<Self> {
        let p = device.properties();
        if 10 * p.major + p.minor != HOPPER {
            return Err(CudaError::Unsupported(format!(
                "FP8 activations need a GPU of compute capability 9.0; {} has {}.{}",
                p.name, p.major, p.minor
            )));
        }
        let function = |name| kernels.function(&FP8_PRODUCTS, &Vec::new(), name, 0);
        let made = Self {
            device: device.clone(),
            quantize: function(c"quantize_rows")?,
            plain: function(c"plain_codes")?,
        };
        Ok(made)
    }

    /// `out ← x · weightᵀ` (`add`: plus `out`), with `x` of `rows` rows. `out` has room for whole
    /// groups of [`ROW_GROUP`] rows.
    pub fn product(
        &self,
        cublaslt: &mut CublasLt,
        memory: &mut Fp8Operands,
        weight: &CudaMatrix,
        (rows, x): (usize, DeviceSlice<'_, bf16>),
        out: Sums<'_>,
        add: bool,
    ) -> Result<()> {
        let (inputs, columns) = (weight.inputs, fp8_blocks(weight.inputs));
        let Some(scales) = &weight.scales else {
            return Err(CudaError::Shape { what: "an FP8 product", detail: "the weights are BF16".into() });
        };
        if x.len() < rows * inputs || !inputs.is_multiple_of(16) {
            let detail = format!("{rows} rows of {inputs} inputs in {} elements", x.len());
            return Err(CudaError::Shape { what: "an FP8 product", detail });
        }
        let padded = rows.next_multiple_of(ROW_GROUP);
        let codes = grow(&self.device, &mut memory.codes, padded * inputs, OPERANDS)?.0;
        let row_scales = grow(&self.device, &mut memory.scales, padded * columns * 4, OPERANDS)?.0;
        let p = QuantizeRowsParams {
            x: x.ptr(),
            codes: codes.ptr(),
            scales: row_scales.ptr(),
            rows: rows as u32,
            stride: padded as u32,
            inputs: inputs as u32,
        };
        // SAFETY: `x` has `rows` rows of `inputs` (checked), codes and scales have room for as many.
        unsafe { self.device.launch(self.quantize, LaunchShape::new(rows, 256).overlapping(), p) }?;
        let x = ScaledFp8 { codes: codes.slice().part(0..padded * inputs)?, scales: row_scales.slice() };
        for panel in weight.panels() {
            let plain = grow(&self.device, &mut memory.weights, panel.len() * inputs, OPERANDS)?.0;
            let bytes = fp8_blocks(panel.len()) * columns.next_multiple_of(ROW_GROUP) * 4;
            let plain_scales = grow(&self.device, &mut memory.weight_scales, bytes, OPERANDS)?.0;
            let p = PlainCodesParams {
                codes: weight.weights.ptr(),
                scales: scales.ptr(),
                out: plain.ptr(),
                out_scales: plain_scales.ptr(),
                first: panel.start as u32,
                count: panel.len() as u32,
                inputs: inputs as u32,
                columns: columns as u32,
            };
            let blocks = self.device.properties().multiprocessors as usize * 8;
            // SAFETY: the panel lies in the matrix; both outputs have room for it.
            unsafe { self.device.launch(self.plain, LaunchShape::new(blocks, 256).overlapping(), p) }?;
            let weights = ScaledFp8 { codes: plain.slice(), scales: plain_scales.slice() };
            let product = Product { rows: padded, outputs: panel.len(), inputs, stride: weight.outputs, add };
            cublaslt.enqueue_fp8(product, &weights, &x, out.from(panel.start)?)?;
        }
        Ok(())
    }
}
