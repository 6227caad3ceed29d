//! Reading rotation files, piece by piece, nothing believed before it is checked.

use super::{
    CHECKSUM, Clips, Metadata, RotationFile, RotationFileError, WIDTH_LAYERS, WIDTH_MEANS, WIDTH_ROUNDING,
    check_values,
};
use crate::bits::{BitPlan, HarmMap, WIDTHS, WidthTable};
use crate::options::CodeRounding;
use crate::options::Granularity;
use oscar_codec::{HeadRotations, MeanBits, Rotation, RotationSet};
use safetensors::tensor::{Dtype, Metadata as Header};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;

/// Sixteen times the file of the largest model we know.
const LARGEST_FILE: u64 = 2 << 30;
/// A header has nine tensors and some lines of text.
const LARGEST_HEADER: u64 = 256 << 10;
/// Bytes of all rotations in memory, each head having its own.
const LARGEST_SET: u64 = 2 << 30;
const LARGEST_HEAD: usize = 256;
const MOST_LAYERS: usize = 4096;
const MOST_HEADS: usize = 1024;
const MOST_TABLES: usize = 64;

impl RotationFile {
    /// Reads and checks a file.
    pub fn load(path: &Path) -> Result<Self, RotationFileError> {
        let named = |error: RotationFileError| match error {
            RotationFileError::Read(source) => RotationFileError::Io { path: path.to_owned(), source },
            other => other,
        };
        let open = || -> Result<Self, RotationFileError> {
            let file = File::open(path)?;
            let length = file.metadata()?.len();
            Self::read(&mut BufReader::new(file), length)
        };
        open().map_err(named)
    }

    /// Reads a file of `length` bytes.
    pub fn read(input: &mut (impl Read + Seek), length: u64) -> Result<Self, RotationFileError> {
        if length > LARGEST_FILE {
            return Err(RotationFileError::TooLarge { found: length, limit: LARGEST_FILE });
        }
        let mut source = Source::open(input, length)?;
        let fields = source.header.metadata().as_ref().ok_or_else(|| {
            RotationFileError::NotARotationFile("it is a safetensors file without metadata".into())
        })?;
        let (metadata, [layers, kv_heads, d]) = Metadata::from_fields(fields)?;
        let means = width_means(fields.get(WIDTH_MEANS).map(String::as_str))?;
        let rounding = width_rounding(fields.get(WIDTH_ROUNDING).map(String::as_str))?;
        let width_layers = width_layers(fields.get(WIDTH_LAYERS).map(String::as_str), layers)?;
        check_size("layers", layers, MOST_LAYERS)?;
        check_size("kv_heads", kv_heads, MOST_HEADS)?;
        check_size("head_dim", d, LARGEST_HEAD)?;
        // One rotation for many heads is small in a file and is multiplied here.
        let held = (layers * kv_heads * 2 * d * d * size_of::<f32>()) as u64;
        if held > LARGEST_SET {
            return Err(RotationFileError::TooLarge { found: held, limit: LARGEST_SET });
        }
        let heads = if metadata.granularity == Granularity::Layer { 1 } else { kv_heads };
        let checksum = fields.get(CHECKSUM).cloned();
        source.check_names()?;
        if let Some(stated) = checksum
            && source.checksum()? != stated
        {
            return Err(RotationFileError::Checksum);
        }

        let matrix = [layers, heads, d, d];
        let key = source.floats("key_rotation", &matrix)?;
        let value = source.floats("value_rotation", &matrix)?;
        let (key, value) = match (key, value) {
            (Some(key), Some(value)) => (key, value),
            _ => return Err(missing("key_rotation and value_rotation")),
        };
        let clips = Clips {
            key: ratios(source.floats("key_clip", &[layers, kv_heads])?.ok_or_else(|| missing("key_clip"))?),
            value: ratios(
                source.floats("value_clip", &[layers, kv_heads])?.ok_or_else(|| missing("value_clip"))?,
            ),
        };
        let mean = source.floats("key_mean", &[layers, kv_heads, d])?;
        if metadata.centred && mean.is_none() {
            return Err(missing("key_mean"));
        }
        let key_eigenvalues = source.floats("key_eigenvalues", &[layers, heads, d])?;
        let value_eigenvalues = source.floats("value_eigenvalues", &[layers, heads, d])?;

        let mut all = Vec::with_capacity(layers * kv_heads);
        for index in 0..layers * kv_heads {
            let stored = if heads == 1 { index / kv_heads } else { index };
            let rotation =
                |values: &[f32]| Rotation::from_matrix(d, values[stored * d * d..][..d * d].to_vec());
            all.push(HeadRotations {
                key: rotation(&key)?,
                value: rotation(&value)?,
                key_mean: mean.as_ref().map(|mean| mean[index * d..][..d].to_vec()),
            });
        }
        let rotations = RotationSet::per_head(layers, kv_heads, d, all)?;
        let bits = source.bit_plan(means, rounding, width_layers, kv_heads)?;
        let file = Self { rotations, clips, key_eigenvalues, value_eigenvalues, bits, metadata };
        file.check()?;
        Ok(file)
    }
}

/// The means of the width tables, from hundredths separated by commas.
fn width_means(field: Option<&str>) -> Result<Vec<MeanBits>, RotationFileError> {
    let Some(field) = field else { return Ok(Vec::new()) };
    let mean = |text: &str| (text.parse::<u16>().ok()? as f64 / 100.0).to_string().parse().ok();
    let means: Option<Vec<MeanBits>> = field.split(',').take(MOST_TABLES + 1).map(mean).collect();
    let expected = "up to 64 means in hundredths of a bit, like 225,175";
    means.filter(|m| m.len() <= MOST_TABLES).ok_or_else(|| unreadable(WIDTH_MEANS, field, expected))
}

/// The layers that have widths, from numbers separated by commas; all without such a list.
fn width_layers(field: Option<&str>, layers: usize) -> Result<Vec<usize>, RotationFileError> {
    let Some(field) = field else { return Ok((0..layers.min(MOST_LAYERS)).collect()) };
    let list = field.split(',').take(MOST_LAYERS).map(|text| text.parse().ok());
    let list: Option<Vec<usize>> = list.collect();
    list.ok_or_else(|| unreadable(WIDTH_LAYERS, field, "numbers of layers like 5,11,17"))
}

/// How codes of the tables are rounded. Files from before query-aware rounding round to nearest.
fn width_rounding(field: Option<&str>) -> Result<CodeRounding, RotationFileError> {
    let Some(field) = field else { return Ok(CodeRounding::Nearest) };
    field.parse().map_err(|_| unreadable(WIDTH_ROUNDING, field, "nearest or shaped"))
}

fn unreadable(field: &'static str, text: &str, expected: &'static str) -> RotationFileError {
    let found = format!("'{}'", text.chars().take(60).collect::<String>());
    RotationFileError::Metadata { field, found, expected }
}

/// Ratios are decimal numbers; f32 would move the order statistic they select.
fn ratios(values: Vec<f32>) -> Vec<f64> {
    values.into_iter().map(|v| (f64::from(v) * 1e6).round() / 1e6).collect()
}

fn missing(what: &str) -> RotationFileError {
    RotationFileError::NotARotationFile(format!("{what} is missing"))
}

fn check_size(field: &'static str, found: usize, most: usize) -> Result<(), RotationFileError> {
    if (1..=most).contains(&found) {
        return Ok(());
    }
    Err(RotationFileError::Metadata { field, found: found.to_string(), expected: "a plausible number" })
}

/// A safetensors file whose header has been checked against its length.
struct Source<'a, R> {
    input: &'a mut R,
    header: Header,
    data_start: u64,
}

impl<'a, R: Read + Seek> Source<'a, R> {
    fn open(input: &'a mut R, length: u64) -> Result<Self, RotationFileError> {
        let not_ours = |reason: String| RotationFileError::NotARotationFile(reason);
        if length < 8 {
            return Err(not_ours(format!("it has only {length} bytes")));
        }
        let mut prefix = [0; 8];
        input.read_exact(&mut prefix)?;
        let size = u64::from_le_bytes(prefix);
        if size > LARGEST_HEADER || size > length - 8 {
            return Err(not_ours(format!("it has {length} bytes and states a header of {size}")));
        }
        let mut json = vec![0; size as usize];
        input.read_exact(&mut json)?;
        let header: Header = serde_json::from_slice(&json)
            .map_err(|error| not_ours(format!("its header is unreadable ({error})")))?;
        let expected = (8 + size).saturating_add(header.data_len() as u64);
        if expected != length {
            return Err(RotationFileError::Length { found: length, expected });
        }
        Ok(Self { input, header, data_start: 8 + size })
    }

    /// SHA-256 of the tensors' bytes.
    fn checksum(&mut self) -> std::io::Result<String> {
        self.input.seek(SeekFrom::Start(self.data_start))?;
        let (mut hash, mut piece) = (Sha256::new(), vec![0; 1 << 16]);
        loop {
            match self.input.read(&mut piece)? {
                0 => return Ok(format!("{:x}", hash.finalize())),
                read => hash.update(&piece[..read]),
            }
        }
    }

    /// A tensor nobody knows might change what the others mean.
    fn check_names(&self) -> Result<(), RotationFileError> {
        const KNOWN: [&str; 11] = [
            "key_rotation",
            "value_rotation",
            "key_clip",
            "value_clip",
            "key_eigenvalues",
            "value_eigenvalues",
            "key_mean",
            "widths",
            "harm",
            "harm_absent",
            "harm_error",
        ];
        match self.header.tensors().keys().find(|name| !KNOWN.contains(&name.as_str())) {
            None => Ok(()),
            Some(name) => Err(RotationFileError::NotARotationFile(format!(
                "it holds an unknown tensor '{}'",
                name.chars().take(60).collect::<String>()
            ))),
        }
    }

    fn bit_plan(
        &mut self,
        means: Vec<MeanBits>,
        rounding: CodeRounding,
        listed: Vec<usize>,
        kv_heads: usize,
    ) -> Result<BitPlan, RotationFileError> {
        let layers = listed.len();
        let widths = match self.floats("widths", &[means.len(), layers, kv_heads, 2])? {
            Some(widths) => widths,
            None if means.is_empty() => Vec::new(),
            None => return Err(missing("widths")),
        };
        let units = 2 * layers * kv_heads;
        check_values("widths", &widths, |width| width.fract() == 0.0)?;
        let tables = means
            .into_iter()
            .zip(widths.chunks_exact(units))
            .map(|(mean, table)| {
                let table: Vec<u32> = table.iter().map(|&w| w as u32).collect();
                (mean, WidthTable::from_units(layers, kv_heads, &table))
            })
            .collect();
        // Files from before zero-width heads have none of these.
        let absent = self.floats("harm_absent", &[layers, kv_heads])?;
        let absent = absent.unwrap_or_else(|| vec![-1.0; layers * kv_heads]);
        let shape = [layers, kv_heads, 2, WIDTHS.len()];
        let rows = |values: Vec<f32>| -> Vec<[f32; WIDTHS.len()]> {
            let row = |h: &[f32]| std::array::from_fn(|i| h[i]);
            values.chunks_exact(WIDTHS.len()).map(row).collect()
        };
        let error = self.floats("harm_error", &shape)?.map(rows).unwrap_or_default();
        let harm = self.floats("harm", &shape)?.map(|values| {
            let harm = rows(values);
            let absent = absent.iter().map(|&v| (v >= 0.0).then_some(v)).collect();
            HarmMap { layers, kv_heads, harm, error, absent }
        });
        let mut plan = BitPlan { layers: listed, tables, harm, rounding };
        if plan.is_empty() {
            plan.layers.clear();
        }
        Ok(plan)
    }

    /// A tensor of this shape, finite; `None` if the file has none of that name.
    fn floats(&mut self, name: &'static str, shape: &[usize]) -> Result<Option<Vec<f32>>, RotationFileError> {
        let Some(info) = self.header.info(name) else { return Ok(None) };
        if info.dtype != Dtype::F32 || info.shape != shape {
            return Err(RotationFileError::Shape {
                tensor: name.into(),
                found: format!("{} {:?}", info.dtype, info.shape),
                expected: format!("F32 {shape:?}"),
            });
        }
        // The header agrees with the length of the file, so these bytes exist.
        let (start, end) = info.data_offsets;
        self.input.seek(SeekFrom::Start(self.data_start + start as u64))?;
        let mut bytes = vec![0; end - start];
        self.input.read_exact(&mut bytes)?;
        let values: Vec<f32> =
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        check_values(name, &values, f32::is_finite)?;
        Ok(Some(values))
    }
}
