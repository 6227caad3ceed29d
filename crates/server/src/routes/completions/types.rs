//! The wire of `POST /v1/completions`.

use serde::{Deserialize, Serialize};

use crate::generate::{MAX_LOGPROBS, PromptLogprobs, TopLogprobs};
use crate::routes::usage::Usage;
use crate::schema::{Field, Kind};

pub const FIELDS: &[Field] = &[
    Field::new("prompt", Kind::Prompt, "Text or token ids to continue, or a list of either").required(),
    Field::new("echo", Kind::Boolean, "Begin the answer with the prompt"),
    Field::new(
        "logprobs",
        Kind::Integer { min: 0, max: MAX_LOGPROBS },
        "Log-probabilities of the tokens, with that many alternatives",
    ),
    Field::new(
        "max_completion_tokens",
        Kind::Integer { min: 0, max: i64::MAX },
        "Another name for max_tokens",
    ),
    Field::new("best_of", Kind::Integer { min: 1, max: i64::MAX }, "Only the value of n"),
    Field::new("suffix", Kind::Text, "Only empty"),
];

/// What is particular to a plain completion; the rest is in `SamplingFields`.
#[derive(Debug, Deserialize)]
pub struct CompletionFields {
    pub prompt: Prompt,
    pub echo: Option<bool>,
    pub logprobs: Option<usize>,
    pub max_completion_tokens: Option<usize>,
}

/// An empty list reads as `Tokens`, and is refused as an empty prompt.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

impl Prompt {
    /// Sequences asked for.
    pub fn count(&self) -> usize {
        match self {
            Self::Text(_) | Self::Tokens(_) => 1,
            Self::Texts(texts) => texts.len(),
            Self::TokenLists(lists) => lists.len(),
        }
    }
}

#[derive(Debug, Serialize)]
pub struct CompletionResponse {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<CompletionChoice>,
    pub system_fingerprint: String,
    /// Of a whole response: the usage. Of a chunk: absent unless asked for, then null but in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
}

#[derive(Debug, Serialize)]
pub struct CompletionChoice {
    pub index: usize,
    pub text: String,
    pub logprobs: Option<CompletionLogprobs>,
    pub finish_reason: Option<&'static str>,
    /// The stop string that ended it.
    pub stop_reason: Option<String>,
    /// Only on the first choice of a prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
}

/// Parallel lists, one item a token.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CompletionLogprobs {
    pub tokens: Vec<String>,
    pub token_logprobs: Vec<Option<f32>>,
    pub top_logprobs: Vec<Option<TopLogprobs>>,
    /// Where the token begins, in characters of the text.
    pub text_offset: Vec<usize>,
}
