//! The recurrent state of one sequence: what its layers with a delta net remember of all tokens so far.
//!
//! A step reads the state that the sequence has and writes the next one. It writes in place unless somebody
//! else holds the state: a prefix tree, a fork, or the sequence itself for a resume. So a state that is held
//! never changes, and keeping one costs no copy.

use crate::pool::StateSlot;
use crate::sequence::SequencePages;
use oscar_codec::{CacheLayout, PAGE_TOKENS, StateId};

/// The states of a sequence in a step: what it begins from (nothing at the first token) and where the state
/// after its last row goes. They may be the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepStates {
    pub from: Option<StateId>,
    pub to: StateId,
}

impl SequencePages {
    /// The recurrent state before and after a prepared step.
    pub fn states(&self) -> Option<StepStates> {
        self.state.of_step()
    }
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
        let in_place = self.current.as_ref().filter(|_| self.next.is_none());
        debug_assert!(
            in_place.is_none_or(|slot| !slot.stored().is_set()),
            "a store has copies of held states only, and nobody writes to those"
        );
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

    /// Slots held, some of them twice.
    #[cfg(test)]
    pub fn ids(&self) -> impl Iterator<Item = StateId> {
        let kept = self.kept.as_ref().map(|(_, slot)| slot);
        [self.current.as_ref(), self.next.as_ref(), kept].into_iter().flatten().map(StateSlot::id)
    }

    /// Different slots held.
    pub fn count(&self) -> usize {
        let current = self.current.as_ref().map(StateSlot::id);
        let kept = self.kept.as_ref().map(|(_, slot)| slot.id());
        let kept = usize::from(kept.is_some() && kept != current);
        usize::from(current.is_some()) + kept + usize::from(self.next.is_some())
    }
}

#[cfg(test)]
mod tests {
    use crate::{PagePool, PrefixPages, RadixCache, SequencePages, StepStates};
    use oscar_codec::{CacheLayout, CodeLayout, KvFormat, StateId, Windows};

    fn layout() -> CacheLayout {
        let windows = Windows::unlimited();
        CacheLayout::new(KvFormat::Bf16, 2, 1, 32, windows, CodeLayout::Logical).unwrap().with_states(5000)
    }

    fn step(pages: &mut SequencePages, layout: &CacheLayout, pool: &PagePool, tokens: usize) -> StepStates {
        let step = pages.prepare(layout, pool, tokens).unwrap();
        let states = pages.states().unwrap();
        pages.commit(layout, &step);
        states
    }

    #[test]
    fn a_step_writes_in_place_unless_the_state_is_held() {
        let (layout, tokens) = (layout(), (0..300).collect::<Vec<u32>>());
        let pool = PagePool::new(&layout, 1 << 30);
        let mut tree = RadixCache::new(layout.clone());
        let mut pages = SequencePages::resumable();
        let id = |n| Some(StateId(n));
        assert_eq!(step(&mut pages, &layout, &pool, 40), StepStates { from: None, to: StateId(0) });
        assert_eq!(step(&mut pages, &layout, &pool, 24), StepStates { from: id(0), to: StateId(0) });
        assert_eq!(tree.insert(&tokens[..], &mut pages), 64);
        // 64 is a whole page: its state is kept, by the sequence and by the tree.
        assert_eq!(step(&mut pages, &layout, &pool, 1), StepStates { from: id(0), to: StateId(1) });
        assert_eq!(step(&mut pages, &layout, &pool, 70), StepStates { from: id(1), to: StateId(1) });
        assert_eq!((pool.usage().states, pages.blocks().states), (2, 2));
        assert_eq!(pool.usage().bytes, pages.bytes(&layout));
        // A hit reads the kept state and writes another.
        let found = tree.find(&tokens[..130]);
        assert_eq!(found.len(), 64);
        let mut other = SequencePages::resume(&layout, found);
        assert_eq!(step(&mut other, &layout, &pool, 9), StepStates { from: id(0), to: StateId(2) });
        drop((pages, other));
        assert_eq!((pool.usage().states, tree.pages().idle_states), (1, 1));
        tree.flush();
        assert_eq!(pool.usage().bytes, 0);
    }

    #[test]
    fn the_tree_keeps_states_at_ends_of_prompts_and_the_last_one() {
        let (layout, tokens) = (layout(), (0..1000).collect::<Vec<u32>>());
        let pool = PagePool::new(&layout, 1 << 30);
        let mut tree = RadixCache::new(layout.clone());
        let mut pages = SequencePages::resume(&layout, PrefixPages::default());
        for len in [128, 256, 320, 384, 448] {
            let tokens_left = len - pages.len();
            step(&mut pages, &layout, &pool, tokens_left);
            tree.insert(&tokens[..], &mut pages);
            if len == 256 {
                tree.mark_prompt(&tokens[..300]);
            }
        }
        let found = |tree: &mut RadixCache, len: usize| tree.find(&tokens[..len]).len();
        assert_eq!([999, 447, 300, 255].map(|len| found(&mut tree, len)), [448, 256, 256, 0]);
        drop(pages);
        assert_eq!(pool.usage().states, 2);
        // Room for a state: that of the older end goes, and no page.
        let before = pool.usage();
        assert_eq!(tree.reclaimable(), before.bytes);
        let done = tree.reclaim(1);
        assert!(done.bytes > 0 && tree.pages().states <= 1, "{done:?}");
        tree.flush();
        assert_eq!(pool.usage().bytes, 0);
    }
}
