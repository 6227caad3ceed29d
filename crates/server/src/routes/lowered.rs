//! Requests in Anthropic's and the Responses API's words become chat requests: the fields that they
//! share with the chat go over as they are, and errors name what the client wrote.

use serde_json::{Map, Value};

use super::chat_completions::types::ChatBody;
use crate::error::ApiError;
use crate::schema::{Field, FieldType, Fields, RequestBody, pick};

/// Fields of the chat that choose among answers or constrain them, and have no other name in these
/// words. Fields that the answer would have no place for are missing here, so they are refused.
const PASSED_ON: [Field; 32] = pick(
    [
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "no_stop_trim",
        "ignore_eos",
        "min_tokens",
        "skip_special_tokens",
        "add_special_tokens",
        "cache_salt",
        "use_beam_search",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "enable_thinking",
        "reasoning_effort",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "json_schema",
        "regex",
        "ebnf",
        "grammar",
    ],
    ChatBody::TABLES,
);

/// The fields that go to the chat as they are.
#[derive(Debug)]
pub struct PassedOn(Map<String, Value>);

impl Fields for PassedOn {
    const FIELDS: &'static [Field] = &PASSED_ON;

    fn take(body: &mut Map<String, Value>) -> Result<Self, ApiError> {
        let mut fields = Map::new();
        for field in Self::FIELDS {
            if let Some(value) = <Option<Value> as FieldType>::take(field, body)? {
                fields.insert(field.name.to_owned(), value);
            }
        }
        Ok(Self(fields))
    }
}

/// A chat request in the making.
#[derive(Debug, Default)]
pub struct Lowered {
    chat: Map<String, Value>,
    messages: Vec<Value>,
    names: Names,
}

impl Lowered {
    /// Sets a field of the chat from a field that the client calls `from`.
    pub fn set(&mut self, name: &str, from: &str, value: Option<Value>) {
        if let Some(value) = value.filter(|value| !value.is_null()) {
            self.chat.insert(name.to_owned(), value);
            self.names.add(name, from);
        }
    }

    /// Whether a field of the chat is set.
    pub fn has(&self, name: &str) -> bool {
        self.chat.contains_key(name)
    }

    /// The client's name of a field that is set.
    pub fn name_of(&self, name: &str) -> Option<String> {
        self.has(name).then(|| self.names.of(name))
    }

    /// Adds a message. What it comes from is at `from` in the client's request.
    pub fn message(&mut self, message: Value, from: &str) {
        self.names.add(format!("messages[{}]", self.messages.len()), from);
        self.messages.push(message);
    }

    pub fn last_message(&mut self) -> Option<&mut Value> {
        self.messages.last_mut()
    }

    pub fn drop_last_message(&mut self) {
        self.messages.pop();
    }

    /// Says that a path of the last message comes from `from`.
    pub fn name_in_message(&mut self, path: &str, from: &str) {
        let last = self.messages.len().saturating_sub(1);
        self.names.add(format!("messages[{last}]{path}"), from);
    }

    pub fn name(&mut self, path: impl Into<String>, from: impl Into<String>) {
        self.names.add(path, from);
    }

    /// The chat request, and the client's names for what is in it.
    ///
    /// # Errors
    /// If a field that is passed on has been set by another one.
    pub fn finish(mut self, passed: PassedOn) -> Result<(Map<String, Value>, Names), ApiError> {
        for (name, value) in passed.0 {
            if self.chat.contains_key(&name) {
                let other = self.names.of(&name);
                return Err(ApiError::param(
                    name,
                    format!("says the same as {other}: leave one of them out"),
                ));
            }
            self.chat.insert(name, value);
        }
        self.chat.insert("messages".to_owned(), Value::Array(self.messages));
        Ok((self.chat, self.names))
    }
}

/// The client's names for parts of a chat request.
#[derive(Clone, Debug, Default)]
pub struct Names(Vec<(String, String)>);

impl Names {
    fn add(&mut self, path: impl Into<String>, from: impl Into<String>) {
        let (path, from) = (path.into(), from.into());
        if path != from {
            self.0.push((path, from));
        }
    }

    /// The client's name for a path of the chat request: that of the longest known part of it, and
    /// the rest.
    pub fn of(&self, path: &str) -> String {
        let rest = |known: &str| {
            let rest = path.strip_prefix(known)?;
            (rest.is_empty() || rest.starts_with(['.', '['])).then_some(rest)
        };
        let known = self.0.iter().filter_map(|(known, from)| Some((known.len(), from, rest(known)?)));
        // The last of two equal ones: later names are more exact.
        match known.max_by_key(|(length, ..)| *length) {
            Some((_, from, rest)) => format!("{from}{rest}"),
            None => path.to_owned(),
        }
    }

    /// The error with the client's name for the field.
    pub fn rename(&self, error: ApiError) -> ApiError {
        let ApiError::Invalid { message, param: Some(param), code } = error else { return error };
        let name = self.of(&param);
        let message = match message.strip_prefix(&format!("{param}:")) {
            Some(problem) => format!("{name}:{problem}"),
            None => message,
        };
        ApiError::Invalid { message, param: Some(name), code }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_known_part_is_renamed() {
        let mut names = Names::default();
        for (path, from) in [
            ("stop", "stop_sequences"),
            ("messages[1]", "input[4]"),
            ("messages[1].content", "input[4].output"),
            ("messages", "input"),
        ] {
            names.add(path, from);
        }
        for (path, name) in [
            ("stop[2]", "stop_sequences[2]"),
            ("stop_token_ids", "stop_token_ids"),
            ("messages[1].role", "input[4].role"),
            ("messages[1].content[0].text", "input[4].output[0].text"),
            ("messages[10]", "input[10]"),
            ("messages", "input"),
            ("seed", "seed"),
        ] {
            assert_eq!(names.of(path), name);
        }
        let error = names.rename(ApiError::param("stop", "must be a string"));
        assert_eq!(error.to_string(), "stop_sequences: must be a string");
    }
}
