//! The `oscar` command as people and scripts use it: the real binary, its output, its exit status.

mod bad_input;
#[cfg(unix)]
mod batch;
mod benchmark_tables;
mod calibration;
mod clients;
mod commands;
mod deploy;
mod docs;
mod episodes;
mod evaluation;
mod families;
#[cfg(unix)]
mod first_start;
mod fp8;
#[cfg(target_os = "linux")]
mod hardening;
mod licences;
mod python;
mod ranks;
#[cfg(all(target_os = "linux", debug_assertions))]
mod readiness;
#[cfg(unix)]
mod redis;
#[cfg(unix)]
mod reports;
#[cfg(all(unix, feature = "s3"))]
mod s3;
mod server;
#[cfg(target_os = "linux")]
mod soak;
mod store;
mod support;
mod transfer;
