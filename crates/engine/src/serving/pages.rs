//! Where requests meet the page store.

use super::{Failure, Serving, caught};
use crate::copies::copies;
use crate::live::Live;
use crate::request::{Event, PageTransfer, RequestId};
use crate::scheduler::SequenceId;
use crate::store::{Advance, Restored};
use oscar_backend::Backend;
use oscar_cache::resume_point;
use oscar_codec::PAGE_TOKENS;

impl<B: Backend> Serving<B> {
    /// Lets a request wait for pages of the store, if that can help.
    pub(super) fn waits_for_pages(&mut self, id: RequestId, live: &Live) -> bool {
        let (Some(tiers), Some(cache)) = (&mut self.tiers, &self.cache) else { return false };
        let first = &live.choices[&0];
        let ticket = match &live.params.transfer {
            PageTransfer::Fetch(ticket) => Some(ticket),
            PageTransfer::None | PageTransfer::Keep => None,
        };
        tiers.begin(id, first.prefix(first.resume_limit), ticket, cache)
    }

    /// Copies pages that the store has read, and queues the requests that waited for them.
    pub(super) fn restore(&mut self) -> Result<(), Failure> {
        let (Some(tiers), Some(cache)) = (&mut self.tiers, &mut self.cache) else { return Ok(()) };
        let (runner, live, runs) = (&mut self.runner, &self.live, !self.scheduler.is_idle());
        let mut advance = Advance::default();
        caught(|| {
            advance = tiers.advance(runner, cache, runs, |id| live.is_open(id))?;
            Ok(())
        })?;
        self.statistics.note_reclaimed(&advance.reclaimed);
        for Restored { request, blocks, known } in advance.ready {
            if let Some(live) = self.live.get_mut(request) {
                live.restored = blocks;
                live.known = known;
            }
            self.schedule(request);
        }
        Ok(())
    }

    /// Keeps copies of the prompt's pages for another machine, if the request asks for that, and tells
    /// the ticket. The copies are made at once: a machine that prefills for others has no streams that
    /// would have to wait for them.
    pub(super) fn keep_prompt(&mut self, request: RequestId) {
        let (Some(desk), Some(cache)) = (&self.desk, &self.cache) else { return };
        let Some(live) = self.live.get_mut(request) else { return };
        if live.params.transfer != PageTransfer::Keep {
            return;
        }
        let first = &live.choices[&0];
        let (key, resume) = (first.prefix(first.published), resume_point(live.usage.prompt_tokens));
        let copies = copies(&self.runner, cache, key, resume, |bytes| desk.has_room(bytes));
        let ticket = copies.and_then(|(pages, tokens)| desk.keep(pages, tokens));
        live.events.push(Event::Kept(ticket));
    }

    /// Offers the published pages of a sequence to the page store: those that became complete, and if
    /// it `ends`, everything that a later resume needs.
    pub(super) fn offer(&mut self, id: SequenceId, ends: bool) {
        let (Some(tiers), Some(cache)) = (&mut self.tiers, &self.cache) else { return };
        let Some(choice) = self.live.choice_mut(id) else { return };
        let Some(sequence) = &choice.sequence else { return };
        let layout = self.runner.layout();
        let complete = match layout.coded() {
            Some(_) => sequence.boundary(layout).min(choice.published) / PAGE_TOKENS,
            None => choice.published / PAGE_TOKENS,
        };
        if ends || complete > choice.offered {
            let from = if ends { 0 } else { choice.offered };
            tiers.offer(&self.runner, cache, choice.prefix(choice.published), from, ends);
            choice.offered = complete;
        }
    }
}
