//! The one error of the HTTP side: a status, OpenAI's error object, and who is to blame.
//!
//! Invariant: a message says what was wrong and what to do; `param` names the request field where
//! there is one.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use oscar_engine::RequestError;
use oscar_text::TextError;
use serde_json::{Value, json};

/// Why a request was refused or failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ApiError {
    #[error("{message}")]
    Invalid { message: String, param: Option<String>, code: Option<&'static str> },
    #[error("no or wrong API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")]
    Unauthorized,
    #[error("{what} is only for operators: send the key of an operator, not that of the user `{name}`")]
    Forbidden { name: String, what: &'static str },
    #[error(
        "requests of web pages on `{origin}` are not accepted; the operator can allow the origin with --cors-origin"
    )]
    Origin { origin: String },
    #[error(
        "this server listens on a loopback address and is not known as `{host}`: use localhost, or let the operator \
         say --allowed-host"
    )]
    Host { host: String },
    #[error("the body must be JSON: send the header `Content-Type: application/json`")]
    NotJson,
    #[error(
        "the tenant has {held} {what} in flight and may have {limit}: {more} more do not fit; try again later"
    )]
    Quota { what: &'static str, held: usize, more: usize, limit: usize, retry_after: u64 },
    #[error("too much is being sent to this server at once; try again later")]
    BodiesInFlight { retry_after: u64 },
    #[error("all connections of this server are taken; try again later")]
    Connections { retry_after: u64 },
    #[error("the request took longer than {seconds} seconds, the server's limit")]
    RequestTimeout { seconds: u64 },
    #[error("the model `{model}` is not served here; GET /v1/models lists what is")]
    UnknownModel { model: String },
    #[error("there is no {method} {path}; GET /openapi.json lists the routes")]
    UnknownRoute { method: String, path: String },
    #[error("{path} does not take {method}; GET /openapi.json lists the routes")]
    MethodNotAllowed { method: String, path: String },
    #[error(
        "the body is larger than {limit} bytes, the server's limit: send less, or raise --max-body-bytes"
    )]
    BodyTooLarge { limit: usize },
    #[error("the body did not arrive within {seconds} seconds")]
    BodyTimeout { seconds: u64 },
    #[error("{error}")]
    Engine { error: RequestError, retry_after: u64 },
    #[error("the server failed: {0}")]
    Internal(String),
}

impl ApiError {
    /// A field of the request is wrong.
    pub fn param(param: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        let param = param.into();
        Self::Invalid { message: format!("{param}: {problem}"), param: Some(param), code: None }
    }

    /// The request as a whole is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::Invalid { message: message.into(), param: None, code: None }
    }

    /// A request that needs more than the tenant's whole quota: waiting does not help.
    pub fn beyond_quota(what: &str, needed: usize, limit: usize) -> Self {
        let message = format!(
            "the request needs {needed} {what} and the quota of this key is {what}={limit}: ask for less \
             (max_tokens, n, a shorter prompt), or let the operator raise the quota"
        );
        Self::Invalid { message, param: None, code: Some("quota_exceeded") }
    }

    /// The text crate refused the contents of a field.
    pub fn text(param: &str, error: &TextError) -> Self {
        match error {
            TextError::ReservedVariable { .. } => Self::param("chat_template_kwargs", error),
            TextError::EmptyStopString { .. } => Self::param("stop", error),
            _ => Self::param(param, error),
        }
    }

    pub fn status(&self) -> StatusCode {
        match self {
            Self::Invalid { .. } => StatusCode::BAD_REQUEST,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::Forbidden { .. } | Self::Origin { .. } => StatusCode::FORBIDDEN,
            Self::Host { .. } => StatusCode::MISDIRECTED_REQUEST,
            Self::NotJson => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Quota { .. } | Self::BodiesInFlight { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::Connections { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::RequestTimeout { .. } => StatusCode::GATEWAY_TIMEOUT,
            Self::UnknownModel { .. } | Self::UnknownRoute { .. } => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyTimeout { .. } => StatusCode::REQUEST_TIMEOUT,
            Self::Engine { error, .. } => match error {
                RequestError::QueueFull { .. } => StatusCode::TOO_MANY_REQUESTS,
                RequestError::ContextExceeded { .. }
                | RequestError::TooLarge { .. }
                | RequestError::Form { .. }
                | RequestError::Invalid { .. } => StatusCode::BAD_REQUEST,
                RequestError::ShuttingDown => StatusCode::SERVICE_UNAVAILABLE,
                RequestError::Engine(_) => StatusCode::INTERNAL_SERVER_ERROR,
            },
            Self::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// OpenAI's error object.
    pub fn to_json(&self) -> Value {
        let kind = match self.status() {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let (param, code): (Option<&str>, Option<&str>) = match self {
            Self::Invalid { param, code, .. } => (param.as_deref(), *code),
            Self::Unauthorized => (None, Some("invalid_api_key")),
            Self::Forbidden { .. } => (None, Some("operators_only")),
            Self::Origin { .. } => (None, Some("foreign_origin")),
            Self::Host { .. } => (None, Some("unknown_host")),
            Self::NotJson => (None, Some("not_json")),
            Self::Quota { .. } => (None, Some("quota_exceeded")),
            Self::BodiesInFlight { .. } => (None, Some("bodies_in_flight")),
            Self::Connections { .. } => (None, Some("too_many_connections")),
            Self::RequestTimeout { .. } => (None, Some("request_timeout")),
            Self::UnknownModel { .. } => (Some("model"), Some("model_not_found")),
            Self::UnknownRoute { .. } => (None, Some("unknown_route")),
            Self::MethodNotAllowed { .. } => (None, Some("method_not_allowed")),
            Self::BodyTooLarge { .. } => (None, Some("body_too_large")),
            Self::BodyTimeout { .. } => (None, Some("body_timeout")),
            Self::Engine { error, .. } => match error {
                RequestError::QueueFull { .. } => (None, Some("queue_full")),
                RequestError::ContextExceeded { .. } => (Some("max_tokens"), Some("context_length_exceeded")),
                RequestError::TooLarge { .. } => (None, Some("kv_cache_exceeded")),
                RequestError::Invalid { parameter, .. } => (Some(parameter), None),
                RequestError::Form { parameter, .. } => (Some(parameter), None),
                RequestError::ShuttingDown => (None, Some("shutting_down")),
                RequestError::Engine(_) => (None, Some("engine_error")),
            },
            Self::Internal(_) => (None, Some("internal_error")),
        };
        json!({"error": {"message": self.to_string(), "type": kind, "param": param, "code": code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        if let Self::Internal(_) | Self::Engine { error: RequestError::Engine(_), .. } = &self {
            tracing::error!(error = %self, "request failed");
        }
        let mut response = (self.status(), axum::Json(self.to_json())).into_response();
        // Layers can write the error in another form.
        response.extensions_mut().insert(self.clone());
        let headers = response.headers_mut();
        match &self {
            Self::Unauthorized => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            Self::Engine {
                error: RequestError::QueueFull { .. } | RequestError::ShuttingDown,
                retry_after,
            }
            | Self::Quota { retry_after, .. }
            | Self::BodiesInFlight { retry_after }
            | Self::Connections { retry_after } => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from(*retry_after));
            }
            _ => {}
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_errors_keep_their_words_and_get_the_right_status() {
        let cases = [
            (RequestError::QueueFull { waiting: 9 }, 429, "rate_limit_error"),
            (
                RequestError::ContextExceeded { prompt: 5, max_tokens: 6, context: 7 },
                400,
                "invalid_request_error",
            ),
            (RequestError::TooLarge { needed: 2, budget: 1 }, 400, "invalid_request_error"),
            (
                RequestError::Invalid { parameter: "top_p", problem: "is 3".to_owned() },
                400,
                "invalid_request_error",
            ),
            (RequestError::ShuttingDown, 503, "server_error"),
            (RequestError::Engine("x".to_owned()), 500, "server_error"),
        ];
        for (error, status, kind) in cases {
            let api = ApiError::Engine { error: error.clone(), retry_after: 3 };
            assert_eq!(api.status().as_u16(), status);
            assert_eq!(api.to_json()["error"]["type"], kind);
            assert_eq!(api.to_json()["error"]["message"], error.to_string());
            let response = api.into_response();
            let waits = response.headers().contains_key(header::RETRY_AFTER);
            assert_eq!(waits, status == 429 || status == 503, "{error}");
        }
    }
}
