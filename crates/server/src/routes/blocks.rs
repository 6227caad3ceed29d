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
    },
}

/// Joins the events of an answer into blocks, one after the other.
#[derive(Debug, Default)]
pub struct Blocks {
    open: Option<(Block, String)>,
    closed: usize,
    /// How the answer ended.
    pub finish: Option<Finish>,
    pub totals: Totals,
}

impl Blocks {
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
                self.open(Block::Call { id: id.unwrap_or_default(), name })
            }
            ReplyEvent::Arguments { delta, .. } => match self.open.clone() {
                Some((block, _)) => self.text(block, delta),
                None => Vec::new(),
            },
            ReplyEvent::CallFinished { complete: true, .. } => self.finish(),
            // A call that broke off stays open until something follows it, or the answer ends.
            ReplyEvent::CallFinished { complete: false, .. } => Vec::new(),
        }
    }

    /// Closes the open block.
    fn finish(&mut self) -> Vec<BlockEvent> {
        let Some((block, text)) = self.open.take() else { return Vec::new() };
        self.closed += 1;
        vec![BlockEvent::Close { index: self.closed - 1, block, text }]
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
            ReplyEvent::CallFinished { index: 0, complete: true },
        ];
        let mut events: Vec<BlockEvent> = reply.into_iter().flat_map(|event| blocks.take(event)).collect();
        events.extend(blocks.finish());
        let closed: Vec<(usize, Block, &str)> = events
            .iter()
            .filter_map(|event| match event {
                BlockEvent::Close { index, block, text } => Some((*index, block.clone(), text.as_str())),
                _ => None,
            })
            .collect();
        assert_eq!(closed, [(0, Block::Reasoning, "ab"), (1, Block::Text, "c"), (2, call, "{}")]);
        assert_eq!(events.len(), 3 + 4 + 3);
    }
}
