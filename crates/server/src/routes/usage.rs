//! The `usage` object of a response: the engine's counts as JSON.

use serde::Serialize;

use crate::generate::Totals;

#[derive(Clone, Copy, Debug, Serialize)]
pub struct UsageReport {
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
    /// There only if it is so: the cached tokens ended in a tail that is held as code, so that the
    /// answer may differ from a cold one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    demoted_tail: bool,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct CompletionDetails {
    reasoning_tokens: usize,
}

impl From<Totals> for UsageReport {
    fn from(Totals { usage, reasoning_tokens }: Totals) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details: PromptDetails {
                cached_tokens: usage.cached_tokens,
                demoted_tail: usage.demoted_tail,
            },
            completion_tokens_details: CompletionDetails { reasoning_tokens },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_engine::Usage;
    use serde_json::json;

    #[test]
    fn a_demoted_tail_is_told_and_nothing_otherwise() {
        let usage = Usage { prompt_tokens: 70, cached_tokens: 64, completion_tokens: 3, ..Usage::default() };
        let mut totals = Totals { usage, ..Totals::default() };
        let details = |totals| json!(UsageReport::from(totals))["prompt_tokens_details"].clone();
        assert_eq!(details(totals), json!({"cached_tokens": 64}));
        let usage = Usage { demoted_tail: true, ..Usage::default() };
        totals += Totals { usage, ..Totals::default() };
        assert_eq!(details(totals), json!({"cached_tokens": 64, "demoted_tail": true}));
    }
}
