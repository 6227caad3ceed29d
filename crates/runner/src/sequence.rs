//! A sequence in the cache, and its part of a step.

use oscar_backend::{Pick, TokenMask};
use oscar_cache::{PrefixKey, PrefixPages, RadixCache, SequencePages, StepPages};
use oscar_codec::CacheLayout;
use std::ops::Range;
use std::sync::Arc;

/// A sequence in the cache.
#[derive(Debug, Default)]
pub struct Sequence {
    pub(crate) pages: SequencePages,
    /// A step whose pages are set aside.
    pub(crate) reserved: Option<StepPages>,
}

impl Sequence {
    pub fn new() -> Self {
        Self::default()
    }

    /// A sequence that continues a stored prefix (which may be empty) and can be put into the prefix
    /// cache.
    pub fn resume(layout: &CacheLayout, prefix: PrefixPages) -> Self {
        Self { pages: SequencePages::resume(layout, prefix), reserved: None }
    }

    /// Offers the whole pages of the sequence, whose tokens these are, to the prefix cache.
    pub fn publish<'a>(&mut self, cache: &mut RadixCache, key: impl Into<PrefixKey<'a>>) -> usize {
        let PrefixKey { salt, tokens } = key.into();
        let stored = &tokens[..self.pages.len().min(tokens.len())];
        cache.insert(PrefixKey::new(salt, stored), &mut self.pages)
    }

    /// Releases pages that were kept for a prefix cache.
    pub fn trim(&mut self, layout: &CacheLayout) {
        self.pages.trim(layout);
    }

    /// First position at or beyond the sink that is not quantized; the sink itself in caches that
    /// do not quantize.
    pub fn boundary(&self, layout: &CacheLayout) -> usize {
        match layout.coded() {
            Some(_) => self.pages.boundary(layout),
            None => layout.windows().sink(),
        }
    }

    /// Tokens stored.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    pub fn pages(&self) -> &SequencePages {
        &self.pages
    }
}

/// What one sequence brings to a step.
pub struct StepRequest<'a> {
    pub sequence: &'a mut Sequence,
    pub tokens: &'a [u32],
    /// Which of `tokens` want logits.
    pub logits: Logits,
}

/// Rows whose logits are wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Logits {
    None,
    Last,
    All,
    /// Of these tokens of the request.
    Of(Range<usize>),
    /// Of the last token, only its most likely successors.
    Pick(Pick<'static>),
    /// The same among the tokens that are allowed. The step waits for the mask when it needs it.
    PickAmong(Pick<'static>, Arc<TokenMask>),
    /// No logits, but the hidden state of the last token.
    Hidden,
}

impl Logits {
    /// The tokens of a request that want logits.
    pub fn rows(&self, tokens: usize) -> Range<usize> {
        match self {
            Self::None | Self::Hidden => 0..0,
            Self::Last | Self::Pick(_) | Self::PickAmong(..) => tokens.saturating_sub(1)..tokens,
            Self::All => 0..tokens,
            Self::Of(rows) => rows.start.min(tokens)..rows.end.min(tokens),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wanted_rows_lie_inside_the_request() {
        let greedy = Logits::Pick(Pick::Greedy);
        for (wanted, of_five, of_none) in [
            (Logits::None, 0..0, 0..0),
            (Logits::Hidden, 0..0, 0..0),
            (Logits::Last, 4..5, 0..0),
            (greedy, 4..5, 0..0),
            (Logits::All, 0..5, 0..0),
            (Logits::Of(1..3), 1..3, 0..0),
            (Logits::Of(3..9), 3..5, 0..0),
            (Logits::Of(7..9), 5..5, 0..0),
        ] {
            assert_eq!((wanted.rows(5), wanted.rows(0)), (of_five, of_none), "{wanted:?}");
        }
    }
}
