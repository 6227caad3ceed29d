//! Chat tasks that test long-context use: retrieval, tracking, chained arithmetic, memory.
//!
//! A case is a conversation whose last turn is the right answer of the assistant. Invariant:
//! wordings, word lists and distributions are those the bundled demo model was trained on; only the
//! random stream is this crate's own. A budget counts characters of conversation, roughly:
//! haystacks end with the paragraph that reaches it.

mod agent;
mod conversation;
mod reasoning;
mod retrieval;
pub mod sessions;
mod words;

pub use agent::{AgentCase, AgentStep, AgentTask};

use crate::{Filler, Random, TaskError};

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    User,
    Assistant,
}

impl Role {
    /// The role's name in chat templates.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    pub role: Role,
    pub text: String,
}

impl Turn {
    pub fn user(text: impl Into<String>) -> Self {
        Self { role: Role::User, text: text.into() }
    }

    pub fn assistant(text: impl Into<String>) -> Self {
        Self { role: Role::Assistant, text: text.into() }
    }
}

/// One generated case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// The task it belongs to.
    pub name: &'static str,
    /// The seed that makes it again, with the same budget and filler.
    pub seed: u64,
    /// The conversation; the last turn is the assistant's right answer.
    pub turns: Vec<Turn>,
    /// The text of that last turn.
    pub answer: String,
}

impl Case {
    /// The conversation up to the question: what a model is given.
    pub fn question(&self) -> &[Turn] {
        &self.turns[..self.turns.len().saturating_sub(1)]
    }
}

/// A family of chat tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Task {
    Hello,
    Resume,
    NiahSingle,
    NiahMultikey,
    NiahLines,
    NiahUuid,
    NiahMultivalue,
    NiahMultiquery,
    Vt,
    Cwe,
    RunningSum,
    Program,
    Copy,
    Sort,
    Memory,
    Passkey,
}

impl Task {
    /// Every family with the name used on the command line and in results, in the order of the
    /// training mix.
    const NAMES: [(Self, &'static str); 16] = [
        (Self::Hello, "hello"),
        (Self::Resume, "resume"),
        (Self::NiahSingle, "niah_single"),
        (Self::NiahMultikey, "niah_multikey"),
        (Self::NiahLines, "niah_lines"),
        (Self::NiahUuid, "niah_uuid"),
        (Self::NiahMultivalue, "niah_multivalue"),
        (Self::NiahMultiquery, "niah_multiquery"),
        (Self::Vt, "vt"),
        (Self::Cwe, "cwe"),
        (Self::RunningSum, "running_sum"),
        (Self::Program, "program"),
        (Self::Copy, "copy"),
        (Self::Sort, "sort"),
        (Self::Memory, "memory"),
        (Self::Passkey, "passkey"),
    ];

    /// Every family, in the order of the training mix.
    pub fn all() -> [Self; 16] {
        Self::NAMES.map(|(task, _)| task)
    }

    /// The name used on the command line and in results.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }

    /// Every name, in the order of [`Task::all`].
    pub fn names() -> Vec<&'static str> {
        Self::NAMES.map(|(_, name)| name).to_vec()
    }

    /// The family of that name.
    pub fn parse(name: &str) -> Result<Self, TaskError> {
        Self::all()
            .into_iter()
            .find(|task| task.name() == name)
            .ok_or_else(|| TaskError::UnknownTask { name: name.to_owned(), known: Self::names() })
    }

    /// The case of the named family for this seed and budget.
    pub fn generate(
        name: &str,
        seed: u64,
        budget_chars: usize,
        filler: &dyn Filler,
    ) -> Result<Case, TaskError> {
        Self::parse(name)?.case(seed, budget_chars, filler)
    }

    /// The case for this seed and budget.
    pub fn case(self, seed: u64, budget_chars: usize, filler: &dyn Filler) -> Result<Case, TaskError> {
        let random = &mut Random::new(self.name(), seed, budget_chars as u64);
        let turns = match self {
            Self::Hello => conversation::hello(random),
            Self::Resume => conversation::resume(random, filler)?,
            Self::Memory => conversation::memory(random, budget_chars, filler),
            Self::Vt => retrieval::vt(random, budget_chars, filler),
            Self::Passkey => retrieval::passkey(random, budget_chars, filler),
            Self::Cwe => reasoning::cwe(random, budget_chars),
            Self::RunningSum => reasoning::running_sum(random, budget_chars),
            Self::Program => reasoning::program(random, budget_chars),
            Self::Copy => reasoning::copy(random, budget_chars),
            Self::Sort => reasoning::sort(random),
            _ => retrieval::Niah::of(self, budget_chars).turns(random, filler),
        };
        let answer = turns.last().map(|turn| turn.text.clone()).unwrap_or_default();
        Ok(Case { name: self.name(), seed, turns, answer })
    }
}

/// One question and its answer.
fn exchange(question: String, answer: String) -> Vec<Turn> {
    vec![Turn::user(question), Turn::assistant(answer)]
}

/// Length in characters, the unit of budgets.
fn chars(text: &str) -> usize {
    text.chars().count()
}
