//! What calibration and benchmarks ask of a device beyond serving.

use crate::{
    Backend, ExpertFormat, ExpertId, ExpertsShape, Fp8Matrix, HostMatrix, HostValues, Result, WeightFormat,
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

/// A device whose full pages calibration can read and replace between steps.
pub trait Calibrates: Backend {
    /// Reads the keys and values of one head at `positions` from full pages, row by row, as f32.
    fn read_full_rows(
        &self,
        head: CacheHead,
        full: &[Option<FullPageId>],
        positions: Range<usize>,
        pool: &Self::Pool,
        keys: &mut Vec<f32>,
        values: &mut Vec<f32>,
    ) -> Result<()>;
    /// Replaces keys and values of one head from position `first` on, in full pages.
    fn write_full_rows(
        &self,
        head: CacheHead,
        full: &[Option<FullPageId>],
        first: usize,
        keys: &[f32],
        values: &[f32],
        pool: &mut Self::Pool,
    ) -> Result<()>;
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
                ExpertFormat::Bf16 => {
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
