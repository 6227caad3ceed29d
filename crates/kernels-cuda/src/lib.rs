//! NVIDIA GPUs as a backend: whole models, and attention over 2-bit pages.
//!
//! Nothing of CUDA is needed to build. At run time the driver is found by dynamic loading, the kernels under `kernels/`
//! are compiled by NVRTC at first use and kept on disk, or come from a folder ([`images`]), large matrix products go to cuBLASLt. One
//! [`Device`] has one stream; a step enqueues everything and waits once, when its tokens are chosen: what comes back is
//! a token or a short list for each sequence, or its logits where a request needs them all.
//!
//! Caches of BF16 rows and of affine codes of 1 to 4 bits (`oscar*`, `int1` to `int4`, `naive2`, `saw4`) have kernels of
//! their own. Every other format goes the generic way ([`storage`]): coded on the CPU, kept decoded, read in BF16.
//!
//! Contract between the files: pages are addressed by [`pages`], the tables of a step are made by [`step`] and read by
//! all kernels through `StepTables`; each kernel takes one parameter struct by value ([`device::KernelParams`]);
//! rotated queries are f32, `[row][query head][head_dim]`, attention outputs likewise.
//!
//! **Invariant:** knows no model and no scheduling. Anything missing (driver, GPU, library, memory) is an error with a
//! way out, never a panic.
#![allow(unsafe_code)]

pub mod attention;
pub mod backend;
pub mod bandwidth;
pub mod bench;
pub mod compile;
mod decoded;
pub mod device;
mod error;
pub mod gemm;
pub mod graph;
pub mod images;
mod kernels;
mod launch;
mod library;
pub mod memory;
pub mod pages;
pub mod sources;
pub mod step;
pub mod storage;
mod transfers;

pub use attention::AttentionMode;
pub use backend::{CudaBackend, CudaStep};
pub use device::Device;
pub use error::CudaError;
pub use kernels::Kernels;
