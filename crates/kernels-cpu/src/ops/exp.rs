//! The exponential function without branches or tables, so that a loop of it becomes vector code.
//!
//! `exp(x) = 2ⁿ · exp(r)` with `n = round(x / ln 2)` and `|r| ≤ ln 2 / 2`, where eight terms of the
//! power series are exact to 6·10⁻⁹.

/// Adding and subtracting 1.5·2²³ rounds to an integer, and leaves that integer in the low bits.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts. The first has ten significant bits, so that `n · LN2_HIGH` is exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Below, the result would be subnormal: it is zero. Softmax masks with -∞ rely on this zero being
/// exact.
const LOWEST: f32 = -87.336_54;
/// Above, `n` would be 128: the result is infinity (f32 itself ends at 88.72).
const HIGHEST: f32 = 88.376_26;

/// `eˣ` to about 2·10⁻⁷ relative for results that are normal numbers. NaN gives NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut series = 1.0 / 5040.0;
    series = series * r + 1.0 / 720.0;
    series = series * r + 1.0 / 120.0;
    series = series * r + 1.0 / 24.0;
    series = series * r + 1.0 / 6.0;
    series = series * r + 0.5;
    series = series * r + 1.0;
    series = series * r + 1.0;
    let power = f32::from_bits(shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23);
    let result = series * power;
    let result = if x < LOWEST { 0.0 } else { result };
    if x > HIGHEST { f32::INFINITY } else { result }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_error_is_below_three_ten_millionths() {
        let mut worst = 0.0_f64;
        for step in 0..2_000_000 {
            let x = LOWEST + (HIGHEST - LOWEST) * (step as f32 / 2e6);
            let truth = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - truth).abs() / truth);
        }
        assert!(worst < 3e-7, "{worst:e}");
    }

    #[test]
    fn edges_and_specials() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(LOWEST) >= f32::MIN_POSITIVE);
        assert!(exp(HIGHEST).is_finite());
    }

    #[test]
    fn parts_of_ln2_add_up() {
        assert!((f64::from(LN2_HIGH) + f64::from(LN2_LOW) - std::f64::consts::LN_2).abs() < 1e-11);
        assert_eq!(LN2_HIGH.to_bits() & 0x3fff, 0, "few enough bits for exact products");
    }
}
