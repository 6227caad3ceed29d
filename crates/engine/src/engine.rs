//! The door of the engine: takes requests from any thread, refuses what cannot be served, hands the rest to the
//! one thread that owns the model.

use crate::request::{
    EngineApi, EngineInfo, EngineStats, GenerationParams, Request, RequestError, RequestId,
};
use crate::runner::Runner;
use crate::scheduler::SchedulerOptions;
use crate::worker::{Command, Worker};
use oscar_backend::Backend;
use oscar_codec::{CacheLayout, PAGE_TOKENS};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// How an engine is to serve.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The model's name, for clients.
    pub model: String,
    pub scheduler: SchedulerOptions,
    /// Most requests that may wait for their first step.
    pub max_queue: usize,
    /// Keep what was computed for later requests?
    pub prefix_cache: bool,
    /// Code the BF16 tails of idle prefixes when room is short, before anything is evicted? A hit on one reads code
    /// where a cold run reads BF16, and is counted. Where the device cannot read such a tail there are none. Off by
    /// default: what measures must be exact.
    pub demote_idle_tails: bool,
}

impl EngineOptions {
    pub fn new(model: impl Into<String>) -> Self {
        Self {
            model: model.into(),
            scheduler: SchedulerOptions::default(),
            max_queue: 256,
            prefix_cache: true,
            demote_idle_tails: false,
        }
    }
}

/// Most choices of a request.
const MAX_CHOICES: usize = 128;

/// Starts engines.
pub struct Engine;

/// What the handles and the engine's thread share.
pub(crate) struct Shared {
    pub info: EngineInfo,
    pub stats: Mutex<EngineStats>,
    /// Requests taken that have not been given their first place in a step.
    pub queued: AtomicUsize,
    closed: AtomicBool,
    max_queue: usize,
    layout: CacheLayout,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Shared {
    pub fn stats(&self) -> MutexGuard<'_, EngineStats> {
        lock(&self.stats)
    }

    /// From now on nothing is taken.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }
}

/// What the locks guard is valid after every statement, so a poisoned one is as good as new.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running engine. Clones talk to the same one; when the last is dropped, the engine ends.
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
    commands: Sender<Command>,
}

impl Engine {
    /// Puts a model to work on a thread of its own.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn start<B: Backend + 'static>(
        runner: Runner<B>,
        options: EngineOptions,
    ) -> std::io::Result<EngineHandle>
    where
        Runner<B>: Send,
    {
        let layout = runner.layout().clone();
        let info = info(&runner, &options);
        let shared = Arc::new(Shared {
            info,
            stats: Mutex::default(),
            queued: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            max_queue: options.max_queue,
            layout,
            thread: Mutex::new(None),
        });
        let (commands, inbox) = channel();
        let theirs = shared.clone();
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || Worker::new(runner, &options, theirs, inbox).run())?;
        *lock(&shared.thread) = Some(thread);
        Ok(EngineHandle { shared, commands })
    }
}

fn info<B: Backend>(runner: &Runner<B>, options: &EngineOptions) -> EngineInfo {
    let layout = runner.layout();
    EngineInfo {
        model: options.model.clone(),
        kv_format: layout.format().to_string(),
        kv_bits: layout.page_bits(),
        device: runner.backend().describe(),
        attention: runner.backend().describe_attention(layout),
        context: runner.context(),
        vocab_size: runner.config().vocab_size,
        layers: layout.layers(),
        kv_budget_bytes: runner.usage().budget,
        full_block_bytes: layout.full_block_bytes(),
        coded_block_bytes: layout.coded_block_bytes(),
        page_tokens: PAGE_TOKENS,
        sink: layout.windows().sink(),
        recent: layout.windows().recent(),
    }
}

impl EngineHandle {
    /// Ends the engine: running requests fail with [`RequestError::ShuttingDown`]. Returns when its thread has
    /// ended. To let them finish first, [`drain`](EngineApi::drain) and wait for `stats` to show none.
    pub fn shutdown(&self) {
        self.shared.close();
        let _ = self.commands.send(Command::Stop);
        let thread = lock(&self.shared.thread).take();
        if let Some(thread) = thread {
            // The worker catches its own panics; should one escape, there is nothing left to end.
            let _ = thread.join();
        }
    }

    fn check(&self, prompt: &[u32], params: &GenerationParams) -> Result<(), RequestError> {
        let info = &self.shared.info;
        let invalid = |parameter, problem: String| Err(RequestError::Invalid { parameter, problem });
        let vocab = info.vocab_size;
        if prompt.is_empty() {
            return invalid("prompt", "it is empty: give at least one token".into());
        }
        if let Some(token) = prompt.iter().find(|&&t| t as usize >= vocab) {
            return invalid("prompt", format!("token {token} does not exist: the vocabulary has {vocab}"));
        }
        if let Err(error) = params.sampling.validate() {
            return invalid(
                error.parameter,
                format!("{} is not allowed: it must be {}", error.value, error.allowed),
            );
        }
        if let Some((token, _)) = params.sampling.logit_bias.iter().find(|(t, _)| *t as usize >= vocab) {
            return invalid(
                "logit_bias",
                format!("token {token} does not exist: the vocabulary has {vocab}"),
            );
        }
        if params.choices == 0 || params.choices > MAX_CHOICES {
            return invalid("n", format!("{} is not allowed: it must be 1 to {MAX_CHOICES}", params.choices));
        }
        if params.min_tokens > params.max_tokens {
            let (min, max) = (params.min_tokens, params.max_tokens);
            return invalid("min_tokens", format!("{min} is more than max_tokens, which is {max}"));
        }
        for (parameter, wanted) in
            [("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)]
        {
            if let Some(top) = wanted.filter(|&top| top > vocab) {
                return invalid(parameter, format!("{top} is more than the vocabulary, which has {vocab}"));
            }
        }
        let (prompt, max_tokens) = (prompt.len(), params.max_tokens);
        if prompt.saturating_add(max_tokens) > info.context {
            return Err(RequestError::ContextExceeded { prompt, max_tokens, context: info.context });
        }
        // What storing the prompt takes at least, one token a step. An answer that outgrows the cache later, alone
        // in it, ends with `FinishReason::Length`.
        let layout = &self.shared.layout;
        let needed = layout.peak_bytes(prompt) + 2 * layout.full_block_bytes();
        if needed > info.kv_budget_bytes {
            return Err(RequestError::TooLarge { needed, budget: info.kv_budget_bytes });
        }
        Ok(())
    }
}

impl EngineApi for EngineHandle {
    fn submit(&self, request: Request) -> Result<(), RequestError> {
        if self.shared.closed.load(Ordering::SeqCst) {
            return Err(RequestError::ShuttingDown);
        }
        self.check(&request.prompt, &request.params)?;
        let (queued, limit) = (&self.shared.queued, self.shared.max_queue);
        queued
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| (n < limit).then_some(n + 1))
            .map_err(|waiting| RequestError::QueueFull { waiting })?;
        self.commands.send(Command::Submit(request)).map_err(|_| {
            queued.fetch_sub(1, Ordering::SeqCst);
            RequestError::ShuttingDown
        })
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
        self.shared.stats().clone()
    }

    fn drain(&self) {
        self.shared.close();
    }

    fn info(&self) -> &EngineInfo {
        &self.shared.info
    }
}
