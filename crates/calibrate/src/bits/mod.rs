//! Bits where they matter: a code width for each layer, KV head and side, chosen by the harm it
//! does.
//!
//! A *unit* is the keys or the values of one KV head of a layer with full attention
//! ([`WidthLayers`]). [`HarmMap`] holds the harm of each unit at each width: one unit is quantized at
//! a time, everything else exact, and the model's predictions are compared. Heads without history
//! are measured in a cache of four bits. [`solve`] finds the widths of least total harm at a given
//! mean, [`Search`] then moves bits between units that interact and verifies the table on other
//! probes. A table that is worse than its safer neighbour on any kind of probe is repaired or
//! refused. No gradients are needed.
//!
//! **Invariant:** harm is measured in the model's own predictions (KL divergence to the exact
//! cache), on text *and* on answers that need distant tokens. Text alone does not show the heads
//! that copy.

mod absent;
mod checkpoint;
mod harm;
mod judge;
mod layers;
mod probe;
mod refine;
mod scores;
mod search;
mod solve;
mod table;

pub use harm::{HarmOptions, HarmPlan, ProbeHarm};
pub use judge::Judge;
pub use layers::WidthLayers;
pub use probe::Probe;
pub use scores::{Broken, GroupScore, Scores, Worse};
pub use search::{Chosen, Refused, Search, Watch};
pub use solve::{Freedom, solve};
pub use table::{ABSENT, BitPlan, HarmMap, WIDEST, WIDTHS, WidthTable};
