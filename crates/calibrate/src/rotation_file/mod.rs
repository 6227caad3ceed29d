//! Our rotation files: a safetensors file that holds everything a cache needs to know about a
//! model's heads.
//!
//! | tensor (f32) | shape | |
//! |---|---|---|
//! | `key_rotation`, `value_rotation` | `[layers, H, d, d]` | H is 1 when a layer shares its rotation, else the KV heads |
//! | `key_eigenvalues`, `value_eigenvalues` | `[layers, H, d]` | optional, ascending |
//! | `key_mean` | `[layers, kv_heads, d]` | only when keys are centred |
//! | `key_clip`, `value_clip` | `[layers, kv_heads]` | quantile of \|x\|, 0 is no clipping |
//! | `widths` | `[tables, L, kv_heads, 2]` | optional; code widths of keys and values, a table for each mean in the header |
//! | `harm`, `harm_error` | `[L, kv_heads, 2, 4]` | optional; measured harm of each width, and its standard error |
//! | `harm_absent` | `[L, kv_heads]` | optional; that of a head without history, −1 where it was not measured |
//!
//! and [`Metadata`] in the header. L counts the layers that have widths: all layers, or those that
//! the header field `width_layers` lists (`5,11,17`). Sliding layers are never quantized and have no
//! entry. [`RotationFile::check_model`] refuses a file whose list is not that of the model.
//!
//! **Invariant:** a file appears whole or not at all, the same contents give the same bytes, and a
//! file that was read has passed every check: checksum, sizes, finiteness, orthogonality. A damaged or
//! hostile file costs an error message and bounded memory.

mod convert;
mod metadata;
mod read;

pub use metadata::Metadata;

use crate::bits::{BitPlan, WIDTHS};
use crate::options::{CodeRounding, Granularity};
use crate::zoo::ZooError;
use oscar_codec::format::default_clip;
use oscar_codec::{CodecError, Composition, Feedback, HeadRotations, Rotation, RotationSet, Rounding, Side};
use oscar_figures::write_whole;
use oscar_models::DecoderConfig;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Header field with the means of the width tables, in hundredths of a bit.
const WIDTH_MEANS: &str = "width_means";
/// Header field with the layers that have widths, where some have none.
const WIDTH_LAYERS: &str = "width_layers";
/// Header field with the rounding of their codes.
const WIDTH_ROUNDING: &str = "width_rounding";
/// Header field with the SHA-256 of the tensors' bytes. Files of earlier versions have none.
const CHECKSUM: &str = "data_sha256";

/// Largest |R·Rᵀ − I| accepted: far above rounding, far below anything that harms attention.
pub const ORTHOGONALITY: f64 = 1e-3;

#[derive(Debug, thiserror::Error)]
pub enum RotationFileError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("reading failed: {0}")]
    Read(#[from] io::Error),
    #[error(
        "codes cannot be shaped: the rotations come without the queries' eigenvalues, or are not composed from their \
         eigenvectors; use --rounding nearest, or calibrate again"
    )]
    NoSpectrum,
    #[error("the file is damaged: its data do not have the checksum of its header")]
    Checksum,
    #[error("not a rotation file: {0}")]
    NotARotationFile(String),
    #[error(
        "the rotation file has format version {0}; this program reads version 1: update it, or calibrate again"
    )]
    Version(u32),
    #[error("the rotations take {found} bytes; more than {limit} are refused")]
    TooLarge { found: u64, limit: u64 },
    #[error(
        "the rotation file is damaged: it has {found} bytes and its header describes {expected}; fetch it again"
    )]
    Length { found: u64, expected: u64 },
    #[error("metadata field {field} is {found}, expected {expected}")]
    Metadata { field: &'static str, found: String, expected: &'static str },
    #[error("tensor {tensor} is {found}, expected {expected}")]
    Shape { tensor: String, found: String, expected: String },
    #[error("tensor {tensor} holds {value} at {index}: the file is damaged or the calibration failed")]
    Value { tensor: &'static str, index: usize, value: f32 },
    #[error(
        "{tensor} of layer {layer}, KV head {head} is not orthogonal: max |R·Rᵀ − I| is {error:.2e}, allowed {ORTHOGONALITY:.0e}"
    )]
    NotOrthogonal { tensor: &'static str, layer: usize, head: usize, error: f64 },
    #[error(
        "these rotations do not belong to this model: {0}; calibrate the model, or give the file made for it"
    )]
    OtherModel(String),
    #[error("the RotationZoo format cannot hold {0}: leave it out with --lossy, or keep our own format")]
    WouldLose(String),
    #[error("the K and V files do not go together: {0}")]
    Pair(String),
    #[error(transparent)]
    Zoo(#[from] ZooError),
    #[error(transparent)]
    Codec(#[from] CodecError),
}

/// Refuses the first value that is not right.
pub(crate) fn check_values<'a>(
    tensor: &'static str,
    values: impl IntoIterator<Item = &'a f32>,
    is_right: fn(f32) -> bool,
) -> Result<(), RotationFileError> {
    match values.into_iter().enumerate().find(|(_, value)| !is_right(**value)) {
        None => Ok(()),
        Some((index, &value)) => Err(RotationFileError::Value { tensor, index, value }),
    }
}

/// Clip ratios in `[layer][kv_head]` order.
#[derive(Clone, Debug, PartialEq)]
pub struct Clips {
    pub key: Vec<f64>,
    pub value: Vec<f64>,
}

impl Clips {
    /// The default ratios of these widths everywhere.
    pub fn uniform(heads: usize, bits: (u32, u32)) -> Self {
        Self {
            key: vec![default_clip(Side::Key, bits.0); heads],
            value: vec![default_clip(Side::Value, bits.1); heads],
        }
    }
}

/// Rotations of a model with everything that belongs to them.
#[derive(Clone, Debug, PartialEq)]
pub struct RotationFile {
    pub rotations: RotationSet,
    pub clips: Clips,
    /// `[layer][H][d]`, H as in the file.
    pub key_eigenvalues: Option<Vec<f32>>,
    pub value_eigenvalues: Option<Vec<f32>>,
    /// Widths by layer, head and side; empty if none were chosen.
    pub bits: BitPlan,
    pub metadata: Metadata,
}

impl RotationFile {
    /// Layers, KV heads, head size.
    pub fn shape(&self) -> [usize; 3] {
        [self.rotations.layers(), self.rotations.kv_heads(), self.rotations.head_dim()]
    }

    /// Distinct rotations of a layer.
    pub(super) fn stored_heads(&self) -> usize {
        if self.metadata.granularity == Granularity::Layer { 1 } else { self.rotations.kv_heads() }
    }

    /// Heads whose rotations are written, in order.
    fn stored(&self) -> impl Iterator<Item = &HeadRotations> {
        let (all, kept) = (self.rotations.kv_heads(), self.stored_heads());
        self.rotations.heads().iter().enumerate().filter(move |(i, _)| i % all < kept).map(|(_, head)| head)
    }

    /// How the codes of each layer and KV head are rounded. Shaped codes need the eigenvalues of
    /// the queries and a composition that begins with their eigenvectors.
    pub fn roundings(&self, rounding: CodeRounding) -> Result<Vec<Rounding>, RotationFileError> {
        let [layers, kv_heads, d] = self.shape();
        if rounding == CodeRounding::Nearest {
            return Ok(vec![Rounding::default(); layers * kv_heads]);
        }
        let composition: Composition = self.metadata.composition.parse()?;
        let values = self.key_eigenvalues.as_ref().filter(|_| composition.begins_with_eigenbasis());
        let Some(values) = values else { return Err(RotationFileError::NoSpectrum) };
        let stored = values
            .chunks_exact(d)
            .map(|head| Ok(Rounding { unbiased: true, feedback: Feedback::of_spectrum(head, composition)? }))
            .collect::<Result<Vec<_>, RotationFileError>>()?;
        let shared = self.stored_heads() == 1;
        Ok((0..layers * kv_heads)
            .map(|head| stored[if shared { head / kv_heads } else { head }].clone())
            .collect())
    }

    /// Refuses rotations made for another model.
    pub fn check_model(&self, fingerprint: &str, config: &DecoderConfig) -> Result<(), RotationFileError> {
        let (found, model) = (self.shape(), [config.cache_layers(), config.kv_heads, config.head_dim]);
        if found != model {
            return Err(RotationFileError::OtherModel(format!(
                "they are for {} layers and {} KV heads of {}, the model has {} and {} of {}",
                found[0], found[1], found[2], model[0], model[1], model[2]
            )));
        }
        let quantized = config.full_attention_layers();
        if !self.bits.is_empty() && self.bits.layers != quantized {
            return Err(RotationFileError::OtherModel(format!(
                "they have widths for layers {:?}, and the model quantizes layers {quantized:?}, those without a \
                 sliding window",
                self.bits.layers
            )));
        }
        match &self.metadata.model_fingerprint {
            Some(own) if own != fingerprint => Err(RotationFileError::OtherModel(format!(
                "they were made from weights {}…, the model's are {}…",
                own.chars().take(12).collect::<String>(),
                fingerprint.chars().take(12).collect::<String>()
            ))),
            _ => Ok(()),
        }
    }

    /// Writes the file, whole or not at all.
    pub fn save(&self, path: &Path) -> Result<(), RotationFileError> {
        let mut bytes = Vec::new();
        self.write(&mut bytes)?;
        write_whole(path, bytes).map_err(|source| RotationFileError::Io { path: path.to_owned(), source })
    }

    /// Writes the bytes of the file.
    pub fn write(&self, out: &mut impl Write) -> Result<(), RotationFileError> {
        self.check()?;
        let shape @ [layers, kv_heads, d] = self.shape();
        let heads = self.stored_heads();
        let coded = self.bits.layers.len();
        let matrices = |rotation: fn(&HeadRotations) -> &Rotation| -> Vec<f32> {
            self.stored().flat_map(|head| rotation(head).matrix()).copied().collect()
        };
        let clips = |clips: &[f64]| clips.iter().map(|&clip| clip as f32).collect();
        let mut tensors: Vec<(&str, Vec<usize>, Vec<f32>)> = vec![
            ("key_rotation", vec![layers, heads, d, d], matrices(|head| &head.key)),
            ("value_rotation", vec![layers, heads, d, d], matrices(|head| &head.value)),
            ("key_clip", vec![layers, kv_heads], clips(&self.clips.key)),
            ("value_clip", vec![layers, kv_heads], clips(&self.clips.value)),
        ];
        if let Some(eigenvalues) = &self.key_eigenvalues {
            tensors.push(("key_eigenvalues", vec![layers, heads, d], eigenvalues.clone()));
        }
        if let Some(eigenvalues) = &self.value_eigenvalues {
            tensors.push(("value_eigenvalues", vec![layers, heads, d], eigenvalues.clone()));
        }
        if self.metadata.centred {
            let means = self.rotations.heads().iter().flat_map(|head| head.key_mean.iter().flatten());
            tensors.push(("key_mean", vec![layers, kv_heads, d], means.copied().collect()));
        }
        if !self.bits.tables.is_empty() {
            let widths = self.bits.tables.iter().flat_map(|(_, table)| table.units());
            let shape = vec![self.bits.tables.len(), coded, kv_heads, 2];
            tensors.push(("widths", shape, widths.map(|bits| bits as f32).collect()));
        }
        if let Some(map) = &self.bits.harm {
            let shape = vec![coded, kv_heads, 2, WIDTHS.len()];
            let absent = map.absent.iter().map(|harm| harm.unwrap_or(-1.0)).collect();
            tensors.push(("harm", shape.clone(), map.harm.iter().flatten().copied().collect()));
            tensors.push(("harm_absent", vec![coded, kv_heads], absent));
            if !map.error.is_empty() {
                tensors.push(("harm_error", shape, map.error.iter().flatten().copied().collect()));
            }
        }
        let mut fields = self.metadata.to_fields(shape);
        if !self.bits.tables.is_empty() {
            let means = self.bits.tables.iter().map(|(mean, _)| mean.hundredths().to_string());
            fields.insert(WIDTH_MEANS.into(), means.collect::<Vec<_>>().join(","));
        }
        if (1..layers).contains(&coded) {
            let list = self.bits.layers.iter().map(usize::to_string);
            fields.insert(WIDTH_LAYERS.into(), list.collect::<Vec<_>>().join(","));
        }
        if !self.bits.is_empty() {
            fields.insert(WIDTH_ROUNDING.into(), self.bits.rounding.to_string());
        }
        let values = tensors.iter().flat_map(|(_, _, values)| values);
        let data: Vec<u8> = values.flat_map(|value| value.to_le_bytes()).collect();
        fields.insert(CHECKSUM.into(), format!("{:x}", Sha256::digest(&data)));
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!(fields));
        let mut end = 0;
        for (name, shape, values) in &tensors {
            let start = end;
            end += size_of_val(values.as_slice());
            let about = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, end]});
            header.insert((*name).into(), about);
        }
        let mut header = Value::Object(header).to_string();
        // Data begins at a multiple of eight, as other writers do it.
        header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        out.write_all(&data)?;
        out.flush()?;
        Ok(())
    }

    /// Everything that a file promises; run before writing and after reading.
    pub fn check(&self) -> Result<(), RotationFileError> {
        let [layers, kv_heads, d] = self.shape();
        let heads = self.stored_heads();
        let lengths = [
            ("key_clip", Some(self.clips.key.len()), layers * kv_heads),
            ("value_clip", Some(self.clips.value.len()), layers * kv_heads),
            ("key_eigenvalues", self.key_eigenvalues.as_ref().map(Vec::len), layers * heads * d),
            ("value_eigenvalues", self.value_eigenvalues.as_ref().map(Vec::len), layers * heads * d),
        ];
        for (tensor, found, expected) in lengths {
            if let Some(found) = found.filter(|&n| n != expected) {
                let (found, expected) = (format!("{found} values"), format!("{expected}"));
                return Err(RotationFileError::Shape { tensor: tensor.into(), found, expected });
            }
        }
        for (tensor, clips) in [("key_clip", &self.clips.key), ("value_clip", &self.clips.value)] {
            if let Some(index) = clips.iter().position(|v| !(0.0..=1.0).contains(v)) {
                return Err(RotationFileError::Value { tensor, index, value: clips[index] as f32 });
            }
        }
        for (tensor, values) in
            [("key_eigenvalues", &self.key_eigenvalues), ("value_eigenvalues", &self.value_eigenvalues)]
        {
            check_values(tensor, values.iter().flatten(), |value| value.is_finite())?;
        }
        self.bits.check(layers, kv_heads)?;
        let all = self.rotations.heads();
        for (index, head) in all.iter().enumerate() {
            let first = &all[index / kv_heads * kv_heads];
            if heads == 1 && (head.key != first.key || head.value != first.value) {
                return Err(RotationFileError::Metadata {
                    field: "granularity",
                    found: format!("layer, but the heads of layer {} differ", index / kv_heads),
                    expected: "head",
                });
            }
            if head.key_mean.is_some() != self.metadata.centred {
                return Err(RotationFileError::Metadata {
                    field: "centred",
                    found: self.metadata.centred.to_string(),
                    expected: "what the heads hold: a mean in all, or in none",
                });
            }
        }
        for (index, head) in self.stored().enumerate() {
            for (tensor, rotation) in [("key_rotation", &head.key), ("value_rotation", &head.value)] {
                let error = rotation.orthogonality_error();
                if error > ORTHOGONALITY {
                    let (layer, head) = (index / heads, index % heads);
                    return Err(RotationFileError::NotOrthogonal { tensor, layer, head, error });
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
