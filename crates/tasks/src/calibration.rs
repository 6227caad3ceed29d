//! The text that `oscar calibrate` reads without `--text`: prose, generated paragraphs and chat
//! tasks in turn.
//!
//! Invariant: every chat case here has a seed of at least [`CALIBRATION_SEEDS_FROM`], and
//! evaluation uses only seeds below it.

use crate::filler::prose;
use crate::{Filler, GrammarFiller, Random, Task, Turn};

/// Seeds from here on belong to calibration, seeds below to evaluation.
pub const CALIBRATION_SEEDS_FROM: u64 = 1 << 40;

/// Each calibration seed owns this many case seeds.
const CASES_PER_SEED: u64 = 1 << 20;
/// Calibration seeds beyond this wrap around; it keeps case seeds within 64 bits.
const CALIBRATION_SEEDS: u64 = 1 << 43;

/// The tasks of chat documents: retrieval, copying, arithmetic, memory.
const TASKS: [Task; 12] = [
    Task::NiahSingle,
    Task::Copy,
    Task::RunningSum,
    Task::Memory,
    Task::NiahMultikey,
    Task::Program,
    Task::NiahMultivalue,
    Task::Vt,
    Task::NiahUuid,
    Task::Sort,
    Task::NiahMultiquery,
    Task::Cwe,
];

/// Shortest and longest document, except for the last one and for tasks that are always short.
const SHORTEST: usize = 1500;
const LONGEST: usize = 9000;

/// One document to run through a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Document {
    /// Plain text, to be tokenized as it is.
    Text(String),
    /// A conversation, to be written with the model's chat template.
    Chat(Vec<Turn>),
}

impl Document {
    /// Characters of text, without the additions of a chat template.
    pub fn chars(&self) -> usize {
        match self {
            Self::Text(text) => text.chars().count(),
            Self::Chat(turns) => turns.iter().map(|turn| turn.text.chars().count()).sum(),
        }
    }
}

/// Documents of about `approx_chars` characters together. Half of them are chats; the other half is
/// the hand-written prose, each piece once, and generated paragraphs.
pub fn calibration_text(seed: u64, approx_chars: usize) -> Vec<Document> {
    let mut random = Random::new("calibration", seed, 0);
    let mut pieces = prose();
    random.shuffle(&mut pieces);
    let first_case = CALIBRATION_SEEDS_FROM + (seed % CALIBRATION_SEEDS) * CASES_PER_SEED;

    let mut documents: Vec<Document> = Vec::new();
    let mut size = 0;
    let mut chats = 0usize;
    for turn in 0.. {
        if size >= approx_chars {
            break;
        }
        let left = approx_chars - size;
        let length = (random.between(SHORTEST as u64, LONGEST as u64) as usize).min(left);
        let document = match turn % 4 {
            0 => match pieces.pop() {
                Some(piece) => Document::Text(cut(piece.text, left)),
                None => Document::Text(paragraphs(&mut random, length)),
            },
            2 => Document::Text(paragraphs(&mut random, length)),
            _ => {
                let task = TASKS[chats % TASKS.len()];
                let case_seed = first_case + chats as u64 % CASES_PER_SEED;
                chats += 1;
                match task.case(case_seed, length, &GrammarFiller) {
                    Ok(case) => Document::Chat(case.turns),
                    // Only `resume` can fail, and it is not among the tasks.
                    Err(_) => Document::Text(paragraphs(&mut random, length)),
                }
            }
        };
        size += document.chars();
        documents.push(document);
    }
    documents
}

/// Generated paragraphs that reach `length` characters, separated by blank lines.
fn paragraphs(random: &mut Random, length: usize) -> String {
    let mut text = GrammarFiller.paragraph(random);
    while text.len() < length {
        text.push_str("\n\n");
        text.push_str(&GrammarFiller.paragraph(random));
    }
    text
}

/// The paragraphs of a text that begin within `length` characters.
fn cut(text: &str, length: usize) -> String {
    let mut out = String::new();
    for paragraph in text.split("\n\n") {
        if !out.is_empty() {
            if out.len() >= length {
                break;
            }
            out.push_str("\n\n");
        }
        out.push_str(paragraph);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn total(documents: &[Document]) -> usize {
        documents.iter().map(Document::chars).sum()
    }

    #[test]
    fn a_mix_of_texts_and_chats() {
        let documents = calibration_text(1, 1_200_000);
        let chats: Vec<&Document> =
            documents.iter().filter(|document| matches!(document, Document::Chat(_))).collect();
        assert!(chats.len() * 10 >= documents.len() * 4 && chats.len() * 10 <= documents.len() * 6);
        for piece in prose() {
            let whole = Document::Text(piece.text.to_owned());
            assert_eq!(documents.iter().filter(|&document| *document == whole).count(), 1, "{}", piece.title);
        }
        let asks = |text: &str| {
            chats.iter().any(|chat| matches!(chat, Document::Chat(turns) if turns[0].text.contains(text)))
        };
        for part in ["magic number", "Repeat", "modulo 100", "My friend", "Sort ascending"] {
            assert!(asks(part), "{part}");
        }
    }

    #[test]
    fn evaluation_cases_do_not_occur() {
        let documents = calibration_text(0, 200_000);
        for task in TASKS {
            for seed in 0..50 {
                let case = task.case(seed, 3000, &GrammarFiller).unwrap();
                assert!(!documents.contains(&Document::Chat(case.turns)));
            }
        }
    }

    #[test]
    fn nothing_is_asked_for_nothing() {
        assert!(calibration_text(0, 0).is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn size_and_determinism(seed: u64, wanted in 1usize..120_000) {
            let documents = calibration_text(seed, wanted);
            prop_assert_eq!(&documents, &calibration_text(seed, wanted));
            let size = total(&documents);
            prop_assert!(size >= wanted && size <= wanted + 3 * LONGEST, "{} for {}", size, wanted);
            for document in &documents {
                match document {
                    Document::Text(text) => prop_assert!(!text.trim().is_empty()),
                    Document::Chat(turns) => prop_assert!(turns.len() >= 2 && turns.len() % 2 == 0),
                }
            }
        }
    }
}
