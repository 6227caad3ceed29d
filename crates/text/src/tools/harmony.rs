//! Replies in channels, as gpt-oss writes them: OpenAI's harmony format.
//!
//! A reply is a row of messages. Each has a header, `<|message|>`, a body, and an end: `<|end|>`,
//! `<|return|>` or `<|call|>`. The header names a role, a channel and, for a call, its recipient:
//!
//! ```text
//! <|channel|>analysis<|message|>Rain?<|end|>
//! <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
//! ```
//!
//! The recipient may also stand behind the role. `analysis` is reasoning, `commentary` and `final` are
//! text. A prompt ends inside the first header, after `<|start|>assistant`. The end of the last message
//! is a stop token, which the engine does not pass on.
//!
//! Invariant: only headers that are understood to the last word are taken for markup. Any other is
//! text, and so is its whole message.

use super::dialect::{CHANNEL, START};
use super::json_call::Arguments;
use super::pending::{Match, Name, Pending};
use super::xml_call::valid_name;
use super::{Flow, Sink};

pub(super) const MESSAGE: &str = "<|message|>";
pub(super) const CONSTRAIN: &str = "<|constrain|>";
pub(super) const END: &str = "<|end|>";
pub(super) const CALL: &str = "<|call|>";
pub(super) const RETURN: &str = "<|return|>";

/// Ends of a message, then beginnings of another.
const BORDERS: [&str; 5] = [END, CALL, RETURN, START, CHANNEL];
const ENDS: usize = 3;

/// Headers without a recipient. One that the end of the reply cuts off holds no text.
const PLAIN: [&str; 3] = [
    "assistant<|channel|>analysis<|message|>",
    "assistant<|channel|>commentary<|message|>",
    "assistant<|channel|>final<|message|>",
];

/// Reads a reply message by message.
#[derive(Clone, Debug)]
pub(super) struct ChannelReader {
    state: State,
    /// Reasoning is told from text; otherwise messages of `analysis` stay as they are.
    separates: bool,
    /// White space between messages.
    space: String,
    malformed: usize,
}

#[derive(Clone, Debug)]
enum State {
    Between,
    /// In a header. `before` is the part of it that the prompt holds, `opened` the marker that began
    /// it. If it is none, `within` goes on.
    Header {
        before: String,
        opened: &'static str,
        within: Body,
    },
    Body(Body),
    /// Before the arguments of a call, whose header was `written`.
    Call {
        name: String,
        written: String,
    },
    /// Arguments behind a header, which was `written`.
    Arguments {
        written: String,
        arguments: Arguments,
    },
}

#[derive(Clone, Copy, Debug, Default)]
struct Body {
    reasoning: bool,
    /// The markup of the message is text too.
    verbatim: bool,
}

/// What a header announces.
#[derive(Debug, PartialEq, Eq)]
enum Header {
    Reasoning,
    Text,
    Call(String),
}

impl ChannelReader {
    pub fn new(separates: bool, prompt_end: &str, sink: &Sink) -> Self {
        let open = |text: &str| !BORDERS[..ENDS].iter().any(|end| text.contains(end));
        let state = match prompt_end.rsplit_once(START) {
            Some((_, header)) if !open(header) => State::Between,
            Some((_, rest)) => match rest.split_once(MESSAGE) {
                Some((header, _)) => {
                    let reasoning = separates && Header::read(header, sink) == Some(Header::Reasoning);
                    State::Body(Body { reasoning, verbatim: false })
                }
                None => State::Header { before: rest.to_owned(), opened: "", within: Body::default() },
            },
            // The prompt ends in a long text that the reply goes on with, or is none of gpt-oss.
            None => State::Body(Body::default()),
        };
        Self { state, separates, space: String::new(), malformed: 0 }
    }

    pub fn in_reasoning(&self) -> bool {
        matches!(self.state, State::Body(Body { reasoning: true, .. }))
    }

    /// Calls that were returned as text or broke off, and headers that were none.
    pub fn malformed(&self) -> usize {
        self.malformed
    }

    /// Moves on by one state; false if more text is needed.
    pub fn step(&mut self, pending: &mut Pending, sink: &mut Sink) -> bool {
        match &mut self.state {
            State::Between => self.between(pending, sink),
            State::Header { before, opened, within } => {
                let (before, opened, within) = (std::mem::take(before), *opened, *within);
                self.header(before, opened, within, pending, sink)
            }
            State::Body(body) => {
                let body = *body;
                self.body(body, pending, sink)
            }
            State::Call { name, written } => {
                written.push_str(&pending.space());
                match pending.peek() {
                    None if !pending.ended() => return false,
                    Some('{') if sink.start(std::mem::take(name), None) => {
                        pending.record();
                        let written = std::mem::take(written);
                        self.state = State::Arguments { written, arguments: Arguments::default() };
                    }
                    _ => {
                        let written = std::mem::take(written);
                        self.broken(&written, Body::default(), sink);
                    }
                }
                true
            }
            State::Arguments { written, arguments } => match arguments.step(pending, sink, None) {
                Flow::Done => {
                    sink.finish();
                    pending.recorded();
                    self.state = State::Between;
                    true
                }
                Flow::More | Flow::Again if !pending.ended() => false,
                _ => {
                    pending.recorded();
                    sink.break_off(std::mem::take(written) + &pending.committed());
                    self.broken("", Body::default(), sink);
                    true
                }
            },
        }
    }

    /// After the end of a message. White space here belongs to the markup, unless text follows.
    fn between(&mut self, pending: &mut Pending, sink: &mut Sink) -> bool {
        self.space += &pending.space();
        if pending.is_empty() {
            return false;
        }
        self.state = match pending.literal(&BORDERS) {
            Match::Maybe => return false,
            Match::No => {
                sink.text(&std::mem::take(&mut self.space));
                State::Body(Body::default())
            }
            Match::Yes(found) => {
                self.space.clear();
                next(found, Body::default())
            }
        };
        true
    }

    fn header(
        &mut self,
        before: String,
        opened: &'static str,
        within: Body,
        pending: &mut Pending,
        sink: &mut Sink,
    ) -> bool {
        // What the header says, as opposed to what of it was written.
        let said = |text: &str| before.clone() + opened.strip_prefix(START).unwrap_or(opened) + text;
        match pending.name(&[MESSAGE, END, CALL, RETURN, START]) {
            Name::Found(text, 0) => {
                let written = format!("{opened}{text}{MESSAGE}");
                match Header::read(&said(&text), sink) {
                    Some(Header::Call(name)) => self.state = State::Call { name, written },
                    Some(Header::Reasoning) if !self.separates => {
                        sink.text(&written);
                        self.state = State::Body(Body { reasoning: false, verbatim: true });
                    }
                    Some(kind) => {
                        let reasoning = kind == Header::Reasoning;
                        self.state = State::Body(Body { reasoning, verbatim: false });
                    }
                    None => self.broken(&written, within, sink),
                }
            }
            Name::Found(text, end) => {
                pending.untake([MESSAGE, END, CALL, RETURN, START][end].len());
                self.not_a_header(opened, &text, within, sink);
            }
            Name::TooLong => self.not_a_header(opened, "", within, sink),
            Name::Maybe if !pending.ended() => {
                self.state = State::Header { before, opened, within };
                return false;
            }
            Name::Maybe => {
                let (text, _) = pending.until(&[]);
                let said = said(&text);
                let plain = PLAIN
                    .iter()
                    .any(|plain| plain.starts_with(&said) || plain["assistant".len()..].starts_with(&said));
                match plain {
                    true => self.state = State::Body(within),
                    false => self.not_a_header(opened, &text, within, sink),
                }
            }
        }
        true
    }

    /// Text where a header was expected. Without a marker it is an answer that has no header.
    fn not_a_header(&mut self, opened: &str, text: &str, within: Body, sink: &mut Sink) {
        if opened.is_empty() {
            self.state = State::Body(within);
            return self.emit(text, within, sink);
        }
        self.broken(&format!("{opened}{text}"), within, sink);
    }

    /// What was taken for a call or a header is none: it is text, and the rest of the message too.
    fn broken(&mut self, written: &str, within: Body, sink: &mut Sink) {
        self.malformed += 1;
        self.emit(written, within, sink);
        self.state = State::Body(Body { verbatim: true, ..within });
    }

    fn body(&mut self, body: Body, pending: &mut Pending, sink: &mut Sink) -> bool {
        let (text, found) = pending.until(&BORDERS);
        self.emit(&text, body, sink);
        let Some(found) = found else { return false };
        if body.verbatim && found < ENDS {
            self.emit(BORDERS[found], body, sink);
        }
        self.state = next(found, body);
        true
    }

    fn emit(&self, text: &str, body: Body, sink: &mut Sink) {
        match body.reasoning {
            true => sink.reasoning(text),
            false => sink.text(text),
        }
    }
}

/// The state after a border.
fn next(found: usize, within: Body) -> State {
    match found < ENDS {
        true => State::Between,
        false => State::Header { before: String::new(), opened: BORDERS[found], within },
    }
}

impl Header {
    /// Reads a header without `<|start|>`; none if any part of it is not understood.
    fn read(header: &str, sink: &Sink) -> Option<Self> {
        let (role, channel) = match header.split_once(CHANNEL) {
            Some((role, channel)) => (role, Some(channel.replace(CONSTRAIN, " "))),
            None => (header, None),
        };
        let mut recipient = None;
        let mut take = |word: &str| -> Option<bool> {
            let Some(name) = word.strip_prefix("to=") else { return Some(false) };
            recipient.replace(name.to_owned()).is_none().then_some(true)
        };
        for (index, word) in role.split_whitespace().enumerate() {
            if !take(word)? && (index > 0 || word != "assistant") {
                return None;
            }
        }
        let mut kind = Self::Text;
        if let Some(channel) = channel {
            let mut words = channel.split_whitespace();
            kind = match words.next()? {
                "analysis" => Self::Reasoning,
                "commentary" | "final" => Self::Text,
                _ => return None,
            };
            let mut types = 0;
            for word in words {
                // The type of the content, such as `json`.
                let content = word.bytes().all(|byte| byte.is_ascii_lowercase());
                if !take(word)? && (!content || std::mem::replace(&mut types, 1) > 0) {
                    return None;
                }
            }
        }
        let Some(recipient) = recipient else { return Some(kind) };
        let name = match recipient.strip_prefix("functions.") {
            Some(name) => name.to_owned(),
            None => recipient,
        };
        // A recipient that is no function of the request, such as `python`, was not offered.
        let known = header.contains("to=functions.") || sink.tools.contains(&name);
        (known && valid_name(&name) && sink.check_name(&name)).then_some(Self::Call(name))
    }
}
