//! A call written as a JSON object: `{"name": "f", "arguments": {...}}` (Hermes, Llama 3, older
//! Mistral).
//!
//! `parameters` is another name for `arguments`; arguments may also be a string of JSON, or be
//! absent. The call starts when its name is known and its arguments have begun, so that a call that
//! is not one stays text.

use super::pending::Pending;
use super::scanner::{Scanner, Step};
use super::{Flow, MAX_NAME, Sink};

/// An object under way.
#[derive(Clone, Debug)]
pub(super) struct JsonCall {
    state: State,
    name: Option<String>,
    id: Option<String>,
    /// Arguments that came before the name.
    early: Option<String>,
    /// Members other than those of a call are skipped; false makes them the end of the call.
    lenient: bool,
}

#[derive(Clone, Debug)]
enum State {
    /// Before `{`.
    Object,
    FirstKey,
    Key,
    /// Inside a key, which is collected with its quotes.
    KeyText(String, Scanner),
    Colon(String),
    /// Before the first character of a member's value.
    Value(String),
    /// A value that is collected whole (name, id, arguments as a string) or skipped.
    Collect {
        key: String,
        text: String,
        scanner: Scanner,
    },
    /// Arguments that go out as they come.
    Arguments(Arguments),
    Next,
}

impl JsonCall {
    /// `opened`: the `{` was taken already.
    pub fn new(opened: bool, lenient: bool) -> Self {
        let state = if opened { State::FirstKey } else { State::Object };
        Self { state, name: None, id: None, early: None, lenient }
    }

    pub fn named(&self) -> bool {
        self.name.is_some()
    }

    pub fn step(&mut self, pending: &mut Pending, sink: &mut Sink) -> Flow {
        if let State::Arguments(arguments) = &mut self.state {
            let early = self.name.is_none().then(|| self.early.get_or_insert_default());
            match arguments.step(pending, sink, early) {
                Flow::Done => self.state = State::Next,
                other => return other,
            }
        }
        while let Some(c) = pending.peek() {
            match self.character(c, sink) {
                Ok(taken) => {
                    if taken {
                        pending.next();
                    }
                    if matches!(self.state, State::Arguments(_)) {
                        if sink.started() {
                            pending.commit(0);
                        }
                        return Flow::Again;
                    }
                    if taken && c == '}' && matches!(self.state, State::Object) {
                        return self.finish(sink);
                    }
                }
                Err(()) => return Flow::Broken,
            }
        }
        Flow::More
    }

    /// The object is complete.
    fn finish(&mut self, sink: &mut Sink) -> Flow {
        let (Some(name), false) = (self.name.take(), sink.started()) else {
            return if sink.started() { Flow::Done } else { Flow::Broken };
        };
        if !self.start(name, sink) {
            return Flow::Broken;
        }
        sink.arguments(self.early.take().as_deref().unwrap_or("{}"));
        Flow::Done
    }

    fn start(&mut self, name: String, sink: &mut Sink) -> bool {
        sink.start(name, self.id.take())
    }

    /// Handles one character between values; tells whether it was taken. `State::Object` after a
    /// taken `}` means that the object is complete.
    fn character(&mut self, c: char, sink: &mut Sink) -> Result<bool, ()> {
        let space = c.is_ascii_whitespace();
        match &mut self.state {
            State::Object
            | State::FirstKey
            | State::Key
            | State::Colon(_)
            | State::Value(_)
            | State::Next
                if space => {}
            State::Object if c == '{' => self.state = State::FirstKey,
            State::FirstKey | State::Next if c == '}' => self.state = State::Object,
            State::Next if c == ',' => self.state = State::Key,
            State::FirstKey | State::Key if c == '"' => {
                let mut scanner = Scanner::new();
                scanner.push(c);
                self.state = State::KeyText(c.to_string(), scanner);
            }
            State::KeyText(text, scanner) => {
                text.push(c);
                match scanner.push(c) {
                    Step::More => {}
                    Step::Done => {
                        let key = serde_json::from_str(text).map_err(|_| ())?;
                        self.state = State::Colon(key);
                    }
                    Step::DoneBefore | Step::Bad => return Err(()),
                }
            }
            State::Colon(key) if c == ':' => self.state = State::Value(std::mem::take(key)),
            State::Value(key) => {
                let key = std::mem::take(key);
                return self.begin_value(key, c, sink).map(|()| false);
            }
            State::Collect { key, text, scanner } => {
                let step = scanner.push(c);
                if matches!(step, Step::More | Step::Done) {
                    text.push(c);
                }
                match step {
                    Step::More => {}
                    Step::Done | Step::DoneBefore => {
                        let (key, text) = (std::mem::take(key), std::mem::take(text));
                        self.state = State::Next;
                        self.collected(&key, &text, sink)?;
                        return Ok(step == Step::Done);
                    }
                    Step::Bad => return Err(()),
                }
            }
            _ => return Err(()),
        }
        Ok(true)
    }

    /// Decides by a value's first character what becomes of it.
    fn begin_value(&mut self, key: String, c: char, sink: &mut Sink) -> Result<(), ()> {
        let kind = match key.as_str() {
            "name" if c != '"' || self.name.is_some() || sink.started() => return Err(()),
            "arguments" | "parameters" if sink.started() || self.early.is_some() => return Err(()),
            "arguments" | "parameters" => match c {
                '{' => {
                    if let Some(name) = self.name.clone()
                        && !self.start(name, sink)
                    {
                        return Err(());
                    }
                    State::Arguments(Arguments::default())
                }
                '"' | 'n' => State::Collect { key, text: String::new(), scanner: Scanner::new() },
                _ => return Err(()),
            },
            "name" | "id" | "type" => State::Collect { key, text: String::new(), scanner: Scanner::new() },
            _ if self.lenient => State::Collect { key, text: String::new(), scanner: Scanner::new() },
            _ => return Err(()),
        };
        self.state = kind;
        Ok(())
    }

    fn collected(&mut self, key: &str, text: &str, sink: &mut Sink) -> Result<(), ()> {
        let string = || serde_json::from_str::<String>(text);
        match key {
            "name" => {
                let name = string().map_err(|_| ())?;
                if name.is_empty() || name.len() > MAX_NAME {
                    return Err(());
                }
                sink.check_name(&name).then_some(()).ok_or(())?;
                self.name = Some(name);
            }
            "id" => self.id = string().ok(),
            "arguments" | "parameters" => {
                let arguments = match text {
                    "null" => "{}".to_owned(),
                    _ => string().map_err(|_| ())?,
                };
                let object = serde_json::from_str::<serde_json::Map<_, _>>(&arguments);
                object.map(drop).map_err(|_| ())?;
                self.early = Some(arguments);
            }
            _ => {}
        }
        Ok(())
    }
}

/// An arguments object that is passed on as it is written. Control characters in strings are
/// escaped.
#[derive(Clone, Debug)]
pub(super) struct Arguments {
    scanner: Scanner,
}

impl Default for Arguments {
    fn default() -> Self {
        Self { scanner: Scanner::new() }
    }
}

impl Arguments {
    /// Reads on. The text goes to the client, or to `early` if there is one.
    pub fn step(&mut self, pending: &mut Pending, sink: &mut Sink, early: Option<&mut String>) -> Flow {
        let mut text = String::new();
        let mut flow = Flow::More;
        while let Some(c) = pending.peek() {
            let in_string = self.scanner.in_string();
            let step = self.scanner.push(c);
            if matches!(step, Step::DoneBefore | Step::Bad) {
                flow = Flow::Broken;
                break;
            }
            pending.next();
            if in_string && u32::from(c) < 0x20 {
                push_escaped(c, &mut text);
            } else {
                text.push(c);
            }
            if step == Step::Done {
                flow = Flow::Done;
                break;
            }
        }
        match early {
            Some(early) => early.push_str(&text),
            None => {
                sink.arguments(&text);
                pending.commit(0);
            }
        }
        flow
    }
}

/// Appends a character as it stands inside a JSON string.
pub(super) fn push_escaped(c: char, text: &mut String) {
    match c {
        '"' => text.push_str("\\\""),
        '\\' => text.push_str("\\\\"),
        '\n' => text.push_str("\\n"),
        '\r' => text.push_str("\\r"),
        '\t' => text.push_str("\\t"),
        c if u32::from(c) < 0x20 => text.push_str(&format!("\\u{:04x}", u32::from(c))),
        c => text.push(c),
    }
}
