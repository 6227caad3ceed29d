//! The listening socket and the orderly end.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use oscar_engine::{EngineApi, Health};
use oscar_text::ModelText;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

use crate::app::{Shared, build};
use crate::connections::{Phase, accept};
use crate::{Frontend, GenerationDefaults, ServerConfig};

/// After the last request was cancelled, how long its answer may take to reach the client.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How often the engine's health is looked at.
const HEALTH_PERIOD: Duration = Duration::from_millis(200);

/// Listens on the configured address and serves until `shutdown`, then drains.
pub async fn serve(
    config: ServerConfig,
    engine: Arc<dyn EngineApi>,
    text: Arc<ModelText>,
    defaults: GenerationDefaults,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let listener = TcpListener::bind((config.host.as_str(), config.port)).await?;
    serve_on(listener, config, engine, text, defaults, shutdown, std::future::pending()).await
}

/// The same on a socket that is already bound, for callers that want to know its port first.
/// Draining ends at once when `abandon` is ready.
///
/// # Errors
/// If the address is reachable from other machines, no key is configured and the configuration
/// does not allow that; if the engine has died or is stuck. In the second case health checks are
/// answered with 503 for [`ServerConfig::fault_grace`] before this returns.
pub async fn serve_on(
    listener: TcpListener,
    mut config: ServerConfig,
    engine: Arc<dyn EngineApi>,
    text: Arc<ModelText>,
    defaults: GenerationDefaults,
    shutdown: impl Future<Output = ()> + Send + 'static,
    abandon: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    config.loopback = listener.local_addr()?.ip().is_loopback();
    config.check_exposure().map_err(io::Error::other)?;
    serve_frontend(listener, Frontend::new(config, engine, text, defaults), shutdown, abandon).await
}

/// The same for a front end that other protocols serve too. The caller has looked at who can reach the
/// socket ([`ServerConfig::check_exposure`]).
///
/// # Errors
/// If the engine has died or is stuck.
pub async fn serve_frontend(
    listener: TcpListener,
    frontend: Frontend,
    shutdown: impl Future<Output = ()> + Send + 'static,
    abandon: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let app = frontend.app;
    let (phase, phases) = watch::channel(Phase::Serving);
    let (alive, connections) = watch::channel(());
    let accepting = tokio::spawn(accept(listener, app.clone(), build(app.clone()), phases, connections));
    let fault = tokio::select! {
        () = shutdown => None,
        fault = fault(&app) => Some(fault),
    };
    if let Some(fault) = fault {
        let _ = phase.send(Phase::Closed);
        // Its end is the one that matters less.
        let _ = accepting.await;
        return Err(io::Error::other(fault));
    }
    tracing::info!(running = app.engine.stats().running, "draining: no new requests");
    app.drain();
    // The receivers live as long as the accepting task.
    let _ = phase.send(Phase::Draining);
    let deadline = Instant::now() + app.config.drain_timeout;
    tokio::select! {
        () = drain(&app, &phase, &alive, deadline) => {}
        () = abandon => tracing::warn!("a second signal: ending without waiting"),
    }
    let _ = phase.send(Phase::Closed);
    accepting.await.map_err(io::Error::other)
}

/// Ends when the engine has not worked for the grace time; says why.
async fn fault(app: &Shared) -> String {
    loop {
        let Some(first) = failure(app) else {
            sleep(HEALTH_PERIOD).await;
            continue;
        };
        tracing::error!("{first}");
        sleep(app.config.fault_grace).await;
        // A step that was only slow may have ended meanwhile.
        if let Some(last) = failure(app) {
            return last;
        }
        tracing::warn!("the engine works again");
    }
}

fn failure(app: &Shared) -> Option<String> {
    match app.engine.health() {
        Health::Alive => None,
        Health::Stuck { seconds } => Some(format!("the engine is stuck: its step has run for {seconds} s")),
        Health::Dead { reason } => Some(format!("the engine has stopped: {reason}")),
    }
}

/// Waits until nothing runs, or cancels it at the deadline; then lets the answers reach their
/// clients.
async fn drain(app: &Shared, phase: &watch::Sender<Phase>, alive: &watch::Sender<()>, deadline: Instant) {
    if timeout_at(deadline, drained(app)).await.is_err() {
        let left = app.running.all();
        tracing::warn!(requests = left.len(), "the drain time is over: cancelling what still runs");
        left.into_iter().for_each(|id| app.engine.cancel(id));
    }
    // Generated text may still wait for a slow reader. The accepting task holds one receiver.
    let patience = deadline.max(Instant::now() + LAST_WORDS);
    let written = async {
        while alive.receiver_count() > 1 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    // Past it somebody holds a connection open without using it.
    let _ = timeout_at(patience, written).await;
    let _ = phase.send(Phase::Closed);
}

async fn drained(app: &Shared) {
    while !app.running.is_empty() {
        sleep(Duration::from_millis(10)).await;
    }
}
