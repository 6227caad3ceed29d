//! Agent tasks as cases: one case for each call, and success only if all calls of a task are exact.
//!
//! Every call is constrained to its form, so a failure is a wrong argument, never a broken call.
//! Earlier calls of a task stand in the prompt as they should have been: an error does not spoil the
//! steps after it, and every format gets the same prompts.

use crate::cases::{Case, Expected, evaluation_seed, greedy};
use crate::error::{EvalError, Result};
use crate::prompts::Prompts;
use crate::run::Row;
use oscar_tasks::{AgentStep, AgentTask, Filler, Turn};

/// How a call is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallForm {
    /// The arguments alone: the value, or a line `name: value` for each. Small models that were
    /// never shown a call can do this.
    Bare,
    /// `<tool_call>{"name": "report", "arguments": {…}}</tool_call>`, announced in the prompt.
    Json,
}

const ANNOUNCEMENT: &str = "Answer every question with one call of the tool `report`, and nothing else:\n\
    <tool_call>\n{\"name\": \"report\", \"arguments\": {…}}\n</tool_call>\n\n";

impl CallForm {
    /// The call of a step, each value written by `value`.
    fn written(self, step: &AgentStep, brace: &str, value: impl Fn(&str) -> String) -> String {
        let one = step.arguments.len() == 1;
        let part = |(name, text): &(String, String)| match self {
            Self::Bare if one => value(text),
            Self::Bare => format!("{name}: {}", value(text)),
            Self::Json => format!("\"{name}\": \"{}\"", value(text)),
        };
        let parts: Vec<String> = step.arguments.iter().map(part).collect();
        match self {
            Self::Bare => parts.join("\n"),
            Self::Json => format!(
                "<tool_call>\n{brace}{{\"name\": \"report\", \"arguments\": {brace}{{{}{brace}}}{brace}}}\n</tool_call>",
                parts.join(", ")
            ),
        }
    }

    /// The call as it should be.
    fn call(self, step: &AgentStep) -> String {
        self.written(step, "", str::to_owned)
    }

    /// A regular expression of all calls of this form with these argument names.
    fn regex(self, step: &AgentStep) -> String {
        self.written(step, "\\", |_| step.pattern.to_owned())
    }
}

/// Cases of about `context` tokens: the steps of `count` tasks, those of one task in a row.
pub fn agent_cases(
    prompts: &Prompts<'_>,
    tasks: &[AgentTask],
    context: usize,
    first_seed: u64,
    count: usize,
    form: CallForm,
    filler: &dyn Filler,
    group: &mut usize,
    mut progress: impl FnMut(),
) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for index in 0..count {
        for &task in tasks {
            let seed = evaluation_seed(first_seed, index);
            let draw = Draw { prompts, task, context, seed, index, form, filler, group: *group };
            cases.extend(draw.fitted()?);
            *group += 1;
            progress();
        }
    }
    Ok(cases)
}

/// One task, and how its cases are written.
struct Draw<'a> {
    prompts: &'a Prompts<'a>,
    task: AgentTask,
    context: usize,
    seed: u64,
    index: usize,
    form: CallForm,
    filler: &'a dyn Filler,
    group: usize,
}

impl Draw<'_> {
    /// The steps of the task, its text as large as the context allows within a few percent.
    fn fitted(&self) -> Result<Vec<Case>> {
        let context = self.context;
        // English has about four characters a token. Later budgets follow from the cost of earlier ones.
        let mut budget = context * 4;
        let mut best: Option<(usize, Vec<Case>)> = None;
        for _ in 0..8 {
            let steps = self.steps(budget)?;
            let total = steps.last().map_or(0, |case| case.prompt.len() + case.max_tokens);
            if total <= context && best.as_ref().is_none_or(|(most, _)| *most < total) {
                best = Some((total, steps));
            }
            let next = (budget as f64 * context as f64 / total.max(1) as f64 * 0.98) as usize;
            if (total <= context && total * 20 >= context * 19) || next == budget || next == 0 {
                break;
            }
            budget = next;
        }
        best.map(|(_, steps)| steps).ok_or(EvalError::ContextTooShort { task: self.task.name(), context })
    }

    fn steps(&self, budget: usize) -> Result<Vec<Case>> {
        let Self { prompts, task, context, seed, index, form, filler, group } = *self;
        let drawn = task.case(seed, budget, filler);
        let announcement = if form == CallForm::Json { ANNOUNCEMENT } else { "" };
        let mut turns: Vec<Turn> = Vec::new();
        let mut cases = Vec::with_capacity(drawn.steps.len());
        for (number, step) in drawn.steps.iter().enumerate() {
            let question = match number {
                0 => format!("{announcement}{}\n{}", drawn.text, step.question),
                _ => step.question.clone(),
            };
            turns.push(Turn::user(question));
            let call = form.call(step);
            cases.push(Case {
                task: format!("{}#{}", task.name(), number + 1),
                context,
                index,
                seed,
                depth: None,
                prompt: prompts.chat(&turns)?,
                // Constrained answers end where the right one does, but may be cut into more tokens.
                max_tokens: 2 * prompts.count(&call) + 16,
                sampling: greedy(),
                group: Some(group),
                form: Some(form.regex(step)),
                expected: Expected::Exact(call.clone()),
            });
            turns.push(Turn::assistant(call));
        }
        Ok(cases)
    }
}

/// One row for each task out of the rows of its steps: the score is 1 if every step's is.
pub fn whole_tasks(rows: &[Row]) -> Vec<Row> {
    let mut whole: Vec<Row> = Vec::new();
    for row in rows {
        let task = row.task.split('#').next().unwrap_or_default();
        let place = |other: &&mut Row| {
            (&other.kv, other.task.as_str(), other.context, other.index)
                == (&row.kv, task, row.context, row.index)
        };
        match whole.iter_mut().find(place) {
            Some(so_far) => {
                so_far.score = so_far.score.min(row.score);
                so_far.finished &= row.finished;
                so_far.same_as_bf16 = so_far.same_as_bf16.zip(row.same_as_bf16).map(|(a, b)| a && b);
                so_far.first_divergence = so_far.first_divergence.or(row.first_divergence);
            }
            None => whole.push(Row { task: task.to_owned(), ..row.clone() }),
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(arguments: &[(&str, &str)]) -> AgentStep {
        let arguments = arguments.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        AgentStep { question: "?".to_owned(), arguments: arguments.collect(), pattern: "[0-9]{2}" }
    }

    #[test]
    fn calls_and_their_forms_agree() {
        let one = step(&[("value", "12")]);
        let two = step(&[("a-b", "12"), ("c-d", "34")]);
        assert_eq!((CallForm::Bare.call(&one), CallForm::Bare.regex(&one)), ("12".into(), "[0-9]{2}".into()));
        assert_eq!(CallForm::Bare.call(&two), "a-b: 12\nc-d: 34");
        assert_eq!(
            CallForm::Json.call(&two),
            "<tool_call>\n{\"name\": \"report\", \"arguments\": {\"a-b\": \"12\", \"c-d\": \"34\"}}\n</tool_call>"
        );
        assert_eq!(
            CallForm::Json.regex(&one),
            "<tool_call>\n\\{\"name\": \"report\", \"arguments\": \\{\"value\": \"[0-9]{2}\"\\}\\}\n</tool_call>"
        );
    }

    #[test]
    fn a_task_succeeds_only_with_all_its_steps() {
        let row = |task: &str, index, score, same| Row {
            kv: "oscar".into(),
            bits: 2.25,
            task: task.into(),
            context: 8192,
            index,
            seed: 0,
            depth: None,
            score,
            prompt_tokens: 1,
            finished: true,
            answer: String::new(),
            expected: String::new(),
            tokens: vec![],
            same_as_bf16: Some(same),
            first_divergence: None,
        };
        let rows = [
            row("lookup#1", 0, 1.0, true),
            row("lookup#2", 0, 0.0, true),
            row("lookup#1", 1, 1.0, true),
            row("lookup#2", 1, 1.0, false),
        ];
        let whole = whole_tasks(&rows);
        let seen: Vec<_> = whole.iter().map(|row| (row.task.as_str(), row.score, row.same_as_bf16)).collect();
        assert_eq!(seen, [("lookup", 0.0, Some(true)), ("lookup", 1.0, Some(false))]);
    }
}
