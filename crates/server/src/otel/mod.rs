//! Traces for OpenTelemetry: the spans of the log, sent to a collector.
//!
//! A request is one span, `http`; it lasts until its answer is complete. A step of the engine serves
//! several requests and follows their spans: it is written once for each of them, as its child. Log
//! events inside a span become events of it. `traceparent` names the trace and the parent of a request,
//! and says whether it is sampled.

mod export;
mod wire;

use std::cell::Cell;
use std::collections::HashMap;
use std::fmt;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::HeaderMap;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use self::export::Item;
use self::wire::{KeyValue, Value};
use crate::ids::IdSource;

/// Events of one span that are kept.
const MAX_EVENTS: usize = 128;

/// Where traces go.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceOptions {
    endpoint: String,
    sample: f64,
}

#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error(
        "`{0}` is no address of a collector: write it like http://127.0.0.1:4318 (TLS is left to a local collector)"
    )]
    Endpoint(String),
    #[error("{0} is no share of traces: it must be 0 to 1")]
    Sample(f64),
}

impl TraceOptions {
    /// `sample` is the share of requests without a `traceparent` that are traced.
    ///
    /// # Errors
    /// Says what is wrong with the address or the share.
    pub fn new(endpoint: &str, sample: f64) -> Result<Self, TraceError> {
        if !endpoint.strip_prefix("http://").is_some_and(|host| !host.is_empty()) {
            return Err(TraceError::Endpoint(endpoint.to_owned()));
        }
        if !(0.0..=1.0).contains(&sample) {
            return Err(TraceError::Sample(sample));
        }
        Ok(Self { endpoint: endpoint.to_owned(), sample })
    }
}

/// The place of a span in its trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    trace: [u8; 16],
    span: [u8; 8],
    sampled: bool,
}

/// A span that has not ended.
#[derive(Debug)]
struct Open {
    place: Place,
    parent: Option<[u8; 8]>,
    name: &'static str,
    begun: u64,
    attributes: Vec<KeyValue>,
    events: Vec<wire::Event>,
    failed: bool,
    /// Spans that this one follows.
    followed: Vec<Place>,
}

struct Tracer {
    sample: f64,
    ids: IdSource,
    open: Mutex<HashMap<u64, Open>>,
    sender: SyncSender<Item>,
}

static TRACER: OnceLock<Arc<Tracer>> = OnceLock::new();

thread_local! {
    /// The caller's place, between the arrival of a request and the creation of its span.
    static CALLER: Cell<Option<Place>> = const { Cell::new(None) };
}

/// Turns spans into traces.
pub struct TraceLayer(Arc<Tracer>);

/// Starts the exporter; the layer receives spans once it is part of a subscriber.
pub fn start<S>(options: &TraceOptions) -> std::io::Result<impl Layer<S> + use<S>>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let sender = export::start(&options.endpoint)?;
    let tracer =
        Arc::new(Tracer { sample: options.sample, ids: IdSource::default(), open: Mutex::default(), sender });
    let _ = TRACER.set(tracer.clone());
    let own =
        Targets::new().with_target("oscar_server", Level::DEBUG).with_target("oscar_engine", Level::DEBUG);
    Ok(TraceLayer(tracer).with_filter(own))
}

/// Sends all spans that have ended, within a limit.
pub fn flush(limit: Duration) {
    let Some(tracer) = TRACER.get() else { return };
    let (done, sent) = sync_channel(1);
    if tracer.sender.try_send(Item::Flush(done)).is_ok() {
        let _ = sent.recv_timeout(limit);
    }
}

/// A request arrived. Its span must be created next, on the same thread.
pub fn arrived(headers: &HeaderMap) {
    let caller = headers.get("traceparent").and_then(|value| parse(value.to_str().ok()?));
    CALLER.set(caller);
}

/// What a request's span says of it.
pub fn answered(span: &tracing::Span, method: &str, route: &str, status: u16) {
    let (Some(tracer), Some(id)) = (TRACER.get(), span.id()) else { return };
    tracer.with(&id, |open| {
        let text = |key: &str, value: &str| KeyValue::new(key, Value::String(value.to_owned()));
        open.attributes.push(text("http.request.method", method));
        open.attributes.push(text("http.route", route));
        open.attributes.push(KeyValue::new("http.response.status_code", Value::Int(status.into())));
        open.failed = status >= 500;
    });
}

/// Reads a W3C `traceparent`.
fn parse(value: &str) -> Option<Place> {
    crate::middleware::trace_id(value)?;
    let mut parts = value.split('-').skip(1);
    let (trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?);
    let (trace, span) = (u128::from_str_radix(trace, 16).ok()?, u64::from_str_radix(span, 16).ok()?);
    let sampled = u8::from_str_radix(flags, 16).ok()? & 1 == 1;
    (span != 0).then(|| Place { trace: trace.to_be_bytes(), span: span.to_be_bytes(), sampled })
}

impl Tracer {
    fn with<T>(&self, id: &Id, change: impl FnOnce(&mut Open) -> T) -> Option<T> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).get_mut(&id.into_u64()).map(change)
    }

    fn span_id(&self) -> [u8; 8] {
        (self.ids.noise() | 1).to_be_bytes()
    }

    /// The place of a new trace.
    fn root(&self) -> Place {
        let (high, low) = (self.ids.noise(), self.ids.noise() | 1);
        let sampled = (high as f64) < self.sample * 2f64.powi(64);
        let trace = (u128::from(high) << 64 | u128::from(low)).to_be_bytes();
        Place { trace, span: self.span_id(), sampled }
    }

    fn send(&self, open: &Open, place: Place, parent: Option<[u8; 8]>, end: u64) {
        if !place.sampled {
            return;
        }
        let span = wire::Span {
            trace_id: place.trace.to_vec(),
            span_id: place.span.to_vec(),
            parent_span_id: parent.map_or_else(Vec::new, |parent| parent.to_vec()),
            name: open.name.to_owned(),
            kind: if open.name == "http" { wire::KIND_SERVER } else { wire::KIND_INTERNAL },
            start_time_unix_nano: open.begun,
            end_time_unix_nano: end,
            attributes: open.attributes.clone(),
            events: open.events.clone(),
            status: open.failed.then_some(wire::Status { code: wire::STATUS_ERROR }),
        };
        // A full queue drops the span: the server does not wait.
        let _ = self.sender.try_send(Item::Span(Box::new(span)));
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for TraceLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let tracer = &self.0;
        let parent = match attributes.is_contextual() {
            true => context.current_span().id().cloned(),
            false => attributes.parent().cloned(),
        };
        let caller = CALLER.take().or_else(|| tracer.with(&parent?, |open| open.place));
        let place = match caller {
            Some(caller) => Place { span: tracer.span_id(), ..caller },
            None => tracer.root(),
        };
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let open = Open {
            place,
            parent: caller.map(|caller| caller.span),
            name: attributes.metadata().name(),
            begun: now(),
            attributes: fields.list,
            events: Vec::new(),
            failed: false,
            followed: Vec::new(),
        };
        tracer.open.lock().unwrap_or_else(PoisonError::into_inner).insert(id.into_u64(), open);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        values.record(&mut fields);
        self.0.with(id, |open| open.attributes.append(&mut fields.list));
    }

    fn on_follows_from(&self, id: &Id, follows: &Id, _: Context<'_, S>) {
        let Some(place) = self.0.with(follows, |open| open.place) else { return };
        self.0.with(id, |open| {
            if !open.followed.contains(&place) {
                open.followed.push(place);
            }
        });
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let Some(span) = context.event_span(event) else { return };
        let mut fields = Fields::default();
        event.record(&mut fields);
        let event = wire::Event {
            time_unix_nano: now(),
            name: fields.message.unwrap_or_else(|| event.metadata().name().to_owned()),
            attributes: fields.list,
        };
        self.0.with(&span.id(), |open| {
            if open.place.sampled && open.events.len() < MAX_EVENTS {
                open.events.push(event);
            }
        });
    }

    fn on_close(&self, id: Id, _: Context<'_, S>) {
        let closed = self.0.open.lock().unwrap_or_else(PoisonError::into_inner).remove(&id.into_u64());
        let Some(open) = closed else { return };
        let end = now();
        match open.name {
            "step" => {
                for followed in &open.followed {
                    let place = Place { span: self.0.span_id(), ..*followed };
                    self.0.send(&open, place, Some(followed.span), end);
                }
            }
            _ => self.0.send(&open, open.place, open.parent, end),
        }
    }
}

impl fmt::Debug for TraceLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TraceLayer").field("sample", &self.0.sample).finish()
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_nanos() as u64)
}

/// Collects the fields of a span or an event.
#[derive(Default)]
struct Fields {
    list: Vec<KeyValue>,
    message: Option<String>,
}

impl Fields {
    fn add(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::String(text)) => self.message = Some(text),
            (name, value) => self.list.push(KeyValue::new(name, value)),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, Value::String(format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, Value::String(value.to_owned()));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, Value::Bool(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, Value::Int(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, i64::try_from(value).map_or_else(|_| Value::String(value.to_string()), Value::Int));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, Value::Double(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traceparent_names_trace_parent_and_sampling() {
        let place = parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").unwrap();
        assert_eq!(place.trace[..2], [0x0a, 0xf7]);
        assert_eq!(place.span[6..], [0x33, 0x31]);
        assert!(place.sampled);
        assert!(!parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00").unwrap().sampled);
        assert_eq!(parse("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01"), None);
        assert_eq!(parse("x"), None);
    }

    #[test]
    fn addresses_and_shares_are_checked() {
        assert!(TraceOptions::new("http://127.0.0.1:4318", 1.0).is_ok());
        for (endpoint, sample) in
            [("https://x", 1.0), ("x:4318", 1.0), ("http://", 1.0), ("http://x", 1.5), ("http://x", f64::NAN)]
        {
            assert!(TraceOptions::new(endpoint, sample).is_err(), "{endpoint} {sample}");
        }
    }
}
