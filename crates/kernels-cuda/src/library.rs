//! Finding the shared libraries that NVIDIA ships apart from the driver.
//!
//! cudarc opens libraries by their bare name and panics if there is none. So we search the usual
//! places first and open the library by its full path; the loader then resolves the bare name to
//! it.

use crate::error::{CudaError, Result};
use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

/// A library, the variable that may name its file or folder, and advice if it is absent.
pub(crate) struct Library {
    pub name: &'static str,
    /// Names to try, newest first; those of the bare form are found through the loader's own paths.
    pub files: &'static [&'static str],
    pub variable: &'static str,
    /// Prefix of the libraries beside it that it opens by bare name.
    pub companions: Option<&'static str>,
    pub advice: &'static str,
}

pub(crate) const NVRTC: Library = Library {
    name: "libnvrtc",
    files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    variable: "OSCAR_NVRTC",
    companions: Some("libnvrtc-builtins.so"),
    advice: "install it (CUDA toolkit, or `pip install nvidia-cuda-nvrtc`) and set OSCAR_NVRTC to its file or folder \
             if it lies in an unusual place, or use --device cpu",
};

pub(crate) const CUBLASLT: Library = Library {
    name: "libcublasLt",
    files: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
    variable: "OSCAR_CUBLASLT",
    companions: None,
    advice: "install it (CUDA toolkit, or `pip install nvidia-cublas`) and set OSCAR_CUBLASLT to its file or folder \
             if it lies in an unusual place, or use --device cpu",
};

pub(crate) const NCCL: Library = Library {
    name: "libnccl",
    files: &["libnccl.so.2", "libnccl.so"],
    variable: "OSCAR_NCCL",
    companions: None,
    advice: "install it (`pip install nvidia-nccl-cu13`) and set OSCAR_NCCL to its file or folder if it lies in an \
             unusual place",
};

impl Library {
    /// Opens the library so that later look-ups by its bare name find it. It stays open until the
    /// process ends.
    pub(crate) fn open(&self) -> Result<PathBuf> {
        let mut tried = Vec::new();
        for candidate in self.candidates() {
            let bare = candidate.parent().is_none_or(|p| p.as_os_str().is_empty());
            if !bare && !candidate.exists() {
                continue;
            }
            if let (false, Some(prefix), Some(folder)) = (bare, self.companions, candidate.parent()) {
                for companion in matching(folder, prefix) {
                    // If it is needed and missing, the compiler reports it.
                    let _ = open_global(&companion);
                }
            }
            match open_global(&candidate) {
                Ok(()) => return Ok(candidate),
                Err(why) if !bare => tried.push(why),
                Err(_) => {}
            }
        }
        tried.push(format!(
            "{} in {}, on LD_LIBRARY_PATH and the system's library path, and in {}",
            self.files.join(", "),
            self.variable,
            folders().iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
        ));
        Err(CudaError::MissingLibrary { library: self.name, tried: tried.join("; "), advice: self.advice })
    }

    fn candidates(&self) -> Vec<PathBuf> {
        let mut all = Vec::new();
        let files = |folder: &Path| self.files.iter().map(|f| folder.join(f)).collect::<Vec<_>>();
        if let Some(given) = std::env::var_os(self.variable).filter(|v| !v.is_empty()) {
            let given = PathBuf::from(given);
            if given.is_dir() {
                all.extend(files(&given))
            } else {
                all.push(given)
            }
            // A named place without the library is an error; no other place is searched.
            return all;
        }
        all.extend(self.files.iter().map(PathBuf::from));
        for folder in folders() {
            all.extend(files(&folder));
        }
        all
    }
}

/// Folders where toolkits and Python wheels put their libraries.
fn folders() -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = Vec::new();
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(root) = std::env::var_os(variable) {
            all.push(PathBuf::from(root).join("lib64"));
        }
    }
    all.push("/usr/local/cuda/lib64".into());
    all.extend(matching(Path::new("/usr/local"), "cuda-").into_iter().map(|p| p.join("lib64")));
    all.push("/usr/lib/x86_64-linux-gnu".into());
    if let Some(environment) = std::env::var_os("VIRTUAL_ENV") {
        for python in matching(&PathBuf::from(environment).join("lib"), "python") {
            for package in matching(&python.join("site-packages/nvidia"), "") {
                all.push(package.join("lib"));
            }
        }
    }
    all
}

/// Entries of a folder that begin with `prefix`, newest name first.
fn matching(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(prefix)))
        .collect();
    found.sort();
    found.reverse();
    found
}

/// The address of a function of a library that was opened by this path.
pub(crate) fn symbol(path: &Path, name: &'static CStr) -> Result<NonNull<c_void>> {
    #[cfg(unix)]
    let address = {
        use std::ffi::CString;
        use std::os::unix::ffi::OsStrExt;
        let path = CString::new(path.as_os_str().as_bytes()).unwrap_or_default();
        // SAFETY: NUL-terminated names. The library is open already and is never closed.
        unsafe { libc::dlsym(libc::dlopen(path.as_ptr(), libc::RTLD_NOW), name.as_ptr()) }
    };
    #[cfg(not(unix))]
    let address = std::ptr::null_mut();
    NonNull::new(address).ok_or_else(|| {
        let message = format!("{} has no {}", path.display(), name.to_string_lossy());
        CudaError::Library { call: "dlsym", message }
    })
}

#[cfg(not(unix))]
fn open_global(path: &Path) -> std::result::Result<(), String> {
    Err(format!("{}: GPUs are supported on Linux only", path.display()))
}

#[cfg(unix)]
fn open_global(path: &Path) -> std::result::Result<(), String> {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    let name =
        CString::new(path.as_os_str().as_bytes()).map_err(|_| "a path with a zero byte".to_string())?;
    // SAFETY: a NUL-terminated name; NVIDIA's libraries may be loaded at any time and are never
    // closed here.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if !handle.is_null() {
        return Ok(());
    }
    // SAFETY: dlerror returns null or a NUL-terminated string that lives until the next dl call of
    // this thread.
    let why = unsafe {
        let message = libc::dlerror();
        if message.is_null() {
            "unknown".into()
        } else {
            std::ffi::CStr::from_ptr(message).to_string_lossy().into_owned()
        }
    };
    Err(why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_names_where_it_was_looked_for_and_what_to_do() {
        let library = Library {
            name: "libnothing",
            files: &["libnothing-of-oscar.so.1"],
            variable: "OSCAR_NOTHING",
            companions: None,
            advice: "install nothing",
        };
        let message = library.open().unwrap_err().to_string();
        for part in
            ["libnothing was not found", "libnothing-of-oscar.so.1", "OSCAR_NOTHING", "install nothing"]
        {
            assert!(message.contains(part), "{message}");
        }
    }
}
