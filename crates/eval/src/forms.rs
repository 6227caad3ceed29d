//! Forms that answers must have, as constraints of the engine.

use crate::error::Result;
use oscar_engine::{Constraint, ConstraintState, SharedConstraint};
use oscar_text::{Grammar, Grammars, Thinking, Tokenizer};
use std::sync::Arc;

/// Compiles forms for one vocabulary.
pub struct Forms(Grammars);

impl Forms {
    /// `end_tokens` end an answer that is complete.
    pub fn new(tokenizer: &Tokenizer, vocab_size: usize, end_tokens: &[u32]) -> Result<Self> {
        Ok(Self(Grammars::new(tokenizer, vocab_size, end_tokens)?))
    }

    pub fn constraint(&self, grammar: &Grammar) -> Result<SharedConstraint> {
        let compiled = self.0.compile(grammar, &Thinking::None)?;
        Ok(SharedConstraint(Arc::new(Form(compiled))))
    }
}

struct Form(oscar_text::Constraint);
struct FormState(oscar_text::ConstraintState);

impl Constraint for Form {
    fn parameter(&self) -> &str {
        "form"
    }

    fn start(&self) -> Box<dyn ConstraintState> {
        Box::new(FormState(self.0.start()))
    }
}

impl ConstraintState for FormState {
    fn allowed(&mut self) -> std::result::Result<Vec<u32>, String> {
        self.0.allowed().map_err(|error| error.to_string())
    }

    fn accept(&mut self, token: u32) -> std::result::Result<(), String> {
        self.0.accept(token).map(drop).map_err(|error| error.to_string())
    }
}
