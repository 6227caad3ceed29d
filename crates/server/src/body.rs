//! Reading a request's body without trusting its length or its sender's pace, and work that grows
//! with it.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Extension, FromRequest, Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use serde::Serialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

use crate::app::{App, Shared};
use crate::error::ApiError;
use crate::json::{Bounded, Budget};
use crate::keys::Caller;
use crate::middleware::RequestName;
use crate::refused;
use crate::schema::Field;

/// Bodies up to this size do not count against the bytes in flight, so that large ones cannot keep
/// small ones out.
const UNCOUNTED: usize = 64 << 10;

/// A body may take this long, and a second more for every [`RATE`] bytes that have come.
const GRACE: Duration = Duration::from_secs(15);
const RATE: usize = 64 << 10;

/// The body's bytes, and the permit that counts them among all bodies in flight.
#[derive(Debug)]
pub struct RawBody {
    bytes: Bytes,
    _reservation: Option<OwnedSemaphorePermit>,
}

impl RawBody {
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl FromRequest<Shared> for RawBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Shared) -> Result<Self, ApiError> {
        let limit = app.limits.body_bytes;
        // Refused before anything is read; the connection reads the rest away.
        if stated_length(request.headers()).is_some_and(|length| length > limit as u64) {
            return Err(ApiError::BodyTooLarge { limit });
        }
        read(app, request.into_body(), limit, app.config.body_timeout).await
    }
}

/// A request for an answer of the model.
pub struct Asked {
    pub app: Shared,
    pub name: String,
    pub caller: Caller,
    pub body: RawBody,
}

impl FromRequest<Shared> for Asked {
    type Rejection = Response;

    async fn from_request(request: Request, app: &Shared) -> Result<Self, Response> {
        type Parts = (State<Shared>, Extension<RequestName>, Extension<Caller>, RawBody);
        let (State(app), Extension(RequestName(name)), Extension(caller), body) =
            Parts::from_request(request, app).await?;
        Ok(Self { app, name, caller, body })
    }
}

fn stated_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

async fn read(app: &App, mut body: Body, limit: usize, patience: Duration) -> Result<RawBody, ApiError> {
    let begun = Instant::now();
    // A stated length is within the limit. Memory that no byte has reached costs nothing.
    let stated = usize::try_from(body.size_hint().lower()).unwrap_or(limit);
    let mut bytes: Vec<u8> = Vec::with_capacity(stated.min(limit));
    let mut reservation = None;
    loop {
        let earned = GRACE + Duration::from_secs((bytes.len() / RATE) as u64);
        let frame = match timeout_at(begun + patience.min(earned), body.frame()).await {
            Err(_) => return Err(ApiError::BodyTimeout { seconds: begun.elapsed().as_secs() }),
            Ok(None) => return Ok(RawBody { bytes: bytes.into(), _reservation: reservation }),
            Ok(Some(Err(error))) => {
                return Err(ApiError::invalid(format!("the body could not be read: {error}")));
            }
            Ok(Some(Ok(frame))) => frame,
        };
        let Some(data) = frame.data_ref() else { continue };
        let length = bytes.len() + data.len();
        if length > limit {
            return Err(ApiError::BodyTooLarge { limit });
        }
        reserve(app, &mut reservation, length)?;
        bytes.extend_from_slice(data);
    }
}

/// Reserves `length` bytes in all, if they are many.
fn reserve(app: &App, held: &mut Option<OwnedSemaphorePermit>, length: usize) -> Result<(), ApiError> {
    if length <= UNCOUNTED {
        return Ok(());
    }
    let more = App::body_permits(length) - held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
    let full = |_| ApiError::BodiesInFlight { retry_after: app.config.retry_after_seconds };
    let more = app.bodies.clone().try_acquire_many_owned(more as u32).map_err(full)?;
    match held {
        Some(held) => held.merge(more),
        None => *held = Some(more),
    }
    Ok(())
}

/// Most time that the rest of a body may take which nobody reads.
const REST_TIME: Duration = Duration::from_secs(1);

/// Reads a body away that nobody has read, because the request was answered before: an HTTP/1
/// connection with an unread body cannot be used again. If there is too much, the answer says that the
/// connection ends.
pub async fn read_away(request: Request, next: Next) -> Response {
    // Reading would ask the client for the body.
    let waits = request.headers().contains_key(header::EXPECT);
    let unread = Arc::new(Mutex::new(None));
    let lend = |body| Body::new(Lent { body: Some(body), unread: unread.clone() });
    let mut response = next.run(request.map(lend)).await;
    let rest = unread.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(rest) = rest
        && (waits || !is_short(rest).await)
    {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Reads a body to its end, if that is near.
async fn is_short(mut rest: Body) -> bool {
    if rest.size_hint().lower() > UNCOUNTED as u64 {
        return false;
    }
    let reading = async {
        let mut read = 0;
        while let Some(frame) = rest.frame().await {
            read += frame.ok()?.data_ref().map_or(0, Bytes::len);
            if read > UNCOUNTED {
                return None;
            }
        }
        Some(())
    };
    matches!(timeout(REST_TIME, reading).await, Ok(Some(())))
}

/// A body that comes back if it is dropped before its end.
struct Lent {
    body: Option<Body>,
    unread: Arc<Mutex<Option<Body>>>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        let rest = self.body.take().filter(|body| !body.is_end_stream());
        *self.unread.lock().unwrap_or_else(PoisonError::into_inner) = rest;
    }
}

impl HttpBody for Lent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(context),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(Body::size_hint).unwrap_or_default()
    }
}

/// The JSON object in the body, reduced to the fields that `tables` describe: others are skipped,
/// not stored. Their values may take `memory` bytes.
pub fn parse_object(
    bytes: &[u8],
    tables: &[&[Field]],
    memory: usize,
) -> Result<Map<String, Value>, ApiError> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let budget = Budget::new(memory);
    let fields = KnownFields { tables, budget: &budget };
    let parsed = fields.deserialize(&mut reader).and_then(|object| reader.end().map(|()| object));
    let mut object = parsed.map_err(|error| match error.to_string() {
        _ if budget.is_spent() => ApiError::invalid(format!(
            "the values of the body take more than {memory} bytes of memory, the server's limit: send less"
        )),
        error if error.starts_with("recursion limit exceeded") => ApiError::invalid(
            "the body's values are nested deeper than 128 levels, the limit: send flatter ones",
        ),
        error => ApiError::Invalid {
            message: format!("the body is not valid JSON: {error}"),
            param: None,
            code: Some("invalid_json"),
        },
    })?;
    refused::check(&mut object, tables)?;
    Ok(object)
}

/// Reads an object and keeps the fields that are described and not ignored, and those that may have
/// to be refused.
struct KnownFields<'a> {
    tables: &'a [&'a [Field]],
    budget: &'a Budget,
}

impl<'de> DeserializeSeed<'de> for KnownFields<'_> {
    type Value = Map<String, Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for KnownFields<'_> {
    type Value = Map<String, Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("one JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = Map::new();
        while let Some(name) = map.next_key::<String>()? {
            match self.tables.iter().copied().flatten().find(|field| field.name == name) {
                Some(field) if !field.is_ignored() => {
                    fields.insert(name, map.next_value_seed(Bounded(self.budget))?);
                }
                None if refused::is_refused(self.tables, &name) => {
                    fields.insert(name, map.next_value_seed(Bounded(self.budget))?);
                }
                found => {
                    if found.is_none() {
                        refused::skip();
                    }
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(fields)
    }
}

/// Work of at most this size is done where it is; see [`off_thread`].
const SMALL: usize = 16 << 10;

/// Runs work that grows with the body away from the threads that serve connections, as many at a
/// time as there are cores; small work stays. The work keeps its permit and its body until it
/// really ends, also when the client has gone.
pub async fn off_thread<T: Send + 'static>(
    app: &Shared,
    body: RawBody,
    work: impl FnOnce(&App, &[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let (worker, size) = (app.clone(), body.bytes.len());
    run(&app.heavy_work, size, "preparing the request", move || {
        let outcome = work(&worker, &body.bytes);
        drop(body);
        outcome
    })
    .await
}

/// Runs the same kind of work for a request that came without a body.
pub async fn prepared<T: Send + 'static>(
    app: &Shared,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    run(&app.heavy_work, usize::MAX, "preparing the request", work).await
}

/// Writes an answer as JSON; one of `size` bytes or more, by a guess, away from the threads that
/// serve connections.
pub async fn json_answer<T: Serialize + Send + 'static>(
    app: &Shared,
    size: usize,
    answer: T,
) -> Result<Response, ApiError> {
    let failed = |error| ApiError::Internal(format!("writing the answer: {error}"));
    let text =
        run(&app.heavy_work, size, "writing the answer", move || serde_json::to_vec(&answer).map_err(failed))
            .await?;
    let kind = HeaderValue::from_static("application/json");
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

async fn run<T: Send + 'static>(
    heavy_work: &Arc<Semaphore>,
    size: usize,
    what: &str,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if size <= SMALL {
        return work();
    }
    // Never closed, so the permit is always granted in the end.
    let permit = heavy_work.clone().acquire_owned().await;
    let working = tokio::task::spawn_blocking(move || {
        let outcome = work();
        drop(permit);
        outcome
    });
    match working.await {
        Ok(outcome) => outcome,
        Err(error) => Err(ApiError::Internal(format!("{what}: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::Kind;

    const TABLE: &[Field] = &[
        Field { name: "a", kind: Kind::Any, about: "", required: false },
        Field { name: "user", kind: Kind::Ignored, about: "", required: false },
    ];

    #[test]
    fn what_is_no_object_is_refused() {
        for bytes in [&b""[..], b"[]", b"{", b"\xff\xfe", b"{\"a\":1e999}", b"nul", b"{} x", b"\"a\""] {
            assert_eq!(
                parse_object(bytes, &[TABLE], 1 << 20).unwrap_err().status().as_u16(),
                400,
                "{bytes:?}"
            );
        }
        let nested = format!("{{\"a\": {}{}}}", "[".repeat(200), "]".repeat(200));
        let error = parse_object(nested.as_bytes(), &[TABLE], 1 << 20).unwrap_err();
        assert!(error.to_string().contains("nested deeper than 128 levels"), "{error}");
        let deep = "[".repeat(100_000);
        assert!(parse_object(deep.as_bytes(), &[TABLE], 1 << 20).is_err());
        assert!(parse_object(format!("{{\"b\": {deep}").as_bytes(), &[TABLE], 1 << 20).is_err());
        assert!(parse_object(b"{\"a\": null}", &[TABLE], 1 << 20).unwrap().contains_key("a"));
    }

    #[test]
    fn only_described_fields_are_kept() {
        let body = br#"{"a": 1, "b": [{"c": 2}], "user": {"x": 1}, "a": 2}"#;
        assert_eq!(
            Value::Object(parse_object(body, &[TABLE], 1 << 20).unwrap()),
            serde_json::json!({"a": 2})
        );
    }

    #[tokio::test]
    async fn work_keeps_its_permit_when_the_client_leaves() {
        let permits = Arc::new(Semaphore::new(1));
        let (go_on, gate) = std::sync::mpsc::channel::<()>();
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let work = run(&permits, SMALL + 1, "waiting", move || {
            let _ = begun.send(());
            let _ = gate.recv();
            Ok(())
        });
        // The request is dropped while its work runs.
        tokio::select! {
            _ = work => panic!("the work cannot have ended"),
            _ = has_begun => {}
        }
        assert_eq!(permits.available_permits(), 0);
        drop(go_on);
        let _ended = permits.acquire().await.unwrap();
    }
}
