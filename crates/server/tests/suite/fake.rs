//! An engine without a model: it recites a script, so every answer is known beforehand.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oscar_engine::{
    CacheSalt, EngineApi, EngineInfo, EngineStats, Event, EventSink, FinishReason, Health, Request,
    RequestError, RequestId, RunningRequest, TokenLogprobs, Usage,
};
use oscar_text::{ModelText, Tokenizer};

pub const END_OF_TURN: u32 = 2;
const PAGE: usize = 16;

/// How the engine behaves; choice `i` recites script `i`, starting over when there are more choices.
pub struct Script {
    pub replies: Vec<String>,
    /// Time between tokens; none answers inside of `submit`.
    pub pace: Option<Duration>,
    pub context: usize,
    /// Fails after that many tokens.
    pub fail_after: Option<usize>,
    pub model: String,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            replies: vec!["Hello, world! How are you?".into()],
            pace: None,
            context: 512,
            fail_after: None,
            model: "fake-15m".into(),
        }
    }
}

#[derive(Clone)]
pub struct FakeEngine {
    inner: Arc<Inner>,
}

struct Inner {
    info: EngineInfo,
    script: Script,
    replies: Vec<Vec<u32>>,
    full: AtomicBool,
    draining: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    cancelled: Vec<RequestId>,
    seen: HashSet<(Option<CacheSalt>, Vec<u32>)>,
    running: HashMap<RequestId, RunningRequest>,
    stats: EngineStats,
    last_params: Option<oscar_engine::GenerationParams>,
    last_prompt: Vec<u32>,
    health: Option<Health>,
}

/// A file of the embedded model.
pub fn text_file(name: &str) -> &'static [u8] {
    oscar_embedded::FILES.iter().find(|(known, _)| *known == name).map(|(_, bytes)| *bytes).unwrap()
}

/// The tokenizer and template of the embedded model.
pub fn text() -> ModelText {
    let config = text_file("tokenizer_config.json");
    ModelText::from_files(text_file("tokenizer.json"), Some(config), None).unwrap()
}

impl FakeEngine {
    pub fn new(script: Script, tokenizer: &Tokenizer) -> Self {
        let replies = script.replies.iter().map(|reply| tokenizer.encode(reply, false).unwrap()).collect();
        let info = EngineInfo {
            model: script.model.clone(),
            kv_format: "oscar2".into(),
            kv_bits: 2.250_4,
            device: "cpu".into(),
            attention: "fake".into(),
            context: script.context,
            vocab_size: tokenizer.vocab_size(),
            layers: 6,
            ranks: 1,
            hidden_size: 4,
            kv_budget_bytes: 64 << 20,
            full_block_bytes: 6 * 2 * 32768,
            coded_block_bytes: 6 * 2 * 4608,
            sliding_block_bytes: 0,
            state_bytes: 0,
            sliding_window: None,
            page_tokens: 64,
            sink: 64,
            recent: 256,
            approximate_hits: true,
            row_cap: None,
            keeps_base: false,
        };
        let inner = Inner {
            info,
            script,
            replies,
            full: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            state: Mutex::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    pub fn set_full(&self, full: bool) {
        self.inner.full.store(full, Ordering::SeqCst);
    }

    pub fn cancelled(&self) -> Vec<RequestId> {
        self.inner.state.lock().unwrap().cancelled.clone()
    }

    pub fn set_health(&self, health: Health) {
        self.inner.state.lock().unwrap().health = Some(health);
    }

    pub fn is_idle(&self) -> bool {
        self.inner.state.lock().unwrap().running.is_empty()
    }

    pub fn last_params(&self) -> oscar_engine::GenerationParams {
        self.inner.state.lock().unwrap().last_params.clone().unwrap()
    }

    pub fn last_prompt(&self) -> Vec<u32> {
        self.inner.state.lock().unwrap().last_prompt.clone()
    }
}

impl EngineApi for FakeEngine {
    fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<(), RequestError> {
        if self.inner.draining.load(Ordering::SeqCst) {
            return Err(RequestError::ShuttingDown);
        }
        if self.inner.full.load(Ordering::SeqCst) {
            return Err(RequestError::QueueFull { waiting: 7 });
        }
        let mut state = self.inner.state.lock().unwrap();
        state.last_params = Some(request.params().clone());
        state.last_prompt = request.prompt().to_vec();
        let known = !state.seen.insert((request.params().cache_salt, request.prompt().to_vec()));
        let cached = if known { (request.prompt().len() - 1) / PAGE * PAGE } else { 0 };
        state.stats.prompt_tokens += request.prompt().len() as u64;
        state.stats.cached_tokens += cached as u64;
        let mut running = RunningRequest {
            id: request.id(),
            prompt_tokens: request.prompt().len(),
            generated_tokens: 0,
            cached_tokens: cached,
            sink_tokens: 0,
            coded_tokens: 0,
            evicted_tokens: 0,
            recent_tokens: 0,
            bytes: 0,
            views: Vec::new(),
        };
        self.inner.lay_out(&mut running);
        state.running.insert(request.id(), running);
        drop(state);
        let inner = self.inner.clone();
        match inner.script.pace {
            None => inner.recite(&request, &*sink, cached),
            Some(_) => {
                std::thread::spawn(move || inner.recite(&request, &*sink, cached));
            }
        }
        Ok(())
    }

    fn cancel(&self, id: RequestId) {
        self.inner.state.lock().unwrap().cancelled.push(id);
    }

    fn flush_cache(&self) -> usize {
        self.inner.state.lock().unwrap().seen.drain().count()
    }

    fn stats(&self) -> EngineStats {
        let state = self.inner.state.lock().unwrap();
        let mut requests: Vec<RunningRequest> = state.running.values().cloned().collect();
        requests.sort_by_key(|request| request.id);
        let tokens = |of: fn(&RunningRequest) -> usize| requests.iter().map(of).sum::<usize>();
        let coded = tokens(|request| request.coded_tokens);
        let full = tokens(|request| request.sink_tokens + request.recent_tokens);
        let info = &self.inner.info;
        EngineStats {
            running: requests.len(),
            coded_pages: coded.div_ceil(64) + 20,
            full_pages: full.div_ceil(64) + 2,
            cached_coded_pages: 20,
            cached_full_pages: 2,
            cache_bytes: tokens(|r| r.bytes) + 20 * info.coded_block_bytes + 2 * info.full_block_bytes,
            bf16_bytes: (full + coded + 22 * 64) * info.full_block_bytes / 64,
            demoted_tokens: 1234,
            requests,
            ..state.stats.clone()
        }
    }

    fn drain(&self) {
        self.inner.draining.store(true, Ordering::SeqCst);
    }

    fn info(&self) -> &EngineInfo {
        &self.inner.info
    }

    fn health(&self) -> Health {
        self.inner.state.lock().unwrap().health.clone().unwrap_or(Health::Alive)
    }
}

impl Inner {
    fn is_cancelled(&self, id: RequestId) -> bool {
        self.state.lock().unwrap().cancelled.contains(&id)
    }

    fn lay_out(&self, request: &mut RunningRequest) {
        let total = request.prompt_tokens + request.generated_tokens;
        request.sink_tokens = total.min(self.info.sink);
        request.recent_tokens = (total - request.sink_tokens).min(self.info.recent);
        request.coded_tokens = total - request.sink_tokens - request.recent_tokens;
        request.bytes = (request.sink_tokens + request.recent_tokens) * self.info.full_block_bytes / 64
            + request.coded_tokens * self.info.coded_block_bytes / 64;
    }

    fn recite(&self, request: &Request, sink: &dyn EventSink, cached: usize) {
        let mut usage =
            Usage { prompt_tokens: request.prompt().len(), cached_tokens: cached, ..Usage::default() };
        self.play(request, sink, &mut usage);
        let mut state = self.state.lock().unwrap();
        state.running.remove(&request.id());
        state.stats.finished += 1;
    }

    fn play(&self, request: &Request, sink: &dyn EventSink, usage: &mut Usage) {
        let params = request.params();
        let logprobs = |token: u32, top: usize| TokenLogprobs {
            token,
            logprob: -0.5,
            top: (0..top as u32).map(|i| ((token + i) % 6144, -0.5 - i as f32)).collect(),
        };
        let prompt_logprobs = params.prompt_logprobs.map(|top| {
            let tokens = request.prompt().iter().enumerate();
            tokens.map(|(index, &token)| (index > 0).then(|| logprobs(token, top))).collect()
        });
        sink.send(Event::Started {
            cached_tokens: usage.cached_tokens,
            approximate: false,
            by_tier: Default::default(),
            prompt_logprobs,
        });
        if params.embedding {
            // Tells inputs apart by their length.
            sink.send(Event::Embedding(vec![0.0, 3.0, 0.0, request.prompt().len() as f32]));
        }
        let mut open: Vec<bool> = vec![true; params.choices];
        for position in 0.. {
            for choice in 0..params.choices {
                if !open[choice] {
                    continue;
                }
                let reply = &self.replies[choice % self.replies.len()];
                let ends = params.stop_tokens.contains(&END_OF_TURN);
                let end = if position >= params.max_tokens {
                    Some(FinishReason::Length)
                } else if position >= reply.len() && ends {
                    usage.completion_tokens += 1;
                    Some(FinishReason::Stop(END_OF_TURN))
                } else if self.is_cancelled(request.id()) {
                    Some(FinishReason::Cancelled)
                } else {
                    None
                };
                if let Some(reason) = end {
                    open[choice] = false;
                    sink.send(Event::Finished { choice, reason });
                    continue;
                }
                if self.script.fail_after == Some(position) {
                    sink.send(Event::Failed(RequestError::Engine("scripted".into())));
                    return;
                }
                let token = reply[position % reply.len()];
                usage.completion_tokens += 1;
                let logprobs = params.logprobs.map(|top| logprobs(token, top));
                if !sink.send(Event::Token { choice, token, logprobs }) {
                    return;
                }
            }
            let mut state = self.state.lock().unwrap();
            state.stats.generated_tokens += open.iter().filter(|open| **open).count() as u64;
            state.stats.busy_seconds += 0.001;
            if let Some(running) = state.running.get_mut(&request.id()) {
                running.generated_tokens += 1;
                self.lay_out(running);
            }
            drop(state);
            if !open.contains(&true) {
                break;
            }
            if let Some(pace) = self.script.pace {
                std::thread::sleep(pace);
            }
        }
        sink.send(Event::Done(*usage));
    }
}
