//! Where requests meet views of histories that stay whole.

use super::{Serving, caught};
use crate::live::{Live, Stage};
use crate::post::{Bench, Job, Progress};
use crate::request::RequestId;
use crate::scheduler::{SchedulerOptions, SequenceId};
use oscar_backend::Backend;
use oscar_runner::{Sequence, StepError};

/// Steps of requests between two pieces of background work.
const STEPS_BETWEEN: u64 = 4;
/// Tokens of such a piece while requests run: the least that a step of theirs takes of a prompt.
const PIECE: usize = SchedulerOptions::MIN_PREFILL;

impl<B: Backend> Serving<B> {
    /// Chooses the view that a request in post mode reads.
    pub(super) fn route(&mut self, id: RequestId) {
        let Some(Live { post: Some(post), choices, .. }) = self.live.get_mut(id) else { return };
        let (Some(setting), Some(first)) = (&self.post.setting, choices.get(&0)) else { return };
        post.route(first.salt, &first.tokens, &mut self.post.sets, setting);
    }

    /// Counts the route that a request in post mode has taken, once its prompt is stored.
    pub(super) fn count_route(&mut self, id: RequestId) {
        if let Some(post) = self.live.get(id).and_then(|live| live.post.as_ref()) {
            self.statistics.counters.routes.add(post.reading.as_ref().map(|reading| reading.route));
        }
    }

    /// Lets a sequence that now has `len` tokens, all those before its turn, go on with its view.
    pub(super) fn begin_view(&mut self, id: SequenceId, len: usize) {
        let Some(post) = self.live.get(id.request).and_then(|live| live.post.as_ref()) else { return };
        let Some(reading) = post.reading.clone().filter(|_| post.start == len) else { return };
        let Some(choice) = self.live.choice_mut(id).filter(|choice| choice.lineage.is_none()) else { return };
        let Some(sequence) = choice.sequence.take() else { return };
        let view = loop {
            if let Some(view) = self.cache.as_mut().and_then(|cache| cache.stored_view(reading.key)) {
                break Some(view);
            }
            let kept = reading.set.selection(reading.route).kept;
            let (mut made, mut full) = (None, None);
            let outcome = caught(|| match self.runner.gather(&sequence, reading.point, kept) {
                Err(StepError::OutOfPages(error)) => {
                    full = Some(error);
                    Ok(())
                }
                other => {
                    made = Some(other?);
                    Ok(())
                }
            });
            if let (Some(view), Some(cache)) = (&made, &mut self.cache) {
                cache.store_view(reading.key, view.clone());
                self.statistics.counters.views += 1;
            }
            match (outcome, full) {
                (Err(failure), _) => {
                    let message = self.note_failure(failure);
                    tracing::warn!(message, "no view was made");
                    break None;
                }
                (Ok(()), Some(full)) if self.make_room(&full) || self.post.jobs.give_way() => {}
                (Ok(()), _) => break made,
            }
        };
        let derived = view.and_then(|view| self.runner.fork_reading(&sequence, len, view));
        match derived {
            Some(derived) => {
                self.go_on(id, derived, reading.lineage);
            }
            None => self.go_on_without_view(id, sequence),
        }
    }

    /// There is no room for the view of a turn. One that has not begun to answer reads the base, and its
    /// usage says so. Another was preempted: it waits, because its answer began on the view.
    fn go_on_without_view(&mut self, id: SequenceId, sequence: Sequence) {
        let Some(live) = self.live.get_mut(id.request) else { return };
        let begun = live.stage != Stage::Prefill;
        if !begun {
            live.post.iter_mut().for_each(|post| post.reading = None);
        }
        let Some(choice) = live.choices.get_mut(&id.choice) else { return };
        choice.sequence = Some(sequence);
        if !begun {
            return;
        }
        if self.scheduler.preempt(id) {
            self.statistics.counters.preemptions += 1;
            choice.sequence = None;
        } else {
            self.end_exhausted(id);
        }
    }

    /// Queues the work that a finished turn leaves: its replay on the base, and new views.
    pub(super) fn remember_turn(&mut self, id: SequenceId) {
        let Some(live) = self.live.get(id.request).filter(|_| id.choice == 0) else { return };
        let (Some(post), Some(choice)) = (&live.post, live.choices.get(&0)) else { return };
        let replays = choice.lineage.is_some();
        // A request that ended before its prompt was stored leaves nothing to go on from.
        if choice.stored() < live.usage.prompt_tokens || !(replays || post.cap.has_views(post.start)) {
            return;
        }
        let tokens = choice.tokens[..choice.stored()].to_vec();
        self.post.jobs.push(Job::new(choice.salt, post.cap.clone(), post.turn.clone(), tokens, replays));
    }

    /// A piece of background work: as much as a prompt's chunk if no request runs, little and rarely
    /// otherwise.
    pub(super) fn work_in_background(&mut self) {
        let running = !self.scheduler.is_idle();
        if running && !self.statistics.counters.steps.is_multiple_of(STEPS_BETWEEN) {
            return;
        }
        let (Some(cache), Some(setting)) = (&mut self.cache, &self.post.setting) else { return };
        let Some(mut job) = self.post.jobs.take() else { return };
        let most = if running { PIECE } else { self.scheduler.options().prefill_chunk };
        let (mut progress, mut full) = (Progress::Ended, None);
        let (runner, sets, counters) = (&mut self.runner, &mut self.post.sets, &mut self.statistics.counters);
        let tiers = self.tiers.as_mut();
        let outcome = caught(|| {
            let mut bench = Bench { runner, cache, tiers, sets, setting, counters };
            match job.advance(&mut bench, most) {
                Err(StepError::OutOfPages(error)) => full = Some(error),
                other => progress = other?,
            }
            Ok(())
        });
        match (outcome, full) {
            (Err(failure), _) => {
                let message = self.note_failure(failure);
                tracing::warn!(message, "a conversation gets no views");
                self.statistics.counters.view_jobs_failed += 1;
            }
            (Ok(()), Some(full)) if self.make_room(&full) => self.post.jobs.resume(job),
            (Ok(()), Some(_)) => {
                // If no request runs, none will free pages: the job does not fit.
                let stays = running && self.post.jobs.retreat(job);
                self.statistics.counters.view_jobs_failed += u64::from(!stays);
            }
            (Ok(()), None) if progress == Progress::Ended => {}
            (Ok(()), None) => self.post.jobs.resume(job),
        }
    }
}
