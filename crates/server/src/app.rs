//! State shared by all handlers, and the map of routes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{from_fn, from_fn_with_state};
use oscar_engine::{EngineApi, RequestError, RequestId, SharedConstraint};
use oscar_text::{ChatTemplate, Dialect, Grammar, ModelText, Thinking};
use tokio::sync::Semaphore;

use crate::constraint::Constraints;
use crate::error::ApiError;
use crate::ids::{IdSource, unix_seconds};
use crate::keys::Caller;
use crate::limits::Limits;
use crate::metrics::Metrics;
use crate::{
    GenerationDefaults, ServerConfig, ToolCallParser, body, connections, middleware, origin, panics, routes,
};

pub type Shared = Arc<App>;

/// The running server.
pub struct App {
    pub config: ServerConfig,
    pub engine: Arc<dyn EngineApi>,
    pub text: Arc<ModelText>,
    pub defaults: GenerationDefaults,
    pub metrics: Metrics,
    pub ids: IdSource,
    pub running: Running,
    /// Permits for parsing, rendering and tokenizing large bodies.
    pub heavy_work: Arc<Semaphore>,
    /// Permits for the bytes of large bodies; see [`App::body_permits`].
    pub bodies: Arc<Semaphore>,
    pub limits: Limits,
    /// How the model writes tool calls; none if they are not read.
    pub dialect: Option<Dialect>,
    /// The chat template prints tools. For one that does not, they are written into the messages.
    pub template_prints_tools: bool,
    constraints: Constraints,
    pub started: Instant,
    /// Unix time of the start, the model's `created`.
    pub started_at: u64,
    draining: AtomicBool,
    next_request: AtomicU64,
}

impl App {
    pub fn new(
        config: ServerConfig,
        engine: Arc<dyn EngineApi>,
        text: Arc<ModelText>,
        defaults: GenerationDefaults,
    ) -> Shared {
        let metrics = Metrics::new(engine.clone());
        let limits = Limits::new(&config, engine.info().context, &text.tokenizer);
        let template_prints_tools = text.chat.as_ref().is_some_and(ChatTemplate::prints_tools);
        let dialect = match config.tool_call_parser {
            ToolCallParser::Off => None,
            ToolCallParser::Dialect(dialect) => Some(dialect),
            ToolCallParser::Auto if !template_prints_tools => Some(Dialect::Hermes),
            ToolCallParser::Auto => text.chat.as_ref().and_then(ChatTemplate::dialect),
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Arc::new(Self {
            config,
            engine,
            text,
            defaults,
            metrics,
            ids: IdSource::default(),
            running: Running::default(),
            heavy_work: Arc::new(Semaphore::new(cores)),
            bodies: Arc::new(Semaphore::new(Self::body_permits(limits.bodies_in_flight))),
            limits,
            dialect,
            template_prints_tools,
            constraints: Constraints::default(),
            started: Instant::now(),
            started_at: unix_seconds(),
            draining: AtomicBool::new(false),
            next_request: AtomicU64::new(1),
        })
    }

    /// Permits of [`App::bodies`] for that many bytes.
    pub fn body_permits(bytes: usize) -> usize {
        bytes.div_ceil(1 << 10).min(u32::MAX as usize)
    }

    /// Whether the server is only reachable from this machine.
    pub fn loopback_only(&self) -> bool {
        self.config.loopback
    }

    pub fn next_request_id(&self) -> RequestId {
        RequestId(self.next_request.fetch_add(1, Ordering::Relaxed))
    }

    pub fn engine_error(&self, error: RequestError) -> ApiError {
        ApiError::Engine { error, retry_after: self.config.retry_after_seconds }
    }

    /// The constraint of an answer. `param` names the field that asked for it.
    pub fn constraint(
        &self,
        param: &str,
        grammar: &Grammar,
        thinking: &Thinking,
    ) -> Result<SharedConstraint, ApiError> {
        let (vocab_size, end_tokens) = (self.engine.info().vocab_size, &self.defaults.stop_tokens);
        self.constraints.compile(&self.text, vocab_size, end_tokens, param, grammar, thinking)
    }

    /// Names the answering configuration: answers are comparable where it is equal.
    pub fn fingerprint(&self) -> String {
        let info = self.engine.info();
        format!("oscar-{}-{}-{}", env!("CARGO_PKG_VERSION"), info.kv_format, info.device)
    }

    /// The name to answer with, if `model` is one that is served; none asked for is as good as the
    /// right one.
    pub fn served_model(&self, model: Option<&str>) -> Result<String, ApiError> {
        let own = &self.engine.info().model;
        match model {
            None | Some("") => Ok(own.clone()),
            Some(name) if name == own || self.config.model_aliases.iter().any(|alias| alias == name) => {
                Ok(name.to_owned())
            }
            Some(name) => Err(ApiError::UnknownModel { model: name.to_owned() }),
        }
    }

    /// Refuses new requests; running ones go on.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.engine.drain();
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }
}

/// Requests in the engine, by the name the client knows.
#[derive(Debug, Default)]
pub struct Running {
    names: Mutex<HashMap<String, Vec<(RequestId, Caller)>>>,
}

impl Running {
    pub fn insert(&self, name: &str, id: RequestId, owner: &Caller) {
        self.lock().entry(name.to_owned()).or_default().push((id, owner.clone()));
    }

    pub fn remove(&self, name: &str, id: RequestId) {
        let mut names = self.lock();
        if let Some(ids) = names.get_mut(name) {
            ids.retain(|(known, _)| *known != id);
            if ids.is_empty() {
                names.remove(name);
            }
        }
    }

    /// The engine's ids behind a name, given with or without the prefix that a response adds to it;
    /// only of requests that the caller may stop.
    pub fn find(&self, name: &str, caller: &Caller) -> Vec<RequestId> {
        let bare = name.strip_prefix("chatcmpl-").or_else(|| name.strip_prefix("cmpl-")).unwrap_or(name);
        let names = self.lock();
        let found = names.get(name).or_else(|| names.get(bare)).into_iter().flatten();
        found.filter(|(_, owner)| caller.controls(owner)).map(|(id, _)| *id).collect()
    }

    pub fn all(&self) -> Vec<RequestId> {
        self.lock().values().flatten().map(|(id, _)| *id).collect()
    }

    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Vec<(RequestId, Caller)>>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The whole server as a service, for tests and for embedding in another one.
pub fn router(
    config: ServerConfig,
    engine: Arc<dyn EngineApi>,
    text: Arc<ModelText>,
    defaults: GenerationDefaults,
) -> Router {
    build(App::new(config, engine, text, defaults))
}

/// Layers run from the last one added inwards: the access log sees everything, including answers of
/// the other layers.
pub fn build(app: Shared) -> Router {
    routes::all()
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), connections::deadline))
        .layer(from_fn_with_state(app.clone(), middleware::authenticate))
        .layer(from_fn_with_state(app.clone(), middleware::cors))
        .layer(from_fn_with_state(app.clone(), origin::guard))
        .layer(from_fn(panics::catch))
        .layer(from_fn(routes::in_anthropics_form))
        .layer(from_fn(origin::harden))
        .layer(from_fn_with_state(app.clone(), middleware::observe))
        .layer(from_fn(body::read_away))
        .with_state(app)
}

async fn unknown_route(request: Request) -> ApiError {
    ApiError::UnknownRoute { method: request.method().to_string(), path: request.uri().path().to_owned() }
}

async fn wrong_method(request: Request) -> ApiError {
    ApiError::MethodNotAllowed { method: request.method().to_string(), path: request.uri().path().to_owned() }
}
