//! Benchmarks whose problems the user supplies: HumanEval, MATH, AIME and GPQA, as they are
//! publicly distributed.
//!
//! Files are JSON lines (or one JSON list). Field names differ between distributions. The usual
//! ones are understood; an error lists those that were tried.

pub mod choice;
mod code;
pub mod math;

pub use code::CodeProblem;

use crate::cases::{Case, Expected};
use crate::error::{EvalError, Result};
use crate::prompts::Prompts;
use oscar_engine::SamplingParams;
use oscar_tasks::{Random, Turn};
use serde_json::Value;
use std::path::Path;

/// A benchmark of this family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Benchmark {
    HumanEval,
    Math,
    Aime,
    Gpqa,
}

/// One problem: the question and the expected answer.
#[derive(Clone, Debug)]
pub struct Problem {
    pub question: String,
    pub expected: Expected,
}

impl Benchmark {
    pub fn name(self) -> &'static str {
        match self {
            Self::HumanEval => "humaneval",
            Self::Math => "math",
            Self::Aime => "aime",
            Self::Gpqa => "gpqa",
        }
    }

    fn expects(self) -> &'static str {
        match self {
            Self::HumanEval => {
                "JSON lines with `prompt`, `test` and `entry_point` (HumanEval.jsonl, unpacked)"
            }
            Self::Math => "JSON lines with `problem` and `answer`, or a `solution` with a \\boxed{} answer",
            Self::Aime => "JSON lines with `problem` or `question`, and `answer`",
            Self::Gpqa => {
                "JSON lines with `Question`, `Correct Answer` and `Incorrect Answer 1` to `3`, or with a question, \
                 four `choices` and `answer`, or with the choices in the question and the letter as `answer`"
            }
        }
    }

    /// The problems of a file; `seed` decides the order of choices.
    pub fn load(self, path: &Path, seed: u64) -> Result<Vec<Problem>> {
        let bytes =
            std::fs::read(path).map_err(|source| EvalError::File { path: path.to_owned(), source })?;
        let wrong = |line: usize, problem: String| EvalError::Format {
            path: path.to_owned(),
            line,
            problem,
            expected: self.expects(),
        };
        if bytes.starts_with(&[0x1f, 0x8b]) {
            return Err(wrong(1, "it is compressed: unpack it with gunzip first".into()));
        }
        let text = String::from_utf8(bytes).map_err(|_| wrong(1, "it is not UTF-8 text".into()))?;
        let mut records: Vec<(usize, Value)> = Vec::new();
        if text.trim_start().starts_with('[') {
            let list: Vec<Value> = serde_json::from_str(&text)
                .map_err(|e| wrong(e.line(), format!("it is not a JSON list ({e})")))?;
            records.extend((1..).zip(list));
        } else {
            for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
                let value = serde_json::from_str(line)
                    .map_err(|e| wrong(index + 1, format!("it is not JSON ({e})")))?;
                records.push((index + 1, value));
            }
        }
        if records.is_empty() {
            return Err(EvalError::EmptyFile { path: path.to_owned(), expected: self.expects() });
        }
        let problem =
            |(line, record): &(usize, Value)| self.problem(record, seed, *line).map_err(|p| wrong(*line, p));
        records.iter().map(problem).collect()
    }

    fn problem(self, record: &Value, seed: u64, line: usize) -> std::result::Result<Problem, String> {
        match self {
            Self::HumanEval => {
                let problem = CodeProblem {
                    prompt: field(record, &["prompt"])?,
                    test: field(record, &["test"])?,
                    entry_point: field(record, &["entry_point"])?,
                };
                Ok(Problem { question: problem.question(), expected: Expected::Code(problem) })
            }
            Self::Math | Self::Aime => {
                let question = field(record, &["problem", "question", "prompt", "Problem", "Question"])?;
                let answer = field(record, &["answer", "Answer", "expected_answer"])
                    .or_else(|e| field(record, &["solution", "Solution"]).map_err(|_| e))?;
                let answer = math::boxed(&answer).unwrap_or(answer);
                Ok(Problem { question: math::question(&question), expected: Expected::Math(answer) })
            }
            Self::Gpqa => {
                let random = Random::new("gpqa", seed, line as u64);
                let (question, letter) = choice::problem(record, random)?;
                Ok(Problem { question, expected: Expected::Choice(letter) })
            }
        }
    }

    /// The cases of the problems, once for each seed. The seeds of a problem follow each other.
    pub fn cases(
        self,
        prompts: &Prompts<'_>,
        problems: &[Problem],
        sampling: &SamplingParams,
        seeds: &[u64],
        context: usize,
        max_tokens: usize,
    ) -> Result<Vec<Case>> {
        let mut cases = Vec::new();
        for (index, problem) in problems.iter().enumerate() {
            let prompt = match &problem.expected {
                // A base model completes the function itself.
                Expected::Code(code) if prompts.is_raw() => prompts.continued(&code.prompt, "")?,
                _ if prompts.is_raw() => prompts.continued(&problem.question, "\n")?,
                _ => prompts.chat(&[Turn::user(problem.question.clone())])?,
            };
            let room = context.saturating_sub(prompt.len());
            if room == 0 {
                return Err(EvalError::ContextTooShort { task: self.name(), context });
            }
            for &seed in seeds {
                cases.push(Case {
                    task: self.name().to_owned(),
                    context,
                    index,
                    seed,
                    depth: None,
                    prompt: prompt.clone(),
                    max_tokens: max_tokens.min(room),
                    sampling: SamplingParams { seed, ..sampling.clone() },
                    group: None,
                    form: None,
                    expected: problem.expected.clone(),
                });
            }
        }
        Ok(cases)
    }
}

/// The first of these fields that is a text or a number.
fn field(record: &Value, names: &[&str]) -> std::result::Result<String, String> {
    for name in names {
        match &record[*name] {
            Value::String(text) if !text.trim().is_empty() => return Ok(text.clone()),
            Value::Number(number) => return Ok(number.to_string()),
            _ => {}
        }
    }
    Err(format!(
        "there is no field {}",
        names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(" or ")
    ))
}

/// The answer of a reasoning model without its reasoning.
fn after_thoughts(answer: &str) -> &str {
    answer.rsplit_once("</think>").map_or(answer, |(_, rest)| rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(benchmark: Benchmark, text: &str) -> Result<Vec<Problem>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("problems.jsonl");
        std::fs::write(&path, text).unwrap();
        benchmark.load(&path, 0)
    }

    #[test]
    fn usual_distributions_are_read() {
        let math = r#"{"problem": "What is 1+1?", "solution": "It is $\\boxed{2}$.", "level": "Level 1"}

{"problem": "Half?", "answer": "\\frac{1}{2}", "unique_id": "x"}"#;
        let problems = load(Benchmark::Math, math).unwrap();
        assert_eq!(problems.len(), 2);
        assert!(matches!(&problems[0].expected, Expected::Math(a) if a == "2"));
        let aime = r#"[{"question": "n?", "answer": 204}, {"prompt": "m?", "answer": "\\boxed{025}"}]"#;
        assert!(matches!(&load(Benchmark::Aime, aime).unwrap()[1].expected, Expected::Math(a) if a == "025"));
        let code = r#"{"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f", "canonical_solution": "", "test": "def check(c): pass"}"#;
        assert!(load(Benchmark::HumanEval, code).unwrap()[0].question.contains("def f(x):"));
    }

    #[test]
    fn wrong_files_are_explained() {
        let error = |benchmark, text: &str| load(benchmark, text).unwrap_err().to_string();
        assert!(error(Benchmark::Math, "").contains("holds no problem"));
        assert!(error(Benchmark::Math, "\n\n").contains("`problem` and `answer`"));
        assert!(error(Benchmark::Aime, "{\"answer\": 1}\n").contains("`problem` or `question`"));
        let message = error(Benchmark::HumanEval, "{\"prompt\": \"a\", \"test\": \"b\"}\n");
        assert!(message.contains("line 1") && message.contains("`entry_point`"), "{message}");
        assert!(error(Benchmark::Gpqa, "{\"question\": \"q\"}\n").contains("Incorrect Answer"));
        assert!(error(Benchmark::Math, "plain text\n").contains("not JSON"));
        assert!(error(Benchmark::Math, "[{\"problem\": 1,").contains("not a JSON list"));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.gz");
        std::fs::write(&path, [0x1f, 0x8b, 8, 0]).unwrap();
        assert!(Benchmark::HumanEval.load(&path, 0).unwrap_err().to_string().contains("gunzip"));
        std::fs::write(&path, [0xff, 0xfe]).unwrap();
        assert!(Benchmark::Math.load(&path, 0).unwrap_err().to_string().contains("UTF-8"));
        let missing = Benchmark::Math.load(Path::new("/nonexistent/file"), 0).unwrap_err();
        assert!(missing.to_string().contains("/nonexistent/file"));
    }
}
