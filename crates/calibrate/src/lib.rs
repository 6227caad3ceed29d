//! Rotations for the 2-bit key-value cache: the calibration that makes them and the files that hold
//! them.
//!
//! [`calibrate()`] runs a model over text and observes its heads: [`moments`] sums second moments
//! as tokens pass (nothing is written to disk), [`spectrum`] turns them into eigenbases,
//! [`clip_fit`] picks clip ratios, and [`quality`] measures the cost of two bits with and without
//! the rotation. [`bits`] then gives each head the width that it needs. The result is a
//! [`RotationFile`] and a [`CalibrationReport`]. [`calibrate_model`] does all of it for a model and
//! its tokenizer. [`zoo`] reads and writes the files of the public RotationZoo.
//!
//! **Invariant:** this crate knows models, matrices and files, never requests or serving. Memory
//! beyond the model depends on its shape alone, not on the amount of text.

pub mod bits;
mod calibrate;
pub mod clip_fit;
mod error;
mod model;
pub mod moments;
mod options;
mod parallel;
pub mod quality;
pub mod report;
pub mod rotation_file;
pub mod sample;
pub mod spectrum;
pub mod symmetric;
pub mod text_input;
pub mod zoo;

pub use calibrate::{Calibration, Progress, Stage, calibrate};
pub use error::CalibrateError;
pub use model::{CalibratedModel, Input, ModelOptions, ProbeKind, Subject, WidthOptions, calibrate_model};
pub use options::{CalibrationOptions, ClipPolicy, CodeRounding, Granularity, MemoryPlan, Statistic};
pub use report::{CalibrationReport, write_report};
pub use rotation_file::{Clips, Metadata, RotationFile, RotationFileError};
pub use text_input::split_tokens;
