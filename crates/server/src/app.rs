//! What all handlers share, and the map of routes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use axum::Router;
use axum::extract::Request;
use axum::middleware::from_fn_with_state;
use oscar_engine::{EngineApi, RequestError, RequestId};
use oscar_text::ModelText;
use tokio::sync::Semaphore;

use crate::error::ApiError;
use crate::ids::{IdSource, unix_seconds};
use crate::metrics::Metrics;
use crate::{GenerationDefaults, ServerConfig, middleware, routes};

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
    pub heavy_work: Semaphore,
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
        Arc::new(Self {
            config,
            engine,
            text,
            defaults,
            metrics,
            ids: IdSource::default(),
            running: Running::default(),
            heavy_work: Semaphore::new(std::thread::available_parallelism().map_or(1, usize::from)),
            started: Instant::now(),
            started_at: unix_seconds(),
            draining: AtomicBool::new(false),
            next_request: AtomicU64::new(1),
        })
    }

    pub fn next_request_id(&self) -> RequestId {
        RequestId(self.next_request.fetch_add(1, Ordering::Relaxed))
    }

    pub fn engine_error(&self, error: RequestError) -> ApiError {
        ApiError::Engine { error, retry_after: self.config.retry_after_seconds }
    }

    /// Names the answering configuration: answers are comparable where it is equal.
    pub fn fingerprint(&self) -> String {
        let info = self.engine.info();
        format!("oscar-{}-{}-{}", env!("CARGO_PKG_VERSION"), info.kv_format, info.device)
    }

    /// The name to answer with, if `model` is one that is served; none asked for is as good as the right one.
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

    /// Refuses new work; what runs goes on.
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
    names: Mutex<HashMap<String, Vec<RequestId>>>,
}

impl Running {
    pub fn insert(&self, name: &str, id: RequestId) {
        self.lock().entry(name.to_owned()).or_default().push(id);
    }

    pub fn remove(&self, name: &str, id: RequestId) {
        let mut names = self.lock();
        if let Some(ids) = names.get_mut(name) {
            ids.retain(|known| *known != id);
            if ids.is_empty() {
                names.remove(name);
            }
        }
    }

    /// The engine's ids behind a name, given with or without the prefix that a response adds to it.
    pub fn find(&self, name: &str) -> Vec<RequestId> {
        let bare = name.strip_prefix("chatcmpl-").or_else(|| name.strip_prefix("cmpl-")).unwrap_or(name);
        let names = self.lock();
        names.get(name).or_else(|| names.get(bare)).cloned().unwrap_or_default()
    }

    pub fn all(&self) -> Vec<RequestId> {
        self.lock().values().flatten().copied().collect()
    }

    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Vec<RequestId>>> {
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

/// Layers run from the last one added inwards: the access log sees everything, also what CORS or auth answer.
pub fn build(app: Shared) -> Router {
    routes::all()
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), middleware::authenticate))
        .layer(from_fn_with_state(app.clone(), middleware::cors))
        .layer(from_fn_with_state(app.clone(), middleware::observe))
        .with_state(app)
}

async fn unknown_route(request: Request) -> ApiError {
    ApiError::UnknownRoute { method: request.method().to_string(), path: request.uri().path().to_owned() }
}

async fn wrong_method(request: Request) -> ApiError {
    ApiError::MethodNotAllowed { method: request.method().to_string(), path: request.uri().path().to_owned() }
}
