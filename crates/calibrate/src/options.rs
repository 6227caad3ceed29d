//! Options of a calibration, and its cost.

use crate::error::CalibrateError;
use crate::symmetric::Symmetric;
use oscar_codec::{Composition, PAGE_TOKENS};
use oscar_models::DecoderConfig;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// An option with a fixed list of names: `FromStr`, `Display` and serde all use them.
macro_rules! named {
    ($(#[$doc:meta])* $type:ident, $what:literal { $($(#[$variant_doc:meta])* $variant:ident = $name:literal),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum $type {
            $($(#[$variant_doc])* #[serde(rename = $name)] $variant),*
        }

        impl $type {
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FromStr for $type {
            type Err = CalibrateError;

            fn from_str(s: &str) -> Result<Self, CalibrateError> {
                Self::ALL.iter().copied().find(|v| v.name() == s).ok_or_else(|| CalibrateError::Option {
                    option: $what,
                    problem: format!("'{s}' is not one of {}", [$($name),*].join(", ")),
                })
            }
        }
    };
}

named!(
    /// The scope of one rotation.
    Granularity, "granularity" {
        /// One for each KV head.
        Head = "head",
        /// One for each layer, from the mean of its heads' statistics: the published recipe.
        Layer = "layer",
    }
);
named!(
    /// Which second moment the value rotation diagonalizes.
    Statistic, "statistic" {
        /// Attention outputs, `(SV)ᵀ(SV)`: the paper's formula, one pass.
        Paper = "paper",
        /// `Vᵀ diag(w) V` with `w_t = k_t C k_tᵀ`: the statistic of the official code, two passes.
        Coded = "coded",
        /// `VᵀV`.
        Plain = "plain",
    }
);
named!(
    /// How codes of chosen widths are rounded.
    CodeRounding, "rounding" {
        /// To the nearest level.
        Nearest = "nearest",
        /// Query-aware rounding: errors are fed back through the queries' second moment, scales are
        /// unbiased (`oscar_codec::rounding`).
        Shaped = "shaped",
    }
);
named!(
    /// Where clip ratios come from.
    ClipPolicy, "clip" {
        /// The official constants.
        Official = "official",
        /// Fitted for each layer and head, see [`crate::clip_fit`].
        Fit = "fit",
    }
);

#[derive(Clone, Debug, PartialEq)]
pub struct CalibrationOptions {
    /// Largest number of tokens to run.
    pub tokens: usize,
    /// Longer sequences are cut. Lowered if the cache of one sequence would not fit
    /// [`Self::memory`].
    pub sequence_len: usize,
    pub granularity: Granularity,
    pub statistic: Statistic,
    pub composition: Composition,
    /// Subtract the mean key of each head before the rotation.
    pub centre_keys: bool,
    pub clip: ClipPolicy,
    /// Widths of key and value codes that clip ratios are fitted for and the report measures.
    pub bits: (u32, u32),
    /// Rows of each head kept for fitting and measuring. Lowered if they would not fit
    /// [`Self::memory`].
    pub sample_rows: usize,
    /// Tokens of one forward pass; `None` chooses by [`Self::memory`]. The result does not depend
    /// on it.
    pub chunk: Option<usize>,
    /// Bytes to use beyond the model, as far as its shape allows.
    pub memory: usize,
    /// Chooses the sample; the same seed and text give the same file.
    pub seed: u64,
    /// Threads for the matrices; 0 means all.
    pub threads: usize,
}

impl Default for CalibrationOptions {
    fn default() -> Self {
        Self {
            tokens: 16384,
            sequence_len: 2048,
            granularity: Granularity::Head,
            statistic: Statistic::Paper,
            composition: Composition::RHPbr,
            centre_keys: true,
            clip: ClipPolicy::Official,
            bits: (2, 2),
            sample_rows: 256,
            chunk: None,
            memory: 176 << 20,
            seed: 0,
            threads: 0,
        }
    }
}

/// With fewer rows the statistics of a head are unreliable.
const LEAST_SAMPLE_ROWS: usize = 48;
/// Shorter sequences would not show long-range attention.
const LEAST_SEQUENCE: usize = 192;
const LEAST_CHUNK: usize = 32;

/// The options resolved for one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    pub sequence_len: usize,
    /// Tokens of one forward pass.
    pub chunk: usize,
    pub sample_rows: usize,
    /// Bytes beyond the model: statistics, sample, activations and the cache of one sequence.
    pub bytes: usize,
}

impl CalibrationOptions {
    /// The published recipe: one rotation for each layer, the official value statistic, no
    /// centring.
    pub fn official() -> Self {
        Self {
            granularity: Granularity::Layer,
            statistic: Statistic::Coded,
            composition: Composition::RHPbr,
            centre_keys: false,
            clip: ClipPolicy::Official,
            ..Self::default()
        }
    }

    pub fn check(&self) -> Result<(), CalibrateError> {
        if self.tokens == 0 {
            return Err(CalibrateError::option("tokens", "is 0; give at least 1024"));
        }
        if self.sequence_len == 0 {
            return Err(CalibrateError::option("sequence length", "is 0; give at least 64"));
        }
        for bits in [self.bits.0, self.bits.1] {
            if !(1..=4).contains(&bits) {
                return Err(CalibrateError::option("bits", format!("{bits} is not a width of 1 to 4")));
            }
        }
        Ok(())
    }

    /// Sizes that stay within [`Self::memory`]. Statistics cannot shrink. The rest goes to
    /// activations, the sample and the cache of one sequence, each at least at a useful size.
    pub fn plan(&self, config: &DecoderConfig) -> MemoryPlan {
        let (d, heads) = (config.head_dim, config.cache_layers() * config.kv_heads);
        let statistics = heads * (2 * Symmetric::bytes(d) + d * size_of::<f64>());
        // Activations, with one copy on the host and the backend's own scratch.
        let activations = (3 * config.hidden_size
            + 5 * config.query_width()
            + 4 * config.kv_width()
            + 4 * config.feed_forward_width())
            * size_of::<f32>();
        // Chunks of a fifth of the memory lose little speed and leave room for long sequences.
        let automatic = || {
            let fits = |chunk: &usize| chunk * activations <= self.memory / 5;
            [512, 256, 128, 64].into_iter().find(fits).unwrap_or(LEAST_CHUNK)
        };
        let chunk = self.chunk.unwrap_or_else(automatic).max(1);
        let left = self.memory.saturating_sub(statistics + chunk * activations);
        let row = heads * 2 * d * size_of::<u16>();
        let sample_rows = (left / 3 / row).clamp(LEAST_SAMPLE_ROWS, self.sample_rows.max(LEAST_SAMPLE_ROWS));
        // A token's keys and values are the same bytes as a row of the sample.
        let fitting = left.saturating_sub(sample_rows * row) / row / PAGE_TOKENS * PAGE_TOKENS;
        let sequence_len = self.sequence_len.min(fitting.max(LEAST_SEQUENCE));
        let cache = sequence_len.next_multiple_of(PAGE_TOKENS) * row;
        let chunk = chunk.min(sequence_len);
        let bytes = statistics + chunk * activations + sample_rows * row + cache;
        MemoryPlan { sequence_len, chunk, sample_rows, bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_models::Family;
    use oscar_models::tiny::tiny_config;

    #[test]
    fn names_round_trip_and_unknown_ones_are_listed() {
        for g in Granularity::ALL {
            assert_eq!(g.name().parse::<Granularity>().unwrap(), *g);
        }
        for s in Statistic::ALL {
            assert_eq!(s.name().parse::<Statistic>().unwrap(), *s);
        }
        let error = "softmax".parse::<Statistic>().unwrap_err().to_string();
        assert!(error.contains("'softmax'") && error.contains("paper, coded, plain"), "{error}");
    }

    #[test]
    fn real_models_stay_below_200_megabytes_whatever_the_budget() {
        // hidden, intermediate, layers, query heads, KV heads: Qwen3 0.6B, 4B, 8B, 32B and Llama 3
        // 70B.
        for (hidden, intermediate, layers, queries, kv) in [
            (1024, 3072, 28, 16, 8),
            (2560, 9728, 36, 32, 8),
            (4096, 12288, 36, 32, 8),
            (5120, 25600, 64, 64, 8),
            (8192, 28672, 80, 64, 8),
        ] {
            let mut config = tiny_config(Family::Qwen3);
            config.hidden_size = hidden;
            config.intermediate_size = intermediate;
            config.layers = layers;
            config.query_heads = queries;
            config.kv_heads = kv;
            config.head_dim = 128;
            let options = CalibrationOptions { tokens: usize::MAX, ..CalibrationOptions::default() };
            let plan = options.plan(&config);
            let megabytes = plan.bytes / 1_000_000;
            println!("{layers} layers: {plan:?}");
            assert!(megabytes < 200, "{layers} layers: {megabytes} MB, {plan:?}");
            assert!(plan.sequence_len >= LEAST_SEQUENCE && plan.sample_rows >= LEAST_SAMPLE_ROWS);
        }
    }

    #[test]
    fn small_models_get_what_was_asked() {
        let options = CalibrationOptions::default();
        let plan = options.plan(&tiny_config(Family::Qwen3));
        assert_eq!((plan.sequence_len, plan.chunk, plan.sample_rows), (2048, 512, 256));
    }

    #[test]
    fn useless_options_are_refused() {
        for options in [
            CalibrationOptions { tokens: 0, ..Default::default() },
            CalibrationOptions { sequence_len: 0, ..Default::default() },
            CalibrationOptions { bits: (2, 5), ..Default::default() },
        ] {
            assert!(matches!(options.check(), Err(CalibrateError::Option { .. })));
        }
    }
}
