//! Compilation of kernels by NVRTC.

use crate::error::{CudaError, Result};
use crate::layout;
use crate::library;
use crate::sources::{Defines, HEADERS, Source};
use cudarc::nvrtc::sys::{self, nvrtcResult};
use std::ffi::{CStr, CString};
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
    /// Finds libnvrtc; its absence is an ordinary error.
    pub fn open() -> Result<Self> {
        static OPENED: OnceLock<Result<Compiler>> = OnceLock::new();
        OPENED.get_or_init(Self::load).clone()
    }

    fn load() -> Result<Self> {
        library::NVRTC.open()?;
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: the library is open; out-parameters of the right types, the array as long as the
        // count it asks for.
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

    /// Whether it makes machine code for GPUs of this compute capability (e.g. 90).
    pub fn knows(&self, capability: i32) -> bool {
        self.architectures.contains(&capability)
    }

    /// The target for a GPU of compute capability `capability` (e.g. 90): machine code if this
    /// compiler knows the GPU, else PTX of the newest architecture it knows, which the driver
    /// translates.
    pub fn arch_for(&self, capability: i32) -> Result<String> {
        let known = self.knows(capability);
        let newest = self.architectures.iter().copied().filter(|&a| a <= capability).max();
        match (known, newest) {
            (true, _) => Ok(format!("sm_{capability}")),
            (false, Some(newest)) => Ok(format!("compute_{newest}")),
            (false, None) => Err(CudaError::Unsupported(format!(
                "NVRTC {}.{} makes no code for compute capability {capability}: install an NVRTC that does",
                self.version.0, self.version.1
            ))),
        }
    }

    /// The image of a variant for `sm_90` (machine code) or `compute_90` (PTX).
    pub fn compile(&self, source: &'static Source, defines: &Defines, arch: &str) -> Result<Vec<u8>> {
        compile_with(source, defines, arch, layout::header())
    }
}

pub(crate) fn options(defines: &Defines, arch: &str) -> Vec<String> {
    let mut all = vec![
        format!("--gpu-architecture={arch}"),
        "--std=c++17".into(),
        "--device-as-default-execution-space".into(),
        // Kernels name fused multiply-adds where they want them: codes must equal the CPU's bit for
        // bit.
        "--fmad=false".into(),
        "--define-macro=OSCAR_CUDA".into(),
    ];
    all.extend(defines.iter().map(|(name, value)| format!("--define-macro={name}={value}")));
    // For compute-sanitizer: `RACECHECK` is for its racecheck tool.
    let more = std::env::var("OSCAR_CUDA_DEFINES").unwrap_or_default();
    all.extend(more.split(',').filter(|name| !name.is_empty()).map(|name| format!("--define-macro={name}")));
    all
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

/// Compiles a variant; `layouts` is the text of `layout.cuh`.
pub(crate) fn compile_with(
    source: &'static Source,
    defines: &Defines,
    arch: &str,
    layouts: &str,
) -> Result<Vec<u8>> {
    let c = |text: &str| {
        CString::new(text).map_err(|_| CudaError::Compile {
            file: source.file,
            arch: arch.into(),
            log: "the source holds a zero byte".into(),
        })
    };
    let arch = &if source.hopper { format!("{arch}a") } else { arch.to_owned() };
    let (text, name) = (c(source.text)?, c(source.file)?);
    let all = || HEADERS.iter().copied().chain([("layout.cuh", layouts)]);
    let headers = all().map(|(_, text)| c(text)).collect::<Result<Vec<_>>>()?;
    let names = all().map(|(name, _)| c(name)).collect::<Result<Vec<_>>>()?;
    let options = options(defines, arch).iter().map(|o| c(o)).collect::<Result<Vec<_>>>()?;
    let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
    let (header_pointers, name_pointers, option_pointers) =
        (pointers(&headers), pointers(&names), pointers(&options));
    let mut program = Program(null_mut());
    // SAFETY: NUL-terminated strings that outlive the calls, counts that match the arrays, buffers
    // of the sizes that the library returned.
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
