//! Reads the text side of a model folder in the Hugging Face layout.
//!
//! Invariant: this is the only module that opens files; everything else is given bytes.

use std::io::ErrorKind;
use std::path::Path;

use crate::{ChatTemplate, NamedTemplate, TextError, Tokenizer, TokenizerConfig};

/// The tokenizer of a model and, if it has one, its chat template.
#[derive(Debug)]
pub struct ModelText {
    pub tokenizer: Tokenizer,
    pub chat: Option<ChatTemplate>,
}

impl ModelText {
    /// Reads `tokenizer.json` and, where present, `tokenizer_config.json` and
    /// `chat_template.jinja`. The `.jinja` file takes the place of the configuration's default
    /// template.
    pub fn from_dir(dir: &Path) -> Result<Self, TextError> {
        let tokenizer_path = dir.join("tokenizer.json");
        let tokenizer_json =
            read(&tokenizer_path).map_err(|source| TextError::Read { path: tokenizer_path, source })?;
        let config = read_optional(&dir.join("tokenizer_config.json"))?;
        let template = read_optional(&dir.join("chat_template.jinja"))?;
        Self::from_files(&tokenizer_json, config.as_deref(), template.as_deref())
    }

    /// The same from the files' bytes.
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

/// The largest file that is read; tokenizers reach some 30 MiB.
const LARGEST: u64 = 256 << 20;

/// Reads a regular file: a pipe or a device might never end.
fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(std::io::Error::new(ErrorKind::InvalidInput, "it is not a regular file"));
    }
    if metadata.len() > LARGEST {
        return Err(std::io::Error::new(
            ErrorKind::FileTooLarge,
            format!("it has more than {LARGEST} bytes"),
        ));
    }
    std::fs::read(path)
}

fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, TextError> {
    match read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TextError::Read { path: path.to_owned(), source }),
    }
}
