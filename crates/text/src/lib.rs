//! Everything between characters and token ids: tokenizer, streaming detokenizer, stop strings and
//! chat templates.
//!
//! Invariant: this crate knows no engine and no HTTP. Its types are built from bytes and strings
//! the caller already holds; it opens no files.
//!
//! A reply travels `token id -> StreamDecoder -> StopMatcher -> client`; a request travels
//! `messages -> ChatTemplate -> Tokenizer -> token ids`.

mod chat;
mod config;
mod constraint;
mod error;
mod load;
mod stop;
mod stream;
mod tokenizer;
mod tools;

pub use chat::{ChatInput, ChatTemplate};
pub use config::{NamedTemplate, SpecialTokens, TokenizerConfig};
pub use constraint::{CallGrammar, Constraint, ConstraintState, Grammar, Grammars, Thinking};
pub use error::TextError;
pub use load::ModelText;
pub use stop::{StopMatcher, StopOutput};
pub use stream::StreamDecoder;
pub use tokenizer::Tokenizer;
pub use tools::{Dialect, ReasoningTags, ReplyEvent, ReplyOptions, ReplyParser, ToolSchemas};
