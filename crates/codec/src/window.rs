//! The rule that says which positions a query reads quantized and which in full precision.
//!
//! The query at position `t` reads position `j` quantized if `sink ≤ j < boundary(t)` and in BF16
//! otherwise. The rule depends on positions alone, so the chunking of a prefill, the batch, a
//! prefix hit or a preemption cannot change an answer, and teacher-forced evaluation measures
//! exactly what serving does.
//!
//! Keys and values have the same boundary, except in methods that publish different ones: KIVI and
//! Kitty quantize keys a whole group of tokens at a time while their values slide. Those have one
//! boundary for each side.
//!
//! A layer with a sliding window of `w` tokens reads fewer positions, by the same rule otherwise: the
//! query at `t` sees `j > t − w`, itself included ([`Windows::first_visible`]). The sink leaves such
//! a window like any other position. In a cache where such layers have pages of their own
//! ([`sliding`](crate::sliding)) they read them in full precision.

use crate::error::{CodecError, Result};
use crate::page::{Side, TILE_TOKENS};

/// When one side of a token is quantized: at least `recent` tokens stay in BF16, and `unit` tokens
/// are quantized at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tail {
    pub recent: usize,
    pub unit: usize,
}

/// Sizes of the BF16 windows, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    sink: usize,
    key: Tail,
    value: Tail,
    /// Positions that a query of the layer sees, itself among them; all if absent.
    sliding: Option<usize>,
}

impl Default for Windows {
    fn default() -> Self {
        let tail = Tail { recent: 256, unit: TILE_TOKENS };
        Self { sink: 64, key: tail, value: tail, sliding: None }
    }
}

impl Windows {
    /// Windows for a row codec, demoted by 16-token tiles.
    pub fn new(sink: usize, recent: usize) -> Result<Self> {
        Self::with_unit(sink, recent, TILE_TOKENS)
    }

    /// Windows for a codec that demotes `unit` tokens at a time. `unit` is a multiple of 16; codecs
    /// that group along tokens use their group size.
    pub fn with_unit(sink: usize, recent: usize, unit: usize) -> Result<Self> {
        if !unit.is_multiple_of(TILE_TOKENS) {
            return Err(CodecError::Windows(format!(
                "demotion unit of {unit} tokens: it must be a multiple of {TILE_TOKENS}"
            )));
        }
        let tail = Tail { recent, unit };
        Self::by_side(sink, tail, tail)
    }

    /// Windows whose keys and values are quantized at different times. Keys are quantized in whole
    /// tiles, values may be quantized token by token.
    pub fn by_side(sink: usize, key: Tail, value: Tail) -> Result<Self> {
        if !sink.is_multiple_of(TILE_TOKENS) {
            return Err(CodecError::Windows(format!(
                "sink of {sink} tokens: it must be a multiple of {TILE_TOKENS}"
            )));
        }
        if key.recent == 0 || value.recent == 0 {
            return Err(CodecError::Windows(
                "recent window of 0 tokens: a query must read at least its own position in BF16".into(),
            ));
        }
        if key.unit == 0 || value.unit == 0 || !key.unit.is_multiple_of(TILE_TOKENS) {
            return Err(CodecError::Windows(format!(
                "demotion units of {} and {} tokens: keys take a multiple of {TILE_TOKENS}, values at least 1",
                key.unit, value.unit
            )));
        }
        Ok(Self { sink, key, value, sliding: None })
    }

    /// Everything stays in full precision.
    pub fn unlimited() -> Self {
        let tail = Tail { recent: usize::MAX / 2, unit: TILE_TOKENS };
        Self { sink: 0, key: tail, value: tail, sliding: None }
    }

    /// The windows of a layer whose queries see only the last `window` positions, their own among
    /// them; all positions if absent.
    pub fn sliding(self, window: Option<usize>) -> Self {
        Self { sliding: window, ..self }
    }

    /// First position that the query at position `t` sees.
    pub fn first_visible(&self, t: usize) -> usize {
        self.sliding.map_or(0, |window| (t + 1).saturating_sub(window))
    }

    pub fn sink(&self) -> usize {
        self.sink
    }

    /// Recent tokens that stay in BF16, on the side that keeps more.
    pub fn recent(&self) -> usize {
        self.key.recent.max(self.value.recent)
    }

    pub fn tail(&self, side: Side) -> Tail {
        match side {
            Side::Key => self.key,
            Side::Value => self.value,
        }
    }

    /// Whether keys and values are always quantized together, in whole tiles.
    pub fn sides_agree(&self) -> bool {
        self.key == self.value
    }

    /// First position at or beyond the sink that the query at position `t` reads in BF16 on that
    /// side: `sink + unit·⌊max(0, t + 1 − sink − recent) / unit⌋`.
    pub fn side_boundary(&self, side: Side, t: usize) -> usize {
        let Tail { recent, unit } = self.tail(side);
        self.sink + (t + 1).saturating_sub(self.sink.saturating_add(recent)) / unit * unit
    }

    /// First position at or beyond the sink that the query at `t` reads in BF16 on some side:
    /// between the sink and this position both sides are read quantized.
    pub fn boundary(&self, t: usize) -> usize {
        self.side_boundary(Side::Key, t).min(self.side_boundary(Side::Value, t))
    }

    /// First position from which on the query at `t` reads no side quantized.
    pub fn frontier(&self, t: usize) -> usize {
        self.side_boundary(Side::Key, t).max(self.side_boundary(Side::Value, t))
    }

    /// Tokens after which the boundaries have moved by whole pages and groups. Sizes repeat with
    /// this period.
    pub fn period(&self) -> usize {
        [crate::page::PAGE_TOKENS, self.key.unit, self.value.unit].into_iter().fold(1, least_common_multiple)
    }

    /// Whether the query at `t` reads both key and value of position `j ≤ t` quantized.
    pub fn reads_code(&self, t: usize, j: usize) -> bool {
        j >= self.sink && j >= self.first_visible(t) && j < self.boundary(t)
    }

    /// Whether the query at `t` reads that side of position `j ≤ t` quantized.
    pub fn reads_side_as_code(&self, side: Side, t: usize, j: usize) -> bool {
        j >= self.sink && j >= self.first_visible(t) && j < self.side_boundary(side, t)
    }
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
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

    #[test]
    fn a_sliding_window_counts_the_query_itself() {
        let w = Windows::new(16, 32).unwrap();
        assert_eq!([0, 7, 1000].map(|t| w.first_visible(t)), [0; 3]);
        let sliding = w.sliding(Some(8));
        assert_eq!([0, 7, 8, 1000].map(|t| sliding.first_visible(t)), [0, 0, 1, 993]);
        assert_eq!(sliding.boundary(1000), w.boundary(1000), "which positions are coded stays the same");
        let wide = w.sliding(Some(100));
        for t in 0..300 {
            for j in 0..=t {
                assert_eq!(wide.reads_code(t, j), w.reads_code(t, j) && j + 100 > t, "{t} {j}");
            }
        }
    }

    /// KIVI's residual of 128: the key tail grows to 128 tokens and is flushed whole, values slide.
    #[test]
    fn sides_may_flush_and_slide() {
        let w = Windows::by_side(0, Tail { recent: 1, unit: 128 }, Tail { recent: 129, unit: 1 }).unwrap();
        for t in 0..1000 {
            let (key, value) = (w.side_boundary(Side::Key, t), w.side_boundary(Side::Value, t));
            assert_eq!(t + 1 - key, t % 128 + 1, "full keys that query {t} reads");
            assert_eq!(t + 1 - value, (t + 1).min(129));
            assert_eq!((w.boundary(t), w.frontier(t)), (value.min(key), key.max(value)));
        }
        assert!(!w.sides_agree() && Windows::default().sides_agree());
        assert_eq!((w.period(), Windows::default().period()), (128, 64));
        assert!(w.reads_side_as_code(Side::Key, 128, 127) && !w.reads_side_as_code(Side::Value, 128, 127));
        let tail = |recent, unit| Tail { recent, unit };
        assert!(Windows::by_side(0, tail(1, 24), tail(1, 1)).is_err());
        assert!(Windows::by_side(0, tail(1, 16), tail(0, 1)).is_err());
        assert!(Windows::by_side(0, tail(1, 16), tail(1, 0)).is_err());
    }
}
