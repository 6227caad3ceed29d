//! What eviction asks of a device: attention weights by row of history, and the rows themselves.

use crate::{Backend, BackendError, CacheHead};
use std::ops::Range;

/// How the weights that several queries give to a row become one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    Max,
    Sum,
}

/// Attention weights that the queries of a step give to the history of its one sequence, over all
/// query heads of a KV head.
///
/// A head's rows of history are those of its view, then the positions from the view's end on; without
/// a view the positions from the sink on. `oscar_codec::scores` defines a weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Scoring {
    /// Rows of the step that count as queries.
    pub queries: Range<usize>,
    /// Positions before this one are scored.
    pub until: usize,
    /// Positions that the softmax runs over; all that a query sees if absent. Only without a view.
    pub over: Option<Vec<Range<usize>>>,
    pub reduce: Reduce,
    /// By layer and head, then by row, in units of 2^-40: sums of integers do not depend on the
    /// order, so chunks of a prompt give equal scores.
    pub scores: Vec<Vec<u64>>,
}

impl Scoring {
    /// One in the units of scores.
    pub const ONE: f32 = (1u64 << 40) as f32;

    /// Adds the weight of one query to a score.
    pub fn add(&self, score: &mut u64, weight: f32) {
        let weight = (weight * Self::ONE) as u64;
        *score = match self.reduce {
            Reduce::Max => weight.max(*score),
            Reduce::Sum => *score + weight,
        };
    }
}

/// Some of a head's quantized rows before position `until`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadHistory {
    pub head: CacheHead,
    pub until: usize,
    /// Which of them, those of a view first. It may end behind the last one.
    pub rows: Range<usize>,
    /// Whether values are read beside keys.
    pub values: bool,
}

impl HeadHistory {
    /// Keys and values of all rows.
    pub fn whole(head: CacheHead, until: usize) -> Self {
        Self { head, until, rows: 0..usize::MAX, values: true }
    }
}

/// Dequantized rows of one head's history, in the cache's basis, one row after the other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HistoryRows {
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
}

/// How a device can choose the rows that a view keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowEviction {
    /// And what to do about it.
    Never(&'static str),
    /// By their positions and keys.
    ByKeys,
    /// By the weights that queries give them, too.
    ByScores,
}

/// Why most devices never evict rows.
pub const NO_ROW_EVICTION: &str =
    "it does not evict rows of a cache: leave --evict and --kv-budget out, or use --device cpu";

/// The answer of a device that cannot evict rows.
pub fn eviction_refusal<B: Backend>(backend: &B, why: &str) -> BackendError {
    BackendError::Unsupported { device: backend.describe(), why: why.into() }
}
