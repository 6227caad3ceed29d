//! The `usage` object of a response: the engine's counts as JSON.

use oscar_engine::{CachedByTier, KvUsage, Usage};
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
    /// There only if the rows of the conversation are capped.
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_details: Option<KvDetails>,
}

/// Rows of the conversation's cache, of each layer and head on average.
#[derive(Clone, Copy, Debug, Serialize)]
struct KvDetails {
    policy: &'static str,
    budget: usize,
    /// Tokens of the conversation.
    logical: usize,
    /// Rows of quantized history without a cap, and those that are kept.
    history: usize,
    kept: usize,
    /// Tokens of the prompt that are never evicted.
    protected: usize,
    compactions: usize,
    /// Tokens that the last view stands for; null while nothing was evicted.
    view: Option<usize>,
}

impl From<KvUsage> for KvDetails {
    fn from(kv: KvUsage) -> Self {
        let KvUsage { evict, budget, logical, history, kept, protected, compactions, view } = kv;
        Self { policy: evict.name(), budget, logical, history, kept, protected, compactions, view }
    }
}

#[derive(Clone, Copy, Debug, Serialize)]
struct PromptDetails {
    cached_tokens: usize,
    /// There only if it is so: the cached tokens ended in a tail that is held as code, so that the
    /// answer may differ from a cold one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    demoted_tail: bool,
    /// There only if a page store brought some of them back: where they were.
    #[serde(skip_serializing_if = "Option::is_none")]
    cached_tokens_by_tier: Option<TierTokens>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct TierTokens {
    /// In the prefix tree itself.
    tree: usize,
    ram: usize,
    disk: usize,
    /// In a server that machines share (Valkey, Redis or S3); there only if some were.
    #[serde(skip_serializing_if = "is_zero")]
    shared: usize,
    /// On another machine; there only if some were.
    #[serde(skip_serializing_if = "is_zero")]
    peer: usize,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

impl TierTokens {
    fn of(usage: &Usage) -> Option<Self> {
        let CachedByTier { ram, disk, shared, peer } = usage.by_tier;
        let elsewhere = ram + disk + shared + peer;
        let tree = usage.cached_tokens.saturating_sub(elsewhere);
        (elsewhere > 0).then_some(Self { tree, ram, disk, shared, peer })
    }
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
                cached_tokens_by_tier: TierTokens::of(&usage),
            },
            completion_tokens_details: CompletionDetails { reasoning_tokens },
            kv_details: usage.kv.map(KvDetails::from),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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

    #[test]
    fn tiers_are_told_if_a_store_helped() {
        let by_tier = CachedByTier { ram: 64, disk: 128, ..CachedByTier::default() };
        let usage = Usage { prompt_tokens: 300, cached_tokens: 256, by_tier, ..Usage::default() };
        let report = json!(UsageReport::from(Totals { usage, ..Totals::default() }));
        let tiers = &report["prompt_tokens_details"]["cached_tokens_by_tier"];
        assert_eq!(*tiers, json!({"tree": 64, "ram": 64, "disk": 128}));
    }
}
