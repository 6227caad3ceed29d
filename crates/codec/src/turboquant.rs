//! TurboQuant: rows as a norm and Lloyd–Max codes of the direction.
//!
//! The row arrives rotated by a random orthogonal matrix (the cache's rotation), so each coordinate
//! of its direction is close to N(0, 1/d) and one fixed codebook serves all. `mse` stores the norm
//! in fp16 and codes of `b` bits, `x̂ = ‖x‖ · level/√d`: `b + 16/d` bits an element. `prod` spends
//! one of the bits on a sketch of the residual `r = x − x̂`: the signs of `S·r` for a Gaussian
//! matrix S, and ‖r‖. Dequantizing adds `√(π/2)/d · ‖r‖ · Sᵀ·sign(S·r)`, which makes inner products
//! unbiased: `b + 32/d` bits.
//!
//! Fractional widths split the channels into two independent instances; the first has one bit more.
//! `normalized` is the "norm correction" of vLLM's presets: the centroids of a row are scaled to a
//! unit vector before the norm is applied.

use crate::affine;
use crate::error::{CodecError, Result};
use crate::lloyd_max;
use crate::random::SeededGaussian;
use half::f16;
use std::sync::{Arc, OnceLock};

/// Seed of the sketch matrices.
///
/// DO NOT CHANGE: stored signs mean nothing under another matrix.
const SKETCH_SEED: u64 = 0x5153_4B45_5443_4831;

/// Largest norm fp16 holds with room to spare.
const NORM_LIMIT: f32 = 60_000.0;

/// Share of the channels that take one bit more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outliers {
    None,
    Quarter,
    Half,
}

impl Outliers {
    /// Channels of the first instance: a multiple of 8, so that every instance fills whole bytes.
    pub fn channels(self, head_dim: usize) -> usize {
        match self {
            Self::None => 0,
            Self::Quarter => head_dim / 4 / 8 * 8,
            Self::Half => head_dim / 2 / 8 * 8,
        }
    }
}

/// The contents of a stored row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurboSpec {
    pub outliers: Outliers,
    /// Store a sketch of the residual in place of one code bit.
    pub prod: bool,
    /// Scale dequantized centroids to a unit vector.
    pub normalized: bool,
}

/// One instance: consecutive channels with a norm and a codebook of their own. Its bytes in a row
/// are `[codes][signs, if any][norm][residual norm, if any]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Instance {
    pub first: usize,
    pub channels: usize,
    /// Bits of the codebook; the sketch comes on top.
    pub bits: u32,
    /// Where the instance starts in a row's bytes.
    pub start: usize,
    /// Centroids of N(0, 1/channels), by code.
    pub levels: Vec<f32>,
    pub normalized: bool,
    /// Row-major `channels × channels` Gaussian matrix of the sketch.
    pub sketch: Option<Arc<[f32]>>,
}

impl Instance {
    pub fn code_bytes(&self) -> usize {
        self.channels * self.bits as usize / 8
    }

    fn sign_bytes(&self) -> usize {
        if self.sketch.is_some() { self.channels / 8 } else { 0 }
    }

    fn bytes(&self) -> usize {
        self.code_bytes() + self.sign_bytes() + if self.sketch.is_some() { 4 } else { 2 }
    }

    /// Codes, signs and fp16 norms of a row's bytes, as they are stored.
    pub fn stored_parts<'a>(&self, row: &'a [u8]) -> [&'a [u8]; 3] {
        let (codes, rest) = row[self.start..][..self.bytes()].split_at(self.code_bytes());
        let (signs, norms) = rest.split_at(self.sign_bytes());
        [codes, signs, norms]
    }

    /// Codes, signs and the two norms of a row's bytes.
    pub fn parts<'a>(&self, row: &'a [u8]) -> (&'a [u8], &'a [u8], f32, f32) {
        let [codes, signs, norms] = self.stored_parts(row);
        let half = |at: usize| f16::from_le_bytes([norms[at], norms[at + 1]]).to_f32();
        (codes, signs, half(0), if self.sketch.is_some() { half(2) } else { 0.0 })
    }

    /// Factor of the sketch: `√(π/2)/d · ‖r‖`.
    pub fn sketch_factor(&self, residual_norm: f32) -> f32 {
        (std::f32::consts::FRAC_PI_2.sqrt() / self.channels as f32) * residual_norm
    }

    fn code(&self, codes: &[u8], channel: usize) -> u8 {
        let bit = channel * self.bits as usize;
        let pair = u16::from(codes[bit / 8]) | u16::from(codes.get(bit / 8 + 1).copied().unwrap_or(0)) << 8;
        (pair >> (bit % 8)) as u8 & ((1 << self.bits) - 1)
    }

    /// Factor from centroids to values, given the sum of their squares.
    pub fn scale(&self, norm: f32, squares: f32) -> f32 {
        if self.normalized && squares > 0.0 { norm / squares.sqrt() } else { norm }
    }

    fn dequantize_centroids(&self, codes: &[u8], norm: f32, out: &mut [f32]) {
        for (channel, v) in out.iter_mut().enumerate() {
            *v = self.levels[usize::from(self.code(codes, channel))];
        }
        let squares = if self.normalized { affine::lane_sum(out.iter().map(|v| v * v)) } else { 0.0 };
        let scale = self.scale(norm, squares);
        out.iter_mut().for_each(|v| *v *= scale);
    }

    fn dequantize(&self, row: &[u8], out: &mut [f32]) {
        let (codes, signs, norm, residual) = self.parts(row);
        self.dequantize_centroids(codes, norm, out);
        let Some(sketch) = &self.sketch else { return };
        let factor = self.sketch_factor(residual);
        let mut sum = vec![0.0; self.channels];
        for (i, directions) in sketch.chunks_exact(self.channels).enumerate() {
            let sign = if signs[i / 8] >> (i % 8) & 1 == 1 { 1.0 } else { -1.0 };
            sum.iter_mut().zip(directions).for_each(|(s, g)| *s += sign * g);
        }
        out.iter_mut().zip(&sum).for_each(|(v, s)| *v += factor * s);
    }

    fn quantize(&self, x: &[f32], row: &mut [u8]) {
        let bytes = &mut row[self.start..][..self.bytes()];
        bytes.fill(0);
        let norm = norm(x);
        let stored = f16::from_f32(norm.min(NORM_LIMIT)).to_f32();
        for (channel, &v) in x.iter().enumerate() {
            let z = if norm > 0.0 { v / norm } else { 0.0 };
            let code = self.levels.windows(2).filter(|pair| z >= (pair[0] + pair[1]) / 2.0).count() as u16;
            let bit = channel * self.bits as usize;
            let pair = code << (bit % 8);
            bytes[bit / 8] |= pair as u8;
            if pair > 0xff {
                bytes[bit / 8 + 1] |= (pair >> 8) as u8;
            }
        }
        let norms = self.code_bytes() + self.sign_bytes();
        bytes[norms..norms + 2].copy_from_slice(&f16::from_f32(stored).to_le_bytes());
        let Some(sketch) = &self.sketch else { return };
        let mut residual = vec![0.0; self.channels];
        self.dequantize_centroids(&bytes[..self.code_bytes()], stored, &mut residual);
        residual.iter_mut().zip(x).for_each(|(r, x)| *r = x - *r);
        for (i, directions) in sketch.chunks_exact(self.channels).enumerate() {
            let dot = affine::lane_sum(directions.iter().zip(&residual).map(|(g, r)| g * r));
            bytes[self.code_bytes() + i / 8] |= u8::from(dot >= 0.0) << (i % 8);
        }
        let length = f16::from_f32(self::norm(&residual).min(NORM_LIMIT));
        bytes[norms + 2..norms + 4].copy_from_slice(&length.to_le_bytes());
    }
}

fn norm(x: &[f32]) -> f32 {
    affine::lane_sum(x.iter().map(|v| v * v)).sqrt()
}

/// The Gaussian matrix of a size, made once.
fn sketch_matrix(d: usize) -> Arc<[f32]> {
    static MATRICES: [OnceLock<Arc<[f32]>>; 33] = [const { OnceLock::new() }; 33];
    MATRICES[d / 8]
        .get_or_init(|| {
            let mut random = SeededGaussian::new(SKETCH_SEED ^ d as u64);
            (0..d * d).map(|_| random.normal() as f32).collect()
        })
        .clone()
}

/// Codec of one side's rows.
#[derive(Clone, Debug, PartialEq)]
pub struct TurboQuant {
    instances: Vec<Instance>,
}

impl TurboQuant {
    /// Codes of `bits` bits; if channels are split off, the first instance has one bit more.
    pub fn new(head_dim: usize, bits: u32, spec: TurboSpec) -> Result<Self> {
        let outliers = spec.outliers.channels(head_dim);
        let parts = [(0, outliers, bits + 1), (outliers, head_dim - outliers, bits)];
        let mut start = 0;
        let mut instances = Vec::new();
        for (first, channels, width) in parts.into_iter().filter(|part| part.1 > 0) {
            let code_bits = width.checked_sub(u32::from(spec.prod)).ok_or(CodecError::Bits(width))?;
            let unit = 1.0 / (channels as f32).sqrt();
            let levels = lloyd_max::levels(code_bits).ok_or(CodecError::Bits(width))?;
            let instance = Instance {
                first,
                channels,
                bits: code_bits,
                start,
                levels: levels.iter().map(|v| v * unit).collect(),
                normalized: spec.normalized,
                sketch: spec.prod.then(|| sketch_matrix(channels)),
            };
            start += instance.bytes();
            instances.push(instance);
        }
        Ok(Self { instances })
    }

    pub fn instances(&self) -> &[Instance] {
        &self.instances
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.instances.iter().map(Instance::bytes).sum()
    }

    pub fn quantize_row(&self, row: &[f32], bytes: &mut [u8]) {
        let mut row = row.to_vec();
        affine::sanitize(&mut row, affine::SATURATION);
        for instance in &self.instances {
            instance.quantize(&row[instance.first..][..instance.channels], bytes);
        }
    }

    pub fn dequantize_row(&self, bytes: &[u8], row: &mut [f32]) {
        for instance in &self.instances {
            instance.dequantize(bytes, &mut row[instance.first..][..instance.channels]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSE: TurboSpec = TurboSpec { outliers: Outliers::None, prod: false, normalized: false };

    fn gaussian(n: usize, seed: u64) -> Vec<f32> {
        let mut random = SeededGaussian::new(seed);
        (0..n).map(|_| random.normal() as f32).collect()
    }

    fn dequantized(codec: &TurboQuant, row: &[f32]) -> Vec<f32> {
        let (mut bytes, mut out) = (vec![0xee; codec.row_bytes()], vec![0.0; row.len()]);
        codec.quantize_row(row, &mut bytes);
        codec.dequantize_row(&bytes, &mut out);
        out
    }

    /// Mean of ‖x − x̂‖²/‖x‖² over random directions.
    fn distortion(codec: &TurboQuant, d: usize) -> f64 {
        let n = 400;
        (0..n)
            .map(|seed| {
                let x = gaussian(d, seed);
                let out = dequantized(codec, &x);
                let error: f64 = x.iter().zip(&out).map(|(a, b)| f64::from(a - b).powi(2)).sum();
                error / x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>()
            })
            .sum::<f64>()
            / n as f64
    }

    #[test]
    fn distortion_is_within_the_published_bound() {
        for bits in 1..=4u32 {
            let measured = distortion(&TurboQuant::new(128, bits, MSE).unwrap(), 128);
            // D_mse ≤ (√3·π/2)·4^−b, and no code does better than 4^−b.
            let bound = 3f64.sqrt() * std::f64::consts::FRAC_PI_2 * 4f64.powi(-(bits as i32));
            assert!(measured <= bound && measured >= 4f64.powi(-(bits as i32)), "{bits} bits: {measured}");
        }
        // 9.35 dB at two bits, 14.69 at three: the distortion of Lloyd–Max.
        let two = distortion(&TurboQuant::new(128, 2, MSE).unwrap(), 128);
        assert!((-10.0 * two.log10() - 9.35).abs() < 0.15, "{two}");
        let corrected = TurboSpec { normalized: true, ..MSE };
        let two = distortion(&TurboQuant::new(128, 2, corrected).unwrap(), 128);
        assert!((-10.0 * two.log10() - 9.25).abs() < 0.15, "{two}");
    }

    #[test]
    fn the_sketch_makes_inner_products_unbiased_and_noisy() {
        let d = 128;
        let (prod, mse) = (
            TurboQuant::new(d, 2, TurboSpec { prod: true, ..MSE }).unwrap(),
            TurboQuant::new(d, 2, MSE).unwrap(),
        );
        // Over random pairs the regression of ⟨y, x̃⟩ on ⟨y, x⟩ has slope 1 for prod; mse shrinks
        // by its distortion.
        let slope = |codec: &TurboQuant| {
            let (mut cross, mut square) = (0.0, 0.0);
            for seed in 0..1500 {
                let (x, noise) = (gaussian(d, seed), gaussian(d, seed + 10_000));
                let y: Vec<f32> = x.iter().zip(&noise).map(|(a, b)| a + b).collect();
                let out = dequantized(codec, &x);
                let dot = |a: &[f32]| a.iter().zip(&y).map(|(a, b)| f64::from(a * b)).sum::<f64>();
                cross += dot(&out) * dot(&x);
                square += dot(&x).powi(2);
            }
            cross / square
        };
        assert!((slope(&prod) - 1.0).abs() < 0.02, "{}", slope(&prod));
        assert!((slope(&mse) - 0.8825).abs() < 0.02, "{}", slope(&mse));
        // 2.49 dB against 9.35: the cost of QJL at equal bits.
        let noisy = distortion(&prod, d);
        assert!((-10.0 * noisy.log10() - 2.49).abs() < 0.3, "{noisy}");
        // D_prod ≤ √3·π²·‖y‖²/d · 4^−b for unit x.
        let mut worst = 0.0;
        for seed in 0..400 {
            let (x, y) = (gaussian(d, seed), gaussian(d, seed + 5000));
            let out = dequantized(&prod, &x);
            let size = |a: &[f32]| a.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
            let error: f64 = x.iter().zip(&out).zip(&y).map(|((a, b), y)| f64::from((a - b) * y)).sum();
            worst += error.powi(2) / (size(&x) * size(&y)) / 400.0;
        }
        assert!(worst <= 3f64.sqrt() * std::f64::consts::PI.powi(2) / d as f64 / 16.0, "{worst}");
    }

    #[test]
    fn bytes_are_those_of_the_formula() {
        for (bits, outliers, prod, expected) in [
            (2, Outliers::None, false, 2.0 + 16.0 / 128.0),
            (3, Outliers::None, false, 3.0 + 16.0 / 128.0),
            (2, Outliers::Half, false, 2.5 + 32.0 / 128.0),
            (2, Outliers::Quarter, false, 2.25 + 32.0 / 128.0),
            (3, Outliers::Half, false, 3.5 + 32.0 / 128.0),
            (2, Outliers::None, true, 2.0 + 32.0 / 128.0),
            (4, Outliers::None, true, 4.0 + 32.0 / 128.0),
            (2, Outliers::Half, true, 2.5 + 64.0 / 128.0),
        ] {
            let codec = TurboQuant::new(128, bits, TurboSpec { outliers, prod, normalized: false }).unwrap();
            assert_eq!(codec.row_bytes() as f64 * 8.0 / 128.0, expected, "{bits} {outliers:?} {prod}");
        }
        assert!(TurboQuant::new(128, 5, MSE).is_err());
        assert!(TurboQuant::new(128, 4, TurboSpec { outliers: Outliers::Half, ..MSE }).is_err());
    }

    #[test]
    fn instances_are_independent_and_the_first_has_a_bit_more() {
        let spec = TurboSpec { outliers: Outliers::Half, ..MSE };
        let codec = TurboQuant::new(128, 2, spec).unwrap();
        let mut x = gaussian(128, 5);
        let before = dequantized(&codec, &x);
        x[127] = 50.0;
        assert_eq!(dequantized(&codec, &x)[..64], before[..64]);
        assert_eq!(
            codec.instances().iter().map(|i| (i.channels, i.bits)).collect::<Vec<_>>(),
            [(64, 3), (64, 2)]
        );
    }

    #[test]
    fn hostile_rows_dequantize_to_finite_numbers() {
        for prod in [false, true] {
            let codec = TurboQuant::new(32, 2, TurboSpec { prod, ..MSE }).unwrap();
            for value in [f32::NAN, f32::INFINITY, f32::MAX, -0.0, f32::from_bits(1)] {
                let out = dequantized(&codec, &[value; 32]);
                assert!(out.iter().all(|v| v.is_finite()), "{value}: {out:?}");
                assert!(value.abs() > 1.0 || out.iter().all(|v| v.abs() < 1e-3));
            }
        }
    }
}
