//! The one error type of this crate. Every message says what was wrong, where, and what to do about
//! it.

/// Errors between text and token ids.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    #[error(
        "tokenizer.json is not a usable tokenizer: {reason}; fetch the file again or convert the model's tokenizer to the `tokenizers` JSON format"
    )]
    TokenizerJson { reason: String },

    #[error("tokenizer_config.json: {reason}")]
    TokenizerConfig { reason: String },

    #[error(
        "token id {id} is not in the vocabulary of {vocab_size} tokens; is this the tokenizer of the model that produced it?"
    )]
    UnknownToken { id: u32, vocab_size: usize },

    #[error("the tokenizer could not encode a text of {bytes} bytes: {reason}")]
    Encode { bytes: usize, reason: String },

    #[error("{bytes} bytes are more than {most} tokens")]
    TooManyTokens { bytes: usize, most: usize },

    #[error("the tokenizer could not decode {tokens} tokens: {reason}")]
    Decode { tokens: usize, reason: String },

    #[error("stop string number {index} is empty; remove it")]
    EmptyStopString { index: usize },

    #[error(
        "the model has no chat template; send a plain prompt, start the server with --chat-template FILE, or add chat_template.jinja beside tokenizer.json"
    )]
    NoChatTemplate,

    #[error("there is no chat template named `{name}`; the model has: {available}")]
    UnknownTemplate { name: String, available: String },

    #[error("chat template `{template}`, line {line}: syntax error: {reason}")]
    TemplateSyntax { template: String, line: usize, reason: String },

    /// The template itself refused the conversation through `raise_exception`.
    #[error("the chat template refuses these messages: {message}")]
    TemplateRaised { message: String },

    #[error(
        "chat template `{template}`, line {line}: stopped after {steps} steps; the template loops too long, or the conversation is too long for it"
    )]
    TemplateTooLong { template: String, line: usize, steps: u64 },

    #[error("chat template `{template}`, line {line}: {reason}")]
    TemplateRender { template: String, line: usize, reason: String },

    #[error("`{name}` must be {expected}, not {found}")]
    ChatInput { name: &'static str, expected: &'static str, found: &'static str },

    #[error(
        "the template variable `{name}` is set by the server; remove it from the extra template arguments"
    )]
    ReservedVariable { name: String },

    #[error("the grammar or schema cannot be used: {reason}")]
    Grammar { reason: String },

    #[error("there is no tool-call parser named `{name}`; there are: {known}")]
    UnknownDialect { name: String, known: String },
}
