//! A call as newer Mistral models write it: `name{...}`, `name[ARGS]{...}` or
//! `name[CALL_ID]id[ARGS]{...}`.

use super::json_call::Arguments;
use super::pending::{Name, Pending};
use super::{Flow, Sink};

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
                let (name, end) = match pending.name(&[CALL_ID, ARGS, "{"]) {
                    Name::Found(name, end) => (name, end),
                    Name::TooLong => return Flow::Broken,
                    Name::Maybe => return Flow::More,
                };
                match end {
                    0 => self.state = State::Id,
                    index => self.before_object(index == 2, pending),
                }
                self.name = name.trim_end().to_owned();
                let bad = |c: char| c.is_whitespace() || matches!(c, '"' | '[' | ']' | '}');
                if self.name.is_empty() || self.name.contains(bad) {
                    return Flow::Broken;
                }
                Flow::Again
            }
            State::Id => {
                let (id, end) = match pending.name(&[ARGS, "{"]) {
                    Name::Found(id, end) => (id, end),
                    Name::TooLong => return Flow::Broken,
                    Name::Maybe => return Flow::More,
                };
                self.id = Some(id);
                self.before_object(end == 1, pending);
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
