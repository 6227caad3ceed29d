//! The forms in which model families write tool calls.

use super::harmony;
use crate::TextError;

/// How a model writes its tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3.
    Hermes,
    /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`:
    /// Qwen3-Coder, Qwen3.5.
    QwenXml,
    /// `{"name": …, "parameters": {…}}` as the whole answer: Llama 3.
    Llama,
    /// `[TOOL_CALLS][{"name": …, "arguments": {…}}]` or `[TOOL_CALLS]name[ARGS]{…}`.
    Mistral,
    /// `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM-4.5 to
    /// 4.7.
    Glm,
    /// `<minimax:tool_call><invoke name="…"><parameter
    /// name="…">value</parameter></invoke></minimax:tool_call>`.
    MiniMax,
    /// Messages in channels, a call in one `to=functions.name`: gpt-oss. See [`super::harmony`].
    Harmony,
}

/// Opening marker of a block in the dialects that share it.
pub(super) const TOOL_CALL: &str = "<tool_call>";
/// Opening of a call, which Qwen3-Coder writes at times without the block around it.
pub(super) const FUNCTION: &str = "<function=";
pub(super) const PYTHON_TAG: &str = "<|python_tag|>";
pub(super) const TOOL_CALLS: &str = "[TOOL_CALLS]";
pub(super) const MINIMAX_TOOL_CALL: &str = "<minimax:tool_call>";
pub(super) const START: &str = "<|start|>";
pub(super) const CHANNEL: &str = "<|channel|>";

impl Dialect {
    pub const ALL: [Self; 7] =
        [Self::Hermes, Self::QwenXml, Self::Llama, Self::Mistral, Self::Glm, Self::MiniMax, Self::Harmony];

    /// The name of its parser.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::QwenXml => "qwen3_xml",
            Self::Llama => "llama3_json",
            Self::Mistral => "mistral",
            Self::Glm => "glm45",
            Self::MiniMax => "minimax_m2",
            Self::Harmony => "harmony",
        }
    }

    /// Reads the name of a parser; names that vLLM and SGLang use for the same dialect are
    /// understood.
    pub fn from_name(name: &str) -> Result<Self, TextError> {
        match name {
            "qwen3_coder" => Ok(Self::QwenXml),
            "llama4_json" => Ok(Self::Llama),
            "glm47" => Ok(Self::Glm),
            "openai" | "gpt-oss" => Ok(Self::Harmony),
            _ => Self::ALL.into_iter().find(|dialect| dialect.name() == name).ok_or_else(|| {
                let known = Self::ALL.map(Self::name).join(", ");
                TextError::UnknownDialect { name: name.to_owned(), known }
            }),
        }
    }

    /// The dialect that the source of a chat template writes; none if it shows none of ours.
    pub fn of_template(source: &str) -> Option<Self> {
        let has = |marker: &str| source.contains(marker);
        if has(CHANNEL) && has(START) {
            Some(Self::Harmony)
        } else if has(MINIMAX_TOOL_CALL) {
            Some(Self::MiniMax)
        } else if has("<arg_key>") {
            Some(Self::Glm)
        } else if has(FUNCTION) {
            Some(Self::QwenXml)
        } else if has(TOOL_CALLS) {
            Some(Self::Mistral)
        } else if has(TOOL_CALL) {
            Some(Self::Hermes)
        } else if (has(PYTHON_TAG) || has("ipython")) && has("\"parameters\": ") {
            Some(Self::Llama)
        } else {
            None
        }
    }

    /// Whether replies consist of messages in channels. They are then read with this dialect also
    /// where no tools are offered, or their markup would stay in the text.
    pub fn has_channels(self) -> bool {
        self == Self::Harmony
    }

    /// Markers that open calls anywhere in an answer.
    pub(crate) fn openers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::Glm => &[TOOL_CALL],
            Self::QwenXml => &[TOOL_CALL, FUNCTION],
            Self::Llama => &[PYTHON_TAG],
            Self::Mistral => &[TOOL_CALLS],
            Self::MiniMax => &[MINIMAX_TOOL_CALL],
            // Its reader is another one.
            Self::Harmony => &[],
        }
    }

    /// Special tokens that belong to the dialect: the detokenizer must not drop them.
    pub fn special_tokens(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &[TOOL_CALL, "</tool_call>"],
            Self::QwenXml => &[TOOL_CALL, "</tool_call>", FUNCTION, "</function>", "</parameter>"],
            Self::Llama => &[PYTHON_TAG],
            Self::Mistral => &[TOOL_CALLS, "[CALL_ID]", "[ARGS]"],
            Self::Glm => {
                &[TOOL_CALL, "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
            }
            Self::MiniMax => &[MINIMAX_TOOL_CALL, "</minimax:tool_call>"],
            Self::Harmony => &[
                START,
                CHANNEL,
                harmony::MESSAGE,
                harmony::CONSTRAIN,
                harmony::END,
                harmony::CALL,
                harmony::RETURN,
            ],
        }
    }
}
