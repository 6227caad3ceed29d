//! FP8 checkpoints: what they are delivered as, what they take, and the ways they can be wrong.

use crate::corrupted::{WEIGHTS, edit_header};
use std::fs;
use std::path::Path;

use oscar_backend::WeightFormat;
use oscar_models::tiny::fp8::{Twin, write_twin};
use oscar_models::tiny::{WriteOptions, tiny_config, write_random_model};
use oscar_models::{
    DecoderConfig, Family, Holding, LayerMatrix, LoadError, MatrixView, ModelSource, Projection, Weights,
};
use serde_json::{Value, json};

const GATE: &str = "model.layers.0.mlp.gate_proj.weight";
const SCALES: &str = "model.layers.0.mlp.gate_proj.weight_scale_inv";

/// Sizes of which some are multiples of a block's and some are not.
fn config() -> DecoderConfig {
    DecoderConfig {
        hidden_size: 160,
        intermediate_size: 256,
        head_dim: 32,
        query_heads: 8,
        kv_heads: 2,
        ..tiny_config(Family::Qwen3)
    }
}

fn twin(config: &DecoderConfig, twin: Twin) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_random_model(&dir.path().join("plain"), config, WriteOptions::default(), 3).unwrap();
    write_twin(&dir.path().join("plain"), dir.path(), twin).unwrap();
    dir
}

fn open(dir: &Path) -> (DecoderConfig, Weights) {
    let source = ModelSource::Dir(dir.to_owned());
    (DecoderConfig::load(&source).unwrap(), Weights::open(&source).unwrap())
}

fn expanded(weights: &Weights, name: &str) -> Vec<f32> {
    weights.matrix(name).unwrap().to_f32_vec()
}

#[test]
fn codes_times_scales_are_the_weights() {
    for (coded, plain) in [(Twin::Blocks, Twin::BlocksInF32), (Twin::PerTensor, Twin::PerTensorInF32)] {
        let (coded, plain) = (twin(&config(), coded), twin(&config(), plain));
        let (config, weights) = open(coded.path());
        weights.check(&config).unwrap();
        assert!(config.fp8_weights);
        let (plain_config, reference) = open(plain.path());
        assert_eq!(weights.parameter_count(), reference.parameter_count());
        assert_eq!(plain_config, DecoderConfig { fp8_weights: false, ..config.clone() });
        for projection in Projection::of(&config) {
            let name = weights.names().weight(1, projection);
            assert!(matches!(weights.matrix(&name), Ok(MatrixView::Fp8(_))), "{name}");
            assert!(matches!(weights.tensor(&name), Err(LoadError::UnsupportedDtype { .. })));
            assert_eq!(expanded(&weights, &name), expanded(&reference, &name), "{name}");
        }
    }
}

#[test]
fn what_can_stay_fp8_does() {
    let dir = twin(&config(), Twin::Blocks);
    let (config, weights) = open(dir.path());
    let formats = |weights: &Weights, rotated| {
        let stays = |m| weights.delivered(&config, 0, m, rotated) == WeightFormat::Fp8;
        LayerMatrix::of(&config).into_iter().map(stays).collect::<Vec<_>>()
    };
    // Keys and values have 64 rows: a block of qkv would reach over the seam. Gate and up have 256.
    assert_eq!(formats(&weights, false), [false, true, true, true]);
    // A folded rotation needs the numbers themselves.
    assert_eq!(formats(&weights, true), [false, false, true, true]);
    let line = weights.describe_fp8(&config, true, true).unwrap();
    // Hidden states of 160: gate and up would be multiplied in FP8 if they were of a multiple of
    // 64.
    for part in
        ["the checkpoint's: down (", "expanded: qkv (the value rotation is folded in), output (", "gate_up"]
    {
        assert!(line.contains(part), "{line}");
    }
    let line = weights.describe_fp8(&config, false, false).unwrap();
    assert!(line.contains("output, gate_up, down, expanded on this device"), "{line}");

    let device = |fp8| Holding { fp8, fp8_experts: fp8, mxfp4_experts: false, element_bytes: 2 };
    let plain = weights.held_bytes(&config, false, device(false));
    let saved = |rotated| plain - weights.held_bytes(&config, rotated, device(true));
    // A byte an element, less four for each block.
    let down_or_output = 160 * 256 - 4 * 4;
    assert_eq!(saved(true), 2 * down_or_output);
    assert_eq!(saved(false), 2 * (2 * down_or_output));
    let vectors = 2 * (2 * 160 + 2 * 32) + 160;
    assert_eq!(plain, 2 * (weights.parameter_count() - vectors) + 4 * vectors);

    let weights = weights.delivered_as(WeightFormat::Bf16);
    assert_eq!(formats(&weights, false), [false; 4]);
    assert_eq!(weights.held_bytes(&config, false, device(true)), plain);
    assert!(weights.describe_fp8(&config, false, true).unwrap().contains("all expanded"));
}

#[test]
fn plain_weights_can_be_quantized_while_loading() {
    let dir = twin(&config(), Twin::BlocksInBf16);
    let (config, weights) = open(dir.path());
    assert_eq!(weights.describe_fp8(&config, false, true), None);
    let weights = weights.delivered_as(WeightFormat::Fp8);
    let (_stored, stored) = {
        let dir = twin(&config, Twin::Blocks);
        let (_, weights) = open(dir.path());
        (dir, weights)
    };
    for matrix in LayerMatrix::of(&config) {
        for rotated in [false, true] {
            let format = weights.delivered(&config, 1, matrix, rotated);
            assert_eq!(format, stored.delivered(&config, 1, matrix, rotated), "{matrix:?}");
        }
    }
    assert!(matches!(weights.matrix(GATE), Ok(MatrixView::Fp8(_))));
    assert!(matches!(weights.matrix("model.embed_tokens.weight"), Ok(MatrixView::Unquantized(_))));
    let line = weights.describe_fp8(&config, false, true).unwrap();
    assert!(line.contains("quantized now: output, down"), "{line}");
}

/// Writes bytes over the beginning of a tensor.
fn edit_data(dir: &Path, name: &str, bytes: &[u8]) {
    let mut file = fs::read(dir.join(WEIGHTS)).unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
    let at = 8 + length + header[name]["data_offsets"][0].as_u64().unwrap() as usize;
    file[at..at + bytes.len()].copy_from_slice(bytes);
    fs::write(dir.join(WEIGHTS), file).unwrap();
}

fn check_error(dir: &Path) -> String {
    let (config, weights) = open(dir);
    weights.check(&config).unwrap_err().to_string()
}

#[test]
fn missing_scales_are_named() {
    let dir = twin(&config(), Twin::Blocks);
    edit_header(dir.path(), |header| {
        let scales = header.as_object_mut().unwrap().remove(SCALES).unwrap();
        header["elsewhere"] = scales;
    });
    let message = check_error(dir.path());
    assert!(message.contains(&format!("{GATE} is FP8 without its scales: {SCALES} or")), "{message}");
}

#[test]
fn scales_of_another_shape_are_refused() {
    let dir = twin(&config(), Twin::Blocks);
    edit_header(dir.path(), |header| header[SCALES]["shape"] = json!([4]));
    let message = check_error(dir.path());
    for part in [SCALES, "they are [4]", "has [2, 2]"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn scales_that_are_no_numbers_are_refused() {
    for (bad, says) in [(f32::NAN, "one of them is NaN"), (f32::INFINITY, "one of them is inf")] {
        let dir = twin(&config(), Twin::Blocks);
        edit_data(dir.path(), SCALES, &bad.to_le_bytes());
        let message = check_error(dir.path());
        assert!(message.contains(SCALES) && message.contains(says), "{message}");
        let (_, weights) = open(dir.path());
        assert!(matches!(weights.matrix(GATE), Err(LoadError::BadScales { name, .. }) if name == GATE));
    }
}

#[test]
fn codes_that_are_no_numbers_are_refused() {
    let dir = twin(&config(), Twin::Blocks);
    edit_data(dir.path(), GATE, &[0x11, 0xff]);
    let (config, weights) = open(dir.path());
    weights.check(&config).unwrap();
    assert!(matches!(weights.matrix(GATE), Err(LoadError::NanWeights { name }) if name == GATE));
}

#[test]
fn fp8_where_it_cannot_be_is_refused() {
    // A norm of bytes.
    let dir = twin(&config(), Twin::Blocks);
    let name = "model.layers.0.self_attn.q_norm.weight";
    edit_header(dir.path(), |header| {
        // Two bytes each in the file: twice as many codes.
        header[name]["dtype"] = json!("F8_E4M3");
        header[name]["shape"] = json!([64]);
    });
    let message = check_error(dir.path());
    assert!(message.contains(&format!("{name} is FP8 without its scales")), "{message}");

    // FP8 that config.json does not speak of.
    let dir = twin(&config(), Twin::Blocks);
    fs::copy(dir.path().join("plain/config.json"), dir.path().join("config.json")).unwrap();
    let message = check_error(dir.path());
    assert!(message.contains("not stated, but the file holds"), "{message}");
}

#[test]
fn other_formats_are_refused_by_name() {
    let dir = twin(&config(), Twin::Blocks);
    let path = dir.path().join("config.json");
    let original: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (field, value, says) in [
        ("fmt", json!("e5m2"), "`quantization_config.fmt` is \"e5m2\"; only \"e4m3\""),
        ("weight_block_size", json!([64, 64]), "only [128, 128]"),
        ("quant_method", json!("awq"), "quantization_config: awq"),
    ] {
        let mut changed = original.clone();
        changed["quantization_config"][field] = value;
        fs::write(&path, changed.to_string()).unwrap();
        let error = DecoderConfig::load(&ModelSource::Dir(dir.path().to_owned())).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}
