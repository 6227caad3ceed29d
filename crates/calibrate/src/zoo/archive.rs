//! The zip around the pickle: `<name>/data.pkl`, `<name>/data/<key>`, `<name>/byteorder`.
//!
//! Invariant: every storage is a slice of the file's own bytes, checksum verified. Only stored
//! (uncompressed) entries are accepted, as torch writes them, so nothing ever inflates.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Cursor, Read};
use std::ops::Range;
use std::path::Path;

use half::{bf16, f16};
use zip::{CompressionMethod, ZipArchive};

use super::nodes::shorten;
use super::pickle::unpickle;
use super::value::{Dtype, TensorView, Value};
use super::{Limits, ZooError};

/// An opened `.pt` file: its value, and the bytes its tensors point into.
#[derive(Debug)]
pub struct TorchFile {
    bytes: Vec<u8>,
    storages: BTreeMap<String, Range<usize>>,
    root: Value,
}

impl TorchFile {
    /// Reads and checks a file.
    pub fn open(path: &Path, limits: &Limits) -> Result<Self, ZooError> {
        let io = |source| ZooError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        check("the file size in bytes", size, limits.file_bytes)?;
        // The size may lie (pipes, growing files): stop one byte past the limit in any case.
        let mut bytes = Vec::new();
        file.take(limits.file_bytes.saturating_add(1)).read_to_end(&mut bytes).map_err(io)?;
        Self::from_bytes(bytes, limits)
    }

    /// Checks a file already in memory.
    pub fn from_bytes(bytes: Vec<u8>, limits: &Limits) -> Result<Self, ZooError> {
        check("the file size in bytes", bytes.len() as u64, limits.file_bytes)?;
        if !bytes.starts_with(b"PK") {
            let reason = match bytes.first() {
                None => "it is empty",
                Some(0x80) => {
                    "it is a legacy pickle without a zip; load it in torch and save it again with torch.save"
                }
                Some(_) => "it does not begin with a zip header",
            };
            return Err(ZooError::NotTorchZip { reason });
        }
        let mut archive = ZipArchive::new(Cursor::new(bytes.as_slice()))?;
        check("the number of zip entries", archive.len() as u64, limits.entries as u64)?;
        let mut entries = BTreeMap::new();
        for index in 0..archive.len() {
            let (name, range) = verified_entry(&mut archive, index, bytes.len())?;
            // Names are unique here: of two equal ones the zip reader keeps the later.
            entries.insert(name, range);
        }

        let prefix = archive_prefix(&entries)?;
        let record = |name: &str| entries.get(&format!("{prefix}{name}")).map(|range| &bytes[range.clone()]);
        if record("constants.pkl").is_some() {
            return Err(ZooError::NotTorchZip { reason: "it is a TorchScript program, not saved data" });
        }
        if record("byteorder").is_some_and(|order| order != b"little") {
            return Err(ZooError::NotTorchZip { reason: "its byte order is not 'little'" });
        }
        let pickle = record("data.pkl").ok_or(ZooError::NotTorchZip { reason: "data.pkl is missing" })?;
        check("the size of data.pkl in bytes", pickle.len() as u64, limits.pickle_bytes as u64)?;

        let data = format!("{prefix}data/");
        let storages: BTreeMap<String, Range<usize>> = entries
            .iter()
            .filter_map(|(name, range)| Some((name.strip_prefix(&data)?.to_owned(), range.clone())))
            .collect();
        let root = unpickle(pickle, &|key| storages.get(key).map(|range| range.len()), limits)?;
        Ok(Self { bytes, storages, root })
    }

    /// The pickled value.
    pub fn root(&self) -> &Value {
        &self.root
    }

    /// The raw little-endian bytes of a storage.
    pub fn storage(&self, key: &str) -> Option<&[u8]> {
        self.storages.get(key).map(|range| &self.bytes[range.clone()])
    }

    /// Copies a floating-point view out as contiguous row-major `f32`, taking its bytes from
    /// `budget`.
    pub fn floats(&self, view: &TensorView, budget: &mut usize) -> Result<Vec<f32>, ZooError> {
        let broken =
            |reason: &str| ZooError::Structure(format!("a tensor of shape {:?} {reason}", view.shape));
        let numel = view.numel().ok_or_else(|| broken("is too large"))?;
        let wanted = numel.saturating_mul(size_of::<f32>());
        check("the size of the tensors in bytes", wanted as u64, *budget as u64)?;
        let storage = self.storage(&view.storage).ok_or_else(|| broken("has no storage"))?;
        let size = view.dtype.size();
        if view.end().and_then(|end| end.checked_mul(size)).is_none_or(|end| end > storage.len()) {
            return Err(broken("reaches beyond its storage"));
        }
        *budget -= wanted;

        let at = |index: usize| &storage[index * size..(index + 1) * size];
        let pick = |index| gather_bytes::<8>(at(index));
        Ok(match view.dtype {
            Dtype::F32 => gather(view, numel, |i| f32::from_le_bytes(gather_bytes(at(i)))),
            Dtype::F64 => gather(view, numel, |i| f64::from_le_bytes(pick(i)) as f32),
            Dtype::F16 => gather(view, numel, |i| f16::from_le_bytes(gather_bytes(at(i))).to_f32()),
            Dtype::Bf16 => gather(view, numel, |i| bf16::from_le_bytes(gather_bytes(at(i))).to_f32()),
            other => return Err(broken(&format!("holds {other:?}, not floating-point numbers"))),
        })
    }
}

fn gather_bytes<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(bytes);
    array
}

/// Visits a strided view in row-major order. The caller has checked the view against its storage.
fn gather(view: &TensorView, numel: usize, element: impl Fn(usize) -> f32) -> Vec<f32> {
    let mut out = Vec::with_capacity(numel);
    let mut counter = vec![0; view.shape.len()];
    let mut at = view.offset;
    for _ in 0..numel {
        out.push(element(at));
        for axis in (0..counter.len()).rev() {
            counter[axis] += 1;
            if counter[axis] < view.shape[axis] {
                at += view.strides[axis];
                break;
            }
            at -= (counter[axis] - 1) * view.strides[axis];
            counter[axis] = 0;
        }
    }
    out
}

/// Name and byte range of one entry, its checksum compared.
fn verified_entry(
    archive: &mut ZipArchive<Cursor<&[u8]>>,
    index: usize,
    file_len: usize,
) -> Result<(String, Range<usize>), ZooError> {
    let raw = archive.by_index_raw(index)?;
    let name = raw.name().to_owned();
    let unsafe_name = name.starts_with('/')
        || name.contains(['\\', '\0', ':'])
        || name.split('/').any(|part| part == ".." || part == ".");
    if unsafe_name {
        return Err(refuse(&name, "the name leaves the archive ('..', absolute or not portable)"));
    }
    if raw.encrypted() {
        return Err(refuse(&name, "it is encrypted"));
    }
    if raw.compression() != CompressionMethod::Stored || raw.compressed_size() != raw.size() {
        return Err(refuse(&name, "it is compressed; torch stores entries as they are"));
    }
    let start = usize::try_from(raw.data_start()).ok();
    let end = start.zip(usize::try_from(raw.size()).ok()).and_then(|(start, size)| start.checked_add(size));
    let (Some(start), Some(end)) = (start, end.filter(|&end| end <= file_len)) else {
        return Err(refuse(&name, "it reaches beyond the end of the file"));
    };
    drop(raw);
    // Reading to the end makes the zip reader compare the checksum.
    let read = std::io::copy(&mut archive.by_index(index)?, &mut std::io::sink())
        .map_err(|error| refuse(&name, &format!("{error}; download the file again")))?;
    if read != (end - start) as u64 {
        return Err(refuse(&name, "it is shorter than declared"));
    }
    Ok((name, start..end))
}

/// The folder all records live in, found by the one `<name>/data.pkl`.
fn archive_prefix(entries: &BTreeMap<String, Range<usize>>) -> Result<String, ZooError> {
    let mut found = entries.keys().filter_map(|name| {
        let folder = name.strip_suffix("data.pkl")?;
        (folder.matches('/').count() == 1 && folder.ends_with('/')).then_some(folder)
    });
    match (found.next(), found.next()) {
        (Some(folder), None) => Ok(folder.to_owned()),
        (None, _) => Err(ZooError::NotTorchZip { reason: "it is a zip without <name>/data.pkl" }),
        (Some(_), Some(_)) => Err(ZooError::NotTorchZip { reason: "it holds more than one data.pkl" }),
    }
}

fn refuse(name: &str, reason: &str) -> ZooError {
    ZooError::Entry { name: shorten(name), reason: reason.to_owned() }
}

fn check(what: &'static str, found: u64, limit: u64) -> Result<(), ZooError> {
    if found > limit { Err(ZooError::TooLarge { what, found, limit }) } else { Ok(()) }
}
