//! Files that must be refused, each with the message a person would need.

use std::fs;
use std::path::{Path, PathBuf};

use oscar_models::tiny::{WriteOptions, tiny_config, write_random_model};
use oscar_models::{DecoderConfig, Family, LoadError, ModelSource, WeightDtype, Weights};
use proptest::prelude::*;
use serde_json::{Value, json};

pub(crate) const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A tiny Qwen3 model to damage.
struct Victim {
    dir: tempfile::TempDir,
    config: DecoderConfig,
}

impl Victim {
    fn new(shards: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = tiny_config(Family::Qwen3);
        write_random_model(dir.path(), &config, WriteOptions { shards, prefixed: true }, 5).unwrap();
        Self { dir, config }
    }

    fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    fn open(&self) -> Result<Weights, LoadError> {
        Weights::open(&ModelSource::Dir(self.dir.path().to_owned()))
    }

    fn open_error(&self) -> String {
        self.open().unwrap_err().to_string()
    }

    fn check_error(&self, config: &DecoderConfig) -> String {
        self.open().unwrap().check(config).unwrap_err().to_string()
    }

    fn edit_header(&self, edit: impl FnOnce(&mut Value)) {
        edit_header(self.dir.path(), edit);
    }

    fn edit_index(&self, edit: impl FnOnce(&mut Value)) {
        let mut index: Value = serde_json::from_slice(&fs::read(self.path(INDEX)).unwrap()).unwrap();
        edit(&mut index);
        fs::write(self.path(INDEX), index.to_string()).unwrap();
    }
}

fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

/// Rewrites the header of the single weight file; the data stays.
pub(crate) fn edit_header(dir: &Path, edit: impl FnOnce(&mut Value)) {
    let bytes = fs::read(dir.join(WEIGHTS)).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    edit(&mut header);
    let header = header.to_string();
    let mut rewritten = (header.len() as u64).to_le_bytes().to_vec();
    rewritten.extend(header.as_bytes());
    rewritten.extend(&bytes[8 + length..]);
    fs::write(dir.join(WEIGHTS), rewritten).unwrap();
}

#[test]
fn truncated_file() {
    let victim = Victim::new(1);
    let bytes = fs::read(victim.path(WEIGHTS)).unwrap();
    fs::write(victim.path(WEIGHTS), &bytes[..bytes.len() - 100]).unwrap();
    let expected = format!("cut short: {} bytes of {}", bytes.len() - 100, bytes.len());
    assert_says(&victim.open_error(), &[WEIGHTS, &expected, "Download it again"]);

    fs::write(victim.path(WEIGHTS), &bytes[..bytes.len().min(50)]).unwrap();
    assert_says(&victim.open_error(), &["it has 50 bytes but states a header of"]);
    for short in [&bytes[..5], &[]] {
        fs::write(victim.path(WEIGHTS), short).unwrap();
        assert_says(&victim.open_error(), &[&format!("only {} bytes", short.len())]);
    }
}

#[test]
fn trailing_bytes() {
    let victim = Victim::new(1);
    let mut bytes = fs::read(victim.path(WEIGHTS)).unwrap();
    bytes.extend([0; 9]);
    fs::write(victim.path(WEIGHTS), &bytes).unwrap();
    assert_says(&victim.open_error(), &["its header describes"]);
}

#[test]
fn header_length_beyond_all_bounds() {
    for length in [u64::MAX, u64::MAX - 7, 1 << 40, 99_000_000] {
        let victim = Victim::new(1);
        let mut bytes = fs::read(victim.path(WEIGHTS)).unwrap();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        fs::write(victim.path(WEIGHTS), bytes).unwrap();
        assert_says(&victim.open_error(), &[WEIGHTS, &format!("states a header of {length}")]);
    }
}

#[test]
fn header_that_is_not_json() {
    let victim = Victim::new(1);
    let mut bytes = fs::read(victim.path(WEIGHTS)).unwrap();
    bytes[8] = b'!';
    fs::write(victim.path(WEIGHTS), bytes).unwrap();
    assert_says(&victim.open_error(), &[WEIGHTS, "JSON"]);
}

#[test]
fn overlapping_offsets() {
    let victim = Victim::new(1);
    victim.edit_header(|header| {
        let norm = header["model.norm.weight"]["data_offsets"].clone();
        header["model.layers.0.input_layernorm.weight"]["data_offsets"] = norm;
    });
    assert_says(&victim.open_error(), &[WEIGHTS, "overlaps another tensor"]);
}

#[test]
fn data_shorter_than_its_shape() {
    let victim = Victim::new(1);
    victim.edit_header(|header| header["model.norm.weight"]["shape"] = json!([65]));
    assert_says(&victim.open_error(), &["not as long as its shape"]);

    let victim = Victim::new(1);
    victim.edit_header(|header| header["model.norm.weight"]["shape"] = json!([u64::MAX, u64::MAX]));
    assert_says(&victim.open_error(), &[WEIGHTS, "overflow"]);
}

#[test]
fn unreadable_dtype() {
    let victim = Victim::new(1);
    victim.edit_header(|header| header["model.norm.weight"]["dtype"] = json!("I16"));
    assert_says(&victim.check_error(&victim.config), &["model.norm.weight is I16", "BF16, F16 or F32"]);
    let weights = victim.open().unwrap();
    assert!(matches!(weights.tensor("model.norm.weight"), Err(LoadError::UnsupportedDtype { .. })));
    assert!(matches!(weights.tensor("absent"), Err(LoadError::TensorMissing { .. })));
}

#[test]
fn fp8_weights() {
    // Half the bytes of BF16, so the shape must double for the file itself to be sound.
    let victim = Victim::new(1);
    victim.edit_header(|header| {
        header["model.norm.weight"]["dtype"] = json!("F8_E4M3");
        header["model.norm.weight"]["shape"] = json!([128]);
    });
    let message = victim.check_error(&victim.config);
    assert_says(&message, &["model.norm.weight is F8_E4M3", "[128], the configuration needs [64]"]);
}

#[test]
fn quantized_checkpoint_without_a_quantization_config() {
    let victim = Victim::new(1);
    victim.edit_header(|header| {
        let tensors = header.as_object_mut().unwrap();
        let matrix = tensors.remove("model.layers.0.mlp.up_proj.weight").unwrap();
        tensors.insert("model.layers.0.mlp.up_proj.qweight".to_owned(), matrix);
    });
    assert_says(&victim.check_error(&victim.config), &["quantized", "up_proj.qweight"]);
}

#[test]
fn quantization_config() {
    let victim = Victim::new(1);
    let mut config: Value = serde_json::from_slice(&fs::read(victim.path("config.json")).unwrap()).unwrap();
    config["quantization_config"] = json!({"quant_method": "gptq", "activation_scheme": "dynamic"});
    fs::write(victim.path("config.json"), config.to_string()).unwrap();
    let error = DecoderConfig::load(&ModelSource::Dir(victim.dir.path().to_owned())).unwrap_err();
    assert_says(&error.to_string(), &["quantized", "gptq", "unquantized checkpoint"]);
}

#[test]
fn all_mismatches_come_in_one_error() {
    let victim = Victim::new(1);
    let wrong = DecoderConfig {
        intermediate_size: 100,
        vocab_size: 130,
        tie_word_embeddings: false,
        ..victim.config.clone()
    };
    let message = victim.check_error(&wrong);
    assert_says(
        &message,
        &[
            "model.embed_tokens.weight is [128, 64], the configuration needs [130, 64]",
            "model.layers.0.mlp.gate_proj.weight is [96, 64], the configuration needs [100, 64]",
            "model.layers.1.mlp.down_proj.weight is [64, 96]",
            "lm_head.weight is missing (a model that shares its embedding must say",
        ],
    );

    let deeper = DecoderConfig { layers: 4, ..victim.config.clone() };
    let message = victim.check_error(&deeper);
    assert_says(&message, &["model.layers.2.input_layernorm.weight is missing", "and 12 more (22 in all)"]);
}

#[test]
fn missing_files() {
    let victim = Victim::new(1);
    fs::remove_file(victim.path(WEIGHTS)).unwrap();
    assert_says(&victim.open_error(), &[&victim.dir.path().display().to_string(), WEIGHTS, INDEX]);
    fs::remove_file(victim.path("config.json")).unwrap();
    let error = DecoderConfig::load(&ModelSource::Dir(victim.dir.path().to_owned())).unwrap_err();
    assert_says(&error.to_string(), &["has no config.json"]);
}

#[test]
fn index_naming_a_missing_shard() {
    let victim = Victim::new(3);
    fs::remove_file(victim.path("model-00002-of-00003.safetensors")).unwrap();
    assert_says(&victim.open_error(), &[INDEX, "shard model-00002-of-00003.safetensors is missing"]);
}

#[test]
fn index_pointing_out_of_the_folder() {
    for shard in ["../other/model.safetensors", "/etc/model.safetensors", "..", "sub/model.safetensors"] {
        let victim = Victim::new(2);
        victim.edit_index(|index| index["weight_map"]["model.norm.weight"] = json!(shard));
        assert!(matches!(victim.open(), Err(LoadError::UnsafeFileName { name }) if name == shard));
    }
}

#[test]
fn index_placing_a_tensor_in_the_wrong_shard() {
    let victim = Victim::new(2);
    victim.edit_index(|index| {
        index["weight_map"]["model.norm.weight"] = json!("model-00001-of-00002.safetensors");
        index["weight_map"]["model.ghost.weight"] = json!("model-00001-of-00002.safetensors");
    });
    let message = victim.open_error();
    assert_says(
        &message,
        &["model.norm.weight is not in model-00001-of-00002.safetensors", "model.ghost.weight"],
    );
}

#[test]
fn index_that_is_not_one() {
    let victim = Victim::new(2);
    for text in ["{}", "[]", "{\"weight_map\": {\"a\": 3}}", "\u{0}"] {
        fs::write(victim.path(INDEX), text).unwrap();
        assert_says(&victim.open_error(), &[INDEX, "is not the JSON expected"]);
    }
}

#[test]
fn truncated_shard_is_named() {
    let victim = Victim::new(2);
    let shard = victim.path("model-00002-of-00002.safetensors");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    assert_says(&victim.open_error(), &["model-00002-of-00002.safetensors", "cut short"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Damage anywhere in the header never panics, and whatever still opens is inside its file.
    #[test]
    fn damaged_headers_never_panic(position in 0usize..4000, value in any::<u8>()) {
        let dir = tempfile::tempdir().unwrap();
        let config = DecoderConfig { dtype: Some(WeightDtype::F32), layers: 1, ..tiny_config(Family::Llama) };
        write_random_model(dir.path(), &config, WriteOptions::default(), 5).unwrap();
        let path = dir.path().join(WEIGHTS);
        let mut bytes = fs::read(&path).unwrap();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes[position % header] = value;
        fs::write(&path, bytes).unwrap();
        if let Ok(weights) = Weights::open(&ModelSource::Dir(dir.path().to_owned())) {
            // Either answer is right, depending on what was hit; neither may panic.
            let _ = weights.check(&config);
            for name in weights.tensor_names() {
                if let Ok(tensor) = weights.tensor(name) {
                    prop_assert_eq!(tensor.len(), tensor.shape.iter().product::<usize>());
                }
            }
            weights.fingerprint();
        }
    }
}

/// Overwrites the first element of a BF16 tensor.
fn poison(victim: &Victim, tensor: &str, bits: u16) {
    let mut bytes = fs::read(victim.path(WEIGHTS)).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    assert_eq!(header[tensor]["dtype"], "BF16", "{tensor}");
    let start = 8 + length + header[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[start..start + 2].copy_from_slice(&bits.to_le_bytes());
    fs::write(victim.path(WEIGHTS), bytes).unwrap();
}

#[test]
fn weights_that_are_no_numbers_are_named() {
    let matrix = "model.layers.1.mlp.down_proj.weight";
    let norm = "model.layers.0.input_layernorm.weight";
    for bits in [0x7fc0u16, 0x7f80, 0xff80] {
        let victim = Victim::new(1);
        let weights = victim.open().unwrap();
        assert!(weights.matrix(matrix).is_ok() && weights.vector(norm).is_ok());
        poison(&victim, matrix, bits);
        poison(&victim, norm, bits);
        let weights = victim.open().unwrap();
        assert_says(&weights.matrix(matrix).unwrap_err().to_string(), &[matrix, "NaN or infinite"]);
        assert_says(&weights.vector(norm).unwrap_err().to_string(), &[norm, "NaN or infinite"]);
    }
}

#[cfg(unix)]
#[test]
fn pipes_are_not_read() {
    let victim = Victim::new(1);
    fs::remove_file(victim.path("config.json")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(victim.path("config.json")).status();
    assert!(made.unwrap().success());
    let source = ModelSource::Dir(victim.dir.path().to_owned());
    assert_says(&DecoderConfig::load(&source).unwrap_err().to_string(), &["config.json", "no regular file"]);
}
