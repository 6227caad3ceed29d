//! The wire of `POST /v1/chat/completions`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::generate::{ChatEntry, MAX_LOGPROBS, PromptLogprobs};
use crate::routes::usage::Usage;
use crate::schema::{Field, Kind};

pub const FIELDS: &[Field] = &[
    Field::new(
        "messages",
        Kind::Objects,
        "The conversation: objects with `role` and `content` (text or text parts)",
    )
    .required(),
    Field::new(
        "max_completion_tokens",
        Kind::Integer { min: 1, max: i64::MAX },
        "Most tokens of each choice; goes before max_tokens",
    ),
    Field::new("logprobs", Kind::Boolean, "Log-probabilities of the generated tokens"),
    Field::new(
        "top_logprobs",
        Kind::Integer { min: 0, max: MAX_LOGPROBS },
        "That many alternatives at each token; needs logprobs",
    ),
    Field::new("tools", Kind::Objects, "Tool descriptions, handed to the chat template"),
    Field::new("tool_choice", Kind::Any, "`auto`, or `none` to keep the tools from the template"),
    Field::new("documents", Kind::Objects, "Documents, handed to the chat template"),
    Field::new(
        "chat_template",
        Kind::Text,
        "Name of one of the model's templates; template source only where the server allows it",
    ),
    Field::new("chat_template_kwargs", Kind::Object, "Further variables of the chat template"),
    Field::new("enable_thinking", Kind::Boolean, "Short for the template variable of that name"),
    Field::new("reasoning_effort", Kind::Text, "Handed to the chat template"),
    Field::new("separate_reasoning", Kind::Boolean, "False leaves reasoning in the content"),
    Field::new("add_generation_prompt", Kind::Boolean, "Open the assistant's turn; true if absent"),
    Field::new(
        "continue_final_message",
        Kind::Boolean,
        "Go on in the last message instead of opening a new turn",
    ),
    Field::new("response_format", Kind::Object, "Only `{\"type\": \"text\"}`"),
];

/// What is particular to a chat request; the rest is in `SamplingFields`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ChatFields {
    pub messages: Vec<Map<String, Value>>,
    pub max_completion_tokens: Option<usize>,
    pub logprobs: Option<bool>,
    pub top_logprobs: Option<usize>,
    pub tools: Option<Value>,
    pub tool_choice: Option<Value>,
    pub documents: Option<Value>,
    pub chat_template: Option<String>,
    pub chat_template_kwargs: Option<Map<String, Value>>,
    pub enable_thinking: Option<bool>,
    pub reasoning_effort: Option<String>,
    pub separate_reasoning: Option<bool>,
    pub add_generation_prompt: Option<bool>,
    pub continue_final_message: Option<bool>,
}

#[derive(Debug, Serialize)]
pub struct ChatResponse {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<ChatChoice>,
    pub usage: Usage,
    pub system_fingerprint: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
}

#[derive(Debug, Serialize)]
pub struct ChatChoice {
    pub index: usize,
    pub message: Message,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: &'static str,
    /// The stop string that ended it.
    pub stop_reason: Option<String>,
}

#[derive(Debug, Serialize)]
pub struct Message {
    pub role: &'static str,
    pub content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    pub refusal: Option<String>,
}

#[derive(Debug, Default, Serialize)]
pub struct ChatLogprobs {
    pub content: Vec<ChatEntry>,
    pub refusal: Option<Value>,
}

#[derive(Debug, Serialize)]
pub struct ChatChunk {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<ChunkChoice>,
    pub system_fingerprint: String,
    /// Absent unless asked for; then null but in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
}

#[derive(Debug, Serialize)]
pub struct ChunkChoice {
    pub index: usize,
    pub delta: Delta,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<String>,
}

#[derive(Debug, Default, Serialize)]
pub struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
}
