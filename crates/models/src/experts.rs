//! Mixtures of experts on their way to a device: one expert at a time, so that no second copy of a
//! layer exists.

use oscar_backend::{
    Backend, Benchmarks, ExpertFormat, ExpertId, ExpertsShape, HeldExperts, HostMatrix, HostValues,
    MXFP4_GROUP, ScaleGrid, WeightFormat,
};
use oscar_codec::random::SplitMix64;

use crate::config::{DecoderConfig, MoeConfig};
use crate::fused;
use crate::matrices::{Holding, MatrixView};
use crate::tensor_names::{ExpertNames, Projection};
use crate::transformer::BuildError;
use crate::weights::Weights;

impl MoeConfig {
    /// Experts that a step of this many rows is expected to choose if all are equally frequent.
    pub fn distinct_experts(&self, rows: usize) -> f64 {
        let left_out = 1.0 - self.rule.chosen as f64 / self.experts as f64;
        self.experts as f64 * (1.0 - left_out.powi(rows.min(1 << 20) as i32))
    }

    /// The experts of a layer without their router, in BF16.
    fn experts_shape(&self, config: &DecoderConfig, layer: usize) -> ExpertsShape<'static> {
        let Self { experts, width, shared_width, rule, .. } = *self;
        ExpertsShape {
            following: config.mixtures().filter(|&other| other > layer).count(),
            experts,
            hidden: config.hidden_size,
            width,
            shared_width,
            format: ExpertFormat::Bf16,
            rule,
            gate: config.gate,
            router: &[],
            correction: None,
            router_bias: None,
            shared_gate: None,
        }
    }
}

impl ExpertNames {
    /// Whether the file has this expert in one tensor with others.
    pub(crate) fn joins(self, id: ExpertId) -> bool {
        match self {
            Self::Fused => true,
            Self::QwenFused => id != ExpertId::Shared,
            Self::Mlp | Self::BlockSparse | Self::Qwen => false,
        }
    }
}

impl Weights {
    /// The format in which a device gets the experts of a layer: FP8 if all of them are, with scales
    /// of one kind.
    pub fn expert_format(&self, config: &DecoderConfig, layer: usize) -> ExpertFormat {
        let Some(moe) = config.moe_of(layer) else { return ExpertFormat::Bf16 };
        if self.wanted() == Some(WeightFormat::Bf16) {
            return ExpertFormat::Bf16;
        }
        if moe.names == ExpertNames::Fused {
            return if moe.mxfp4 { ExpertFormat::Mxfp4 } else { ExpertFormat::Bf16 };
        }
        let parts = moe.ids().flat_map(|id| Projection::FEED_FORWARD.map(|part| (id, part)));
        let mut grids = parts.map(|(id, part)| self.scale_grid(&self.names().expert(layer, moe, id, part)));
        let first = grids.next().flatten();
        match first.filter(|_| grids.all(|grid| grid == first)) {
            Some(ScaleGrid::Blocks) => ExpertFormat::Fp8Blocks,
            Some(ScaleGrid::Channels) => ExpertFormat::Fp8Channels,
            None => ExpertFormat::Bf16,
        }
    }

    /// Bytes of a layer's router and experts on a device.
    pub fn expert_bytes(&self, config: &DecoderConfig, layer: usize, holding: Holding) -> usize {
        let Some(moe) = config.moe_of(layer) else { return 0 };
        let format = self.expert_format(config, layer);
        let (element, grid) = match format {
            ExpertFormat::Fp8Blocks if holding.fp8_experts => (1, Some(ScaleGrid::Blocks)),
            ExpertFormat::Fp8Channels if holding.fp8_experts => (1, Some(ScaleGrid::Channels)),
            _ => (holding.element_bytes, None),
        };
        let bytes = |width: usize| -> usize {
            let shapes =
                [[width, config.hidden_size], [width, config.hidden_size], [config.hidden_size, width]];
            if format == ExpertFormat::Mxfp4 && holding.mxfp4_experts {
                return shapes.iter().map(|&[n, k]| n * k / 2 + n * k / MXFP4_GROUP).sum();
            }
            let scales =
                |[n, k]: [usize; 2]| grid.map_or(0, |grid| 4 * grid.shape(n, k).iter().product::<usize>());
            shapes.iter().map(|&[n, k]| n * k * element + scales([n, k])).sum()
        };
        let shared = if moe.shared_width > 0 { bytes(moe.shared_width) } else { 0 };
        let biases = if moe.biases { 4 * (2 * moe.width + config.hidden_size) } else { 0 };
        moe.experts * (bytes(moe.width) + biases + 4 * config.hidden_size) + shared
    }
}

/// Brings the experts of a layer onto the device.
pub(crate) fn load<B: Backend>(
    backend: &B,
    config: &DecoderConfig,
    moe: &MoeConfig,
    weights: &Weights,
    layer: usize,
) -> Result<B::Experts, BuildError> {
    let names = weights.names();
    let router = weights.vector(&names.router(layer, moe))?;
    let correction = moe.correction.then(|| weights.vector(&names.correction(layer, moe))).transpose()?;
    let router_bias = moe.biases.then(|| weights.vector(&names.router_bias(layer))).transpose()?;
    let shared_gate = moe.shared_gate.then(|| weights.matrix(&names.shared_gate(layer))).transpose()?;
    let shared_gate = shared_gate.map(|gate| gate.to_f32_vec());
    let format = weights.expert_format(config, layer);
    let mut experts = backend.experts(&ExpertsShape {
        format,
        router: &router,
        correction: correction.as_deref(),
        router_bias: router_bias.as_deref(),
        shared_gate: shared_gate.as_deref(),
        ..moe.experts_shape(config, layer)
    })?;
    if moe.names == ExpertNames::Fused {
        fused::load(backend, config, moe, weights, layer, &mut experts)?;
        return Ok(experts);
    }
    let held = HeldExperts::of(backend.communicator(), moe.experts);
    for id in moe.ids().filter(|id| held.has(*id)) {
        let view = |part| fused::view(weights, layer, moe, id, part, config.hidden_size);
        let [gate, up, down] = Projection::FEED_FORWARD.map(view);
        let views = [gate?, up?, down?];
        // Kept alive while the device reads them.
        let f32s = views.each_ref().map(|view| match view {
            MatrixView::Unquantized(view) if view.as_bf16().is_some() => Vec::new(),
            MatrixView::Fp8(_) if format != ExpertFormat::Bf16 => Vec::new(),
            other => other.to_f32_vec(),
        });
        let matrix = |i: usize| {
            let values = match &views[i] {
                MatrixView::Fp8(stored) if format != ExpertFormat::Bf16 => HostValues::Fp8(stored.blocks()),
                MatrixView::Unquantized(view) => match view.as_bf16() {
                    Some(values) => HostValues::Bf16(values),
                    None => HostValues::F32(&f32s[i]),
                },
                MatrixView::Fp8(_) => HostValues::F32(&f32s[i]),
            };
            let [outputs, inputs] = moe.shape(id, Projection::FEED_FORWARD[i], config.hidden_size);
            HostMatrix { outputs, inputs, values, bias: None }
        };
        backend.load_expert(&mut experts, id, [matrix(0), matrix(1), matrix(2)])?;
    }
    Ok(experts)
}

/// Experts with random weights: for benchmarks. Each row of activations meets a random router.
/// `skew` adds a Zipf-like preference, `skew / (1 + rank)` logits, to the experts in random order:
/// with 0 all are about equally frequent.
pub(crate) fn random<B: Benchmarks>(
    backend: &B,
    config: &DecoderConfig,
    moe: &MoeConfig,
    weights: WeightFormat,
    skew: f32,
    layer: usize,
) -> Result<B::Experts, BuildError> {
    let hidden = config.hidden_size;
    let mut random = SplitMix64::new(layer as u64 ^ 0x0e1e_c7ed);
    let amplitude = oscar_backend::random_amplitude(hidden);
    let router: Vec<f32> = (0..moe.experts * hidden).map(|_| random.symmetric() * amplitude).collect();
    // The correction moves the choice and leaves the weights as they are.
    let mut order: Vec<usize> = (0..moe.experts).collect();
    order.sort_by_cached_key(|_| (random.symmetric() * 1e6) as i64);
    let mut correction = vec![0.0; moe.experts];
    order.iter().enumerate().for_each(|(rank, &e)| correction[e] = skew / (1.0 + rank as f32).sqrt());
    let corrected = (skew > 0.0 || moe.correction).then_some(correction.as_slice());
    let format = match weights {
        WeightFormat::Bf16 => ExpertFormat::Bf16,
        WeightFormat::Fp8 => ExpertFormat::Fp8Blocks,
    };
    let shared_gate = moe.shared_gate.then(|| vec![0.0; hidden]);
    let shape = ExpertsShape {
        format,
        router: &router,
        correction: corrected,
        shared_gate: shared_gate.as_deref(),
        ..moe.experts_shape(config, layer)
    };
    let ids: Vec<ExpertId> = moe.ids().collect();
    Ok(backend.random_experts(&shape, &ids, layer as u64)?)
}
