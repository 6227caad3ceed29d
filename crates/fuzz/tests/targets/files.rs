//! Files of models: configuration, weights, rotations, official `.pt` files.

use crate::{corpus, folder};
use oscar_calibrate::RotationFile;
use oscar_calibrate::zoo::{Limits, ZooFile};
use oscar_fuzz::fuzz;
use oscar_models::tiny::{WriteOptions, tiny_config, write_random_model};
use oscar_models::{DecoderConfig, Family, ModelSource, Weights};
use std::io::Cursor;

#[test]
fn configurations() {
    fuzz("configurations", &corpus("corpus/config", ".json"), 20_000, |bytes| {
        if let Ok(config) = DecoderConfig::from_json(bytes) {
            config.validate().unwrap();
        }
    });
}

#[test]
fn weights() {
    let dir = tempfile::tempdir().unwrap();
    let config = tiny_config(Family::Qwen3);
    write_random_model(dir.path(), &config, WriteOptions { shards: 1, prefixed: true }, 5).unwrap();
    let path = dir.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let source = ModelSource::Dir(dir.path().to_owned());
    fuzz("weights", &[whole], 1500, |bytes| {
        // A new file each time: the one before may still be mapped.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
        let Ok(weights) = Weights::open(&source) else { return };
        if weights.check(&config).is_ok() {
            for name in weights.tensor_names().map(str::to_owned).collect::<Vec<_>>() {
                let _ = weights.matrix(&name).map(|matrix| matrix.to_f32_vec());
            }
        }
    });
}

#[test]
fn rotations() {
    let whole = std::fs::read(folder("../../models/oscar-15m/rotations.safetensors")).unwrap();
    fuzz("rotations", &[whole], 300, |bytes| {
        let _ = RotationFile::read(&mut Cursor::new(bytes), bytes.len() as u64);
    });
}

#[test]
fn official_files() {
    fuzz("official_files", &corpus("../calibrate/tests/fixtures", ".pt"), 4000, |bytes| {
        let _ = ZooFile::from_bytes(bytes.to_vec(), &Limits::default());
    });
}
