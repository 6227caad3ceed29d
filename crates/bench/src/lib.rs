//! Benchmarks as a library: load against an engine, bare or behind HTTP, the drawing of its results,
//! timed attention over random pages, and the row that every measurement prints.
//!
//! **Invariant:** nothing here prints or knows flags; `oscar bench` does both.

pub mod attention;
mod chart;
mod http;
mod load;
mod row;
mod streams;

use anyhow::{Context, Result};
use oscar_codec::KvFormat;
use oscar_codec::random::SplitMix64;
use oscar_engine::{EngineApi, EngineHandle, SharedConstraint};
use oscar_text::ModelText;
use std::sync::Arc;

pub use chart::draw;
pub use http::HttpEngine;
pub use load::{Arrivals, Load, Outcome, Percentiles};
pub use row::Row;
pub use streams::{Streams, StreamsOutcome};

/// How often two kinds of work take turns.
const ROUNDS: usize = 3;

/// What one format did under load.
pub struct FormatResult {
    pub kv: KvFormat,
    /// Name of the device, as `--device` takes it.
    pub device: &'static str,
    pub outcome: Outcome,
    pub over_http: Option<Outcome>,
    /// The same work with answers that must have a form.
    pub constrained: Option<Outcome>,
}

impl FormatResult {
    /// What HTTP adds to the time of the bare engine, as a share of it.
    pub fn http_overhead(&self) -> Option<f64> {
        self.over_http.as_ref().map(|http| http.seconds / self.outcome.seconds - 1.0)
    }

    /// What the form adds to the time of a token, as a share of it.
    pub fn constraint_cost(&self) -> Option<f64> {
        let constrained = self.constrained.as_ref()?.decode_tokens_per_s()?;
        Some(self.outcome.decode_tokens_per_s()? / constrained - 1.0)
    }
}

/// The work on the bare engine and over HTTP, by turns so that a noisy machine disturbs both; the
/// best of each.
pub fn drive_both(
    engine: &EngineHandle,
    text: ModelText,
    load: &Load,
    progress: &dyn Fn(usize),
) -> Result<(Outcome, Outcome)> {
    let http = HttpEngine::start(Arc::new(engine.clone()), Arc::new(text))?;
    by_turns(engine, || load.drive(engine, progress), || load.drive(&http, progress))
}

/// The work with free answers and with answers of a form, by turns; the best of each.
pub fn drive_free_and_formed(
    engine: &EngineHandle,
    load: &Load,
    constraint: Option<SharedConstraint>,
    progress: &dyn Fn(usize),
) -> Result<(Outcome, Outcome)> {
    let formed = Load { constraint, ..load.clone() };
    by_turns(engine, || load.drive(engine, progress), || formed.drive(engine, progress))
}

/// Drives two kinds of work by turns, each with an empty cache; the best of each.
fn by_turns(
    engine: &EngineHandle,
    first: impl Fn() -> Result<Outcome>,
    second: impl Fn() -> Result<Outcome>,
) -> Result<(Outcome, Outcome)> {
    let (mut firsts, mut seconds): (Option<Outcome>, Option<Outcome>) = (None, None);
    let keep_best = |best: &mut Option<Outcome>, new: Outcome| {
        if best.as_ref().is_none_or(|b| new.seconds < b.seconds) {
            *best = Some(new);
        }
    };
    for _ in 0..ROUNDS {
        engine.flush_cache();
        keep_best(&mut firsts, first()?);
        engine.flush_cache();
        keep_best(&mut seconds, second()?);
    }
    firsts.zip(seconds).context("nothing was measured")
}

/// Token ids that look like nothing in particular.
pub fn random_tokens(count: usize, vocab: usize, seed: u64) -> Vec<u32> {
    let mut random = SplitMix64::new(seed);
    (0..count).map(|_| random.below(vocab) as u32).collect()
}
