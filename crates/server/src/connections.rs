//! Accepting connections, and how long and how many may stay.
//!
//! A connection that sends nothing, sends its head slowly, stays idle or does not read its answer
//! is closed after a time. Connections beyond the limit go into a small spare lane, where only
//! health checks are answered and where nobody stays long; what does not fit there either is closed
//! at once.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, Sleep, sleep, timeout};
use tower::ServiceExt;

use crate::app::Shared;
use crate::error::ApiError;

/// Connections of the spare lane, and how long one may stay there.
const SPARE: usize = 32;
const SPARE_TIME: Duration = Duration::from_secs(5);

/// After a refusal that came before the body was read, this much of the body is read and thrown
/// away: a client that still sends would otherwise see a broken connection instead of the answer.
const LINGER_BYTES: usize = 256 << 20;
const LINGER_TIME: Duration = Duration::from_secs(3);

/// File descriptors left for everything that is no connection.
const OTHER_FILES: usize = 32;

/// The state of the server, as connections see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub enum Phase {
    Serving,
    /// Idle connections are closed; new ones get health checks answered.
    Draining,
    /// Everything is closed.
    Closed,
}

/// Maximum number of connections: the operator's setting, but no more than the process may open
/// files.
pub fn limit(wanted: usize) -> usize {
    let files = open_file_limit().unwrap_or(usize::MAX);
    wanted.min(files.saturating_sub(OTHER_FILES + SPARE)).max(1)
}

/// The soft limit on open files, where the system tells it without a system call of our own.
fn open_file_limit() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Accepts until the phase is [`Phase::Closed`]; `alive` is held by every connection.
pub async fn accept(
    listener: TcpListener,
    app: Shared,
    router: Router,
    phase: watch::Receiver<Phase>,
    alive: watch::Receiver<()>,
) {
    let most = limit(app.config.max_connections);
    let slots = Arc::new(Semaphore::new(most));
    let spare = Arc::new(Semaphore::new(SPARE));
    let mut closing = phase.clone();
    let mut warned = false;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = closing.wait_for(|phase| *phase == Phase::Closed) => return,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of files or memory: others have to leave first.
                if !matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset)
                {
                    tracing::error!(%error, "a connection could not be accepted");
                    sleep(Duration::from_millis(100)).await;
                }
                continue;
            }
        };
        let serving = *phase.borrow() == Phase::Serving;
        let lane = match slots.clone().try_acquire_owned() {
            Ok(permit) if serving => Some((false, permit)),
            _ => spare.clone().try_acquire_owned().ok().map(|permit| (true, permit)),
        };
        let is_full = serving && lane.as_ref().is_none_or(|(is_spare, _)| *is_spare);
        if is_full && !warned {
            tracing::warn!(most, "all connections are taken: new ones get 503");
        }
        warned = is_full;
        let Some((is_spare, permit)) = lane else {
            app.metrics.connection_refused();
            continue;
        };
        // Streams are many small writes, which must not wait for each other's acknowledgement.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY");
        }
        let connection = Connection { app: app.clone(), router: router.clone(), is_spare, permit };
        let (phase, alive) = (phase.clone(), alive.clone());
        tokio::spawn(async move {
            #[cfg(feature = "tls")]
            match connection.app.config.tls.clone() {
                None => connection.serve(stream, phase).await,
                Some(tls) => match timeout(connection.head_time(), tls.accept(stream)).await {
                    Ok(Ok(stream)) => connection.serve(stream, phase).await,
                    Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
                    Err(_) => tracing::debug!("a TLS handshake took too long"),
                },
            }
            #[cfg(not(feature = "tls"))]
            connection.serve(stream, phase).await;
            drop(alive);
        });
    }
}

struct Connection {
    app: Shared,
    router: Router,
    is_spare: bool,
    permit: OwnedSemaphorePermit,
}

/// What a connection is made of: plain TCP, or TLS over it.
trait Transport: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> Transport for T {}

impl Connection {
    /// How long the head of a request may take.
    fn head_time(&self) -> Duration {
        let time = self.app.config.header_timeout;
        if self.is_spare { SPARE_TIME.min(time) } else { time }
    }

    async fn serve(self, stream: impl Transport, mut phase: watch::Receiver<Phase>) {
        let gauge = self.app.metrics.connection();
        let config = &self.app.config;
        let stage = Arc::new(Stage::default());
        let head_time = self.head_time();
        let guarded = Guarded {
            stream,
            stage: stage.clone(),
            head_time,
            head: Box::pin(sleep(head_time)),
            write_time: config.write_timeout,
            write: None,
        };
        let service = {
            let (app, router, is_spare) = (self.app.clone(), self.router.clone(), self.is_spare);
            service_fn(move |request: Request<Incoming>| {
                stage.set(Stage::BUSY);
                let (stage, router) = (stage.clone(), router.clone());
                let refusal = refusal(&app, is_spare, &request);
                Box::pin(async move {
                    let response = match refusal {
                        Some(refusal) => refusal,
                        None => match router.oneshot(request.map(Body::new)).await {
                            Ok(response) => response,
                            Err(never) => match never {},
                        },
                    };
                    // The body holds it until it ends.
                    let busy = Busy(stage);
                    Ok::<_, Infallible>(response.map(|body| {
                        body.map_err(move |error| {
                            let _held = &busy;
                            error
                        })
                    }))
                }) as Pin<Box<dyn Future<Output = _> + Send>>
            })
        };
        let mut connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(config.idle_timeout)
            .keep_alive(!self.is_spare)
            .serve_connection(TokioIo::new(guarded), service);
        let mut draining = phase.clone();
        // The spare lane serves one request anyway; asked to end before it came, it would serve
        // none.
        let mut asked_to_end = self.is_spare;
        let ended = loop {
            tokio::select! {
                ended = poll_fn(|context| connection.poll_without_shutdown(context)) => break ended,
                _ = draining.wait_for(|phase| *phase >= Phase::Draining), if !asked_to_end => {
                    asked_to_end = true;
                    Pin::new(&mut connection).graceful_shutdown();
                }
                _ = phase.wait_for(|phase| *phase == Phase::Closed) => return,
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection ended early");
        } else {
            linger(connection.into_parts().io.into_inner().stream).await;
        }
        drop((gauge, self.permit));
    }
}

/// The immediate refusal, if any: in the spare lane only health checks are served.
fn refusal(app: &Shared, is_spare: bool, request: &Request<Incoming>) -> Option<Response> {
    if !is_spare || matches!(request.uri().path(), "/health" | "/ready") {
        return None;
    }
    let error = match app.is_draining() {
        true => app.engine_error(oscar_engine::RequestError::ShuttingDown),
        false => ApiError::Connections { retry_after: app.config.retry_after_seconds },
    };
    let mut response = error.into_response();
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    Some(response)
}

/// Closes our side and discards data that the client still sends.
async fn linger(mut stream: impl Transport) {
    let reading = async {
        stream.shutdown().await?;
        let mut buffer = vec![0; 64 << 10];
        let mut read = 0;
        while read < LINGER_BYTES {
            match stream.read(&mut buffer).await? {
                0 => break,
                count => read += count,
            }
        }
        io::Result::Ok(())
    };
    // Whether the client was polite does not matter any more.
    let _ = timeout(LINGER_TIME, reading).await;
}

/// The event that a connection waits for.
#[derive(Debug, Default)]
struct Stage(AtomicU8);

impl Stage {
    /// Part of a request's head has come, or none of the first one.
    const HEAD: u8 = 0;
    /// A request is being answered.
    const BUSY: u8 = 1;
    /// The next request may come.
    const IDLE: u8 = 2;

    fn set(&self, stage: u8) {
        self.0.store(stage, Ordering::Relaxed);
    }

    fn is(&self, stage: u8) -> bool {
        self.0.load(Ordering::Relaxed) == stage
    }
}

/// A stream that fails if a head is not complete in time or if the client does not read.
struct Guarded<T> {
    stream: T,
    stage: Arc<Stage>,
    head_time: Duration,
    head: Pin<Box<Sleep>>,
    write_time: Duration,
    /// Runs while a write waits.
    write: Option<Pin<Box<Sleep>>>,
}

impl<T: Transport> AsyncRead for Guarded<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        match Pin::new(&mut self.stream).poll_read(context, buffer) {
            Poll::Ready(outcome) => {
                if buffer.filled().len() > before && self.stage.is(Stage::IDLE) {
                    let deadline = Instant::now() + self.head_time;
                    self.head.as_mut().reset(deadline);
                    self.stage.set(Stage::HEAD);
                }
                Poll::Ready(outcome)
            }
            Poll::Pending if self.stage.is(Stage::HEAD) && self.head.as_mut().poll(context).is_ready() => {
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<T> Guarded<T> {
    /// Watches the time that a write waits.
    fn watch<O>(&mut self, context: &mut Context<'_>, outcome: Poll<io::Result<O>>) -> Poll<io::Result<O>> {
        if outcome.is_ready() {
            self.write = None;
            return outcome;
        }
        let time = self.write_time;
        let waiting = self.write.get_or_insert_with(|| Box::pin(sleep(time)));
        match waiting.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<T: Transport> AsyncWrite for Guarded<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watch(context, outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.watch(context, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// An answer under way; its end makes the connection idle.
struct Busy(Arc<Stage>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.set(Stage::IDLE);
    }
}

/// Ends a request that takes longer than the operator allows, its stream included.
pub async fn deadline(
    axum::extract::State(app): axum::extract::State<Shared>,
    request: Request,
    next: axum::middleware::Next,
) -> Response {
    let Some(limit) = app.config.request_timeout else { return next.run(request).await };
    let end = Instant::now() + limit;
    match tokio::time::timeout_at(end, next.run(request)).await {
        Ok(response) => response.map(|body| {
            Body::new(Limited { body, end: Box::pin(tokio::time::sleep_until(end)) }.boxed_unsync())
        }),
        Err(_) => ApiError::RequestTimeout { seconds: limit.as_secs() }.into_response(),
    }
}

/// A body that breaks off at a given time.
struct Limited {
    body: Body,
    end: Pin<Box<Sleep>>,
}

impl HttpBody for Limited {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Pending if self.end.as_mut().poll(context).is_ready() => {
                Poll::Ready(Some(Err(axum::Error::new(io::Error::from(io::ErrorKind::TimedOut)))))
            }
            other => other,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
