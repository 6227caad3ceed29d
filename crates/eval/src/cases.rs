//! Questions and their scoring: one [`Case`] for each prompt, from any task.
//!
//! **Invariant:** a case is a function of its task, its size, its seed and its index; every format
//! gets the same tokens. Seeds of calibration are refused.

use crate::benchmarks::{CodeProblem, choice, math};
use crate::error::{EvalError, Result};
use crate::prompts::Prompts;
use crate::sandbox::Sandbox;
use oscar_engine::SamplingParams;
use oscar_tasks::score::exact_match;
use oscar_tasks::{
    CALIBRATION_SEEDS_FROM, Filler, Metric, RulerCase, RulerConfig, RulerGenerator, RulerTask, Task,
};

/// The expected answer.
#[derive(Clone, Debug)]
pub enum Expected {
    /// The whole answer, word for word.
    Exact(String),
    /// RULER's string match.
    Contains { metric: Metric, references: Vec<String> },
    /// A mathematical answer, in a box or at the end.
    Math(String),
    /// The letter of a choice.
    Choice(char),
    /// Code that passes its tests.
    Code(CodeProblem),
}

/// One prompt with its expected answer.
#[derive(Clone, Debug)]
pub struct Case {
    pub task: String,
    /// Tokens that prompt and answer may take together.
    pub context: usize,
    pub index: usize,
    pub seed: u64,
    /// Depth of the answer in the context, from 0 to 1, if it has a single place.
    pub depth: Option<f64>,
    pub prompt: Vec<u32>,
    pub max_tokens: usize,
    pub sampling: SamplingParams,
    /// Cases that share most of their prompt.
    pub group: Option<usize>,
    /// A regular expression that the answer is constrained to.
    pub form: Option<String>,
    pub expected: Expected,
}

impl Expected {
    /// The expected answer, for people.
    pub fn text(&self) -> String {
        match self {
            Self::Exact(text) | Self::Math(text) => text.clone(),
            Self::Contains { references, .. } => references.join(", "),
            Self::Choice(letter) => letter.to_string(),
            Self::Code(problem) => format!("passes the tests of {}", problem.entry_point),
        }
    }
}

impl Case {
    /// Names the case in results, the same in every run.
    pub fn key(&self) -> String {
        format!("{}/{}/{}/{}", self.task, self.context, self.seed, self.index)
    }

    /// The score of an answer, in `0..=1`.
    pub fn score(&self, answer: &str, sandbox: Option<&Sandbox>) -> Result<f64> {
        Ok(match &self.expected {
            Expected::Exact(right) => f64::from(exact_match(answer, right)),
            Expected::Contains { metric, references } => metric.score(answer, references),
            Expected::Math(right) => f64::from(math::is_right(answer, right)),
            Expected::Choice(letter) => f64::from(choice::letter(answer) == Some(*letter)),
            Expected::Code(problem) => match sandbox {
                Some(sandbox) => f64::from(sandbox.passes(&problem.program(answer))?),
                None => {
                    return Err(EvalError::Sandbox("code is not run without --allow-code-execution".into()));
                }
            },
        })
    }
}

/// Greedy decoding.
pub fn greedy() -> SamplingParams {
    SamplingParams::default()
}

/// How many tokens an answer may be longer than the right one before it is cut: enough to see that
/// it does not end.
const ANSWER_SLACK: usize = 16;

/// Draws of a task, to find one that fills its context.
const DRAWS: u64 = 8;
/// Distance between the seeds of further draws, larger than any number of cases.
const NEXT_DRAW: u64 = 1 << 20;

/// Chat tasks of about `context` tokens, `count` of each, in rounds, so that a limit takes some of
/// all. Draws of short tasks, such as a list to reverse, are skipped if others fill the context: a
/// short case would stay inside the BF16 windows.
pub fn chat_cases(
    prompts: &Prompts<'_>,
    tasks: &[Task],
    context: usize,
    first_seed: u64,
    count: usize,
    filler: &dyn Filler,
    mut progress: impl FnMut(),
) -> Result<Vec<Case>> {
    let mut cases = Vec::with_capacity(tasks.len() * count);
    for index in 0..count {
        for &task in tasks {
            let size = |case: &Case| case.prompt.len() + case.max_tokens;
            let mut best: Option<Case> = None;
            for draw in 0..DRAWS {
                let seed = evaluation_seed(first_seed + draw * NEXT_DRAW, index);
                let case = chat_case(prompts, task, context, seed, index, filler)?;
                if best.as_ref().is_none_or(|b| size(b) < size(&case)) {
                    best = Some(case);
                }
                if best.as_ref().is_some_and(|b| 2 * size(b) >= context) {
                    break;
                }
            }
            cases.extend(best);
            progress();
        }
    }
    Ok(cases)
}

/// The case of a seed, its haystack as large as the context allows within a few percent.
fn chat_case(
    prompts: &Prompts<'_>,
    task: Task,
    context: usize,
    seed: u64,
    index: usize,
    filler: &dyn Filler,
) -> Result<Case> {
    // English has about four characters a token. Later budgets follow from the cost of earlier
    // ones.
    let mut budget = context * 4;
    let mut best: Option<Case> = None;
    for _ in 0..8 {
        let case = task.case(seed, budget, filler)?;
        let prompt = prompts.chat(case.question())?;
        let max_tokens = prompts.count(&case.answer) + ANSWER_SLACK;
        let total = prompt.len() + max_tokens;
        let fits = total <= context;
        let better = best.as_ref().is_none_or(|b| b.prompt.len() + b.max_tokens < total);
        if fits && better {
            best = Some(Case {
                task: task.name().to_owned(),
                context,
                index,
                seed,
                depth: None,
                prompt,
                max_tokens,
                sampling: greedy(),
                group: None,
                form: None,
                expected: Expected::Exact(case.answer),
            });
        } else if fits {
            // A short task: a larger budget changes nothing.
            break;
        }
        if fits && total * 20 >= context * 19 {
            break;
        }
        let next = (budget as f64 * context as f64 / total as f64 * 0.98) as usize;
        if next == budget || next == 0 {
            break;
        }
        budget = next;
    }
    best.ok_or(EvalError::ContextTooShort { task: task.name(), context })
}

/// RULER cases, `count` of each task, in rounds. With `answer_prefix` chat models
/// also get the beginning of the answer; base models always do.
pub fn ruler_cases(
    prompts: &Prompts<'_>,
    generator: &RulerGenerator<'_>,
    tasks: &[RulerTask],
    count: usize,
    answer_prefix: bool,
    mut progress: impl FnMut(),
) -> Result<Vec<Case>> {
    let mut cases = Vec::with_capacity(tasks.len() * count);
    for index in 0..count {
        for &task in tasks {
            let mut case = generator.case(task, index)?;
            if !(answer_prefix || prompts.is_raw()) {
                case.answer_prefix.clear();
            }
            cases.push(ruler_case(prompts, generator, case, task.name(), None)?);
            progress();
        }
    }
    Ok(cases)
}

/// Needles at each depth (percent) of `count` haystacks, with RULER's question. Only
/// base models get the beginning of the answer. `group` numbers the haystacks.
pub fn needle_cases(
    prompts: &Prompts<'_>,
    generator: &RulerGenerator<'_>,
    percents: &[usize],
    count: usize,
    group: &mut usize,
) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for index in 0..count {
        for (mut case, percent) in generator.needles_at(percents, index)?.into_iter().zip(percents) {
            if !prompts.is_raw() {
                case.answer_prefix.clear();
            }
            let task = format!("needle_{percent:02}");
            let mut case = ruler_case(prompts, generator, case, &task, Some(*group))?;
            case.depth = Some(*percent as f64 / 100.0);
            // The answer has seven digits; a wrong answer need not be complete.
            case.max_tokens = case.max_tokens.min(24);
            cases.push(case);
        }
        *group += 1;
    }
    Ok(cases)
}

fn ruler_case(
    prompts: &Prompts<'_>,
    generator: &RulerGenerator<'_>,
    case: RulerCase,
    task: &str,
    group: Option<usize>,
) -> Result<Case> {
    let RulerConfig { max_seq_length: context, seed, .. } = generator.config();
    Ok(Case {
        task: task.to_owned(),
        context,
        index: case.index,
        seed,
        depth: match case.depths.as_slice() {
            [depth] => Some(*depth),
            _ => None,
        },
        prompt: prompts.continued(&case.prompt, &case.answer_prefix)?,
        max_tokens: case.tokens_to_generate,
        sampling: greedy(),
        group,
        form: None,
        expected: Expected::Contains { metric: case.metric, references: case.references },
    })
}

/// Seed `index` of a run, always one that calibration does not use.
pub fn evaluation_seed(first: u64, index: usize) -> u64 {
    (first % CALIBRATION_SEEDS_FROM + index as u64) % CALIBRATION_SEEDS_FROM
}
