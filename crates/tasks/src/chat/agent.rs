//! Tasks of an agent: several calls of a tool, each with arguments that stand somewhere in a long
//! text.
//!
//! Texts and questions are those of the magic-number tasks, which the bundled model knows. What an
//! agent adds is that several answers must be exact one after the other, each in a given form.

use super::chars;
use super::retrieval::haystack;
use super::words::{ADJECTIVES, NOUNS};
use crate::random::uuid_text;
use crate::{Filler, Random, TaskError};
use std::collections::HashSet;

/// A family of agent tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AgentTask {
    /// Three calls, each with a number that the text gives for a name.
    Lookup,
    /// Two calls with ids (UUIDs) from the first quarter of the text; the first id names the second.
    CopyId,
    /// One call with four arguments.
    Arguments,
}

/// One call: the question before it and its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentStep {
    pub question: String,
    /// Names and values. A single argument has the name `value`.
    pub arguments: Vec<(String, String)>,
    /// A regular expression of any value.
    pub pattern: &'static str,
}

/// One generated case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentCase {
    /// What stands before the first question.
    pub text: String,
    pub steps: Vec<AgentStep>,
}

const NUMBER: &str = "[0-9]{7}";
const UUID: &str = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}";

impl AgentTask {
    const NAMES: [(Self, &'static str); 3] =
        [(Self::Lookup, "lookup"), (Self::CopyId, "copy_id"), (Self::Arguments, "arguments")];

    pub fn all() -> [Self; 3] {
        Self::NAMES.map(|(task, _)| task)
    }

    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }

    pub fn parse(name: &str) -> Result<Self, TaskError> {
        Self::all().into_iter().find(|task| task.name() == name).ok_or_else(|| TaskError::UnknownTask {
            name: name.to_owned(),
            known: Self::NAMES.map(|(_, name)| name).to_vec(),
        })
    }

    /// The case for this seed and budget in characters.
    pub fn case(self, seed: u64, budget: usize, filler: &dyn Filler) -> AgentCase {
        let random = &mut Random::new(self.name(), seed, budget as u64);
        let (what, share) = if self == Self::CopyId { ("uuid", 0.25) } else { ("number", 1.0) };
        let records = match self {
            Self::Lookup | Self::Arguments => numbers(random, 12),
            Self::CopyId => ids(random, 6),
        };
        let mut needles: Vec<String> = records
            .iter()
            .map(|(key, value)| format!("One of the special magic {what}s for {key} is: {value}."))
            .collect();
        random.shuffle(&mut needles);
        let size: usize = needles.iter().map(|needle| chars(needle)).sum();
        let hay = haystack(random, budget.saturating_sub(size), filler, &needles, share);
        let single = |(key, value): &(String, String)| AgentStep {
            question: format!("What is the special magic {what} for {key} mentioned in the text?"),
            arguments: vec![("value".to_owned(), value.clone())],
            pattern: if what == "uuid" { UUID } else { NUMBER },
        };
        let steps = match self {
            Self::Lookup => records[..3].iter().map(single).collect(),
            Self::CopyId => records[..2].iter().map(single).collect(),
            Self::Arguments => {
                let keys: Vec<&str> = records[..4].iter().map(|(key, _)| key.as_str()).collect();
                let question = format!(
                    "What are the special magic {what}s for {} mentioned in the text?",
                    keys.join(", ")
                );
                vec![AgentStep { question, arguments: records[..4].to_vec(), pattern: NUMBER }]
            }
        };
        let text = format!("Some special magic {what}s are hidden in the text. Memorize them.\n{hay}");
        AgentCase { text, steps }
    }
}

/// Distinct names with numbers.
fn numbers(random: &mut Random, count: usize) -> Vec<(String, String)> {
    let mut seen = HashSet::new();
    let mut records = Vec::with_capacity(count);
    while records.len() < count {
        let key = format!("{}-{}", random.choose(&ADJECTIVES), random.choose(&NOUNS));
        if seen.insert(key.clone()) {
            records.push((key, random.number(7)));
        }
    }
    records
}

/// Ids with ids; the value of the first is the key of the second.
fn ids(random: &mut Random, count: usize) -> Vec<(String, String)> {
    let mut fresh = || uuid_text(random.bits128());
    let mut records: Vec<(String, String)> = (0..count).map(|_| (fresh(), fresh())).collect();
    records[1].0 = records[0].1.clone();
    records
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GrammarFiller;

    #[test]
    fn every_argument_stands_in_the_text_once_and_ids_stand_early() {
        for task in AgentTask::all() {
            assert_eq!(AgentTask::parse(task.name()).unwrap(), task);
            for seed in 0..20 {
                let case = task.case(seed, 20_000, &GrammarFiller);
                assert_eq!(case, task.case(seed, 20_000, &GrammarFiller));
                for step in &case.steps {
                    for (name, value) in &step.arguments {
                        let sentence = format!("is: {value}.");
                        assert_eq!(case.text.matches(&sentence).count(), 1, "{}: {value}", task.name());
                        assert!(name == "value" || step.question.contains(name.as_str()));
                        let at = case.text.find(&sentence).unwrap();
                        assert!(task != AgentTask::CopyId || 2 * at < case.text.len(), "{at}");
                    }
                }
            }
            assert_ne!(task.case(1, 9000, &GrammarFiller), task.case(2, 9000, &GrammarFiller));
        }
        let chain = AgentTask::CopyId.case(3, 9000, &GrammarFiller);
        assert!(chain.steps[1].question.contains(&chain.steps[0].arguments[0].1));
        assert!(AgentTask::parse("x").is_err());
    }
}
