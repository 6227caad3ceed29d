//! Completion requests that are refused.

use serde_json::Value;

use super::types::CompletionFields;
use crate::error::ApiError;
use crate::routes::sampling::refuse_unless;

/// Refuses fields that would silently change nothing if they were accepted.
pub fn refuse_unsupported(fields: &CompletionFields, choices: usize) -> Result<(), ApiError> {
    let is_n = |value: &Value| value.as_u64() == Some(choices as u64);
    refuse_unless("best_of", fields.best_of.as_ref(), is_n, "ask for n choices and pick among them")?;
    refuse_unless("suffix", fields.suffix.as_ref(), |value| value == "", "put everything into the prompt")
}
