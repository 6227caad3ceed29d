//! Experts of gpt-oss and Qwen3.5: all of a layer in one tensor. For gpt-oss:
//!
//! ```text
//! BF16    mlp.experts.gate_up_proj         [experts, hidden, 2 · width]     inputs before outputs
//!         mlp.experts.down_proj            [experts, width, hidden]
//! MXFP4   mlp.experts.gate_up_proj_blocks  [experts, 2 · width, hidden / 32, 16]
//!         mlp.experts.gate_up_proj_scales  [experts, 2 · width, hidden / 32]
//!         mlp.experts.down_proj_blocks     [experts, hidden, width / 32, 16], and its scales
//! both    mlp.experts.gate_up_proj_bias    [experts, 2 · width]
//!         mlp.experts.down_proj_bias       [experts, hidden]
//! ```
//!
//! Outputs of gate and up alternate: gate, up, gate, up, … Qwen3.5 has `gate_up_proj [experts, 2 · width,
//! hidden]`, first all outputs of the gate, and `down_proj [experts, hidden, width]`, without biases.

use oscar_backend::{
    Backend, ExpertFormat, ExpertId, HostMatrix, HostValues, MXFP4_GROUP, MXFP4_LARGEST_SCALE, Mxfp4Blocks,
};

use crate::config::{DecoderConfig, MoeConfig};
use crate::error::LoadError;
use crate::matrices::MatrixView;
use crate::tensor::TensorView;
use crate::tensor_names::{ExpertNames, Projection, TensorNames};
use crate::transformer::BuildError;
use crate::weights::Weights;

const BLOCKS: &str = "_blocks";
const SCALES: &str = "_scales";
const BIAS: &str = "_bias";
/// Bytes of the codes that share a scale.
const GROUP_BYTES: usize = MXFP4_GROUP / 2;

/// Whether this is a tensor of MXFP4 codes or scales.
pub(crate) fn is_packed(name: &str) -> bool {
    name.ends_with(BLOCKS) || is_scales(name)
}

/// Whether this is a tensor of MXFP4 scales.
pub(crate) fn is_scales(name: &str) -> bool {
    name.ends_with("_proj_scales")
}

/// Weights in an element of this tensor.
pub(crate) fn elements_of(name: &str) -> u64 {
    if name.ends_with("_proj_blocks") { 2 } else { 1 }
}

/// The tensors of a layer's experts that hold several of them.
pub(crate) fn required(
    names: &TensorNames,
    layer: usize,
    moe: &MoeConfig,
    hidden: usize,
) -> Vec<(String, Vec<usize>)> {
    let (experts, width) = (moe.experts, moe.width);
    let mut tensors = Vec::new();
    if moe.names == ExpertNames::QwenFused {
        let [gate_up, down] = names.fused(layer);
        return vec![(gate_up, vec![experts, 2 * width, hidden]), (down, vec![experts, hidden, width])];
    }
    if moe.names != ExpertNames::Fused {
        return tensors;
    }
    for (name, outputs, inputs) in names
        .fused(layer)
        .into_iter()
        .zip([(2 * width, hidden), (hidden, width)])
        .map(|(n, (o, i))| (n, o, i))
    {
        if moe.mxfp4 {
            let groups = inputs / MXFP4_GROUP;
            tensors.push((format!("{name}{BLOCKS}"), vec![experts, outputs, groups, GROUP_BYTES]));
            tensors.push((format!("{name}{SCALES}"), vec![experts, outputs, groups]));
        } else {
            tensors.push((name.clone(), vec![experts, inputs, outputs]));
        }
        tensors.push((format!("{name}{BIAS}"), vec![experts, outputs]));
    }
    tensors
}

/// Every second element, from the first on and from the second on.
fn deal<T: Copy>(values: &[T]) -> [Vec<T>; 2] {
    [0, 1].map(|first| values.iter().skip(first).step_by(2).copied().collect())
}

/// The same for rows of `width` elements.
fn deal_rows<T: Copy>(values: &[T], width: usize) -> [Vec<T>; 2] {
    [0, 1].map(|first| values.chunks_exact(width).skip(first).step_by(2).flatten().copied().collect())
}

/// A matrix of an expert: one tensor of the file, or in Qwen3.5 a part of one.
pub(crate) fn view<'w>(
    weights: &'w Weights,
    layer: usize,
    moe: &MoeConfig,
    id: ExpertId,
    part: Projection,
    hidden: usize,
) -> Result<MatrixView<'w>, LoadError> {
    let names = weights.names();
    let ExpertId::Routed(expert) = id else { return weights.matrix(&names.expert(layer, moe, id, part)) };
    if moe.names != ExpertNames::QwenFused {
        return weights.matrix(&names.expert(layer, moe, id, part));
    }
    let [gate_up, down] = names.fused(layer);
    let (name, parts, index) = match part {
        Projection::Gate => (gate_up, 2, 0),
        Projection::Up => (gate_up, 2, 1),
        _ => (down, 1, 0),
    };
    let all = weights.tensor(&name)?;
    let size = hidden * moe.width * all.dtype.size();
    let bytes = &all.bytes[(expert * parts + index) * size..][..size];
    match (TensorView { bytes, ..all }).is_finite() {
        // The outputs and inputs are those of `MoeConfig::shape`.
        true => Ok(MatrixView::Unquantized(TensorView { bytes, ..all })),
        false => Err(LoadError::NanWeights { name }),
    }
}

/// Brings the experts of a layer of gpt-oss onto the device, one at a time.
pub(crate) fn load<B: Backend>(
    backend: &B,
    config: &DecoderConfig,
    moe: &MoeConfig,
    weights: &Weights,
    layer: usize,
    experts: &mut B::Experts,
) -> Result<(), BuildError> {
    let (hidden, width) = (config.hidden_size, moe.width);
    let keeps_codes = weights.expert_format(config, layer) == ExpertFormat::Mxfp4;
    let [gate_up, down] = weights.names().fused(layer);
    let gate_up_biases = weights.vector(&format!("{gate_up}{BIAS}"))?;
    let down_biases = weights.vector(&format!("{down}{BIAS}"))?;
    for expert in 0..moe.experts {
        let [gate_bias, up_bias] = deal(&gate_up_biases[expert * 2 * width..][..2 * width]);
        let down_bias = &down_biases[expert * hidden..][..hidden];
        let sizes = [(width, hidden, &gate_bias[..]), (width, hidden, &up_bias), (hidden, width, down_bias)];
        let mut parts = match moe.mxfp4 {
            true => packed_parts(weights, [&gate_up, &down], expert, hidden, width)?,
            false => plain_parts(weights, [&gate_up, &down], expert, hidden, width)?,
        };
        if !keeps_codes {
            for (part, (outputs, inputs, _)) in parts.iter_mut().zip(sizes) {
                part.expand(outputs, inputs)?;
            }
        }
        let matrix = |i: usize| {
            let (outputs, inputs, bias) = sizes[i];
            HostMatrix { outputs, inputs, values: parts[i].values(), bias: Some(bias) }
        };
        backend.load_expert(experts, ExpertId::Routed(expert), [matrix(0), matrix(1), matrix(2)])?;
    }
    Ok(())
}

/// A matrix of an expert, outputs before inputs.
enum Part {
    Plain(Vec<f32>),
    Packed { codes: Vec<u8>, scales: Vec<u8> },
}

impl Part {
    /// Turns codes into numbers.
    fn expand(&mut self, outputs: usize, inputs: usize) -> oscar_backend::Result<()> {
        if let Self::Packed { codes, scales } = self {
            *self = Self::Plain(Mxfp4Blocks { codes, scales }.expand(outputs, inputs)?);
        }
        Ok(())
    }

    fn values(&self) -> HostValues<'_> {
        match self {
            Self::Plain(values) => HostValues::F32(values),
            Self::Packed { codes, scales } => HostValues::Mxfp4(Mxfp4Blocks { codes, scales }),
        }
    }
}

/// Gate, up and down of an expert whose weights are numbers.
fn plain_parts(
    weights: &Weights,
    names: [&str; 2],
    expert: usize,
    hidden: usize,
    width: usize,
) -> Result<[Part; 3], LoadError> {
    let transposed = |name: &str, inputs: usize, outputs: usize| -> Result<Vec<f32>, LoadError> {
        let all = weights.tensor(name)?;
        let size = inputs * outputs * all.dtype.size();
        let view = TensorView { shape: &all.shape[1..], bytes: &all.bytes[expert * size..][..size], ..all };
        if !view.is_finite() {
            return Err(LoadError::NanWeights { name: name.to_owned() });
        }
        let values = view.to_f32_vec();
        let mut out = vec![0.0; values.len()];
        for (input, row) in values.chunks_exact(outputs).enumerate() {
            row.iter().enumerate().for_each(|(output, &value)| out[output * inputs + input] = value);
        }
        Ok(out)
    };
    let [gate, up] = deal_rows(&transposed(names[0], hidden, 2 * width)?, hidden);
    Ok([gate, up, transposed(names[1], width, hidden)?].map(Part::Plain))
}

/// Gate, up and down of an expert in MXFP4.
fn packed_parts(
    weights: &Weights,
    names: [&str; 2],
    expert: usize,
    hidden: usize,
    width: usize,
) -> Result<[Part; 3], LoadError> {
    let read = |name: &str, ending: &str, size: usize| -> Result<&[u8], LoadError> {
        Ok(&weights.packed(&format!("{name}{ending}"))?[expert * size..][..size])
    };
    let scales = |name: &str, size: usize| -> Result<&[u8], LoadError> {
        let scales = read(name, SCALES, size)?;
        match scales.iter().find(|&&scale| scale > MXFP4_LARGEST_SCALE) {
            None => Ok(scales),
            Some(scale) => Err(LoadError::BadScales {
                name: format!("{name}{BLOCKS}"),
                problem: format!("one of them is {scale}; at most {MXFP4_LARGEST_SCALE} gives numbers"),
            }),
        }
    };
    let [gate_up, down] = names;
    let [gate_codes, up_codes] = deal_rows(read(gate_up, BLOCKS, width * hidden)?, hidden / 2);
    let groups = hidden / MXFP4_GROUP;
    let [gate_scales, up_scales] = deal_rows(scales(gate_up, 2 * width * groups)?, groups);
    let down_codes = read(down, BLOCKS, hidden * width / 2)?.to_vec();
    let down_scales = scales(down, hidden * (width / MXFP4_GROUP))?.to_vec();
    Ok([(gate_codes, gate_scales), (up_codes, up_scales), (down_codes, down_scales)]
        .map(|(codes, scales)| Part::Packed { codes, scales }))
}
