//! What happens around every handler: keys, origins, request ids and the access log.
//!
//! Invariant: every route but `/health` and `/ready` asks for a key once keys are configured,
//! unknown routes included. The web pages answer 401 as well, with the page as the body, since it
//! is where a browser's user can enter the key.

use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tracing::Instrument;

use crate::app::Shared;
use crate::error::ApiError;
use crate::keys::Caller;
use crate::origin;
use crate::routes::{self, Access, pages};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// The client's name for the request, or ours.
#[derive(Clone, Debug)]
pub struct RequestName(pub String);

/// Lets through who has a key, and marks the request with its [`Caller`].
pub async fn authenticate(State(app): State<Shared>, mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let access = routes::access(path);
    let caller = match app.config.keys.caller(request.headers()) {
        Some(caller) => caller,
        None if access == Access::Anyone => Caller::default(),
        None => {
            return match pages::unlocked(path).filter(|_| request.method() == Method::GET) {
                Some(page) => (StatusCode::UNAUTHORIZED, page).into_response(),
                None => ApiError::Unauthorized.into_response(),
            };
        }
    };
    if access == Access::Operators && !caller.is_operator() {
        return forbidden(&caller, "this route").into_response();
    }
    request.extensions_mut().insert(caller);
    next.run(request).await
}

/// Refuses operator routes to users.
pub fn forbidden(caller: &Caller, what: &'static str) -> ApiError {
    ApiError::Forbidden { name: caller.name().unwrap_or_default().to_owned(), what }
}

/// Answers preflight requests and marks responses for the origins that are allowed.
pub async fn cors(State(app): State<Shared>, request: Request, next: Next) -> Response {
    let origin = request.headers().get(header::ORIGIN).cloned();
    let allowed = origin.filter(|origin| origin::allows(&app.config.cors_origins, origin));
    let Some(origin) = allowed else { return next.run(request).await };
    let preflight = request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let asked_headers = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let mut response =
        if preflight { StatusCode::NO_CONTENT.into_response() } else { next.run(request).await };
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.append(header::VARY, HeaderValue::from_static("Origin"));
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("x-request-id"));
    if preflight {
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, OPTIONS"));
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("86400"));
        let fallback = HeaderValue::from_static("authorization, content-type, x-api-key, x-request-id");
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, asked_headers.unwrap_or(fallback));
    }
    response
}

/// Routes that web pages, scrapers and load balancers poll. Their lines in the access log have
/// level debug unless they fail, so that polling does not fill the log.
const POLLED: [&str; 4] = ["/internal/state", "/metrics", "/health", "/ready"];

/// Names the request, counts it and writes its line in the access log. Log lines of the handler and
/// of the engine are in the span made here.
pub async fn observe(State(app): State<Shared>, mut request: Request, next: Next) -> Response {
    let start = Instant::now();
    let name = given_name(request.headers()).unwrap_or_else(|| app.ids.name());
    let given = request.headers().get(TRACEPARENT).and_then(|value| value.to_str().ok());
    let trace = given.and_then(trace_id).map(str::to_owned);
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    request.extensions_mut().insert(RequestName(name.clone()));
    #[cfg(feature = "otel")]
    crate::otel::arrived(request.headers());
    let span = tracing::info_span!("http", request_id = name);
    let mut response = next.run(request).instrument(span.clone()).await;
    let status = response.status().as_u16();
    // The route, not the path: paths are the client's to invent, and each would be a new time
    // series.
    let route = response.extensions().get::<Route>().map_or("unknown", |route| route.0.as_str()).to_owned();
    app.metrics.http(method_label(&method), &route, status);
    #[cfg(feature = "otel")]
    crate::otel::answered(&span, method_label(&method), &route, status);
    drop(span);
    if app.config.access_log {
        let ms = start.elapsed().as_secs_f64() * 1000.0;
        macro_rules! log_line {
            ($level:ident) => {
                tracing::$level!(
                    target: "oscar_server::access",
                    method = %method, path, status, ms, request_id = name, trace_id = trace, "request"
                )
            };
        }
        match POLLED.contains(&route.as_str()) && status < 400 {
            true => log_line!(debug),
            false => log_line!(info),
        }
    }
    if let Ok(value) = HeaderValue::from_str(&name) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// The matched route, put on the response for [`observe`], which runs outside of the routing.
#[derive(Clone, Debug)]
struct Route(String);

/// Marks a response with the route that gave it.
pub async fn mark_route(matched: Option<MatchedPath>, request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    if let Some(matched) = matched {
        response.extensions_mut().insert(Route(matched.as_str().to_owned()));
    }
    response
}

fn method_label(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "POST" => "POST",
        "HEAD" => "HEAD",
        "OPTIONS" => "OPTIONS",
        _ => "other",
    }
}

/// A client's request id, if it is short and printable: it ends up in logs, headers and bodies.
fn given_name(headers: &HeaderMap) -> Option<String> {
    let name = headers.get(REQUEST_ID)?.to_str().ok()?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    (!name.is_empty() && name.len() <= 128 && name.bytes().all(plain)).then(|| name.to_owned())
}

/// The trace id of a W3C `traceparent`: version, 32 digits, 16 digits, flags.
pub fn trace_id(value: &str) -> Option<&str> {
    let mut parts = value.split('-');
    let hex = |part: &&str, digits: usize| {
        part.len() == digits && part.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    };
    parts.next().filter(|version| hex(version, 2) && *version != "ff")?;
    let trace = parts.next().filter(|trace| hex(trace, 32) && trace.bytes().any(|b| b != b'0'))?;
    parts.next().filter(|parent| hex(parent, 16))?;
    parts.next().filter(|flags| hex(flags, 2))?;
    Some(trace)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: HeaderName, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_static(value))])
    }

    #[test]
    fn only_harmless_request_ids_are_taken_over() {
        assert_eq!(given_name(&headers(REQUEST_ID, "a-b_C.9:1")).as_deref(), Some("a-b_C.9:1"));
        for wrong in ["", "a b", "<script>", "a\"b"] {
            assert_eq!(given_name(&headers(REQUEST_ID, wrong)), None, "{wrong}");
        }
    }

    #[test]
    fn traceparent_is_read_strictly() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        assert_eq!(trace_id(good), Some("0af7651916cd43dd8448eb211c80319c"));
        for wrong in [
            "",
            "00",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        ] {
            assert_eq!(trace_id(wrong), None, "{wrong}");
        }
    }
}
