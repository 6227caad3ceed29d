//! The engine thread between two looks at its inbox: takes requests, runs steps, ends requests.
//!
//! **Invariants:** every accepted request ends with exactly one `Done` or `Failed`. An error or a
//! panic in a step fails only the requests of that step, unless the device itself failed: then
//! its contents are lost and the engine ends ([`Serving::device_failure`]). Nothing is sent to a
//! client before [`Serving::deliver`].

use crate::constraint::prepare_during;
use crate::cost::CostModel;
use crate::engine::{CacheEventSink, EngineOptions};
use crate::ledger::PageLedger;
use crate::live::{Live, LiveRequests, Scores, Stage, StepParts, Submission, deliver};
use crate::post::PostMode;
use crate::request::{EngineStats, Event, FinishReason, RequestError, RequestId, Usage};
use crate::scheduler::{Scheduler, SchedulerOptions, SequenceId, StepPlan, Work};
use crate::statistics::Statistics;
use crate::store::{PageTiers, tokens_by_tier};
use oscar_backend::Backend;
use oscar_cache::{RadixCache, Reclaimed, resume_point};
use oscar_codec::PAGE_TOKENS;
use oscar_runner::{Logits, Runner, StepOutput, StepRequest};
use oscar_store::TransferDesk;
use std::sync::Arc;
use std::time::Instant;

/// Largest number of tokens in a step of a prompt whose logits are all wanted: a row of logits is
/// as wide as the vocabulary.
const LOGPROBS_CHUNK: usize = 64;

mod compact;
mod failure;
mod pages;
mod views;

pub use failure::panic_message;
use failure::{Failure, caught};

/// Whether the engine thread has something to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    Busy,
    /// Requests wait for the page store, or background work for a thread, and nothing else is to be done.
    Waiting,
    Idle,
}

/// A model at work on requests.
pub struct Serving<B: Backend> {
    runner: Runner<B>,
    cache: Option<RadixCache>,
    /// Copies of pages outside of the cache.
    tiers: Option<PageTiers>,
    cache_events: Option<Arc<dyn CacheEventSink>>,
    /// Where pages wait for other machines.
    desk: Option<Arc<TransferDesk>>,
    scheduler: Scheduler,
    /// Learned from every step. A failed step counts too; it fades.
    cost: CostModel,
    live: LiveRequests,
    statistics: Statistics,
    post: PostMode,
    output: StepOutput,
    /// The device failed, and with it everything that it held.
    device_failure: Option<String>,
}

impl<B: Backend> Serving<B> {
    pub fn new(runner: Runner<B>, options: &EngineOptions) -> Self {
        let layout = runner.layout().clone();
        let mut cache = options.prefix_cache.then(|| match options.approximates(&runner) {
            true => RadixCache::with_approximate_hits(layout),
            false => RadixCache::new(layout),
        });
        if let Some(cache) = cache.as_mut().filter(|_| options.cache_events.is_some()) {
            cache.record_events();
        }
        let scheduler = Scheduler::new(SchedulerOptions {
            prefill_chunk: options.scheduler.prefill_chunk.min(runner.prefill_chunk()),
            wave: runner.backend().prefill_wave(&runner.config().heads()),
            ..options.scheduler
        });
        Self {
            runner,
            cache,
            tiers: options.store.clone().map(PageTiers::new),
            cache_events: options.cache_events.clone(),
            desk: options.desk.clone(),
            scheduler,
            cost: CostModel::default(),
            live: LiveRequests::default(),
            statistics: Statistics::default(),
            post: PostMode { setting: options.post.clone(), ..PostMode::default() },
            output: StepOutput::default(),
            device_failure: None,
        }
    }

    /// Why no further step can succeed, if that is so.
    pub fn device_failure(&self) -> Option<&str> {
        self.device_failure.as_deref()
    }

    pub fn activity(&self) -> Activity {
        match self.post.jobs.activity() {
            _ if !self.scheduler.is_idle() => Activity::Busy,
            Activity::Idle => self.tiers.as_ref().map_or(Activity::Idle, PageTiers::activity),
            jobs => jobs,
        }
    }

    /// Waits until the page store has written what it was offered.
    pub fn finish_store(&self) {
        self.tiers.iter().for_each(PageTiers::finish);
    }

    /// The engine's numbers; `exact` counts the prefix cache's pages too.
    pub fn statistics(&mut self, exact: bool) -> EngineStats {
        self.statistics.counters.view_jobs = self.post.jobs.len();
        self.statistics.snapshot(&self.runner, self.cache.as_ref(), &self.live, exact)
    }

    /// Forgets every cached prefix that nothing uses; returns how many pages became free.
    pub fn flush(&mut self) -> usize {
        let pages = |runner: &Runner<B>| {
            let usage = runner.usage();
            usage.full_pages + usage.coded_pages + usage.sliding_pages + usage.states
        };
        let before = pages(&self.runner);
        self.post.clear();
        if let Some(cache) = &mut self.cache {
            cache.flush();
        }
        before - pages(&self.runner)
    }

    pub fn take(&mut self, submission: Submission) {
        let id = submission.request.id();
        if self.live.contains(id) {
            let problem = format!("{} is the id of a request that is being served", id.0);
            deliver(&*submission.sink, Event::Failed(RequestError::Invalid { parameter: "id", problem }));
            return;
        }
        let live = Live::new(submission);
        let waits = self.waits_for_pages(id, &live);
        self.live.insert(id, live);
        if !waits {
            self.schedule(id);
        }
    }

    /// Queues the prompt of a request.
    fn schedule(&mut self, id: RequestId) {
        self.route(id);
        let Some(live) = self.live.get_mut(id).filter(|live| live.stage == Stage::Prefill) else { return };
        let chunk = if live.prompt_logprobs.is_some() { LOGPROBS_CHUNK } else { usize::MAX };
        let first = SequenceId { request: id, choice: 0 };
        self.scheduler.submit(first, live.usage.prompt_tokens, live.most_tokens(), chunk);
        let cache = self.cache.as_ref().filter(|_| self.runner.layout().has_states());
        let stored =
            cache.map(|cache| cache.stored_tokens(live.choices[&0].prefix(live.usage.prompt_tokens)));
        if let Some(pauses) = live.pauses(stored.map(|stored| stored.max(live.known))) {
            self.scheduler.pause(first, pauses);
        }
    }

    pub fn cancel(&mut self, id: RequestId) {
        let Some(live) = self.live.get_mut(id) else { return };
        for choice in live.choices.keys().copied().collect::<Vec<_>>() {
            self.end_choice(SequenceId { request: id, choice }, FinishReason::Cancelled);
        }
    }

    pub fn fail_all(&mut self, error: &RequestError) {
        for id in self.live.ids(|_| true) {
            self.fail(id, error);
        }
    }

    /// Tells what changed in the prefix cache since the last call.
    fn publish_cache_events(&mut self) {
        let (Some(sink), Some(cache)) = (&self.cache_events, &mut self.cache) else { return };
        let events = cache.take_events();
        if !events.is_empty() {
            sink.send(events);
        }
    }

    /// Hands out the events. Requests that nobody listens to are cancelled.
    pub fn deliver(&mut self) {
        self.publish_cache_events();
        for id in self.live.deliver() {
            self.cancel(id);
            self.live.remove(id);
        }
    }

    /// Plans and runs one step.
    pub fn step(&mut self) {
        let begun = Instant::now();
        if let Err(failure) = self.restore() {
            return self.forget_everything(failure);
        }
        let mut ledger = PageLedger {
            runner: &self.runner,
            cache: self.cache.as_mut(),
            live: &mut self.live,
            jobs: &mut self.post.jobs,
            reclaimed: Reclaimed::default(),
        };
        self.scheduler.set_cost(self.cost.beside());
        let plan = self.scheduler.schedule(&mut ledger);
        let reclaimed = ledger.reclaimed;
        let number = self.statistics.counters.steps;
        let requests = || plan.work.iter().map(|work| work.id.request.0).collect::<Vec<_>>();
        let step = tracing::debug_span!("step", number, requests = ?requests());
        if !step.is_disabled() {
            // A step has no parent: it belongs to all its requests.
            for live in plan.work.iter().filter_map(|work| self.live.get(work.id.request)) {
                step.follows_from(&live.span);
            }
        }
        let _step = step.entered();
        self.statistics.note_reclaimed(&reclaimed);
        self.statistics.counters.preemptions += plan.preempted.len() as u64;
        self.note_changes(&plan);
        for &id in &plan.exhausted {
            self.end_exhausted(id);
        }
        if !plan.work.is_empty() {
            let started = Instant::now();
            self.run(&plan);
            self.observe(&plan, started.elapsed().as_secs_f64());
            self.statistics.counters.steps += 1;
        }
        self.work_in_background();
        let elapsed = begun.elapsed();
        tracing::trace!(us = elapsed.as_micros() as u64, "done");
        self.statistics.counters.busy_seconds += elapsed.as_secs_f64();
    }

    fn observe(&mut self, plan: &StepPlan, seconds: f64) {
        let rows = plan.work.iter().map(|w| w.tokens).sum();
        let wave = self.scheduler.options().wave;
        let pairs = plan.work.iter().map(|w| crate::cost::pairs(w.start, w.tokens, wave)).sum();
        if plan.work.iter().any(|w| w.tokens > 1) {
            let beside = plan.work.iter().any(|w| w.tokens == 1);
            self.cost.observe(rows, pairs, seconds, beside);
        }
    }

    /// Notes which sequences began to run and which stopped.
    fn note_changes(&mut self, plan: &StepPlan) {
        let step = self.statistics.counters.steps;
        for &(id, stored) in &plan.admitted {
            let Some(live) = self.live.get_mut(id.request) else { continue };
            tracing::debug!(parent: &live.span, step, choice = id.choice, stored, "admitted");
            // Only the first admission of a request tells what it found in the cache.
            if live.place.take().is_some() {
                let counters = &mut self.statistics.counters;
                live.usage.cached_tokens = stored;
                live.usage.approximate = live.choices[&id.choice].takes_approximate;
                counters.approximate_hits += u64::from(live.usage.approximate);
                counters.prompt_tokens += live.usage.prompt_tokens as u64;
                counters.cached_tokens += stored as u64;
                live.usage.by_tier = tokens_by_tier(&live.restored, stored);
                counters.cached_ram_tokens += live.usage.by_tier.ram as u64;
                counters.cached_disk_tokens += live.usage.by_tier.disk as u64;
                counters.cached_shared_tokens += live.usage.by_tier.shared as u64;
                counters.cached_peer_tokens += live.usage.by_tier.peer as u64;
            }
        }
        for &id in &plan.preempted {
            let Some(live) = self.live.get_mut(id.request) else { continue };
            tracing::debug!(parent: &live.span, step, choice = id.choice, "preempted");
        }
    }

    fn run(&mut self, plan: &StepPlan) {
        let StepParts { work, mut requests, mut guides } = self.live.step_requests(plan);
        let wanted: Vec<Logits> = requests.iter().map(|request| request.logits.clone()).collect();
        let before = boundaries(&self.runner, &requests);
        let step = || {
            self.runner.step(&mut requests, &mut self.output)?;
            // A step without logits returns before the device has run it. Requests that come meanwhile must
            // not wait for a whole prompt, and the cost of a step is learned from its time.
            self.runner.wait()
        };
        let outcome = prepare_during(&mut guides, || caught(step));
        if let Err(failure) = outcome {
            let message = self.note_failure(failure);
            // Their pages may hold anything: they are dropped, not published.
            for work in work {
                self.fail(work.id.request, &RequestError::Engine(message.clone()));
            }
            return;
        }
        let after = boundaries(&self.runner, &requests);
        self.statistics.counters.demoted_tokens += (after - before) as u64;
        self.scheduler.complete(plan);
        let vocab = self.runner.config().vocab_size;
        let output = std::mem::take(&mut self.output);
        let (mut rest, mut lists) = (&output.logits[..], output.picked.iter());
        let mut hidden = output.hidden.chunks_exact(self.runner.config().hidden_size);
        for (work, wanted) in work.iter().zip(wanted) {
            let scores = match wanted {
                Logits::Pick(_) | Logits::PickAmong(..) => {
                    Scores::Candidates(lists.next().map_or(&[], Vec::as_slice))
                }
                Logits::Hidden => Scores::Hidden(hidden.next().unwrap_or_default()),
                _ => {
                    let (mine, others) = rest.split_at(wanted.rows(work.tokens).len() * vocab);
                    rest = others;
                    Scores::Logits(mine)
                }
            };
            self.after_work(work, scores, vocab);
        }
        self.output = output;
    }

    /// Uses what a step computed for one sequence.
    fn after_work(&mut self, work: &Work, scores: Scores<'_>, vocab: usize) {
        self.mark_resume(work, work.start);
        self.publish(work.id, false);
        self.mark_resume(work, work.start + work.tokens);
        if !self.compact(work.id, work.start + work.tokens) {
            return;
        }
        self.begin_view(work.id, work.start + work.tokens);
        let Some(live) = self.live.get_mut(work.id.request) else { return };
        if let Scores::Logits(logits) = scores {
            live.note_prompt(work, logits, vocab);
        }
        if !work.last {
            return;
        }
        if live.stage == Stage::Prefill {
            let embedding = match scores {
                Scores::Hidden(state) => Some(state.to_vec()),
                Scores::Logits(_) | Scores::Candidates(_) => None,
            };
            self.prompt_stored(work.id.request, embedding);
        }
        self.continue_choice(work.id, scores, vocab);
    }

    /// Keeps the state at the point from which the same prompt will resume, and where the prompt leaves what
    /// the page store has, before the sequence, which has `stored` tokens in the prefix cache, passes it.
    fn mark_resume(&mut self, work: &Work, stored: usize) {
        let (Some(live), Some(cache)) = (self.live.get(work.id.request), &mut self.cache) else { return };
        let prompt = live.usage.prompt_tokens;
        // Not where a hit began: its state was kept before.
        let parts = stored == live.known && work.start < stored;
        let is_there = work.start < prompt && (parts || stored == resume_point(prompt));
        let choice = live.choices.get(&work.id.choice);
        if let Some(choice) = choice.filter(|_| self.runner.layout().has_states() && is_there) {
            cache.mark_prompt(choice.prefix(stored + 1));
        }
    }

    /// The prompt of a request is stored: tells the client and begins the other choices. Runs once
    /// per request.
    fn prompt_stored(&mut self, request: RequestId, embedding: Option<Vec<f32>>) {
        let Some(live) = self.live.get_mut(request) else { return };
        live.stage = Stage::Decode;
        let Usage { prompt_tokens, cached_tokens, approximate, by_tier, .. } = live.usage;
        let prompt_logprobs = live.prompt_logprobs.take();
        live.events.push(Event::Started { cached_tokens, approximate, by_tier, prompt_logprobs });
        live.events.extend(embedding.map(Event::Embedding));
        if let Some(cache) = &mut self.cache {
            cache.mark_prompt(live.choices[&0].prefix(prompt_tokens));
        }
        self.offer(SequenceId { request, choice: 0 }, true);
        self.keep_prompt(request);
        self.count_route(request);
        let Some(live) = self.live.get_mut(request) else { return };
        if live.params.max_tokens == 0 {
            return self.end_choice(SequenceId { request, choice: 0 }, FinishReason::Length);
        }
        let others: Vec<_> = live.start_others().map(|choice| SequenceId { request, choice }).collect();
        self.scheduler.submit_next(&others, prompt_tokens, live.most_tokens());
        if let Some(pauses) = live.pauses(None) {
            others.iter().for_each(|&id| self.scheduler.pause(id, pauses));
        }
    }

    /// Chooses the next token of a choice, if it has not ended.
    fn continue_choice(&mut self, id: SequenceId, scores: Scores<'_>, vocab: usize) {
        let Some(Live { params, usage, events, choices, .. }) = self.live.get_mut(id.request) else { return };
        let Some(choice) = choices.get_mut(&id.choice) else { return };
        let (token, logprobs) = match choice.choose(params, scores, vocab) {
            Ok(chosen) => chosen,
            Err(problem) => {
                let parameter = params.constraint.as_ref().map_or("", |form| form.0.parameter()).to_owned();
                let error = RequestError::Form { parameter, problem };
                return self.fail(id.request, &error);
            }
        };
        usage.completion_tokens += 1;
        self.statistics.counters.generated_tokens += 1;
        if choice.may_end(params) && params.stop_tokens.contains(&token) {
            return self.end_choice(id, FinishReason::Stop(token));
        }
        events.push(Event::Token { choice: id.choice, token, logprobs });
        if choice.generated == params.max_tokens {
            return self.end_choice(id, FinishReason::Length);
        }
        choice.tokens.push(token);
        choice.resume_limit = choice.tokens.len() - 1;
        self.scheduler.append(id);
    }

    /// Offers a sequence's pages to the prefix cache, if there are new whole ones or `all` is to be
    /// kept.
    fn publish(&mut self, id: SequenceId, all: bool) {
        let Some(choice) = self.live.choice_mut(id) else { return };
        let Some(sequence) = &mut choice.sequence else { return };
        let is_due = sequence.len() / PAGE_TOKENS > choice.published / PAGE_TOKENS
            || sequence.pages().finished_pages() > 1
            || all;
        match &mut self.cache {
            Some(cache) if is_due => choice.publish(cache),
            Some(_) => return,
            None => return sequence.trim(self.runner.layout()),
        }
        self.offer(id, all);
    }

    /// Ends one choice and, with the last one, its request.
    fn end_choice(&mut self, id: SequenceId, reason: FinishReason) {
        self.note_rows(id);
        self.publish(id, true);
        self.remember_turn(id);
        self.scheduler.remove(id);
        let Some(live) = self.live.get_mut(id.request) else { return };
        if live.finish_choice(id.choice, reason) {
            match reason {
                FinishReason::Cancelled => self.statistics.counters.cancelled += 1,
                FinishReason::Stop(_) | FinishReason::Length => self.statistics.counters.finished += 1,
            }
        }
    }

    /// Ends a request that cannot go on.
    fn fail(&mut self, id: RequestId, error: &RequestError) {
        let Some(live) = self.live.get_mut(id).filter(|live| live.stage != Stage::Ended) else { return };
        for &choice in live.choices.keys() {
            self.scheduler.remove(SequenceId { request: id, choice });
        }
        live.fail(error);
        self.statistics.counters.failed += 1;
    }

    /// A sequence has the cache to itself and still finds no page: its answer ends here, or its
    /// prompt fails.
    fn end_exhausted(&mut self, id: SequenceId) {
        let Some(live) = self.live.get_mut(id.request) else { return };
        if live.stage == Stage::Decode {
            return self.end_choice(id, FinishReason::Length);
        }
        let needed = self.runner.layout().peak_bytes(live.usage.prompt_tokens);
        self.fail(id.request, &RequestError::TooLarge { needed, budget: self.runner.usage().budget });
    }

    /// Fails the running requests and empties the prefix cache.
    fn forget_everything(&mut self, failure: Failure) {
        let message = self.note_failure(failure);
        for id in self.live.ids(Live::is_running) {
            self.fail(id, &RequestError::Engine(message.clone()));
        }
        self.post.clear();
        if let Some(cache) = &mut self.cache {
            cache.flush();
        }
    }
}

/// The sum of the sequences' boundaries: it grows by the tokens that a step quantizes.
fn boundaries<B: Backend>(runner: &Runner<B>, requests: &[StepRequest<'_>]) -> usize {
    requests.iter().map(|request| request.sequence.boundary(runner.layout())).sum()
}
