//! The handle of an engine: takes requests from any thread, refuses those it has no room for, and
//! passes the rest to the one thread that owns the model.

use crate::heartbeat::Heartbeat;
use crate::kv_request::{Cap, CapRules};
use crate::live::Submission;
use crate::post::PostSetting;
use crate::request::{
    EngineApi, EngineInfo, EngineStats, EventSink, Health, Request, RequestError, RequestId,
};
use crate::row_cap::{self, RowCap};
use crate::scheduler::SchedulerOptions;
use crate::worker::{Command, Worker};
use oscar_backend::Backend;
use oscar_cache::{CacheEvent, RadixCache};
use oscar_codec::PAGE_TOKENS;
use oscar_runner::Runner;
use oscar_store::{Counters, Peers, Store, TransferDesk};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tracing::Span;

/// How an engine is to serve.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The model's name, for clients.
    pub model: String,
    pub scheduler: SchedulerOptions,
    /// Most requests that may wait for their first step.
    pub max_queue: usize,
    /// Keep the pages of finished requests for later ones.
    pub prefix_cache: bool,
    /// Give up the BF16 tails of idle prefixes when room is short, before whole prefixes, and continue
    /// from what is left, all of it quantized. Such hits are counted. [`EngineInfo::approximate_hits`]
    /// tells whether device and layout can do it. Off by default: measurements must be exact.
    pub approximate_hits: bool,
    /// A step that takes longer than this, and than ten times the longest step so far, counts as
    /// stuck. No step ever does if absent.
    pub stuck_after: Option<Duration>,
    /// Hears of every page that the prefix cache stores or gives up.
    pub cache_events: Option<Arc<dyn CacheEventSink>>,
    /// Keeps copies of pages beyond their eviction. Needs the prefix cache, and a device whose pages
    /// can be copied.
    pub store: Option<Store>,
    /// Keeps pages of prompts for other machines. Needs what a store needs.
    pub desk: Option<Arc<TransferDesk>>,
    /// Caps the quantized rows of each conversation.
    pub cap: Option<Cap>,
    /// What views of whole histories need. Requests that ask for them are refused without it.
    pub post: Option<PostSetting>,
}

/// Takes the changes of the prefix cache, on the engine thread after each step.
pub trait CacheEventSink: Send + Sync + std::fmt::Debug {
    /// Must not wait: the engine does. Never called with an empty list.
    fn send(&self, events: Vec<CacheEvent>);
}

impl EngineOptions {
    pub fn new(model: impl Into<String>) -> Self {
        Self {
            model: model.into(),
            scheduler: SchedulerOptions::default(),
            max_queue: 256,
            prefix_cache: true,
            approximate_hits: false,
            stuck_after: None,
            cache_events: None,
            store: None,
            desk: None,
            cap: None,
            post: None,
        }
    }

    /// Whether an engine with these options has approximate hits: the device must read codes inside the
    /// recent window, and the layout must allow a resume without a tail.
    pub(crate) fn approximates<B: Backend>(&self, runner: &Runner<B>) -> bool {
        self.prefix_cache
            && self.approximate_hits
            && RadixCache::allows_approximate_hits(runner.layout())
            && runner.backend().reads_codes_in_window(runner.layout())
    }
}

/// Starts engines.
pub struct Engine;

/// What the handles and the engine's thread share.
pub struct EngineState {
    info: EngineInfo,
    stats: Mutex<EngineStats>,
    /// Requests taken that have not had a place in a step.
    queued: AtomicUsize,
    closed: AtomicBool,
    heartbeat: Heartbeat,
    /// Why the engine's thread ended, if nobody asked it to.
    failure: Mutex<Option<String>>,
    max_queue: usize,
    caps: CapRules,
    /// Pages are written and carried between machines while there is no step, so these numbers are not
    /// the thread's.
    store: Option<Arc<Counters>>,
    desk: Option<Arc<TransferDesk>>,
    peers: Option<Arc<Peers>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl EngineState {
    pub fn stats(&self) -> MutexGuard<'_, EngineStats> {
        lock(&self.stats)
    }

    /// Refuses all requests from now on.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Closes the engine for good and keeps the reason.
    pub fn fail(&self, reason: String) {
        *lock(&self.failure) = Some(reason);
        self.close();
    }

    pub fn heartbeat(&self) -> &Heartbeat {
        &self.heartbeat
    }

    fn health(&self) -> Health {
        if let Some(reason) = lock(&self.failure).clone() {
            return Health::Dead { reason };
        }
        // The thread ended without a report. `shutdown` takes the handle before it ends the thread.
        if lock(&self.thread).as_ref().is_some_and(JoinHandle::is_finished) {
            return Health::Dead { reason: "its thread has ended".into() };
        }
        self.heartbeat.stuck_for().map_or(Health::Alive, |time| Health::Stuck { seconds: time.as_secs() })
    }
}

/// One of the `max_queue` places in the queue. It is free again when this is dropped.
pub struct QueuePlace(Arc<EngineState>);

impl QueuePlace {
    fn take(state: &Arc<EngineState>) -> Result<Self, RequestError> {
        let free = |n| (n < state.max_queue).then_some(n + 1);
        match state.queued.fetch_update(Ordering::SeqCst, Ordering::SeqCst, free) {
            Ok(_) => Ok(Self(state.clone())),
            Err(waiting) => Err(RequestError::QueueFull { waiting }),
        }
    }
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        self.0.queued.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Ignores poisoning: the guarded data is valid after every statement.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running engine. Clones talk to the same one; when the last is dropped, the engine ends.
#[derive(Clone)]
pub struct EngineHandle {
    state: Arc<EngineState>,
    commands: Sender<Command>,
}

impl Engine {
    /// Puts a model to work on a thread of its own.
    ///
    /// # Errors
    /// If the system gives no thread, or a page store cannot be used here.
    pub fn start<B: Backend + 'static>(
        runner: Runner<B>,
        options: EngineOptions,
    ) -> std::io::Result<EngineHandle>
    where
        Runner<B>: Send,
    {
        let copies = options.store.is_some() || options.desk.is_some();
        if copies && !(options.prefix_cache && runner.backend().copies_blocks()) {
            let why = "a page store needs the prefix cache and a device whose pages can be copied";
            return Err(std::io::Error::new(std::io::ErrorKind::Unsupported, why));
        }
        let layout = runner.layout().clone();
        let evictable = row_cap::allowed(&runner);
        let post = match &options.post {
            Some(_) if !options.prefix_cache => {
                Err("views of a whole history need the prefix cache: leave --no-prefix-cache out".to_owned())
            }
            Some(post) => Ok(post.episodes),
            None => Err("views of a whole history need a model with a chat template".to_owned()),
        };
        if let (Some(Cap::Post(_)), Err(why)) = (&options.cap, &post) {
            return Err(std::io::Error::new(std::io::ErrorKind::Unsupported, why.clone()));
        }
        let info = info(&runner, &options);
        let state = Arc::new(EngineState {
            info,
            stats: Mutex::default(),
            queued: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            heartbeat: Heartbeat::new(options.stuck_after),
            failure: Mutex::default(),
            max_queue: options.max_queue,
            caps: CapRules { layout, evictable, post, server: options.cap.clone() },
            store: options.store.as_ref().filter(|store| store.keeps_pages()).map(|s| s.counters().clone()),
            desk: options.desk.clone(),
            peers: options.store.as_ref().and_then(Store::peers).cloned(),
            thread: Mutex::new(None),
        });
        let (commands, inbox) = channel();
        let theirs = state.clone();
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || Worker::new(runner, &options, theirs, inbox).run())?;
        *lock(&state.thread) = Some(thread);
        Ok(EngineHandle { state, commands })
    }
}

fn info<B: Backend>(runner: &Runner<B>, options: &EngineOptions) -> EngineInfo {
    let layout = runner.layout();
    EngineInfo {
        model: options.model.clone(),
        kv_format: layout.format().to_string(),
        kv_bits: layout.page_bits(),
        device: runner.backend().describe(),
        attention: runner.backend().attention(layout).description,
        context: runner.context(),
        vocab_size: runner.config().vocab_size,
        layers: runner.config().layers,
        ranks: runner.backend().communicator().map_or(1, |ranks| ranks.ranks()),
        hidden_size: runner.config().hidden_size,
        kv_budget_bytes: runner.usage().budget,
        full_block_bytes: layout.full_block_bytes(),
        coded_block_bytes: layout.coded_block_bytes(),
        sliding_block_bytes: layout.sliding_block_bytes(),
        sliding_window: layout.sliding().map(|group| group.window()),
        state_bytes: layout.state_bytes(),
        page_tokens: PAGE_TOKENS,
        sink: layout.windows().sink(),
        recent: layout.windows().recent(),
        approximate_hits: options.approximates(runner),
        row_cap: options.cap.as_ref().map(Cap::to_string),
        keeps_base: matches!(options.cap, Some(Cap::Post(_))),
    }
}

impl EngineHandle {
    /// Ends the engine: running requests fail with [`RequestError::ShuttingDown`]. Returns when its
    /// thread has ended. To let them finish first, [`drain`](EngineApi::drain) and wait for `stats`
    /// to show none.
    pub fn shutdown(&self) {
        self.state.close();
        let thread = lock(&self.state.thread).take();
        let _ = self.commands.send(Command::Stop);
        if let Some(thread) = thread {
            // The worker catches its own panics; should one escape, there is nothing left to end.
            let _ = thread.join();
        }
    }
}

impl EngineApi for EngineHandle {
    fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<(), RequestError> {
        let state = &self.state;
        if state.closed.load(Ordering::SeqCst) {
            return Err(RequestError::ShuttingDown);
        }
        // The least that storing the prompt takes, one token a step. An answer that outgrows the
        // cache later, alone in it, ends with `FinishReason::Length`.
        let tokens = request.prompt().len();
        let (params, layout) = (request.params(), &state.caps.layout);
        let cap = state.caps.cap(&params.kv)?;
        if cap.is_some() && params.prompt_logprobs.is_some() {
            return Err(RowCap::refusal("prompt_logprobs"));
        }
        let needed = match &cap {
            Some(Cap::Block(cap)) => cap.most_bytes(layout, tokens) + layout.full_block_bytes(),
            Some(Cap::Post(_)) | None => layout.least_bytes(tokens),
        };
        let budget = state.info.kv_budget_bytes;
        if needed > budget {
            return Err(RequestError::TooLarge { needed, budget });
        }
        let place = QueuePlace::take(state)?;
        let submission = Box::new(Submission { request, sink, span: Span::current(), place, cap });
        self.commands.send(Command::Submit(submission)).map_err(|_| RequestError::ShuttingDown)
    }

    fn cancel(&self, id: RequestId) {
        // An engine that has ended has nothing to cancel.
        let _ = self.commands.send(Command::Cancel(id));
    }

    fn flush_cache(&self) -> usize {
        let (reply, answer) = channel();
        match self.commands.send(Command::Flush(reply)) {
            Ok(()) => answer.recv().unwrap_or(0),
            Err(_) => 0,
        }
    }

    fn stats(&self) -> EngineStats {
        EngineStats {
            store: self.state.store.as_ref().map(|store| store.snapshot()),
            kept_for_peers: self.state.desk.as_ref().map(|desk| desk.stats()),
            fetched_from_peers: self.state.peers.as_ref().map(|peers| peers.stats()),
            ..self.state.stats().clone()
        }
    }

    fn drain(&self) {
        self.state.close();
    }

    fn info(&self) -> &EngineInfo {
        &self.state.info
    }

    fn health(&self) -> Health {
        self.state.health()
    }
}
