//! The two pages for people. Both are static and hold no secret: what they show they fetch, with the user's key.

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};

/// Nothing from elsewhere is loaded, and no other site may frame the page.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
    connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The markup of a page, the script of both pages, and its own.
macro_rules! page {
    ($name:literal) => {
        Page(concat!(
            include_str!(concat!("../page/", $name, ".html")),
            "<script>\n",
            include_str!("../page/shared.js"),
            include_str!(concat!("../page/", $name, ".js")),
            "</script>\n</body>\n</html>\n",
        ))
    };
}

pub async fn chat() -> Page {
    page!("chat")
}

pub async fn docs() -> Page {
    page!("docs")
}

/// The page of a path, for those who have yet to enter their key in it.
pub fn unlocked(path: &str) -> Option<Page> {
    match path {
        "/" => Some(page!("chat")),
        "/docs" => Some(page!("docs")),
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
