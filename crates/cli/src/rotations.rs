//! Rotations and widths of a model that the user did not name: where they are looked for, and the
//! per-user folder that keeps them.
//!
//! Order: the model's own file; the user's folder, by the fingerprint of the weights; a file of the
//! RotationZoo ([`find_in_zoo`], servers only). A file that is damaged or was made for another
//! model is named, with the reason, and left aside.

use crate::options::OpenModel;
use crate::progress::note;
use anyhow::{Context, Result};
use oscar_calibrate::RotationFile;
use oscar_calibrate::zoo::{self, Choice, ZooFile};
use std::io::Cursor;
use std::path::{Path, PathBuf};

/// File name under which a model directory carries its rotations.
pub const MODEL_ROTATIONS: &str = "rotations.safetensors";

/// Rotations, and where they come from.
pub struct Found {
    pub file: RotationFile,
    pub origin: String,
}

/// What is calibrated for a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calibration {
    None,
    Rotations,
    /// Rotations and at least one verified table of widths.
    Widths,
}

impl Calibration {
    pub fn of(found: Option<&Found>) -> Self {
        match found {
            None => Self::None,
            Some(found) if !found.file.bits.tables.is_empty() => Self::Widths,
            Some(_) => Self::Rotations,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Rotations => "rotations",
            Self::Widths => "widths",
        }
    }
}

/// The rotations of the model's own file or of the user's folder.
pub fn find(model: &OpenModel) -> Result<Option<Found>> {
    if let Some(bytes) = model.source.read(MODEL_ROTATIONS)? {
        let length = bytes.len() as u64;
        let own = RotationFile::read(&mut Cursor::new(bytes), length).map_err(anyhow::Error::from);
        match own.and_then(|file| fitting(model, file)) {
            Ok(file) => return Ok(Some(Found { file, origin: "calibrated, the model's own".into() })),
            Err(error) => {
                note!("warning: {} of {} is not used: {error:#}", MODEL_ROTATIONS, model.source);
            }
        }
    }
    let Some(path) = cached_file(model) else { return Ok(None) };
    if !path.exists() {
        return Ok(None);
    }
    match RotationFile::load(&path).map_err(anyhow::Error::from).and_then(|file| fitting(model, file)) {
        Ok(file) => Ok(Some(Found { file, origin: format!("calibrated, {}", path.display()) })),
        Err(error) => {
            note!("warning: {} is not used: {error:#}", path.display());
            Ok(None)
        }
    }
}

/// The bytes of the file that [`find`] would take.
pub fn find_bytes(model: &OpenModel) -> Result<Option<Vec<u8>>> {
    if let Some(bytes) = model.source.read(MODEL_ROTATIONS)? {
        return Ok(Some(bytes.into_owned()));
    }
    Ok(cached_file(model).and_then(|path| std::fs::read(path).ok()))
}

fn fitting(model: &OpenModel, file: RotationFile) -> Result<RotationFile> {
    file.check_model(&model.weights.fingerprint(), &model.config)?;
    if !file.bits.tables.is_empty() {
        file.roundings(file.bits.rounding)?;
    }
    Ok(file)
}

/// Where the user's folder keeps the rotations of a model. `None` if the environment names no
/// folder.
pub fn cached_file(model: &OpenModel) -> Option<PathBuf> {
    let folder = user_folder(|name| std::env::var_os(name))?.join("rotations");
    Some(folder.join(format!("{}.safetensors", model.weights.fingerprint())))
}

/// `$OSCAR_CACHE_DIR`, `$XDG_CACHE_HOME/oscar` or `~/.cache/oscar`.
fn user_folder(variable: impl Fn(&str) -> Option<std::ffi::OsString>) -> Option<PathBuf> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("OSCAR_CACHE_DIR")
        .or_else(|| set("XDG_CACHE_HOME").map(|folder| folder.join("oscar")))
        .or_else(|| set("HOME").map(|home| home.join(".cache/oscar")))
}

/// Keeps rotations for later starts: whole or not at all. A folder that cannot be written is a
/// note, since the server goes on without it.
pub fn keep(file: &RotationFile, path: &Path) -> bool {
    let kept = path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(anyhow::Error::from);
    match kept.and_then(|()| Ok(file.save(path)?)) {
        Ok(()) => true,
        Err(error) => {
            let (place, reason) = (path.display(), error.root_cause());
            note!("warning: the rotations cannot be kept for the next start: {place}: {reason}");
            false
        }
    }
}

/// Rotations of the RotationZoo: in the Hugging Face cache or, if `download` says so, on the hub.
pub fn find_in_zoo(model: &OpenModel, download: bool) -> Option<Found> {
    let pair = zoo_pair(&model.name, download)?;
    let read = || -> Result<RotationFile> {
        let (keys, values) = (ZooFile::read(&pair.keys)?, ZooFile::read(&pair.values)?);
        let mut file = RotationFile::from_zoo(&keys, &values, model.config.kv_heads)?;
        file.check_model(&model.weights.fingerprint(), &model.config)?;
        // The zoo's files name no weights. From here on the file belongs to these.
        file.metadata.model_fingerprint = Some(model.weights.fingerprint());
        Ok(file)
    };
    match read().with_context(|| pair.keys.display().to_string()) {
        Ok(file) => Some(Found { file, origin: format!("RotationZoo, {}", pair.name) }),
        Err(error) => {
            note!("warning: rotations of the RotationZoo are not used: {error:#}");
            None
        }
    }
}

fn zoo_pair(model: &str, download: bool) -> Option<zoo::Candidate> {
    let cached = oscar_models::hub_cache_folders()
        .into_iter()
        .find_map(|hub| zoo::find_pair(&zoo::cached_root(&hub).ok()?, model, Choice::MostTokens).ok());
    cached.or_else(|| if download { downloaded_pair(model) } else { None })
}

#[cfg(feature = "hub")]
fn downloaded_pair(model: &str) -> Option<zoo::Candidate> {
    let wanted = |listing: &[String]| zoo::files_of(listing, model);
    match oscar_models::hub::download_files(zoo::REPOSITORY, wanted, &mut crate::hub::Bars::default()) {
        Ok(root) => zoo::find_pair(&root, model, Choice::MostTokens).ok(),
        Err(error) => {
            note!("note: no rotations for {model} from {}: {error}", zoo::REPOSITORY);
            None
        }
    }
}

#[cfg(not(feature = "hub"))]
fn downloaded_pair(_model: &str) -> Option<zoo::Candidate> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_folder_follows_the_environment() {
        let folder = |set: &[(&str, &str)]| {
            user_folder(|name| set.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into()))
        };
        let home = ("HOME", "/home/u");
        assert_eq!(folder(&[]), None);
        assert_eq!(folder(&[home]), Some("/home/u/.cache/oscar".into()));
        let xdg = ("XDG_CACHE_HOME", "/x");
        assert_eq!(folder(&[home, xdg]), Some("/x/oscar".into()));
        assert_eq!(folder(&[home, xdg, ("OSCAR_CACHE_DIR", "/o")]), Some("/o".into()));
        assert_eq!(folder(&[home, ("OSCAR_CACHE_DIR", "")]), Some("/home/u/.cache/oscar".into()));
    }
}
