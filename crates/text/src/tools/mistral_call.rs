//! A call as newer Mistral models write it: `name{...}`, `name[ARGS]{...}` or
//! `name[CALL_ID]id[ARGS]{...}`.

use super::json_call::Arguments;
use super::pending::Pending;
use super::{Flow, MAX_NAME, Sink};

const CALL_ID: &str = "[CALL_ID]";
const ARGS: &str = "[ARGS]";

#[derive(Clone, Debug)]
pub(super) struct MistralCall {
    state: State,
    name: String,
    id: Option<String>,
}

#[derive(Clone, Debug)]
enum State {
    Name,
    Id,
    /// Before the `{` of the arguments.
    Object,
    Arguments(Arguments),
}

impl MistralCall {
    pub fn new() -> Self {
        Self { state: State::Name, name: String::new(), id: None }
    }

    pub fn step(&mut self, pending: &mut Pending, sink: &mut Sink) -> Flow {
        match &mut self.state {
            State::Name => {
                let markers = [CALL_ID, ARGS, "{"];
                let (text, end) = pending.until(&markers);
                self.name.push_str(&text);
                match end {
                    None if self.name.len() > MAX_NAME => return Flow::Broken,
                    None => return Flow::More,
                    Some(0) => {
                        self.id = Some(String::new());
                        self.state = State::Id;
                    }
                    Some(index) => self.before_object(index == 2, pending),
                }
                self.name.truncate(self.name.trim_end().len());
                let bad = |c: char| c.is_whitespace() || matches!(c, '"' | '[' | ']' | '}');
                if self.name.is_empty() || self.name.contains(bad) {
                    return Flow::Broken;
                }
                Flow::Again
            }
            State::Id => {
                let (text, end) = pending.until(&[ARGS, "{"]);
                let id = self.id.get_or_insert_default();
                id.push_str(&text);
                match end {
                    None if id.len() > MAX_NAME => return Flow::Broken,
                    None => return Flow::More,
                    Some(index) => self.before_object(index == 1, pending),
                }
                Flow::Again
            }
            State::Object => {
                pending.space();
                match pending.peek() {
                    None => Flow::More,
                    Some('{') if sink.start(std::mem::take(&mut self.name), self.id.take()) => {
                        pending.commit(0);
                        self.state = State::Arguments(Arguments::default());
                        Flow::Again
                    }
                    Some(_) => Flow::Broken,
                }
            }
            State::Arguments(arguments) => arguments.step(pending, sink, None),
        }
    }

    fn before_object(&mut self, brace: bool, pending: &mut Pending) {
        if brace {
            pending.untake(1);
        }
        self.state = State::Object;
    }
}
