//! Where requests meet the cap on their rows.

use super::{Failure, Serving, caught};
use crate::kv_request::KvUsage;
use crate::request::RequestError;
use crate::row_cap::history_rows;
use crate::scheduler::SequenceId;
use oscar_backend::Backend;
use oscar_cache::OutOfPages;
use oscar_runner::{Sequence, StepError};
use oscar_views::Eviction;
use std::ops::Range;

impl<B: Backend> Serving<B> {
    /// Compacts the history of a sequence that now has `len` tokens, if it is due. Returns whether
    /// the sequence can go on.
    pub(super) fn compact(&mut self, id: SequenceId, len: usize) -> bool {
        let Some(cap) = self.live.cap(id.request).filter(|cap| cap.is_point(len)).cloned() else {
            return true;
        };
        let Some(choice) = self.live.choice_mut(id) else { return true };
        let Some(sequence) = choice.sequence.take() else { return true };
        let (tokens, salt) = (choice.tokens[..len].to_vec(), choice.salt);
        let outcome = loop {
            let mut compacted = None;
            let mut full = None;
            let outcome = caught(|| match cap.compact(&mut self.runner, &sequence, &tokens, salt) {
                Err(StepError::OutOfPages(error)) => {
                    full = Some(error);
                    Err(StepError::OutOfPages(error))
                }
                other => {
                    compacted = Some(other?);
                    Ok(())
                }
            });
            match full {
                Some(error) if self.make_room(&error) => {}
                _ => break outcome.map(|()| compacted),
            }
        };
        match outcome {
            Ok(Some((sequence, lineage, selection))) => {
                let counters = &mut self.statistics.counters;
                counters.compactions += 1;
                let kept = selection.chosen + selection.protected;
                counters.evicted_rows += (selection.all - kept) as u64;
                counters.kept_rows += kept as u64;
                counters.protected_rows += selection.protected as u64;
                self.go_on(id, sequence, lineage);
                self.note_rows(id);
                if let Some(usage) = self.live.get_mut(id.request).and_then(|live| live.usage.kv.as_mut()) {
                    usage.compactions += 1;
                }
                true
            }
            Ok(None) => true,
            Err(failure) => {
                self.fail_compaction(id, failure);
                false
            }
        }
    }

    /// Makes the prefix tree give up what a compaction lacks; `false` if it has nothing to give.
    pub(super) fn make_room(&mut self, full: &OutOfPages) -> bool {
        let Some(cache) = &mut self.cache else { return false };
        let done = cache.reclaim(full.wanted.saturating_sub(full.free));
        self.statistics.note_reclaimed(&done);
        done.bytes > 0
    }

    pub(super) fn go_on(&mut self, id: SequenceId, sequence: Sequence, lineage: oscar_cache::CacheSalt) {
        let Some(choice) = self.live.choice_mut(id) else { return };
        choice.sequence = Some(sequence);
        choice.lineage = Some(lineage);
        choice.published = 0;
        if let Some(cache) = &mut self.cache {
            choice.publish(cache);
        }
    }

    /// Notes what the rows of a capped conversation have come to.
    pub(super) fn note_rows(&mut self, id: SequenceId) {
        let Some(live) = self.live.get_mut(id.request) else { return };
        let (policy, budget, route) = match (&live.cap, &live.post) {
            (Some(cap), _) => (Eviction::Scorer(cap.policy.evict), cap.rows, None),
            (None, Some(post)) => (post.cap.eviction, post.cap.rows, Some(post.taken())),
            (None, None) => return,
        };
        let Some(sequence) = live.choices.get(&id.choice).and_then(|choice| choice.sequence.as_ref()) else {
            return;
        };
        let (history, kept) = history_rows(self.runner.layout(), sequence);
        live.usage.kv = Some(KvUsage {
            policy,
            budget,
            logical: sequence.len(),
            history,
            kept,
            protected: live.params.kv.protected.iter().map(Range::len).sum(),
            compactions: live.usage.kv.map_or(0, |known| known.compactions),
            view: sequence.pages().view().map(|view| view.end()),
            route,
        });
    }

    fn fail_compaction(&mut self, id: SequenceId, failure: Failure) {
        let message = self.note_failure(failure);
        self.fail(id.request, &RequestError::Engine(message));
    }
}
