//! Deterministic random numbers, the same on every machine: one generator, and Gaussian numbers and
//! orthogonal matrices made from it.
//!
//! Codes stored under one random matrix mean nothing under another, so the generator and the seeds
//! are part of the format. Task cases and token sampling use ChaCha8 streams instead: their draws
//! are published by name and seed.

/// SplitMix64: a stream of numbers that depends on its seed alone.
///
/// DO NOT CHANGE: rotations and sketches that stored codes depend on come from it.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which must not be 0.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// Uniform in (0, 1).
    pub fn uniform(&mut self) -> f64 {
        ((self.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Uniform in [-1, 1), on a grid that f32 represents exactly.
    pub fn symmetric(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// Standard normal numbers by Box–Muller.
///
/// DO NOT CHANGE: see [`SplitMix64`].
pub struct SeededGaussian {
    random: SplitMix64,
    spare: Option<f64>,
}

impl SeededGaussian {
    pub fn new(seed: u64) -> Self {
        Self { random: SplitMix64::new(seed), spare: None }
    }

    /// The next standard normal number.
    pub fn normal(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        let radius = (-2.0 * self.random.uniform().ln()).sqrt();
        let angle = std::f64::consts::TAU * self.random.uniform();
        self.spare = Some(radius * angle.sin());
        radius * angle.cos()
    }
}

/// A random orthogonal `d × d` matrix, row-major: the Q of a Gaussian matrix's QR decomposition.
pub fn orthogonal_matrix(d: usize, seed: u64) -> Vec<f64> {
    let mut random = SeededGaussian::new(seed);
    let mut m: Vec<f64> = (0..d * d).map(|_| random.normal()).collect();
    for i in 0..d {
        let (done, rest) = m.split_at_mut(i * d);
        let row = &mut rest[..d];
        // Two passes are enough: the second removes the rounding error of the first.
        for _ in 0..2 {
            for earlier in done.chunks_exact(d) {
                let dot: f64 = row.iter().zip(earlier).map(|(a, b)| a * b).sum();
                row.iter_mut().zip(earlier).for_each(|(a, b)| *a -= dot * b);
            }
            let norm = row.iter().map(|v| v * v).sum::<f64>().sqrt();
            row.iter_mut().for_each(|v| *v /= norm);
        }
    }
    m
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_frozen_and_normal() {
        let mut random = SeededGaussian::new(1);
        // First output of SplitMix64 for seed 1, as published with the generator.
        assert_eq!(SplitMix64::new(1).next_u64(), 0x910A_2DEC_8902_5CC1);
        let n = 100_000;
        let (mut sum, mut squares, mut fourth) = (0.0, 0.0, 0.0);
        for _ in 0..n {
            let v = random.normal();
            sum += v;
            squares += v * v;
            fourth += v.powi(4);
        }
        let n = n as f64;
        assert!(
            (sum / n).abs() < 0.015 && (squares / n - 1.0).abs() < 0.02 && (fourth / n - 3.0).abs() < 0.15
        );
    }

    #[test]
    fn orthogonal_matrices_are_orthogonal_and_differ_by_seed() {
        for d in [16, 48, 128] {
            let m = orthogonal_matrix(d, 7);
            for a in 0..d {
                for b in a..d {
                    let dot: f64 = (0..d).map(|k| m[a * d + k] * m[b * d + k]).sum();
                    assert!((dot - f64::from(a == b)).abs() < 1e-12);
                }
            }
            assert_ne!(m, orthogonal_matrix(d, 8));
        }
    }
}
