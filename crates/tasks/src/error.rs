//! Errors of task generation; every message says what to do.

use thiserror::Error;

/// A task that could not be generated.
#[derive(Debug, Error)]
pub enum TaskError {
    #[error("there is no chat task named `{name}`; the tasks are {}", known.join(", "))]
    UnknownTask { name: String, known: Vec<&'static str> },

    #[error("there is no RULER task named `{name}`; the tasks are {}", known.join(", "))]
    UnknownRulerTask { name: String, known: Vec<&'static str> },

    #[error("the filler text holds no paragraph; supply a text with at least one word")]
    EmptyFiller,

    #[error(
        "no paragraph of the filler has three sentences after {tries} draws, which task `resume` needs; \
         supply a text with longer paragraphs"
    )]
    ShortFiller { tries: usize },

    #[error(
        "RULER task `{task}` needs at least {needed} tokens but max_seq_length is {available}; \
         raise the context length"
    )]
    ContextTooShort { task: &'static str, needed: usize, available: usize },

    #[error("RULER task `{task}` needs a question set in {format} format; supply its JSON file")]
    MissingQuestions { task: &'static str, format: &'static str },

    #[error(
        "RULER task `{task}` has {available} questions, so there is no question {index}; ask for fewer cases"
    )]
    QuestionsExhausted { task: &'static str, index: usize, available: usize },

    #[error("the text is not a {format} question set: {source}; expected {expected}")]
    QuestionFormat { format: &'static str, expected: &'static str, source: serde_json::Error },

    #[error("the {format} question set holds no answerable question; supply the development split")]
    NoQuestions { format: &'static str },
}
