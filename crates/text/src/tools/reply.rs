//! The reader of one reply: tells text, reasoning and tool calls apart.

use std::sync::Arc;

use super::dialect::{Dialect, FUNCTION, TOOL_CALL};
use super::harmony::ChannelReader;
use super::json_call::JsonCall;
use super::mistral_call::MistralCall;
use super::pending::{Match, Pending};
use super::xml_call::{self, XmlCall};
use super::{Flow, ReplyEvent, Sink, ToolSchemas};

/// The tags around a model's reasoning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReasoningTags {
    pub open: String,
    pub close: String,
}

/// How the replies to one request are read.
#[derive(Clone, Debug, Default)]
pub struct ReplyOptions {
    /// Splits reasoning off.
    pub reasoning: Option<ReasoningTags>,
    /// Reads tool calls.
    pub dialect: Option<Dialect>,
    pub tools: Arc<ToolSchemas>,
}

/// Reads one reply, piece by piece.
#[derive(Clone, Debug)]
pub struct ReplyParser {
    reasoning: Option<ReasoningTags>,
    dialect: Option<Dialect>,
    /// Reads instead of the states below where replies have channels.
    channels: Option<ChannelReader>,
    pending: Pending,
    state: State,
    /// White space that a call may swallow, or line breaks that the end of the reasoning may.
    space: String,
    /// What stands before the recording of the call under way: white space and the opening marker.
    opened: String,
    any_text: bool,
    malformed: usize,
    sink: Sink,
}

#[derive(Clone, Debug)]
enum State {
    /// Only white space since the beginning, the reasoning or a call. Here reasoning may open, and
    /// a Llama call.
    Start {
        may_think: bool,
        after_call: bool,
    },
    /// Line breaks after the opening tag are the tag's.
    Opened,
    Reasoning,
    /// Line breaks after the closing tag belong to neither side.
    Closed,
    Text,
    /// After the opening marker of a block.
    Block,
    Call(Call),
    /// After a call: the end of its block, or another call in it.
    Tail(Tail),
}

#[derive(Clone, Debug)]
enum Call {
    Json(JsonCall),
    /// In a list of Mistral's.
    Listed(JsonCall),
    Mistral(MistralCall),
    Xml(XmlCall),
}

/// Literals that may follow a call, each with the call it begins, if it does.
type Tail = &'static [(&'static str, Option<fn() -> Call>)];

const HERMES_TAIL: Tail = &[("</tool_call>", None)];
const LLAMA_TAIL: Tail = &[(";", None)];
const LIST_TAIL: Tail = &[(",", Some(|| Call::Listed(JsonCall::new(false, true)))), ("]", None)];
const QWEN_TAIL: Tail =
    &[("</tool_call>", None), (FUNCTION, Some(|| Call::Xml(XmlCall::new(&xml_call::QWEN, true))))];
const MINIMAX_TAIL: Tail = &[
    ("</minimax:tool_call>", None),
    ("<invoke name=\"", Some(|| Call::Xml(XmlCall::new(&xml_call::MINIMAX, true)))),
];

impl ReplyParser {
    /// A reader of a reply to a prompt that ends in `prompt_end`: a template may have opened the
    /// reasoning.
    pub fn new(options: &ReplyOptions, prompt_end: &str) -> Self {
        let opened = options
            .reasoning
            .as_ref()
            .is_some_and(|tags| prompt_end.trim_end().ends_with(tags.open.as_str()));
        let has_channels = options.dialect.is_some_and(Dialect::has_channels);
        // A Llama answer may be JSON without being a call. In channels calls are told from text even
        // where no tools are offered, and then none is one.
        let known_only = options.dialect == Some(Dialect::Llama) || has_channels && options.tools.is_empty();
        let sink = Sink::new(options.tools.clone(), known_only);
        let separates = options.reasoning.is_some();
        Self {
            channels: has_channels.then(|| ChannelReader::new(separates, prompt_end, &sink)),
            reasoning: options.reasoning.clone(),
            dialect: options.dialect,
            pending: Pending::default(),
            state: match opened {
                true => State::Opened,
                false => State::Start { may_think: true, after_call: false },
            },
            space: String::new(),
            opened: String::new(),
            any_text: false,
            malformed: 0,
            sink,
        }
    }

    /// Takes the next piece; returns what has become certain.
    pub fn push(&mut self, piece: &str) -> Vec<ReplyEvent> {
        self.pending.push(piece);
        self.run()
    }

    /// Ends the reply: everything held back comes out. A call that is cut off stays incomplete.
    pub fn finish(&mut self) -> Vec<ReplyEvent> {
        self.pending.end();
        self.run()
    }

    /// Whether the text last pushed was reasoning.
    pub fn in_reasoning(&self) -> bool {
        match &self.channels {
            Some(channels) => channels.in_reasoning(),
            None => matches!(self.state, State::Opened | State::Reasoning),
        }
    }

    /// Calls begun so far.
    pub fn calls(&self) -> usize {
        self.sink.calls()
    }

    /// Complete calls so far.
    pub fn complete_calls(&self) -> usize {
        self.sink.complete()
    }

    /// Calls that were returned as text, or broke off after they had started.
    pub fn malformed(&self) -> usize {
        self.malformed + self.channels.as_ref().map_or(0, ChannelReader::malformed)
    }

    fn run(&mut self) -> Vec<ReplyEvent> {
        while self.step() {}
        self.sink.take()
    }

    /// Moves on by one state; false if more text is needed.
    fn step(&mut self) -> bool {
        if let Some(channels) = &mut self.channels {
            return channels.step(&mut self.pending, &mut self.sink);
        }
        match &mut self.state {
            State::Start { may_think, after_call } => {
                let (may_think, after_call) = (*may_think, *after_call);
                self.start(may_think, after_call)
            }
            State::Opened => self.skip(&['\n'], State::Reasoning),
            State::Reasoning => self.in_thought(),
            State::Closed => self.skip(&['\n', '\r'], State::Start { may_think: false, after_call: false }),
            State::Text => self.in_text(),
            State::Block => self.block(),
            State::Call(_) => self.in_call(),
            State::Tail(tail) => {
                let tail = *tail;
                self.after_call(tail)
            }
        }
    }

    fn skip(&mut self, skipped: &[char], next: State) -> bool {
        while self.pending.peek().is_some_and(|c| skipped.contains(&c)) {
            self.pending.next();
        }
        if self.pending.is_empty() {
            return false;
        }
        self.state = next;
        true
    }

    fn start(&mut self, may_think: bool, after_call: bool) -> bool {
        self.space += &self.pending.space();
        if self.pending.is_empty() {
            if self.pending.ended() && !after_call {
                self.emit_text("");
            }
            return false;
        }
        let mut options: Vec<&str> = self.dialect.map_or(&[][..], Dialect::openers).to_vec();
        if self.dialect == Some(Dialect::Llama) {
            options.push("{");
        }
        if let (Some(tags), true) = (&self.reasoning, may_think) {
            options.push(&tags.open);
        }
        match self.pending.literal(&options) {
            Match::Yes(found) => {
                let found = options[found].to_owned();
                if may_think && self.reasoning.as_ref().is_some_and(|tags| tags.open == found) {
                    self.space.clear();
                    self.state = State::Opened;
                } else {
                    self.open(&found);
                }
            }
            Match::Maybe => return false,
            Match::No => {
                if after_call && !self.any_text {
                    self.space.clear();
                }
                self.state = State::Text;
            }
        }
        true
    }

    fn in_thought(&mut self) -> bool {
        let Some(tags) = &self.reasoning else {
            self.state = State::Text;
            return true;
        };
        let (text, end) = self.pending.until(&[&tags.close]);
        let text = std::mem::take(&mut self.space) + &text;
        let kept = text.trim_end_matches('\n').len();
        self.sink.reasoning(&text[..kept]);
        if end.is_some() {
            self.state = State::Closed;
            return true;
        }
        match self.pending.ended() {
            true => self.sink.reasoning(&text[kept..]),
            false => self.space = text[kept..].to_owned(),
        }
        false
    }

    fn in_text(&mut self) -> bool {
        let openers = self.dialect.map_or(&[][..], Dialect::openers);
        let (text, found) = self.pending.until(openers);
        // White space before a call belongs to neither text nor call.
        let kept = if openers.is_empty() { text.len() } else { text.trim_end().len() };
        if kept > 0 {
            self.emit_text(&text[..kept]);
        }
        self.space += &text[kept..];
        match found {
            Some(found) => self.open(openers[found]),
            None => {
                if self.pending.ended() {
                    self.emit_text("");
                }
                return false;
            }
        }
        true
    }

    /// Emits held white space and text.
    fn emit_text(&mut self, text: &str) {
        let space = std::mem::take(&mut self.space);
        self.any_text |= !space.is_empty() || !text.is_empty();
        self.sink.text(&space);
        self.sink.text(text);
    }

    /// An opening marker was taken.
    fn open(&mut self, marker: &str) {
        self.opened = std::mem::take(&mut self.space) + marker;
        self.pending.record();
        self.state = match (self.dialect, marker) {
            (_, FUNCTION) => State::Call(Call::Xml(XmlCall::new(&xml_call::QWEN, true))),
            (Some(Dialect::Llama), _) => State::Call(Call::Json(JsonCall::new(marker == "{", false))),
            (Some(Dialect::Glm), _) => State::Call(Call::Xml(XmlCall::new(&xml_call::GLM, false))),
            (Some(Dialect::MiniMax), _) => State::Call(Call::Xml(XmlCall::new(&xml_call::MINIMAX, false))),
            _ => State::Block,
        };
    }

    /// Decides between the two forms that share an opening marker.
    fn block(&mut self) -> bool {
        self.pending.space();
        let Some(c) = self.pending.peek() else {
            return self.pending.ended() && self.broken();
        };
        let marked = self.opened.ends_with(TOOL_CALL);
        self.state = match c {
            '{' if marked => State::Call(Call::Json(JsonCall::new(false, true))),
            '<' if marked => State::Call(Call::Xml(XmlCall::new(&xml_call::QWEN, false))),
            '[' if !marked => {
                self.pending.next();
                State::Call(Call::Listed(JsonCall::new(false, true)))
            }
            _ if !marked => State::Call(Call::Mistral(MistralCall::new())),
            _ => return self.broken(),
        };
        true
    }

    fn in_call(&mut self) -> bool {
        let State::Call(call) = &mut self.state else { return false };
        let (flow, tail) = match call {
            Call::Json(json) => {
                let llama = self.dialect == Some(Dialect::Llama);
                (json.step(&mut self.pending, &mut self.sink), if llama { LLAMA_TAIL } else { HERMES_TAIL })
            }
            Call::Listed(json) => (json.step(&mut self.pending, &mut self.sink), LIST_TAIL),
            Call::Mistral(mistral) => (mistral.step(&mut self.pending, &mut self.sink), &[][..]),
            Call::Xml(xml) => {
                let tail = match self.dialect {
                    Some(Dialect::Glm) => &[][..],
                    Some(Dialect::MiniMax) => MINIMAX_TAIL,
                    _ => QWEN_TAIL,
                };
                (xml.step(&mut self.pending, &mut self.sink), tail)
            }
        };
        match flow {
            Flow::Again => true,
            Flow::More => self.pending.ended() && self.broken(),
            Flow::Broken => self.broken(),
            Flow::Done => {
                self.sink.finish();
                self.opened.clear();
                self.pending.record();
                self.state = State::Tail(tail);
                true
            }
        }
    }

    fn after_call(&mut self, tail: Tail) -> bool {
        self.pending.space();
        let options: Vec<&str> = tail.iter().map(|(literal, _)| *literal).collect();
        self.state = match self.pending.literal(&options) {
            Match::Maybe => return false,
            Match::Yes(found) => match tail[found].1 {
                Some(next) => State::Call(next()),
                None => {
                    self.pending.recorded();
                    State::Start { may_think: true, after_call: true }
                }
            },
            Match::No => {
                let space = self.pending.recorded();
                self.pending.put_back(&space);
                State::Start { may_think: true, after_call: true }
            }
        };
        true
    }

    /// The call under way is none, or cannot be completed: what was not passed on is text.
    fn broken(&mut self) -> bool {
        // A Llama answer may be JSON without being a call.
        let counts = match &self.state {
            State::Call(Call::Json(json)) if self.opened.ends_with('{') => {
                json.named() || self.sink.started()
            }
            _ => true,
        };
        self.malformed += usize::from(counts);
        let recorded = self.pending.recorded();
        let opened = std::mem::take(&mut self.opened);
        if self.sink.started() {
            self.sink.break_off(opened + &self.pending.committed());
            self.emit_text(&recorded);
        } else {
            self.emit_text(&opened);
            match opened.is_empty() {
                true => self.emit_text(&recorded),
                false => self.pending.put_back(&recorded),
            }
        }
        self.state = State::Text;
        true
    }
}
