//! Errors of the GPU, with advice.

use oscar_backend::{BackendError, Feature};

/// A refusal of the driver, a library, the compiler or the device.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CudaError {
    #[error(
        "no NVIDIA driver was found (libcuda.so.1 could not be loaded): install the driver, or use --device cpu"
    )]
    NoDriver,
    #[error(
        "the NVIDIA driver reports no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"
    )]
    NoDevice,
    #[error("GPU {index} does not exist: this machine has {count}")]
    NoSuchDevice { index: usize, count: usize },
    #[error(
        "the NVIDIA driver is too old: it supports CUDA {major}.{minor}, OSCAR needs 12.0 (driver 525) or newer"
    )]
    OldDriver { major: i32, minor: i32 },
    #[error("{name} has compute capability {major}.{minor}: OSCAR needs 8.0 (Ampere) or newer")]
    OldDevice { name: String, major: i32, minor: i32 },
    #[error("{library} was not found (looked for {tried}); {advice}")]
    MissingLibrary { library: &'static str, tried: String, advice: &'static str },
    #[error("not enough memory on {device} for {what}: {bytes} bytes asked, {free} of {total} free")]
    OutOfMemory { device: String, what: String, bytes: usize, free: usize, total: usize },
    #[error("{call} failed on {device}: {name} ({message})")]
    Driver { device: String, call: &'static str, name: String, message: String },
    #[error("the kernels in {file} did not compile for {arch}: {log}")]
    Compile { file: &'static str, arch: String, log: String },
    #[error("{call} failed: {message}")]
    Library { call: &'static str, message: String },
    #[error("{0}")]
    Unsupported(String),
    #[error("{what} has a wrong shape: {detail}")]
    Shape { what: &'static str, detail: String },
}

pub type Result<T> = std::result::Result<T, CudaError>;

impl CudaError {
    /// The refusal of a part that has no kernels yet.
    pub(crate) fn lacks(feature: Feature) -> Self {
        Self::Unsupported(format!("there are no kernels for {feature}; use --device cpu"))
    }
}

impl From<CudaError> for BackendError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::OutOfMemory { device, what, bytes, free, total } => Self::OutOfMemory {
                device,
                what: format!("{what} ({free} of {total} bytes are free)"),
                bytes,
            },
            CudaError::Unsupported(why) => Self::Unsupported { device: "cuda".into(), why },
            CudaError::Shape { what, detail } => Self::Shape { what: what.into(), detail },
            other => Self::Device { device: "cuda".into(), why: other.to_string() },
        }
    }
}
