//! Compiled kernels ("images"): from NVRTC with a cache on disk, or from a folder of images that
//! were compiled ahead of time.
//!
//! The name of an image is a hash of everything that determines it: sources, layouts of shared
//! structs, definitions, architecture, and in the cache the compiler's version. It appears by an
//! atomic rename. So a half-written or outdated image is never loaded.

use crate::compile::{self, Compiler};
use crate::error::{CudaError, Result};
use crate::layout;
use crate::sources::{self, Defines, HEADERS, Source};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Names a folder of precompiled kernels.
const FOLDER_VARIABLE: &str = "OSCAR_CUDA_KERNELS";

/// The source of a GPU's images.
pub enum Images {
    /// Compiled by NVRTC at first use, kept in the user's cache.
    Compiled(Compiler),
    /// Made by [`precompile`]; nothing is compiled.
    Precompiled(PathBuf),
}

impl Images {
    /// The folder that `OSCAR_CUDA_KERNELS` names, or NVRTC.
    pub fn open() -> Result<Self> {
        match std::env::var_os(FOLDER_VARIABLE).filter(|folder| !folder.is_empty()) {
            None => Compiler::open().map(Self::Compiled),
            Some(folder) if Path::new(&folder).is_dir() => Ok(Self::Precompiled(folder.into())),
            Some(folder) => {
                let folder = folder.display();
                Err(CudaError::Unsupported(format!("{FOLDER_VARIABLE}={folder}: there is no such folder")))
            }
        }
    }

    /// A few words for the start banner.
    pub fn describe(&self) -> String {
        match self {
            Self::Compiled(compiler) => {
                let (major, minor) = compiler.version();
                format!("NVRTC {major}.{minor}")
            }
            Self::Precompiled(_) => "precompiled kernels".into(),
        }
    }

    /// The image of a variant for a GPU of compute capability `capability` (e.g. 90).
    pub fn image(&self, source: &'static Source, defines: &Defines, capability: i32) -> Result<Vec<u8>> {
        match self {
            Self::Compiled(compiler) => {
                let arch = compiler.arch_for(capability)?;
                let name = image_name(source, defines, &arch, Some(compiler.version()));
                let path = cache_folder().map(|folder| folder.join(name));
                let kept =
                    path.as_ref().and_then(|p| std::fs::read(p).ok()).filter(|image| !image.is_empty());
                if let Some(image) = kept {
                    return Ok(image);
                }
                let image = compiler.compile(source, defines, &arch)?;
                if let Some(path) = path {
                    // If the cache cannot be written, the next start compiles again.
                    let _ = store(&path, &image);
                }
                Ok(image)
            }
            Self::Precompiled(folder) => {
                for arch in Architecture::running_on(capability) {
                    let path = folder.join(image_name(source, defines, &arch.to_string(), None));
                    match std::fs::read(&path) {
                        Ok(image) if !image.is_empty() => return Ok(image),
                        Ok(_) => {}
                        Err(error) if error.kind() == ErrorKind::NotFound => {}
                        Err(error) => {
                            return Err(CudaError::Unsupported(format!("{}: {error}", path.display())));
                        }
                    }
                }
                Err(missing(folder, source, capability))
            }
        }
    }

    /// Fails if kernels come from a folder that lacks one of this GPU's: now rather than during an
    /// answer.
    pub fn check(&self, capability: i32, shared_memory: usize) -> Result<()> {
        let Self::Precompiled(folder) = self else { return Ok(()) };
        let variants = sources::variants(capability, shared_memory);
        let there = |arch: Architecture, (source, defines): &(&'static Source, Defines)| {
            let path = folder.join(image_name(source, defines, &arch.to_string(), None));
            std::fs::metadata(path).is_ok_and(|found| found.len() > 0)
        };
        let lacks = |arch| variants.iter().find(|variant| !there(arch, variant));
        let mut nearest_lacks = None;
        for arch in Architecture::running_on(capability) {
            let Some((source, _)) = lacks(arch) else { return Ok(()) };
            nearest_lacks.get_or_insert(*source);
        }
        Err(missing(folder, nearest_lacks.unwrap_or(variants[0].0), capability))
    }
}

/// The error for a folder that lacks an image.
fn missing(folder: &Path, source: &Source, capability: i32) -> CudaError {
    let (file, folder) = (source.file, folder.display());
    let make = match Architecture::running_on(capability).next() {
        Some(arch) => format!("make them with `oscar kernels --arch {arch} --out {folder}`, or "),
        None => String::new(),
    };
    CudaError::Unsupported(format!(
        "{folder} ({FOLDER_VARIABLE}) lacks images of this version's {file} for sm_{capability}: \
         {make}unset {FOLDER_VARIABLE} to compile here"
    ))
}

/// A GPU architecture that kernels are compiled for ahead of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Architecture {
    /// Compute capability, e.g. 90.
    pub capability: i32,
    /// Shared memory per block, which determines the variants.
    pub shared_memory: usize,
}

impl Architecture {
    pub const ALL: [Self; 8] = [
        Self::of(80, 163),
        Self::of(86, 99),
        Self::of(87, 163),
        Self::of(89, 99),
        Self::of(90, 227),
        Self::of(100, 227),
        Self::of(103, 227),
        Self::of(120, 99),
    ];

    /// The architectures of most GPUs in use; GPUs of the others run the code of one of these.
    pub fn usual() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|a| ![87, 103].contains(&a.capability))
    }

    const fn of(capability: i32, kibibytes: usize) -> Self {
        Self { capability, shared_memory: kibibytes << 10 }
    }

    /// Architectures whose images run on GPUs of this compute capability, the nearest first: of the
    /// same generation, not newer.
    fn running_on(capability: i32) -> impl Iterator<Item = Self> {
        let runs = move |a: &Self| a.capability / 10 == capability / 10 && a.capability <= capability;
        Self::ALL.into_iter().rev().filter(runs)
    }
}

impl std::fmt::Display for Architecture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "sm_{}", self.capability)
    }
}

impl FromStr for Architecture {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let known = || Self::ALL.map(|a| a.to_string()).join(", ");
        Self::ALL
            .into_iter()
            .find(|a| a.to_string() == text)
            .ok_or_else(|| format!("it may be one of {}", known()))
    }
}

/// Compiles all variants for an architecture into a folder, on all cores; images that are there
/// already are kept. `done` is called for each image. Returns their number and bytes.
pub fn precompile(
    compiler: &Compiler,
    architecture: Architecture,
    folder: &Path,
    done: impl Fn() + Sync,
) -> Result<(usize, usize)> {
    let arch = architecture.to_string();
    let jobs = sources::variants(architecture.capability, architecture.shared_memory);
    let (next, bytes) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let failure = Mutex::new(None);
    let work = || {
        while let Some((source, defines)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let path = folder.join(image_name(source, defines, &arch, None));
            let kept = std::fs::metadata(&path).map(|found| found.len() as usize).unwrap_or(0);
            let compile = || compiler.compile(source, defines, &arch);
            let stored = if kept > 0 {
                Ok(kept)
            } else {
                compile().and_then(|image| {
                    store(&path, &image).map_err(|error| {
                        CudaError::Unsupported(format!("{} could not be written: {error}", path.display()))
                    })?;
                    Ok(image.len())
                })
            };
            match stored {
                Ok(size) => bytes.fetch_add(size, Ordering::Relaxed),
                Err(error) => {
                    // Stop the other threads.
                    next.store(jobs.len(), Ordering::Relaxed);
                    if let Ok(mut failure) = failure.lock() {
                        failure.get_or_insert(error);
                    }
                    return;
                }
            };
            done();
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    match failure.into_inner().ok().flatten() {
        Some(error) => Err(error),
        None => Ok((jobs.len(), bytes.into_inner())),
    }
}

fn image_name(source: &Source, defines: &Defines, arch: &str, compiler: Option<(i32, i32)>) -> String {
    let mut hash = Sha256::new();
    let mut part = |text: &str| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    };
    part(source.text);
    HEADERS.iter().for_each(|(name, text)| {
        part(name);
        part(text);
    });
    part(layout::header());
    part(&compile::options(defines, arch).join(" "));
    if let Some(version) = compiler {
        part(&format!("{version:?}"));
    }
    let digest: String = hash.finalize().iter().take(16).map(|b| format!("{b:02x}")).collect();
    format!("{}-{arch}-{digest}.bin", source.file.trim_end_matches(".cu"))
}

/// `$XDG_CACHE_HOME/oscar/kernels`, or under `~/.cache`.
fn cache_folder() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .filter(|v| !v.is_empty())
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
    Some(base.join("oscar").join("kernels"))
}

/// Writes a file atomically, even if others write it at the same time.
fn store(path: &Path, image: &[u8]) -> std::io::Result<()> {
    static STORED: AtomicUsize = AtomicUsize::new(0);
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    // Containers that share the folder may have the same process ids.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let count = STORED.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_extension(format!("tmp-{}-{count}-{now}", std::process::id()));
    let written = File::create_new(&temporary).and_then(|mut file| file.write_all(image));
    written.and_then(|()| std::fs::rename(&temporary, path)).inspect_err(|_| {
        let _ = std::fs::remove_file(&temporary);
    })
}
