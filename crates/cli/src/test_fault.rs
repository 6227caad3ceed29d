//! Faults for the tests of debug builds; release builds do not contain this module.
//!
//! `OSCAR_TEST_FAULT=device:N` fails the device from step N on, `hang:N` lets step N never end.

use oscar_backend::BackendError;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

static STEPS: AtomicUsize = AtomicUsize::new(0);

/// Called before each step.
pub fn strike() -> Result<(), BackendError> {
    static PLAN: OnceLock<Option<(String, usize)>> = OnceLock::new();
    let plan = PLAN.get_or_init(|| {
        let text = std::env::var("OSCAR_TEST_FAULT").ok()?;
        let (kind, step) = text.split_once(':')?;
        Some((kind.to_owned(), step.parse().ok()?))
    });
    let Some((kind, first)) = plan else { return Ok(()) };
    if STEPS.fetch_add(1, Ordering::Relaxed) < *first {
        return Ok(());
    }
    match kind.as_str() {
        "hang" => loop {
            std::thread::park();
        },
        _ => Err(BackendError::Device { device: "test".into(), why: "OSCAR_TEST_FAULT".into() }),
    }
}
