//! Tells a model's reasoning from its answer by the tags around it.
//!
//! Invariant: how the text was cut into pieces does not change what is reasoning and what is answer; a tag is
//! never shown, nor is half of one. Reasoning can only open the reply; a later tag is ordinary text.

use crate::config::Reasoning;

/// A piece of a reply, told apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Split {
    pub content: String,
    pub reasoning: String,
}

#[derive(Clone, Debug)]
enum State {
    /// Nothing but white space so far; the opening tag may come.
    Opening,
    /// Line breaks after the opening tag are the tag's.
    Opened,
    Reasoning,
    /// Line breaks after the closing tag belong to neither.
    Closed,
    Content,
}

/// Splits one reply.
#[derive(Clone, Debug)]
pub struct Splitter {
    open: String,
    close: String,
    state: State,
    held: String,
}

impl Splitter {
    /// A splitter for a reply to `prompt`: a template may have opened the reasoning already. None if nothing is
    /// to be split.
    pub fn new(reasoning: &Reasoning, prompt: &str) -> Option<Self> {
        let Reasoning::Tags { open, close } = reasoning else { return None };
        let opened = prompt.trim_end().ends_with(open.as_str());
        let state = if opened { State::Opened } else { State::Opening };
        Some(Self { open: open.clone(), close: close.clone(), state, held: String::new() })
    }

    /// Whether the text last pushed was reasoning.
    pub fn in_reasoning(&self) -> bool {
        matches!(self.state, State::Opened | State::Reasoning)
    }

    pub fn push(&mut self, piece: &str) -> Split {
        let mut split = Split::default();
        let mut text = std::mem::take(&mut self.held) + piece;
        loop {
            match self.state {
                State::Opening => {
                    let start = text.trim_start();
                    if let Some(rest) = start.strip_prefix(self.open.as_str()) {
                        text = rest.to_owned();
                        self.state = State::Opened;
                    } else if self.open.starts_with(start) {
                        self.held = text;
                        return split;
                    } else {
                        self.state = State::Content;
                    }
                }
                State::Opened => {
                    text = text.trim_start_matches('\n').to_owned();
                    if text.is_empty() {
                        return split;
                    }
                    self.state = State::Reasoning;
                }
                State::Reasoning => match text.find(self.close.as_str()) {
                    Some(at) => {
                        split.reasoning += text[..at].trim_end_matches('\n');
                        text = text[at + self.close.len()..].to_owned();
                        self.state = State::Closed;
                    }
                    None => {
                        let keep = text.len() - self.undecided(&text);
                        self.held = text.split_off(keep);
                        split.reasoning += &text;
                        return split;
                    }
                },
                State::Closed => {
                    text = text.trim_start_matches(['\n', '\r']).to_owned();
                    if text.is_empty() {
                        return split;
                    }
                    self.state = State::Content;
                }
                State::Content => {
                    split.content += &text;
                    return split;
                }
            }
        }
    }

    /// Ends the reply: text that was held back is ordinary text.
    pub fn flush(&mut self) -> Split {
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Reasoning => Split { content: String::new(), reasoning: held },
            _ => Split { content: held, reasoning: String::new() },
        }
    }

    /// Length of the end of `text` that may still turn out to be line breaks before the closing tag, or the
    /// beginning of it.
    fn undecided(&self, text: &str) -> usize {
        let begun = self
            .close
            .char_indices()
            .map(|(at, _)| &self.close[..at])
            .filter(|beginning| text.ends_with(beginning))
            .map(str::len)
            .max()
            .unwrap_or(0);
        let before = &text[..text.len() - begun];
        text.len() - before.trim_end_matches('\n').len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(prompt: &str, pieces: &[String]) -> (String, String) {
        let mut splitter = Splitter::new(&Reasoning::think(), prompt).unwrap();
        let (mut reasoning, mut content) = (String::new(), String::new());
        for split in pieces.iter().map(|piece| splitter.push(piece)).collect::<Vec<_>>() {
            reasoning += &split.reasoning;
            content += &split.content;
        }
        let rest = splitter.flush();
        (reasoning + &rest.reasoning, content + &rest.content)
    }

    fn whole(prompt: &str, text: &str) -> (String, String) {
        run(prompt, &[text.to_owned()])
    }

    #[test]
    fn reasoning_is_told_from_the_answer() {
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(whole("", "<think>why</think>\n\nbecause"), pair("why", "because"));
        assert_eq!(whole("", "no tags <think>x</think>"), pair("", "no tags <think>x</think>"));
        assert_eq!(whole("assistant\n<think>\n", "why\n</think>\nso"), pair("why", "so"));
        assert_eq!(whole("<think>\n\n</think>\n\n", "direct"), pair("", "direct"));
        assert_eq!(whole("", "<think>cut off"), pair("cut off", ""));
        assert_eq!(whole("", "<thi"), pair("", "<thi"));
        assert_eq!(whole("", "<think>a</thi"), pair("a</thi", ""));
        assert!(Splitter::new(&Reasoning::Off, "").is_none());
    }

    proptest! {
        #[test]
        fn the_cut_does_not_matter(
            parts in prop::collection::vec(prop::sample::select(
                vec!["<think>", "</think>", "<thi", "nk>", "</", "think>", "\n", " ", "a", "é<"]), 0..10),
            cuts in prop::collection::vec(any::<bool>(), 80),
        ) {
            let text = parts.concat();
            let mut pieces = vec![String::new()];
            for (index, c) in text.chars().enumerate() {
                if cuts[index % cuts.len()] {
                    pieces.push(String::new());
                }
                pieces.last_mut().unwrap().push(c);
            }
            prop_assert_eq!(run("", &pieces), whole("", &text));
        }
    }
}
