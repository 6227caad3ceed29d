//! Weights in MXFP4 (OCP microscaling): E2M1 codes of four bits, and a power of two for every 32
//! inputs of an output.
//!
//! `weight = e2m1(code) · 2^(scale − 127)`, which BF16 holds exactly. [`Mxfp4Blocks::expand_row`] is
//! the specification.

use crate::{BackendError, Result};

/// Inputs that share a scale.
pub const MXFP4_GROUP: usize = 32;
/// Above, a weight may leave the range of f32.
pub const MXFP4_LARGEST_SCALE: u8 = 252;

/// Magnitudes of the codes 0 to 7; the fourth bit is the sign.
const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Codes `[outputs][inputs / 2]`, two in a byte with the first in the low half, and scales
/// `[outputs][inputs / 32]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mxfp4Blocks<'a> {
    pub codes: &'a [u8],
    pub scales: &'a [u8],
}

/// The factor of a scale that is a number.
pub fn mxfp4_factor(scale: u8) -> f32 {
    match scale {
        // The only subnormal.
        0 => f32::MIN_POSITIVE / 2.0,
        _ => f32::from_bits(u32::from(scale) << 23),
    }
}

impl Mxfp4Blocks<'_> {
    /// Refuses codes or scales that are not those of an `outputs × inputs` matrix.
    pub fn check(&self, outputs: usize, inputs: usize) -> Result<()> {
        let whole = inputs > 0 && inputs.is_multiple_of(MXFP4_GROUP);
        let codes = outputs.checked_mul(inputs / 2) == Some(self.codes.len());
        if whole && codes && self.scales.len() == outputs * (inputs / MXFP4_GROUP) {
            return Ok(());
        }
        Err(BackendError::Shape {
            what: "an MXFP4 matrix".into(),
            detail: format!(
                "{} bytes of codes and {} scales for {outputs} × {inputs}",
                self.codes.len(),
                self.scales.len()
            ),
        })
    }

    /// The weights of one output, in f32.
    pub fn expand_row(&self, output: usize, row: &mut [f32]) {
        let inputs = row.len();
        let codes = &self.codes[output * inputs / 2..];
        let scales = &self.scales[output * (inputs / MXFP4_GROUP)..];
        for (input, weight) in row.iter_mut().enumerate() {
            let code = codes[input / 2] >> (4 * (input % 2));
            let magnitude = MAGNITUDES[usize::from(code & 7)] * mxfp4_factor(scales[input / MXFP4_GROUP]);
            *weight = if code & 8 == 0 { magnitude } else { -magnitude };
        }
    }

    /// All weights, in f32.
    ///
    /// # Errors
    /// If these are not the codes and scales of an `outputs × inputs` matrix.
    pub fn expand(&self, outputs: usize, inputs: usize) -> Result<Vec<f32>> {
        self.check(outputs, inputs)?;
        let mut weights = vec![0.0; outputs * inputs];
        weights.chunks_exact_mut(inputs).enumerate().for_each(|(output, row)| self.expand_row(output, row));
        Ok(weights)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_scales_have_their_published_values() {
        // 0x21: code 1 (0.5) first, then code 2 (1.0); 0xf8: −0, then −6.
        let mut codes = [0; 16];
        codes[..2].copy_from_slice(&[0x21, 0xf8]);
        let blocks = Mxfp4Blocks { codes: &codes, scales: &[128] };
        let weights = blocks.expand(1, 32).unwrap();
        assert_eq!(weights[..5], [1.0, 2.0, 0.0, -12.0, 0.0]);
        assert!([1, 127, 200].iter().all(|&s| mxfp4_factor(s) == 2f32.powi(i32::from(s) - 127)));
        assert_eq!(f64::from(mxfp4_factor(0)), 2f64.powi(-127));
        assert!((6.0 * mxfp4_factor(MXFP4_LARGEST_SCALE)).is_finite());
        for (outputs, inputs) in [(1, 31), (2, 32), (1, 64)] {
            assert!(blocks.expand(outputs, inputs).is_err(), "{outputs} × {inputs}");
        }
    }
}
