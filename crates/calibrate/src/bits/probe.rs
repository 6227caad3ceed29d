//! What predictions are measured on.

use oscar_codec::PAGE_TOKENS;
use std::ops::Range;

/// Tokens before the first scored one that already read the quantized history, at least: a question
/// is answered while it is read.
const LEAD: usize = 32;

/// Something the model should predict as well as with an exact cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Probes of a group are one figure: `text`, `copy`, …
    pub group: String,
    pub tokens: Vec<u32>,
    /// Positions whose predictions count; position `p` predicts token `p + 1`.
    pub scored: Range<usize>,
}

impl Probe {
    /// First position of the ending, the part that is read once for each version of the history:
    /// the scored positions and some before them, from a page boundary on.
    pub(super) fn end(&self) -> usize {
        self.scored.start.saturating_sub(LEAD) / PAGE_TOKENS * PAGE_TOKENS
    }

    /// Tokens of the ending.
    pub(super) fn ending(&self) -> usize {
        self.tokens.len() - self.end()
    }
}
