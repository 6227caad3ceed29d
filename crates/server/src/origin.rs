//! Protection against web pages that use a visitor's browser to reach the server.
//!
//! Three attacks are closed. A page elsewhere can send "simple" requests (text or form bodies)
//! without asking first, so requests with a body must be JSON and carry no foreign `Origin`. A page
//! whose name an attacker points at 127.0.0.1 counts as the same origin, so a server on a loopback
//! address accepts only loopback names in `Host`. A page can embed or sniff answers, so every
//! answer carries headers that forbid it.

use axum::body::HttpBody;
use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::app::Shared;
use crate::error::ApiError;
use crate::routes::{self, Access};

/// Refuses requests that only a hostile page would send.
pub async fn guard(State(app): State<Shared>, request: Request, next: Next) -> Response {
    match check(&app, &request) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

fn check(app: &Shared, request: &Request) -> Result<(), ApiError> {
    let headers = request.headers();
    let host = host(request);
    if app.loopback_only() && routes::access(request.uri().path()) != Access::Anyone {
        // A client that names no host is no browser.
        if let Some(host) = host.filter(|host| !is_known(host, app)) {
            return Err(ApiError::Host { host: host.to_owned() });
        }
    }
    if matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS) {
        return Ok(());
    }
    if let Some(origin) = headers.get(header::ORIGIN)
        && !allows(&app.config.cors_origins, origin)
        && !is_own(origin, host)
    {
        let origin = String::from_utf8_lossy(origin.as_bytes()).chars().take(100).collect();
        return Err(ApiError::Origin { origin });
    }
    match request.body().is_end_stream() || is_json(headers) {
        true => Ok(()),
        false => Err(ApiError::NotJson),
    }
}

/// The name the client used for the server.
fn host(request: &Request) -> Option<&str> {
    let header = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    header.or_else(|| request.uri().authority().map(Authority::as_str)).filter(|host| !host.is_empty())
}

fn is_known(host: &str, app: &Shared) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host().trim_start_matches('[').trim_end_matches(']');
    let loopback = name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    let named = |known: &str| known.eq_ignore_ascii_case(name);
    loopback
        || named("localhost")
        || named(&app.config.host)
        || app.config.allowed_hosts.iter().any(|h| named(h))
}

/// Whether the origin is in the operator's list.
pub fn allows(list: &[String], origin: &HeaderValue) -> bool {
    list.iter().any(|allowed| allowed == "*" || allowed.as_bytes() == origin.as_bytes())
}

/// Whether the origin is this server itself, under the name that the client used.
fn is_own(origin: &HeaderValue, host: Option<&str>) -> bool {
    let authority = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, rest)| rest);
    authority.zip(host).is_some_and(|(origin, host)| origin.eq_ignore_ascii_case(host))
}

fn is_json(headers: &HeaderMap) -> bool {
    let Some(kind) = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()) else {
        return false;
    };
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"))
}

/// Sets the protective headers that an answer does not have yet.
pub async fn harden(request: Request, next: Next) -> Response {
    const HEADERS: [(HeaderName, &str); 6] = [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"),
        (header::CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    let mut response = next.run(request).await;
    for (name, value) in HEADERS {
        response.headers_mut().entry(name).or_insert(HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_origins_are_told_from_foreign_ones() {
        let own = |origin: &'static str, host| is_own(&HeaderValue::from_static(origin), Some(host));
        assert!(own("http://127.0.0.1:8000", "127.0.0.1:8000"));
        assert!(own("https://Api.example", "api.example"));
        for foreign in
            ["null", "http://evil.example", "http://127.0.0.1:80001", "http://127.0.0.1", "127.0.0.1:8000"]
        {
            assert!(!own(foreign, "127.0.0.1:8000"), "{foreign}");
        }
    }

    #[test]
    fn json_is_known_by_its_type() {
        let json = |kind: &'static str| {
            is_json(&HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_static(kind))]))
        };
        assert!(
            json("application/json") && json("Application/JSON; charset=utf-8") && json("application/x+json")
        );
        for other in
            ["text/plain", "application/x-www-form-urlencoded", "text/json", "multipart/form-data", ""]
        {
            assert!(!json(other), "{other}");
        }
        assert!(!is_json(&HeaderMap::new()));
    }
}
