//! FP8 twins of small models: the same configuration with quantized projections, for tests that
//! compare the two.
//!
//! Random weights have the same size everywhere, so every block would have the same scale. Twins,
//! including the unquantized one, give each block a size of its own.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use half::bf16;
use oscar_backend::{FP8_BLOCK, Fp8Matrix, fp8_blocks};
use safetensors::tensor::{Dtype, TensorView as StoredTensor};
use serde_json::{Value, json};

use crate::config::DecoderConfig;
use crate::error::LoadError;
use crate::source::ModelSource;
use crate::tensor_names::is_projection;
use crate::weights::{SINGLE_FILE, Weights};

/// The form in which the projections are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Twin {
    /// Not quantized, in F32.
    Unquantized,
    /// FP8, a scale for each block of 128 × 128: `weight_scale_inv`, as Qwen publishes them.
    Blocks,
    /// FP8, one scale for each matrix: `weight_scale`.
    PerTensor,
    /// The dequantized weights of [`Twin::Blocks`], in BF16.
    BlocksInBf16,
    /// The dequantized weights of [`Twin::Blocks`], in F32.
    BlocksInF32,
    /// The dequantized weights of [`Twin::PerTensor`], in F32.
    PerTensorInF32,
}

impl Twin {
    fn per_tensor(self) -> bool {
        matches!(self, Self::PerTensor | Self::PerTensorInF32)
    }
}

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Writes into `to` a copy of the single-file model in `from` whose projections were quantized to
/// FP8 and back.
pub fn write_twin(from: &Path, to: &Path, twin: Twin) -> Result<(), LoadError> {
    let source = ModelSource::Dir(from.to_owned());
    let (config, weights) = (DecoderConfig::load(&source)?, Weights::open(&source)?);
    let unwritable =
        |problem: String| LoadError::UnwritableModel { family: config.family.model_type(), problem };
    let mut tensors = Tensors::new();
    for name in weights.tensor_names() {
        let tensor = weights.tensor(name)?;
        if is_projection(name) {
            quantized(&mut tensors, name, tensor.shape, &tensor.to_f32_vec(), twin);
        } else {
            let dtype = tensor.dtype.to_safetensors();
            tensors.insert(name.to_owned(), (dtype, tensor.shape.to_vec(), tensor.bytes.to_vec()));
        }
    }
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| Ok((name, StoredTensor::new(*dtype, shape.clone(), bytes)?)))
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>();
    let file = views.and_then(|views| safetensors::serialize(views, None));
    let file = file.map_err(|error| unwritable(error.to_string()))?;
    fs::create_dir_all(to).map_err(|error| LoadError::io(to, error))?;
    let write = |name: &str, bytes: &[u8]| {
        fs::write(to.join(name), bytes).map_err(|error| LoadError::io(to.join(name), error))
    };
    write(SINGLE_FILE, &file)?;
    let mut json: Value = serde_json::from_slice(&source.read_required("config.json")?)
        .map_err(|source| LoadError::Json { file: "config.json".to_owned(), source })?;
    let mut quantization = json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"});
    match twin {
        Twin::Blocks => {
            quantization["weight_block_size"] = json!([128, 128]);
            json["quantization_config"] = quantization;
        }
        Twin::PerTensor => json["quantization_config"] = quantization,
        Twin::Unquantized | Twin::BlocksInBf16 | Twin::BlocksInF32 | Twin::PerTensorInF32 => {}
    }
    write("config.json", json.to_string().as_bytes())?;
    let generation = source.read_required("generation_config.json")?;
    write("generation_config.json", &generation)
}

/// One projection, quantized and written in the form asked for.
fn quantized(tensors: &mut Tensors, name: &str, shape: &[usize], weights: &[f32], twin: Twin) {
    let (outputs, inputs) = (shape[0], shape[1]);
    let size =
        |i: usize| 0.75 + 0.125 * ((5 * (i / inputs / FP8_BLOCK) + 3 * (i % inputs / FP8_BLOCK)) % 7) as f32;
    let weights: Vec<f32> = weights.iter().enumerate().map(|(i, w)| w * size(i)).collect();
    let mut matrix = Fp8Matrix::quantize(&weights, outputs, inputs);
    let mut scale_shape = vec![fp8_blocks(outputs), fp8_blocks(inputs)];
    if twin.per_tensor() {
        // The largest scale is that of the largest weight, so all codes fit under it.
        let scale = matrix.scales.iter().copied().fold(0.0, f32::max);
        matrix.codes = weights.iter().map(|w| oscar_codec::fp8::quantize(w / scale)).collect();
        matrix.scales.fill(scale);
        scale_shape.clear();
    }
    let expanded = || matrix.blocks().expand(inputs);
    let (dtype, bytes): (Dtype, Vec<u8>) = match twin {
        Twin::Blocks | Twin::PerTensor => (Dtype::F8_E4M3, matrix.codes.clone()),
        Twin::BlocksInBf16 => {
            (Dtype::BF16, expanded().iter().flat_map(|w| bf16::from_f32(*w).to_le_bytes()).collect())
        }
        Twin::Unquantized => (Dtype::F32, weights.iter().flat_map(|w| w.to_le_bytes()).collect()),
        Twin::BlocksInF32 | Twin::PerTensorInF32 => {
            (Dtype::F32, expanded().iter().flat_map(|w| w.to_le_bytes()).collect())
        }
    };
    tensors.insert(name.to_owned(), (dtype, shape.to_vec(), bytes));
    if dtype == Dtype::F8_E4M3 {
        let stem = name.trim_end_matches(".weight");
        let scale_name = format!("{stem}.weight_scale{}", if twin.per_tensor() { "" } else { "_inv" });
        let count = scale_shape.iter().product();
        let bytes = matrix.scales[..count].iter().flat_map(|s| s.to_le_bytes()).collect();
        tensors.insert(scale_name, (Dtype::F32, scale_shape, bytes));
    }
}
