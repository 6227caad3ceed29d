//! The listening socket and the orderly end.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use oscar_engine::EngineApi;
use oscar_text::ModelText;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::app::{App, Shared, build};
use crate::{GenerationDefaults, ServerConfig};

/// After the last request was cancelled, how long its answer may take to reach the client.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Listens on the configured address and serves until `shutdown`, then drains.
pub async fn serve(
    config: ServerConfig,
    engine: Arc<dyn EngineApi>,
    text: Arc<ModelText>,
    defaults: GenerationDefaults,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let listener = TcpListener::bind((config.host.as_str(), config.port)).await?;
    serve_on(listener, config, engine, text, defaults, shutdown).await
}

/// The same on a socket that is already bound, for callers that want to know its port first.
pub async fn serve_on(
    listener: TcpListener,
    config: ServerConfig,
    engine: Arc<dyn EngineApi>,
    text: Arc<ModelText>,
    defaults: GenerationDefaults,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let app = App::new(config, engine, text, defaults);
    let (stop, stopped) = watch::channel(false);
    let mut signal = stopped.clone();
    let service = axum::serve(NoDelay(listener), build(app.clone())).with_graceful_shutdown(async move {
        let _ = signal.wait_for(|stop| *stop).await;
    });
    let mut server = tokio::spawn(service.into_future());
    tokio::select! {
        ended = &mut server => return ended.map_err(io::Error::other)?,
        () = shutdown => {}
    }
    tracing::info!(running = app.engine.stats().running, "draining: no new requests");
    app.drain();
    let _ = stop.send(true);
    let deadline = Instant::now() + app.config.drain_timeout;
    if timeout_at(deadline, drained(&app)).await.is_err() {
        let left = app.running.all();
        tracing::warn!(requests = left.len(), "the drain time is over: cancelling what still runs");
        left.into_iter().for_each(|id| app.engine.cancel(id));
    }
    // What has been generated may still wait for a slow reader.
    let patience = (deadline - Instant::now()).max(LAST_WORDS);
    match timeout(patience, &mut server).await {
        Ok(ended) => ended.map_err(io::Error::other)?,
        // Somebody holds a connection open without using it.
        Err(_) => {
            server.abort();
            Ok(())
        }
    }
}

async fn drained(app: &Shared) {
    while !app.running.is_empty() {
        sleep(Duration::from_millis(10)).await;
    }
}

/// Streams are many small writes, which must not wait for each other's acknowledgement.
struct NoDelay(TcpListener);

impl axum::serve::Listener for NoDelay {
    type Io = tokio::net::TcpStream;
    type Addr = std::net::SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let (stream, address) = axum::serve::Listener::accept(&mut self.0).await;
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY");
        }
        (stream, address)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.0.local_addr()
    }
}
