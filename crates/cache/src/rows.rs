//! What one sequence brings to a step.

use crate::sequence::{SequencePages, StepPages};
use crate::state::StepStates;
use crate::view::View;
use oscar_codec::{CodedPageId, FullPageId, PAGE_TOKENS, SlidingPageId};
use std::ops::Range;

/// The rows of one sequence in a step: consecutive positions, and the pages that hold its context.
#[derive(Clone, Debug)]
pub struct SequenceRows<'a> {
    /// Rows of the step that belong to this sequence.
    pub rows: Range<usize>,
    pub first_position: usize,
    pub full: &'a [Option<FullPageId>],
    pub coded: &'a [Option<CodedPageId>],
    /// Pages of the sliding layers; empty in models without any.
    pub sliding: &'a [Option<SlidingPageId>],
    /// Positions whose keys are quantized in this step, before any row attends.
    pub demote: Range<usize>,
    /// Positions whose values are quantized: the same, unless the windows of the two sides differ.
    pub demote_values: Range<usize>,
    /// Rows that stand for the blocks between the sink and the view's end; those have no pages.
    pub view: Option<&'a View>,
    /// The recurrent state; absent in models without one.
    pub states: Option<StepStates>,
}

impl SequenceRows<'_> {
    /// End of the last block that has codes and no full page. Every query reads all positions before
    /// it, except the sink, as code. After an approximate hit this lies inside the recent window of
    /// the first queries; otherwise never beyond the windows' own boundary.
    pub fn coded_until(&self) -> usize {
        let blocks = self.full.len().min(self.coded.len());
        let only_code = |&b: &usize| self.full[b].is_none() && self.coded[b].is_some();
        (0..blocks).rev().find(only_code).map_or(0, |block| (block + 1) * PAGE_TOKENS)
    }
}

impl SequencePages {
    /// The rows of a prepared step, the first of which is row `first_row` of the whole step.
    pub fn rows(&self, step: &StepPages, first_row: usize) -> SequenceRows<'_> {
        SequenceRows {
            rows: first_row..first_row + step.positions.len(),
            first_position: step.positions.start,
            full: self.full(),
            coded: self.coded(),
            sliding: self.sliding(),
            demote: step.demote.clone(),
            demote_values: step.demote_values.clone(),
            view: self.view().map(|view| &**view),
            states: self.states(),
        }
    }
}
