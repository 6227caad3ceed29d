//! Clipping by the exact order statistic of |x|.
//!
//! The threshold of a row of `d` values at ratio `r` is the `min(⌊r·d⌋, d−1)`-th smallest magnitude
//! (counting from zero); the row is clamped to ± that. Ratio 0 switches clipping off. One threshold
//! covers the whole head row even if codes have smaller groups. Prefill and demotion use this one
//! function, so a token gets the same codes in both.

use crate::error::{CodecError, Result};

/// Official constants (keys, values).
pub const OFFICIAL_KEY_RATIO: f64 = 0.96;
pub const OFFICIAL_VALUE_RATIO: f64 = 0.92;

pub fn check_ratio(ratio: f64) -> Result<()> {
    if (0.0..=1.0).contains(&ratio) { Ok(()) } else { Err(CodecError::ClipRatio(ratio)) }
}

/// Index of the order statistic; `None` when clipping is off.
pub fn order_index(ratio: f64, d: usize) -> Option<usize> {
    (ratio > 0.0 && d > 0).then(|| ((ratio * d as f64) as usize).min(d - 1))
}

/// The clip threshold of a row without NaN; `None` when clipping is off.
pub fn threshold(row: &[f32], ratio: f64) -> Option<f32> {
    let index = order_index(ratio, row.len())?;
    // Magnitudes of finite floats sort like their bit patterns, so integers can be sorted instead.
    let mut magnitudes: Vec<u32> = row.iter().map(|v| v.abs().to_bits()).collect();
    let (_, value, _) = magnitudes.select_nth_unstable(index);
    Some(f32::from_bits(*value))
}

/// Clamps a row to its threshold.
pub fn clip(row: &mut [f32], ratio: f64) {
    if let Some(t) = threshold(row, ratio) {
        for v in row {
            *v = v.clamp(-t, t);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threshold_is_the_official_order_statistic() {
        // x_i = ((37 i mod 128) − 63.5) / 16: published thresholds of the sort path.
        let row: Vec<f32> = (0..128).map(|i| ((37 * i % 128) as f32 - 63.5) / 16.0).collect();
        assert_eq!(order_index(0.96, 128), Some(122));
        assert_eq!(order_index(0.92, 128), Some(117));
        assert_eq!(threshold(&row, 0.96), Some(3.84375));
        assert_eq!(threshold(&row, 0.92), Some(3.65625));
    }

    #[test]
    fn zero_switches_it_off_and_one_changes_nothing() {
        let mut row = [3.0, -8.0, 1.0, 0.5];
        assert_eq!(threshold(&row, 0.0), None);
        clip(&mut row, 1.0);
        assert_eq!(row, [3.0, -8.0, 1.0, 0.5]);
        clip(&mut row, 0.5);
        assert_eq!(row, [3.0, -3.0, 1.0, 0.5]);
    }

    #[test]
    fn ratios_outside_zero_to_one_are_refused() {
        for bad in [-0.1, 1.01, f64::NAN] {
            assert!(check_ratio(bad).is_err());
        }
    }
}
