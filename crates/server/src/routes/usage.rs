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
    /// There only if it is so: the cached tokens ended in a tail that is held as code, so that the answer may differ
    /// from a cold one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    demoted_tail: bool,
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
            prompt_tokens_details: PromptDetails {
                cached_tokens: totals.cached,
                demoted_tail: totals.demoted_tail,
            },
            completion_tokens_details: CompletionDetails { reasoning_tokens: totals.reasoning },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_demoted_tail_is_told_and_nothing_otherwise() {
        let mut totals = Totals { prompt: 70, cached: 64, completion: 3, ..Totals::default() };
        let details = |totals| json!(Usage::from(totals))["prompt_tokens_details"].clone();
        assert_eq!(details(totals), json!({"cached_tokens": 64}));
        totals += Totals { demoted_tail: true, ..Totals::default() };
        assert_eq!(details(totals), json!({"cached_tokens": 64, "demoted_tail": true}));
    }
}
