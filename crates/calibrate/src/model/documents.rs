//! Text for calibration, as token sequences.

use super::Subject;
use crate::error::CalibrateError;
use crate::options::CalibrationOptions;
use oscar_backend::Backend;
use oscar_tasks::{CALIBRATION_SEEDS_FROM, Document, Turn, calibration_text, filler};
use oscar_text::ChatInput;
use serde_json::{Value, json};

/// A piece of calibration input.
#[derive(Clone, Debug)]
pub enum Input {
    Text(String),
    /// A list of messages as the chat template takes them.
    Messages(Value),
}

impl From<Document> for Input {
    fn from(document: Document) -> Self {
        match document {
            Document::Text(text) => Self::Text(text),
            Document::Chat(turns) => Self::Messages(turns.iter().map(message).collect()),
        }
    }
}

/// A turn as chat templates take it.
pub(super) fn message(turn: &Turn) -> Value {
    json!({"role": turn.role.as_str(), "content": turn.text})
}

/// The calibration text that ships with oscar.
pub(super) fn shipped(options: &CalibrationOptions) -> Vec<Input> {
    // About four characters a token, with some to spare.
    let seed = CALIBRATION_SEEDS_FROM.saturating_add(options.seed);
    calibration_text(seed, options.tokens.saturating_mul(5)).into_iter().map(Input::from).collect()
}

/// The prose that ships with oscar, for probes.
pub(super) fn shipped_prose() -> Vec<Input> {
    filler::prose().iter().map(|piece| Input::Text(piece.text.to_owned())).collect()
}

/// Bytes of text tokenized at once.
const TEXT_PIECE: usize = 64 << 10;

/// Token sequences of at most `length`, `budget` tokens in all.
pub(super) fn sequences<B: Backend>(
    subject: &Subject<'_, B>,
    inputs: &[Input],
    length: usize,
    budget: usize,
) -> Result<Vec<Vec<u32>>, CalibrateError> {
    let text = subject.text;
    let mut all = Vec::new();
    let mut total = 0;
    for input in inputs {
        let tokens = match input {
            Input::Text(content) => {
                // In pieces: tokenizing a whole book takes memory that 16K tokens do not need.
                let mut tokens = Vec::new();
                let mut rest = content.as_str();
                while !rest.is_empty() && total + tokens.len() < budget {
                    let cut = rest.floor_char_boundary(TEXT_PIECE);
                    let (piece, tail) = rest.split_at(if cut == 0 { rest.len() } else { cut });
                    tokens.extend(text.tokenizer.encode(piece, tokens.is_empty())?);
                    rest = tail;
                }
                tokens
            }
            Input::Messages(messages) => match &text.chat {
                Some(template) => {
                    let chat = ChatInput { add_generation_prompt: false, ..ChatInput::new(messages) };
                    text.tokenizer.encode(&template.render(&chat)?, false)?
                }
                None => text.tokenizer.encode(&plain(messages), true)?,
            },
        };
        for piece in tokens.chunks(length.max(1)) {
            total += piece.len();
            all.push(piece.to_vec());
        }
        if total >= budget {
            break;
        }
    }
    Ok(all)
}

/// A conversation as plain text, for models without a chat template.
fn plain(messages: &Value) -> String {
    let contents = messages.as_array().into_iter().flatten().filter_map(|m| m["content"].as_str());
    contents.collect::<Vec<_>>().join("\n\n")
}
