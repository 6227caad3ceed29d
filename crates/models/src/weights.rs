//! The tensors of a checkpoint, mapped from one safetensors file or many and never copied for
//! inspection.
//!
//! Invariant: once [`Weights::open`] returns, every tensor's bytes lie inside its file, do not
//! overlap another's, and have exactly the length that dtype and shape say. [`Weights::check`] then
//! ties the names and shapes to a configuration. Both read headers only (and the few scales of FP8
//! weights), so a bad checkpoint costs no memory.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use oscar_backend::{ScaleGrid, WeightFormat};
use safetensors::tensor::{Dtype, Metadata, SafeTensorError, SafeTensors};
use serde::Deserialize;

use crate::config::DecoderConfig;
use crate::error::{LineList, LoadError};
use crate::fingerprint::fingerprint;
use crate::fp8::{self, Fp8Weights};
use crate::fused;
use crate::matrices::MatrixView;
use crate::mmap::FileBytes;
use crate::source::{ModelSource, check_file_name};
use crate::tensor::{TensorView, WeightDtype};
use crate::tensor_names::{ExpertNames, TensorNames, is_projection, layer_of, required_tensors};

pub(crate) const SINGLE_FILE: &str = "model.safetensors";
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";

/// The open weights of a model.
#[derive(Debug)]
pub struct Weights {
    files: Vec<FileBytes>,
    entries: BTreeMap<String, Entry>,
    names: TensorNames,
    wanted: Option<WeightFormat>,
}

/// Where one tensor lies.
#[derive(Debug)]
struct Entry {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    start: usize,
    end: usize,
}

impl Entry {
    fn elements(&self) -> u64 {
        self.shape.iter().map(|n| *n as u64).product()
    }
}

impl Weights {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names.
    ///
    /// The files stay mapped: replace a checkpoint by renaming a new one over it, never by writing
    /// into it. Editing one in place while it is open would change the weights under the model or
    /// end the process.
    pub fn open(source: &ModelSource) -> Result<Self, LoadError> {
        let (files, entries) = if source.contains(SINGLE_FILE) {
            let file = source.map(SINGLE_FILE)?;
            let entries = read_header(SINGLE_FILE, &file, 0)?;
            (vec![file], entries)
        } else if let Some(index) = source.read(INDEX_FILE)? {
            open_shards(source, &ShardIndex::parse(&index)?)?
        } else {
            return Err(LoadError::MissingFile {
                place: source.to_string(),
                file: format!("{SINGLE_FILE} or {INDEX_FILE}"),
            });
        };
        let names = TensorNames::detect(|name| entries.contains_key(name));
        Ok(Self { files, entries, names, wanted: None })
    }

    /// The same weights with their projections as if the checkpoint held them in FP8 (they are
    /// quantized while loading), or with FP8 expanded to BF16 on every device.
    pub fn delivered_as(self, format: WeightFormat) -> Self {
        Self { wanted: Some(format), ..self }
    }

    pub(crate) fn wanted(&self) -> Option<WeightFormat> {
        self.wanted
    }

    /// Verifies that every tensor that this configuration needs exists, with the right shape and a
    /// readable dtype. One error lists everything that is wrong.
    pub fn check(&self, config: &DecoderConfig) -> Result<(), LoadError> {
        if let Some(method) = self.quantization_trace(config) {
            return Err(LoadError::Quantized { method });
        }
        let mut problems = Vec::new();
        self.expect_scattered_reads(true);
        for required in required_tensors(config, &self.names) {
            let name = &required.name;
            let Some(entry) = self.entries.get(name) else {
                let hint = if *name == self.names.lm_head() {
                    " (a model that shares its embedding must say \"tie_word_embeddings\": true)"
                } else {
                    ""
                };
                problems.push(format!("{name} is missing{hint}"));
                continue;
            };
            if entry.shape != required.shape {
                problems.push(format!(
                    "{name} is {:?}, the configuration needs {:?}",
                    entry.shape, required.shape
                ));
            }
            if required.packed {
                problems.extend(self.packed(name).err().map(|error| error.to_string()));
            } else if entry.dtype == Dtype::F8_E4M3 && config.fp8_weights {
                problems.extend(self.scales_of(name, entry).err());
            } else if WeightDtype::from_safetensors(entry.dtype).is_none() {
                problems.push(format!("{name} is {}; BF16, F16 or F32 is needed", entry.dtype));
            }
        }
        self.expect_scattered_reads(false);
        let joined = |names| matches!(names, ExpertNames::Fused | ExpertNames::QwenFused);
        let fused = config.moe.as_ref().is_some_and(|moe| joined(moe.names) && !moe.mxfp4);
        if fused && self.wanted == Some(WeightFormat::Fp8) {
            problems.push("experts in one tensor are not quantized to FP8: leave --weights fp8 out".into());
        }
        if problems.is_empty() {
            return Ok(());
        }
        Err(LoadError::WeightsMismatch { problems: LineList(problems) })
    }

    /// A tensor by name, borrowed from the file.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, LoadError> {
        let entry =
            self.entries.get(name).ok_or_else(|| LoadError::TensorMissing { name: name.to_owned() })?;
        let dtype = WeightDtype::from_safetensors(entry.dtype).ok_or_else(|| {
            LoadError::UnsupportedDtype { name: name.to_owned(), dtype: entry.dtype.to_string() }
        })?;
        Ok(TensorView { dtype, shape: &entry.shape, bytes: self.bytes(entry) })
    }

    /// The bytes of a tensor of MXFP4 codes or scales.
    pub(crate) fn packed(&self, name: &str) -> Result<&[u8], LoadError> {
        match self.entries.get(name) {
            Some(entry) if entry.dtype == Dtype::U8 => Ok(self.bytes(entry)),
            Some(entry) => {
                Err(LoadError::PackedDtype { name: name.to_owned(), dtype: entry.dtype.to_string() })
            }
            None => Err(LoadError::TensorMissing { name: name.to_owned() }),
        }
    }

    /// A vector by name, in f32.
    pub fn vector(&self, name: &str) -> Result<Vec<f32>, LoadError> {
        let view = self.tensor(name)?;
        match view.is_finite() {
            true => Ok(view.to_f32_vec()),
            false => Err(LoadError::NanWeights { name: name.to_owned() }),
        }
    }

    /// A matrix by name, FP8 or not. Weights that are no numbers are refused by name.
    pub fn matrix(&self, name: &str) -> Result<MatrixView<'_>, LoadError> {
        let Some(entry) = self.entries.get(name).filter(|entry| entry.dtype == Dtype::F8_E4M3) else {
            let view = self.tensor(name)?;
            if !self.is_fp8(name) {
                return match view.is_finite() {
                    true => Ok(MatrixView::Unquantized(view)),
                    false => Err(LoadError::NanWeights { name: name.to_owned() }),
                };
            }
            let quantized = Fp8Weights::quantize(&view);
            return quantized
                .map(MatrixView::Fp8)
                .ok_or_else(|| LoadError::NanWeights { name: name.to_owned() });
        };
        let bad = |problem| LoadError::BadScales { name: name.to_owned(), problem };
        let (scales, grid) = self.scales_of(name, entry).map_err(bad)?;
        let codes = self.bytes(entry);
        if fp8::holds_nan(codes) {
            return Err(LoadError::NanWeights { name: name.to_owned() });
        }
        Ok(MatrixView::Fp8(Fp8Weights { shape: &entry.shape, codes: Cow::Borrowed(codes), scales, grid }))
    }

    /// Whether this matrix is FP8, in the file or by `--weights`.
    pub(crate) fn is_fp8(&self, name: &str) -> bool {
        let stored = self.entries.get(name).is_some_and(|entry| entry.dtype == Dtype::F8_E4M3);
        stored || (self.wanted == Some(WeightFormat::Fp8) && is_projection(name))
    }

    /// The scales that an FP8 matrix has or would get: of blocks, or of channels. `None` if it is not
    /// FP8.
    pub(crate) fn scale_grid(&self, name: &str) -> Option<ScaleGrid> {
        let entry = self.entries.get(name)?;
        if entry.dtype != Dtype::F8_E4M3 {
            return self.is_fp8(name).then_some(ScaleGrid::Blocks);
        }
        let scales = fp8::scale_names(name).find_map(|scales| self.entries.get(&scales))?;
        let channels = matches!(entry.shape[..], [outputs, inputs]
            if scales.shape == ScaleGrid::Channels.shape(outputs, inputs)
                && scales.shape != ScaleGrid::Blocks.shape(outputs, inputs));
        Some(if channels { ScaleGrid::Channels } else { ScaleGrid::Blocks })
    }

    /// Tensors in the files that the forward pass does not use, by kind, for one line of the log:
    /// further layers (multi-token prediction), vision towers, scales of activations and others.
    pub fn ignored(&self, config: &DecoderConfig) -> Vec<String> {
        let required: BTreeSet<String> =
            required_tensors(config, &self.names).into_iter().map(|tensor| tensor.name).collect();
        let used = |name: &str| {
            let stem = fp8::SCALE_ENDINGS.iter().find_map(|ending| name.strip_suffix(ending));
            required.contains(name) || stem.is_some_and(|stem| required.contains(&format!("{stem}.weight")))
        };
        let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
        for name in self.entries.keys().filter(|name| !used(name)) {
            let kind = match layer_of(name) {
                Some(layer) if layer >= config.layers => format!("layer {layer} (multi-token prediction)"),
                _ if name.ends_with(".input_scale") => "*.input_scale".to_owned(),
                _ if name.ends_with(".inv_freq") => "*.inv_freq".to_owned(),
                _ if is_of_vision(name) => "the vision tower".to_owned(),
                _ if name.starts_with("mtp.") => "mtp.*".to_owned(),
                _ => name.clone(),
            };
            *kinds.entry(kind).or_default() += 1;
        }
        kinds
            .into_iter()
            .map(|(kind, count)| if count > 1 { format!("{kind}: {count}") } else { kind })
            .collect()
    }

    /// The scales of an FP8 matrix, or a description of what is wrong with them.
    fn scales_of(&self, name: &str, entry: &Entry) -> Result<(Vec<f32>, ScaleGrid), String> {
        let Some(scales) = fp8::scale_names(name).find(|scales| self.entries.contains_key(scales)) else {
            let wanted: Vec<String> = fp8::scale_names(name).collect();
            return Err(format!("{name} is FP8 without its scales: {} is missing", wanted.join(" or ")));
        };
        let view = self.tensor(&scales).map_err(|error| error.to_string())?;
        fp8::read_scales(&entry.shape, &view).map_err(|problem| format!("the scales {scales}: {problem}"))
    }

    /// The spelling of names in this checkpoint.
    pub fn names(&self) -> &TensorNames {
        &self.names
    }

    /// The names of all tensors in the files, sorted.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Elements of all tensors in the files except the scales of quantized ones.
    pub fn parameter_count(&self) -> u64 {
        let parameters = self.entries.iter().filter(|(name, _)| !fp8::belongs_to_quantization(name));
        parameters.map(|(name, entry)| entry.elements() * fused::elements_of(name)).sum()
    }

    /// Elements of all parameters of this model that are not matrices.
    pub(crate) fn vector_elements(&self, config: &DecoderConfig) -> u64 {
        let vectors = self.entries.iter().filter(|(_, entry)| entry.shape.len() == 1);
        let parameters = vectors.filter(|(name, _)| {
            !fp8::belongs_to_quantization(name) && layer_of(name).is_none_or(|layer| layer < config.layers)
        });
        parameters.map(|(_, entry)| entry.elements()).sum()
    }

    /// Bytes of all tensors in the files.
    pub fn total_bytes(&self) -> u64 {
        self.entries.values().map(|entry| (entry.end - entry.start) as u64).sum()
    }

    /// Bytes of the tensors with these names.
    pub(crate) fn bytes_of(&self, wanted: impl Fn(&str) -> bool) -> u64 {
        let chosen = self.entries.iter().filter(|(name, _)| wanted(name));
        chosen.map(|(_, entry)| (entry.end - entry.start) as u64).sum()
    }

    /// Identifies the model: 64 hexadecimal digits, the same however the tensors are split over
    /// files. See the `fingerprint` module for what it covers.
    pub fn fingerprint(&self) -> String {
        self.expect_scattered_reads(true);
        let digest = fingerprint(self.entries.iter().map(|(name, entry)| {
            (name.as_str(), entry.dtype.to_string(), entry.shape.as_slice(), self.bytes(entry))
        }));
        self.expect_scattered_reads(false);
        digest
    }

    fn expect_scattered_reads(&self, scattered: bool) {
        self.files.iter().for_each(|file| file.expect_scattered_reads(scattered));
    }

    fn bytes(&self, entry: &Entry) -> &[u8] {
        &self.files[entry.file][entry.start..entry.end]
    }

    /// Tensors that only quantized checkpoints have; some are published without
    /// `quantization_config`.
    fn quantization_trace(&self, config: &DecoderConfig) -> Option<String> {
        let packed = |name: &str| name.ends_with(".qweight") || name.ends_with(".weight_packed");
        let scaled = |name: &str| fp8::SCALE_ENDINGS.iter().any(|ending| name.ends_with(ending));
        let is_trace = |name: &&String| packed(name) || (!config.fp8_weights && scaled(name));
        let trace = self.entries.keys().find(is_trace)?;
        Some(format!("not stated, but the file holds {trace}"))
    }
}

fn is_of_vision(name: &str) -> bool {
    ["visual.", "vision", "multi_modal_projector."].iter().any(|part| name.contains(part))
}

/// `model.safetensors.index.json`: which shard holds which tensor.
#[derive(Debug, Deserialize)]
pub(crate) struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl ShardIndex {
    /// Parses the index and refuses shard names that point out of the model's folder.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, LoadError> {
        let index: Self = serde_json::from_slice(bytes)
            .map_err(|source| LoadError::Json { file: INDEX_FILE.to_owned(), source })?;
        for shard in index.weight_map.values() {
            check_file_name(shard)?;
        }
        Ok(index)
    }

    /// The shards, sorted, each once.
    pub(crate) fn shard_names(&self) -> Vec<String> {
        self.weight_map.values().collect::<BTreeSet<_>>().into_iter().cloned().collect()
    }
}

type OpenFiles = (Vec<FileBytes>, BTreeMap<String, Entry>);

fn open_shards(source: &ModelSource, index: &ShardIndex) -> Result<OpenFiles, LoadError> {
    let disagree = |problems| LoadError::BadIndex { file: INDEX_FILE, problems: LineList(problems) };
    let shards = index.shard_names();
    let absent: Vec<String> = shards
        .iter()
        .filter(|shard| !source.contains(shard))
        .map(|shard| format!("shard {shard} is missing"))
        .collect();
    if !absent.is_empty() {
        return Err(disagree(absent));
    }

    let mut files = Vec::with_capacity(shards.len());
    let mut held: BTreeMap<String, Entry> = BTreeMap::new();
    let mut problems = Vec::new();
    for shard in &shards {
        let file = source.map(shard)?;
        for (name, entry) in read_header(shard, &file, files.len())? {
            // The index decides: a tensor that it places in another shard is not used from here.
            if index.weight_map.get(&name) == Some(shard) {
                held.insert(name, entry);
            }
        }
        files.push(file);
    }
    for (name, shard) in &index.weight_map {
        if !held.contains_key(name) {
            problems.push(format!("{name} is not in {shard}"));
        }
    }
    if problems.is_empty() { Ok((files, held)) } else { Err(disagree(problems)) }
}

/// Parses and verifies one file's header; touches no tensor data.
fn read_header(name: &str, bytes: &[u8], file: usize) -> Result<BTreeMap<String, Entry>, LoadError> {
    let (header_bytes, metadata) = SafeTensors::read_metadata(bytes).map_err(|error| {
        LoadError::BadSafetensors { file: name.to_owned(), problem: explain(&error, bytes) }
    })?;
    let data_start = LENGTH_BYTES + header_bytes;
    Ok(metadata
        .tensors()
        .into_iter()
        .map(|(tensor, info)| {
            let (start, end) = info.data_offsets;
            let entry = Entry {
                file,
                dtype: info.dtype,
                shape: info.shape.clone(),
                start: data_start + start,
                end: data_start + end,
            };
            (tensor, entry)
        })
        .collect())
}

/// A safetensors file begins with the length of its header.
const LENGTH_BYTES: usize = 8;

/// The parser's error in words that say what happened to the file.
fn explain(error: &SafeTensorError, bytes: &[u8]) -> String {
    let stated_header =
        bytes.first_chunk::<LENGTH_BYTES>().map(|length| u64::from_le_bytes(*length)).unwrap_or_default();
    match error {
        SafeTensorError::HeaderTooSmall => format!("it has only {} bytes", bytes.len()),
        SafeTensorError::HeaderTooLarge | SafeTensorError::InvalidHeaderLength => {
            format!("it has {} bytes but states a header of {stated_header}", bytes.len())
        }
        SafeTensorError::MetadataIncompleteBuffer => {
            let header = bytes.get(LENGTH_BYTES..).and_then(|rest| rest.get(..stated_header as usize));
            let described = header.and_then(|json| serde_json::from_slice::<Metadata>(json).ok());
            match described.map(|metadata| LENGTH_BYTES + stated_header as usize + metadata.data_len()) {
                Some(expected) if expected > bytes.len() => {
                    format!("it is cut short: {} bytes of {expected}", bytes.len())
                }
                Some(expected) => {
                    format!("it has {} bytes where its header describes {expected}", bytes.len())
                }
                None => error.to_string(),
            }
        }
        SafeTensorError::InvalidOffset(tensor) => {
            format!("the data of `{tensor}` overlaps another tensor or leaves a gap before it")
        }
        SafeTensorError::TensorInvalidInfo => {
            "a tensor's data is not as long as its shape and dtype say".to_owned()
        }
        other => other.to_string(),
    }
}
