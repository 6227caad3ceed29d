//! Text to token ids, in the form that the model expects.

use crate::error::{EvalError, Result};
use oscar_tasks::Turn;
use oscar_text::{ChatInput, ModelText, Tokenizer};
use serde_json::{Value, json};

/// How prompts are written for a model.
#[derive(Clone, Copy)]
pub struct Prompts<'a> {
    text: &'a ModelText,
    /// Text without a chat template, for a base model.
    raw: bool,
}

impl<'a> Prompts<'a> {
    pub fn new(text: &'a ModelText, raw: bool) -> Self {
        Self { text, raw }
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.text.tokenizer
    }

    /// Whether prompts are raw text: because the caller asked for it, or because the model has no
    /// chat template.
    pub fn is_raw(&self) -> bool {
        self.raw || self.text.chat.is_none()
    }

    /// Tokens of a text without additions; 0 if it cannot be encoded.
    pub fn count(&self, text: &str) -> usize {
        self.text.tokenizer.encode(text, false).map_or(0, |tokens| tokens.len())
    }

    /// A conversation, to be answered next.
    pub fn chat(&self, turns: &[Turn]) -> Result<Vec<u32>> {
        let messages: Vec<Value> =
            turns.iter().map(|turn| json!({"role": turn.role.as_str(), "content": turn.text})).collect();
        let text = self.render(&Value::Array(messages), "a conversation")?;
        Ok(self.text.tokenizer.encode(&text, false)?)
    }

    /// A question with the beginning of its answer, which the model continues: in the chat
    /// template, or as raw text.
    pub fn continued(&self, question: &str, beginning: &str) -> Result<Vec<u32>> {
        if self.is_raw() {
            return Ok(self.text.tokenizer.encode(&format!("{question}{beginning}"), true)?);
        }
        let text = self.render(&json!([{"role": "user", "content": question}]), "a question")? + beginning;
        Ok(self.text.tokenizer.encode(&text, false)?)
    }

    /// Tokens that [`Prompts::continued`] adds around question and beginning.
    pub fn overhead(&self) -> Result<usize> {
        // Two texts that cannot merge with their surroundings into one token.
        Ok(self.continued("x", "")?.len())
    }

    /// The generated tokens as text.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        Ok(self.text.tokenizer.decode(tokens, true)?)
    }

    fn render(&self, messages: &Value, what: &'static str) -> Result<String> {
        let template =
            self.text.chat.as_ref().ok_or(EvalError::NoChatTemplate { what, hint: ", or give --raw" })?;
        Ok(template.render(&ChatInput::new(messages))?)
    }
}
