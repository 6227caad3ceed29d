//! Evidence: what a KV format costs in the model's own predictions.
//!
//! **Invariant:** measures exactly what serving does: the same engine, the same window rule, teacher forcing only
//! instead of sampling. Knows no HTTP.

pub mod ppl;

pub use ppl::{PplError, PplOptions, PplResult, evaluate};
