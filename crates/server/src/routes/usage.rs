//! The `usage` object of a response: the engine's counts as JSON.

use oscar_engine::{CachedByTier, KvRoute, KvUsage, Route, Usage};
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
    /// There only in post mode: the view that the turn read.
    #[serde(skip_serializing_if = "Option::is_none")]
    route: Option<&'static str>,
    /// The episode that it was made for; for a union the closer of the two.
    #[serde(skip_serializing_if = "Option::is_none")]
    episode: Option<usize>,
    /// Cosine between the last user message and the closest episode.
    #[serde(skip_serializing_if = "Option::is_none")]
    similarity: Option<f64>,
}

impl From<KvUsage> for KvDetails {
    fn from(kv: KvUsage) -> Self {
        let KvUsage { policy, budget, logical, history, kept, protected, compactions, view, route } = kv;
        let (route, episode, similarity) = match route {
            None => (None, None, None),
            Some(KvRoute::Full) => (Some("full"), None, None),
            Some(KvRoute::View { route, similarity }) => {
                let (name, episode) = match route {
                    Route::Episode(episode) => ("episode", Some(episode)),
                    Route::Union(closer, _) => ("union", Some(closer)),
                    Route::Global => ("global", None),
                };
                (Some(name), episode, similarity)
            }
        };
        let policy = policy.name();
        Self {
            policy,
            budget,
            logical,
            history,
            kept,
            protected,
            compactions,
            view,
            route,
            episode,
            similarity,
        }
    }
}

#[derive(Clone, Copy, Debug, Serialize)]
struct PromptDetails {
    cached_tokens: usize,
    /// There only if it is so: the cached tokens ended in a tail that is held as code, so that the
    /// answer may differ from a cold one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    approximate: bool,
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
                approximate: usage.approximate,
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
    fn an_approximate_hit_is_told_and_nothing_otherwise() {
        let usage = Usage { prompt_tokens: 70, cached_tokens: 64, completion_tokens: 3, ..Usage::default() };
        let mut totals = Totals { usage, ..Totals::default() };
        let details = |totals| json!(UsageReport::from(totals))["prompt_tokens_details"].clone();
        assert_eq!(details(totals), json!({"cached_tokens": 64}));
        let usage = Usage { approximate: true, ..Usage::default() };
        totals += Totals { usage, ..Totals::default() };
        assert_eq!(details(totals), json!({"cached_tokens": 64, "approximate": true}));
    }

    #[test]
    fn routes_are_told_in_post_mode_alone() {
        let (policy, budget, logical, history) = (oscar_engine::Eviction::Episodes, 128, 900, 700);
        let route = |route| KvRoute::View { route, similarity: Some(0.5) };
        let told = |route: Option<KvRoute>| {
            let kv = KvUsage {
                policy,
                budget,
                logical,
                history,
                kept: 200,
                protected: 9,
                compactions: 0,
                view: Some(640),
                route,
            };
            let details = json!(KvDetails::from(kv));
            json!([details["route"], details["episode"], details["similarity"]])
        };
        assert_eq!(told(None), json!([null, null, null]));
        assert_eq!(told(Some(KvRoute::Full)), json!(["full", null, null]));
        assert_eq!(told(Some(route(Route::Episode(2)))), json!(["episode", 2, 0.5]));
        assert_eq!(told(Some(route(Route::Union(3, 1)))), json!(["union", 3, 0.5]));
        assert_eq!(told(Some(route(Route::Global))), json!(["global", null, 0.5]));
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
