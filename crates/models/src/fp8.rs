//! FP8 checkpoints (`quant_method` `fp8`, and `compressed-tensors` with 8-bit floats): matrices of
//! E4M3 codes beside their scales.
//!
//! A matrix `X.weight` has `X.weight_scale_inv` or `X.weight_scale`: one scale for each block of
//! 128 × 128 weights, one for each output, or one for the whole matrix. Both names hold the factor
//! of a code. How the
//! checkpoint's authors quantized activations (`activation_scheme`, `input_scale`) does not matter:
//! activations are not quantized here.

use std::borrow::Cow;

use oscar_backend::{FP8_BLOCK, Fp8Blocks, Fp8Matrix, ScaleGrid};
use serde_json::Value;

use crate::error::LoadError;
use crate::fused;
use crate::tensor::TensorView;

/// Endings of the tensor names that FP8 checkpoints have beside `.weight`.
pub(crate) const SCALE_ENDINGS: [&str; 2] = [".weight_scale_inv", ".weight_scale"];
const INPUT_SCALE_ENDING: &str = ".input_scale";

/// Refuses every `quantization_config` except those of FP8 weights that are supported.
pub(crate) fn check_config(quantization: &Value) -> Result<(), LoadError> {
    let text = |field: &str| quantization.get(field).and_then(Value::as_str);
    let method = text("quant_method").unwrap_or("unnamed method");
    match method {
        "fp8" => {}
        "compressed-tensors" => return check_compressed_tensors(quantization),
        _ => return Err(LoadError::Quantized { method: method.to_owned() }),
    }
    let refuse = |field: &str, problem: String| {
        Err(LoadError::config_field(&format!("quantization_config.{field}"), problem))
    };
    match quantization.get("fmt") {
        None | Some(Value::Null) => {}
        // MiniMax spells it as torch does.
        Some(fmt) if *fmt == "e4m3" || *fmt == "float8_e4m3fn" => {}
        Some(other) => return refuse("fmt", format!("is {other}; only \"e4m3\" is read")),
    }
    match quantization.get("weight_block_size") {
        None | Some(Value::Null) => Ok(()),
        Some(size) if is_block(size) => Ok(()),
        Some(size) => refuse(
            "weight_block_size",
            format!("is {size}; only [{FP8_BLOCK}, {FP8_BLOCK}], or none for one scale a matrix, is read"),
        ),
    }
}

fn is_block(size: &Value) -> bool {
    *size == serde_json::json!([FP8_BLOCK, FP8_BLOCK])
}

/// Refuses everything of compressed-tensors except 8-bit floats with a scale for each output, each
/// block of 128 × 128 or each matrix. How activations were quantized does not matter.
fn check_compressed_tensors(quantization: &Value) -> Result<(), LoadError> {
    let refuse = |field: String, value: &Value, reads: &str| {
        let field = format!("quantization_config.{field}");
        Err(LoadError::config_field(&field, format!("is {value}; only {reads} is read")))
    };
    let null = Value::Null;
    let format = quantization.get("format").unwrap_or(&null);
    if *format != "float-quantized" && !format.is_null() {
        return refuse("format".into(), format, "\"float-quantized\"");
    }
    let cache = quantization.get("kv_cache_scheme").unwrap_or(&null);
    if !cache.is_null() {
        return refuse("kv_cache_scheme".into(), cache, "null");
    }
    let Some(groups) = quantization.get("config_groups").and_then(Value::as_object) else {
        return refuse("config_groups".into(), &null, "a list of groups");
    };
    for (name, group) in groups {
        let weights = group.get("weights").unwrap_or(&null);
        let of = |field: &str| weights.get(field).unwrap_or(&null);
        let at = |field: &str| format!("config_groups.{name}.weights.{field}");
        if *of("num_bits") != 8 {
            return refuse(at("num_bits"), of("num_bits"), "8");
        }
        if *of("type") != "float" {
            return refuse(at("type"), of("type"), "\"float\"");
        }
        match of("strategy").as_str() {
            Some("channel" | "tensor") => {}
            Some("block") if is_block(of("block_structure")) => {}
            Some("block") => return refuse(at("block_structure"), of("block_structure"), "[128,128]"),
            _ => return refuse(at("strategy"), of("strategy"), "channel, block or tensor"),
        }
    }
    Ok(())
}

/// Names of the scales that a matrix may have.
pub(crate) fn scale_names(weight: &str) -> impl Iterator<Item = String> {
    let stem = weight.strip_suffix(".weight").unwrap_or(weight).to_owned();
    SCALE_ENDINGS.into_iter().map(move |ending| format!("{stem}{ending}"))
}

/// Whether this tensor belongs to the quantization of a parameter and is no parameter itself.
pub(crate) fn belongs_to_quantization(name: &str) -> bool {
    let scales = SCALE_ENDINGS.iter().any(|ending| name.ends_with(ending));
    scales || name.ends_with(INPUT_SCALE_ENDING) || fused::is_scales(name)
}

/// The scales of a matrix, or a description of what is wrong with the scale tensor.
pub(crate) fn read_scales(
    matrix: &[usize],
    scales: &TensorView<'_>,
) -> Result<(Vec<f32>, ScaleGrid), String> {
    let &[outputs, inputs] = matrix else { return Err("only matrices are read in FP8".into()) };
    let values = scales.to_f32_vec();
    if let Some(bad) = values.iter().find(|s| !s.is_finite()) {
        return Err(format!("one of them is {bad}"));
    }
    let blocks = ScaleGrid::Blocks.shape(outputs, inputs);
    for grid in [ScaleGrid::Blocks, ScaleGrid::Channels] {
        if scales.shape == grid.shape(outputs, inputs) {
            return Ok((values, grid));
        }
    }
    match values.as_slice() {
        [one] => Ok((vec![*one; blocks[0] * blocks[1]], ScaleGrid::Blocks)),
        _ => Err(format!(
            "they are {:?}; a matrix of {matrix:?} has {blocks:?} for blocks of {FP8_BLOCK} × {FP8_BLOCK}, \
             [{outputs}, 1] for channels, or a single one",
            scales.shape
        )),
    }
}

/// An FP8 matrix with a scale for every block: from the file, or quantized while loading.
#[derive(Debug)]
pub struct Fp8Weights<'a> {
    pub(crate) shape: &'a [usize],
    pub(crate) codes: Cow<'a, [u8]>,
    pub(crate) scales: Vec<f32>,
    pub(crate) grid: ScaleGrid,
}

impl<'a> Fp8Weights<'a> {
    /// The matrix as an FP8 checkpoint would hold it; `None` if some weight is NaN.
    pub(crate) fn quantize(view: &TensorView<'a>) -> Option<Self> {
        let weights = view.to_f32_vec();
        if !weights.iter().all(|w| w.is_finite()) {
            return None;
        }
        let Fp8Matrix { codes, scales } = Fp8Matrix::quantize(&weights, view.shape[0], view.shape[1]);
        Some(Self { shape: view.shape, codes: Cow::Owned(codes), scales, grid: ScaleGrid::Blocks })
    }

    pub fn blocks(&self) -> Fp8Blocks<'_> {
        Fp8Blocks { codes: &self.codes, scales: &self.scales, grid: self.grid }
    }

    /// The weights in f32.
    pub fn expand(&self) -> Vec<f32> {
        self.blocks().expand(self.shape[1])
    }
}

/// Whether any code is NaN.
pub(crate) fn holds_nan(codes: &[u8]) -> bool {
    // Whole chunks without an early exit, so that the compiler compares many codes at a time.
    codes.chunks(4096).any(|chunk| chunk.iter().fold(false, |found, code| found | (code & 0x7f == 0x7f)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::WeightDtype;
    use serde_json::json;

    #[test]
    fn published_configurations_are_read() {
        for config in [
            json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                   "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}),
            json!({"quant_method": "fp8", "activation_scheme": "static"}),
            json!({"quant_method": "fp8", "weight_block_size": null}),
            json!({"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]}),
            json!({"quant_method": "compressed-tensors", "format": "float-quantized", "kv_cache_scheme": null,
                   "config_groups": {"group_0": {"targets": ["Linear"], "weights":
                       {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true}}}}),
        ] {
            check_config(&config).unwrap();
        }
    }

    #[test]
    fn others_are_refused_by_field() {
        for (config, says) in [
            (json!({"quant_method": "fp8", "fmt": "e5m2"}), "quantization_config.fmt` is \"e5m2\""),
            (json!({"quant_method": "fp8", "fmt": 43}), "quantization_config.fmt` is 43"),
            (json!({"quant_method": "fp8", "weight_block_size": [64, 128]}), "is [64,128]; only [128, 128]"),
            (json!({"quant_method": "fp8", "weight_block_size": "128"}), "weight_block_size"),
            (json!({"quant_method": "gptq", "bits": 4}), "gptq"),
            (json!({"quant_method": "compressed-tensors"}), "config_groups"),
            (json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}), "pack-quantized"),
            (
                json!({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights":
                    {"num_bits": 8, "type": "int", "strategy": "channel"}}}}),
                "config_groups.a.weights.type` is \"int\"",
            ),
            (
                json!({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights":
                    {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]}}}}),
                "block_structure` is [64,64]",
            ),
            (json!({}), "unnamed method"),
        ] {
            let message = check_config(&config).unwrap_err().to_string();
            assert!(message.contains(says), "{message}");
        }
    }

    #[test]
    fn a_single_scale_is_that_of_every_block() {
        let one = 0.5f32.to_le_bytes();
        for shape in [&[][..], &[1], &[1, 1]] {
            let view = TensorView { dtype: WeightDtype::F32, shape, bytes: &one };
            assert_eq!(read_scales(&[129, 256], &view).unwrap(), (vec![0.5; 4], ScaleGrid::Blocks));
        }
    }

    #[test]
    fn a_scale_for_each_output_is_recognized() {
        let bytes: Vec<u8> = [1.0f32, 2.0, 3.0].iter().flat_map(|s| s.to_le_bytes()).collect();
        let view = TensorView { dtype: WeightDtype::F32, shape: &[3, 1], bytes: &bytes };
        assert_eq!(read_scales(&[3, 256], &view).unwrap(), (vec![1.0, 2.0, 3.0], ScaleGrid::Channels));
        assert!(read_scales(&[4, 256], &view).unwrap_err().contains("[4, 1] for channels"));
    }

    #[test]
    fn nan_codes_are_found_wherever_they_are() {
        let mut codes = vec![0x7e; 10_000];
        assert!(!holds_nan(&codes) && !holds_nan(&[]));
        for (at, code) in [(0, 0x7f), (9_999, 0xff), (4096, 0x7f)] {
            let before = std::mem::replace(&mut codes[at], code);
            assert!(holds_nan(&codes), "{at}");
            codes[at] = before;
        }
    }
}
