//! The socket while the model loads: every route answers 503 and says how far the start is.
//!
//! Connections of this phase serve one request each, so none outlives it. The listener then goes
//! to [`serve_on`](crate::serve_on); connections that wait in its backlog are answered there.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Json;
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::ServerConfig;

/// Connections at once, and how long one may stay.
const CONNECTIONS: usize = 64;
const CONNECTION_TIME: Duration = Duration::from_secs(5);

/// How far the start of a server is. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct StartProgress(Arc<Mutex<Stage>>);

#[derive(Clone, Debug, Default)]
struct Stage {
    name: String,
    done: usize,
    total: usize,
}

impl StartProgress {
    /// A stage of `total` parts begins; 0 if they cannot be counted.
    pub fn begin(&self, name: impl Into<String>, total: usize) {
        *self.lock() = Stage { name: name.into(), done: 0, total };
    }

    /// So many parts of the stage are done.
    pub fn set(&self, done: usize) {
        self.lock().done = done;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Stage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self) -> Response {
        let stage = self.lock().clone();
        let body = json!({
            "status": "starting",
            "stage": stage.name,
            "progress": stage.share(),
            "error": {
                "message": format!("the server is starting: {}", stage.describe()),
                "type": "server_error", "param": null, "code": "starting",
            },
        });
        let mut response = (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::RETRY_AFTER, HeaderValue::from(1));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        response
    }
}

impl Stage {
    /// The stage, with its progress where that is known: `loading weights 43 %`.
    fn describe(&self) -> String {
        self.share().map_or(self.name.clone(), |share| format!("{} {:.0} %", self.name, 100.0 * share))
    }

    fn share(&self) -> Option<f64> {
        (self.total > 0).then(|| (self.done as f64 / self.total as f64).min(1.0))
    }
}

/// A socket that answers while the server starts.
pub struct Starting {
    end: oneshot::Sender<()>,
    answering: JoinHandle<TcpListener>,
}

impl Starting {
    /// Answers from now on, on the current tokio runtime.
    pub fn new(listener: TcpListener, progress: StartProgress, config: &ServerConfig) -> Self {
        let (end, ended) = oneshot::channel();
        #[cfg(feature = "tls")]
        if let Some(tls) = config.tls.clone() {
            let refuse = move |stream| {
                let (progress, tls) = (progress.clone(), tls.clone());
                async move {
                    if let Ok(stream) = tls.accept(stream).await {
                        refuse(stream, progress).await;
                    }
                }
            };
            return Self { end, answering: tokio::spawn(answer(listener, ended, refuse)) };
        }
        let _ = config;
        let refuse = move |stream| refuse(stream, progress.clone());
        Self { end, answering: tokio::spawn(answer(listener, ended, refuse)) }
    }

    /// Stops answering and gives the socket back.
    ///
    /// # Errors
    /// If the runtime is shutting down.
    pub async fn finish(self) -> std::io::Result<TcpListener> {
        drop(self.end);
        self.answering.await.map_err(std::io::Error::other)
    }
}

async fn answer<F: Future<Output = ()> + Send>(
    listener: TcpListener,
    mut ended: oneshot::Receiver<()>,
    refuse: impl Fn(TcpStream) -> F + Clone + Send + 'static,
) -> TcpListener {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = &mut ended => return listener,
        };
        let Ok((stream, _)) = accepted else {
            // Out of files or memory: others have to leave first.
            sleep(Duration::from_millis(100)).await;
            continue;
        };
        if let Ok(place) = places.clone().try_acquire_owned() {
            let refuse = refuse.clone();
            tokio::spawn(async move {
                // A client that is too slow is cut off.
                let _ = timeout(CONNECTION_TIME, refuse(stream)).await;
                drop(place);
            });
        }
    }
}

/// Answers one request. A client that left needs no answer.
async fn refuse(stream: impl AsyncRead + AsyncWrite + Unpin, progress: StartProgress) {
    let service = service_fn(move |_: Request<Incoming>| {
        let response = progress.answer();
        async move { Ok::<_, Infallible>(response) }
    });
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .await;
}
