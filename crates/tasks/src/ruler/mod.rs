//! RULER: thirteen synthetic long-context tasks with the wordings, sizes and metrics of the
//! official benchmark (NVIDIA, arXiv 2404.06654).
//!
//! Invariant: `tokens(prompt + answer_prefix) + tokens_to_generate + reserved <= max_seq_length`,
//! by the caller's own token count, with the haystack as large as that allows.
//!
//! Where this differs from the official generator:
//! - keys and list words come from a word list of ours (`lexicon.txt`), not from wonderwords;
//!   common-word lists that need more words than that add closed compounds of an adjective and a
//!   noun;
//! - the essay haystack is the caller's [`Filler`] (officially Paul Graham's essays, which the
//!   caller may supply as a file through [`crate::ParagraphFiller`]), and a simple rule finds its
//!   sentences;
//! - every case searches its own haystack size, keys and values never collide, and the budget
//!   always counts the tokens to be generated.

mod fit;
mod lexicon;
mod niah;
mod qa;
mod tracking;
mod words;

pub use qa::{QaSet, Question};

use crate::score::Metric;
use crate::{Filler, Random, TaskError};
use niah::{Essay, Haystack, NiahShape};
use std::cell::OnceCell;

/// One of the thirteen tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RulerTask {
    NiahSingle1,
    NiahSingle2,
    NiahSingle3,
    NiahMultikey1,
    NiahMultikey2,
    NiahMultikey3,
    NiahMultivalue,
    NiahMultiquery,
    Vt,
    Cwe,
    Fwe,
    Qa1,
    Qa2,
}

impl RulerTask {
    /// All tasks with their official names, in the order of the official report.
    const NAMES: [(Self, &'static str); 13] = [
        (Self::NiahSingle1, "niah_single_1"),
        (Self::NiahSingle2, "niah_single_2"),
        (Self::NiahSingle3, "niah_single_3"),
        (Self::NiahMultikey1, "niah_multikey_1"),
        (Self::NiahMultikey2, "niah_multikey_2"),
        (Self::NiahMultikey3, "niah_multikey_3"),
        (Self::NiahMultivalue, "niah_multivalue"),
        (Self::NiahMultiquery, "niah_multiquery"),
        (Self::Vt, "vt"),
        (Self::Cwe, "cwe"),
        (Self::Fwe, "fwe"),
        (Self::Qa1, "qa_1"),
        (Self::Qa2, "qa_2"),
    ];

    /// All tasks, in the order of the official report.
    pub fn all() -> [Self; 13] {
        Self::NAMES.map(|(task, _)| task)
    }

    /// The tasks that need no question set.
    pub fn without_data() -> impl Iterator<Item = Self> {
        Self::all().into_iter().filter(|task| !matches!(task, Self::Qa1 | Self::Qa2))
    }

    /// The official name.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }

    /// The task of that official name.
    pub fn parse(name: &str) -> Result<Self, TaskError> {
        Self::all().into_iter().find(|task| task.name() == name).ok_or_else(|| TaskError::UnknownRulerTask {
            name: name.to_owned(),
            known: Self::NAMES.map(|(_, name)| name).to_vec(),
        })
    }

    /// How many tokens a model may answer with.
    pub fn tokens_to_generate(self) -> usize {
        match self {
            Self::Vt => 30,
            Self::Cwe => 120,
            Self::Fwe => 50,
            Self::Qa1 | Self::Qa2 => 32,
            _ => 128,
        }
    }

    /// How answers are scored.
    pub fn metric(self) -> Metric {
        match self {
            Self::Qa1 | Self::Qa2 => Metric::StringMatchPart,
            _ => Metric::StringMatchAll,
        }
    }

    fn niah_shape(self) -> Option<NiahShape> {
        let base = NiahShape {
            haystack: Haystack::Essay,
            uuid_keys: false,
            uuid_values: false,
            keys: 1,
            values: 1,
            queries: 1,
        };
        Some(match self {
            Self::NiahSingle1 => NiahShape { haystack: Haystack::Noise, ..base },
            Self::NiahSingle2 => base,
            Self::NiahSingle3 => NiahShape { uuid_values: true, ..base },
            Self::NiahMultikey1 => NiahShape { keys: 4, ..base },
            Self::NiahMultikey2 => NiahShape { haystack: Haystack::Needles, ..base },
            Self::NiahMultikey3 => {
                NiahShape { haystack: Haystack::Needles, uuid_keys: true, uuid_values: true, ..base }
            }
            Self::NiahMultivalue => NiahShape { values: 4, ..base },
            Self::NiahMultiquery => NiahShape { keys: 4, queries: 4, ..base },
            _ => return None,
        })
    }
}

/// The size and the seed of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RulerConfig {
    /// Prompt, answer prefix, reserve and generated tokens together stay within this.
    pub max_seq_length: usize,
    /// Tokens that the caller adds around the prompt, such as a chat template's.
    pub reserved_tokens: usize,
    /// The official runs use 42. Stay below [`crate::CALIBRATION_SEEDS_FROM`].
    pub seed: u64,
}

impl RulerConfig {
    /// The official seed, nothing reserved.
    pub fn new(max_seq_length: usize) -> Self {
        Self { max_seq_length, reserved_tokens: 0, seed: 42 }
    }
}

/// One prompt with its references.
#[derive(Debug, Clone, PartialEq)]
pub struct RulerCase {
    pub task: RulerTask,
    pub index: usize,
    /// The user's part; the model continues after `answer_prefix`.
    pub prompt: String,
    /// The beginning of the answer, given to the model.
    pub answer_prefix: String,
    /// What the answer must contain.
    pub references: Vec<String>,
    /// Where the answers stand in the context, as fractions of its length: one per reference for
    /// needles and variables, one per gold document for questions, none for word counts.
    pub depths: Vec<f64>,
    pub tokens_to_generate: usize,
    pub metric: Metric,
}

impl RulerCase {
    /// The score of one prediction, in `0..=1`.
    pub fn score(&self, prediction: &str) -> f64 {
        self.metric.score(prediction, &self.references)
    }
}

/// A composed prompt whose size is still being searched.
struct Draft {
    prompt: String,
    answer_prefix: String,
    references: Vec<String>,
    depths: Vec<f64>,
}

impl Draft {
    fn into_case(self, task: RulerTask, index: usize) -> RulerCase {
        RulerCase {
            task,
            index,
            prompt: self.prompt,
            answer_prefix: self.answer_prefix,
            references: self.references,
            depths: self.depths,
            tokens_to_generate: task.tokens_to_generate(),
            metric: task.metric(),
        }
    }
}

/// Makes the cases of a run.
pub struct RulerGenerator<'a> {
    config: RulerConfig,
    filler: &'a dyn Filler,
    count_tokens: &'a dyn Fn(&str) -> usize,
    essay: OnceCell<Essay>,
    squad: Option<QaSet>,
    hotpot: Option<QaSet>,
}

impl<'a> RulerGenerator<'a> {
    pub fn new(config: RulerConfig, filler: &'a dyn Filler, count_tokens: &'a dyn Fn(&str) -> usize) -> Self {
        Self { config, filler, count_tokens, essay: OnceCell::new(), squad: None, hotpot: None }
    }

    pub fn config(&self) -> RulerConfig {
        self.config
    }

    /// The questions of `qa_1`, from [`QaSet::squad`].
    pub fn with_qa_1(mut self, questions: impl Into<Option<QaSet>>) -> Self {
        self.squad = questions.into();
        self
    }

    /// The questions of `qa_2`, from [`QaSet::hotpotqa`].
    pub fn with_qa_2(mut self, questions: impl Into<Option<QaSet>>) -> Self {
        self.hotpot = questions.into();
        self
    }

    /// Case `index` of a task: a function of the configuration, the filler and the index alone.
    pub fn case(&self, task: RulerTask, index: usize) -> Result<RulerCase, TaskError> {
        let RulerConfig { max_seq_length, seed, .. } = self.config;
        // A word or a line costs at least one token; the bound stops the search if a counter says
        // otherwise.
        let most = max_seq_length.saturating_mul(2);
        let label = format!("ruler/{}/{max_seq_length}", task.name());
        let random = Random::new(&label, seed, index as u64);
        let draft = if let Some(shape) = task.niah_shape() {
            let plan = niah::Plan::draw(shape, random);
            let least = plan.least_size();
            match shape.haystack {
                Haystack::Essay => {
                    let essay = self.essay()?;
                    self.fit(task, least, most, |size| plan.compose(size, essay))?
                }
                _ => self.fit(task, least, most, |size| plan.compose(size, &Essay::default()))?,
            }
        } else {
            match task {
                RulerTask::Cwe => self.common_words(random)?,
                RulerTask::Fwe => {
                    let plan = words::CodedText::draw(max_seq_length, random);
                    self.fit(task, words::CodedText::LEAST_SIZE, most, |size| plan.compose(size))?
                }
                RulerTask::Qa1 => self.question(task, &self.squad, "SQuAD", index, random)?,
                RulerTask::Qa2 => self.question(task, &self.hotpot, "HotpotQA", index, random)?,
                _ => {
                    let plan = tracking::Plan::draw(random, self.count_tokens);
                    self.fit(task, tracking::LEAST_LINES, most, |size| plan.compose(size))?
                }
            }
        };
        Ok(draft.into_case(task, index))
    }

    /// Needles at the given depths (in percent) of one essay haystack, a case for each, in order of
    /// depth: RULER's `niah_multikey_1` with as many keys as depths and every key asked for in
    /// turn, so that the cases share all but their question. One depth gives `niah_single_2` with
    /// its needle there.
    pub fn needles_at(&self, percents: &[usize], index: usize) -> Result<Vec<RulerCase>, TaskError> {
        let task = if percents.len() == 1 { RulerTask::NiahSingle2 } else { RulerTask::NiahMultikey1 };
        let Some(shape) = task.niah_shape() else { return Ok(Vec::new()) };
        let RulerConfig { max_seq_length: available, seed, .. } = self.config;
        let random = Random::new(&format!("ruler/depths/{available}/{percents:?}"), seed, index as u64);
        let plans = niah::Plan::at_depths(shape, percents, random);
        let essay = self.essay()?;
        let compose = |size| plans.iter().map(|plan| plan.compose(size, essay)).collect::<Vec<Draft>>();
        let cost = |drafts: &Vec<Draft>| {
            drafts.iter().map(|draft| self.cost(task, draft)).max().unwrap_or(available.saturating_add(1))
        };
        let most = available.saturating_mul(2).max(percents.len());
        let drafts = fit::largest_fitting(percents.len()..=most, available, compose, cost)
            .map_err(|needed| TaskError::ContextTooShort { task: task.name(), needed, available })?;
        Ok(drafts.into_iter().map(|draft| draft.into_case(task, index)).collect())
    }

    fn essay(&self) -> Result<&Essay, TaskError> {
        let essay = self.essay.get_or_init(|| {
            // A token is seldom longer than a word. A longer haystack repeats the text.
            Essay::new(&self.filler.essay(self.config.max_seq_length.max(1), self.config.seed))
        });
        if essay.is_empty() { Err(TaskError::EmptyFiller) } else { Ok(essay) }
    }

    fn common_words(&self, random: Random) -> Result<Draft, TaskError> {
        let task = RulerTask::Cwe;
        let mut plan = words::WordList::draw(self.config.max_seq_length, random.clone());
        if self.cost(task, &plan.compose(plan.supply())) <= self.config.max_seq_length {
            // The plain words are too few for this length: draw the whole list from the larger
            // pool, so that common and uncommon words still look alike.
            plan = words::WordList::draw_from_compounds(self.config.max_seq_length, random);
        }
        self.fit(task, words::LEAST_WORDS, plan.supply(), |size| plan.compose(size))
    }

    fn question(
        &self,
        task: RulerTask,
        set: &Option<QaSet>,
        format: &'static str,
        index: usize,
        random: Random,
    ) -> Result<Draft, TaskError> {
        let set = set.as_ref().ok_or(TaskError::MissingQuestions { task: task.name(), format })?;
        let plan = qa::Plan::draw(set, index, random).ok_or(TaskError::QuestionsExhausted {
            task: task.name(),
            index,
            available: set.questions().len(),
        })?;
        self.fit(task, plan.gold_documents(), set.documents().len(), |size| plan.compose(size))
    }

    fn fit(
        &self,
        task: RulerTask,
        least: usize,
        most: usize,
        compose: impl Fn(usize) -> Draft,
    ) -> Result<Draft, TaskError> {
        let available = self.config.max_seq_length;
        fit::largest_fitting(least..=most.max(least), available, compose, |draft| self.cost(task, draft))
            .map_err(|needed| TaskError::ContextTooShort { task: task.name(), needed, available })
    }

    /// All tokens of a sequence: prompt, answer prefix, the caller's reserve and the answer.
    fn cost(&self, task: RulerTask, draft: &Draft) -> usize {
        (self.count_tokens)(&format!("{}{}", draft.prompt, draft.answer_prefix))
            .saturating_add(task.tokens_to_generate())
            .saturating_add(self.config.reserved_tokens)
    }
}

/// Where `needle` starts in `context`, as a fraction of its length.
fn depth_of(needle: &str, context: &str) -> f64 {
    context.find(needle).map_or(0.0, |at| at as f64 / context.len().max(1) as f64)
}
