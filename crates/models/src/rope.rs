//! Rotary position embedding: frequencies, the scalings that stretch them, and the cos/sin table.
//!
//! Follows Hugging Face transformers (`modeling_rope_utils.py`): RoPE without scaling (arXiv
//! 2104.09864), linear interpolation, Llama 3's wavelength bands, and YaRN (arXiv 2309.00071).
//! Frequencies are evaluated in f64 and rounded once; angles are `f32(position) * f32(frequency)`,
//! as in transformers.
//!
//! Invariant: no scaling here depends on the length of a request, so a cached key stays valid for
//! ever. Convention: half-split ("NeoX"): element `i` is paired with element `i + head_dim / 2`.

use std::f64::consts::PI;

/// How frequencies are stretched for contexts longer than those of training.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    None,
    /// Every frequency divided by `factor`.
    Linear {
        factor: f64,
    },
    /// Long wavelengths divided by `factor`, short ones kept, a linear blend between.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position_embeddings: usize,
    },
    /// Like `Llama3` with the blend linear in the dimension index, plus a factor on cos and sin
    /// that sharpens attention.
    Yarn {
        factor: f64,
        original_max_position_embeddings: usize,
        /// Dimensions that turn more often than this over the original context are kept.
        beta_fast: f64,
        /// Dimensions that turn less often than this are fully interpolated.
        beta_slow: f64,
        /// Overrides the factor derived from `factor` and the two mscales.
        attention_factor: Option<f64>,
        mscale: Option<f64>,
        mscale_all_dim: Option<f64>,
        /// Round the blend's ends outward to whole dimensions.
        truncate: bool,
    },
}

/// Base and scaling: everything positions depend on.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    pub theta: f64,
    pub scaling: RopeScaling,
}

impl RopeConfig {
    /// RoPE with this base and no scaling.
    pub fn plain(theta: f64) -> Self {
        Self { theta, scaling: RopeScaling::None }
    }

    /// The `head_dim / 2` angular frequencies, in radians a token.
    pub fn inv_freq(&self, head_dim: usize) -> Vec<f32> {
        let plain = |i: usize| self.theta.powf(-((2 * i) as f64) / head_dim as f64);
        let pairs = 0..head_dim / 2;
        match &self.scaling {
            RopeScaling::None => pairs.map(|i| plain(i) as f32).collect(),
            RopeScaling::Linear { factor } => pairs.map(|i| (plain(i) / factor) as f32).collect(),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings,
            } => {
                let original = *original_max_position_embeddings as f64;
                pairs
                    .map(|i| {
                        let frequency = plain(i);
                        let turns = original * frequency / (2.0 * PI);
                        // 1 keeps the frequency, 0 divides it by the factor.
                        let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                        (frequency * (keep + (1.0 - keep) / factor)) as f32
                    })
                    .collect()
            }
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings,
                beta_fast,
                beta_slow,
                truncate,
                ..
            } => {
                let original = *original_max_position_embeddings as f64;
                let (low, high) =
                    yarn_blend_range(self.theta, head_dim, original, *beta_fast, *beta_slow, *truncate);
                pairs
                    .map(|i| {
                        let interpolate = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                        let frequency = plain(i);
                        (frequency / factor * interpolate + frequency * (1.0 - interpolate)) as f32
                    })
                    .collect()
            }
        }
    }

    /// The factor both cos and sin are multiplied by; 1 except for YaRN.
    pub fn attention_scale(&self) -> f32 {
        let RopeScaling::Yarn { factor, attention_factor, mscale, mscale_all_dim, .. } = &self.scaling else {
            return 1.0;
        };
        let sharpen = |weight: f64| yarn_sharpening(*factor, weight);
        // A zero mscale means "not set": checkpoints of the DeepSeek lineage write it so.
        let set = |m: &Option<f64>| m.filter(|v| *v != 0.0);
        let scale = match (attention_factor, set(mscale), set(mscale_all_dim)) {
            (Some(given), _, _) => *given,
            (None, Some(m), Some(all)) => sharpen(m) / sharpen(all),
            (None, _, _) => sharpen(1.0),
        };
        scale as f32
    }

    /// The factor of all scores in latent attention, whose keys RoPE turns in part only; 1 except for
    /// YaRN.
    pub fn score_factor(&self) -> f64 {
        match &self.scaling {
            RopeScaling::Yarn { factor, mscale_all_dim: Some(weight), .. } if *weight != 0.0 => {
                yarn_sharpening(*factor, *weight).powi(2)
            }
            _ => 1.0,
        }
    }
}

/// The factor by which YaRN sharpens attention.
fn yarn_sharpening(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
}

/// The dimension indices between which YaRN blends from kept to interpolated.
fn yarn_blend_range(
    theta: f64,
    head_dim: usize,
    original: f64,
    beta_fast: f64,
    beta_slow: f64,
    truncate: bool,
) -> (f64, f64) {
    // The (real-valued) dimension that makes this many turns over the original context.
    let dimension = |turns: f64| head_dim as f64 * (original / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (dimension(beta_fast), dimension(beta_slow));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    let (low, high) = (low.max(0.0), high.min((head_dim - 1) as f64));
    // Transformers widens an empty range by the same amount to avoid dividing by zero.
    if low == high { (low, high + 0.001) } else { (low, high) }
}

/// The machine's memory, where the system tells.
fn memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? << 10)
}

/// cos and sin of every (position, frequency), attention scale included.
///
/// A row has `head_dim / 2` entries: the second half of the head uses the same angles.
#[derive(Debug, Clone)]
pub struct RopeTable {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// Fills the table for positions `0..max_positions`: `8 * max_positions * head_dim / 2` bytes.
    pub fn new(config: &RopeConfig, head_dim: usize, max_positions: usize) -> Self {
        Self::fill(config, head_dim, max_positions, (Vec::new(), Vec::new()))
    }

    /// As [`Self::new`], for sizes that come from a file: if the machine does not have the memory,
    /// the bytes that would be needed.
    pub fn try_new(config: &RopeConfig, head_dim: usize, max_positions: usize) -> Result<Self, u64> {
        let entries = max_positions.saturating_mul(head_dim / 2);
        let bytes = (entries as u64).saturating_mul(8);
        // A system that overcommits would grant it and end the process when it is filled.
        if memory_bytes().is_some_and(|memory| bytes > memory) {
            return Err(bytes);
        }
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for list in [&mut cos, &mut sin] {
            list.try_reserve_exact(entries).map_err(|_| bytes)?;
        }
        Ok(Self::fill(config, head_dim, max_positions, (cos, sin)))
    }

    fn fill(config: &RopeConfig, head_dim: usize, max_positions: usize, lists: (Vec<f32>, Vec<f32>)) -> Self {
        let frequencies = config.inv_freq(head_dim);
        let scale = config.attention_scale();
        let half = frequencies.len();
        let (mut cos, mut sin) = lists;
        cos.reserve(max_positions * half);
        sin.reserve(max_positions * half);
        for position in 0..max_positions {
            for frequency in &frequencies {
                let angle = position as f32 * frequency;
                cos.push(angle.cos() * scale);
                sin.push(angle.sin() * scale);
            }
        }
        Self { half, cos, sin }
    }

    /// Positions the table covers.
    pub fn positions(&self) -> usize {
        self.cos.len().checked_div(self.half).unwrap_or(0)
    }

    /// Entries in a row: half the head dimension.
    pub fn half_dim(&self) -> usize {
        self.half
    }

    /// cos of one position. Panics if the position is outside the table.
    pub fn cos(&self, position: usize) -> &[f32] {
        &self.cos[position * self.half..][..self.half]
    }

    /// sin of one position. Panics if the position is outside the table.
    pub fn sin(&self, position: usize) -> &[f32] {
        &self.sin[position * self.half..][..self.half]
    }

    /// All cos rows, position-major, for upload to a device.
    pub fn cos_rows(&self) -> &[f32] {
        &self.cos
    }

    /// All sin rows, position-major.
    pub fn sin_rows(&self) -> &[f32] {
        &self.sin
    }

    /// Rotates one head in place. This is the definition that kernels must reproduce.
    pub fn rotate(&self, head: &mut [f32], position: usize) {
        let (first, second) = head.split_at_mut(self.half);
        let (cos, sin) = (self.cos(position), self.sin(position));
        for i in 0..self.half {
            let (a, b) = (first[i], second[i]);
            first[i] = a * cos[i] - b * sin[i];
            second[i] = b * cos[i] + a * sin[i];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn assert_frequencies(config: &RopeConfig, head_dim: usize, expected: &[(usize, f64)]) {
        let computed = config.inv_freq(head_dim);
        assert_eq!(computed.len(), head_dim / 2);
        for (i, value) in expected {
            // Half a unit in the last place of f32 is 6e-8.
            let error = (f64::from(computed[*i]) / value - 1.0).abs();
            assert!(error < 1e-7, "frequency {i}: {} against {value}", computed[*i]);
        }
    }

    fn yarn(factor: f64, original: usize, truncate: bool) -> RopeScaling {
        RopeScaling::Yarn {
            factor,
            original_max_position_embeddings: original,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            truncate,
        }
    }

    // The expected numbers of the next three tests come from a separate Python script that writes
    // each published formula with `math` in double precision (Llama 3's as three wavelength
    // branches, YaRN's as correction range and ramp) and rounds the result to single precision with
    // `struct.pack('f', x)`.

    #[test]
    fn llama3_matches_the_python_reference() {
        let config = RopeConfig {
            theta: 500_000.0,
            scaling: RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8192,
            },
        };
        // 28 is kept whole, 29 to 34 are blended, 35 and up divided by 8.
        assert_frequencies(
            &config,
            128,
            &[
                (0, 1.0),
                (1, 8.146_172_166e-1),
                (28, 3.211_446_106e-3),
                (29, 2.166_570_863e-3),
                (30, 1.371_893_566e-3),
                (32, 5.248_461_384e-4),
                (34, 1.785_078_057e-4),
                (35, 9.556_212_171e-5),
                (36, 7.784_655_463e-5),
                (63, 3.068_925_878e-7),
            ],
        );
        assert_eq!(config.attention_scale(), 1.0);
    }

    #[test]
    fn yarn_matches_the_python_reference() {
        // Qwen's published long-context setting; the blend runs from dimension 23 to 40.
        let config = RopeConfig { theta: 1e6, scaling: yarn(4.0, 32768, true) };
        assert_frequencies(
            &config,
            128,
            &[
                (0, 1.0),
                (1, 8.058_421_612e-1),
                (22, 8.659_643_121e-3),
                (23, 6.978_305_988e-3),
                (24, 5.375_321_489e-3),
                (30, 1.064_360_957e-3),
                (38, 9.262_302_046e-5),
                (39, 6.490_394_298e-5),
                (40, 4.445_698_505e-5),
                (63, 3.102_344_408e-7),
            ],
        );
        assert!((config.attention_scale() - 1.138_629_4).abs() < 1e-7);
    }

    #[test]
    fn yarn_without_truncation_matches_the_python_reference() {
        // The blend runs from 8.0928 to 17.3980.
        let config = RopeConfig { theta: 150_000.0, scaling: yarn(32.0, 4096, false) };
        assert_frequencies(
            &config,
            64,
            &[
                (0, 1.0),
                (8, 5.081_327_632e-2),
                (9, 3.170_569_614e-2),
                (12, 6.794_959_307e-3),
                (16, 4.564_839_182e-4),
                (17, 1.293_186_942e-4),
                (18, 3.830_881_178e-5),
                (31, 3.023_511_397e-7),
            ],
        );
        assert!((config.attention_scale() - 1.346_573_6).abs() < 2e-7);
    }

    #[test]
    fn yarn_attention_scale_obeys_its_overrides() {
        let with = |attention: Option<f64>, m: Option<f64>, all: Option<f64>| {
            let mut scaling = yarn(40.0, 4096, true);
            if let RopeScaling::Yarn { attention_factor, mscale, mscale_all_dim, .. } = &mut scaling {
                (*attention_factor, *mscale, *mscale_all_dim) = (attention, m, all);
            }
            RopeConfig { theta: 1e4, scaling }.attention_scale()
        };
        assert_eq!(with(Some(1.25), Some(0.7), Some(1.0)), 1.25);
        assert!((with(None, Some(0.7), Some(1.0)) - 0.919_156).abs() < 1e-6);
        assert_eq!(with(None, Some(1.0), Some(0.0)), with(None, None, None));
    }

    #[test]
    fn linear_divides_every_frequency() {
        let plain = RopeConfig::plain(1e4).inv_freq(64);
        let scaled = RopeConfig { theta: 1e4, scaling: RopeScaling::Linear { factor: 4.0 } }.inv_freq(64);
        assert!(plain.iter().zip(&scaled).all(|(p, s)| *s == p / 4.0));
    }

    #[test]
    fn table_rows_use_single_precision_angles() {
        // Python: w = f32(1e6 ** (-2/128)), a = f32(30000 * w) = 24175.265625, then cos(a), sin(a).
        let table = RopeTable::new(&RopeConfig::plain(1e6), 128, 30_001);
        assert_eq!((table.positions(), table.half_dim()), (30_001, 64));
        assert!((table.cos(30_000)[1] + 0.758_260_4).abs() < 1e-6);
        assert!((table.sin(30_000)[1] + 0.651_951_8).abs() < 1e-6);
        assert_eq!((table.cos(0)[5], table.sin(0)[5]), (1.0, 0.0));
    }

    proptest! {
        /// Scores depend on the distance of two positions only: the defining property of RoPE.
        #[test]
        fn rotation_sees_only_distances(
            query in prop::collection::vec(-1f32..1.0, 16),
            key in prop::collection::vec(-1f32..1.0, 16),
            distance in 0usize..40,
            shift in 0usize..60,
        ) {
            let table = RopeTable::new(&RopeConfig::plain(1e4), 16, 100);
            let score = |q_at: usize, k_at: usize| {
                let (mut q, mut k) = (query.clone(), key.clone());
                table.rotate(&mut q, q_at);
                table.rotate(&mut k, k_at);
                q.iter().zip(&k).map(|(a, b)| a * b).sum::<f32>()
            };
            prop_assert!((score(distance, 0) - score(distance + shift, shift)).abs() < 1e-4);
        }
    }

    #[test]
    fn a_table_larger_than_the_machine_is_refused() {
        let config = RopeConfig::plain(1e4);
        assert_eq!(RopeTable::try_new(&config, 16, 100).unwrap().cos_rows().len(), 800);
        for positions in [1 << 50, usize::MAX] {
            assert!(RopeTable::try_new(&config, 128, positions).is_err());
        }
    }
}
