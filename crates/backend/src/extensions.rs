//! What calibration and benchmarks ask of a device beyond serving.

use crate::{
    Backend, ExpertFormat, ExpertId, ExpertsShape, Fp8Matrix, HostMatrix, HostValues, Result, Scoring,
    WeightFormat,
};
use half::bf16;
use oscar_codec::FullPageId;
use oscar_codec::random::SplitMix64;
use std::ops::Range;

/// Looks at one layer's heads in the middle of [`Step::attend`](crate::Step::attend).
pub trait Tap {
    /// Rows of `[queries | keys | values]` after QK-norm and RoPE, before any rotation.
    fn heads(&mut self, layer: usize, qkv: &mut dyn TappedRows) -> Result<()>;
    /// Attention outputs of all query heads, in the values' basis.
    fn attended(&mut self, layer: usize, attended: &mut dyn TappedRows) -> Result<()>;
    /// Where the attention weights of this step are added up, if they are wanted.
    fn scoring(&mut self) -> Option<&mut Scoring> {
        None
    }
}

/// Rows on the device that a [`Tap`] looks at.
pub trait TappedRows {
    /// Appends all rows to `out`.
    fn read(&mut self, out: &mut Vec<f32>) -> Result<()>;
    /// Adds `Σ_r w_r · xᵀx` to `gram` (`width × width`, row-major, symmetric). `x` is columns
    /// `first..first + width` of row `r`; without weights every row counts once.
    fn accumulate_gram(
        &mut self,
        first: usize,
        width: usize,
        weights: Option<&[f32]>,
        gram: &mut [f64],
    ) -> Result<()>;
}

/// One layer's KV head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheHead {
    pub layer: usize,
    pub kv_head: usize,
}

/// How far one row of logits is from another.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Divergence {
    /// KL divergence of the second row's distribution from the first's, in nats.
    pub kl: f64,
    /// Whether both rows have the same most likely token.
    pub agrees: bool,
}

impl Divergence {
    /// The definition, in f64. With `x = a − b` and its mean `m` under `softmax(a)`, the divergence
    /// is `ln(1 + Σ p·g(x − m))` for `g(y) = e^(−y) − 1 + y`: no term is negative, so nothing
    /// cancels, and f32 is enough for kernels.
    pub fn between(exact: &[f32], other: &[f32]) -> Self {
        let largest = exact.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |a: f32| f64::from(a - largest).exp();
        let difference = |(&a, &b): (&f32, &f32)| f64::from(a) - f64::from(b);
        let total: f64 = exact.iter().map(|&a| weight(a)).sum();
        let pairs = || exact.iter().zip(other);
        let mean = pairs().map(|(a, b)| weight(*a) * difference((a, b))).sum::<f64>() / total;
        let excess = |y: f64| if y.abs() < 1e-3 { y * y * (0.5 - y / 6.0) } else { (-y).exp() - 1.0 + y };
        let sum = pairs().map(|(a, b)| weight(*a) * excess(difference((a, b)) - mean)).sum::<f64>();
        Self { kl: (sum / total).max(0.0).ln_1p(), agrees: crate::argmax(exact) == crate::argmax(other) }
    }
}

/// A device on which calibration replaces history by codes and compares predictions.
pub trait Calibrates: Backend {
    /// Copies one layer's full pages of the blocks that `positions` touch, from one page table to
    /// another. The rows at `positions` become those that their codes dequantize to: `widths` has
    /// the bits of keys and values for each head, 0 for exact rows. Codes are rounded as those of
    /// the cache, whose layout must have a coded table. The pages of `to` must not be those of
    /// `from`.
    fn recode(
        &self,
        layer: usize,
        positions: Range<usize>,
        from: &[Option<FullPageId>],
        to: &[Option<FullPageId>],
        widths: &[(u32, u32)],
        pool: &mut Self::Pool,
    ) -> Result<()>;
    /// Waits for the device and appends the divergence of each row of `other` from a row of
    /// `exact`: row `i` is compared with row `i % exact rows`. `step` is the running step.
    fn divergences(
        &self,
        step: &mut Self::Step<'_>,
        exact: &Self::Rows,
        other: &Self::Rows,
        out: &mut Vec<Divergence>,
    ) -> Result<()>;
}

/// A device whose rows the host may change in the middle of a step.
pub trait HostRows: Backend {
    /// Waits for the device and appends all rows of `x` to `out`.
    fn read_rows(step: &mut Self::Step<'_>, x: &Self::Rows, out: &mut Vec<f32>) -> Result<()>;
    /// `x ← values`, all of its rows. `values` may change once this has returned.
    fn write_rows(step: &mut Self::Step<'_>, values: &[f32], x: &mut Self::Rows) -> Result<()>;
}

/// A device that benchmarks fill with random data.
pub trait Benchmarks: Backend {
    /// A matrix of random weights: benchmarks need a model's shape, not its contents.
    fn random_matrix(
        &self,
        format: WeightFormat,
        outputs: usize,
        inputs: usize,
        seed: u64,
    ) -> Result<Self::Matrix> {
        let amplitude = random_amplitude(inputs);
        let mut random = SplitMix64::new(seed);
        let values: Vec<bf16> =
            (0..outputs * inputs).map(|_| bf16::from_f32(random.symmetric() * amplitude)).collect();
        match format {
            WeightFormat::Bf16 => {
                self.matrix(HostMatrix { outputs, inputs, values: HostValues::Bf16(&values), bias: None })
            }
            WeightFormat::Fp8 => {
                let values: Vec<f32> = values.iter().map(|v| v.to_f32()).collect();
                self.matrix(Fp8Matrix::quantize(&values, outputs, inputs).host(outputs, inputs))
            }
        }
    }
    /// Experts of random weights.
    fn random_experts(&self, shape: &ExpertsShape<'_>, ids: &[ExpertId], seed: u64) -> Result<Self::Experts> {
        let mut experts = self.experts(shape)?;
        let mut random = SplitMix64::new(seed);
        let mut matrix = |outputs: usize, inputs: usize| -> Vec<f32> {
            let amplitude = random_amplitude(inputs);
            (0..outputs * inputs).map(|_| random.symmetric() * amplitude).collect()
        };
        for &id in ids {
            let width = shape.width_of(id);
            let sizes = [[width, shape.hidden], [width, shape.hidden], [shape.hidden, width]];
            let values = sizes.map(|[outputs, inputs]| matrix(outputs, inputs));
            match shape.format {
                // Random weights need not be codes.
                ExpertFormat::Bf16 | ExpertFormat::Mxfp4 => {
                    let part = |i: usize| {
                        let [outputs, inputs] = sizes[i];
                        HostMatrix { outputs, inputs, values: HostValues::F32(&values[i]), bias: None }
                    };
                    self.load_expert(&mut experts, id, [part(0), part(1), part(2)])?;
                }
                ExpertFormat::Fp8Blocks | ExpertFormat::Fp8Channels => {
                    let coded = [0, 1, 2].map(|i| Fp8Matrix::quantize(&values[i], sizes[i][0], sizes[i][1]));
                    let part = |i: usize| coded[i].host(sizes[i][0], sizes[i][1]);
                    self.load_expert(&mut experts, id, [part(0), part(1), part(2)])?;
                }
            }
        }
        Ok(experts)
    }
    /// Puts random rows and codes into the pages below these ids that were never used. Returns
    /// `false` if the device cannot.
    fn randomize(&self, pool: &mut Self::Pool, full: usize, coded: usize) -> Result<bool>;
    /// Times the parts of every step from now on, or stops. Returns the times since timing began, if
    /// it was on. Steps are slower while they are timed.
    fn time_steps(&self, on: bool) -> Result<Option<StepTimes>>;
}

/// Seconds of steps, by part.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTimes {
    /// Matrix products. On a CPU with the norms before them and the gates behind them.
    pub products: f64,
    /// Attention, with the expansion of quantized pages where a device does that first.
    pub attention: f64,
    /// QK-norm, RoPE, rotation, storing and quantization of keys and values.
    pub coding: f64,
    /// Everything else. On a GPU with the time in which it waits for the host.
    pub rest: f64,
}

impl StepTimes {
    pub fn total(&self) -> f64 {
        self.products + self.attention + self.coding + self.rest
    }
}

/// Amplitude of uniform random weights whose outputs have about the variance of their inputs.
pub fn random_amplitude(inputs: usize) -> f32 {
    (3.0 / inputs.max(1) as f32).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_of_known_distributions() {
        let same = Divergence::between(&[0.0, 0.0, -60.0], &[7.0, 7.0, -53.0]);
        assert!(same.kl < 1e-12 && same.agrees, "a constant changes nothing: {same:?}");
        let expected = -0.5 * (0.8f64.ln() + 0.2f64.ln()) - std::f64::consts::LN_2;
        let found = Divergence::between(&[0.0, 0.0, -60.0], &[0.2f32.ln(), 0.8f32.ln(), -60.0]);
        assert!((found.kl - expected).abs() < 1e-6 && !found.agrees, "{found:?}");
        // Both sides of the series, beside the definition by logarithms.
        for shift in [1e-5f32, 1e-3, 0.1, 3.0] {
            let a: Vec<f32> = (0..500).map(|i| (i * 7919 % 503) as f32 / 50.0).collect();
            let b: Vec<f32> = a.iter().enumerate().map(|(i, &x)| x + shift * (i % 13) as f32).collect();
            let sum = |x: &[f32]| x.iter().map(|&v| f64::from(v).exp()).sum::<f64>();
            let (za, zb) = (sum(&a), sum(&b));
            let p = |&x: &f32| f64::from(x).exp() / za;
            let direct: f64 =
                a.iter().zip(&b).map(|(x, &y)| p(x) * (p(x) / (f64::from(y).exp() / zb)).ln()).sum();
            let found = Divergence::between(&a, &b).kl;
            assert!((found - direct).abs() < 1e-10 + 1e-6 * direct, "{shift}: {found} and {direct}");
        }
    }
}
