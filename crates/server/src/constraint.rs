//! Grammars as constraints of the engine.

use std::sync::{Arc, OnceLock};

use oscar_engine::{Constraint, ConstraintState, SharedConstraint};
use oscar_text::{Grammar, Grammars, ModelText, TextError, Thinking};

use crate::error::ApiError;

/// The grammar compiler of the served model, made when the first request needs it: it reads the
/// whole vocabulary.
#[derive(Debug, Default)]
pub struct Constraints {
    grammars: OnceLock<Result<Grammars, TextError>>,
}

impl Constraints {
    /// The constraint of an answer. `param` names the field that asked for it.
    pub fn compile(
        &self,
        text: &ModelText,
        vocab_size: usize,
        end_tokens: &[u32],
        param: &str,
        grammar: &Grammar,
        thinking: &Thinking,
    ) -> Result<SharedConstraint, ApiError> {
        let grammars = self.grammars.get_or_init(|| Grammars::new(&text.tokenizer, vocab_size, end_tokens));
        let compiled = grammars
            .as_ref()
            .map_err(|error| ApiError::param(param, error))?
            .compile(grammar, thinking)
            .map_err(|error| ApiError::param(param, error))?;
        Ok(SharedConstraint(Arc::new(TextConstraint { compiled, param: param.to_owned() })))
    }
}

struct TextConstraint {
    compiled: oscar_text::Constraint,
    param: String,
}

struct TextState(oscar_text::ConstraintState);

impl Constraint for TextConstraint {
    fn start(&self) -> Box<dyn ConstraintState> {
        Box::new(TextState(self.compiled.start()))
    }

    fn parameter(&self) -> &str {
        &self.param
    }
}

impl ConstraintState for TextState {
    fn allowed(&mut self) -> Result<Vec<u32>, String> {
        self.0.allowed().map_err(|error| error.to_string())
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        self.0.accept(token).map(drop).map_err(|error| error.to_string())
    }
}
