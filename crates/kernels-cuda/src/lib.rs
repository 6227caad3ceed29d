//! NVIDIA GPUs as a backend: whole models, and attention over 2-bit pages.
//!
//! Nothing of CUDA is needed to build. At run time the driver is loaded dynamically. The kernels
//! under `kernels/` are compiled by NVRTC at first use and cached on disk, or come from a folder
//! ([`images`]). Large matrix products go to cuBLASLt. A [`Device`] has one stream. A step enqueues
//! everything and waits once, when its tokens are chosen: a token or a short list for each sequence
//! comes back, or the logits if a request needs them.
//!
//! BF16 caches and caches of affine codes of 1 to 4 bits (`oscar*`, `int1` to `int4`, `naive2`,
//! `saw4`) have their own kernels. The history of every other format is quantized and dequantized
//! on the CPU and kept in BF16 ([`Storage`]).
//!
//! Contract between the files: `pages` addresses pages; `step` makes the tables of a step, which
//! all kernels read through `StepTables`; each kernel takes one parameter struct by value
//! (`layout`); rotated queries and attention outputs are f32, `[row][query head][head_dim]`.
//!
//! # Safety
//! Launches are `unsafe` functions with a contract; copies take slices that know their length. A
//! safe public function checks its arguments, so that no argument can make a kernel touch memory
//! outside of its buffers. That rests on three things which no type expresses:
//! - **Kernels keep to the sizes in their parameters.** `gpu-check` under compute-sanitizer tests
//!   it.
//! - **Objects belong to one device.** Rows, matrices and pages of a second GPU are not recognized.
//!   The program opens only GPU 0.
//! - **Page ids are not tied to their pool.** Memory is mapped for every id of a step, and a page
//!   that the windows require and the step lacks is refused. But an id of another pool is accepted:
//!   it addresses other tokens of this pool, never memory outside of it.
//!
//! **Invariant:** knows no model and no scheduling. Anything missing (driver, GPU, library, memory)
//! is an error that says what to do, never a panic.
#![allow(unsafe_code)]

mod attention;
mod backend;
mod bandwidth;
pub mod bench;
mod blocks;
pub mod compile;
mod dequantized;
mod device;
mod error;
mod gemm;
mod graph;
pub mod images;
mod kernels;
mod launch;
mod layout;
mod library;
mod memory;
mod nccl;
mod pages;
mod profile;
pub mod sources;
mod staging;
mod step;
mod storage;
mod transfers;

pub use attention::AttentionMode;
pub use backend::{
    CudaBackend, CudaExperts, CudaRope, CudaRotation, CudaRows, CudaStep, CudaVector, step_memory,
};
pub use bandwidth::read_ceiling;
pub use device::{Device, Properties};
pub use error::CudaError;
pub use gemm::{CudaMatrix, multiplies_few_rows};
pub use graph::HostTimes;
pub use kernels::Kernels;
pub use memory::{Buffer, DevicePtr, DeviceSlice, Event};
pub use nccl::{NcclId, NcclRank, sum_ranks};
pub use pages::CudaPages;
pub use profile::Profile;
pub use storage::Storage;
