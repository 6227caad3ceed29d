//! Every case under every format, BF16 first. Recorded cases are not asked again.

use crate::cases::Case;
use crate::error::Result;
use crate::forms::Forms;
use crate::generate::{Answer, Generator, Job, first_divergence};
use crate::journal::Journal;
use crate::prompts::Prompts;
use crate::sandbox::Sandbox;
use oscar_text::Grammar;
use serde::{Deserialize, Serialize};

/// The name of the format that others are compared with.
pub const REFERENCE: &str = "bf16";

/// The result of a case under a format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub kv: String,
    /// Stored bits an element of the pages.
    pub bits: f64,
    pub task: String,
    pub context: usize,
    pub index: usize,
    pub seed: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<f64>,
    pub score: f64,
    pub prompt_tokens: usize,
    /// The model ended its answer itself.
    pub finished: bool,
    pub answer: String,
    /// The expected answer.
    #[serde(default)]
    pub expected: String,
    pub tokens: Vec<u32>,
    /// Whether the answer equals BF16's, token for token; absent for BF16 itself and for sampled
    /// answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub same_as_bf16: Option<bool>,
    /// Position of the first token that differs from BF16's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_divergence: Option<usize>,
}

/// A case's key under a format.
pub fn row_key(kv: &str, case: &Case) -> String {
    format!("{kv}/{}", case.key())
}

/// A format to measure: its name, its bits, and how its engine is started.
pub struct Method<'a> {
    pub kv: String,
    pub bits: f64,
    pub start: Box<dyn Fn() -> Result<Generator> + 'a>,
}

/// Answers all cases under all methods, in their order, and records each. Returns the rows by
/// method and case. `progress` is called with the method after each case.
pub fn run_cases(
    cases: &[Case],
    methods: &[Method<'_>],
    prompts: &Prompts<'_>,
    sandbox: Option<&Sandbox>,
    journal: &mut Journal,
    mut progress: impl FnMut(&str),
) -> Result<Vec<Vec<Row>>> {
    let mut all: Vec<Vec<Row>> = Vec::with_capacity(methods.len());
    for method in methods {
        let known: Vec<Option<Row>> =
            cases.iter().map(|case| journal.get(&row_key(&method.kv, case))).collect();
        let missing: Vec<usize> = (0..cases.len()).filter(|&i| known[i].is_none()).collect();
        (0..cases.len() - missing.len()).for_each(|_| progress(&method.kv));
        let mut rows = known;
        if !missing.is_empty() {
            let reference = all.first().filter(|_| methods[0].kv == REFERENCE);
            let generator = (method.start)()?;
            let forms = match missing.iter().any(|&i| cases[i].form.is_some()) {
                true => Some(generator.forms(prompts.tokenizer())?),
                false => None,
            };
            let jobs =
                missing.iter().map(|&i| job(&cases[i], forms.as_ref())).collect::<Result<Vec<Job>>>()?;
            generator.answer(&jobs, |job, answer| {
                let index = missing[job];
                let reference = reference.map(|rows| &rows[index]);
                let row = make_row(&cases[index], method, answer, reference, prompts, sandbox)?;
                journal.record(&row_key(&method.kv, &cases[index]), &row)?;
                rows[index] = Some(row);
                progress(&method.kv);
                Ok(())
            })?;
        }
        all.push(rows.into_iter().flatten().collect());
    }
    Ok(all)
}

fn job(case: &Case, forms: Option<&Forms>) -> Result<Job> {
    let form = case.form.as_ref().zip(forms);
    let constraint = form.map(|(regex, forms)| forms.constraint(&Grammar::Regex(regex.clone())));
    Ok(Job {
        name: case.key(),
        prompt: case.prompt.clone(),
        max_tokens: case.max_tokens,
        sampling: case.sampling.clone(),
        group: case.group,
        constraint: constraint.transpose()?,
    })
}

fn make_row(
    case: &Case,
    method: &Method<'_>,
    answer: Answer,
    reference: Option<&Row>,
    prompts: &Prompts<'_>,
    sandbox: Option<&Sandbox>,
) -> Result<Row> {
    let text = prompts.decode(&answer.tokens)?;
    // Sampled answers differ for many reasons; only greedy answers show the effect of the cache.
    let reference = reference.filter(|_| case.sampling.temperature == 0.0);
    let divergence = reference.map(|r| first_divergence(&answer.tokens, &r.tokens));
    Ok(Row {
        kv: method.kv.clone(),
        bits: method.bits,
        task: case.task.clone(),
        context: case.context,
        index: case.index,
        seed: case.seed,
        depth: case.depth,
        score: case.score(&text, sandbox)?,
        prompt_tokens: case.prompt.len(),
        finished: answer.finished,
        answer: text,
        expected: case.expected.text(),
        tokens: answer.tokens,
        same_as_bf16: divergence.map(|d| d.is_none()),
        first_divergence: divergence.flatten(),
    })
}

/// Results of one format, context and task together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    pub kv: String,
    pub bits: f64,
    pub context: usize,
    pub task: String,
    /// Mean score, 0 to 1: exact match, RULER's score or pass@1, depending on the task.
    pub accuracy: f64,
    pub n: usize,
    /// Share of answers that equal BF16's, token for token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub same_as_bf16: Option<f64>,
    /// Mean position of the first token that differs from BF16's, over answers that have one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_divergence: Option<f64>,
}

/// Groups rows by format, context and task, in order of first appearance.
pub fn summarize(rows: &[Row]) -> Vec<Summary> {
    let mut groups: Vec<Vec<&Row>> = Vec::new();
    for row in rows {
        let same = |g: &&mut Vec<&Row>| {
            let first = g[0];
            (&first.kv, first.context, &first.task) == (&row.kv, row.context, &row.task)
        };
        match groups.iter_mut().find(same) {
            Some(group) => group.push(row),
            None => groups.push(vec![row]),
        }
    }
    groups.iter().map(|group| summary(group)).collect()
}

fn summary(group: &[&Row]) -> Summary {
    let first = group[0];
    let mean =
        |values: Vec<f64>| (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64);
    Summary {
        kv: first.kv.clone(),
        bits: first.bits,
        context: first.context,
        task: first.task.clone(),
        accuracy: mean(group.iter().map(|r| r.score).collect()).unwrap_or(0.0),
        n: group.len(),
        same_as_bf16: mean(group.iter().filter_map(|r| r.same_as_bf16.map(f64::from)).collect()),
        first_divergence: mean(group.iter().filter_map(|r| r.first_divergence.map(|d| d as f64)).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(kv: &str, task: &str, score: f64, divergence: Option<Option<usize>>) -> Row {
        Row {
            kv: kv.into(),
            bits: 2.25,
            task: task.into(),
            context: 4096,
            index: 0,
            seed: 0,
            depth: None,
            score,
            prompt_tokens: 1,
            finished: true,
            answer: String::new(),
            expected: String::new(),
            tokens: vec![],
            same_as_bf16: divergence.map(|d| d.is_none()),
            first_divergence: divergence.flatten(),
        }
    }

    #[test]
    fn summaries_group_by_format_and_task() {
        let rows = [
            row("bf16", "copy", 1.0, None),
            row("oscar2", "copy", 1.0, Some(None)),
            row("oscar2", "vt", 0.0, Some(Some(3))),
            row("oscar2", "copy", 0.0, Some(Some(10))),
        ];
        let all = summarize(&rows);
        assert_eq!(all.len(), 3);
        assert_eq!((all[0].accuracy, all[0].same_as_bf16, all[0].first_divergence), (1.0, None, None));
        assert_eq!((all[1].accuracy, all[1].n), (0.5, 2));
        assert_eq!((all[1].same_as_bf16, all[1].first_divergence), (Some(0.5), Some(10.0)));
    }

    #[test]
    fn rows_survive_a_journal() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.jsonl");
        let wanted = row("oscar2", "vt", 0.25, Some(Some(3)));
        Journal::open(Some(&path), "x", &serde_json::json!({})).unwrap().record("k", &wanted).unwrap();
        let journal = Journal::open(Some(&path), "x", &serde_json::json!({})).unwrap();
        assert_eq!(journal.get::<Row>("k"), Some(wanted));
    }
}
