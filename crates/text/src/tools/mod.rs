//! Tool calls and reasoning in a model's reply, read while it is being written.
//!
//! Invariants:
//! - The events, with neighbours of one kind joined, do not depend on how the text was cut into
//!   pieces.
//! - No text is lost: what turns out to be no call is returned as text and counted. A call that
//!   breaks off after its start tells what was written of it, so that a whole answer can show it as
//!   text; the rest follows as text.
//! - Arguments of a complete call are a JSON object.
//!
//! White space around calls belongs to the markup. Reasoning may open the reply and follow a call;
//! a tag anywhere else is ordinary text, and calls inside reasoning are reasoning. Replies in channels
//! ([`harmony`]) have no tags: the channel says what a message is.

mod dialect;
mod harmony;
mod json_call;
mod mistral_call;
mod pending;
mod reply;
mod scanner;
mod schema;
mod xml_call;

#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use dialect::Dialect;
pub use reply::{ReasoningTags, ReplyOptions, ReplyParser};
pub use schema::ToolSchemas;

/// Longest name of a tool or a parameter, in bytes. Without a limit text could be held back for
/// ever.
const MAX_NAME: usize = 256;

/// What a piece of a reply brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplyEvent {
    Text(String),
    Reasoning(String),
    /// A call begins. `id` is there if the model gave one.
    CallStarted {
        index: usize,
        id: Option<String>,
        name: String,
    },
    /// A piece of the call's arguments, a JSON object.
    Arguments {
        index: usize,
        delta: String,
    },
    /// The call is complete.
    CallFinished {
        index: usize,
    },
    /// The call was cut off or went wrong. The model wrote it as `text`, markup and the white space
    /// before it included. What follows is text.
    CallBroken {
        index: usize,
        text: String,
    },
}

/// How a reader of a call gets on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    /// Something was understood; ask again.
    Again,
    /// More text is needed.
    More,
    Done,
    /// This is no call, or not any more.
    Broken,
}

/// Collects events; joins neighbours of one kind.
#[derive(Clone, Debug)]
struct Sink {
    events: Vec<ReplyEvent>,
    tools: Arc<ToolSchemas>,
    /// Calls of tools that the request does not have are no calls.
    known_only: bool,
    calls: usize,
    complete: usize,
    open: bool,
}

impl Sink {
    fn new(tools: Arc<ToolSchemas>, known_only: bool) -> Self {
        Self { events: Vec::new(), tools, known_only, calls: 0, complete: 0, open: false }
    }

    fn take(&mut self) -> Vec<ReplyEvent> {
        std::mem::take(&mut self.events)
    }

    fn calls(&self) -> usize {
        self.calls
    }

    fn complete(&self) -> usize {
        self.complete
    }

    /// A call has started and is not finished.
    fn started(&self) -> bool {
        self.open
    }

    fn check_name(&self, name: &str) -> bool {
        !self.known_only || self.tools.contains(name)
    }

    fn types(&self, tool: &str, parameter: &str) -> schema::Types {
        self.tools.types(tool, parameter)
    }

    fn start(&mut self, name: String, id: Option<String>) -> bool {
        if !self.check_name(&name) {
            return false;
        }
        self.events.push(ReplyEvent::CallStarted { index: self.calls, id, name });
        self.calls += 1;
        self.open = true;
        true
    }

    fn finish(&mut self) {
        self.open = false;
        self.complete += 1;
        self.events.push(ReplyEvent::CallFinished { index: self.calls - 1 });
    }

    /// The open call cannot be completed; `text` is what was written of it.
    fn break_off(&mut self, text: String) {
        self.open = false;
        self.events.push(ReplyEvent::CallBroken { index: self.calls - 1, text });
    }

    fn arguments(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(ReplyEvent::Arguments { delta, .. }) => delta.push_str(text),
            _ => {
                let index = self.calls - 1;
                self.events.push(ReplyEvent::Arguments { index, delta: text.to_owned() });
            }
        }
    }

    fn text(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(ReplyEvent::Text(last)) => last.push_str(text),
            _ => self.events.push(ReplyEvent::Text(text.to_owned())),
        }
    }

    fn reasoning(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(ReplyEvent::Reasoning(last)) => last.push_str(text),
            _ => self.events.push(ReplyEvent::Reasoning(text.to_owned())),
        }
    }
}
