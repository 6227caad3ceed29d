//! Evaluation: the cost of a KV format in the model's own predictions and answers.
//!
//! [`ppl`] compares next-token distributions on text; [`cases`] and [`run`] ask long-context tasks,
//! RULER and user-supplied [`benchmarks`] through the serving engine. [`conversations`] compares
//! eviction policies on views of one computed history. [`journal`] keeps results, so
//! that an interrupted run can resume.
//!
//! **Invariant:** it measures exactly what serving does: the same engine, the same window rule;
//! only teacher forcing replaces sampling. Seeds of calibration are never used. Knows no HTTP and
//! no command line.

pub mod agent;
pub mod benchmarks;
pub mod cases;
pub mod compare;
pub mod conversations;
mod error;
mod forms;
pub mod generate;
pub mod journal;
pub mod ppl;
pub mod prompts;
pub mod run;
pub mod sandbox;

pub use error::EvalError;
pub use forms::Forms;
pub use generate::Generator;
pub use journal::Journal;
pub use ppl::{PplError, PplOptions, PplResult, WindowSums};
pub use prompts::Prompts;
