//! FP8 weights on the device: the arrangement of their codes (`kernels/fp8.cuh`) and the kernels
//! that read them.

use super::{CudaMatrix, Skinny};
use crate::device::{Device, Function, LaunchShape};
use crate::error::{CudaError, Result};
use crate::kernels::Kernels;
use crate::layout::shared_struct;
use crate::memory::{Buffer, DevicePtr};
use crate::sources::EXPAND;
use half::bf16;
use oscar_backend::{WeightFormat, fp8_blocks};
use std::ops::Range;

/// Codes in a word.
pub(crate) const WORD_CODES: usize = 4;

/// Four consecutive codes in the order of bits that `fp8.cuh` reads.
pub(crate) fn arrange(codes: &[u8]) -> u32 {
    let [a, b, c, d] = std::array::from_fn(|i| u32::from(codes[i]));
    // Sign, exponent and mantissa in the bits of a BF16 number.
    let in_place = |code: u32| (code & 0x80) << 8 | (code & 0x7f) << 4;
    // In the gaps: sign and mantissa in the same half, the exponent in the other half.
    let (sign_mantissa, exponent) =
        (|code: u32| code >> 7 << 3 | code & 7, |code: u32| (code >> 3 & 15) << 11);
    let low = in_place(a) | sign_mantissa(c) | exponent(d);
    let high = in_place(b) | sign_mantissa(d) | exponent(c);
    high << 16 | low
}

/// Scale that gives random codes the root mean square of [`oscar_backend::random_amplitude`]'s
/// weights.
pub(crate) fn random_scale(inputs: usize) -> f32 {
    let squares: f64 = (0..=255).map(|code| f64::from(oscar_codec::fp8::dequantize(code)).powi(2)).sum();
    let uniform = f64::from(oscar_backend::random_amplitude(inputs)) / 3f64.sqrt();
    (uniform / (squares / 256.0).sqrt()) as f32
}

shared_struct! {
    pub(super) struct ExpandParams {
        codes: DevicePtr<u32>,
        scales: DevicePtr<f32>,
        out: DevicePtr<bf16>,
        first: u32,
        count: u32,
        inputs: u32,
        columns: u32,
    }
}

/// The kernels of FP8 weights, compiled for the first such matrix.
pub(crate) struct Fp8Kernels {
    device: Device,
    pub(crate) skinny: Skinny,
    expand: Function,
}

impl Fp8Kernels {
    pub fn new(device: &Device, kernels: &Kernels) -> Result<Self> {
        Ok(Self {
            device: device.clone(),
            skinny: Skinny::new(device, kernels, WeightFormat::Fp8)?,
            expand: kernels.function(&EXPAND, &Vec::new(), c"expand_fp8", 0)?,
        })
    }

    /// Writes some outputs of an FP8 matrix to `to`, in BF16.
    pub fn expand(&self, matrix: &CudaMatrix, outputs: &Range<usize>, to: &Buffer) -> Result<()> {
        let refuse = |detail: String| CudaError::Shape { what: "an expansion of FP8 weights", detail };
        let Some(scales) = &matrix.scales else { return Err(refuse("the weights are BF16".into())) };
        if outputs.end > matrix.outputs || 2 * outputs.len() * matrix.inputs > to.bytes() {
            return Err(refuse(format!("{outputs:?} of {} into {} bytes", matrix.outputs, to.bytes())));
        }
        let p = ExpandParams {
            codes: matrix.weights.ptr(),
            scales: scales.ptr(),
            out: to.ptr(),
            first: outputs.start as u32,
            count: outputs.len() as u32,
            inputs: matrix.inputs as u32,
            columns: fp8_blocks(matrix.inputs) as u32,
        };
        // One block per row, up to a few per multiprocessor.
        let blocks = outputs.len().clamp(1, self.device.properties().multiprocessors as usize * 16);
        // SAFETY: the parameters of `expand.cu`; the range lies in the matrix and fits `to`
        // (checked).
        unsafe { self.device.launch(self.expand, LaunchShape::new(blocks, 256).overlapping(), p) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use oscar_codec::fp8::dequantize;

    /// `fp8_first_pair` and `fp8_second_pair` of `fp8.cuh`.
    fn pairs(word: u32) -> [u32; 2] {
        let first = word & 0x87f0_87f0;
        let second = (word.rotate_left(12) & 0x8780_8780) | (word << 4 & 0x0070_0070);
        [first, second]
    }

    #[test]
    fn every_code_is_read_back_in_every_place() {
        for code in (0..=255u8).filter(|code| code & 0x7f != 0x7f) {
            for place in 0..4 {
                for others in [0x00, 0x7e, 0xfe, 0x55, 0xaa] {
                    let mut codes = [others; 4];
                    codes[place] = code;
                    let pairs = pairs(arrange(&codes));
                    for (i, &wanted) in codes.iter().enumerate() {
                        let found = bf16::from_bits((pairs[i / 2] >> (16 * (i % 2))) as u16);
                        let value = f64::from(found.to_f32()) * 2f64.powi(120);
                        assert_eq!(value, f64::from(dequantize(wanted)), "{codes:02x?}, place {i}");
                        assert_eq!(found.is_sign_negative(), wanted & 0x80 != 0);
                    }
                }
            }
        }
    }

    #[test]
    fn random_codes_have_the_size_of_random_weights() {
        let scale = random_scale(4096);
        let squares: f32 = (0..=255).map(|code| (dequantize(code) * scale).powi(2)).sum();
        assert!((squares / 256.0 * 4096.0 - 1.0).abs() < 1e-4);
    }
}
