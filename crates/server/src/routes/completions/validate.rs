//! What a plain completion may not say.

use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::routes::sampling::refuse_unless;

/// Fields that would silently change nothing if they were let through.
pub fn refuse_unsupported(body: &Map<String, Value>) -> Result<(), ApiError> {
    let n = body.get("n").and_then(Value::as_u64).unwrap_or(1);
    refuse_unless(
        body,
        "best_of",
        |value| value.as_u64() == Some(n),
        "ask for n choices and pick among them",
    )?;
    refuse_unless(body, "suffix", |value| value == "", "put everything into the prompt")?;
    refuse_unless(body, "use_beam_search", |value| value == false, "raise n instead")
}
