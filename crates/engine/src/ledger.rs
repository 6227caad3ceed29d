//! The scheduler's view of pages, on the real pool and the real prefix cache.

use crate::live::{Choice, LiveRequests};
use crate::post::{Jobs, Reading};
use crate::row_cap::RowCap;
use crate::scheduler::{Demand, Ledger, SequenceId};
use oscar_backend::Backend;
use oscar_cache::{PrefixKey, PrefixPages, RadixCache, Reclaimed};
use oscar_codec::{CacheLayout, PAGE_TOKENS};
use oscar_runner::{Runner, Sequence};

pub struct PageLedger<'a, B: Backend> {
    pub runner: &'a Runner<B>,
    /// `None` if the prefix cache is off.
    pub cache: Option<&'a mut RadixCache>,
    pub live: &'a mut LiveRequests,
    /// Background work, which gives way to requests.
    pub jobs: &'a mut Jobs,
    pub reclaimed: Reclaimed,
}

impl<B: Backend> PageLedger<'_, B> {
    /// Makes the prefix cache give `bytes` back to the pool, if it can; otherwise changes nothing.
    fn make_room(&mut self, bytes: usize) -> bool {
        let Some(cache) = self.cache.as_deref_mut() else { return false };
        if cache.reclaimable() < bytes {
            return false;
        }
        self.reclaimed += cache.reclaim(bytes);
        true
    }

    /// Bytes that a running sequence will still need.
    fn outstanding(&self, &Demand { id, tokens }: &Demand) -> usize {
        let (layout, nothing) = (self.runner.layout(), Sequence::default());
        let held = self.live.choice(id).and_then(|choice| choice.sequence.as_ref()).unwrap_or(&nothing);
        let live = self.live.get(id.request);
        let view = live.and_then(|live| live.post.as_ref()).map_or(0, |post| post.view_bytes(layout));
        missing(layout, self.live.cap(id.request), view, tokens, held)
    }
}

/// Bytes that a sequence which holds some pages lacks on its way to `tokens`: those of its largest size,
/// and those of one block that it keeps for a resume. A turn that waits for its view, of `view` bytes,
/// holds the whole history until it has it.
fn missing(layout: &CacheLayout, cap: Option<&RowCap>, view: usize, tokens: usize, held: &Sequence) -> usize {
    let whole = layout.peak_bytes(tokens) + layout.resume_bytes();
    let needed = match (cap, held.pages().view()) {
        (Some(cap), _) => cap.most_bytes(layout, tokens).min(whole),
        (None, None) => whole + view,
        (None, Some(view)) => {
            let replaced = view.end().saturating_sub(layout.windows().sink()) / PAGE_TOKENS;
            (whole + view.bytes()).saturating_sub(replaced * layout.coded_block_bytes())
        }
    };
    needed.saturating_sub(held.pages().bytes(layout))
}

impl<B: Backend> Ledger for PageLedger<'_, B> {
    fn admit(&mut self, sequence: Demand, running: &[Demand]) -> Option<usize> {
        let outstanding: usize = running.iter().map(|demand| self.outstanding(demand)).sum();
        let id = sequence.id;
        let (layout, tokens) = (self.runner.layout(), sequence.tokens);
        let live = self.live.get(id.request)?;
        let cap = live.cap.clone();
        let view = live.post.as_ref().map_or(0, |post| post.view_bytes(layout));
        let post = live.post.as_ref().and_then(|post| Some((post.start, post.reading.clone()?)));
        let choice = self.live.choice_mut(id)?;
        let prefix = match (self.cache.as_deref_mut(), &cap) {
            (Some(cache), None) if let Some((start, reading)) = &post => {
                find_on_view(cache, layout, choice, *start, reading)
            }
            (Some(cache), Some(cap)) => {
                let (tokens, exact) = (&choice.tokens[..choice.resume_limit], !choice.takes_approximate);
                let (lineage, prefix) = cap.find(cache, choice.salt, tokens, exact);
                choice.lineage = lineage;
                prefix
            }
            (Some(cache), None) if choice.takes_approximate => cache.find(choice.prefix(choice.resume_limit)),
            (Some(cache), None) => cache.find_exact(choice.prefix(choice.resume_limit)),
            (None, _) => {
                choice.lineage = None;
                PrefixPages::default()
            }
        };
        let sequence = Sequence::resume(layout, prefix);
        let missing = outstanding + missing(layout, cap.as_ref(), view, tokens, &sequence);
        let free = self.runner.pool().free();
        // The prefix is held now, so the cache does not count it as reclaimable.
        let reclaimable = || self.cache.as_deref().map_or(0, RadixCache::reclaimable);
        if !running.is_empty() && free < missing && free + reclaimable() < missing {
            return None;
        }
        let stored = sequence.len();
        choice.takes_approximate = !sequence.pages().is_exact();
        choice.published = stored;
        choice.offered = stored / PAGE_TOKENS;
        choice.sequence = Some(sequence);
        Some(stored)
    }

    fn reserve(&mut self, id: SequenceId, tokens: usize) -> bool {
        loop {
            let Some(sequence) = self.live.choice_mut(id).and_then(|c| c.sequence.as_mut()) else {
                return false;
            };
            match self.runner.reserve(sequence, tokens) {
                Ok(()) => return true,
                Err(full) => {
                    if !self.make_room(full.wanted - full.free) && !self.jobs.give_way() {
                        return false;
                    }
                }
            }
        }
    }

    fn release(&mut self, id: SequenceId) {
        if let Some(choice) = self.live.choice_mut(id)
            && let Some(mut sequence) = choice.sequence.take()
            && let Some(cache) = self.cache.as_deref_mut()
        {
            sequence.publish(cache, choice.prefix(choice.tokens.len()));
        }
    }
}

/// The stored prefix from which a turn goes on that reads a view from `start` on.
fn find_on_view(
    cache: &mut RadixCache,
    layout: &CacheLayout,
    choice: &mut Choice,
    start: usize,
    reading: &Reading,
) -> PrefixPages {
    let (salt, tokens, exact) =
        (choice.salt, &choice.tokens[..choice.resume_limit], !choice.takes_approximate);
    let find = |cache: &mut RadixCache, salt, tokens| match exact {
        true => cache.find_exact(PrefixKey::new(salt, tokens)),
        false => cache.find(PrefixKey::new(salt, tokens)),
    };
    let mine = find(cache, Some(reading.lineage), tokens);
    choice.lineage = Some(reading.lineage);
    if mine.view().is_some() && mine.len() >= start {
        return mine;
    }
    let base = find(cache, salt, &tokens[..start]);
    if base.len() < start {
        choice.lineage = None;
        return base;
    }
    match cache.stored_view(reading.key).and_then(|view| base.reading(layout, view)) {
        Some(prefix) => prefix,
        // The view is made after the last page before it, which is computed again.
        None => {
            choice.lineage = None;
            find(cache, salt, &tokens[..start - 1])
        }
    }
}
