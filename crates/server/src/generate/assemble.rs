//! One choice's way from tokens to events: detokenizer, stop strings, reasoning and tool calls.
//!
//! Invariant: the events, joined, are the same however the tokens arrive, and nothing is emitted
//! that a stop string could still take back.

use oscar_text::{ReplyEvent, ReplyOptions, ReplyParser, StopMatcher, StreamDecoder, TextError, Tokenizer};

/// How a request wants its text.
#[derive(Clone, Debug, Default)]
pub struct TextOptions {
    pub stop: Vec<String>,
    /// Leave the stop string in the text.
    pub include_stop: bool,
    pub skip_special: bool,
    /// Stop strings are not looked for before this many tokens.
    pub min_tokens: usize,
    /// Reasoning and tool calls.
    pub reply: ReplyOptions,
    /// The answer ends with its first complete tool call.
    pub single_call: bool,
    /// The end of the prompt, which may have opened the reasoning.
    pub prompt_end: String,
}

/// The text of one choice in the making.
#[derive(Debug)]
pub struct Assembler {
    decoder: StreamDecoder,
    stops: StopMatcher,
    parser: ReplyParser,
    min_tokens: usize,
    single_call: bool,
    ended: bool,
    pub tokens: usize,
    pub reasoning_tokens: usize,
}

/// The text that a token added.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Piece {
    pub events: Vec<ReplyEvent>,
    /// Why the choice is over, if the text says so.
    pub ended: Option<TextEnd>,
}

/// An end that the text decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextEnd {
    /// The stop string with this index.
    Stop(usize),
    /// The one tool call that was wanted is complete.
    Call,
}

impl Assembler {
    pub fn new(tokenizer: &Tokenizer, options: &TextOptions) -> Result<Self, TextError> {
        let mut markup: Vec<&str> = options.reply.dialect.map_or(&[][..], |d| d.special_tokens()).to_vec();
        if let Some(tags) = &options.reply.reasoning {
            markup.extend([tags.open.as_str(), tags.close.as_str()]);
        }
        Ok(Self {
            decoder: StreamDecoder::new(tokenizer, options.skip_special).keeping(&markup),
            stops: StopMatcher::new(options.stop.iter().cloned(), options.include_stop)?,
            parser: ReplyParser::new(&options.reply, &options.prompt_end),
            min_tokens: options.min_tokens,
            single_call: options.single_call,
            ended: false,
            tokens: 0,
            reasoning_tokens: 0,
        })
    }

    pub fn push(&mut self, token: u32) -> Piece {
        self.tokens += 1;
        // A model's vocabulary may be padded beyond the tokenizer's; such a token has no text.
        let text = self.decoder.push(token).unwrap_or_default();
        let piece = self.pass_on(&text);
        self.reasoning_tokens += usize::from(self.parser.in_reasoning());
        piece
    }

    /// Ends the choice and returns all text that was held back.
    pub fn finish(&mut self) -> Piece {
        if self.ended {
            return Piece::default();
        }
        let text = self.decoder.flush().unwrap_or_default();
        let mut piece = self.pass_on(&text);
        if piece.ended.is_none() {
            let held = self.stops.flush();
            piece.events.extend(self.parser.push(&held));
        }
        if !self.ended {
            piece.events.extend(self.parser.finish());
        }
        piece
    }

    /// Complete tool calls, and those that were not well formed.
    pub fn calls(&self) -> (usize, usize) {
        (self.parser.complete_calls(), self.parser.malformed())
    }

    fn pass_on(&mut self, text: &str) -> Piece {
        let (text, stopped) = match self.tokens < self.min_tokens {
            true => (text.to_owned(), None),
            false => {
                let output = self.stops.push(text);
                (output.emit, output.stopped)
            }
        };
        let mut events = self.parser.push(&text);
        let complete = |event: &ReplyEvent| matches!(event, ReplyEvent::CallFinished { .. });
        if self.single_call
            && let Some(last) = events.iter().position(complete)
        {
            events.truncate(last + 1);
            self.ended = true;
            return Piece { events, ended: Some(TextEnd::Call) };
        }
        Piece { events, ended: stopped.map(TextEnd::Stop) }
    }
}
