//! CPU kernels: matrix products, row operations and the threads that run them.
//!
//! Every operation has a scalar implementation, which is its specification, and one implementation
//! per instruction set that is tested against it. [`Variant`] names the instruction sets,
//! [`Kernels`] is the table of functions of one of them, and [`ThreadPool`] runs an operation's
//! tasks.
//!
//! Invariant: within one variant, the numbers computed for a row depend on that row alone: not on
//! the rows beside it, not on its place in the batch, not on the number of threads. Serving relies
//! on it, so that the same request gives the same answer alone and in a crowd.
//!
//! This crate knows nothing of models, requests or scheduling.

// SIMD intrinsics, tile instructions and the fork-join pool cannot be written without it; the
// workspace denies `unsafe` everywhere else. Each block states why it is sound.
#![allow(unsafe_code)]

pub mod allocator;
pub mod attention;
pub mod backend;
pub mod bandwidth;
pub mod bench;
pub mod buffer;
pub mod cpu;
mod disjoint;
pub mod experts;
pub mod float_env;
pub mod gemm;
pub mod kernels;
pub mod ops;
pub mod pool;
mod ranks;
#[cfg(target_arch = "x86_64")]
pub(crate) mod tiles;

pub use cpu::{CpuError, Variant};
pub use gemm::{Epilogue, GemmScratch, PackError, PackedMatrix, Precision, Weights};
pub use kernels::Kernels;
pub use pool::ThreadPool;
pub use ranks::ThreadRank;
