//! Panics: counted wherever they happen, answered with 500 when they happen in a handler.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::error::ApiError;

static PANICS: AtomicU64 = AtomicU64::new(0);

/// Panics of the process since [`watch`].
pub fn count() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

/// Counts every panic of the process from now on; the previous panic hook still runs.
pub fn watch() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.fetch_add(1, Ordering::Relaxed);
            before(info);
        }));
    });
}

/// Answers 500 where a handler panics; without it the client would see a closed connection.
pub async fn catch(request: Request, next: Next) -> Response {
    let mut handler = pin!(next.run(request));
    poll_fn(|context| {
        let polled = catch_unwind(AssertUnwindSafe(|| handler.as_mut().poll(context)));
        polled.unwrap_or_else(|panic| {
            let problem = format!("a handler panicked: {}", message(&*panic));
            Poll::Ready(ApiError::Internal(problem).into_response())
        })
    })
    .await
}

/// The words of a panic.
pub fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Router;
    use axum::body::Body;
    use axum::middleware::from_fn;
    use axum::routing::get;
    use tower::ServiceExt;

    #[tokio::test]
    async fn a_panic_in_a_handler_is_500_and_counted() {
        async fn fail() -> &'static str {
            panic!("on purpose")
        }
        watch();
        let before = count();
        let router: Router = Router::new().route("/", get(fail)).layer(from_fn(catch));
        let answer = router.oneshot(Request::get("/").body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(answer.status(), 500);
        assert_eq!(count(), before + 1);
    }
}
