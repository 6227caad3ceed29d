//! Requests that cannot go on, and why.

use crate::request::{Event, FinishReason, RequestError, RequestId};
use crate::scheduler::SequenceId;
use crate::sequences::Job;
use crate::worker::Worker;
use oscar_backend::Backend;
use std::any::Any;
use std::sync::atomic::Ordering;

impl<B: Backend> Worker<B> {
    /// Ends a request that cannot go on; its pages are forgotten.
    pub(crate) fn fail(&mut self, id: RequestId, error: &RequestError) {
        let Some(job) = self.jobs.remove(&id) else { return };
        for sequence in job.live {
            self.scheduler.remove(sequence);
            self.choices.remove(&sequence);
        }
        if !job.admitted {
            self.shared.queued.fetch_sub(1, Ordering::SeqCst);
        }
        self.counters.failed += 1;
        self.outbox.push((id, Event::Failed(error.clone())));
    }

    /// A sequence has the cache to itself and still finds no page: its answer ends here, or its prompt fails.
    pub(crate) fn end_exhausted(&mut self, id: SequenceId) {
        let Some(choice) = self.choices.get(&id) else { return };
        let (request, tokens) = (choice.request, choice.tokens.len());
        if self.jobs.get(&request).is_some_and(|job| job.started) {
            return self.end_choice(id, FinishReason::Length);
        }
        let needed = self.runner.layout().peak_bytes(tokens);
        self.fail(request, &RequestError::TooLarge { needed, budget: self.runner.usage().budget });
    }

    /// Fails what runs and empties the prefix cache.
    pub(crate) fn forget_everything(&mut self, message: &str) {
        let is_running = |job: &Job| job.live.iter().any(|id| self.choices[id].sequence.is_some());
        let running: Vec<RequestId> =
            self.jobs.iter().filter(|(_, job)| is_running(job)).map(|(&id, _)| id).collect();
        for id in running {
            self.fail(id, &RequestError::Engine(message.to_owned()));
        }
        if let Some(cache) = &mut self.cache {
            cache.flush();
            cache.take_demotions();
        }
    }
}

pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let message = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("a step panicked: {}", message.unwrap_or("no message"))
}
