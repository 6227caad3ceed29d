//! Eight-bit floats of the kind E4M3 (`fn`: no infinities, largest 448), with one fp16 scale for
//! each row.
//!
//! `x̂ = scale · e4m3(code)` with `scale = max|x| / 448`: 8 + 16/d bits an element.

use crate::affine::SATURATION;
use half::f16;

/// Largest E4M3 magnitude.
pub const MAX: f32 = 448.0;

/// The value of a code. The two NaN patterns, which are never written, count as ±448.
pub fn dequantize(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match code & 0x7f {
        0x7f => MAX,
        _ if exponent == 0 => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The nearest code, ties to the even one; magnitudes beyond 448 saturate and NaN counts as 0.
pub fn quantize(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = if x.is_nan() { 0.0 } else { x.abs().min(MAX) };
    // The step of the binade: 2^(e−3), and 2^−9 below the smallest normal number 2^−6.
    let exponent = (magnitude.to_bits() >> 23) as i32 - 127;
    let step_exponent = exponent.max(-6) - 3;
    let steps = (magnitude * 2f32.powi(-step_exponent)).round_ties_even() as u32;
    // Steps are counted from the start of the binade, so a carry into the next binade is correct
    // without a special case.
    let code = if exponent < -6 { steps } else { ((exponent + 7) as u32 * 8) + steps - 8 };
    sign | code as u8
}

/// Quantizes a row and returns its scale, representable in fp16.
pub fn quantize_row(row: &[f32], codes: &mut [u8]) -> f32 {
    let sane = |v: f32| if v.is_nan() { 0.0 } else { v.clamp(-SATURATION, SATURATION) };
    let largest = row.iter().fold(0f32, |m, &v| m.max(sane(v).abs()));
    let scale = f16::from_f32(largest / MAX).to_f32();
    for (code, &v) in codes.iter_mut().zip(row) {
        *code = if scale > 0.0 { quantize(sane(v) / scale) } else { 0 };
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_but_nan_comes_back() {
        for code in 0..=255u8 {
            if code & 0x7f != 0x7f {
                assert_eq!(quantize(dequantize(code)), code, "{}", dequantize(code));
            }
        }
        assert_eq!((dequantize(0x7e), dequantize(0x08), dequantize(0x01)), (448.0, 1.0 / 64.0, 1.0 / 512.0));
    }

    #[test]
    fn the_nearest_code_is_chosen() {
        for i in 0..20_000 {
            let x = (i as f32 - 10_000.0) * 0.0431;
            let own = (dequantize(quantize(x)) - x).abs();
            let best = (0..=255u8).map(|c| (dequantize(c) - x).abs()).fold(f32::INFINITY, f32::min);
            assert_eq!(own, best, "{x}");
        }
        assert_eq!(
            (dequantize(quantize(1e9)), dequantize(quantize(-1e9)), quantize(f32::NAN) & 0x7f),
            (448.0, -448.0, 0)
        );
    }

    #[test]
    fn a_row_is_within_a_sixteenth_of_each_value() {
        let row: Vec<f32> = (0..128).map(|i| ((37 * i % 128) as f32 - 63.5) / 16.0).collect();
        let mut codes = vec![0; 128];
        let scale = quantize_row(&row, &mut codes);
        for (&c, &x) in codes.iter().zip(&row) {
            assert!((scale * dequantize(c) - x).abs() <= x.abs() / 16.0 + scale / 1024.0);
        }
        assert_eq!(quantize_row(&[0.0; 32], &mut codes[..32]), 0.0);
        assert!(quantize_row(&[f32::INFINITY; 32], &mut codes[..32]).is_finite());
    }
}
