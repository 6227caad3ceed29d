//! One module for each command.

pub mod batch;
pub mod bench;
pub mod bits;
pub mod calibrate;
pub mod compare;
pub mod doctor;
pub mod eval;
pub mod gpu_check;
pub mod kernels;
pub mod manual;
pub mod plan;
pub mod run;
pub mod serve;
#[cfg(unix)]
pub mod soak;
pub mod store;
pub mod zoo;
