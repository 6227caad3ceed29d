//! The model families, and how a `config.json` names them.

use serde::Deserialize;
use serde_json::Value;

use crate::error::LoadError;
use crate::families::{
    deepseek_v3, gemma3, glm4_moe, glm4_moe_lite, gpt_oss, llama, minimax_m2, mistral, mixtral, qwen2, qwen3,
    qwen3_moe, qwen3_next,
};

/// The model families whose forward pass is implemented.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    Qwen3,
    Qwen2,
    Llama,
    Mistral,
    Qwen3Moe,
    Mixtral,
    Glm4Moe,
    MiniMaxM2,
    Gemma3,
    GptOss,
    DeepseekV3,
    Glm4MoeLite,
    Qwen3Next,
    Qwen3_5,
    Qwen3_5Moe,
}

impl Family {
    pub const ALL: [Family; 15] = [
        Family::Qwen3,
        Family::Qwen2,
        Family::Llama,
        Family::Mistral,
        Family::Qwen3Moe,
        Family::Mixtral,
        Family::Glm4Moe,
        Family::MiniMaxM2,
        Family::Gemma3,
        Family::GptOss,
        Family::DeepseekV3,
        Family::Glm4MoeLite,
        Family::Qwen3Next,
        Family::Qwen3_5,
        Family::Qwen3_5Moe,
    ];

    /// The class name in `architectures` and the value of `model_type`.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Qwen3 => qwen3::NAMES,
            Self::Qwen2 => qwen2::NAMES,
            Self::Llama => llama::NAMES,
            Self::Mistral => mistral::NAMES,
            Self::Qwen3Moe => qwen3_moe::NAMES,
            Self::Mixtral => mixtral::NAMES,
            Self::Glm4Moe => glm4_moe::NAMES,
            Self::MiniMaxM2 => minimax_m2::NAMES,
            Self::Gemma3 => gemma3::NAMES,
            Self::GptOss => gpt_oss::NAMES,
            Self::DeepseekV3 => deepseek_v3::NAMES,
            Self::Glm4MoeLite => glm4_moe_lite::NAMES,
            Self::Qwen3Next => qwen3_next::NAMES,
            Self::Qwen3_5 => qwen3_next::NAMES_3_5,
            Self::Qwen3_5Moe => qwen3_next::NAMES_3_5_MOE,
        }
    }

    /// The class name in `architectures`.
    pub fn architecture(self) -> &'static str {
        self.names().0
    }

    /// The value of `model_type`.
    pub fn model_type(self) -> &'static str {
        self.names().1
    }

    /// The class and the `model_type` of a model with further towers whose `text_config` is of this
    /// family.
    fn wrapper(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Gemma3 => Some(gemma3::WRAPPER),
            Self::Qwen3_5 => Some(qwen3_next::WRAPPER_3_5),
            Self::Qwen3_5Moe => Some(qwen3_next::WRAPPER_3_5_MOE),
            _ => None,
        }
    }

    /// `architectures` decides when present: `model_type` is shared by chat, classifier and reward
    /// heads.
    pub(crate) fn detect(header: &Header) -> Result<Self, LoadError> {
        let architecture = header.architectures.as_deref().unwrap_or_default().first();
        let (successor, why) = deepseek_v3::SUCCESSOR;
        if architecture.is_some_and(|class| class == successor) {
            return Err(LoadError::config_field("architectures", why));
        }
        let found = match (architecture, &header.model_type) {
            (Some(class), _) => {
                let is_wrapped = |family: &Self| family.wrapper().is_some_and(|(name, _)| name == class);
                let named = |family: &Self| family.architecture() == class || is_wrapped(family);
                Self::ALL.into_iter().find(named).ok_or(class)
            }
            (None, Some(kind)) => {
                let is_wrapped = |family: &Self| family.wrapper().is_some_and(|(_, name)| name == kind);
                let named = |family: &Self| family.model_type() == kind || is_wrapped(family);
                Self::ALL.into_iter().find(named).ok_or(kind)
            }
            (None, None) => {
                return Err(LoadError::config_field("architectures", "is missing, and so is model_type"));
            }
        };
        found.map_err(|name| LoadError::UnknownArchitecture {
            found: name.clone(),
            supported: Self::ALL.map(Family::architecture).to_vec(),
        })
    }
}

/// The fields read before the family is known.
#[derive(Debug, Deserialize)]
pub(crate) struct Header {
    architectures: Option<Vec<String>>,
    model_type: Option<String>,
    pub quantization_config: Option<Value>,
}
