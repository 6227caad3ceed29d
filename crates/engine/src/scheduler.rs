//! Who computes what in the next step.
//!
//! Pure bookkeeping over token counts: no clock, no tensors, no tokenizer. Pages come from a
//! [`Ledger`].
//!
//! **Policy.** Every sequence that only needs its next token gets it first, oldest first, so a long
//! prompt cannot hold decoding up. Waiting sequences are admitted in order of arrival, none
//! overtaken, once there is room for them beside the needs of the running ones: the rest of their
//! prompts and some tokens of answer. The oldest prompt being stored may take half of the remaining
//! token budget of the step; the rest goes to the other prompts, shortest first. So a long prompt
//! neither starves nor is starved, and prompts that arrive together do not all end last.
//!
//! **Size of a step.** While no sequence decodes, a step takes a whole chunk of prompts, and the rest
//! of a lone prompt if that is short (see [`next_chunk`]). While sequences decode, prompt tokens are
//! limited so that the predicted time of the step stays within the inter-token target (see
//! [`crate::cost`]), and never exceed a whole chunk. Until there is a prediction the limit is fixed.
//!
//! If pages run out, the youngest sequence that is younger than the one in need gives way and waits
//! at the front of the queue. The oldest therefore always goes on, and all end.

use crate::cost::StepCost;
use crate::request::RequestId;
use oscar_backend::PrefillWave;
use oscar_runner::{longest_step, next_chunk};
use std::collections::VecDeque;

/// One sequence: a choice of a request, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId {
    pub request: RequestId,
    pub choice: usize,
}

/// Tokens that a sequence is going to store, those it has stored included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    pub id: SequenceId,
    pub tokens: usize,
}

/// The scheduler's view of the cache.
pub trait Ledger {
    /// Begins a sequence, from a stored prefix if there is one, and returns the length of that
    /// prefix. `None` if there is no room for its pages beside those that `running` still need.
    /// Always succeeds if nothing runs, because waiting would not help.
    fn admit(&mut self, sequence: Demand, running: &[Demand]) -> Option<usize>;
    /// Reserves the pages for `tokens` more positions. Changes nothing if it cannot.
    fn reserve(&mut self, id: SequenceId, tokens: usize) -> bool;
    /// The sequence stops running, and others may take its pages.
    fn release(&mut self, id: SequenceId);
}

/// Sizes of a step and of the queue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SchedulerOptions {
    /// Most sequences running at once.
    pub max_batch: usize,
    /// Most tokens of a step; raised where it is too small for all running sequences to decode.
    /// `None`: the scheduler chooses by predicted time.
    pub step_tokens: Option<usize>,
    /// Tokens of one sequence in a step; the last step of a lone prompt may take a third more.
    pub prefill_chunk: usize,
    /// Tokens of answer that a sequence must have room for to be admitted, if it may become that
    /// long.
    pub decode_room: usize,
    /// Seconds that a step may take while sequences decode, unless `step_tokens` is set.
    pub inter_token_target: f64,
    /// How the device attends to prompts; see [`crate::cost`].
    pub wave: PrefillWave,
}

/// Lengths `first`, `first + every`, `first + 2·every` …
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pauses {
    pub first: usize,
    pub every: usize,
}

impl Pauses {
    /// The first pause beyond a length.
    fn after(self, len: usize) -> usize {
        match len < self.first {
            true => self.first,
            false => self.first + ((len - self.first) / self.every + 1) * self.every,
        }
    }
}

impl SchedulerOptions {
    /// Tokens of a step beside sequences that decode, until its time can be predicted.
    pub const UNPREDICTED_TOKENS: usize = 256;
    /// Tokens of every step that decoding cannot take from prompts, at least.
    pub const MIN_PREFILL: usize = 64;
    /// Share of the target that the predicted time may take. One step in a hundred takes a tenth longer
    /// than predicted, and the host needs some time between two steps.
    const AIM: f64 = 0.85;

    /// Most rows of a step.
    pub fn most_rows(&self) -> usize {
        let chunk = self.prefill_chunk.max(Self::MIN_PREFILL);
        match self.step_tokens {
            Some(tokens) => tokens.max(2 * self.max_batch + Self::MIN_PREFILL),
            None => longest_step(chunk).saturating_add(self.max_batch),
        }
    }
}

impl Default for SchedulerOptions {
    /// A chunk for a CPU, where longer ones gain nothing.
    fn default() -> Self {
        Self {
            max_batch: 32,
            step_tokens: None,
            prefill_chunk: 512,
            decode_room: 128,
            inter_token_target: 0.08,
            wave: PrefillWave::NONE,
        }
    }
}

/// Tokens of one sequence to be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    pub id: SequenceId,
    /// Tokens stored before the step.
    pub start: usize,
    pub tokens: usize,
    /// The step reaches the last known token: its last logits choose the next one.
    pub last: bool,
}

/// One step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    pub work: Vec<Work>,
    /// Began to run, with the tokens they found stored.
    pub admitted: Vec<(SequenceId, usize)>,
    /// Stopped running; they will be admitted again.
    pub preempted: Vec<SequenceId>,
    /// Sequences that run alone and still cannot get the pages for one more token: they must end.
    pub exhausted: Vec<SequenceId>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    id: SequenceId,
    /// Tokens known: the prompt and what was generated.
    known: usize,
    /// Tokens stored in the cache.
    stored: usize,
    /// Tokens in a step, as [`next_chunk`] takes them.
    chunk: usize,
    /// Largest number of tokens that it may store.
    limit: usize,
    /// Lengths at which it must pause.
    pauses: Option<Pauses>,
}

impl Entry {
    fn pending(&self) -> usize {
        self.known - self.stored
    }

    fn demand(&self, decode_room: usize) -> Demand {
        let tokens = self.known.saturating_add(decode_room).min(self.limit).max(self.known);
        Demand { id: self.id, tokens }
    }
}

/// See the [module](self).
#[derive(Debug)]
pub struct Scheduler {
    options: SchedulerOptions,
    /// The cost of steps, once it is known.
    cost: Option<StepCost>,
    /// Oldest first: a preempted sequence waits ahead of the newer ones, so admission keeps the
    /// order of age.
    running: Vec<Entry>,
    waiting: VecDeque<Entry>,
}

impl Scheduler {
    pub fn new(options: SchedulerOptions) -> Self {
        let max_batch = options.max_batch.max(1);
        let options = SchedulerOptions {
            max_batch,
            step_tokens: options
                .step_tokens
                .map(|tokens| tokens.max(2 * max_batch + SchedulerOptions::MIN_PREFILL)),
            prefill_chunk: options.prefill_chunk.max(1),
            ..options
        };
        Self { options, cost: None, running: Vec::new(), waiting: VecDeque::new() }
    }

    pub fn options(&self) -> &SchedulerOptions {
        &self.options
    }

    /// The cost of steps from now on.
    pub fn set_cost(&mut self, cost: Option<StepCost>) {
        self.cost = cost;
    }

    /// Queues a sequence of `tokens > 0` tokens, at most `chunk` of which are computed in a step.
    /// With its answer it will not store more than `limit`.
    pub fn submit(&mut self, id: SequenceId, tokens: usize, limit: usize, chunk: usize) {
        self.waiting.push_back(self.entry(id, tokens, limit, chunk));
    }

    /// Makes a sequence pause at these lengths: a step of it never goes beyond the next one.
    pub fn pause(&mut self, id: SequenceId, pauses: Pauses) {
        let entries = self.waiting.iter_mut().chain(&mut self.running);
        entries.filter(|entry| entry.id == id).for_each(|entry| entry.pauses = Some(pauses));
    }

    /// Queues sequences ahead of all others: continuations of a prompt that has had its turn.
    pub fn submit_next(&mut self, ids: &[SequenceId], tokens: usize, limit: usize) {
        for &id in ids.iter().rev() {
            self.waiting.push_front(self.entry(id, tokens, limit, usize::MAX));
        }
    }

    fn entry(&self, id: SequenceId, tokens: usize, limit: usize, chunk: usize) -> Entry {
        debug_assert!(tokens > 0, "an empty sequence has nothing to compute");
        let chunk = chunk.clamp(1, self.options.prefill_chunk);
        Entry { id, known: tokens, stored: 0, chunk, limit, pauses: None }
    }

    /// A token was chosen: the sequence has one more to compute.
    pub fn append(&mut self, id: SequenceId) {
        if let Some(entry) = self.running.iter_mut().find(|e| e.id == id) {
            entry.known += 1;
        }
    }

    /// Forgets a sequence; the caller gives its pages back. Unknown ids are ignored.
    pub fn remove(&mut self, id: SequenceId) {
        self.running.retain(|e| e.id != id);
        self.waiting.retain(|e| e.id != id);
    }

    /// Stops a running sequence, which then waits ahead of the others; the caller gives its pages back.
    /// `false` if it runs alone: waiting would not help. It is admitted again as the youngest.
    pub fn preempt(&mut self, id: SequenceId) -> bool {
        let place = self.running.iter().position(|e| e.id == id).filter(|_| self.running.len() > 1);
        let Some(place) = place else { return false };
        let entry = self.running.remove(place);
        self.waiting.push_front(Entry { stored: 0, ..entry });
        true
    }

    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// The step's work was done: its tokens are stored.
    pub fn complete(&mut self, plan: &StepPlan) {
        for work in &plan.work {
            if let Some(entry) = self.running.iter_mut().find(|e| e.id == work.id) {
                entry.stored = work.start + work.tokens;
            }
        }
    }

    /// Plans the next step. Its pages are reserved when this returns.
    pub fn schedule(&mut self, ledger: &mut impl Ledger) -> StepPlan {
        let mut plan = StepPlan::default();
        let decoding: Vec<SequenceId> =
            self.running.iter().filter(|e| e.pending() == 1).map(|e| e.id).collect();
        for id in decoding {
            // Someone older may have preempted it meanwhile.
            if self.running.iter().any(|e| e.id == id) {
                self.grant(ledger, &mut plan, id, 1);
            }
        }
        if plan.preempted.is_empty() && plan.exhausted.is_empty() {
            self.admit(ledger, &mut plan);
        }
        let budget = self.prefill_budget(&plan);
        self.prefill(ledger, &mut plan, budget);
        plan
    }

    /// Tokens of prompts beside the decoding sequences of the plan.
    fn prefill_budget(&self, plan: &StepPlan) -> usize {
        if let Some(tokens) = self.options.step_tokens {
            return tokens - plan.work.len();
        }
        let chunk = self.options.prefill_chunk.max(SchedulerOptions::MIN_PREFILL);
        if plan.work.is_empty() {
            return match self.running.as_slice() {
                [alone] => next_chunk(alone.pending(), chunk),
                _ => chunk,
            };
        }
        let most = longest_step(chunk);
        let Some(cost) = self.cost else { return SchedulerOptions::UNPREDICTED_TOKENS.min(most) };
        let wave = self.options.wave;
        let decoding: f64 = plan.work.iter().map(|w| cost.rows(w.start, w.tokens, wave)).sum();
        // The oldest prompt gets most of the step, so its position in the context decides.
        let start = self.running.iter().find(|e| e.pending() > 1).map_or(0, |e| e.stored);
        let left = SchedulerOptions::AIM * self.options.inter_token_target - cost.fixed - decoding;
        cost.tokens_within(left, start, wave).clamp(SchedulerOptions::MIN_PREFILL, most)
    }

    fn admit(&mut self, ledger: &mut impl Ledger, plan: &mut StepPlan) {
        let room = self.options.decode_room;
        let mut running: Vec<Demand> = self.running.iter().map(|e| e.demand(room)).collect();
        while self.running.len() < self.options.max_batch {
            let Some(mut entry) = self.waiting.pop_front() else { return };
            let demand = entry.demand(room);
            let Some(stored) = ledger.admit(demand, &running) else {
                self.waiting.push_front(entry);
                return;
            };
            entry.stored = stored;
            plan.admitted.push((entry.id, stored));
            running.push(demand);
            self.running.push(entry);
        }
    }

    /// Gives the prompts being stored, those just admitted among them, their shares of `budget`.
    fn prefill(&mut self, ledger: &mut impl Ledger, plan: &mut StepPlan, budget: usize) {
        let idle = |e: &&Entry| {
            let is_new = plan.admitted.iter().any(|(id, _)| *id == e.id);
            (e.pending() > 1 || is_new) && !plan.work.iter().any(|w| w.id == e.id)
        };
        let until = |e: &Entry| e.pauses.map_or(usize::MAX, |p| p.after(e.stored) - e.stored);
        let alone = self.running.len() == 1;
        let chunk =
            |e: &Entry| if alone { next_chunk(e.pending(), e.chunk) } else { e.pending().min(e.chunk) };
        let prompts: Vec<(SequenceId, usize)> =
            self.running.iter().filter(idle).map(|e| (e.id, chunk(e).min(until(e)))).collect();
        let wanted: Vec<usize> = prompts.iter().map(|p| p.1).collect();
        for ((id, _), share) in prompts.into_iter().zip(shares(&wanted, budget)) {
            // Someone older may have preempted it meanwhile.
            if share > 0 && self.running.iter().any(|e| e.id == id) {
                self.grant(ledger, plan, id, share);
            }
        }
    }

    /// Reserves pages for up to `tokens` tokens, if need be at the cost of younger sequences, and
    /// returns how many it became.
    fn grant(
        &mut self,
        ledger: &mut impl Ledger,
        plan: &mut StepPlan,
        id: SequenceId,
        tokens: usize,
    ) -> usize {
        loop {
            let granted = largest_grant(ledger, id, tokens);
            if granted > 0 {
                plan.work.push(self.work(id, granted));
                return granted;
            }
            match self.running.last().copied() {
                Some(youngest) if youngest.id != id => {
                    self.preempt(youngest.id);
                    plan.work.retain(|w| w.id != youngest.id);
                    ledger.release(youngest.id);
                    plan.preempted.push(youngest.id);
                }
                // No younger sequence is left: older ones will end and release their pages.
                _ if self.running.len() > 1 => return 0,
                _ => {
                    plan.exhausted.push(id);
                    return 0;
                }
            }
        }
    }

    fn work(&self, id: SequenceId, tokens: usize) -> Work {
        let entry = self.running.iter().find(|e| e.id == id).expect("work is given to running sequences");
        Work { id, start: entry.stored, tokens, last: entry.stored + tokens == entry.known }
    }
}

/// The largest of `tokens`, a half, a quarter … for which there are pages; 0 if there are none at
/// all.
fn largest_grant(ledger: &mut impl Ledger, id: SequenceId, tokens: usize) -> usize {
    let mut tokens = tokens;
    while tokens > 0 && !ledger.reserve(id, tokens) {
        tokens /= 2;
    }
    tokens
}

/// Divides `budget` among prompts, oldest first: half for the oldest, the rest to those that want
/// least, what they leave to the oldest again. Equals are served in order of age, so some end early
/// and none later than if all had shared.
fn shares(wanted: &[usize], budget: usize) -> Vec<usize> {
    let mut shares = vec![0; wanted.len()];
    let Some(&oldest) = wanted.first() else { return shares };
    let first = oldest.min(budget.div_ceil(2));
    let mut left = budget - first;
    let mut order: Vec<usize> = (1..wanted.len()).collect();
    order.sort_by_key(|&i| wanted[i]);
    for i in order {
        shares[i] = wanted[i].min(left);
        left -= shares[i];
    }
    shares[0] = oldest.min(first + left);
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_fill_the_budget_and_favour_the_oldest() {
        assert_eq!(shares(&[], 10), [0usize; 0]);
        assert_eq!(shares(&[100], 64), [64]);
        assert_eq!(shares(&[100, 10], 64), [54, 10]);
        assert_eq!(shares(&[100, 100, 100], 64), [32, 32, 0]);
        assert_eq!(shares(&[5, 100, 8], 64), [5, 51, 8]);
        assert_eq!(shares(&[3, 3], 64), [3, 3]);
    }
}
