//! The server's socket: open before the model loads, handed to the server when it is ready.

use super::grpc::Grpc;
use super::keys::KeySource;
use super::signals::Stops;
use crate::progress::note;
use anyhow::{Context, Result};
use oscar_engine::EngineApi;
use oscar_server::{Frontend, GenerationDefaults, ServerConfig, StartProgress, Starting, serve_frontend};
use oscar_text::ModelText;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

pub struct Socket {
    runtime: Runtime,
    starting: Starting,
    progress: StartProgress,
    address: SocketAddr,
    config: ServerConfig,
    keys: KeySource,
}

impl Socket {
    /// Listens, and answers 503 on every route from now on.
    pub fn open(config: ServerConfig, keys: KeySource) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let progress = StartProgress::default();
        let (starting, address) = runtime.block_on(async {
            let asked = format!("{}:{}", config.host, config.port);
            let listener =
                TcpListener::bind((config.host.as_str(), config.port)).await.with_context(|| {
                    format!("cannot listen on {asked}: check --host, or choose another port with --port")
                })?;
            let address = listener.local_addr()?;
            let exposed = ServerConfig { loopback: address.ip().is_loopback(), ..config.clone() };
            exposed.check_exposure()?;
            anyhow::Ok((Starting::new(listener, progress.clone(), &config), address))
        })?;
        if !config.keys.is_empty() && !config.keys.has_operator() {
            note!("no key is an operator's: /metrics and other routes for operators refuse everyone");
        }
        let scheme = scheme(&config);
        note!("opened {scheme}://{address}; it answers 503 until the model is loaded");
        Ok(Self { runtime, starting, progress, address, config, keys })
    }

    /// What the answers show until [`Socket::serve`].
    pub fn progress(&self) -> StartProgress {
        self.progress.clone()
    }

    pub fn config(&self) -> &ServerConfig {
        &self.config
    }

    /// Serves until a signal, or until the engine fails. [`Socket::open`] has looked at who can reach
    /// the address.
    pub fn serve(
        self,
        config: ServerConfig,
        engine: Arc<dyn EngineApi>,
        text: Arc<ModelText>,
        defaults: GenerationDefaults,
        name: &str,
        grpc: Option<Grpc>,
    ) -> Result<()> {
        let Self { runtime, starting, address, keys, .. } = self;
        let ended = runtime.block_on(async {
            let stops = Stops::listen(reload(keys, &config)).context("signals cannot be caught")?;
            let scheme = scheme(&config);
            let listener = starting.finish().await?;
            note!("\nserving {name} on {scheme}://{address}   (web page: the same address; Ctrl-C stops)\n");
            note!("  curl {scheme}://{address}/v1/chat/completions -H 'Content-Type: application/json' \\");
            note!("       -d '{{\"model\": \"{name}\", \"messages\": [{{\"role\": \"user\", \"content\": \"Who are you?\"}}]}}'\n");
            tokio::spawn(release_memory_when_idle(engine.clone()));
            let config = ServerConfig { loopback: address.ip().is_loopback(), ..config };
            let frontend = Frontend::new(config, engine, text, defaults);
            match grpc {
                Some(grpc) => grpc.serve(listener, frontend, &stops).await,
                None => serve_frontend(listener, frontend, stops.asked(1), stops.asked(2))
                    .await
                    .context("the server failed"),
            }
        });
        // A task that waits for a stuck engine would wait for ever.
        runtime.shutdown_timeout(Duration::from_secs(1));
        ended
    }
}

fn scheme(config: &ServerConfig) -> &'static str {
    #[cfg(feature = "tls")]
    if config.tls.is_some() {
        return "https";
    }
    let _ = config;
    "http"
}

/// Reads the key file and the certificate again, if there are any.
fn reload(source: KeySource, config: &ServerConfig) -> Option<Box<dyn Fn() + Send + Sync>> {
    let keys = source.reloads().then(|| (source, config.keys.clone()));
    #[cfg(feature = "tls")]
    if let Some(tls) = config.tls.clone() {
        return Some(Box::new(move || {
            if let Some((source, keys)) = &keys {
                source.reload(keys);
            }
            match tls.reload() {
                Ok(()) => tracing::info!("the certificate was read again"),
                Err(error) => tracing::error!("the certificate stays as it was: {error}"),
            }
        }));
    }
    keys.map(|(source, keys)| Box::new(move || source.reload(&keys)) as Box<dyn Fn() + Send + Sync>)
}

/// A burst of large requests leaves free memory in the allocator; it goes back while nothing runs.
async fn release_memory_when_idle(engine: Arc<dyn EngineApi>) {
    const PAUSE: Duration = Duration::from_secs(10);
    loop {
        tokio::time::sleep(PAUSE).await;
        let stats = engine.stats();
        if stats.running + stats.waiting == 0 {
            // It cannot fail; a runtime that is shutting down may not run it.
            let _ = tokio::task::spawn_blocking(oscar_kernels_cpu::allocator::release_free_memory).await;
        }
    }
}
