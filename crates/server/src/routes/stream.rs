//! Server-sent events: one JSON object each, `[DONE]` at the end, comments in between when it gets
//! quiet.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::http::{HeaderName, HeaderValue};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use serde::Serialize;
use serde_json::Value;
use tracing::Span;

use crate::app::Shared;
use crate::error::ApiError;
use crate::generate::{Generation, Output};

/// Turns outputs into the chunks of one endpoint.
pub trait Chunks: Send + Unpin + 'static {
    type Chunk: Serialize;
    /// The stream ends with `[DONE]`.
    const ENDS_WITH_DONE: bool = true;

    /// The chunks that an output gives rise to.
    fn chunks(&mut self, output: Output) -> Vec<Self::Chunk>;
    /// The chunks that follow when everything is done.
    fn last(&mut self) -> Vec<Self::Chunk>;
    /// The name of a chunk's event, where the endpoint names them.
    fn name(_chunk: &Self::Chunk) -> Option<&str> {
        None
    }
    /// The chunk that tells an error, and the name of its event.
    fn error(&mut self, error: &ApiError) -> (Option<&'static str>, Value) {
        (None, error.to_json())
    }
}

/// Answers with a stream of chunks. When the client goes away the stream is dropped, and with it
/// the generation.
pub fn respond(app: Shared, generation: Generation, chunks: impl Chunks) -> Response {
    let keep_alive = KeepAlive::new().interval(app.config.keep_alive).text("keep-alive");
    let events =
        Events { app, generation, chunks, ready: VecDeque::new(), ended: false, span: Span::current() };
    let mut response = Sse::new(events).keep_alive(keep_alive).into_response();
    // Reverse proxies would otherwise collect the stream before passing it on.
    let buffering = HeaderName::from_static("x-accel-buffering");
    response.headers_mut().insert(buffering, HeaderValue::from_static("no"));
    response
}

struct Events<C> {
    app: Shared,
    generation: Generation,
    chunks: C,
    ready: VecDeque<sse::Event>,
    ended: bool,
    /// The request's span: the stream is read after the handler has returned.
    span: Span,
}

impl<C: Chunks> Events<C> {
    fn queue(&mut self, name: Option<&str>, chunk: &impl Serialize) {
        // Our own chunks are plain data, which always serializes.
        if let Ok(text) = serde_json::to_string(chunk) {
            let event = name.map_or_else(sse::Event::default, |name| sse::Event::default().event(name));
            self.ready.push_back(event.data(text));
        }
    }

    fn end(&mut self) {
        self.ended = true;
        if C::ENDS_WITH_DONE {
            self.ready.push_back(sse::Event::default().data("[DONE]"));
        }
    }

    fn take(&mut self, output: Option<Output>) {
        match output {
            Some(Output::Failed(error)) => {
                let error = self.app.engine_error(error);
                tracing::warn!(%error, "a stream failed");
                let (name, chunk) = self.chunks.error(&error);
                self.queue(name, &chunk);
                self.end();
            }
            Some(output) => {
                for chunk in self.chunks.chunks(output) {
                    self.queue(C::name(&chunk), &chunk);
                }
            }
            None => {
                for chunk in self.chunks.last() {
                    self.queue(C::name(&chunk), &chunk);
                }
                self.end();
            }
        }
    }
}

impl<C: Chunks> Stream for Events<C> {
    type Item = Result<sse::Event, Infallible>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let _entered = this.span.clone().entered();
        loop {
            if let Some(event) = this.ready.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            if this.ended {
                return Poll::Ready(None);
            }
            match this.generation.poll_next(context) {
                Poll::Ready(output) => this.take(output),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}
