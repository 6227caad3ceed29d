//! Rows of a step that become codes.

use super::CpuBackend;
use super::pages::HeadPages;
use crate::attention;
use oscar_backend::SequenceRows;
use oscar_codec::{CodedPageId, FullPageId, PAGE_TOKENS, Side, TILE_TOKENS};

impl CpuBackend {
    /// Both sides together, a tile at a time.
    pub(super) fn demote_tiles(
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

/// Each side by itself, as far as its own windows say.
pub(super) fn demote_sides(
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
