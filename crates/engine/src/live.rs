//! Requests while they are served.
//!
//! Everything the engine knows about a request lies in its [`Live`], from the moment it is taken
//! until its last event is delivered. A [`Choice`] lives from its first token to its last.

use crate::constraint::Guide;
use crate::engine::QueuePlace;
use crate::kv_request::Cap;
use crate::logprobs::token_logprobs;
use crate::post::PostTurn;
use crate::request::{Event, EventSink, FinishReason, GenerationParams, Request, TokenLogprobs, Usage};
use crate::request::{RequestError, RequestId};
use crate::row_cap::RowCap;
use crate::sampling::Sampler;
use crate::scheduler::{Pauses, SequenceId, StepPlan, Work};
use oscar_backend::Candidate;
use oscar_cache::{CacheSalt, PrefixKey, RadixCache, resume_point};
use oscar_runner::{Logits, Sequence, StepRequest};
use oscar_store::Tier;
use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tracing::Span;

/// A valid request on its way to the engine thread.
pub struct Submission {
    pub request: Request,
    pub sink: Box<dyn EventSink>,
    /// Log lines about the request belong to this span.
    pub span: Span,
    pub place: QueuePlace,
    /// Caps the quantized rows of its conversation.
    pub cap: Option<Cap>,
}

/// How far a request has come. Preemption does not set it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The prompt is waiting or being computed.
    Prefill,
    /// [`Event::Started`] has been sent.
    Decode,
    /// The last event waits for delivery.
    Ended,
}

/// A request being served.
pub struct Live {
    pub params: GenerationParams,
    /// Usage so far; sent to the client at the end.
    pub usage: Usage,
    pub stage: Stage,
    /// The request's place in the queue; `None` once it has had a place in a step.
    pub place: Option<QueuePlace>,
    /// Log-probabilities of the prompt as far as it is computed, if they were asked for.
    pub prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    /// Choices that run or wait, by index.
    pub choices: BTreeMap<usize, Choice>,
    /// Choices that have not begun. All but the first begin when the prompt is stored.
    unstarted: Range<usize>,
    /// Not yet used: the choices draw from copies of it.
    sampler: Sampler,
    /// Events of the current step.
    pub events: Vec<Event>,
    sink: Box<dyn EventSink>,
    pub span: Span,
    /// Blocks of the prompt that the page store brought back, and from where.
    pub restored: Vec<(usize, Tier)>,
    /// Tokens of the prompt of which the page store has something.
    pub known: usize,
    /// Caps the quantized rows of its conversation.
    pub cap: Option<RowCap>,
    /// Its turn, if it may read a view of a history that stays whole.
    pub post: Option<PostTurn>,
}

/// One continuation of a prompt.
pub struct Choice {
    /// The prompt and the generated tokens. The last token of an answer is not stored and not among
    /// them.
    pub tokens: Vec<u32>,
    /// The part of the prefix cache it belongs to.
    pub salt: Option<CacheSalt>,
    /// The part that it belongs to after its history was compacted.
    pub lineage: Option<CacheSalt>,
    pub generated: usize,
    pub sampler: Sampler,
    /// Where it stands in the form that the request demands.
    guide: Option<Guide>,
    /// Its pages, while it runs.
    pub sequence: Option<Sequence>,
    /// Tokens of it that the prefix cache has been offered.
    pub published: usize,
    /// Blocks of it whose complete quantized pages the page store has been offered.
    pub offered: usize,
    /// Longest stored prefix that it may begin from: at least the last token must be computed, and
    /// every token whose logits are still wanted.
    pub resume_limit: usize,
    /// Whether its prefix hit may be approximate. Not after it has computed anything exactly:
    /// preempted and resumed, its answer must be the same as without interruption.
    pub takes_approximate: bool,
}

impl Live {
    pub fn new(submission: Submission) -> Self {
        let Submission { request, sink, span, place, cap } = submission;
        let Request { prompt, params, sampler, .. } = request;
        let (cap, post) = match cap {
            Some(Cap::Block(cap)) => (Some(cap), None),
            Some(Cap::Post(cap)) => (None, PostTurn::new(cap, params.kv.turn.as_ref(), prompt.len())),
            None => (None, None),
        };
        let mut live = Self {
            usage: Usage { prompt_tokens: prompt.len(), ..Usage::default() },
            stage: Stage::Prefill,
            place: Some(place),
            prompt_logprobs: params.prompt_logprobs.map(|_| vec![None]),
            choices: BTreeMap::new(),
            unstarted: 1..params.choices,
            events: Vec::new(),
            params,
            sampler,
            sink,
            span,
            restored: Vec::new(),
            known: 0,
            cap,
            post,
        };
        live.add_choice(0, prompt);
        live
    }

    fn add_choice(&mut self, index: usize, prompt: Vec<u32>) {
        let resume_limit = if self.prompt_logprobs.is_some() { 0 } else { prompt.len() - 1 };
        let choice = Choice {
            tokens: prompt,
            salt: self.params.cache_salt,
            lineage: None,
            generated: 0,
            sampler: self.sampler.for_choice(index),
            guide: self.params.constraint.as_ref().map(Guide::new),
            sequence: None,
            published: 0,
            offered: 0,
            resume_limit,
            takes_approximate: index == 0 || self.usage.approximate,
        };
        self.choices.insert(index, choice);
    }

    /// Begins the choices that waited for the prompt, which the first choice holds, and returns
    /// their indices.
    pub fn start_others(&mut self) -> Range<usize> {
        let others = std::mem::take(&mut self.unstarted);
        for index in others.clone() {
            let prompt = self.choices[&0].tokens.clone();
            self.add_choice(index, prompt);
        }
        others
    }

    /// Most tokens that one of its choices stores: the last generated token is not stored.
    pub fn most_tokens(&self) -> usize {
        self.usage.prompt_tokens + self.params.max_tokens.saturating_sub(1)
    }

    /// Lengths at which its sequences pause: where they are compacted, where a turn begins to read its
    /// view, or in models with recurrent states where a state is to be kept. Those are the end of what the
    /// tree or the page store has `stored` of the prompt, because others may branch there too, and the
    /// point from which the same prompt would resume.
    pub fn pauses(&self, stored: Option<usize>) -> Option<Pauses> {
        if let Some(stored) = stored {
            let end = resume_point(self.usage.prompt_tokens);
            return Some(match stored > 0 && stored < end {
                true => Pauses { first: stored, every: end - stored },
                false => Pauses { first: end, every: usize::MAX / 2 },
            });
        }
        let start = self.post.as_ref().filter(|post| post.reading.is_some()).map(|post| post.start);
        let once = start.map(|first| Pauses { first, every: usize::MAX / 2 });
        self.cap.as_ref().map(RowCap::pauses).or(once)
    }

    pub fn is_running(&self) -> bool {
        self.choices.values().any(|choice| choice.sequence.is_some())
    }

    /// Keeps the log-probabilities of the prompt tokens behind those of `work`, whose logits these
    /// are.
    pub fn note_prompt(&mut self, work: &Work, logits: &[f32], vocab: usize) {
        let (Some(found), Some(top)) = (&mut self.prompt_logprobs, self.params.prompt_logprobs) else {
            return;
        };
        let Some(choice) = self.choices.get_mut(&work.id.choice) else { return };
        for (i, row) in logits.chunks_exact(vocab).enumerate() {
            let next = work.start + i + 1;
            // A prompt that was preempted passes again over positions that are already known.
            if next == found.len() && next < self.usage.prompt_tokens {
                found.push(Some(token_logprobs(row, choice.tokens[next], top)));
            }
        }
        choice.resume_limit = found.len().min(choice.tokens.len()) - 1;
    }

    /// A choice has ended. Returns whether it was the last one; then the request has ended too.
    pub fn finish_choice(&mut self, index: usize, reason: FinishReason) -> bool {
        if self.choices.remove(&index).is_none() {
            return false;
        }
        self.events.push(Event::Finished { choice: index, reason });
        if !self.choices.is_empty() {
            return false;
        }
        // A request that ends before its prompt is stored has choices that never began.
        for choice in std::mem::take(&mut self.unstarted) {
            self.events.push(Event::Finished { choice, reason });
        }
        tracing::debug!(parent: &self.span, ?reason, usage = ?self.usage, "ended");
        self.end(Event::Done(self.usage));
        true
    }

    /// The request cannot go on; its pages are dropped.
    pub fn fail(&mut self, error: &RequestError) {
        tracing::warn!(parent: &self.span, %error, "failed");
        self.choices.clear();
        self.end(Event::Failed(error.clone()));
    }

    fn end(&mut self, last: Event) {
        self.events.push(last);
        self.stage = Stage::Ended;
        self.place = None;
    }

    /// Delivers the waiting events; false if nobody listens any more.
    pub fn deliver(&mut self) -> bool {
        std::mem::take(&mut self.events).into_iter().all(|event| deliver(&*self.sink, event))
    }
}

/// Sends an event; false if nobody listens. A sink that panics does not listen.
pub fn deliver(sink: &dyn EventSink, event: Event) -> bool {
    catch_unwind(AssertUnwindSafe(|| sink.send(event))).unwrap_or(false)
}

/// What a step computed for the next token of a choice.
#[derive(Clone, Copy)]
pub enum Scores<'a> {
    /// Rows of logits. The last row predicts the next token.
    Logits(&'a [f32]),
    /// What [`Logits::Pick`] or [`Logits::PickAmong`] asked for.
    Candidates(&'a [Candidate]),
    /// The hidden state of the last token.
    Hidden(&'a [f32]),
}

impl Choice {
    /// Its first `len` tokens as the prefix cache knows them.
    pub fn prefix(&self, len: usize) -> PrefixKey<'_> {
        PrefixKey::new(self.lineage.or(self.salt), &self.tokens[..len])
    }

    /// Offers its whole pages to the prefix cache.
    pub fn publish(&mut self, cache: &mut RadixCache) {
        if let Some(sequence) = &mut self.sequence {
            self.published =
                sequence.publish(cache, PrefixKey::new(self.lineage.or(self.salt), &self.tokens));
        }
    }

    /// Tokens that may not come next: an answer cannot end before it has `min_tokens`.
    fn banned<'a>(&self, params: &'a GenerationParams) -> &'a [u32] {
        if self.generated < params.min_tokens { &params.stop_tokens } else { &[] }
    }

    /// Whether an answer ends with a stop token now. One that follows a form draws a stop token before
    /// `min_tokens` only where the form allows nothing else.
    pub fn may_end(&self, params: &GenerationParams) -> bool {
        self.generated > params.min_tokens || self.guide.is_some()
    }

    /// What has to be computed to choose the next token.
    fn wants(&self, params: &GenerationParams) -> Logits {
        match (self.sampler.pick(), &self.guide) {
            _ if params.embedding => Logits::Hidden,
            _ if params.logprobs.is_some() || !self.banned(params).is_empty() => Logits::Last,
            (Some(what), None) => Logits::Pick(what),
            (Some(what), Some(guide)) => Logits::PickAmong(what, guide.mask()),
            (None, _) => Logits::Last,
        }
    }

    /// Chooses the next token and, if asked for, tells its log-probabilities.
    ///
    /// # Errors
    /// If the form that the request demands cannot be followed any further.
    pub fn choose(
        &mut self,
        params: &GenerationParams,
        scores: Scores<'_>,
        vocab: usize,
    ) -> Result<(u32, Option<TokenLogprobs>), String> {
        let chosen = match scores {
            Scores::Candidates(list) => {
                let token = match &mut self.guide {
                    None => self.sampler.sample_among(list),
                    Some(guide) => {
                        guide.allowed()?;
                        let token = self.sampler.sample_among(list);
                        guide.accept(token)?;
                        token
                    }
                };
                (token, None)
            }
            Scores::Hidden(_) => return Err("a hidden state was computed in place of logits".to_owned()),
            Scores::Logits(rows) => {
                let logits = &rows[rows.len() - vocab..];
                let banned = self.banned(params);
                let token = match &mut self.guide {
                    None => self.sampler.sample_except(logits, banned),
                    Some(guide) => {
                        let token = self.sampler.sample_within(logits, guide.allowed()?, banned);
                        guide.accept(token)?;
                        token
                    }
                };
                (token, params.logprobs.map(|top| token_logprobs(logits, token, top)))
            }
        };
        self.generated += 1;
        Ok(chosen)
    }

    /// Tokens stored in the cache.
    pub fn stored(&self) -> usize {
        self.sequence.as_ref().map_or(0, Sequence::len)
    }
}

/// What a step works on.
pub struct StepParts<'a> {
    pub work: Vec<Work>,
    pub requests: Vec<StepRequest<'a>>,
    pub guides: Vec<&'a mut Guide>,
}

/// All requests being served.
#[derive(Default)]
pub struct LiveRequests(BTreeMap<RequestId, Live>);

impl LiveRequests {
    pub fn contains(&self, id: RequestId) -> bool {
        self.0.contains_key(&id)
    }

    pub fn insert(&mut self, id: RequestId, live: Live) {
        self.0.insert(id, live);
    }

    pub fn get(&self, id: RequestId) -> Option<&Live> {
        self.0.get(&id)
    }

    pub fn get_mut(&mut self, id: RequestId) -> Option<&mut Live> {
        self.0.get_mut(&id)
    }

    /// The cap on the rows of a request.
    pub fn cap(&self, id: RequestId) -> Option<&RowCap> {
        self.0.get(&id)?.cap.as_ref()
    }

    pub fn choice(&self, id: SequenceId) -> Option<&Choice> {
        self.0.get(&id.request)?.choices.get(&id.choice)
    }

    pub fn choice_mut(&mut self, id: SequenceId) -> Option<&mut Choice> {
        self.0.get_mut(&id.request)?.choices.get_mut(&id.choice)
    }

    /// Whether a request has not ended.
    pub fn is_open(&self, id: RequestId) -> bool {
        self.0.get(&id).is_some_and(|live| live.stage != Stage::Ended)
    }

    /// Requests that have not ended.
    pub fn open(&self) -> impl Iterator<Item = (RequestId, &Live)> {
        self.0.iter().map(|(&id, live)| (id, live)).filter(|(_, live)| live.stage != Stage::Ended)
    }

    /// The ids of the requests for which `is_wanted` holds. A copy, so that callers can change the map
    /// while they iterate.
    pub fn ids(&self, is_wanted: impl Fn(&Live) -> bool) -> Vec<RequestId> {
        self.open().filter(|(_, live)| is_wanted(live)).map(|(id, _)| id).collect()
    }

    /// The sequences of a planned step, in the order of the plan, and the guides of those that
    /// choose a token after it.
    pub fn step_requests(&mut self, plan: &StepPlan) -> StepParts<'_> {
        let mut guides = Vec::new();
        let mut parts: Vec<(usize, StepRequest<'_>)> = Vec::with_capacity(plan.work.len());
        for (&request, live) in &mut self.0 {
            let wants_all = live.prompt_logprobs.is_some();
            for (&index, choice) in &mut live.choices {
                let id = SequenceId { request, choice: index };
                let last = choice.wants(&live.params);
                let Choice { sequence: Some(sequence), tokens, guide, .. } = choice else { continue };
                let Some(place) = plan.work.iter().position(|work| work.id == id) else { continue };
                let work = plan.work[place];
                let logits = match (wants_all, work.last) {
                    (true, _) => Logits::All,
                    (false, true) => last,
                    (false, false) => Logits::None,
                };
                if work.last {
                    guides.extend(guide);
                }
                let tokens = &tokens[work.start..work.start + work.tokens];
                parts.push((place, StepRequest { sequence, tokens, logits }));
            }
        }
        parts.sort_unstable_by_key(|part| part.0);
        let (work, requests) = parts.into_iter().map(|(place, request)| (plan.work[place], request)).unzip();
        StepParts { work, requests, guides }
    }

    /// Delivers all events, forgets requests that have ended and returns those nobody listens to.
    pub fn deliver(&mut self) -> Vec<RequestId> {
        let gone = self.0.iter_mut().filter_map(|(&id, live)| (!live.deliver()).then_some(id)).collect();
        self.0.retain(|_, live| live.stage != Stage::Ended);
        gone
    }

    pub fn remove(&mut self, id: RequestId) {
        self.0.remove(&id);
    }
}
