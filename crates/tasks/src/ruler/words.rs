//! Aggregation: the most common words of a numbered list, and the most frequent words of a coded
//! text.

use super::Draft;
use super::lexicon::Lexicon;
use crate::Random;
use std::collections::HashSet;
use std::f64::consts::PI;

const LIST_TEMPLATE: &str = "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?";
const LIST_PREFIX: &str = " Answer: The top 10 words that appear most often in the list are:";
const COMMON_WORDS: usize = 10;
/// As many different words as the shorter worked example has.
pub(super) const LEAST_WORDS: usize = 20;
/// Below this length lists repeat their words less often.
const SHORT_CONTEXT: usize = 4096;

/// How often words occur in a list.
#[derive(Clone, Copy)]
struct Repeats {
    common: usize,
    uncommon: usize,
}

/// A common-words case except its size.
pub(super) struct WordList {
    example: String,
    /// The first ten are the common ones.
    words: Vec<String>,
    repeats: Repeats,
    random: Random,
}

impl WordList {
    /// A list of plain words.
    pub fn draw(max_seq_length: usize, random: Random) -> Self {
        Self::from_pool(max_seq_length, Lexicon::get().plain_words(), random)
    }

    /// A list that may also hold compounds, for lengths that need more words than there are plain
    /// ones.
    pub fn draw_from_compounds(max_seq_length: usize, random: Random) -> Self {
        Self::from_pool(max_seq_length, Lexicon::get().all_words(), random)
    }

    fn from_pool(max_seq_length: usize, pool: usize, mut random: Random) -> Self {
        let short = max_seq_length < SHORT_CONTEXT;
        let (example_words, example_repeats, repeats) = if short {
            (20, Repeats { common: 3, uncommon: 1 }, Repeats { common: 6, uncommon: 1 })
        } else {
            (40, Repeats { common: 10, uncommon: 3 }, Repeats { common: 30, uncommon: 3 })
        };
        let mut draw = |count: usize| -> Vec<String> {
            random.sample_indices(pool, count).into_iter().map(|i| Lexicon::get().word(i)).collect()
        };
        let shown = draw(example_words);
        // An entry costs a token at least, so this many words are never exceeded.
        let words = draw(max_seq_length);
        let list = numbered_list(&shown, example_repeats, &mut random);
        let example = format!(
            "{}{LIST_PREFIX} {}\n",
            LIST_TEMPLATE.replace("{context}", &list),
            numbered(&shown[..COMMON_WORDS])
        );
        Self { example, words, repeats, random }
    }

    /// How many different words can be used.
    pub fn supply(&self) -> usize {
        self.words.len().max(LEAST_WORDS)
    }

    pub fn compose(&self, size: usize) -> Draft {
        let words = &self.words[..size.min(self.words.len())];
        let list = numbered_list(words, self.repeats, &mut self.random.clone());
        Draft {
            prompt: format!("{}{}", self.example, LIST_TEMPLATE.replace("{context}", &list)),
            answer_prefix: LIST_PREFIX.to_owned(),
            references: words.iter().take(COMMON_WORDS).cloned().collect(),
            depths: Vec::new(),
        }
    }
}

fn numbered_list(words: &[String], repeats: Repeats, random: &mut Random) -> String {
    let (common, uncommon) = words.split_at(COMMON_WORDS.min(words.len()));
    let mut list: Vec<&String> = common
        .iter()
        .flat_map(|word| std::iter::repeat_n(word, repeats.common))
        .chain(uncommon.iter().flat_map(|word| std::iter::repeat_n(word, repeats.uncommon)))
        .collect();
    random.shuffle(&mut list);
    numbered(&list)
}

/// `1. word 2. word ...`
fn numbered<S: std::fmt::Display>(words: &[S]) -> String {
    let entries: Vec<String> =
        words.iter().enumerate().map(|(i, word)| format!("{}. {word}", i + 1)).collect();
    entries.join(" ")
}

const CODED_TEMPLATE: &str = "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently appeared words in the above coded text?";
const CODED_PREFIX: &str =
    " Answer: According to the coded text above, the three most frequently appeared words are:";
/// Written in place of the word of the first rank.
const NOISE_WORD: &str = "...";
const CODED_LETTERS: usize = 6;

/// A frequent-words case except its size.
pub(super) struct CodedText {
    /// By rank.
    vocabulary: Vec<String>,
    random: Random,
}

impl CodedText {
    /// From this many words on, rank four always occurs more often than rank five.
    pub const LEAST_SIZE: usize = 74;

    pub fn draw(max_seq_length: usize, mut random: Random) -> Self {
        // The three answers, the noise and one word that is not an answer, at least.
        let size = (max_seq_length / 50).max(5);
        let mut seen = HashSet::new();
        let mut vocabulary = vec![NOISE_WORD.to_owned()];
        while vocabulary.len() < size {
            let word = random.letters(b'a', CODED_LETTERS);
            if seen.insert(word.clone()) {
                vocabulary.push(word);
            }
        }
        Self { vocabulary, random }
    }

    pub fn compose(&self, size: usize) -> Draft {
        let mut text: Vec<&str> = self
            .vocabulary
            .iter()
            .enumerate()
            .flat_map(|(i, word)| std::iter::repeat_n(word.as_str(), zeta_count(size, i + 1)))
            .collect();
        self.random.clone().shuffle(&mut text);
        Draft {
            prompt: CODED_TEMPLATE.replace("{context}", &text.join(" ")),
            answer_prefix: CODED_PREFIX.to_owned(),
            references: self.vocabulary[1..4].to_vec(),
            depths: Vec::new(),
        }
    }
}

/// How often the word of a rank occurs among `size` words: the zeta law with exponent 2, rounded
/// down.
fn zeta_count(size: usize, rank: usize) -> usize {
    let zeta_of_two = PI * PI / 6.0;
    (size as f64 / (rank * rank) as f64 / zeta_of_two) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_stay_ahead_of_the_other_ranks() {
        for size in CodedText::LEAST_SIZE..20_000 {
            assert!(zeta_count(size, 4) > zeta_count(size, 5), "{size}");
        }
        assert!(zeta_count(CodedText::LEAST_SIZE - 1, 4) >= zeta_count(CodedText::LEAST_SIZE - 1, 5));
    }

    #[test]
    fn the_law_sums_to_the_size() {
        let total: usize = (1..20_000).map(|rank| zeta_count(100_000, rank)).sum();
        assert!((98_000..=100_000).contains(&total), "{total}");
    }

    #[test]
    fn numbering() {
        assert_eq!(numbered(&["a", "b"]), "1. a 2. b");
    }
}
