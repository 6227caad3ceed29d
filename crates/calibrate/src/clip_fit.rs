//! Clip ratios fitted to a head.
//!
//! The official ratios are constants. Here the real codec quantizes a sample of the head's rotated
//! rows at every ratio of a grid, and the ratio with the least harm wins. For keys the harm is
//! `tr((K−K̂) C_Q (K−K̂)ᵀ)`, the squared error of the logits. For values it is the squared error of
//! rows, each weighted by the energy of its key's logits, which approximates how much attention the
//! row gets.

use crate::quality::{key_error, recode, value_error};
use crate::symmetric::Symmetric;
use oscar_codec::{CodeLayout, CodecError, RowPageCodec, SideSpec};
use serde::Serialize;

/// Ratios tried; 0 is no clipping, which 1 would also mean.
pub const RATIOS: [f64; 12] = [0.80, 0.84, 0.87, 0.90, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 0.0];

/// The harm at each ratio, as a fraction of the unclipped signal, and the ratio with the least
/// harm.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClipCurve {
    pub best: f64,
    pub points: Vec<ClipPoint>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ClipPoint {
    pub ratio: f64,
    pub error: f64,
}

/// Rotated rows of one head, and the weights of their errors.
#[derive(Clone, Copy, Debug)]
pub struct HeadRows<'a> {
    pub head_dim: usize,
    pub keys: &'a [f32],
    pub values: &'a [f32],
    /// Query second moment in the basis of `keys`.
    pub query: &'a Symmetric,
    /// One weight for each value row.
    pub value_weights: &'a [f64],
}

/// Measures every ratio for keys and values of these widths (1 to 4 bits, or 8).
pub fn fit(
    rows: HeadRows<'_>,
    bits: (u32, u32),
    ratios: &[f64],
) -> Result<(ClipCurve, ClipCurve), CodecError> {
    let (mut keys, mut values) = (Vec::with_capacity(ratios.len()), Vec::with_capacity(ratios.len()));
    let zeros = vec![0.0; rows.keys.len()];
    let key_signal = key_error(rows.keys, &zeros, rows.query);
    let value_signal = value_error(rows.values, &zeros, rows.value_weights);
    let fraction = |error: f64, signal: f64| if signal > 0.0 { error / signal } else { 0.0 };
    for &ratio in ratios {
        let (key, value) = (SideSpec::affine(bits.0, ratio), SideSpec::affine(bits.1, ratio));
        let codec = RowPageCodec::new(rows.head_dim, key, value, CodeLayout::Logical)?;
        let (key, value) = recode(&codec, rows.keys, rows.values)?;
        let error = fraction(key_error(rows.keys, &key, rows.query), key_signal);
        keys.push(ClipPoint { ratio, error });
        let error = fraction(value_error(rows.values, &value, rows.value_weights), value_signal);
        values.push(ClipPoint { ratio, error });
    }
    Ok((ClipCurve::new(keys), ClipCurve::new(values)))
}

impl ClipCurve {
    fn new(points: Vec<ClipPoint>) -> Self {
        let best = points.iter().min_by(|a, b| a.error.total_cmp(&b.error)).map_or(0.0, |p| p.ratio);
        Self { best, points }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_codec::random::SplitMix64;

    /// Sums of twelve uniform numbers: close to a Gaussian.
    fn gaussian(count: usize, seed: u64) -> Vec<f32> {
        let mut random = SplitMix64::new(seed);
        let mut uniform = || (random.next_u64() >> 40) as f32 / (1 << 24) as f32;
        (0..count).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect()
    }

    fn identity(d: usize) -> Symmetric {
        let full: Vec<f64> = (0..d * d).map(|i| f64::from(u8::from(i % (d + 1) == 0))).collect();
        Symmetric::from_full(d, &full)
    }

    #[test]
    fn gaussian_rows_want_less_than_the_official_ratio_at_two_bits() {
        let (d, n) = (128, 200);
        let (keys, values, query) = (gaussian(n * d, 1), gaussian(n * d, 2), identity(d));
        let weights = vec![1.0; n];
        let rows =
            HeadRows { head_dim: d, keys: &keys, values: &values, query: &query, value_weights: &weights };
        let (key, value) = fit(rows, (2, 2), &RATIOS).unwrap();
        // 0.875 is the best order statistic of unit Gaussians at d = 128.
        assert!((0.8..=0.9).contains(&key.best) && (0.8..=0.9).contains(&value.best), "{key:?}");
        let at = |curve: &ClipCurve, ratio| curve.points.iter().find(|p| p.ratio == ratio).unwrap().error;
        assert!((at(&key, 0.0) - 0.2516).abs() < 0.02, "{key:?}");
        assert!((at(&key, 0.96) - 0.1567).abs() < 0.01, "{key:?}");
        assert!((at(&key, 0.92) - 0.1276).abs() < 0.01, "{key:?}");
    }

    #[test]
    fn wider_codes_want_gentler_clips_and_every_width_works() {
        let (d, n) = (64, 128);
        let (keys, query) = (gaussian(n * d, 3), identity(d));
        let weights = vec![1.0; n];
        let rows =
            HeadRows { head_dim: d, keys: &keys, values: &keys, query: &query, value_weights: &weights };
        let effective = |ratio: f64| if ratio == 0.0 { 1.0 } else { ratio };
        let mut last = (0.0, f64::INFINITY);
        for bits in 2..=5 {
            let (key, value) = fit(rows, (bits, bits), &RATIOS).unwrap();
            assert_eq!(key.best, value.best, "equal rows, equal weights");
            let error = key.points.iter().map(|p| p.error).fold(f64::INFINITY, f64::min);
            assert!(effective(key.best) >= last.0 && error < last.1, "{bits} bits: {key:?}");
            last = (effective(key.best), error);
        }
        assert_eq!(fit(rows, (1, 1), &RATIOS).unwrap().0.points.len(), RATIOS.len());
        assert!(fit(rows, (6, 2), &RATIOS).is_err());
        assert!(fit(rows, (2, 2), &[1.5]).is_err());
    }

    #[test]
    fn silent_heads_are_harmless() {
        let (zeros, query) = (vec![0.0; 32 * 8], Symmetric::zeros(32));
        let weights = vec![1.0; 8];
        let rows =
            HeadRows { head_dim: 32, keys: &zeros, values: &zeros, query: &query, value_weights: &weights };
        let (key, _) = fit(rows, (2, 2), &RATIOS).unwrap();
        assert!(key.points.iter().all(|p| p.error == 0.0));
    }
}
