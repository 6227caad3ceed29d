//! Positions that leave the recent window and are quantized.

use super::CpuBackend;
use super::pages::{CpuPages, HeadPages};
use crate::attention;
use oscar_backend::SequenceRows;
use oscar_codec::{CodedPageId, FullPageId, PAGE_TOKENS, Side, TILE_TOKENS};

impl CpuBackend {
    /// Quantizes the keys of every sequence's `demote` range of one layer and the values of its
    /// `demote_values`. Sliding layers are never quantized.
    pub(super) fn demote_layer(&self, layer: usize, sequences: &[SequenceRows<'_>], pool: &mut CpuPages) {
        let slides = pool.layout().slides(layer);
        if slides || sequences.iter().all(|s| s.demote.is_empty() && s.demote_values.is_empty()) {
            return;
        }
        let (layout, full, coded) = pool.layer_mut(layer);
        let Some(table) = layout.coded() else { return };
        let mut tasks: Vec<_> = full.iter().zip(coded).enumerate().collect();
        self.pool.run_chunks(&mut tasks, 1, |_, task| {
            let (head, (full, coded)) = &mut task[0];
            let codecs = attention::DemotionCodecs {
                full: layout.full().codec(layer, *head),
                coded: table.codec(layer, *head),
            };
            let by_tiles = layout.windows().sides_agree() && codecs.coded.token_groups(Side::Key).is_none();
            for sequence in sequences {
                if by_tiles {
                    self.demote_tiles(codecs, sequence, full, coded);
                } else {
                    demote_sides(codecs, sequence, full, coded);
                }
            }
        });
    }

    /// Both sides together, tile by tile.
    fn demote_tiles(
        &self,
        codecs: attention::DemotionCodecs<'_>,
        sequence: &SequenceRows<'_>,
        full: &HeadPages,
        coded: &mut HeadPages,
    ) {
        for position in sequence.demote.clone().step_by(TILE_TOKENS) {
            let (from, to) = demotion_pages(sequence, position / PAGE_TOKENS);
            let tile = position % PAGE_TOKENS / TILE_TOKENS;
            let (from, to) = (full.page(from.0), coded.page_mut(to.0));
            attention::demote_tile(self.kernels.variant(), codecs.full, from, codecs.coded, to, tile)
                .expect("pages have their codec's sizes");
        }
    }
}

/// Each side by itself: their windows differ.
fn demote_sides(
    codecs: attention::DemotionCodecs<'_>,
    sequence: &SequenceRows<'_>,
    full: &HeadPages,
    coded: &mut HeadPages,
) {
    for (side, positions) in [(Side::Key, &sequence.demote), (Side::Value, &sequence.demote_values)] {
        attention::demote_side(
            codecs,
            side,
            positions.clone(),
            |block| full.page(demotion_pages(sequence, block).0.0),
            |block, write| write(coded.page_mut(demotion_pages(sequence, block).1.0)),
        )
        .expect("pages have their codec's sizes, and the windows demote whole groups");
    }
}

/// The two pages of a block that is demoted.
fn demotion_pages(sequence: &SequenceRows<'_>, block: usize) -> (FullPageId, CodedPageId) {
    let (Some(from), Some(to)) = (sequence.full[block], sequence.coded[block]) else {
        unreachable!("the cache prepares both pages of a block that is demoted")
    };
    (from, to)
}
