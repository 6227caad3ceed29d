//! Affine codes: `x̂ = scale · code + min`.
//!
//! **Our format** keeps scale and minimum as fp16 and chooses every code with the *rounded* pair,
//! so codes partly compensate for the rounding of the pair. Widths are 1, 2, 3, 4, 5 and 8 bits; one
//! bit stores the row mean ± its mean absolute deviation. **The official format** keeps fp32 scale
//! and zero and follows the official kernels operation by operation.
//!
//! Defined for every input: NaN counts as 0, infinities and magnitudes beyond [`SATURATION`]
//! saturate, and a row of equal values has scale 0 and codes 0. If the spread of a row is below the
//! fp16 resolution of its offset, the row dequantizes to the offset, within half an fp16 step.

use half::f16;

/// Largest magnitude that our fp16 pair represents at every width: at one bit the scale is twice
/// the deviation and must stay below 65504.
pub const SATURATION: f32 = 32752.0;

/// Scale and minimum of one group, both exactly representable in fp16.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AffineParams {
    pub scale: f32,
    pub min: f32,
}

impl AffineParams {
    fn rounded(scale: f32, min: f32) -> Self {
        Self { scale: f16::from_f32(scale).to_f32(), min: f16::from_f32(min).to_f32() }
    }

    pub fn dequantize(self, code: u8) -> f32 {
        self.scale * code as f32 + self.min
    }

    /// The nearest level. Half-way cases go up; values beyond the range go to its ends.
    pub fn code(self, x: f32, bits: u32) -> u8 {
        if self.scale <= 0.0 {
            return 0;
        }
        let level = ((x - self.min) / self.scale + 0.5).floor();
        level.clamp(0.0, max_code(bits) as f32) as u8
    }
}

/// Largest code of a width.
pub const fn max_code(bits: u32) -> u32 {
    (1 << bits) - 1
}

/// Makes a row safe to quantize: NaN becomes 0, the rest is clamped to ± `limit`.
pub fn sanitize(row: &mut [f32], limit: f32) {
    for v in row {
        *v = if v.is_nan() { 0.0 } else { v.clamp(-limit, limit) };
    }
}

/// Sum in the order that every kernel must follow to reproduce codes bit for bit: sixteen lanes
/// strided over the row, then a tree of halves.
pub fn lane_sum(values: impl Iterator<Item = f32>) -> f32 {
    let mut lanes = [0f32; 16];
    for (i, v) in values.enumerate() {
        lanes[i % 16] += v;
    }
    halve(lanes)
}

/// Adds halves of a power of two of lanes to halves, until one is left.
#[inline(always)]
pub fn halve<const N: usize>(mut lanes: [f32; N]) -> f32 {
    let mut half = N / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Smallest and largest value of a non-empty row without NaN.
pub fn range(row: &[f32]) -> (f32, f32) {
    row.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(lo, hi), &v| (lo.min(v), hi.max(v)))
}

/// Quantizes one group (already sanitized and clipped) to `bits` and returns its rounded pair.
pub fn quantize_group(row: &[f32], bits: u32, codes: &mut [u8]) -> AffineParams {
    let params = if bits == 1 {
        let n = row.len() as f32;
        let mean = lane_sum(row.iter().copied()) / n;
        let deviation = lane_sum(row.iter().map(|v| (v - mean).abs())) / n;
        AffineParams::rounded(2.0 * deviation, mean - deviation)
    } else {
        let (min, max) = range(row);
        AffineParams::rounded((max - min) / max_code(bits) as f32, min)
    };
    for (code, &x) in codes.iter_mut().zip(row) {
        *code = params.code(x, bits);
    }
    params
}

/// Scale and zero of the official format, fp32, `x̂ = (code − zero) · scale`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OfficialParams {
    pub scale: f32,
    pub zero: f32,
}

impl OfficialParams {
    /// Magnitudes beyond this saturate: the zero of a constant row is its value over a scale of
    /// 1e−8/3 and must stay finite in fp32.
    pub const SATURATION: f32 = 1e30;

    pub fn dequantize(self, code: u8) -> f32 {
        (code as f32 - self.zero) * self.scale
    }
}

/// The official two-bit quantizer: `scale = max(max − min, 1e−8)/3`, `zero = −min/scale`, `code =
/// trunc(x/scale + zero + 0.5)`. The official kernels do not clamp. Here the result is clamped to
/// 0..=3, which only matters for rows whose offset is much larger than their range.
pub fn quantize_group_official(row: &[f32], codes: &mut [u8]) -> OfficialParams {
    let (min, max) = range(row);
    let scale = (max - min).max(1e-8) / 3.0;
    let zero = -min / scale;
    for (code, &x) in codes.iter_mut().zip(row) {
        *code = (x / scale + zero + 0.5).clamp(0.0, 3.0) as u8;
    }
    OfficialParams { scale, zero }
}

/// Scale and integer zero of QuaRot's quantizer, `x̂ = (code − zero) · scale`, both kept in fp16.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoundedZeroParams {
    pub scale: f32,
    pub zero: f32,
}

/// QuaRot's asymmetric quantizer: `scale = (max − min)/(2ᵇ − 1)`, `zero = round(−min/scale)`, `code
/// = clamp(round(x/scale) + zero)`. The integer zero moves the whole grid by up to half a step. For
/// a row of equal values the original divides by zero; here its magnitude becomes the step, and the
/// row is represented exactly.
pub fn quantize_group_rounded_zero(row: &[f32], bits: u32, codes: &mut [u8]) -> RoundedZeroParams {
    let (min, max) = range(row);
    let fp16 = |v: f32| f16::from_f32(v).to_f32();
    let mut scale = fp16((max - min) / max_code(bits) as f32);
    if scale <= 0.0 {
        scale = fp16(max.abs());
    }
    if scale <= 0.0 {
        codes.fill(0);
        return RoundedZeroParams { scale: 0.0, zero: 0.0 };
    }
    let zero = fp16((-min / scale).round_ties_even().clamp(-SATURATION, SATURATION));
    for (code, &x) in codes.iter_mut().zip(row) {
        *code = ((x / scale).round_ties_even() + zero).clamp(0.0, max_code(bits) as f32) as u8;
    }
    RoundedZeroParams { scale, zero }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOLDEN: [f32; 8] = [-1.5, -0.75, 0.0, 0.25, 0.5, 1.0, 2.0, 3.0];

    #[test]
    fn official_golden_vectors() {
        let mut codes = [0; 8];
        let p = quantize_group_official(&GOLDEN, &mut codes);
        assert_eq!((p.scale, p.zero, codes), (1.5, 1.0, [0, 1, 1, 1, 1, 2, 2, 3]));

        let clipped = GOLDEN.map(|v| v.clamp(-2.0, 2.0));
        let p = quantize_group_official(&clipped, &mut codes);
        assert_eq!((p.scale, p.zero), (1.166_666_6, 1.285_714_4));
        assert_eq!(codes, [0, 1, 1, 2, 2, 2, 3, 3]);
    }

    #[test]
    fn quarot_rounds_the_zero_to_an_integer() {
        let mut codes = [0; 8];
        let p = quantize_group_rounded_zero(&GOLDEN, 2, &mut codes);
        // scale 4.5/3; −min/scale = 1 exactly here.
        assert_eq!((p.scale, p.zero, codes), (1.5, 1.0, [0, 1, 1, 1, 1, 2, 2, 3]));
        let shifted = GOLDEN.map(|v| v + 0.6);
        let p = quantize_group_rounded_zero(&shifted, 2, &mut codes);
        assert_eq!((p.scale, p.zero), (1.5, 1.0), "−min/scale is 0.6");
        for value in [5.0, -3.0, 0.0] {
            let p = quantize_group_rounded_zero(&[value; 8], 2, &mut codes);
            assert_eq!((f32::from(codes[3]) - p.zero) * p.scale, value);
        }
    }

    #[test]
    fn one_bit_is_mean_plus_minus_mean_absolute_deviation() {
        let row = [-3.0, -1.0, 1.0, 3.0, -3.0, -1.0, 1.0, 3.0, -3.0, -1.0, 1.0, 3.0, -3.0, -1.0, 1.0, 3.0];
        let mut codes = [0; 16];
        let p = quantize_group(&row, 1, &mut codes);
        assert_eq!((p.dequantize(0), p.dequantize(1)), (-2.0, 2.0));
        assert_eq!(codes[..4], [0, 0, 1, 1]);
    }

    #[test]
    fn degenerate_rows_are_defined() {
        for bits in [1, 2, 3, 4, 5, 8] {
            for mut row in [
                vec![0.0; 32],
                vec![7.25; 32],
                vec![f32::NAN; 32],
                vec![f32::INFINITY; 32],
                vec![f32::MIN_POSITIVE / 8.0; 32],
                (0..32).map(|i| if i % 2 == 0 { f32::NEG_INFINITY } else { f32::MAX }).collect(),
                (0..32).map(|i| 20000.0 + i as f32 * 1e-3).collect(),
            ] {
                sanitize(&mut row, SATURATION);
                let mut codes = vec![9; 32];
                let p = quantize_group(&row, bits, &mut codes);
                for (&c, &x) in codes.iter().zip(&row) {
                    assert!(c as u32 <= max_code(bits));
                    let dequantized = p.dequantize(c);
                    assert!(dequantized.is_finite());
                    // Half a step of the code, plus the fp16 rounding of scale and offset.
                    let (lo, hi) = range(&row);
                    let step = if bits == 1 { hi - lo } else { (hi - lo) / max_code(bits) as f32 };
                    let bound = step * 0.51 + x.abs().max(lo.abs()) * 2.0 / 1024.0 + 1e-6;
                    assert!((dequantized - x).abs() <= bound, "{bits} bits: {x} came back as {dequantized}");
                }
            }
        }
    }

    proptest! {
        /// A dequantized row quantizes to itself wherever fp16 can represent its offset.
        #[test]
        fn dequantized_rows_are_fixed_points(
            row in prop::collection::vec(-8.0f32..8.0, 64), offset in -30.0f32..30.0, bits in prop::sample::select(vec![2u32, 3, 4]),
        ) {
            let row: Vec<f32> = row.iter().map(|v| v + offset).collect();
            let mut codes = vec![0; 64];
            let p = quantize_group(&row, bits, &mut codes);
            let dequantized: Vec<f32> = codes.iter().map(|&c| p.dequantize(c)).collect();
            let mut again = vec![0; 64];
            let p2 = quantize_group(&dequantized, bits, &mut again);
            prop_assert_eq!(p, p2);
            prop_assert_eq!(codes, again);
        }

        #[test]
        fn the_chosen_code_is_the_nearest_level(row in prop::collection::vec(-100.0f32..100.0, 32), bits in prop::sample::select(vec![1u32, 2, 3, 4, 8])) {
            let mut codes = vec![0; 32];
            let p = quantize_group(&row, bits, &mut codes);
            for (&c, &x) in codes.iter().zip(&row) {
                let own = (p.dequantize(c) - x).abs();
                for other in 0..=max_code(bits) as u8 {
                    prop_assert!(own <= (p.dequantize(other) - x).abs() + 1e-4 * (1.0 + p.scale));
                }
            }
        }
    }
}
