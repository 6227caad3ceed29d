//! Long-context tasks: generators, scoring and calibration text.
//!
//! Everything here is a pure function of its arguments. The crate opens no files, runs no model and
//! knows no tokenizer; if a prompt must fit a token budget, the caller passes a counting closure.
//! Randomness comes from [`Random`] (ChaCha8) alone, so a case is reproduced by its name, its seed
//! and its size, on every machine.
//!
//! - [`chat`]: the sixteen families of chat tasks that the bundled demo model was trained on.
//! - [`ruler`]: the RULER benchmark (NVIDIA, arXiv 2404.06654) with its official wordings.
//! - [`filler`]: haystack paragraphs, generated or supplied by the caller.
//! - [`score`]: exact match, first divergence, and RULER's two string metrics.
//! - [`calibration`]: the documents that `oscar calibrate` reads without `--text`.
//!
//! # Seed ranges
//!
//! Evaluation uses seeds below [`CALIBRATION_SEEDS_FROM`] (2^40), calibration only seeds from there
//! on, so a rotation is never fitted on a case that later measures it.

pub mod calibration;
pub mod chat;
mod error;
pub mod filler;
mod random;
pub mod ruler;
pub mod score;

pub use calibration::{CALIBRATION_SEEDS_FROM, Document, calibration_text};
pub use chat::{AgentCase, AgentStep, AgentTask, Case, Role, Task, Turn};
pub use error::TaskError;
pub use filler::{Filler, GrammarFiller, ParagraphFiller};
pub use random::Random;
pub use ruler::{QaSet, RulerCase, RulerConfig, RulerGenerator, RulerTask};
pub use score::Metric;
