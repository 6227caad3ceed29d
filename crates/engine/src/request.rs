//! Requests, events and facts that front ends and the engine exchange: data only, no HTTP.

use crate::constraint::SharedConstraint;
use crate::kv_request::{KvRequest, KvUsage};
use crate::row_cap::RowCap;
use crate::sampling::{Sampler, SamplingParams};
use oscar_cache::CacheSalt;
use oscar_store::{PeerTicket, StoreStats, Ticket, TransferStats};
use oscar_views::Route;
use serde::Serialize;
use std::ops::AddAssign;

/// Names a request from submission to its last event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct RequestId(pub u64);

/// Most choices of a request.
const MAX_CHOICES: usize = 128;

/// One prompt to be continued, `choices` times. It is valid for the engine it was made for: there
/// is no other way to make one than [`Request::new`].
#[derive(Clone, Debug)]
pub struct Request {
    pub(crate) id: RequestId,
    pub(crate) prompt: Vec<u32>,
    pub(crate) params: GenerationParams,
    pub(crate) sampler: Sampler,
}

impl Request {
    /// # Errors
    /// Names the parameter that is wrong, or says that the context is exceeded.
    pub fn new(
        engine: &EngineInfo,
        id: RequestId,
        prompt: Vec<u32>,
        params: GenerationParams,
    ) -> Result<Self, RequestError> {
        let invalid = |parameter, problem: String| Err(RequestError::Invalid { parameter, problem });
        let vocab = engine.vocab_size;
        if prompt.is_empty() {
            return invalid("prompt", "is empty: at least one token is needed".into());
        }
        let biased = params.sampling.logit_bias.iter().map(|(token, _)| ("logit_bias", token));
        let mut tokens = prompt.iter().map(|token| ("prompt", token)).chain(biased);
        if let Some((parameter, token)) = tokens.find(|(_, token)| **token as usize >= vocab) {
            return invalid(parameter, format!("token id {token} is not below the vocabulary's {vocab}"));
        }
        let sampler = Sampler::new(params.sampling.clone()).map_err(|error| RequestError::Invalid {
            parameter: error.parameter,
            problem: format!("{} is not allowed: it must be {}", error.value, error.allowed),
        })?;
        if params.choices == 0 || params.choices > MAX_CHOICES {
            return invalid("n", format!("{} is not allowed: it must be 1 to {MAX_CHOICES}", params.choices));
        }
        if params.min_tokens > params.max_tokens {
            let (min, max) = (params.min_tokens, params.max_tokens);
            return invalid("min_tokens", format!("{min} is more than max_tokens, which is {max}"));
        }
        if engine.row_cap.is_some() && params.prompt_logprobs.is_some() {
            return Err(RowCap::refusal("prompt_logprobs"));
        }
        if params.embedding && (params.max_tokens > 0 || params.prompt_logprobs.is_some()) {
            return invalid("embedding", "comes alone, without tokens or log-probabilities".into());
        }
        for (parameter, wanted) in
            [("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)]
        {
            if let Some(top) = wanted.filter(|&top| top > vocab) {
                return invalid(parameter, format!("{top} is more than the vocabulary, which has {vocab}"));
            }
        }
        let (tokens, max_tokens, context) = (prompt.len(), params.max_tokens, engine.context);
        if tokens.saturating_add(max_tokens) > context {
            return Err(RequestError::ContextExceeded { prompt: tokens, max_tokens, context });
        }
        let sampler = sampler.for_prompt(&prompt);
        Ok(Self { id, prompt, params, sampler })
    }

    pub fn id(&self) -> RequestId {
        self.id
    }

    pub fn prompt(&self) -> &[u32] {
        &self.prompt
    }

    pub fn params(&self) -> &GenerationParams {
        &self.params
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct GenerationParams {
    pub sampling: SamplingParams,
    /// Most tokens of each choice; may be 0 when only the prompt's log-probabilities are wanted.
    pub max_tokens: usize,
    /// Stop tokens are ignored before this many tokens.
    pub min_tokens: usize,
    /// Any of these ends a choice (the model's own, unless the client ignores them, and the
    /// client's).
    pub stop_tokens: Vec<u32>,
    /// Independent continuations; choice `i` draws with seed `seed + i`.
    pub choices: usize,
    /// Log-probabilities of that many alternatives with each generated token.
    pub logprobs: Option<usize>,
    /// The same for the prompt's tokens.
    pub prompt_logprobs: Option<usize>,
    /// The hidden state of the prompt's last token is wanted; `max_tokens` must be 0.
    pub embedding: bool,
    /// Whether pages of the prompt go to another machine or come from one.
    pub transfer: PageTransfer,
    /// The part of the prefix cache that the request reads and fills.
    pub cache_salt: Option<CacheSalt>,
    /// The form that each choice must have. An answer that is complete ends with a stop token.
    pub constraint: Option<SharedConstraint>,
    /// Rows of the cache that the conversation keeps.
    pub kv: KvRequest,
}

impl Default for GenerationParams {
    fn default() -> Self {
        Self {
            sampling: SamplingParams::default(),
            max_tokens: 16,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            choices: 1,
            logprobs: None,
            prompt_logprobs: None,
            embedding: false,
            transfer: PageTransfer::None,
            cache_salt: None,
            constraint: None,
            kv: KvRequest::default(),
        }
    }
}

/// Pages of a prompt between two machines: one computes it, the other continues it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PageTransfer {
    #[default]
    None,
    /// Keep copies of the prompt's pages; [`Event::Kept`] tells the ticket. Nothing happens if the
    /// engine has no desk.
    Keep,
    /// Fetch the pages of this ticket. Whatever goes wrong, the prompt is computed here.
    Fetch(PeerTicket),
}

/// Where a request's events go. Called on the engine thread: must not block.
pub trait EventSink: Send {
    /// Delivers an event; `false` if nobody listens any more.
    fn send(&self, event: Event) -> bool;
}

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The prompt is stored; generation begins. Sent once, before any token.
    Started {
        cached_tokens: usize,
        /// See [`Usage::approximate`].
        approximate: bool,
        /// See [`Usage::by_tier`].
        by_tier: CachedByTier,
        prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    },
    /// The hidden state of the prompt's last token after the final norm. Sent once, after `Started`,
    /// if it was asked for.
    Embedding(Vec<f32>),
    /// The prompt's pages are kept for another machine, or there was no room for them. Sent once,
    /// after `Started`, if it was asked for.
    Kept(Option<Ticket>),
    /// The next token of a choice. A stop token is not delivered.
    Token { choice: usize, token: u32, logprobs: Option<TokenLogprobs> },
    /// A choice has ended.
    Finished { choice: usize, reason: FinishReason },
    /// The request has ended; nothing follows.
    Done(Usage),
    /// The request failed; nothing follows.
    Failed(RequestError),
}

/// The chosen token's log-probability (of the model's distribution before temperature and filters)
/// and the most likely alternatives, descending.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    pub token: u32,
    pub logprob: f32,
    pub top: Vec<(u32, f32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// This stop token.
    Stop(u32),
    /// `max_tokens` or the end of the context.
    Length,
    /// Cancelled by the client.
    Cancelled,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    pub prompt_tokens: usize,
    /// Prompt tokens whose pages were already in the cache.
    pub cached_tokens: usize,
    /// Generated tokens of all choices, stop tokens counted.
    pub completion_tokens: usize,
    /// The prefix hit was approximate: after it, quantized rows were read where a cold run reads
    /// BF16. That may have changed the answer.
    pub approximate: bool,
    /// The cached tokens that a page store brought back.
    pub by_tier: CachedByTier,
    /// What the rows of the conversation came to, if they are capped.
    pub kv: Option<KvUsage>,
}

/// Cached tokens by where they were, besides those that the prefix tree held itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedByTier {
    pub ram: usize,
    pub disk: usize,
    /// In a server that machines share.
    pub shared: usize,
    /// On another machine.
    pub peer: usize,
}

impl AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.completion_tokens += other.completion_tokens;
        self.approximate |= other.approximate;
        self.by_tier.ram += other.by_tier.ram;
        self.by_tier.disk += other.by_tier.disk;
        self.by_tier.shared += other.by_tier.shared;
        self.by_tier.peer += other.by_tier.peer;
        self.kv = other.kv.or(self.kv);
    }
}

/// Why a request could not be taken or finished. Messages are for the client.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RequestError {
    #[error("the queue is full: {waiting} requests are waiting; try again later")]
    QueueFull { waiting: usize },
    #[error(
        "the prompt has {prompt} tokens and {max_tokens} more were asked for, but the context is {context} tokens: shorten the prompt or lower max_tokens"
    )]
    ContextExceeded { prompt: usize, max_tokens: usize, context: usize },
    #[error(
        "the request needs {needed} bytes of KV cache and the whole cache has {budget}: shorten the prompt, lower n, or give the server more --kv-memory"
    )]
    TooLarge { needed: usize, budget: usize },
    #[error("{parameter}: {problem}")]
    Invalid { parameter: &'static str, problem: String },
    /// The form that `parameter` asked for cannot be followed any further.
    #[error("{parameter}: {problem}")]
    Form { parameter: String, problem: String },
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the engine failed: {0}")]
    Engine(String),
}

/// What a front end needs of an engine. `oscar-server` talks to this alone, so it can be tested
/// with a fake.
pub trait EngineApi: Send + Sync {
    /// Takes a request or says at once why not; everything later arrives as events. When the sink
    /// says that nobody listens any more, the request is cancelled. The engine's log lines about
    /// the request are in the current span.
    fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<(), RequestError>;
    /// Ends a request; its pages are free within a step. Unknown ids are ignored.
    fn cancel(&self, id: RequestId);
    /// Forgets every cached prefix that no running request uses; returns how many pages became
    /// free.
    fn flush_cache(&self) -> usize;
    /// A snapshot for metrics and the web page.
    fn stats(&self) -> EngineStats;
    /// Refuses new requests; running ones go on.
    fn drain(&self);
    fn info(&self) -> &EngineInfo;
    /// Whether the engine can still answer. Never waits for the engine.
    fn health(&self) -> Health;
}

/// Whether an engine works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// It waits for requests, or its step has not run for long.
    Alive,
    /// One step has been running for longer than any should take.
    Stuck { seconds: u64 },
    /// Its thread has ended, and not because it was told to.
    Dead { reason: String },
}

/// Fixed facts of a running engine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EngineInfo {
    pub model: String,
    pub kv_format: String,
    /// Stored bits an element of quantized pages, metadata included.
    pub kv_bits: f64,
    pub device: String,
    pub attention: String,
    pub context: usize,
    pub vocab_size: usize,
    pub layers: usize,
    /// Ranks that share the model; 1 without tensor parallelism.
    pub ranks: usize,
    /// Length of a hidden state.
    pub hidden_size: usize,
    pub kv_budget_bytes: usize,
    pub full_block_bytes: usize,
    pub coded_block_bytes: usize,
    /// Bytes of a block of the sliding layers; 0 without any.
    pub sliding_block_bytes: usize,
    /// Positions that a query of a sliding layer sees; absent without such layers.
    pub sliding_window: Option<usize>,
    /// Bytes of the recurrent state of a sequence; 0 in models without one. With states a prefix hit
    /// begins only where a state was kept: at the end of a prompt or an answer.
    pub state_bytes: usize,
    pub page_tokens: usize,
    pub sink: usize,
    pub recent: usize,
    /// Whether idle prefixes may lose their BF16 tail, so that a later hit on them is approximate.
    pub approximate_hits: bool,
    /// The policy that caps the rows of each conversation, if one does.
    pub row_cap: Option<String>,
    /// Whether it chooses rows of a history that stays whole.
    pub keeps_base: bool,
}

impl EngineInfo {
    /// Pages that would fit if all were quantized. BF16 windows make it less, so routers take it as
    /// an upper bound.
    pub fn most_pages(&self) -> usize {
        self.kv_budget_bytes / self.coded_block_bytes.max(1)
    }
}

/// Counters only grow; gauges are of this moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EngineStats {
    pub running: usize,
    pub waiting: usize,
    pub steps: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    /// Those of them that a page store brought back from host memory and from its directory.
    pub cached_ram_tokens: u64,
    pub cached_disk_tokens: u64,
    /// Those of them that came from a shared server, and from other machines.
    pub cached_shared_tokens: u64,
    pub cached_peer_tokens: u64,
    pub generated_tokens: u64,
    pub finished: u64,
    pub cancelled: u64,
    pub failed: u64,
    pub preemptions: u64,
    /// Tokens quantized so far.
    pub demoted_tokens: u64,
    /// Prefix hits that were approximate: the documented exception to "same answer".
    pub approximate_hits: u64,
    pub evicted_pages: u64,
    /// Histories that were compacted because of a cap on their rows.
    pub compactions: u64,
    /// Rows of single layers and heads that compactions left out, and those that they kept.
    pub evicted_rows: u64,
    pub kept_rows: u64,
    /// Those of the kept ones that the budget did not choose: protected messages.
    pub protected_rows: u64,
    /// Turns by the view that they read.
    pub routes: RouteCounts,
    /// Tokens computed in the background: to score histories, and of finished turns on their base.
    pub probe_tokens: u64,
    pub replayed_tokens: u64,
    /// Views of whole histories that were made.
    pub views: u64,
    /// Background jobs that were given up: for want of room, or because a step failed.
    pub view_jobs_failed: u64,
    /// Conversations that wait for work in the background.
    pub view_jobs: usize,
    pub full_pages: usize,
    pub coded_pages: usize,
    /// Pages held only by the prefix cache.
    pub cached_full_pages: usize,
    pub cached_coded_pages: usize,
    /// Pages of sliding layers, and those of them held only by the prefix cache.
    pub sliding_pages: usize,
    pub cached_sliding_pages: usize,
    /// Recurrent states, and those of them held only by the prefix cache.
    pub states: usize,
    pub cached_states: usize,
    pub cache_bytes: usize,
    /// Bytes that the tokens held now would take in BF16.
    pub bf16_bytes: usize,
    /// Seconds the engine spent inside steps.
    pub busy_seconds: f64,
    /// The numbers of the page store, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store: Option<StoreStats>,
    /// The numbers of transfers to and from other machines, where there may be any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept_for_peers: Option<TransferStats>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fetched_from_peers: Option<TransferStats>,
    #[serde(skip)]
    pub requests: Vec<RunningRequest>,
}

/// Turns in post mode by the view that they read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RouteCounts {
    pub episode: u64,
    /// Two episodes together.
    pub union: u64,
    pub global: u64,
    /// The whole history: no views were ready, or there was no room for one.
    pub full: u64,
}

impl RouteCounts {
    pub(crate) fn add(&mut self, route: Option<Route>) {
        *match route {
            Some(Route::Episode(_)) => &mut self.episode,
            Some(Route::Union(..)) => &mut self.union,
            Some(Route::Global) => &mut self.global,
            None => &mut self.full,
        } += 1;
    }
}

/// One running request as the web page draws it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunningRequest {
    pub id: RequestId,
    pub prompt_tokens: usize,
    pub generated_tokens: usize,
    pub cached_tokens: usize,
    pub sink_tokens: usize,
    /// Rows of quantized history that a layer and head holds, on average.
    pub coded_tokens: usize,
    /// Rows of history that were evicted.
    pub evicted_tokens: usize,
    pub recent_tokens: usize,
    pub bytes: usize,
    /// The views that its turn could read, the global one last.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub views: Vec<RunningView>,
}

/// A view of a running request's history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RunningView {
    /// Rows that a layer and head keeps, on average.
    pub rows: usize,
    /// Whether the turn reads it, alone or together with another.
    pub read: bool,
}
