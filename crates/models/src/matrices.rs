//! The matrices of a layer in the form that devices get: projections with the same input are
//! stacked into one, in the checkpoint's format, in FP8 or expanded.
//!
//! FP8 stays FP8, with these exceptions: the value rotation is folded into the matrix (attention),
//! not all parts are FP8, blocks of 128 rows would cross the seam between two parts, the scales
//! are those of channels, for which only experts have products, queries and gates alternate in one
//! matrix, or it belongs to a delta net.
//! [`Weights::delivered`] is that rule; loading and `oscar plan` both use it.

use half::{bf16, f16};
use oscar_backend::{
    Backend, FP8_BLOCK, Fp8Blocks, HostMatrix, HostValues, ScaleGrid, WeightFormat, fp8_blocks,
    fp8_multiplied,
};

use crate::config::DecoderConfig;
use crate::error::LoadError;
use crate::fp8::Fp8Weights;
use crate::latent::LatentConfig;
use crate::shard::Shard;
use crate::tensor::{TensorView, WeightDtype};
use crate::tensor_names::Projection;
use crate::transformer::BuildError;
use crate::weights::Weights;

/// The matrices a layer is multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerMatrix {
    QueryKeyValue,
    Query,
    QueryDown,
    QueryUp,
    LatentDown,
    /// Two matrices a head on the device, in other shapes than the file's: always expanded.
    LatentUp,
    Output,
    GateUp,
    Down,
}

impl LayerMatrix {
    /// The matrices of a model's dense layers.
    pub fn of(config: &DecoderConfig) -> Vec<Self> {
        let mut all = match &config.latent {
            None => vec![Self::QueryKeyValue],
            Some(LatentConfig { query_rank: None, .. }) => {
                vec![Self::Query, Self::LatentDown, Self::LatentUp]
            }
            Some(_) => vec![Self::QueryDown, Self::QueryUp, Self::LatentDown, Self::LatentUp],
        };
        all.extend([Self::Output, Self::GateUp, Self::Down]);
        all
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::QueryKeyValue => "qkv",
            Self::Query => "query",
            Self::QueryDown => "query_down",
            Self::QueryUp => "query_up",
            Self::LatentDown => "latent_down",
            Self::LatentUp => "latent_up",
            Self::Output => "output",
            Self::GateUp => "gate_up",
            Self::Down => "down",
        }
    }

    /// The projections that it stacks.
    pub fn projections(self) -> &'static [Projection] {
        match self {
            Self::QueryKeyValue => &[Projection::Query, Projection::Key, Projection::Value],
            Self::Query => &[Projection::Query],
            Self::QueryDown => &[Projection::QueryDown],
            Self::QueryUp => &[Projection::QueryUp],
            Self::LatentDown => &[Projection::LatentDown],
            Self::LatentUp => &[Projection::LatentUp],
            Self::Output => &[Projection::Output],
            Self::GateUp => &[Projection::Gate, Projection::Up],
            Self::Down => &[Projection::Down],
        }
    }

    /// Rows (outputs) and columns (inputs).
    pub fn shape(self, config: &DecoderConfig) -> [usize; 2] {
        let shapes = self.projections().iter().map(|p| p.shape(config));
        shapes.fold([0, 0], |[rows, _], [more, columns]| [rows + more, columns])
    }

    /// Whether a layer has it.
    pub fn is_in(self, config: &DecoderConfig, layer: usize) -> bool {
        match self.is_feed_forward() {
            true => config.moe_of(layer).is_none(),
            false => config.delta_of(layer).is_none(),
        }
    }

    /// Whether it belongs to the feed-forward part.
    pub fn is_feed_forward(self) -> bool {
        matches!(self, Self::GateUp | Self::Down)
    }

    /// Whether the value rotation of a cache is folded into it.
    fn carries_rotation(self) -> bool {
        matches!(self, Self::QueryKeyValue | Self::Output)
    }
}

/// The name of experts in descriptions.
const EXPERTS: &str = "experts";

/// How a device stores weights.
#[derive(Debug, Clone, Copy)]
pub struct Holding {
    /// Whether FP8 matrices stay FP8; otherwise they are expanded.
    pub fp8: bool,
    /// The same for experts.
    pub fp8_experts: bool,
    /// Whether MXFP4 experts stay codes; a GPU expands them to BF16.
    pub mxfp4_experts: bool,
    /// Bytes of an element of all other matrices.
    pub element_bytes: usize,
}

/// A matrix of the checkpoint.
#[derive(Debug)]
pub enum MatrixView<'a> {
    Unquantized(TensorView<'a>),
    Fp8(Fp8Weights<'a>),
}

impl MatrixView<'_> {
    pub fn to_f32_vec(&self) -> Vec<f32> {
        match self {
            Self::Unquantized(view) => view.to_f32_vec(),
            Self::Fp8(stored) => stored.expand(),
        }
    }

    pub(crate) fn shape(&self) -> &[usize] {
        match self {
            Self::Unquantized(view) => view.shape,
            Self::Fp8(stored) => stored.shape,
        }
    }
}

impl Weights {
    /// The format in which a device gets a matrix. `rotated`: a value rotation is folded into
    /// attention's matrices.
    pub fn delivered(
        &self,
        config: &DecoderConfig,
        layer: usize,
        matrix: LayerMatrix,
        rotated: bool,
    ) -> WeightFormat {
        let parts = matrix.projections();
        let coded = parts
            .iter()
            .filter(|p| self.scale_grid(&self.names().weight(layer, **p)) == Some(ScaleGrid::Blocks))
            .count();
        let seams_on_blocks =
            parts.len() == 1 || parts.iter().all(|p| p.shape(config)[0].is_multiple_of(FP8_BLOCK));
        let stays = match self.wanted() {
            _ if rotated && matrix.carries_rotation() || matrix == LayerMatrix::LatentUp => false,
            _ if config.output_gate && matrix == LayerMatrix::QueryKeyValue => false,
            Some(WeightFormat::Bf16) => false,
            _ => coded == parts.len() && seams_on_blocks,
        };
        if stays { WeightFormat::Fp8 } else { WeightFormat::Bf16 }
    }

    /// The format of the head, if it has weights of its own.
    fn delivered_head(&self) -> WeightFormat {
        let stays = self.wanted() != Some(WeightFormat::Bf16) && self.is_fp8(&self.names().lm_head());
        if stays { WeightFormat::Fp8 } else { WeightFormat::Bf16 }
    }

    /// Bytes of the weights on a device.
    pub fn held_bytes(&self, config: &DecoderConfig, rotated: bool, holding: Holding) -> u64 {
        let bytes = |format, [outputs, inputs]: [usize; 2]| match format {
            WeightFormat::Fp8 if holding.fp8 && fp8_multiplied(outputs, inputs) => {
                outputs * inputs + 4 * fp8_blocks(outputs) * fp8_blocks(inputs)
            }
            _ => outputs * inputs * holding.element_bytes,
        };
        let vocabulary = [config.vocab_size, config.hidden_size];
        let mut total = bytes(WeightFormat::Bf16, vocabulary);
        if !config.tie_word_embeddings {
            total += bytes(self.delivered_head(), vocabulary);
        }
        for layer in 0..config.layers {
            for matrix in LayerMatrix::of(config) {
                if matrix.is_in(config, layer) {
                    total += bytes(self.delivered(config, layer, matrix, rotated), matrix.shape(config));
                }
            }
            if let Some(delta) = config.delta_of(layer) {
                total += delta.parameters(config.hidden_size) * holding.element_bytes;
            }
            total += self.expert_bytes(config, layer, holding);
        }
        total as u64 + 4 * self.vector_elements(config)
    }

    /// Which matrices stay FP8 and which do not, in one line; `None` if no matrix is FP8.
    pub fn describe_fp8(&self, config: &DecoderConfig, rotated: bool, multiplied: bool) -> Option<String> {
        let (mut kept, mut expanded) = (Vec::new(), Vec::new());
        for matrix in LayerMatrix::of(config) {
            let layers: Vec<usize> =
                (0..config.layers).filter(|&layer| matrix.is_in(config, layer)).collect();
            if layers.is_empty() {
                continue;
            }
            let [outputs, inputs] = matrix.shape(config);
            let odd = multiplied && !fp8_multiplied(outputs, inputs);
            let delivered = |layer: &&usize| self.delivered(config, **layer, matrix, rotated);
            let count = layers.iter().filter(|l| delivered(l) == WeightFormat::Fp8 && !odd).count();
            match (count == layers.len(), count) {
                (true, _) => kept.push(matrix.name().to_owned()),
                (false, 0) if rotated && matrix.carries_rotation() => {
                    expanded.push(format!("{} (the value rotation is folded in)", matrix.name()));
                }
                (false, 0) => expanded.push(matrix.name().to_owned()),
                (false, some) => kept.push(format!("{} ({some} of {} layers)", matrix.name(), layers.len())),
            }
        }
        let mixtures = (0..config.layers).filter(|&layer| config.moe_of(layer).is_some());
        let formats: Vec<_> = mixtures.filter_map(|l| self.expert_format(config, l).weights()).collect();
        if !formats.is_empty() {
            let coded = formats.iter().all(|format| *format == WeightFormat::Fp8);
            if coded { &mut kept } else { &mut expanded }.push(EXPERTS.to_owned());
        }
        if (0..config.layers).any(|layer| config.delta_of(layer).is_some()) {
            expanded.push("delta nets".to_owned());
        }
        if !config.tie_word_embeddings && self.delivered_head() == WeightFormat::Fp8 {
            kept.push("head".to_owned());
        }
        if kept.is_empty() && !config.fp8_weights {
            return None;
        }
        let origin = if config.fp8_weights { "the checkpoint's" } else { "quantized now" };
        let how = match (multiplied, kept.is_empty()) {
            (_, true) => "all expanded".to_owned(),
            (true, _) => format!("{} (activations are not quantized)", kept.join(", ")),
            (false, _) => expanded_on_arrival(&kept),
        };
        // With `--weights fp8` every projection is quantized, as in a checkpoint, so answers do not
        // depend on which matrices stay FP8.
        let rest = match expanded.is_empty() || kept.is_empty() {
            true => String::new(),
            false => format!("; expanded: {}", expanded.join(", ")),
        };
        Some(format!("FP8 weights, {origin}: {how}{rest}"))
    }
}

/// What becomes of FP8 matrices on a device that expands them, all but experts.
fn expanded_on_arrival(kept: &[String]) -> String {
    let (experts, dense): (Vec<&str>, Vec<&str>) =
        kept.iter().map(String::as_str).partition(|name| *name == EXPERTS);
    let dense = (!dense.is_empty()).then(|| format!("{}, expanded on this device", dense.join(", ")));
    let experts = (!experts.is_empty())
        .then(|| "experts stay codes in memory (except with --precision f32)".to_owned());
    dense.into_iter().chain(experts).collect::<Vec<_>>().join("; ")
}

/// Puts a matrix of a layer, with its bias, onto the device: unchanged, or a rank's part of it.
pub(crate) fn prepare<B: Backend>(
    backend: &B,
    shard: &Shard,
    weights: &Weights,
    layer: usize,
    matrix: LayerMatrix,
) -> Result<B::Matrix, BuildError> {
    let parts = matrix.projections();
    let bias = biases(shard, weights, layer, matrix)?;
    if shard.is_split() {
        let [outputs, inputs] = matrix.shape(shard.part());
        let mut values = Vec::with_capacity(outputs * inputs);
        for &projection in parts {
            values.extend(shard.projection(weights, layer, projection)?);
        }
        let values = HostValues::F32(&values);
        return Ok(backend.matrix(HostMatrix { outputs, inputs, values, bias: bias.as_deref() })?);
    }
    let names: Vec<String> = parts.iter().map(|p| weights.names().weight(layer, *p)).collect();
    let format = weights.delivered(shard.whole(), layer, matrix, false);
    stacked(backend, weights, &names, bias.as_deref(), format)
}

/// The output head, for models with one of their own and for ranks, which have some rows of it.
pub(crate) fn prepare_head<B: Backend>(
    backend: &B,
    shard: &Shard,
    weights: &Weights,
) -> Result<B::Matrix, BuildError> {
    if shard.is_split() {
        let (outputs, inputs) = (shard.vocabulary().len(), shard.whole().hidden_size);
        let values = shard.head(weights)?;
        let values = HostValues::F32(&values);
        return Ok(backend.matrix(HostMatrix { outputs, inputs, values, bias: None })?);
    }
    stacked(backend, weights, &[weights.names().lm_head()], None, weights.delivered_head())
}

/// The embedding, whose rows are read one by one: never FP8.
pub(crate) fn prepare_embedding<B: Backend>(backend: &B, weights: &Weights) -> Result<B::Matrix, BuildError> {
    stacked(backend, weights, &[weights.names().embedding()], None, WeightFormat::Bf16)
}

/// The biases of a matrix's outputs, if any of its parts has one.
pub(crate) fn biases(
    shard: &Shard,
    weights: &Weights,
    layer: usize,
    matrix: LayerMatrix,
) -> Result<Option<Vec<f32>>, LoadError> {
    let parts = matrix.projections();
    if !parts.iter().any(|p| p.has_bias(shard.whole())) {
        return Ok(None);
    }
    let mut all = Vec::new();
    for &projection in parts {
        all.extend(shard.bias(weights, layer, projection)?);
    }
    Ok(Some(all))
}

/// Several matrices of equal width as one; their outputs follow each other.
fn stacked<B: Backend>(
    backend: &B,
    weights: &Weights,
    names: &[String],
    bias: Option<&[f32]>,
    format: WeightFormat,
) -> Result<B::Matrix, BuildError> {
    let views = names.iter().map(|name| weights.matrix(name)).collect::<Result<Vec<_>, _>>()?;
    let outputs = views.iter().map(|v| v.shape()[0]).sum();
    let inputs = views[0].shape()[1];
    let matrix = |values| Ok(backend.matrix(HostMatrix { outputs, inputs, values, bias })?);
    let all_f32 = || -> Vec<f32> { views.iter().flat_map(MatrixView::to_f32_vec).collect() };
    if format == WeightFormat::Fp8 {
        let stored: Vec<&Fp8Weights<'_>> = views
            .iter()
            .filter_map(|v| if let MatrixView::Fp8(stored) = v { Some(stored) } else { None })
            .collect();
        if let [one] = stored.as_slice() {
            return matrix(HostValues::Fp8(one.blocks()));
        }
        let codes: Vec<u8> = stored.iter().flat_map(|s| s.codes.iter().copied()).collect();
        let scales: Vec<f32> = stored.iter().flat_map(|s| s.scales.iter().copied()).collect();
        return matrix(HostValues::Fp8(Fp8Blocks {
            codes: &codes,
            scales: &scales,
            grid: ScaleGrid::Blocks,
        }));
    }
    let plain: Vec<&TensorView<'_>> = views
        .iter()
        .filter_map(|v| if let MatrixView::Unquantized(view) = v { Some(view) } else { None })
        .collect();
    let all = |dtype| plain.len() == views.len() && plain.iter().all(|v| v.dtype == dtype);
    if let [view] = plain.as_slice()
        && let Some(values) = view.as_bf16()
        && views.len() == 1
    {
        return matrix(HostValues::Bf16(values));
    }
    if all(WeightDtype::Bf16) {
        let mut values: Vec<bf16> = Vec::with_capacity(outputs * inputs);
        for view in &plain {
            match view.as_bf16() {
                Some(part) => values.extend_from_slice(part),
                None => values.extend_from_slice(&view.to_bf16_vec()),
            }
        }
        return matrix(HostValues::Bf16(&values));
    }
    if all(WeightDtype::F16) {
        let halves = plain.iter().flat_map(|v| v.bytes.chunks_exact(2));
        let values: Vec<f16> = halves.map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
        return matrix(HostValues::F16(&values));
    }
    matrix(HostValues::F32(&all_f32()))
}
