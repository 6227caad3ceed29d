//! The recurrent state of one sequence: what its layers with a delta net remember of all tokens so far.
//!
//! A step reads the state that the sequence has and writes the next one. It writes in place unless somebody
//! else holds the state: a prefix tree, a fork, or the sequence itself for a resume. So a state that is held
//! never changes, and keeping one costs no copy.

use crate::pool::StateSlot;
use oscar_codec::{CacheLayout, PAGE_TOKENS, StateId};

/// The states of a sequence in a step: what it begins from (nothing at the first token) and where the state
/// after its last row goes. They may be the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepStates {
    pub from: Option<StateId>,
    pub to: StateId,
}

#[derive(Debug, Default)]
pub(crate) struct RecurrentState {
    /// After all stored tokens; absent before the first one, and in models without states.
    current: Option<StateSlot>,
    /// Where a prepared step writes, if not in place.
    next: Option<StateSlot>,
    /// The state after some whole pages, kept for a resume there, and that length.
    kept: Option<(usize, StateSlot)>,
}

impl RecurrentState {
    /// The state of a stored prefix.
    pub fn resume(len: usize, stored: Option<StateSlot>) -> Self {
        Self { kept: stored.clone().map(|slot| (len, slot)), current: stored, next: None }
    }

    /// Slots that a step needs and that are not set aside yet.
    pub fn missing(&self, layout: &CacheLayout, tokens: usize) -> usize {
        let in_place = self.current.as_ref().is_some_and(|slot| !slot.is_shared());
        usize::from(layout.has_states() && tokens > 0 && self.next.is_none() && !in_place)
    }

    /// Sets slots aside for a step.
    pub fn prepare(&mut self, taken: Vec<StateSlot>) {
        self.next = taken.into_iter().next().or(self.next.take());
    }

    /// The states of a prepared step.
    pub fn of_step(&self) -> Option<StepStates> {
        let from = self.current.as_ref().map(StateSlot::id);
        Some(StepStates { from, to: self.next.as_ref().map(StateSlot::id).or(from)? })
    }

    /// Ends a step after which the sequence has `len` tokens. With `keep` the state after a whole page is
    /// kept for a resume there.
    pub fn commit(&mut self, len: usize, keep: bool) {
        self.current = self.next.take().or(self.current.take());
        if keep && len.is_multiple_of(PAGE_TOKENS) {
            self.kept = self.current.clone().map(|slot| (len, slot));
        }
    }

    /// The state after these tokens, if it is held.
    pub fn after(&self, len: usize) -> Option<&StateSlot> {
        self.kept.as_ref().filter(|(at, _)| *at == len).map(|(_, slot)| slot)
    }

    /// Exchanges the state after `len` tokens for another with the same contents.
    pub fn adopt(&mut self, len: usize, stored: &StateSlot) {
        let Some((_, kept)) = self.kept.as_mut().filter(|(at, _)| *at == len) else { return };
        if self.current.as_ref().is_some_and(|slot| slot.id() == kept.id()) {
            self.current = Some(stored.clone());
        }
        *kept = stored.clone();
    }

    /// Gives up a kept state that no resume at `point` or later needs.
    pub fn trim(&mut self, point: usize) {
        self.kept = self.kept.take().filter(|(at, _)| *at >= point);
    }

    /// Different slots held.
    pub fn count(&self) -> usize {
        let current = self.current.as_ref().map(StateSlot::id);
        let kept = self.kept.as_ref().map(|(_, slot)| slot.id());
        let kept = usize::from(kept.is_some() && kept != current);
        usize::from(current.is_some()) + kept + usize::from(self.next.is_some())
    }
}
