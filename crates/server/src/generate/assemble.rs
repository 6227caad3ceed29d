//! One choice's way from tokens to text: detokenizer, stop strings, reasoning split.
//!
//! Invariant: the emitted pieces concatenate to the same text however the tokens arrive, and
//! nothing is emitted that a stop string could still take back.

use oscar_text::{StopMatcher, StreamDecoder, TextError, Tokenizer};

use super::reasoning::{Split, Splitter};
use crate::config::Reasoning;

/// How a request wants its text.
#[derive(Clone, Debug)]
pub struct TextOptions {
    pub stop: Vec<String>,
    /// Leave the stop string in the text.
    pub include_stop: bool,
    pub skip_special: bool,
    /// Stop strings are not looked for before this many tokens.
    pub min_tokens: usize,
    pub reasoning: Reasoning,
    /// The end of the prompt, which may have opened the reasoning.
    pub prompt_end: String,
}

/// The text of one choice in the making.
#[derive(Debug)]
pub struct Assembler {
    decoder: StreamDecoder,
    stops: StopMatcher,
    splitter: Option<Splitter>,
    min_tokens: usize,
    pub tokens: usize,
    pub reasoning_tokens: usize,
}

/// The text that a token added.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Piece {
    pub text: Split,
    /// The stop string that ended the choice, by its index.
    pub stopped: Option<usize>,
}

impl Assembler {
    pub fn new(tokenizer: &Tokenizer, options: &TextOptions) -> Result<Self, TextError> {
        Ok(Self {
            decoder: StreamDecoder::new(tokenizer, options.skip_special),
            stops: StopMatcher::new(options.stop.iter().cloned(), options.include_stop)?,
            splitter: Splitter::new(&options.reasoning, &options.prompt_end),
            min_tokens: options.min_tokens,
            tokens: 0,
            reasoning_tokens: 0,
        })
    }

    pub fn push(&mut self, token: u32) -> Piece {
        self.tokens += 1;
        // A model's vocabulary may be padded beyond the tokenizer's; such a token has no text.
        let text = self.decoder.push(token).unwrap_or_default();
        let piece = self.pass_on(&text);
        if self.splitter.as_ref().is_some_and(Splitter::in_reasoning) {
            self.reasoning_tokens += 1;
        }
        piece
    }

    /// Ends the choice and returns all text that was held back.
    pub fn finish(&mut self) -> Piece {
        let text = self.decoder.flush().unwrap_or_default();
        let mut piece = self.pass_on(&text);
        if piece.stopped.is_none() {
            let held = self.stops.flush();
            let split = self.split(&held);
            piece.text.content += &split.content;
            piece.text.reasoning += &split.reasoning;
        }
        if let Some(splitter) = &mut self.splitter {
            let rest = splitter.flush();
            piece.text.content += &rest.content;
            piece.text.reasoning += &rest.reasoning;
        }
        piece
    }

    fn pass_on(&mut self, text: &str) -> Piece {
        if self.tokens < self.min_tokens {
            return Piece { text: self.split(text), stopped: None };
        }
        let output = self.stops.push(text);
        Piece { text: self.split(&output.emit), stopped: output.stopped }
    }

    fn split(&mut self, text: &str) -> Split {
        match &mut self.splitter {
            Some(splitter) => splitter.push(text),
            None => Split { content: text.to_owned(), reasoning: String::new() },
        }
    }
}
