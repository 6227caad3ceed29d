//! The group of layers with a sliding window.
//!
//! A sliding layer of window `w` reads `j > t − w` only, so everything older can go. Such layers have
//! pages of their own: a block of the group holds 64 tokens of every sliding layer and head, and is
//! free once its last position has left the window of every later query. Rows of the group stay in
//! full precision. They need no sink and no boundary, and a window is short beside a long context.

use crate::cache_layout::CacheLayout;
use crate::error::{CodecError, Result};
use crate::format_table::FormatTable;
use crate::page::{PAGE_TOKENS, RowPageCodec};
use crate::window::Windows;
use std::ops::Range;

/// A block of the sliding layers, in full precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlidingPageId(pub u32);

/// Blocks of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    pub full: usize,
    pub coded: usize,
    pub sliding: usize,
    /// Recurrent states ([`recurrent`](crate::recurrent)).
    pub states: usize,
}

/// Which layers slide, and how far they see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlidingGroup {
    window: usize,
    /// By layer.
    slides: Vec<bool>,
}

impl SlidingGroup {
    /// Positions that a query of the group sees, itself among them.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Number of layers in the group.
    pub fn layers(&self) -> usize {
        self.slides.iter().filter(|slides| **slides).count()
    }
}

impl CacheLayout {
    /// The same cache with these layers in a group of their own, which holds the last `window`
    /// positions. Without layers nothing changes.
    ///
    /// # Errors
    /// If the window is empty, a layer does not exist, or no layer is left.
    pub fn with_sliding_layers(mut self, window: usize, layers: &[usize]) -> Result<Self> {
        if layers.is_empty() {
            return Ok(self);
        }
        let mut slides = vec![false; self.layers()];
        for &layer in layers {
            *slides.get_mut(layer).ok_or_else(|| {
                CodecError::Windows(format!("sliding layer {layer} of {} layers", self.layers()))
            })? = true;
        }
        if window == 0 || slides.iter().all(|slides| *slides) {
            return Err(CodecError::Windows(format!(
                "a sliding window of {window} tokens in {} of {} layers: it must have at least one token, and \
                 one layer must see the whole context",
                layers.len(),
                self.layers()
            )));
        }
        self.sliding = Some(SlidingGroup { window, slides });
        Ok(self)
    }

    /// The same cache with the sliding layers of another cache of the same layers.
    pub fn with_sliding_of(mut self, other: &Self) -> Self {
        debug_assert_eq!(self.layers(), other.layers(), "caches of one model");
        self.sliding.clone_from(&other.sliding);
        self
    }

    pub fn sliding(&self) -> Option<&SlidingGroup> {
        self.sliding.as_ref()
    }

    /// Whether the layer's pages are those of the sliding group.
    pub fn slides(&self, layer: usize) -> bool {
        self.sliding.as_ref().is_some_and(|group| group.slides[layer])
    }

    /// The windows by which queries of a layer read its pages.
    pub fn layer_windows(&self, layer: usize) -> Windows {
        match &self.sliding {
            Some(group) if group.slides[layer] => Windows::unlimited().sliding(Some(group.window)),
            _ => *self.windows(),
        }
    }

    /// Codecs of the sliding layers, or of the others.
    pub(crate) fn group<'t>(
        &'t self,
        table: &'t FormatTable,
        slides: bool,
    ) -> impl Iterator<Item = &'t RowPageCodec> {
        let codecs = table.codecs().iter().enumerate();
        let wanted = move |index: &usize| self.slides(index / table.kv_heads()) == slides;
        codecs.filter(move |(index, _)| wanted(index)).map(|(_, codec)| codec)
    }

    /// Bytes of a block of the sliding group; 0 without one.
    pub fn sliding_block_bytes(&self) -> usize {
        self.group(self.full(), true).map(RowPageCodec::page_bytes).sum()
    }

    /// Blocks whose sliding rows a sequence of `len` tokens still needs: those that hold positions
    /// which the next query sees.
    pub fn sliding_blocks(&self, len: usize) -> Range<usize> {
        let Some(group) = &self.sliding else { return 0..0 };
        (len + 1).saturating_sub(group.window) / PAGE_TOKENS..len.div_ceil(PAGE_TOKENS)
    }

    /// Blocks before a whole page whose sliding rows a resume there needs, at most.
    pub fn sliding_reach(&self) -> usize {
        self.sliding.as_ref().map_or(0, |group| (group.window - 1).div_ceil(PAGE_TOKENS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CodeLayout, KvFormat};

    fn layout(format: KvFormat, window: usize) -> CacheLayout {
        let layout = CacheLayout::new(format, 6, 2, 128, Windows::default(), CodeLayout::CpuTile).unwrap();
        layout.with_sliding_layers(window, &[0, 1, 2, 4, 5]).unwrap()
    }

    #[test]
    fn blocks_go_with_the_last_query_that_sees_them() {
        for window in [1, 2, 24, 64, 65, 66, 128, 1000] {
            let layout = layout(KvFormat::OSCAR2, window);
            let sliding = Windows::unlimited().sliding(Some(window));
            for len in 0..1500 {
                let blocks = layout.sliding_blocks(len);
                for block in 0..len.div_ceil(PAGE_TOKENS) {
                    let last = (block + 1) * PAGE_TOKENS - 1;
                    // The window of the next query begins earliest.
                    let visible = last >= sliding.first_visible(len);
                    assert_eq!(blocks.contains(&block), visible, "window {window}, {len} tokens, {block}");
                }
                let reach = layout.sliding_reach();
                assert!(!len.is_multiple_of(PAGE_TOKENS) || blocks.len() <= reach, "{window} {len}");
                assert_eq!(layout.blocks(len).sliding, blocks.len());
            }
        }
    }

    #[test]
    fn a_long_context_pays_for_full_layers_only() {
        for format in [KvFormat::Bf16, KvFormat::OSCAR2] {
            let whole = CacheLayout::new(format, 6, 2, 128, Windows::default(), CodeLayout::CpuTile).unwrap();
            let one = CacheLayout::new(format, 1, 2, 128, Windows::default(), CodeLayout::CpuTile).unwrap();
            let five = CacheLayout::new(KvFormat::Bf16, 5, 2, 128, Windows::default(), CodeLayout::CpuTile);
            let grouped = layout(format, 1024);
            assert_eq!(grouped.page_bits(), whole.page_bits());
            for tokens in [1, 64, 100, 1024, 1087, 30_000] {
                let window = five.as_ref().unwrap().full_block_bytes() * grouped.sliding_blocks(tokens).len();
                assert_eq!(grouped.sequence_bytes(tokens), one.sequence_bytes(tokens) + window, "{tokens}");
            }
            assert_eq!(grouped.blocks(30_000).sliding, 17);
            assert!(5 * grouped.sequence_bytes(100_000) < 2 * whole.sequence_bytes(100_000));
            assert_eq!(grouped.unquantized_block_bytes(), whole.full_block_bytes());
        }
        let bf16 = layout(KvFormat::Bf16, 1024);
        assert_eq!(bf16.bits_per_element(1024), 16.0);
        assert!((16.0..16.2).contains(&bf16.bits_per_element(100_000)), "{}", bf16.bits_per_element(100_000));
        assert!(bf16.describe().contains("5 sliding layers: the last 1024 tokens"), "{}", bf16.describe());
    }

    #[test]
    fn peak_is_what_growing_one_token_at_a_time_needs() {
        for window in [1, 24, 100, 512] {
            let layout = layout(KvFormat::OSCAR2, window);
            let mut peak = 0;
            for tokens in 0..1500 {
                peak = peak.max(layout.sequence_bytes(tokens));
                assert_eq!(layout.peak_bytes(tokens), peak, "window {window}, {tokens} tokens");
            }
        }
    }

    #[test]
    fn sliding_rows_are_read_in_full_precision_within_their_window() {
        let layout = layout(KvFormat::OSCAR2, 500);
        let windows = layout.layer_windows(0);
        assert!((0..3000).all(|t| (0..=t).all(|j| !windows.reads_code(t, j))));
        assert_eq!(windows.first_visible(2999), 2500);
        assert_eq!((layout.slides(0), layout.slides(3)), (true, false));
        assert_eq!(layout.layer_windows(3), *layout.windows());
        assert!(layout.evicts_rows().unwrap_err().contains("sliding window"));
    }

    #[test]
    fn bad_groups_are_refused() {
        let layout =
            || CacheLayout::new(KvFormat::Bf16, 2, 1, 64, Windows::default(), CodeLayout::CpuTile).unwrap();
        for (window, layers, says) in
            [(0, vec![0], "window of 0"), (8, vec![2], "layer 2"), (8, vec![0, 1], "2 of 2 layers")]
        {
            let error = layout().with_sliding_layers(window, &layers).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        assert_eq!(layout().with_sliding_layers(8, &[]).unwrap(), layout());
    }
}
