//! The wire of `POST /v1/chat/completions`.

use serde::Serialize;
use serde_json::{Map, Value};

use super::template::TemplateFields;
use crate::generate::{ChatEntry, MAX_LOGPROBS, PromptLogprobs};
use crate::routes::frame::Chunk;
use crate::routes::sampling::SamplingFields;
use crate::routes::usage::UsageReport;
use crate::schema::{Kind, request_fields};
use crate::tools::FormFields;

/// The fields of a chat request.
pub type ChatBody = (ChatFields, TemplateFields, FormFields, SamplingFields);

request_fields! {
    /// Fields that only a chat request has.
    pub struct ChatFields {
        /// The conversation: objects with `role` and `content` (text, or text parts, which are
        /// joined with a line break as in vLLM)
        pub messages: Vec<Map<String, Value>>,
        /// Most tokens of each choice; goes before max_tokens
        pub max_completion_tokens: Option<usize> = Kind::AT_LEAST_ONE,
        /// Log-probabilities of the generated tokens
        pub logprobs: Option<bool>,
        /// That many alternatives at each token; needs logprobs
        pub top_logprobs: Option<usize> = Kind::Integer { min: 0, max: MAX_LOGPROBS },
        /// False leaves reasoning in the content. A call in it is then a call, so answers that may
        /// hold calls of a demanded form go without free reasoning
        pub separate_reasoning: Option<bool>,
        /// Rows of the cache that the conversation keeps: `budget` (rows, or bytes such as "64M"),
        /// `evict` (`keydiff`, `snapkv`, `tova`, `recent`; `keydiff-post`, `kvzip` and `episodes`
        /// keep the history and read a view of it), `view` (`auto`, or `none` for the whole history), `protect`
        /// (`system`, `tools`, `tool_results`, {"messages": [0, 3]}; system messages and
        /// descriptions of tools if absent)
        pub kv: Option<Map<String, Value>>,
    }
}

#[derive(Debug, Serialize)]
pub struct ChatResponse {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<ChatChoice>,
    pub usage: UsageReport,
    pub system_fingerprint: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// Where another machine fetches the prompt's pages, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_transfer_params: Option<Value>,
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
    /// Null beside tool calls without text.
    pub content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    pub refusal: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
}

/// A tool call: whole in a response, in pieces in chunks.
#[derive(Debug, Default, Serialize)]
pub struct ToolCall {
    /// Only in chunks: which call the piece belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    pub function: FunctionCall,
}

#[derive(Debug, Default, Serialize)]
pub struct FunctionCall {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub arguments: String,
}

#[derive(Debug, Default, Serialize)]
pub struct ChatLogprobs {
    pub content: Vec<ChatEntry>,
    pub refusal: Option<Value>,
}

pub type ChatChunk = Chunk<ChunkChoice>;

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
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
}
