//! The `usage` object.

use serde::Serialize;

use crate::generate::Totals;

#[derive(Clone, Copy, Debug, Serialize)]
pub struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    /// Always there: a miss is 0, not silence.
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct PromptDetails {
    cached_tokens: usize,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct CompletionDetails {
    reasoning_tokens: usize,
}

impl From<Totals> for Usage {
    fn from(totals: Totals) -> Self {
        Self {
            prompt_tokens: totals.prompt,
            completion_tokens: totals.completion,
            total_tokens: totals.prompt + totals.completion,
            prompt_tokens_details: PromptDetails { cached_tokens: totals.cached },
            completion_tokens_details: CompletionDetails { reasoning_tokens: totals.reasoning },
        }
    }
}
