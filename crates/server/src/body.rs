//! Reading a request's body without trusting its length.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Request};
use http_body_util::BodyExt;
use serde_json::{Map, Value};
use tokio::time::{Instant, timeout_at};

use crate::app::Shared;
use crate::error::ApiError;

/// A client that is told "too large" while it still sends would see a broken connection instead of the answer, so
/// this much more is read and thrown away first.
const DISCARD_BYTES: u64 = 256 << 20;
const DISCARD_TIME: Duration = Duration::from_secs(10);

/// The body's bytes, at most `max_body_bytes` of them.
pub struct RawBody(pub Bytes);

impl FromRequest<Shared> for RawBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Shared) -> Result<Self, ApiError> {
        read(request.into_body(), app.config.max_body_bytes, app.config.body_timeout).await.map(Self)
    }
}

async fn read(mut body: Body, limit: usize, patience: Duration) -> Result<Bytes, ApiError> {
    let deadline = Instant::now() + patience;
    let mut bytes: Vec<u8> = Vec::new();
    loop {
        let frame = match timeout_at(deadline, body.frame()).await {
            Err(_) => return Err(ApiError::BodyTimeout { seconds: patience.as_secs() }),
            Ok(None) => return Ok(bytes.into()),
            Ok(Some(Err(error))) => {
                return Err(ApiError::invalid(format!("the body could not be read: {error}")));
            }
            Ok(Some(Ok(frame))) => frame,
        };
        let Some(data) = frame.data_ref() else { continue };
        if bytes.len() + data.len() > limit {
            drop(bytes);
            discard(body).await;
            return Err(ApiError::BodyTooLarge { limit });
        }
        bytes.extend_from_slice(data);
    }
}

async fn discard(mut body: Body) {
    let deadline = Instant::now() + DISCARD_TIME;
    let mut thrown_away = 0u64;
    while let Ok(Some(Ok(frame))) = timeout_at(deadline, body.frame()).await {
        thrown_away += frame.data_ref().map_or(0, |data| data.len() as u64);
        if thrown_away > DISCARD_BYTES {
            break;
        }
    }
}

/// The JSON object in the body; an empty body counts as an empty object where the route needs nothing.
pub fn parse_object(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(ApiError::invalid("the body must be one JSON object")),
        Err(error) => Err(ApiError::Invalid {
            message: format!("the body is not valid JSON: {error}"),
            param: None,
            code: Some("invalid_json"),
        }),
    }
}

/// Runs work that grows with the body away from the threads that serve connections, as many at a time as there are
/// cores; small work stays.
pub async fn off_thread<T: Send + 'static>(
    app: &Shared,
    body_bytes: usize,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    const SMALL: usize = 16 << 10;
    if body_bytes <= SMALL {
        return work();
    }
    // Never closed, so the permit is always granted in the end.
    let _permit = app.heavy_work.acquire().await;
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(error) => Err(ApiError::Internal(format!("preparing the request: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_limit_is_exact_and_the_rest_is_read_away() {
        let patience = Duration::from_secs(5);
        assert_eq!(read(Body::from("abcd"), 4, patience).await.unwrap(), "abcd");
        let error = read(Body::from("abcde"), 4, patience).await.unwrap_err();
        assert_eq!(error, ApiError::BodyTooLarge { limit: 4 });
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for bytes in [&b""[..], b"[]", b"{", b"\xff\xfe", b"{\"a\":1e999}", b"nul"] {
            assert_eq!(parse_object(bytes).unwrap_err().status().as_u16(), 400, "{bytes:?}");
        }
        let deep = "[".repeat(100_000);
        assert!(parse_object(deep.as_bytes()).is_err());
        assert!(parse_object(b"{\"a\": null}").unwrap().contains_key("a"));
    }
}
