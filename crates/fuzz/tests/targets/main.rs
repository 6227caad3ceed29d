//! The fuzz targets: whatever reads bytes of clients or of model files.

mod files;
mod fleet;
mod http;
mod text;

use std::path::{Path, PathBuf};

/// A folder of this repository, which may have moved since the build.
fn folder(path: &str) -> PathBuf {
    match std::env::var_os("OSCAR_FUZZ_ROOT") {
        Some(root) => Path::new(&root).join("crates/fuzz").join(path),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join(path),
    }
}

/// The files of a folder, by name; those with the ending if one is given.
fn corpus(path: &str, ending: &str) -> Vec<Vec<u8>> {
    let entries = std::fs::read_dir(folder(path)).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        entries.filter(|file| file.display().to_string().ends_with(ending)).collect();
    files.sort();
    files.iter().map(|file| std::fs::read(file).unwrap()).collect()
}
