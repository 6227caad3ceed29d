//! FP8 checkpoints (`quant_method: "fp8"`): matrices of E4M3 codes beside their scales.
//!
//! A matrix `X.weight` has `X.weight_scale_inv` or `X.weight_scale`: one scale for each block of
//! 128 × 128 weights, or one for the whole matrix. Both names hold the factor of a code. How the
//! checkpoint's authors quantized activations (`activation_scheme`, `input_scale`) does not matter:
//! activations are not quantized here.

use std::borrow::Cow;

use oscar_backend::{FP8_BLOCK, Fp8Blocks, Fp8Matrix, fp8_blocks};
use serde_json::Value;

use crate::error::LoadError;
use crate::tensor::TensorView;

/// Endings of the tensor names that FP8 checkpoints have beside `.weight`.
pub(crate) const SCALE_ENDINGS: [&str; 2] = [".weight_scale_inv", ".weight_scale"];
const INPUT_SCALE_ENDING: &str = ".input_scale";

/// Refuses every `quantization_config` except those of FP8 weights that are supported.
pub(crate) fn check_config(quantization: &Value) -> Result<(), LoadError> {
    let text = |field: &str| quantization.get(field).and_then(Value::as_str);
    let method = text("quant_method").unwrap_or("unnamed method");
    if method != "fp8" {
        return Err(LoadError::Quantized { method: method.to_owned() });
    }
    let refuse = |field: &str, problem: String| {
        Err(LoadError::config_field(&format!("quantization_config.{field}"), problem))
    };
    match quantization.get("fmt") {
        None | Some(Value::Null) => {}
        Some(fmt) if *fmt == "e4m3" => {}
        Some(other) => return refuse("fmt", format!("is {other}; only \"e4m3\" is read")),
    }
    match quantization.get("weight_block_size") {
        None | Some(Value::Null) => Ok(()),
        Some(size) if *size == serde_json::json!([FP8_BLOCK, FP8_BLOCK]) => Ok(()),
        Some(size) => refuse(
            "weight_block_size",
            format!("is {size}; only [{FP8_BLOCK}, {FP8_BLOCK}], or none for one scale a matrix, is read"),
        ),
    }
}

/// Names of the scales that a matrix may have.
pub(crate) fn scale_names(weight: &str) -> impl Iterator<Item = String> {
    let stem = weight.strip_suffix(".weight").unwrap_or(weight).to_owned();
    SCALE_ENDINGS.into_iter().map(move |ending| format!("{stem}{ending}"))
}

/// Whether this tensor belongs to the quantization of a parameter and is no parameter itself.
pub(crate) fn belongs_to_quantization(name: &str) -> bool {
    SCALE_ENDINGS.iter().any(|ending| name.ends_with(ending)) || name.ends_with(INPUT_SCALE_ENDING)
}

/// The scale of every block of a matrix, or a description of what is wrong with the scale tensor.
pub(crate) fn block_scales(matrix: &[usize], scales: &TensorView<'_>) -> Result<Vec<f32>, String> {
    let &[outputs, inputs] = matrix else { return Err("only matrices are read in FP8".into()) };
    let grid = [fp8_blocks(outputs), fp8_blocks(inputs)];
    let values = scales.to_f32_vec();
    if let Some(bad) = values.iter().find(|s| !s.is_finite()) {
        return Err(format!("one of them is {bad}"));
    }
    if scales.shape == grid {
        return Ok(values);
    }
    match values.as_slice() {
        [one] => Ok(vec![*one; grid[0] * grid[1]]),
        _ => Err(format!(
            "they are {:?}; a matrix of {matrix:?} has {grid:?} for blocks of {FP8_BLOCK} × {FP8_BLOCK}, or a single one",
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
}

impl<'a> Fp8Weights<'a> {
    /// The matrix as an FP8 checkpoint would hold it; `None` if some weight is NaN.
    pub(crate) fn quantize(view: &TensorView<'a>) -> Option<Self> {
        let weights = view.to_f32_vec();
        if !weights.iter().all(|w| w.is_finite()) {
            return None;
        }
        let Fp8Matrix { codes, scales } = Fp8Matrix::quantize(&weights, view.shape[0], view.shape[1]);
        Some(Self { shape: view.shape, codes: Cow::Owned(codes), scales })
    }

    pub fn blocks(&self) -> Fp8Blocks<'_> {
        Fp8Blocks { codes: &self.codes, scales: &self.scales }
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
            (json!({"quant_method": "compressed-tensors"}), "compressed-tensors"),
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
            assert_eq!(block_scales(&[129, 256], &view).unwrap(), [0.5; 4]);
        }
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
