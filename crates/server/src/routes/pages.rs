//! The two pages for people. Both are static and hold no secret: what they show they fetch, with the user's key.

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};

/// Nothing from elsewhere is loaded, and no other site may frame the page.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
    connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub async fn chat() -> Page {
    Page(include_str!("../page/chat.html"))
}

pub async fn docs() -> Page {
    Page(include_str!("../page/docs.html"))
}

/// The page of a path, for those who have yet to enter their key in it.
pub fn unlocked(path: &str) -> Option<Page> {
    match path {
        "/" => Some(Page(include_str!("../page/chat.html"))),
        "/docs" => Some(Page(include_str!("../page/docs.html"))),
        _ => None,
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Page(&'static str);

impl IntoResponse for Page {
    fn into_response(self) -> Response {
        let headers: [(HeaderName, HeaderValue); 5] = [
            (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
            (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
            (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
            (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
            (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        ];
        (headers, self.0).into_response()
    }
}
