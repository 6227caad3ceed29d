//! Bits where they matter: a code width for each layer, KV head and side, chosen by the harm it
//! does.
//!
//! A *unit* is the keys or the values of one layer and KV head. [`probe_harm`] codes one unit at a
//! time, everything else exact, and watches how far the model's predictions move; [`absent_harm`]
//! does the same with a head that keeps no history at all; [`solve`] finds the widths of least
//! total harm at a given mean; [`refine`] runs the whole table through the coded cache and
//! exchanges bits between units as long as that helps, because units interact. No gradients
//! anywhere.
//!
//! **Invariant:** harm is measured in the model's own predictions (KL divergence to the exact cache), on text *and*
//! on answers that need distant tokens. Text alone does not show the heads that copy.

mod checkpoint;
mod judge;
mod probe;
mod refine;
mod search;
mod solve;
mod table;

pub use judge::{Judge, Scores};
pub use probe::{HarmOptions, Probe, ProbeHarm, absent_harm, probe_harm};
pub use refine::{RefineOptions, Refined, refine};
pub use search::{Chosen, Refused, Search, Watch};
pub use solve::{Freedom, solve};
pub use table::{ABSENT, BitPlan, HarmMap, WIDTHS, WidthTable};
