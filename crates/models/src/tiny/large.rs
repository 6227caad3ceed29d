//! Writes random checkpoints of any size, for measurements of loading: published names, BF16, several
//! shards, tensor by tensor, so that no more than a block is in memory.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use half::bf16;
use oscar_codec::random::SplitMix64;
use serde_json::{Map, Value, json};

use super::config_json;
use crate::config::DecoderConfig;
use crate::error::LoadError;
use crate::parallel::in_parallel;
use crate::tensor_names::{RequiredTensor, TensorNames, required_tensors};
use crate::weights::INDEX_FILE;

/// Random values that are repeated: loading does not look at them.
const BLOCK: usize = 1 << 20;

/// Writes `config.json` and the weights into `dir`, which is created. Returns the bytes of all tensors.
pub fn write_large_model(dir: &Path, config: &DecoderConfig, shards: usize) -> Result<u64, LoadError> {
    config.validate()?;
    fs::create_dir_all(dir).map_err(|error| LoadError::io(dir, error))?;
    let write = |name: &str, text: String| {
        let path = dir.join(name);
        fs::write(&path, text).map_err(|error| LoadError::io(path, error))
    };
    let tensors = required_tensors(config, &TensorNames::PREFIXED);
    let total: u64 = tensors.iter().map(bytes).sum();
    let parts = split(tensors, total.div_ceil(shards.max(1) as u64));
    let name = |index: usize| format!("model-{:05}-of-{:05}.safetensors", index + 1, parts.len());
    in_parallel(
        parts.len(),
        |index| {
            let path = dir.join(name(index));
            write_shard(&path, &parts[index]).map_err(|error| LoadError::io(path, error))
        },
        |_| {},
    )?;
    let mut map = Map::new();
    for (index, part) in parts.iter().enumerate() {
        map.extend(part.iter().map(|tensor| (tensor.name.clone(), Value::from(name(index)))));
    }
    write(INDEX_FILE, json!({"metadata": {"total_size": total}, "weight_map": map}).to_string())?;
    // The last file: a folder with it is complete.
    write("config.json", config_json(config).to_string())?;
    Ok(total)
}

fn elements(tensor: &RequiredTensor) -> usize {
    tensor.shape.iter().product()
}

fn bytes(tensor: &RequiredTensor) -> u64 {
    2 * elements(tensor) as u64
}

/// Runs of tensors of about `most` bytes.
fn split(tensors: Vec<RequiredTensor>, most: u64) -> Vec<Vec<RequiredTensor>> {
    let mut parts: Vec<Vec<RequiredTensor>> = vec![Vec::new()];
    let mut size = 0;
    for tensor in tensors {
        if size >= most {
            parts.push(Vec::new());
            size = 0;
        }
        size += bytes(&tensor);
        if let Some(part) = parts.last_mut() {
            part.push(tensor);
        }
    }
    parts
}

fn write_shard(path: &Path, tensors: &[RequiredTensor]) -> std::io::Result<()> {
    let mut header = Map::new();
    let mut end = 0;
    for tensor in tensors {
        let start = end;
        end += bytes(tensor);
        let entry = json!({"dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, end]});
        header.insert(tensor.name.clone(), entry);
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    // Data begins at a multiple of eight bytes.
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = BufWriter::with_capacity(4 << 20, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    let mut random = SplitMix64::new(1);
    let mut unit = |_| random.symmetric();
    let block: Vec<f32> = (0..BLOCK).map(&mut unit).collect();
    for tensor in tensors {
        // Norms near one, matrices that keep the variance of their inputs.
        let (center, spread) = match tensor.shape[..] {
            [_, inputs] => (0.0, (3.0 / inputs as f32).sqrt()),
            _ => (1.0, 0.1),
        };
        let length = elements(tensor).min(BLOCK);
        let values: Vec<u8> =
            block[..length].iter().flat_map(|v| bf16::from_f32(center + spread * v).to_le_bytes()).collect();
        let mut left = bytes(tensor) as usize;
        while left > 0 {
            let now = left.min(values.len());
            file.write_all(&values[..now])?;
            left -= now;
        }
    }
    file.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Family, ModelSource, Weights, tiny::tiny_config};

    #[test]
    fn a_written_model_opens_and_fits_its_configuration() {
        let dir = tempfile::tempdir().unwrap();
        for family in Family::ALL {
            let folder = dir.path().join(family.model_type());
            let config = tiny_config(family);
            let bytes = write_large_model(&folder, &config, 3).unwrap();
            let source = ModelSource::Dir(folder.clone());
            assert_eq!(DecoderConfig::load(&source).unwrap(), config);
            let weights = Weights::open(&source).unwrap();
            weights.check(&config).unwrap();
            assert_eq!(weights.total_bytes(), bytes);
            let shards = fs::read_dir(&folder).unwrap();
            let shards =
                shards.filter(|e| e.as_ref().unwrap().path().extension() == Some("safetensors".as_ref()));
            assert_eq!(shards.count(), 3);
            assert!(weights.tensor_names().all(|name| weights.tensor(name).unwrap().is_finite()));
        }
    }
}
