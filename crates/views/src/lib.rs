//! Eviction: which rows of a long history are kept.
//!
//! A [`Policy`] names a scorer, a budget and how the budget is divided among heads. [`Scores`] rank
//! the rows of every layer and head, [`select`] keeps the best within the budget, and
//! [`Runner::derive`](oscar_runner::Runner::derive) copies them into a view. Rows are never changed
//! or quantized again. The sink, the recent window and protected positions (system and tool
//! messages) are always kept and do not count.
//!
//! [`Episodes`] keep several views of one history, one for each topic, and route questions to them. A
//! server probes in bounded pieces ([`Probing`]) and keeps the outcome as a [`ViewSet`].
//!
//! **Invariant:** the same tokens, policy and format give the same rows: scores are sums of integers
//! or maxima, and ties go to the lower position. Knows no request and no text.

mod blend;
mod budget;
mod clusters;
mod embedding;
mod episodes;
mod expected;
mod observe;
mod policy;
mod probing;
mod scorers;
mod select;
mod topics;
mod view_set;

pub use budget::{Budget, BudgetError, apportion};
pub use embedding::InputEmbeddings;
pub use episodes::Episodes;
pub use observe::{Observed, observe};
pub use policy::{Evict, Eviction, HeadSplit, Policy, PolicyError};
pub use probing::Probing;
pub use scorers::{History, Probe, Ranking, Scorer, Scores, score, scorer};
pub use select::{Selection, select};
pub use topics::{EpisodeOptions, Route, Topics};
pub use view_set::{Keep, ViewSet};
