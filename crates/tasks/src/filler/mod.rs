//! Haystack text: paragraphs to hide things in, and prose to calibrate on.
//!
//! [`GrammarFiller`] writes paragraphs from a grammar of our own (`grammar.txt`),
//! [`ParagraphFiller`] takes them from a text of the caller's. Invariant: a paragraph depends on
//! the random stream it is given and on nothing else.

mod grammar;

use crate::{Random, TaskError};
use grammar::Grammar;

/// A source of haystack text.
pub trait Filler {
    /// One paragraph, without line breaks.
    fn paragraph(&self, random: &mut Random) -> String;

    /// Running text of at least `words` words, if there are that many, in an order that the seed
    /// fixes.
    fn essay(&self, words: usize, seed: u64) -> String {
        let mut random = Random::new("essay", seed, 0);
        let mut text = String::new();
        let mut have = 0;
        // Bounded by the request, in case a source has nothing but blanks.
        for _ in 0..words {
            if have >= words {
                break;
            }
            let paragraph = self.paragraph(&mut random);
            have += paragraph.split_whitespace().count();
            text.push_str(&paragraph);
            text.push('\n');
        }
        text
    }
}

/// Endless paragraphs on fourteen everyday subjects.
#[derive(Debug, Clone, Copy, Default)]
pub struct GrammarFiller;

impl Filler for GrammarFiller {
    fn paragraph(&self, random: &mut Random) -> String {
        Grammar::builtin().paragraph(random)
    }
}

/// Paragraphs of a text that the caller supplies.
#[derive(Debug, Clone)]
pub struct ParagraphFiller {
    paragraphs: Vec<String>,
}

impl ParagraphFiller {
    /// A block longer than this is cut at the next end of a sentence, so that one paragraph cannot
    /// fill a whole haystack.
    const LONG: usize = 1200;
    /// Cut here even in the middle of a sentence.
    const TOO_LONG: usize = 2400;

    /// Takes the blocks between blank lines as paragraphs; line breaks inside a block become
    /// spaces.
    pub fn from_text(text: &str) -> Result<Self, TaskError> {
        let text = text.replace("\r\n", "\n");
        let mut paragraphs = Vec::new();
        let mut current = String::new();
        for line in text.lines().chain([""]) {
            if line.trim().is_empty() && !current.is_empty() {
                paragraphs.push(std::mem::take(&mut current));
            }
            for word in line.split_whitespace() {
                if !current.is_empty() {
                    current.push(' ');
                }
                current.push_str(word);
                let ends_sentence = word.ends_with(['.', '!', '?']);
                if current.len() >= Self::TOO_LONG || (current.len() >= Self::LONG && ends_sentence) {
                    paragraphs.push(std::mem::take(&mut current));
                }
            }
        }
        if paragraphs.is_empty() { Err(TaskError::EmptyFiller) } else { Ok(Self { paragraphs }) }
    }

    /// How many paragraphs there are.
    pub fn len(&self) -> usize {
        self.paragraphs.len()
    }

    /// Never true: an empty text is refused.
    pub fn is_empty(&self) -> bool {
        self.paragraphs.is_empty()
    }
}

impl Filler for ParagraphFiller {
    fn paragraph(&self, random: &mut Random) -> String {
        self.paragraphs[random.index(self.paragraphs.len())].clone()
    }

    /// The text in its own order, once; RULER repeats it when it is too short.
    fn essay(&self, _words: usize, _seed: u64) -> String {
        self.paragraphs.join("\n")
    }
}

/// A piece of the hand-written prose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prose {
    pub title: &'static str,
    /// Paragraphs separated by blank lines.
    pub text: &'static str,
}

/// The hand-written prose, written for this project: some eighteen thousand words of stories,
/// manuals and code.
pub fn prose() -> Vec<Prose> {
    include_str!("../prose.txt")
        .split("# ")
        .filter_map(|section| section.split_once('\n'))
        .map(|(title, text)| Prose { title: title.trim(), text: text.trim() })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    #[test]
    fn prose_has_titles_and_enough_words() {
        let pieces = prose();
        assert!(pieces.len() >= 10);
        let words: usize = pieces.iter().map(|piece| piece.text.split_whitespace().count()).sum();
        assert!((3000..30_000).contains(&words), "{words}");
        for piece in pieces {
            assert!(!piece.title.is_empty() && piece.text.len() > 500, "{}", piece.title);
            assert!(piece.text.is_ascii() && !piece.text.contains("# "), "{}", piece.title);
        }
    }

    /// A reader would notice a repeated sentence. Twenty thousand tokens are about 80,000
    /// characters.
    #[test]
    fn generated_text_does_not_repeat_within_twenty_thousand_tokens() {
        for seed in 0..4 {
            let mut random = Random::new("repetition", seed, 0);
            let mut text = String::new();
            while text.len() < 80_000 {
                text.push_str(&GrammarFiller.paragraph(&mut random));
                text.push(' ');
            }
            let mut seen: HashMap<&str, usize> = HashMap::new();
            for sentence in text.split(". ") {
                *seen.entry(sentence.trim()).or_default() += 1;
            }
            let total: usize = seen.values().sum();
            let again = total - seen.len();
            assert!(again * 100 <= total, "seed {seed}: {again} of {total} sentences came before");

            let words: Vec<&str> = text.split_whitespace().collect();
            let mut runs: HashMap<&[&str], usize> = HashMap::new();
            for run in words.windows(10) {
                *runs.entry(run).or_default() += 1;
            }
            let repeated = words.len() - 9 - runs.len();
            assert!(repeated * 100 <= words.len() * 3, "seed {seed}: {repeated} of {} runs", words.len());
        }
    }

    #[test]
    fn paragraphs_of_a_text() {
        let filler =
            ParagraphFiller::from_text("One line\nand its rest.\n\n\nAnother.\r\n\r\nThird").unwrap();
        assert_eq!(filler.paragraphs, ["One line and its rest.", "Another.", "Third"]);
        assert_eq!(filler.len(), 3);
        assert!(!filler.is_empty());
    }

    #[test]
    fn a_text_without_blank_lines_is_cut_at_sentences() {
        let text = "This sentence is about forty letters long. ".repeat(200);
        let filler = ParagraphFiller::from_text(&text).unwrap();
        assert!(filler.len() > 5);
        assert!(filler.paragraphs.iter().all(|p| p.len() <= 1300 && p.ends_with('.')));
        assert!(ParagraphFiller::from_text(&"word ".repeat(3000)).unwrap().len() > 5);
    }

    #[test]
    fn an_empty_text_is_refused() {
        for text in ["", "  \n\n \t"] {
            let error = ParagraphFiller::from_text(text).unwrap_err();
            assert!(error.to_string().contains("at least one word"));
        }
    }

    #[test]
    fn essays_reach_their_length() {
        let essay = GrammarFiller.essay(5000, 3);
        assert!(essay.split_whitespace().count() >= 5000);
        assert_eq!(essay, GrammarFiller.essay(5000, 3));
        assert_ne!(essay, GrammarFiller.essay(5000, 4));
        assert!(GrammarFiller.essay(9000, 3).starts_with(&essay), "longer essays continue shorter ones");
    }

    proptest! {
        #[test]
        fn paragraphs_are_well_formed(seed: u64) {
            let paragraph = GrammarFiller.paragraph(&mut Random::new("test", seed, 0));
            prop_assert_eq!(&paragraph, &GrammarFiller.paragraph(&mut Random::new("test", seed, 0)));
            prop_assert!((200..1200).contains(&paragraph.len()), "{}", paragraph);
            prop_assert!(!paragraph.contains(['{', '}', '|', '\n']) && !paragraph.contains("  "), "{}", paragraph);
            prop_assert!(paragraph.split(". ").count() >= 3, "{}", paragraph);
            // Nothing that a task hides or asks for may occur.
            prop_assert!(!paragraph.contains(|c: char| c.is_ascii_digit()));
            for word in ["VAR", "magic", "pass key"] {
                prop_assert!(!paragraph.contains(word));
            }
            prop_assert!(paragraph.starts_with(|c: char| c.is_uppercase() || c == '"'), "{}", paragraph);
        }
    }
}
