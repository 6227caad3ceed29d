//! Steps that fail or panic.

use super::Serving;
use oscar_backend::{Backend, BackendError};
use oscar_runner::StepError;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A step that did not succeed.
pub(super) struct Failure {
    pub message: String,
    /// The device failed: its contents are lost.
    pub of_device: bool,
}

/// Runs what may fail or panic.
pub(super) fn caught(run: impl FnOnce() -> Result<(), StepError>) -> Result<(), Failure> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(outcome) => outcome.map_err(|error| Failure {
            of_device: matches!(error, StepError::Backend(BackendError::Device { .. })),
            message: error.to_string(),
        }),
        Err(panic) => Err(Failure { message: panic_message(&*panic), of_device: false }),
    }
}

pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let message = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("a step panicked: {}", message.unwrap_or("no message"))
}

impl<B: Backend> Serving<B> {
    /// Keeps the failure of a device; returns the message for the requests.
    pub(super) fn note_failure(&mut self, failure: Failure) -> String {
        if failure.of_device {
            self.device_failure = Some(failure.message.clone());
        }
        failure.message
    }
}
