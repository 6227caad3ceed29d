//! The thread that sends spans to a collector: OTLP over HTTP, in batches.
//!
//! Invariant: whoever ends a span never waits for the collector. Spans that do not fit the queue are
//! dropped; so are those that the collector does not take, and the log counts these.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use prost::Message;

use super::wire::{
    ExportTraceServiceRequest, InstrumentationScope, KeyValue, Resource, ResourceSpans, ScopeSpans, Span,
    Value,
};

/// Spans that wait for the collector.
const QUEUE: usize = 16_384;
/// Most spans of a message.
const BATCH: usize = 512;
/// Longest wait for a batch to fill.
const PATIENCE: Duration = Duration::from_secs(1);
/// Longest time for one message.
const TIMEOUT: Duration = Duration::from_secs(5);

pub(super) enum Item {
    Span(Box<Span>),
    /// Send what there is, then answer.
    Flush(SyncSender<()>),
}

/// Starts the thread. `endpoint` is the collector's address without `/v1/traces`.
pub(super) fn start(endpoint: &str) -> std::io::Result<SyncSender<Item>> {
    let (sender, items) = sync_channel(QUEUE);
    let url = format!("{}/v1/traces", endpoint.trim_end_matches('/'));
    thread::Builder::new().name("otlp".to_owned()).spawn(move || run(&items, &url))?;
    Ok(sender)
}

fn run(items: &Receiver<Item>, url: &str) {
    let agent = ureq::Agent::config_builder().timeout_global(Some(TIMEOUT)).build().new_agent();
    let mut lost = 0;
    loop {
        let (spans, flush) = match batch(items) {
            Ok(batch) => batch,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if !spans.is_empty() {
            let count = spans.len();
            let sent = agent
                .post(url)
                .header("content-type", "application/x-protobuf")
                .send(&message(spans).encode_to_vec()[..]);
            match sent {
                Ok(_) if lost > 0 => {
                    tracing::warn!(
                        spans = std::mem::take(&mut lost),
                        "the collector takes spans again; some were dropped"
                    );
                }
                Ok(_) => {}
                Err(error) => {
                    if lost == 0 {
                        tracing::warn!(%error, "the collector of --otlp-endpoint takes no spans; they are dropped");
                    }
                    lost += count;
                }
            }
        }
        if let Some(done) = flush {
            let _ = done.send(());
        }
    }
}

/// The next spans, and who waits for them to be sent.
fn batch(items: &Receiver<Item>) -> Result<(Vec<Span>, Option<SyncSender<()>>), RecvTimeoutError> {
    let mut spans = Vec::new();
    let mut item = items.recv_timeout(Duration::from_secs(3600))?;
    let end = Instant::now() + PATIENCE;
    loop {
        match item {
            Item::Span(span) => spans.push(*span),
            Item::Flush(done) => return Ok((spans, Some(done))),
        }
        let left = end.saturating_duration_since(Instant::now());
        if spans.len() == BATCH || left.is_zero() {
            return Ok((spans, None));
        }
        item = match items.recv_timeout(left) {
            Ok(item) => item,
            Err(_) => return Ok((spans, None)),
        };
    }
}

fn message(spans: Vec<Span>) -> ExportTraceServiceRequest {
    let text = |key: &str, value: &str| KeyValue::new(key, Value::String(value.to_owned()));
    let version = env!("CARGO_PKG_VERSION");
    let attributes = vec![text("service.name", "oscar"), text("service.version", version)];
    let scope = InstrumentationScope { name: "oscar".to_owned(), version: version.to_owned() };
    ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(Resource { attributes }),
            scope_spans: vec![ScopeSpans { scope: Some(scope), spans }],
        }],
    }
}
