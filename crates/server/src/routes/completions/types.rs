//! The wire of `POST /v1/completions`.

use serde::Serialize;
use serde_json::Value;

use crate::generate::{MAX_LOGPROBS, PromptLogprobs, TopLogprobs};
use crate::routes::frame::Chunk;
use crate::routes::sampling::SamplingFields;
use crate::schema::{FieldValue, Kind, request_fields};
use crate::tools::FormFields;

/// The fields of a completion request.
pub type CompletionBody = (CompletionFields, FormFields, SamplingFields);

request_fields! {
    /// Fields that only a plain completion has.
    pub struct CompletionFields {
        /// Text or token ids to continue, or a list of either
        pub prompt: Prompt,
        /// Begin the answer with the prompt
        pub echo: Option<bool>,
        /// Log-probabilities of the tokens, with that many alternatives
        pub logprobs: Option<usize> = Kind::Integer { min: 0, max: MAX_LOGPROBS },
        /// Another name for max_tokens
        pub max_completion_tokens: Option<usize>,
        /// Only the value of n
        pub best_of: Option<Value> = Kind::AT_LEAST_ONE,
        /// Only empty
        pub suffix: Option<Value> = Kind::Text,
    }
}

/// One or more prompts. An empty list reads as a prompt without tokens, which is refused.
#[derive(Debug)]
pub enum Prompt {
    Texts(Vec<String>),
    Tokens(Vec<Vec<u32>>),
}

impl Prompt {
    /// Sequences asked for.
    pub fn count(&self) -> usize {
        match self {
            Self::Texts(texts) => texts.len(),
            Self::Tokens(lists) => lists.len(),
        }
    }
}

impl FieldValue for Prompt {
    const KIND: Kind = Kind::Prompt;

    fn read(value: Value) -> Option<Self> {
        let first = value.as_array().map(|items| items.first());
        match first {
            Some(Some(Value::Array(_))) => serde_json::from_value(value).ok().map(Self::Tokens),
            Some(None | Some(Value::Number(_))) => Some(Self::Tokens(vec![Vec::read(value)?])),
            _ => Vec::read(value).map(Self::Texts),
        }
    }
}

pub type CompletionResponse = Chunk<CompletionChoice>;

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
