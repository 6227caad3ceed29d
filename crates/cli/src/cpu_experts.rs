//! `--cpu-experts`: how many layers have their experts on the CPU.

use crate::device::AnyBackend;
use crate::options::OpenModel;
use crate::progress;
use anyhow::{Result, bail};
use oscar_backend::{Backend, WeightFormat};
use oscar_models::{DecoderConfig, Holding};
use oscar_runner::{RunnerOptions, longest_step};
use std::fmt;
use std::str::FromStr;

/// Layers whose experts the CPU computes: the last ones that have experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuExperts {
    /// As few as the GPU's memory allows.
    Auto,
    Layers(usize),
    All,
}

impl CpuExperts {
    /// The number of layers, unless it depends on memory.
    pub fn layers(self) -> Option<usize> {
        match self {
            Self::Auto => None,
            Self::Layers(layers) => Some(layers),
            Self::All => Some(usize::MAX),
        }
    }

    /// Refuses more layers with experts than the model has.
    pub fn check(self, config: &DecoderConfig) -> Result<()> {
        match (self, config.mixtures().count()) {
            (_, 0) => bail!("--cpu-experts: the model has no experts; leave it out"),
            (Self::Layers(asked), layers) if asked > layers => bail!(
                "--cpu-experts {asked}: the model has {layers} layers with experts; give at most {layers}, or all"
            ),
            _ => Ok(()),
        }
    }
}

impl FromStr for CpuExperts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "all" => Ok(Self::All),
            number => number
                .parse()
                .map(Self::Layers)
                .map_err(|_| format!("'{text}' is neither auto, nor all, nor a number of layers")),
        }
    }
}

impl fmt::Display for CpuExperts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Layers(layers) => layers.fmt(f),
            Self::All => f.write_str("all"),
        }
    }
}

/// Experts in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostExperts {
    pub layers: usize,
    pub bytes: usize,
}

/// Bytes of all weights, and of the experts of each layer that has some.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightBytes {
    pub total: usize,
    pub layers: Vec<usize>,
    /// Experts of each layer where the host keeps them: it has codes that a GPU expands.
    pub on_host: Vec<usize>,
}

impl WeightBytes {
    pub fn of(model: &OpenModel, rotated: bool, holding: Holding) -> Self {
        let (weights, config) = (&model.weights, &model.config);
        let layers = |holding: Holding| {
            config.mixtures().map(|layer| weights.expert_bytes(config, layer, holding)).collect()
        };
        Self {
            total: weights.held_bytes(config, rotated, holding) as usize,
            layers: layers(holding),
            on_host: layers(Holding { mxfp4_experts: holding.fp8_experts, ..holding }),
        }
    }

    /// Those of random weights. Matrices other than experts are counted as BF16.
    pub fn of_shape(config: &DecoderConfig, weights: WeightFormat) -> Self {
        let layer = |format: WeightFormat| {
            let moe = config.moe.as_ref();
            let elements =
                moe.map_or(0, |moe| 3 * config.hidden_size * (moe.experts * moe.width + moe.shared_width));
            match format {
                WeightFormat::Bf16 => 2 * elements,
                // A scale for 128 × 128 weights.
                WeightFormat::Fp8 => elements + elements / 4096,
            }
        };
        let count = config.mixtures().count();
        let total = config.bf16_bytes() - count * (layer(WeightFormat::Bf16) - layer(weights));
        let layers = vec![layer(weights); count];
        Self { total, on_host: layers.clone(), layers }
    }

    /// The experts of the last `layers` layers.
    pub fn last(&self, layers: usize) -> HostExperts {
        let layers = layers.min(self.layers.len());
        HostExperts { layers, bytes: self.on_host.iter().rev().take(layers).sum() }
    }

    /// Bytes that the device holds if these leave it.
    pub fn without(&self, experts: HostExperts) -> usize {
        self.total.saturating_sub(self.layers.iter().rev().take(experts.layers).sum())
    }

    /// The fewest of the last layers whose experts must leave the device, so that `beside` bytes fit
    /// beside the other weights; all of them if even that is not enough.
    pub fn fewest(&self, beside: usize, free: usize) -> usize {
        let mut excess = (self.total + beside).saturating_sub(free);
        let leaves = |bytes: &&usize| {
            let leaves = excess > 0;
            excess = excess.saturating_sub(**bytes);
            leaves
        };
        self.layers.iter().rev().take_while(leaves).count()
    }
}

/// Bytes that KV pages need at least where the number of layers is chosen: one sequence of the
/// context, but at most a quarter of the free memory.
pub fn kv_reserve(sequence: usize, free: usize) -> usize {
    sequence.min(free / 4)
}

/// Decides `--cpu-experts auto` for a runner with these options, and refuses experts that do not fit
/// into host memory. `sequences` run together.
pub fn place(
    backend: &AnyBackend,
    config: &DecoderConfig,
    weights: &WeightBytes,
    options: &RunnerOptions<'_>,
    sequences: usize,
) -> Result<()> {
    let Some(hybrid) = backend.as_hybrid().filter(|hybrid| hybrid.host().is_some()) else { return Ok(()) };
    if hybrid.host_layers().is_none() {
        let chunk = longest_step(options.prefill_chunk);
        let step = backend.step_memory(&config.step_size(chunk, sequences, options.context));
        let kv = options.kv_memory.bytes(&backend.held_layout(&options.layout), options.prefill_chunk);
        hybrid.place(weights.fewest(step.total() + kv, backend.free_memory()?.unwrap_or(usize::MAX)));
    }
    check_host(weights.last(hybrid.host_layers().unwrap_or(0)))
}

/// Refuses experts that do not fit into host memory.
pub fn check_host(experts: HostExperts) -> Result<()> {
    match crate::host_memory::available() {
        Some(available) if experts.bytes > available => bail!(
            "the experts of {} layers take {} of host memory, and {} are available: give --cpu-experts a smaller \
             number, or free some memory",
            experts.layers,
            progress::bytes(experts.bytes),
            progress::bytes(available)
        ),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_models::shapes::shape;

    #[test]
    fn the_flag_takes_a_number_or_two_words() {
        for (text, layers) in [("auto", None), ("0", Some(0)), ("12", Some(12)), ("all", Some(usize::MAX))] {
            let flag: CpuExperts = text.parse().unwrap();
            assert_eq!((flag.layers(), flag.to_string().as_str()), (layers, text));
        }
        assert!("-1".parse::<CpuExperts>().unwrap_err().contains("neither auto"));
    }

    #[test]
    fn more_layers_than_have_experts_are_refused() {
        let (dense, glm) = (shape("qwen3-8b").unwrap(), shape("glm-4.7").unwrap());
        for asked in [CpuExperts::Auto, CpuExperts::Layers(1), CpuExperts::All] {
            assert!(asked.check(&dense).unwrap_err().to_string().contains("no experts"));
            asked.check(&glm).unwrap();
        }
        CpuExperts::Layers(89).check(&glm).unwrap();
        let error = CpuExperts::Layers(90).check(&glm).unwrap_err().to_string();
        assert!(error.contains("at most 89"), "{error}");
    }

    #[test]
    fn as_few_layers_leave_as_memory_allows() {
        let weights = WeightBytes { total: 100, layers: vec![10, 20, 30], on_host: vec![10, 20, 9] };
        let counts = [110, 109, 81, 80, 60, 50, 49, 0].map(|free| weights.fewest(10, free));
        assert_eq!(counts, [0, 1, 1, 1, 2, 3, 3, 3]);
        assert_eq!(weights.last(2), HostExperts { layers: 2, bytes: 29 });
        assert_eq!(weights.last(usize::MAX), HostExperts { layers: 3, bytes: 39 });
        assert_eq!((weights.without(weights.last(2)), weights.without(weights.last(0))), (50, 100));
        assert_eq!((kv_reserve(10, 100), kv_reserve(60, 100)), (10, 25));
    }

    #[test]
    fn published_sizes_give_their_layers() {
        let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
        let glm = WeightBytes::of_shape(&shape("glm-4.7").unwrap(), WeightFormat::Fp8);
        assert_eq!(glm.layers.len(), 89);
        // 160 experts and a shared one of 3 · 5120 · 1536.
        assert!((gib(glm.layers[0]) - 3.54).abs() < 0.01, "{}", gib(glm.layers[0]));
        let host = glm.last(glm.fewest(30 << 30, 140 << 30));
        assert!((50..89).contains(&host.layers), "{host:?}");
        assert!(glm.total - host.bytes + (30 << 30) <= 140 << 30);
    }
}
