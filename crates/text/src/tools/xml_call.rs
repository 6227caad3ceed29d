//! Calls written with tags around names and values: Qwen3-Coder, GLM-4.x and MiniMax-M2.
//!
//! Values carry no type, so the request's schemas decide: a parameter that can only be text is
//! passed on as it comes, any other is collected and becomes the JSON it spells if the schema
//! allows that type, else text.

use serde_json::Value;

use super::json_call::push_escaped;
use super::pending::{Match, Name, Pending};
use super::schema::Types;
use super::{Flow, Sink};

/// The markup of a dialect.
#[derive(Debug)]
pub(super) struct Tags {
    /// What stands before a name; none if the name follows the opening tag of the block.
    pub call: Option<&'static str>,
    /// What may stand after a name. It is taken unless a parameter or the end of the call begins
    /// with it.
    name_end: &'static [&'static str],
    call_close: &'static [&'static str],
    key: &'static str,
    key_end: &'static str,
    value: Option<&'static str>,
    /// Ends of a value. The first also takes a line break that belongs to the markup.
    value_end: &'static [&'static str],
    /// A line break after the opening of a value belongs to the markup.
    breaks_line: bool,
}

pub(super) const QWEN: Tags = Tags {
    call: Some("<function="),
    name_end: &[">"],
    call_close: &["</function>", "</tool_call>"],
    key: "<parameter=",
    key_end: ">",
    value: None,
    value_end: &["\n</parameter>", "</parameter>"],
    breaks_line: true,
};

pub(super) const GLM: Tags = Tags {
    call: None,
    name_end: &["\n", "<arg_key>", "</tool_call>"],
    call_close: &["</tool_call>"],
    key: "<arg_key>",
    key_end: "</arg_key>",
    value: Some("<arg_value>"),
    value_end: &["</arg_value>"],
    breaks_line: false,
};

pub(super) const MINIMAX: Tags = Tags {
    call: Some("<invoke name=\""),
    name_end: &["\">"],
    call_close: &["</invoke>"],
    key: "<parameter name=\"",
    key_end: "\">",
    value: None,
    value_end: &["</parameter>"],
    breaks_line: false,
};

/// A call under way.
#[derive(Clone, Debug)]
pub(super) struct XmlCall {
    tags: &'static Tags,
    state: State,
    name: String,
    parameters: usize,
}

#[derive(Clone, Debug)]
enum State {
    /// Before the marker of the call, which may follow white space.
    Call,
    Name,
    /// Before a parameter or the end of the call.
    Parameter,
    Key,
    /// Before the marker of a value.
    ValueOpen(String),
    /// At the first character of a value, which may be a line break of the markup.
    ValueStart(String),
    /// Text that goes out as it comes.
    Text,
    /// A value that is collected.
    Collect(Types, String),
}

impl XmlCall {
    /// `opened`: what stands before the name was taken already.
    pub fn new(tags: &'static Tags, opened: bool) -> Self {
        let state = if opened || tags.call.is_none() { State::Name } else { State::Call };
        Self { tags, state, name: String::new(), parameters: 0 }
    }

    pub fn step(&mut self, pending: &mut Pending, sink: &mut Sink) -> Flow {
        loop {
            match self.one(pending, sink) {
                Flow::Again => {}
                other => return other,
            }
        }
    }

    fn one(&mut self, pending: &mut Pending, sink: &mut Sink) -> Flow {
        match &mut self.state {
            State::Call => {
                pending.space();
                match pending.literal(&[self.tags.call.unwrap_or_default()]) {
                    Match::Yes(_) => self.go(State::Name),
                    Match::No => Flow::Broken,
                    Match::Maybe => Flow::More,
                }
            }
            State::Name => {
                let (name, end) = match pending.name(self.tags.name_end) {
                    Name::Found(name, end) => (name, end),
                    Name::TooLong => return Flow::Broken,
                    Name::Maybe => return Flow::More,
                };
                let end = self.tags.name_end[end];
                if end == self.tags.key || self.tags.call_close.contains(&end) {
                    // The marker is read again as what it is.
                    pending.untake(end.len());
                }
                if self.tags.call.is_none() && name.trim().is_empty() && end == "\n" {
                    return Flow::Again;
                }
                self.name = name.trim().to_owned();
                match valid_name(&self.name) {
                    true => self.go(State::Parameter),
                    false => Flow::Broken,
                }
            }
            State::Parameter => self.parameter(pending, sink),
            State::Key => {
                let key = match pending.name(&[self.tags.key_end]) {
                    Name::Found(key, _) => key.trim().to_owned(),
                    Name::TooLong => return Flow::Broken,
                    Name::Maybe => return Flow::More,
                };
                if !valid_name(&key) {
                    return Flow::Broken;
                }
                self.go(match self.tags.value {
                    Some(_) => State::ValueOpen(key),
                    None => State::ValueStart(key),
                })
            }
            State::ValueOpen(key) => {
                let key = std::mem::take(key);
                pending.space();
                match pending.literal(&[self.tags.value.unwrap_or_default()]) {
                    Match::Yes(_) => self.go(State::ValueStart(key)),
                    Match::No => Flow::Broken,
                    Match::Maybe => {
                        self.state = State::ValueOpen(key);
                        Flow::More
                    }
                }
            }
            State::ValueStart(key) => {
                let key = std::mem::take(key);
                if self.tags.breaks_line {
                    match pending.peek() {
                        Some('\n') => {
                            // `<parameter=a>\n</parameter>` is an empty value: its line break is
                            // the start's.
                            pending.next();
                        }
                        Some(_) => {}
                        None => {
                            self.state = State::ValueStart(key);
                            return Flow::More;
                        }
                    }
                }
                pending.commit(0);
                self.begin_value(&key, sink)
            }
            State::Text => {
                let (text, end) = pending.until(self.tags.value_end);
                let mut escaped = String::new();
                text.chars().for_each(|c| push_escaped(c, &mut escaped));
                sink.arguments(&escaped);
                pending.commit(0);
                if end.is_none() {
                    return Flow::More;
                }
                sink.arguments("\"");
                self.go(State::Parameter)
            }
            State::Collect(types, value) => {
                let (text, end) = pending.until(self.tags.value_end);
                value.push_str(&text);
                if end.is_none() {
                    return Flow::More;
                }
                sink.arguments(&typed(value, *types));
                pending.commit(0);
                self.go(State::Parameter)
            }
        }
    }

    fn go(&mut self, state: State) -> Flow {
        self.state = state;
        Flow::Again
    }

    /// Between parameters. The call starts here, when its name is followed by what must follow.
    fn parameter(&mut self, pending: &mut Pending, sink: &mut Sink) -> Flow {
        pending.space();
        let options = [&[self.tags.key][..], self.tags.call_close].concat();
        let found = match pending.literal(&options) {
            Match::Yes(found) => found,
            Match::No => return Flow::Broken,
            Match::Maybe => return Flow::More,
        };
        if !sink.started() {
            if !sink.start(self.name.clone(), None) {
                return Flow::Broken;
            }
            pending.commit(options[found].len());
        }
        if found == 0 {
            return self.go(State::Key);
        }
        // The end of the whole block ends its call too; the block's reader must see it.
        if self.tags.call.is_some() && options[found] == "</tool_call>" {
            pending.untake(options[found].len());
        }
        sink.arguments(if self.parameters == 0 { "{}" } else { "}" });
        Flow::Done
    }

    fn begin_value(&mut self, key: &str, sink: &mut Sink) -> Flow {
        let types = sink.types(&self.name, key);
        let mut text = String::from(if self.parameters == 0 { "{\"" } else { ", \"" });
        key.chars().for_each(|c| push_escaped(c, &mut text));
        text.push_str(if types.only_string() { "\": \"" } else { "\": " });
        sink.arguments(&text);
        self.parameters += 1;
        self.go(if types.only_string() { State::Text } else { State::Collect(types, String::new()) })
    }
}

pub(super) fn valid_name(name: &str) -> bool {
    !name.is_empty()
        && !name.contains(|c: char| c.is_whitespace() || matches!(c, '<' | '>' | '{' | '}' | '"'))
}

/// The JSON of a value that was written without quotes.
fn typed(text: &str, types: Types) -> String {
    let trimmed = text.trim();
    let python = match trimmed {
        "True" => Some("true"),
        "False" => Some("false"),
        "None" => Some("null"),
        _ => None,
    };
    for candidate in [Some(trimmed), python].into_iter().flatten() {
        if let Ok(value) = serde_json::from_str::<Value>(candidate)
            && types.allows(Types::of(&value))
        {
            return candidate.to_owned();
        }
    }
    Value::from(text).to_string()
}
