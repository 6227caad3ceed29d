//! The engine's one thread: takes commands, plans a step, runs it, hands the tokens out.
//!
//! **Invariants:** every request that was taken ends with exactly one `Done` or `Failed`, whatever happens in
//! between: an error or a panic of a step fails the requests of that step alone. Events go out after the
//! statistics were brought up to date, so who has seen `Done` sees its pages accounted for.

use crate::engine::{EngineOptions, Shared};
use crate::failures::panic_message;
use crate::ledger::PageLedger;
use crate::logprobs::token_logprobs;
use crate::request::{Event, EventSink, FinishReason, Request, RequestError, RequestId, Usage};
use crate::runner::{EngineError, Logits, Runner, Sequence, StepRequest};
use crate::sampling::{Sampler, SamplingError};
use crate::scheduler::{Scheduler, SchedulerOptions, SequenceId, StepPlan, Work};
use crate::sequences::{Choice, Found, Job};
use crate::statistics::Counters;
use oscar_backend::{Backend, Candidate};
use oscar_cache::{PrefixKey, RadixCache, Reclaimed};
use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::Instant;

/// Most tokens in a step of a prompt whose logits are all wanted: a row of logits is as wide as the vocabulary.
const LOGPROBS_CHUNK: usize = 64;

pub enum Command {
    Submit(Request),
    Cancel(RequestId),
    Flush(Sender<usize>),
    Stop,
}

pub struct Worker<B: Backend> {
    pub(crate) runner: Runner<B>,
    pub(crate) cache: Option<RadixCache>,
    pub(crate) scheduler: Scheduler,
    pub(crate) jobs: BTreeMap<RequestId, Job>,
    pub(crate) choices: HashMap<SequenceId, Choice>,
    sinks: HashMap<RequestId, Box<dyn EventSink>>,
    pub(crate) outbox: Vec<(RequestId, Event)>,
    pub(crate) counters: Counters,
    next_sequence: u64,
    logits: Vec<f32>,
    picked: Vec<Vec<Candidate>>,
    pub(crate) shared: Arc<Shared>,
    inbox: Receiver<Command>,
}

impl<B: Backend> Worker<B> {
    pub fn new(
        runner: Runner<B>,
        options: &EngineOptions,
        shared: Arc<Shared>,
        inbox: Receiver<Command>,
    ) -> Self {
        let layout = runner.layout().clone();
        let demotes = options.demote_idle_tails && runner.backend().reads_demoted_tails(&layout);
        let cache = options.prefix_cache.then(|| match demotes {
            true => RadixCache::with_demotion(layout, runner.pool()),
            false => RadixCache::new(layout),
        });
        let sizes = SchedulerOptions {
            prefill_chunk: options.scheduler.prefill_chunk.min(runner.prefill_chunk()),
            ..options.scheduler
        };
        Self {
            runner,
            cache,
            scheduler: Scheduler::new(sizes),
            jobs: BTreeMap::new(),
            choices: HashMap::new(),
            sinks: HashMap::new(),
            outbox: Vec::new(),
            counters: Counters::default(),
            next_sequence: 0,
            logits: Vec::new(),
            picked: Vec::new(),
            shared,
            inbox,
        }
    }

    pub fn run(mut self) {
        let ended = catch_unwind(AssertUnwindSafe(|| self.serve()));
        self.shared.close();
        let error = match ended {
            Ok(()) => RequestError::ShuttingDown,
            Err(panic) => RequestError::Engine(panic_message(&*panic)),
        };
        for id in self.sinks.keys().copied().collect::<Vec<_>>() {
            self.fail(id, &error);
        }
        while let Ok(command) = self.inbox.try_recv() {
            if let Command::Submit(request) = command {
                self.shared.queued.fetch_sub(1, Ordering::SeqCst);
                request.sink.send(Event::Failed(error.clone()));
            }
        }
        self.publish_statistics(true);
        self.deliver();
    }

    fn serve(&mut self) {
        self.publish_statistics(true);
        loop {
            let command = match self.scheduler.is_idle() {
                true => self.inbox.recv().map_err(|_| TryRecvError::Disconnected),
                false => self.inbox.try_recv(),
            };
            match command {
                Ok(Command::Submit(request)) => self.take(request),
                Ok(Command::Cancel(id)) => self.cancel(id),
                Ok(Command::Flush(reply)) => {
                    let before = self.runner.usage();
                    if let Some(cache) = &mut self.cache {
                        cache.flush();
                    }
                    let after = self.runner.usage();
                    self.publish_statistics(true);
                    // Nobody may be waiting for the answer any more.
                    let _ = reply
                        .send(before.full_pages + before.coded_pages - after.full_pages - after.coded_pages);
                }
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => self.step(),
            }
            self.publish_statistics(self.scheduler.is_idle());
            self.deliver();
        }
    }

    fn take(&mut self, request: Request) {
        let Request { id, prompt, params, sink } = request;
        if self.sinks.contains_key(&id) {
            self.shared.queued.fetch_sub(1, Ordering::SeqCst);
            let problem = format!("{} is the id of a request that is being served", id.0);
            sink.send(Event::Failed(RequestError::Invalid { parameter: "id", problem }));
            return;
        }
        let mut job = Job {
            prompt_tokens: prompt.len(),
            cached_tokens: 0,
            completion_tokens: 0,
            demoted_tail: false,
            live: Vec::new(),
            unborn: (1..params.choices).collect(),
            prompt_logprobs: params.prompt_logprobs.map(|_| vec![None]),
            admitted: false,
            started: false,
            params,
        };
        self.sinks.insert(id, sink);
        let (tokens, chunk) = match job.prompt_logprobs {
            Some(_) => (prompt.len(), LOGPROBS_CHUNK),
            None => (prompt.len(), usize::MAX),
        };
        let limit = job.most_tokens();
        let sequence = self.add_choice(id, &mut job, 0, prompt);
        self.jobs.insert(id, job);
        match sequence {
            Ok(sequence) => self.scheduler.submit(sequence, tokens, limit, chunk),
            Err(error) => self.fail(id, &RequestError::Engine(error.to_string())),
        }
    }

    /// Makes a choice of a request.
    fn add_choice(
        &mut self,
        request: RequestId,
        job: &mut Job,
        index: usize,
        prompt: Vec<u32>,
    ) -> Result<SequenceId, SamplingError> {
        let mut params = job.params.sampling.clone();
        params.seed = params.seed.wrapping_add(index as u64);
        let sampler = Sampler::for_prompt(params, &prompt)?;
        let id = SequenceId(self.next_sequence);
        self.next_sequence += 1;
        let resume_limit = if index == 0 && job.prompt_logprobs.is_some() { 0 } else { prompt.len() - 1 };
        self.choices.insert(
            id,
            Choice {
                request,
                index,
                tokens: prompt,
                salt: job.params.cache_salt,
                generated: 0,
                sampler,
                sequence: None,
                published: 0,
                resume_limit,
                takes_demoted: index == 0 || job.demoted_tail,
            },
        );
        job.live.push(id);
        Ok(id)
    }

    /// Plans and runs one step.
    fn step(&mut self) {
        let begun = Instant::now();
        let mut ledger = PageLedger {
            runner: &self.runner,
            cache: self.cache.as_mut(),
            choices: &mut self.choices,
            reclaimed: Reclaimed::default(),
        };
        let plan = self.scheduler.schedule(&mut ledger);
        self.counters.evicted_pages += (ledger.reclaimed.evicted + ledger.reclaimed.thinned) as u64;
        self.counters.demoted_tail_pages += ledger.reclaimed.demoted as u64;
        self.counters.preemptions += plan.preempted.len() as u64;
        self.note_admissions(&plan);
        if let Err(message) = self.demote_tails() {
            // Codes that were promised are not there: nothing that is stored can be trusted.
            return self.forget_everything(&message);
        }
        for &id in &plan.exhausted {
            self.end_exhausted(id);
        }
        if !plan.work.is_empty() {
            self.run_plan(&plan);
            self.counters.steps += 1;
        }
        self.counters.busy_seconds += begun.elapsed().as_secs_f64();
    }

    /// Codes the tails that the prefix cache gave up while the step was planned.
    fn demote_tails(&mut self) -> Result<(), String> {
        let tails = self.cache.as_mut().map(RadixCache::take_demotions).unwrap_or_default();
        let runner = &mut self.runner;
        match catch_unwind(AssertUnwindSafe(|| runner.demote_tails(&tails))) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(panic) => Err(panic_message(&*panic)),
        }
    }

    fn note_admissions(&mut self, plan: &StepPlan) {
        for &(id, stored) in &plan.admitted {
            let choice = &self.choices[&id];
            if let Some(job) = self.jobs.get_mut(&choice.request)
                && !job.admitted
            {
                job.admitted = true;
                job.cached_tokens = stored;
                job.demoted_tail = choice.takes_demoted;
                self.counters.demoted_tail_hits += u64::from(job.demoted_tail);
                self.counters.prompt_tokens += job.prompt_tokens as u64;
                self.counters.cached_tokens += stored as u64;
                self.shared.queued.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    fn run_plan(&mut self, plan: &StepPlan) {
        // The sequences leave the map while the runner borrows them all at once.
        let mut parts: Vec<(Work, Sequence, Logits)> = Vec::with_capacity(plan.work.len());
        let (mut boundaries, picks) = (0, self.runner.backend().picks());
        for &work in &plan.work {
            let Some(choice) = self.choices.get_mut(&work.id) else { continue };
            let Some(sequence) = choice.sequence.take() else { continue };
            let job = &self.jobs[&choice.request];
            let wants_all = job.prompt_logprobs.is_some() && choice.index == 0 && !job.started;
            let logits = match (wants_all, work.last) {
                (true, _) => Logits::All,
                (false, true) => choice.wants(&job.params, picks),
                (false, false) => Logits::None,
            };
            boundaries += sequence.boundary(self.runner.layout());
            parts.push((work, sequence, logits));
        }
        let (runner, choices) = (&mut self.runner, &self.choices);
        let (logits, picked) = (&mut self.logits, &mut self.picked);
        let outcome = catch_unwind(AssertUnwindSafe(|| -> Result<(), EngineError> {
            let mut requests: Vec<StepRequest<'_>> = parts
                .iter_mut()
                .map(|(work, sequence, logits)| StepRequest {
                    sequence,
                    tokens: &choices[&work.id].tokens[work.start..work.start + work.tokens],
                    logits: *logits,
                })
                .collect();
            runner.step_picking(&mut requests, logits, picked)
        }));
        let error = match outcome {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(panic) => Some(panic_message(&*panic)),
        };
        if let Some(message) = error {
            // Their pages may hold anything: they are dropped, not published.
            for (work, _, _) in &parts {
                if let Some(request) = self.choices.get(&work.id).map(|c| c.request) {
                    self.fail(request, &RequestError::Engine(message.clone()));
                }
            }
            return;
        }
        self.scheduler.complete(plan);
        let after: usize = parts.iter().map(|(_, s, _)| s.boundary(self.runner.layout())).sum();
        self.counters.demoted_tokens += (after - boundaries) as u64;
        let vocab = self.runner.config().vocab_size;
        let (logits, picked) = (std::mem::take(&mut self.logits), std::mem::take(&mut self.picked));
        let (mut row, mut lists) = (0, picked.iter());
        for (work, sequence, wanted) in parts {
            let (rows, list) = match wanted {
                Logits::None => (0, None),
                Logits::Last => (1, None),
                Logits::All => (work.tokens, None),
                Logits::Pick(_) => (0, lists.next()),
            };
            let mine = &logits[row * vocab..(row + rows) * vocab];
            row += rows;
            if let Some(choice) = self.choices.get_mut(&work.id) {
                choice.sequence = Some(sequence);
                let found = list.map_or(Found::Logits(mine), |list| Found::Candidates(list));
                self.after_work(&work, wanted, found, vocab);
            }
        }
        (self.logits, self.picked) = (logits, picked);
    }

    /// What one sequence's share of a step brought.
    fn after_work(&mut self, work: &Work, wanted: Logits, found: Found<'_>, vocab: usize) {
        self.publish(work.id, false);
        let choice = &self.choices[&work.id];
        let request = choice.request;
        let Some(job) = self.jobs.get_mut(&request) else { return };
        if let (Logits::All, Some(logits)) = (wanted, found.logits())
            && let (Some(found), Some(top)) = (&mut job.prompt_logprobs, job.params.prompt_logprobs)
        {
            for (i, row) in logits.chunks_exact(vocab).enumerate() {
                let next = work.start + i + 1;
                // A prompt that was preempted passes positions again that are known already.
                if next == found.len() && next < job.prompt_tokens {
                    found.push(Some(token_logprobs(row, choice.tokens[next], top)));
                }
            }
            let limit = found.len().min(choice.tokens.len()) - 1;
            if let Some(choice) = self.choices.get_mut(&work.id) {
                choice.resume_limit = limit;
            }
        }
        if !work.last {
            return;
        }
        if self.start(request) {
            self.continue_choice(work.id, found.last(vocab));
        }
    }

    /// The first time a request's prompt is complete: tells the client and begins the other choices. Says whether
    /// tokens are to follow.
    fn start(&mut self, request: RequestId) -> bool {
        let Some(mut job) = self.jobs.remove(&request) else { return false };
        if !job.started {
            job.started = true;
            let prompt_logprobs = job.prompt_logprobs.take();
            let (cached_tokens, demoted_tail) = (job.cached_tokens, job.demoted_tail);
            self.outbox.push((request, Event::Started { cached_tokens, demoted_tail, prompt_logprobs }));
            let prompt = self.choices[&job.live[0]].tokens[..job.prompt_tokens].to_vec();
            if let Some(cache) = &mut self.cache {
                cache.mark_prompt(PrefixKey::new(job.params.cache_salt, &prompt));
            }
            let siblings: Result<Vec<_>, _> = std::mem::take(&mut job.unborn)
                .into_iter()
                .map(|index| self.add_choice(request, &mut job, index, prompt.clone()))
                .collect();
            match siblings {
                Ok(siblings) if job.params.max_tokens > 0 => {
                    self.scheduler.submit_next(&siblings, prompt.len(), job.most_tokens());
                }
                Ok(_) => {}
                Err(error) => {
                    self.jobs.insert(request, job);
                    self.fail(request, &RequestError::Engine(error.to_string()));
                    return false;
                }
            }
        }
        let (live, goes_on) = (job.live.clone(), job.params.max_tokens > 0);
        self.jobs.insert(request, job);
        if !goes_on {
            for id in live {
                self.end_choice(id, FinishReason::Length);
            }
        }
        goes_on
    }

    /// Chooses the next token of a choice.
    fn continue_choice(&mut self, id: SequenceId, found: Found<'_>) {
        let Some(choice) = self.choices.get_mut(&id) else { return };
        let Some(job) = self.jobs.get_mut(&choice.request) else { return };
        let params = &job.params;
        let token = match found {
            Found::Logits(logits) => choice.sampler.sample_except(logits, choice.banned(params)),
            Found::Candidates(list) => choice.sampler.sample_among(list),
        };
        choice.generated += 1;
        job.completion_tokens += 1;
        self.counters.generated_tokens += 1;
        if choice.generated > params.min_tokens && params.stop_tokens.contains(&token) {
            return self.end_choice(id, FinishReason::Stop);
        }
        let wanted = params.logprobs.zip(found.logits());
        let logprobs = wanted.map(|(top, logits)| token_logprobs(logits, token, top));
        self.outbox.push((choice.request, Event::Token { choice: choice.index, token, logprobs }));
        if choice.generated == params.max_tokens {
            return self.end_choice(id, FinishReason::Length);
        }
        choice.tokens.push(token);
        choice.resume_limit = choice.tokens.len() - 1;
        self.scheduler.append(id);
    }

    /// Offers a sequence's pages to the prefix cache, if there are new whole ones or `all` is to be kept.
    fn publish(&mut self, id: SequenceId, all: bool) {
        let Some(choice) = self.choices.get_mut(&id) else { return };
        let Some(sequence) = &mut choice.sequence else { return };
        let page = oscar_codec::PAGE_TOKENS;
        let is_due = sequence.len() / page > choice.published / page
            || sequence.pages().finished_full_pages() > 1
            || all;
        match &mut self.cache {
            Some(cache) if is_due => {
                let key = PrefixKey::new(choice.salt, &choice.tokens);
                choice.published = sequence.publish(cache, key);
            }
            Some(_) => {}
            None => sequence.trim(self.runner.layout()),
        }
    }

    /// Ends one choice and, with the last, its request.
    pub(crate) fn end_choice(&mut self, id: SequenceId, reason: FinishReason) {
        self.publish(id, true);
        self.scheduler.remove(id);
        let Some(choice) = self.choices.remove(&id) else { return };
        let request = choice.request;
        self.outbox.push((request, Event::Finished { choice: choice.index, reason }));
        let Some(job) = self.jobs.get_mut(&request) else { return };
        job.live.retain(|&other| other != id);
        // A request cancelled before its prompt was stored has choices that never began.
        if job.live.is_empty() {
            for choice in std::mem::take(&mut job.unborn) {
                self.outbox.push((request, Event::Finished { choice, reason }));
            }
            let usage = Usage {
                prompt_tokens: job.prompt_tokens,
                cached_tokens: job.cached_tokens,
                completion_tokens: job.completion_tokens,
                demoted_tail: job.demoted_tail,
            };
            if !job.admitted {
                self.shared.queued.fetch_sub(1, Ordering::SeqCst);
            }
            match reason {
                FinishReason::Cancelled => self.counters.cancelled += 1,
                FinishReason::Stop | FinishReason::Length => self.counters.finished += 1,
            }
            self.jobs.remove(&request);
            self.outbox.push((request, Event::Done(usage)));
        }
    }

    fn cancel(&mut self, id: RequestId) {
        let live = self.jobs.get(&id).map(|job| job.live.clone()).unwrap_or_default();
        for sequence in live {
            self.end_choice(sequence, FinishReason::Cancelled);
        }
    }

    /// Hands out the events; who does not listen any more is cancelled.
    fn deliver(&mut self) {
        let mut gone = Vec::new();
        for (id, event) in std::mem::take(&mut self.outbox) {
            let is_last = matches!(event, Event::Done(_) | Event::Failed(_));
            if let Some(sink) = self.sinks.get(&id)
                && !gone.contains(&id)
            {
                // A sink that panics is one that does not listen.
                let listens = catch_unwind(AssertUnwindSafe(|| sink.send(event))).unwrap_or(false);
                if !listens {
                    gone.push(id);
                }
            }
            if is_last {
                self.sinks.remove(&id);
            }
        }
        for id in gone {
            self.cancel(id);
            // Nobody hears the rest.
            self.sinks.remove(&id);
            self.outbox.retain(|(other, _)| *other != id);
        }
    }
}
