//! Lloyd–Max codes: the levels of least squared error for a Gaussian row.
//!
//! A row is standardized by its own mean and standard deviation and each value takes the nearest
//! centroid of the unit normal. [`Variant::Exact`] reconstructs with those centroids.
//! [`Variant::OfficialRatio`] is the official `LLOYD_MAX=1` mode: the same thresholds, but a
//! *uniform* grid whose step is 1.16 times the outer spacing.

use crate::affine::{AffineParams, lane_sum};
use half::f16;

/// Positive centroids of the unit normal for 1 to 4 bits; the negative ones mirror them.
///
/// DO NOT CHANGE: stored codes mean these levels. A test recomputes them by Lloyd's iteration.
const CENTROIDS_1: [f32; 1] = [0.797_884_6];
const CENTROIDS_2: [f32; 2] = [0.452_780_1, 1.510_418];
const CENTROIDS_3: [f32; 4] = [0.245_094_2, 0.756_005_3, 1.343_909, 2.151_946];
const CENTROIDS_4: [f32; 8] =
    [0.128_395_04, 0.388_048_27, 0.656_759_1, 0.942_340_5, 1.256_231_3, 1.618_046_4, 2.069_017, 2.732_589_6];

/// Constants of the official mode, digit for digit.
const OFFICIAL_THRESHOLD: f32 = 0.981_065_3;
const OFFICIAL_OUTER_LEVEL: f32 = 1.509_558_6;
const OFFICIAL_RATIO: f32 = 1.16;
const VARIANCE_FLOOR: f32 = 1e-8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    Exact,
    OfficialRatio,
}

/// Level of each code in units of the standard deviation, ascending.
pub fn levels(bits: u32) -> Option<Vec<f32>> {
    let positive: &[f32] = match bits {
        1 => &CENTROIDS_1,
        2 => &CENTROIDS_2,
        3 => &CENTROIDS_3,
        4 => &CENTROIDS_4,
        _ => return None,
    };
    Some(positive.iter().rev().map(|v| -v).chain(positive.iter().copied()).collect())
}

fn moments(row: &[f32]) -> (f32, f32) {
    let n = row.len() as f32;
    let mean = lane_sum(row.iter().copied()) / n;
    let variance = lane_sum(row.iter().map(|v| (v - mean) * (v - mean))) / n;
    (mean, (variance + VARIANCE_FLOOR).sqrt())
}

/// Deviation and mean of a group quantized with the exact centroids, both fp16: `x̂ = deviation ·
/// level[code] + mean`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CentroidParams {
    pub deviation: f32,
    pub mean: f32,
}

/// Quantizes a sanitized, clipped group with the exact centroids; `levels` are those of its width.
pub fn quantize_group(row: &[f32], levels: &[f32], codes: &mut [u8]) -> CentroidParams {
    let (mean, deviation) = moments(row);
    let params =
        CentroidParams { deviation: f16::from_f32(deviation).to_f32(), mean: f16::from_f32(mean).to_f32() };
    for (code, &x) in codes.iter_mut().zip(row) {
        let z = if params.deviation > 0.0 { (x - params.mean) / params.deviation } else { 0.0 };
        *code = levels.windows(2).filter(|pair| z >= (pair[0] + pair[1]) / 2.0).count() as u8;
    }
    params
}

/// Quantizes as the official two-bit mode does. The result dequantizes as an ordinary affine pair.
pub fn quantize_group_official_ratio(row: &[f32], codes: &mut [u8]) -> AffineParams {
    let (mean, deviation) = moments(row);
    let scale = f16::from_f32(2.0 * OFFICIAL_OUTER_LEVEL / 3.0 * OFFICIAL_RATIO * deviation).to_f32();
    for (code, &x) in codes.iter_mut().zip(row) {
        let z = (x - mean) / deviation;
        *code = [-OFFICIAL_THRESHOLD, 0.0, OFFICIAL_THRESHOLD].iter().filter(|&&t| z >= t).count() as u8;
    }
    AffineParams { scale, min: f16::from_f32(mean - 1.5 * scale).to_f32() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn density(x: f64) -> f64 {
        (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt()
    }

    /// Centroid of the unit normal between `a` and `b`, by Simpson's rule on mass and first moment.
    fn centroid(a: f64, b: f64) -> f64 {
        let n = 2000;
        let h = (b - a) / n as f64;
        let (mut mass, mut moment) = (0.0, 0.0);
        for i in 0..=n {
            let x = a + i as f64 * h;
            let w = if i == 0 || i == n {
                1.0
            } else if i % 2 == 1 {
                4.0
            } else {
                2.0
            };
            mass += w * density(x);
            moment += w * x * density(x);
        }
        moment / mass
    }

    #[test]
    fn tables_are_the_fixed_point_of_lloyds_iteration() {
        for bits in 1..=4u32 {
            let half = 1usize << (bits - 1);
            let mut c: Vec<f64> = (0..half).map(|i| (i as f64 + 0.5) * 2.5 / half as f64).collect();
            for _ in 0..3000 {
                let edges: Vec<f64> = std::iter::once(0.0)
                    .chain(c.windows(2).map(|w| (w[0] + w[1]) / 2.0))
                    .chain(std::iter::once(10.0))
                    .collect();
                c = edges.windows(2).map(|e| centroid(e[0], e[1])).collect();
            }
            let table = levels(bits).unwrap();
            for (want, have) in c.iter().zip(&table[half..]) {
                assert!(
                    (want - *have as f64).abs() < 2e-5,
                    "{bits} bits: iteration gives {want}, table says {have}"
                );
            }
        }
        assert!(levels(8).is_none());
    }

    #[test]
    fn official_mode_has_its_documented_levels() {
        let row: Vec<f32> = (0..128).map(|i| ((37 * i % 128) as f32 - 63.5) / 16.0).collect();
        let (mean, sigma) = moments(&row);
        let mut codes = vec![0; 128];
        let p = quantize_group_official_ratio(&row, &mut codes);
        for (code, factor) in [(0, -1.75109), (1, -0.58370), (2, 0.58370), (3, 1.75109)] {
            assert!((p.dequantize(code) - (mean + factor * sigma)).abs() < 2e-3 * sigma);
        }
    }

    #[test]
    fn constant_rows_keep_their_value() {
        let row = [5.0f32; 32];
        let mut codes = [0; 32];
        let p = quantize_group(&row, &levels(2).unwrap(), &mut codes);
        let dequantized = p.deviation * levels(2).unwrap()[codes[0] as usize] + p.mean;
        assert!((dequantized - 5.0).abs() < 1e-3);
    }
}
