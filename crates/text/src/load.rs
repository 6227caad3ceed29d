//! The text side of a model folder in the Hugging Face layout.

use crate::{ChatTemplate, NamedTemplate, TextError, Tokenizer, TokenizerConfig};

/// The tokenizer of a model and, if it has one, its chat template.
#[derive(Debug)]
pub struct ModelText {
    pub tokenizer: Tokenizer,
    pub chat: Option<ChatTemplate>,
}

impl ModelText {
    /// From the bytes of `tokenizer.json` and, where present, of `tokenizer_config.json` and
    /// `chat_template.jinja`. The `.jinja` file takes the place of the configuration's default
    /// template.
    pub fn from_files(
        tokenizer_json: &[u8],
        tokenizer_config: Option<&[u8]>,
        chat_template: Option<&[u8]>,
    ) -> Result<Self, TextError> {
        let mut config = tokenizer_config.map(TokenizerConfig::from_json).transpose()?.unwrap_or_default();
        if let Some(source) = chat_template {
            let source = String::from_utf8_lossy(source);
            config.templates.retain(|template| template.name != NamedTemplate::DEFAULT);
            config.templates.insert(0, NamedTemplate::unnamed(source));
        }
        let tokenizer = Tokenizer::from_json(tokenizer_json, &config)?;
        let chat = match config.templates.is_empty() {
            true => None,
            false => Some(ChatTemplate::new(&config.templates, &config.special)?),
        };
        Ok(Self { tokenizer, chat })
    }
}
