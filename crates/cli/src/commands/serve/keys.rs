//! Where the server's API keys come from.

use anyhow::{Context, Result};
use oscar_server::{ApiKey, Keys, Role};
use std::path::{Path, PathBuf};

/// Variables with keys, separated by commas.
const VARIABLES: [(&str, Role); 2] =
    [("OSCAR_API_KEYS", Role::User), ("OSCAR_OPERATOR_KEYS", Role::Operator)];

/// The file, if there is one, and the environment. A source without a key is an error: the server
/// would be open.
#[derive(Clone, Debug)]
pub struct KeySource {
    file: Option<PathBuf>,
}

impl KeySource {
    pub fn new(file: Option<&Path>) -> Self {
        Self { file: file.map(Path::to_owned) }
    }

    /// Whether keys can change while the server runs.
    pub fn reloads(&self) -> bool {
        self.file.is_some()
    }

    pub fn read(&self) -> Result<Vec<ApiKey>> {
        let mut keys = Vec::new();
        if let Some(path) = &self.file {
            let place = format!("--api-key-file {}", path.display());
            let text = std::fs::read_to_string(path).with_context(|| place.clone())?;
            keys = ApiKey::parse_file(&text, &place)?;
        }
        for (variable, role) in VARIABLES {
            if let Some(list) = std::env::var_os(variable) {
                let list = list.into_string().ok().with_context(|| format!("{variable} is not UTF-8"))?;
                keys.extend(ApiKey::parse_list(&list, role, variable)?);
            }
        }
        Ok(keys)
    }

    /// Reads the keys again and puts them into force. Where that fails the old ones stay.
    pub fn reload(&self, keys: &Keys) {
        match self.read() {
            Ok(new) => {
                tracing::info!(keys = new.len(), "the API keys were read again");
                keys.replace(new);
            }
            Err(error) => tracing::error!("the API keys stay as they were: {error:#}"),
        }
    }
}
