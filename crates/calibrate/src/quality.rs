//! The cost of quantizing a head, in the units that attention reads.
//!
//! Errors of keys are measured by their effect on logits (weighted by the query second moment),
//! errors of values by row weights; both with the real codec on rows as the cache holds them.

use crate::sample::{HeadSample, rotate_rows};
use crate::symmetric::Symmetric;
use oscar_codec::format::default_clip;
use oscar_codec::{
    CodeLayout, CodecError, HeadRotations, PAGE_TOKENS, Rotation, RowPageCodec, Side, SideSpec,
};
use serde::Serialize;

/// Quantizes rows and dequantizes them.
pub fn recode(
    codec: &RowPageCodec,
    keys: &[f32],
    values: &[f32],
) -> Result<(Vec<f32>, Vec<f32>), CodecError> {
    let chunk = PAGE_TOKENS * codec.head_dim();
    let mut page = vec![0; codec.page_bytes()];
    let (mut decoded_keys, mut decoded_values) = (vec![0.0; keys.len()], vec![0.0; values.len()]);
    let outputs = decoded_keys.chunks_mut(chunk).zip(decoded_values.chunks_mut(chunk));
    for ((keys, values), (key_out, value_out)) in keys.chunks(chunk).zip(values.chunks(chunk)).zip(outputs) {
        codec.quantize(keys, values, &mut page)?;
        codec.dequantize_rows(0, &page, key_out, value_out)?;
    }
    Ok((decoded_keys, decoded_values))
}

/// `Σ (k−k̂) C (k−k̂)ᵀ`, rows and `query` in one basis.
pub fn key_error(keys: &[f32], decoded: &[f32], query: &Symmetric) -> f64 {
    let d = query.dim();
    let mut difference = vec![0.0; d];
    keys.chunks_exact(d)
        .zip(decoded.chunks_exact(d))
        .map(|(key, decoded)| {
            difference.iter_mut().zip(key.iter().zip(decoded)).for_each(|(out, (a, b))| *out = a - b);
            query.quadratic(&difference)
        })
        .sum()
}

/// `Σ w ‖v−v̂‖²`.
pub fn value_error(values: &[f32], decoded: &[f32], weights: &[f64]) -> f64 {
    let d = values.len() / weights.len().max(1);
    if d == 0 {
        return 0.0;
    }
    let rows = values.chunks_exact(d).zip(decoded.chunks_exact(d)).zip(weights);
    rows.map(|((value, decoded), weight)| {
        weight * value.iter().zip(decoded).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>()
    })
    .sum()
}

/// `w_t = k_t C k_tᵀ`, scaled to a mean of one: how strongly queries react to each key. All ones if
/// they react to none.
pub fn logit_energy(keys: &[f32], query: &Symmetric) -> Vec<f64> {
    let mut weights: Vec<f64> = keys.chunks_exact(query.dim()).map(|key| query.quadratic(key)).collect();
    let sum: f64 = weights.iter().sum();
    let scale = weights.len() as f64 / sum;
    if scale.is_finite() && sum > 0.0 {
        weights.iter_mut().for_each(|w| *w *= scale);
    } else {
        weights.fill(1.0);
    }
    weights
}

/// Signal-to-noise ratios in decibels.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Snr {
    /// No rotation, no clip.
    pub naive: f64,
    /// The data-free rotation with the default clip.
    pub hadamard: f64,
    pub calibrated: f64,
}

/// SNR of logits and of values of one head.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct HeadQuality {
    pub logits: Snr,
    pub values: Snr,
}

/// Decibels are clamped to ± this; beyond it they mean nothing (and infinity is not JSON).
const DECIBEL_LIMIT: f64 = 99.0;

pub fn decibels(signal: f64, noise: f64) -> f64 {
    if signal <= 0.0 {
        return 0.0;
    }
    (10.0 * (signal / noise).log10()).clamp(-DECIBEL_LIMIT, DECIBEL_LIMIT)
}

/// Measures a head in three ways: quantized without rotation, after a Hadamard rotation, and after
/// its own rotation with its own clips.
///
/// The signal of the logits is that of keys without their mean. A part that all keys share does not
/// change attention, so keeping it earns no credit.
pub fn measure(
    sample: &HeadSample,
    query: &Symmetric,
    own: &HeadRotations,
    clips: (f64, f64),
    bits: (u32, u32),
) -> Result<HeadQuality, CodecError> {
    let d = sample.head_dim;
    let weights = logit_energy(&sample.keys, query);
    let centred = centre(&sample.keys, d);
    let zeros = vec![0.0; sample.keys.len()];
    let key_signal = key_error(&centred, &zeros, query);
    let value_signal = value_error(&sample.values, &zeros, &weights);
    let snr = |key: &Rotation, value: &Rotation, mean: Option<&[f32]>, clips: (f64, f64)| {
        let keys = rotate_rows(&sample.keys, mean, key);
        let values = rotate_rows(&sample.values, None, value);
        let specs = (SideSpec::affine(bits.0, clips.0), SideSpec::affine(bits.1, clips.1));
        let codec = RowPageCodec::new(d, specs.0, specs.1, CodeLayout::Logical)?;
        let (key_codes, value_codes) = recode(&codec, &keys, &values)?;
        let logits = decibels(key_signal, key_error(&keys, &key_codes, &query.rotated(key)));
        Ok::<_, CodecError>((logits, decibels(value_signal, value_error(&values, &value_codes, &weights))))
    };
    let (identity, hadamard) = (Rotation::identity(d)?, Rotation::hadamard(d)?);
    let default = (default_clip(Side::Key, bits.0), default_clip(Side::Value, bits.1));
    let naive = snr(&identity, &identity, None, (0.0, 0.0))?;
    let free = snr(&hadamard, &hadamard, None, default)?;
    let calibrated = snr(&own.key, &own.value, own.key_mean.as_deref(), clips)?;
    Ok(HeadQuality {
        logits: Snr { naive: naive.0, hadamard: free.0, calibrated: calibrated.0 },
        values: Snr { naive: naive.1, hadamard: free.1, calibrated: calibrated.1 },
    })
}

fn centre(rows: &[f32], d: usize) -> Vec<f32> {
    let count = (rows.len() / d).max(1) as f64;
    let mut mean = vec![0.0f64; d];
    for row in rows.chunks_exact(d) {
        mean.iter_mut().zip(row).for_each(|(m, &v)| *m += f64::from(v) / count);
    }
    rows.iter().zip(mean.iter().cycle()).map(|(&v, m)| (f64::from(v) - m) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decibels_are_bounded() {
        assert_eq!(decibels(100.0, 1.0), 20.0);
        assert_eq!(decibels(1.0, 0.0), 99.0);
        assert_eq!(decibels(0.0, 0.0), 0.0);
        assert_eq!(decibels(1e-300, 1.0), -99.0);
    }

    #[test]
    fn energy_weights_have_mean_one() {
        let mut query = Symmetric::zeros(32);
        let keys: Vec<f32> = (0..64).map(|i| i as f32).collect();
        assert_eq!(logit_energy(&keys, &query), [1.0, 1.0]);
        query.add_full(&(0..1024).map(|i| f64::from(u8::from(i % 33 == 0))).collect::<Vec<_>>());
        let weights = logit_energy(&keys, &query);
        assert!((weights[0] + weights[1] - 2.0).abs() < 1e-12 && weights[1] > weights[0]);
    }

    #[test]
    fn a_rotation_that_spreads_an_outlier_wins() {
        let d = 64;
        // One channel carries a large alternating value.
        let mut keys: Vec<f32> = (0..128 * d).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
        keys.iter_mut().step_by(d).enumerate().for_each(|(t, v)| *v = if t % 2 == 0 { 30.0 } else { -30.0 });
        let query = Symmetric::from_full(
            d,
            &(0..d * d).map(|i| f64::from(u8::from(i % (d + 1) == 0))).collect::<Vec<_>>(),
        );
        let own = HeadRotations {
            key: Rotation::hadamard(d).unwrap(),
            value: Rotation::hadamard(d).unwrap(),
            key_mean: None,
        };
        let sample = HeadSample { head_dim: d, values: keys.clone(), keys };
        let quality = measure(&sample, &query, &own, (0.96, 0.92), (2, 2)).unwrap();
        assert_eq!(quality.logits.hadamard, quality.logits.calibrated, "the same rotation and clip");
        assert_eq!(quality.values.hadamard, quality.values.calibrated);
        assert!(quality.logits.calibrated.is_finite());
    }
}
