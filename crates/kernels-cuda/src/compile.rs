//! NVRTC at work, and the compiled kernels kept on disk.
//!
//! A cached image is named by the hash of everything that determines it (sources, definitions, architecture, compiler
//! version) and appears by an atomic rename, so a half-written or outdated one is never loaded.

use crate::error::{CudaError, Result};
use crate::library;
use crate::sources::{Defines, HEADERS, Source};
use cudarc::nvrtc::sys::{self, nvrtcResult};
use sha2::{Digest, Sha256};
use std::ffi::{CStr, CString};
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::OnceLock;

/// The compiler, found and opened.
#[derive(Clone, Debug)]
pub struct Compiler {
    version: (i32, i32),
    /// Architectures it makes machine code for, ascending, e.g. 90.
    architectures: Vec<i32>,
}

impl Compiler {
    /// Finds libnvrtc; its absence is an ordinary answer.
    pub fn open() -> Result<Self> {
        static OPENED: OnceLock<Result<Compiler>> = OnceLock::new();
        OPENED.get_or_init(Self::load).clone()
    }

    fn load() -> Result<Self> {
        library::NVRTC.open()?;
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: the library is open; out-parameters of the right types, the array as long as the count it asks for.
        unsafe {
            check("nvrtcVersion", sys::nvrtcVersion(&mut major, &mut minor))?;
            check("nvrtcGetNumSupportedArchs", sys::nvrtcGetNumSupportedArchs(&mut count))?;
            let mut architectures = vec![0; count as usize];
            check("nvrtcGetSupportedArchs", sys::nvrtcGetSupportedArchs(architectures.as_mut_ptr()))?;
            architectures.sort_unstable();
            Ok(Self { version: (major, minor), architectures })
        }
    }

    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The image of a variant for a GPU of compute capability `capability` (e.g. 90): machine code where this compiler
    /// knows the GPU, else PTX of the newest architecture it knows, which the driver translates.
    pub fn image(&self, source: &'static Source, defines: &Defines, capability: i32) -> Result<Vec<u8>> {
        let known = self.architectures.contains(&capability);
        let newest = self.architectures.iter().copied().filter(|&a| a <= capability).max();
        let arch = match (known, newest) {
            (true, _) => format!("sm_{capability}"),
            (false, Some(newest)) => format!("compute_{newest}"),
            (false, None) => {
                return Err(CudaError::Unsupported(format!(
                    "NVRTC {}.{} makes no code for compute capability {capability}: install an NVRTC that does",
                    self.version.0, self.version.1
                )));
            }
        };
        let path = cache_folder().map(|folder| folder.join(self.image_name(source, defines, &arch)));
        if let Some(image) = path.as_ref().and_then(|p| std::fs::read(p).ok()).filter(|i| !i.is_empty()) {
            return Ok(image);
        }
        let image = compile(source, defines, &arch)?;
        if let Some(path) = path {
            // A cache that cannot be written costs time at the next start, nothing else.
            let _ = store(&path, &image);
        }
        Ok(image)
    }

    /// Compiles without looking at or filling the cache.
    pub fn compile(&self, source: &'static Source, defines: &Defines, arch: &str) -> Result<Vec<u8>> {
        compile(source, defines, arch)
    }

    fn image_name(&self, source: &Source, defines: &Defines, arch: &str) -> String {
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
        part(&options(defines, arch).join(" "));
        part(&format!("{:?}", self.version));
        let digest: String = hash.finalize().iter().take(16).map(|b| format!("{b:02x}")).collect();
        format!("{}-{arch}-{digest}.bin", source.file.trim_end_matches(".cu"))
    }
}

fn options(defines: &Defines, arch: &str) -> Vec<String> {
    let mut all = vec![
        format!("--gpu-architecture={arch}"),
        "--std=c++17".into(),
        "--device-as-default-execution-space".into(),
        // Kernels ask for fused multiply-add by name where they want it: codes must equal the CPU's bit for bit.
        "--fmad=false".into(),
        "--define-macro=OSCAR_CUDA".into(),
    ];
    all.extend(defines.iter().map(|(name, value)| format!("--define-macro={name}={value}")));
    // For tools that look at kernels: `RACECHECK` is for the one of that name.
    let more = std::env::var("OSCAR_CUDA_DEFINES").unwrap_or_default();
    all.extend(more.split(',').filter(|name| !name.is_empty()).map(|name| format!("--define-macro={name}")));
    all
}

/// `$XDG_CACHE_HOME/oscar/kernels`, or under `~/.cache`.
fn cache_folder() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .filter(|v| !v.is_empty())
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
    Some(base.join("oscar").join("kernels"))
}

fn store(path: &std::path::Path, image: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let temporary = path.with_extension(format!("tmp{}", std::process::id()));
    std::fs::write(&temporary, image)?;
    std::fs::rename(&temporary, path).inspect_err(|_| {
        let _ = std::fs::remove_file(&temporary);
    })
}

fn check(call: &'static str, result: nvrtcResult) -> Result<()> {
    if result == nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    // SAFETY: returns a static string for every code.
    let message = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(result)) };
    Err(CudaError::Library { call, message: message.to_string_lossy().into_owned() })
}

/// A program that is destroyed when dropped.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: our own program, dropped once.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

fn compile(source: &'static Source, defines: &Defines, arch: &str) -> Result<Vec<u8>> {
    let c = |text: &str| {
        CString::new(text).map_err(|_| CudaError::Compile {
            file: source.file,
            arch: arch.into(),
            log: "the source holds a zero byte".into(),
        })
    };
    let (text, name) = (c(source.text)?, c(source.file)?);
    let headers = HEADERS.iter().map(|(_, text)| c(text)).collect::<Result<Vec<_>>>()?;
    let names = HEADERS.iter().map(|(name, _)| c(name)).collect::<Result<Vec<_>>>()?;
    let options = options(defines, arch).iter().map(|o| c(o)).collect::<Result<Vec<_>>>()?;
    let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
    let (header_pointers, name_pointers, option_pointers) =
        (pointers(&headers), pointers(&names), pointers(&options));
    let mut program = Program(null_mut());
    // SAFETY: NUL-terminated strings that outlive the calls, counts that match the arrays, buffers of the sizes asked
    // for beforehand.
    unsafe {
        check(
            "nvrtcCreateProgram",
            sys::nvrtcCreateProgram(
                &mut program.0,
                text.as_ptr(),
                name.as_ptr(),
                headers.len() as i32,
                header_pointers.as_ptr(),
                name_pointers.as_ptr(),
            ),
        )?;
        let result = sys::nvrtcCompileProgram(program.0, options.len() as i32, option_pointers.as_ptr());
        if result != nvrtcResult::NVRTC_SUCCESS {
            let mut size = 0;
            check("nvrtcGetProgramLogSize", sys::nvrtcGetProgramLogSize(program.0, &mut size))?;
            let mut log = vec![0u8; size];
            check("nvrtcGetProgramLog", sys::nvrtcGetProgramLog(program.0, log.as_mut_ptr().cast()))?;
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
            return Err(CudaError::Compile { file: source.file, arch: arch.into(), log });
        }
        let mut size = 0;
        if arch.starts_with("sm_") {
            check("nvrtcGetCUBINSize", sys::nvrtcGetCUBINSize(program.0, &mut size))?;
            let mut image = vec![0u8; size];
            check("nvrtcGetCUBIN", sys::nvrtcGetCUBIN(program.0, image.as_mut_ptr().cast()))?;
            Ok(image)
        } else {
            check("nvrtcGetPTXSize", sys::nvrtcGetPTXSize(program.0, &mut size))?;
            let mut image = vec![0u8; size];
            check("nvrtcGetPTX", sys::nvrtcGetPTX(program.0, image.as_mut_ptr().cast()))?;
            Ok(image)
        }
    }
}
