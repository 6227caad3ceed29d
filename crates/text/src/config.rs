//! The parts of `tokenizer_config.json` that matter here: the special tokens and the chat
//! templates.
//!
//! Invariant: a token that is null or missing is absent here, so that a template sees it as
//! undefined, as it would in Python. Other fields are ignored.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::TextError;

/// The names that `transformers` hands to a chat template, and that may be null, a string or an
/// object.
const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The special tokens a model declares, by role (`bos_token`, `eos_token`, ...), as text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    named: BTreeMap<String, String>,
    additional: Vec<String>,
}

impl SpecialTokens {
    /// The token that plays `role`, for example `"bos_token"`.
    pub fn get(&self, role: &str) -> Option<&str> {
        self.named.get(role).map(String::as_str)
    }

    pub fn bos(&self) -> Option<&str> {
        self.get("bos_token")
    }

    pub fn eos(&self) -> Option<&str> {
        self.get("eos_token")
    }

    pub fn pad(&self) -> Option<&str> {
        self.get("pad_token")
    }

    /// Sets or replaces the token of one role.
    pub fn set(&mut self, role: impl Into<String>, token: impl Into<String>) {
        self.named.insert(role.into(), token.into());
    }

    /// Role and token, sorted by role.
    pub fn named(&self) -> impl Iterator<Item = (&str, &str)> {
        self.named.iter().map(|(role, token)| (role.as_str(), token.as_str()))
    }

    /// Special tokens without a role (`additional_special_tokens`).
    pub fn additional(&self) -> &[String] {
        &self.additional
    }
}

/// A chat template with the name it goes by; a lone template is called `default`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedTemplate {
    pub name: String,
    pub source: String,
}

impl NamedTemplate {
    pub const DEFAULT: &'static str = "default";

    /// A template under the name `default`.
    pub fn unnamed(source: impl Into<String>) -> Self {
        Self { name: Self::DEFAULT.to_owned(), source: source.into() }
    }
}

/// The parts of `tokenizer_config.json` that serving needs. `Default` stands for a missing file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenizerConfig {
    pub special: SpecialTokens,
    pub templates: Vec<NamedTemplate>,
}

impl TokenizerConfig {
    /// Reads the bytes of a `tokenizer_config.json`.
    pub fn from_json(bytes: &[u8]) -> Result<Self, TextError> {
        let root: Value = serde_json::from_slice(bytes).map_err(|error| wrong(error.to_string()))?;
        let Value::Object(root) = root else {
            return Err(wrong("the file must hold one JSON object".to_owned()));
        };
        let mut special = SpecialTokens::default();
        for role in NAMED {
            if let Some(token) = root.get(role).map(|value| token_text(role, value)).transpose()?.flatten() {
                special.set(role, token);
            }
        }
        for field in ["additional_special_tokens", "extra_special_tokens"] {
            match root.get(field) {
                None | Some(Value::Null) => {}
                Some(Value::Array(tokens)) => {
                    for token in tokens {
                        special.additional.extend(token_text(field, token)?);
                    }
                }
                // Newer files name the extra tokens, and templates may use those names.
                Some(Value::Object(tokens)) => {
                    for (role, token) in tokens {
                        if let Some(token) = token_text(role, token)? {
                            special.set(role, token);
                        }
                    }
                }
                Some(other) => {
                    return Err(wrong(format!("`{field}` must be a list or an object, not {}", kind(other))));
                }
            }
        }
        let templates = root.get("chat_template").map(templates).transpose()?.unwrap_or_default();
        Ok(Self { special, templates })
    }
}

/// A token is null, its text, or an object that describes it and holds the text in `content`.
fn token_text(field: &str, value: &Value) -> Result<Option<String>, TextError> {
    match value {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        Value::Object(token) => match token.get("content") {
            Some(Value::String(text)) => Ok(Some(text.clone())),
            _ => Err(wrong(format!("`{field}` is an object without a string `content`"))),
        },
        other => Err(wrong(format!("`{field}` must be null, a string or an object, not {}", kind(other)))),
    }
}

fn templates(value: &Value) -> Result<Vec<NamedTemplate>, TextError> {
    match value {
        Value::Null => Ok(Vec::new()),
        Value::String(source) => Ok(vec![NamedTemplate::unnamed(source)]),
        Value::Array(entries) => entries
            .iter()
            .map(|entry| match (entry.get("name"), entry.get("template")) {
                (Some(Value::String(name)), Some(Value::String(source))) => {
                    Ok(NamedTemplate { name: name.clone(), source: source.clone() })
                }
                _ => Err(wrong(
                    "each `chat_template` entry needs the strings `name` and `template`".to_owned(),
                )),
            })
            .collect(),
        other => Err(wrong(format!("`chat_template` must be a string or a list, not {}", kind(other)))),
    }
}

/// The JSON type of a value, in words for a message.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn wrong(reason: String) -> TextError {
    TextError::TokenizerConfig { reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_may_be_null_a_string_or_an_object() {
        let config = TokenizerConfig::from_json(
            br#"{"bos_token": null, "eos_token": {"content": "</s>", "lstrip": false}, "pad_token": "<pad>",
                "additional_special_tokens": ["<a>", {"content": "<b>"}],
                "extra_special_tokens": {"image_token": "<img>"}}"#,
        )
        .unwrap();
        assert_eq!(config.special.bos(), None);
        assert_eq!(config.special.eos(), Some("</s>"));
        assert_eq!(config.special.pad(), Some("<pad>"));
        assert_eq!(config.special.get("image_token"), Some("<img>"));
        assert_eq!(config.special.additional(), ["<a>", "<b>"]);
        assert!(config.templates.is_empty());
    }

    #[test]
    fn a_template_may_be_a_string_or_a_named_list() {
        let one = TokenizerConfig::from_json(br#"{"chat_template": "x"}"#).unwrap();
        assert_eq!(one.templates, [NamedTemplate::unnamed("x")]);
        let two = TokenizerConfig::from_json(
            br#"{"chat_template": [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}]}"#,
        )
        .unwrap();
        assert_eq!(two.templates[1], NamedTemplate { name: "tool_use".into(), source: "y".into() });
    }

    #[test]
    fn wrong_types_name_the_field() {
        for (json, field) in [
            (r#"{"bos_token": 7}"#, "bos_token"),
            (r#"{"eos_token": {"text": "</s>"}}"#, "eos_token"),
            (r#"{"additional_special_tokens": "<a>"}"#, "additional_special_tokens"),
            (r#"{"chat_template": 1}"#, "chat_template"),
            (r#"{"chat_template": [{"name": "default"}]}"#, "chat_template"),
        ] {
            let message = TokenizerConfig::from_json(json.as_bytes()).unwrap_err().to_string();
            assert!(message.contains(field), "{message}");
        }
        for json in ["", "[]", "{\"bos_token\": ", "\u{0}"] {
            let error = TokenizerConfig::from_json(json.as_bytes()).unwrap_err();
            assert!(matches!(error, TextError::TokenizerConfig { .. }), "{error}");
        }
    }
}
