//! Results of many conversations together.

use super::{Outcome, Unit, cases::ConversationCase};
use serde::{Deserialize, Serialize};

/// One policy at one budget: a variant of conversations, or all that have answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConversationRow {
    pub kv: String,
    /// `none` for the whole cache.
    pub policy: String,
    /// Share of the history that is kept; 1 for the whole cache.
    pub rows: f64,
    pub context: usize,
    /// The variant, or `all`.
    pub task: String,
    /// Share of right answers.
    pub accuracy: f64,
    /// Mean divergence from the whole cache over the tokens of the right answers.
    pub kl: f64,
    /// Questions that have an answer; for `absent`, those that have none.
    pub n: usize,
    /// The budget, in percent of the history's `unit`.
    pub percent: f64,
    /// `rows` or `bytes`.
    pub unit: Unit,
    /// Mean share of the rows of the asked facts that a head keeps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub survival: Option<f64>,
    /// Share of questions without an answer that got no value of the conversation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub abstention: Option<f64>,
    /// Mean tokens of the answers to questions that have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length: Option<f64>,
    /// Mean bytes of the history as a question reads it.
    pub bytes: f64,
    /// Mean bytes of all views of a conversation together.
    pub held: f64,
    /// Mean tokens computed to score a history.
    pub probe_tokens: f64,
    /// Share of questions whose view was made for the episode that tells the answer, of those that
    /// were not asked of the global view.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routed: Option<f64>,
    /// Questions asked of one episode, of two together, and of the global view.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routes: Option<[usize; 3]>,
}

/// Rows by policy and budget, in order of first appearance: each variant, then all together.
pub fn summarize(kv: &str, results: &[(&ConversationCase, Vec<Outcome>)]) -> Vec<ConversationRow> {
    let mut keys: Vec<(usize, &str, Unit, f64)> = Vec::new();
    for (case, outcomes) in results {
        for outcome in outcomes {
            let key = (case.context, outcome.policy.as_str(), outcome.unit, outcome.percent);
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
    }
    let mut variants: Vec<&str> = Vec::new();
    for (case, _) in results {
        if !variants.contains(&case.variant.name()) {
            variants.push(case.variant.name());
        }
    }
    let mut rows = Vec::new();
    for (context, policy, unit, percent) in keys {
        for task in variants.iter().copied().chain(["all"]) {
            let of_task = |case: &ConversationCase| task == "all" || case.variant.name() == task;
            let outcomes: Vec<&Outcome> = results
                .iter()
                .filter(|(case, _)| case.context == context && of_task(case))
                .flat_map(|(_, outcomes)| outcomes)
                .filter(|o| (o.policy.as_str(), o.unit, o.percent) == (policy, unit, percent))
                .collect();
            rows.extend(row(kv, context, task, &outcomes));
        }
    }
    rows
}

fn row(kv: &str, context: usize, task: &str, outcomes: &[&Outcome]) -> Option<ConversationRow> {
    let first = outcomes.first()?;
    let count = |value: fn(&Outcome) -> usize| outcomes.iter().map(|o| value(o)).sum::<usize>();
    let sum = |value: fn(&Outcome) -> f64| outcomes.iter().map(|o| value(o)).sum::<f64>();
    let asked = count(|o| o.asked);
    let share = |part: f64, of: usize| part / of.max(1) as f64;
    let some = |part: f64, of: usize| (of > 0).then(|| share(part, of));
    let (needing, unanswerable) = (count(|o| o.needing), count(|o| o.unanswerable));
    let routes = [count(|o| o.routes[0]), count(|o| o.routes[1]), count(|o| o.routes[2])];
    Some(ConversationRow {
        kv: kv.to_owned(),
        policy: first.policy.clone(),
        rows: share(sum(|o| o.rows), outcomes.len()),
        context,
        task: task.to_owned(),
        accuracy: share(count(|o| o.right) as f64, asked),
        kl: share(sum(|o| o.kl), asked),
        n: if asked > 0 { asked } else { unanswerable },
        percent: first.percent,
        unit: first.unit,
        survival: some(sum(|o| o.survival), needing),
        abstention: some(count(|o| o.abstained) as f64, unanswerable),
        length: some(count(|o| o.free_tokens) as f64, unanswerable),
        bytes: share(sum(|o| o.bytes as f64), outcomes.len()),
        held: share(sum(|o| o.held as f64), outcomes.len()),
        probe_tokens: share(sum(|o| o.probe_tokens as f64), outcomes.len()),
        routed: some(count(|o| o.routed_right) as f64, count(|o| o.routed)),
        routes: (routes != [0; 3]).then_some(routes),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Journal;
    use crate::conversations::{CaseOutcomes, FULL};
    use oscar_tasks::chat::sessions::Variant;

    fn outcome(policy: &str, right: usize) -> Outcome {
        Outcome {
            policy: policy.into(),
            percent: 25.0,
            rows: 0.25,
            unit: Unit::Rows,
            bytes: 1000,
            held: 3000,
            probe_tokens: 64,
            asked: 8,
            right,
            kl: 0.8,
            survival: 2.0,
            needing: 8,
            unanswerable: 0,
            abstained: 0,
            free_tokens: 0,
            routed: 4,
            routed_right: 3,
            routes: [3, 1, 4],
        }
    }

    fn case(variant: Variant, seed: u64) -> ConversationCase {
        let (history, protected, utterances, asks) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        ConversationCase { variant, context: 4096, seed, history, protected, utterances, asks }
    }

    #[test]
    fn rows_are_means_over_questions_by_variant_and_together() {
        let cases = [case(Variant::Sessions, 0), case(Variant::Update, 0), case(Variant::Absent, 0)];
        let absent =
            Outcome { asked: 0, right: 0, kl: 0.0, needing: 0, survival: 0.0, ..outcome("kvzip", 0) };
        let absent =
            Outcome { unanswerable: 4, abstained: 1, free_tokens: 10, routed: 0, routed_right: 0, ..absent };
        let results = [
            (&cases[0], vec![outcome(FULL, 8), outcome("kvzip", 6)]),
            (&cases[1], vec![outcome(FULL, 8), outcome("kvzip", 4)]),
            (&cases[2], vec![absent]),
        ];
        let rows = summarize("oscar", &results);
        let of = |policy: &str, task: &str| rows.iter().find(|r| r.policy == policy && r.task == task);
        let all = of("kvzip", "all").unwrap();
        assert_eq!((all.accuracy, all.n, all.survival), (0.625, 16, Some(0.25)));
        assert!((all.kl - 0.1).abs() < 1e-12);
        assert_eq!((all.abstention, all.length), (Some(0.25), Some(2.5)));
        assert_eq!((all.routed, all.routes, all.held), (Some(0.75), Some([9, 3, 12]), 3000.0));
        assert_eq!(of("kvzip", "update").map(|row| row.accuracy), Some(0.5));
        assert_eq!(of("kvzip", "absent").map(|row| (row.n, row.abstention)), Some((4, Some(0.25))));
        assert_eq!(of(FULL, "sessions").map(|row| (row.accuracy, row.rows)), Some((1.0, 0.25)));
        let json = serde_json::to_value(all).unwrap();
        for field in ["kv", "policy", "rows", "context", "accuracy", "kl", "n"] {
            assert!(json.get(field).is_some(), "{field}");
        }
    }

    #[test]
    fn outcomes_survive_a_journal() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.jsonl");
        let wanted = CaseOutcomes { outcomes: vec![outcome("h2o", 3), outcome("tova", 2)] };
        Journal::open(Some(&path), "x", &serde_json::json!({})).unwrap().record("k", &wanted).unwrap();
        let journal = Journal::open(Some(&path), "x", &serde_json::json!({})).unwrap();
        assert_eq!(journal.get::<CaseOutcomes>("k"), Some(wanted));
    }
}
