//! Query-aware rounding: quantization errors are pushed into directions that queries do not read.
//!
//! Rounding to the nearest level minimizes the squared error of a row. Attention does not read
//! squared error: it reads a key through its products with queries, which span far fewer directions
//! than there are channels, and most of all with the query that matches it. Two corrections follow.
//! Neither costs a byte or changes a kernel that reads codes.
//!
//! **Feedback.** Let `M` be the second moment of the queries, rotated like the row. An error `e`
//! costs `eᵀMe`. With `M = L·D·Lᵀ`, `L` unit lower triangular, the cost is `Σ D_i (e_i + Σ_{j>i}
//! L_ji e_j)²`. Channels are rounded from the last to the first; the target of each is its value
//! plus a correction for the errors of the later channels.
//!
//! **Unbiased scale.** A quantized row is shorter than the original: `⟨k̂, k⟩ < ⟨k, k⟩`, so the
//! score of a matching query would be too low. The scale is chosen so that the product with the row
//! itself is exact, the minimum so that the mean is. One-bit codes are left alone: their rows would
//! become half as long again.
//!
//! **Invariant:** every operation is a single rounded f32 operation in a stated order
//! ([`affine::lane_sum`] for sums), so that kernels reproduce codes and parameters bit for bit.

use crate::affine::{self, AffineParams, lane_sum};
use crate::error::{CodecError, Result, check_len};
use crate::rotation::{Composition, Rotation};
use half::f16;
use std::sync::Arc;

/// Isotropic share of the metric, for queries that calibration did not see.
const DAMPING: f64 = 0.1;

/// Largest factor by which a scale may grow over that of the row's range. It limits rows that
/// differ much from their codes.
pub const MOST_GROWTH: f32 = 1.5;

/// Minima beyond this do not fit fp16.
pub const LARGEST_MIN: f32 = 65504.0;

/// How errors of later channels move the targets of earlier ones: `L` above, rows of later
/// channels.
#[derive(Clone, Debug, PartialEq)]
pub struct Feedback {
    dim: usize,
    /// Row-major `dim × dim`; zero on and above the diagonal.
    rows: Arc<[f32]>,
}

impl Feedback {
    /// From the second moment of the queries, in the basis of the rows; row-major, any scale.
    pub fn of_metric(dim: usize, metric: &[f64]) -> Result<Self> {
        check_len("metric", metric.len(), dim * dim)?;
        let trace: f64 = (0..dim).map(|i| metric[i * dim + i]).sum();
        if !(trace > 0.0 && trace.is_finite()) {
            return Err(CodecError::Metric);
        }
        let at = |i: usize, j: usize| {
            let white = if i == j { DAMPING / dim as f64 } else { 0.0 };
            (1.0 - DAMPING) * metric[i * dim + j] / trace + white
        };
        // Cholesky; the damping keeps every pivot away from zero.
        let mut factor = vec![0.0f64; dim * dim];
        for i in 0..dim {
            for j in 0..=i {
                let sum: f64 = (0..j).map(|k| factor[i * dim + k] * factor[j * dim + k]).sum();
                let rest = at(i, j) - sum;
                factor[i * dim + j] = if i == j { rest.sqrt() } else { rest / factor[j * dim + j] };
                if !factor[i * dim + j].is_finite() {
                    return Err(CodecError::Metric);
                }
            }
        }
        let entry = |i: usize, j: usize| match j < i {
            true => (factor[i * dim + j] / factor[j * dim + j]) as f32,
            false => 0.0,
        };
        let rows = (0..dim * dim).map(|at| entry(at / dim, at % dim)).collect();
        Ok(Self { dim, rows })
    }

    /// From the eigenvalues of the queries' second moment, for rows rotated by `U·X`, where `U`
    /// holds its eigenvectors in the same order: the metric is `Xᵀ·Λ·X`. `None` for compositions
    /// that do not begin with `U`.
    pub fn of_spectrum(eigenvalues: &[f32], composition: Composition) -> Result<Option<Self>> {
        let dim = eigenvalues.len();
        if !composition.begins_with_eigenbasis() {
            return Ok(None);
        }
        let identity: Vec<f64> = (0..dim * dim).map(|at| f64::from(u8::from(at / dim == at % dim))).collect();
        let spread = Rotation::compose(composition, dim, &identity)?;
        let x = spread.matrix();
        let mut metric = vec![0.0; dim * dim];
        for (row, &value) in x.chunks_exact(dim).zip(eigenvalues) {
            for (i, &a) in row.iter().enumerate() {
                for (j, &b) in row.iter().enumerate() {
                    metric[i * dim + j] += f64::from(value) * f64::from(a) * f64::from(b);
                }
            }
        }
        Self::of_metric(dim, &metric).map(Some)
    }

    pub fn dim(&self) -> usize {
        self.dim
    }

    /// The correction of each earlier channel for a unit error of `channel`.
    pub fn row(&self, channel: usize) -> &[f32] {
        &self.rows[channel * self.dim..][..channel]
    }

    /// All rows, `dim × dim`, for devices.
    pub fn rows(&self) -> &[f32] {
        &self.rows
    }

    /// Codes of a row (sanitized, not clipped) for a given pair, the last channel first.
    fn round(&self, row: &[f32], params: AffineParams, bits: u32, codes: &mut [u8]) {
        let mut aim = row.to_vec();
        for channel in (0..row.len()).rev() {
            let code = params.code(aim[channel], bits);
            codes[channel] = code;
            let error = row[channel] - params.dequantize(code);
            for (aim, weight) in aim.iter_mut().zip(self.row(channel)) {
                *aim += weight * error;
            }
        }
    }
}

/// How a side chooses codes, scale and minimum, beyond rounding to nearest.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rounding {
    pub unbiased: bool,
    pub feedback: Option<Feedback>,
}

impl Rounding {
    pub fn is_nearest(&self) -> bool {
        !self.unbiased && self.feedback.is_none()
    }

    /// The same for values: queries do not read them, so there is no feedback.
    pub fn of_values(&self) -> Self {
        Self { feedback: None, ..self.clone() }
    }

    /// Whether the scale is refitted at this width.
    pub fn refits(&self, bits: u32) -> bool {
        self.unbiased && bits > 1
    }

    /// Quantizes a sanitized row: range of the clipped row, then codes, then the pair.
    pub fn quantize(&self, row: &[f32], clip: f64, bits: u32, codes: &mut [u8]) -> AffineParams {
        let mut clipped = row.to_vec();
        crate::clip::clip(&mut clipped, clip);
        let params = affine::quantize_group(&clipped, bits, codes);
        if let Some(feedback) = &self.feedback {
            feedback.round(row, params, bits, codes);
        }
        if self.refits(bits) { unbiased(row, params, codes) } else { params }
    }

    /// Replaces a row by what its codes dequantize to. `codes` has room for one row.
    pub fn recode(&self, row: &mut [f32], clip: f64, bits: u32, codes: &mut [u8]) {
        affine::sanitize(row, affine::SATURATION);
        let params = self.quantize(row, clip, bits, codes);
        for (value, &code) in row.iter_mut().zip(&*codes) {
            *value = params.dequantize(code);
        }
    }
}

/// The pair that makes the row's mean and its product with itself exact.
fn unbiased(row: &[f32], params: AffineParams, codes: &[u8]) -> AffineParams {
    let n = row.len() as f32;
    let mean = lane_sum(row.iter().copied()) / n;
    let level = codes.iter().map(|&c| u32::from(c)).sum::<u32>() as f32 / n;
    let own = lane_sum(row.iter().map(|x| (x - mean) * (x - mean)));
    let common = lane_sum(row.iter().zip(codes).map(|(x, &c)| (x - mean) * (f32::from(c) - level)));
    if common <= 0.0 {
        return params;
    }
    let scale = f16::from_f32((own / common).min(params.scale * MOST_GROWTH)).to_f32();
    let min = mean - scale * level;
    if min.abs() > LARGEST_MIN {
        return params;
    }
    AffineParams { scale, min: f16::from_f32(min).to_f32() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SeededGaussian;
    use proptest::prelude::*;

    const D: usize = 128;

    fn normal_rows(count: usize, seed: u64) -> Vec<Vec<f32>> {
        let mut random = SeededGaussian::new(seed);
        (0..count).map(|_| (0..D).map(|_| random.normal() as f32).collect()).collect()
    }

    /// Queries that span about ten directions, after U·H·P.
    fn spectrum() -> Vec<f32> {
        (0..D).map(|i| 0.85f32.powi((D - 1 - i) as i32)).collect()
    }

    fn dequantized(row: &[f32], rounding: &Rounding, bits: u32) -> Vec<f32> {
        let mut codes = vec![0; D];
        let params = rounding.quantize(row, 0.96, bits, &mut codes);
        codes.iter().map(|&c| params.dequantize(c)).collect()
    }

    fn weighted(metric: &[f64], error: &[f32]) -> f64 {
        let mut sum = 0.0;
        for i in 0..D {
            for j in 0..D {
                sum += f64::from(error[i]) * metric[i * D + j] * f64::from(error[j]);
            }
        }
        sum
    }

    #[test]
    fn feedback_lowers_what_queries_see() {
        let spectrum = spectrum();
        let feedback = Feedback::of_spectrum(&spectrum, Composition::RHPbr).unwrap().unwrap();
        let identity: Vec<f64> = (0..D * D).map(|at| f64::from(u8::from(at / D == at % D))).collect();
        let x = Rotation::compose(Composition::RHPbr, D, &identity).unwrap();
        let mut metric = vec![0.0; D * D];
        for (row, &value) in x.matrix().chunks_exact(D).zip(&spectrum) {
            for i in 0..D {
                for j in 0..D {
                    metric[i * D + j] += f64::from(value) * f64::from(row[i]) * f64::from(row[j]);
                }
            }
        }
        let shaped = Rounding { unbiased: false, feedback: Some(feedback) };
        for bits in [2, 3, 4] {
            let (mut near, mut far) = (0.0, 0.0);
            for row in normal_rows(40, 7) {
                let error = |rounding: &Rounding| -> Vec<f32> {
                    dequantized(&row, rounding, bits).iter().zip(&row).map(|(a, b)| a - b).collect()
                };
                near += weighted(&metric, &error(&Rounding::default()));
                far += weighted(&metric, &error(&shaped));
            }
            assert!(far < 0.8 * near, "{bits} bits: {far} of {near}");
        }
    }

    #[test]
    fn an_unbiased_row_keeps_its_mean_and_its_product_with_itself() {
        let unbiased = Rounding { unbiased: true, feedback: None };
        for bits in [2, 3, 4, 5, 8] {
            for row in normal_rows(20, 3) {
                let dequantized = dequantized(&row, &unbiased, bits);
                let mean = row.iter().sum::<f32>() / D as f32;
                let product = |a: &[f32]| -> f64 {
                    a.iter().zip(&row).map(|(a, b)| f64::from(a - mean) * f64::from(b - mean)).sum()
                };
                // The pair is rounded to fp16.
                assert!((product(&dequantized) / product(&row) - 1.0).abs() < 2e-3);
                assert!((dequantized.iter().sum::<f32>() / D as f32 - mean).abs() < 4e-3);
            }
        }
    }

    #[test]
    fn one_bit_and_nearest_are_the_plain_codes() {
        for row in normal_rows(8, 5) {
            for (bits, rounding) in
                [(1, Rounding { unbiased: true, feedback: None }), (3, Rounding::default())]
            {
                let (mut codes, mut plain) = (vec![0; D], vec![0; D]);
                let params = rounding.quantize(&row, 0.96, bits, &mut codes);
                let mut clipped = row.clone();
                crate::clip::clip(&mut clipped, 0.96);
                assert_eq!(params, affine::quantize_group(&clipped, bits, &mut plain));
                assert_eq!(codes, plain);
            }
        }
    }

    #[test]
    fn metrics_that_are_none_are_refused() {
        for metric in [vec![0.0; D * D], vec![f64::NAN; D * D]] {
            assert!(matches!(Feedback::of_metric(D, &metric), Err(CodecError::Metric)));
        }
        assert!(Feedback::of_metric(D, &[1.0]).is_err());
        assert_eq!(Feedback::of_spectrum(&spectrum(), Composition::HRPbr).unwrap(), None);
    }

    proptest! {
        /// For every row, codes and pair stay finite and in range.
        #[test]
        fn adversarial_rows_stay_finite(
            row in prop::collection::vec(prop_oneof![-1e4f32..1e4, Just(0.0), Just(32752.0), Just(-32752.0), -1e-6f32..1e-6], D),
            bits in prop_oneof![Just(1u32), Just(2), Just(3), Just(4), Just(5), Just(8)],
        ) {
            let feedback = Feedback::of_spectrum(&spectrum(), Composition::RHPbr).unwrap();
            let mut codes = vec![0; D];
            let params = Rounding { unbiased: true, feedback }.quantize(&row, 0.92, bits, &mut codes);
            prop_assert!(params.scale.is_finite() && params.min.is_finite());
            prop_assert!(codes.iter().all(|&c| u32::from(c) <= affine::max_code(bits)));
        }
    }
}
