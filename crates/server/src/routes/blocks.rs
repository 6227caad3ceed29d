//! An answer as a row of blocks: reasoning, text, calls. The Messages and the Responses API show
//! answers so.

use oscar_text::ReplyEvent;

use crate::generate::{Finish, Output, Totals};

/// A kind of block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Block {
    Reasoning,
    Text,
    Call { id: String, name: String },
}

/// What happens to a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockEvent {
    /// Opens the block with this index.
    Open {
        index: usize,
        block: Block,
    },
    Delta {
        index: usize,
        block: Block,
        text: String,
    },
    /// Closes a block, whose whole text this is.
    Close {
        index: usize,
        block: Block,
        text: String,
        /// False for a call that broke off.
        complete: bool,
    },
}

/// Joins the events of an answer into blocks, one after the other.
#[derive(Debug, Default)]
pub struct Blocks {
    open: Option<(Block, String)>,
    closed: usize,
    /// Calls are held back until they are complete; one that breaks off becomes text.
    holds_calls: bool,
    /// The call under way, if it is held back.
    held: Option<(Block, String)>,
    /// How the answer ended.
    pub finish: Option<Finish>,
    pub totals: Totals,
}

impl Blocks {
    /// Blocks of an answer whose calls are all complete.
    pub fn of_complete_calls() -> Self {
        Self { holds_calls: true, ..Self::default() }
    }

    /// What an output of the only choice does to the blocks.
    pub fn take_output(&mut self, output: Output) -> Vec<BlockEvent> {
        match output {
            Output::Delta { events, .. } => events.into_iter().flat_map(|event| self.take(event)).collect(),
            Output::Finished { finish, .. } => {
                self.finish = Some(finish);
                self.finish()
            }
            Output::Done(totals) => {
                self.totals = totals;
                Vec::new()
            }
            Output::Started { .. } | Output::Kept(_) | Output::Embedding { .. } | Output::Failed(_) => {
                Vec::new()
            }
        }
    }

    fn take(&mut self, event: ReplyEvent) -> Vec<BlockEvent> {
        match event {
            ReplyEvent::Text(text) => self.text(Block::Text, text),
            ReplyEvent::Reasoning(text) => self.text(Block::Reasoning, text),
            ReplyEvent::CallStarted { id, name, .. } => {
                let call = Block::Call { id: id.unwrap_or_default(), name };
                if self.holds_calls {
                    self.held = Some((call, String::new()));
                    return Vec::new();
                }
                self.open(call)
            }
            ReplyEvent::Arguments { delta, .. } => match (&mut self.held, self.open.clone()) {
                (Some((_, arguments)), _) => {
                    *arguments += &delta;
                    Vec::new()
                }
                (None, Some((call, _))) => self.text(call, delta),
                (None, None) => Vec::new(),
            },
            ReplyEvent::CallFinished { .. } => {
                let mut events = Vec::new();
                if let Some((call, arguments)) = self.held.take() {
                    events = self.open(call.clone());
                    events.extend(self.text(call, arguments));
                }
                events.extend(self.finish());
                events
            }
            ReplyEvent::CallBroken { text, .. } => match self.held.take() {
                Some(_) => self.text(Block::Text, text),
                None => self.close(false),
            },
        }
    }

    /// Closes the open block.
    fn finish(&mut self) -> Vec<BlockEvent> {
        self.close(true)
    }

    fn close(&mut self, complete: bool) -> Vec<BlockEvent> {
        let Some((block, text)) = self.open.take() else { return Vec::new() };
        self.closed += 1;
        vec![BlockEvent::Close { index: self.closed - 1, block, text, complete }]
    }

    fn open(&mut self, block: Block) -> Vec<BlockEvent> {
        let mut events = self.finish();
        events.push(BlockEvent::Open { index: self.closed, block: block.clone() });
        self.open = Some((block, String::new()));
        events
    }

    fn text(&mut self, block: Block, text: String) -> Vec<BlockEvent> {
        let mut events = match &self.open {
            Some((open, _)) if *open == block => Vec::new(),
            _ => self.open(block.clone()),
        };
        if let Some((_, whole)) = &mut self.open {
            *whole += &text;
        }
        events.push(BlockEvent::Delta { index: self.closed, block, text });
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_follow_each_other() {
        let mut blocks = Blocks::default();
        let call = Block::Call { id: "c".into(), name: "f".into() };
        let reply = [
            ReplyEvent::Reasoning("a".into()),
            ReplyEvent::Reasoning("b".into()),
            ReplyEvent::Text("c".into()),
            ReplyEvent::CallStarted { index: 0, id: Some("c".into()), name: "f".into() },
            ReplyEvent::Arguments { index: 0, delta: "{}".into() },
            ReplyEvent::CallFinished { index: 0 },
        ];
        let mut events: Vec<BlockEvent> = reply.into_iter().flat_map(|event| blocks.take(event)).collect();
        events.extend(blocks.finish());
        let closed: Vec<(usize, Block, &str)> = events
            .iter()
            .filter_map(|event| match event {
                BlockEvent::Close { index, block, text, .. } => Some((*index, block.clone(), text.as_str())),
                _ => None,
            })
            .collect();
        assert_eq!(closed, [(0, Block::Reasoning, "ab"), (1, Block::Text, "c"), (2, call, "{}")]);
        assert_eq!(events.len(), 3 + 4 + 3);
    }

    #[test]
    fn a_call_that_breaks_off_is_text_or_incomplete() {
        let reply = || {
            [
                ReplyEvent::Text("a ".into()),
                ReplyEvent::CallStarted { index: 0, id: Some("c".into()), name: "f".into() },
                ReplyEvent::Arguments { index: 0, delta: "{".into() },
                ReplyEvent::CallBroken { index: 0, text: "<f>{".into() },
                ReplyEvent::Text("b".into()),
            ]
        };
        let closed = |mut blocks: Blocks| {
            let mut events: Vec<BlockEvent> =
                reply().into_iter().flat_map(|event| blocks.take(event)).collect();
            events.extend(blocks.finish());
            let close = |event| match event {
                BlockEvent::Close { text, complete, .. } => Some((text, complete)),
                _ => None,
            };
            events.into_iter().filter_map(close).collect::<Vec<(String, bool)>>()
        };
        assert_eq!(closed(Blocks::of_complete_calls()), [("a <f>{b".to_owned(), true)]);
        let streamed = [("a ".to_owned(), true), ("{".to_owned(), false), ("b".to_owned(), true)];
        assert_eq!(closed(Blocks::default()), streamed);
    }
}
