//! RotationZoo files: made by torch, made by us, and made by somebody who means harm.

mod hostile_archives;
mod hostile_pickles;
mod round_trip;
mod torch_files;

use std::io::{Cursor, Read, Write};

use oscar_calibrate::zoo::{Limits, ZooError, ZooFile};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

pub const V1: &[u8] = include_bytes!("../fixtures/v1.pt");
pub const V2: &[u8] = include_bytes!("../fixtures/v2.pt");
pub const V3: &[u8] = include_bytes!("../fixtures/v3.pt");
pub const STRIDED: &[u8] = include_bytes!("../fixtures/strided.pt");
pub const NAN: &[u8] = include_bytes!("../fixtures/nan.pt");
pub const LEGACY: &[u8] = include_bytes!("../fixtures/legacy.pt");

pub fn read(bytes: &[u8]) -> Result<ZooFile, ZooError> {
    ZooFile::from_bytes(bytes.to_vec(), &Limits::default())
}

/// The message of the refusal that must come.
pub fn refusal(bytes: &[u8]) -> String {
    read(bytes).expect_err("a refusal").to_string()
}

/// A stored zip of these entries.
pub fn zip_of(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in entries {
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
        zip.start_file(*name, options).expect("an entry");
        zip.write_all(bytes).expect("its bytes");
    }
    zip.finish().expect("a zip").into_inner()
}

/// The bytes of one entry.
pub fn entry(file: &[u8], name: &str) -> Vec<u8> {
    let mut archive = ZipArchive::new(Cursor::new(file)).expect("a zip");
    let mut bytes = Vec::new();
    archive.by_name(name).expect("the entry").read_to_end(&mut bytes).expect("its bytes");
    bytes
}

/// Householder reflection of `make_pt.py`, computed the same way and rounded once.
pub fn householder(layer: usize, head: usize, d: usize) -> Vec<f32> {
    let u: Vec<f64> = (0..d).map(|i| ((7 * i + 3 * layer + 5 * head) % 11) as f64 - 4.5).collect();
    let norm: f64 = u.iter().map(|x| x * x).sum();
    let mut matrix = Vec::with_capacity(d * d);
    for i in 0..d {
        for j in 0..d {
            let identity = if i == j { 1.0 } else { 0.0 };
            matrix.push((identity - 2.0 * (u[i] * u[j]) / norm) as f32);
        }
    }
    matrix
}
