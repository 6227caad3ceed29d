//! Errors of evaluation; every message says what to do.

use oscar_engine::RequestError;
use oscar_runner::StepError;
use oscar_tasks::TaskError;
use oscar_text::TextError;
use std::io;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    #[error(transparent)]
    Engine(#[from] StepError),
    #[error("case {case}: {source}")]
    Request { case: String, source: RequestError },
    #[error("the engine ended before every case was answered; its log says why")]
    EngineGone,
    #[error("{0}")]
    Start(String),
    #[error("the engine's thread could not start: {0}")]
    Thread(io::Error),
    #[error(transparent)]
    Task(#[from] TaskError),
    #[error(transparent)]
    Text(#[from] TextError),
    #[error("this model has no chat template, which {what} needs: use an instruction-tuned model{hint}")]
    NoChatTemplate { what: &'static str, hint: &'static str },
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{}, line {line}: {problem}; expected {expected}", path.display())]
    Format { path: PathBuf, line: usize, problem: String, expected: &'static str },
    #[error("{} holds no problem; expected {expected}", path.display())]
    EmptyFile { path: PathBuf, expected: &'static str },
    #[error(
        "{}, line {line} is no record of this program ({problem}): give another file, or delete this one to start over",
        path.display()
    )]
    BrokenJournal { path: PathBuf, line: usize, problem: String },
    #[error(
        "{} holds results of another configuration ({difference}): give another file, or delete this one to start over",
        path.display()
    )]
    OtherConfiguration { path: PathBuf, difference: String },
    #[error("{0}")]
    Sandbox(String),
    #[error("{task} does not fit a context of {context} tokens: raise --context")]
    ContextTooShort { task: &'static str, context: usize },
}

pub type Result<T> = std::result::Result<T, EvalError>;
