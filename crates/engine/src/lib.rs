//! Turns "these tokens, these settings" into tokens.
//!
//! [`Sampler`] chooses a token from logits. [`Engine`] serves [`Request`]s from many clients on one
//! thread: a pure [`Scheduler`](scheduler::Scheduler) plans each step, the worker runs it on an
//! [`oscar_runner::Runner`], the prefix cache keeps the computed pages.
//!
//! The path of a request: [`Request::new`] validates it, [`EngineApi::submit`] sends it to the
//! engine thread (`worker`), where it is `Live` (`live`) until its last event is delivered. In
//! between the scheduler gives it `Work` and the runner computes it as a
//! [`StepRequest`](oscar_runner::StepRequest)
//! (`serving`).
//!
//! **Invariant:** knows no HTTP and no JSON. What a sequence answers depends on that sequence
//! alone: not on the chunks its prompt came in, not on who else is in the step.

mod constraint;
mod copies;
pub mod cost;
mod engine;
mod heartbeat;
mod kv_request;
mod ledger;
mod live;
mod logprobs;
mod post;
mod request;
mod row_cap;
mod sampling;
pub mod scheduler;
mod serving;
mod statistics;
mod store;
mod worker;

pub use constraint::{Constraint, ConstraintState, SharedConstraint};
pub use engine::{CacheEventSink, Engine, EngineHandle, EngineOptions};
pub use oscar_cache::{CacheEvent, CacheSalt, PageHash};
pub use oscar_store::{PeerRules, PeerTicket, Ticket, TicketId, TransferStats};

pub use kv_request::{Cap, KvRequest, KvRoute, KvUsage};
pub use oscar_views::{Budget, EpisodeOptions, Evict, Eviction, InputEmbeddings, Probe, Route};
pub use post::{PostCap, PostSetting, Turn};
pub use request::{
    CachedByTier, EngineApi, EngineInfo, EngineStats, Event, EventSink, FinishReason, GenerationParams,
    Health, PageTransfer, Request, RequestError, RequestId, RouteCounts, RunningRequest, RunningView,
    TokenLogprobs, Usage,
};
pub use row_cap::{DEFAULT_EVICT, EVICT_BLOCK, RowCap, default_split};
pub use sampling::{Allowed, Sampler, SamplingError, SamplingParams};
pub use scheduler::SchedulerOptions;
