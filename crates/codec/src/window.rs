//! Which positions a query reads as code and which in full precision: the one rule.
//!
//! The query at position `t` reads position `j` as its stored code if `sink ≤ j < boundary(t)` and in BF16
//! otherwise. The rule depends on positions alone, so the chunking of a prefill, the batch, a prefix hit or a
//! preemption cannot change an answer, and teacher-forced evaluation measures exactly what serving does.

use crate::error::{CodecError, Result};
use crate::page::TILE_TOKENS;

/// Sizes of the BF16 windows, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    sink: usize,
    recent: usize,
    unit: usize,
}

impl Default for Windows {
    fn default() -> Self {
        Self { sink: 64, recent: 256, unit: TILE_TOKENS }
    }
}

impl Windows {
    /// Windows for a row codec, demoted by 16-token tiles.
    pub fn new(sink: usize, recent: usize) -> Result<Self> {
        Self::with_unit(sink, recent, TILE_TOKENS)
    }

    /// Windows for a codec that demotes `unit` tokens at a time (a multiple of 16: codecs that group along
    /// tokens take their own group).
    pub fn with_unit(sink: usize, recent: usize, unit: usize) -> Result<Self> {
        if !sink.is_multiple_of(TILE_TOKENS) {
            return Err(CodecError::Windows(format!(
                "sink of {sink} tokens: it must be a multiple of {TILE_TOKENS}"
            )));
        }
        if recent == 0 {
            return Err(CodecError::Windows(
                "recent window of 0 tokens: a query must read at least itself in full".into(),
            ));
        }
        if unit == 0 || !unit.is_multiple_of(TILE_TOKENS) {
            return Err(CodecError::Windows(format!(
                "demotion unit of {unit} tokens: it must be a multiple of {TILE_TOKENS}"
            )));
        }
        Ok(Self { sink, recent, unit })
    }

    /// Everything stays in full precision.
    pub fn unlimited() -> Self {
        Self { sink: 0, recent: usize::MAX / 2, unit: TILE_TOKENS }
    }

    pub fn sink(&self) -> usize {
        self.sink
    }

    pub fn recent(&self) -> usize {
        self.recent
    }

    /// Tokens demoted at a time.
    pub fn unit(&self) -> usize {
        self.unit
    }

    /// First position at or beyond the sink that the query at position `t` reads in BF16:
    /// `sink + unit·⌊max(0, t + 1 − sink − recent) / unit⌋`.
    pub fn boundary(&self, t: usize) -> usize {
        self.sink + (t + 1).saturating_sub(self.sink + self.recent) / self.unit * self.unit
    }

    /// Does the query at `t` read position `j ≤ t` as code?
    pub fn reads_code(&self, t: usize, j: usize) -> bool {
        j >= self.sink && j < self.boundary(t)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boundary_steps_by_tiles_and_keeps_the_recent_window() {
        let w = Windows::default();
        assert_eq!(w.boundary(0), 64);
        assert_eq!(w.boundary(334), 64);
        assert_eq!(w.boundary(335), 80);
        for t in 0..3000 {
            let b = w.boundary(t);
            assert!(b.is_multiple_of(16));
            assert!(
                t < 320 || (256..272).contains(&(t + 1 - b)),
                "query {t} sees {} recent tokens",
                t + 1 - b
            );
            assert!(t == 0 || b >= w.boundary(t - 1), "the boundary never moves back");
            assert!(!w.reads_code(t, 63) && !w.reads_code(t, t));
        }
    }

    #[test]
    fn sizes_are_checked() {
        assert!(Windows::new(10, 256).unwrap_err().to_string().contains("10"));
        assert!(Windows::new(64, 0).is_err());
        assert!(Windows::with_unit(64, 128, 24).is_err());
        assert_eq!(Windows::new(0, 1).unwrap().boundary(99), 96);
    }
}
