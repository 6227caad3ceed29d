//! Words for keys and word lists, chosen for this project (the official benchmark uses
//! wonderwords).

use crate::Random;
use std::sync::LazyLock;

/// Words by kind; no word belongs to two kinds.
pub(super) struct Lexicon {
    pub adjectives: Vec<&'static str>,
    pub nouns: Vec<&'static str>,
    pub verbs: Vec<&'static str>,
}

static LEXICON: LazyLock<Lexicon> = LazyLock::new(|| {
    let mut lists = [const { Vec::new() }; 3];
    let mut kind = 0;
    for line in include_str!("lexicon.txt").lines() {
        match line.strip_prefix("# ") {
            Some("adjectives") => kind = 0,
            Some("nouns") => kind = 1,
            Some(_) => kind = 2,
            None => lists[kind].extend(line.split_whitespace()),
        }
    }
    let [adjectives, nouns, verbs] = lists;
    Lexicon { adjectives, nouns, verbs }
});

impl Lexicon {
    pub fn get() -> &'static Self {
        &LEXICON
    }

    /// `adjective-noun`, the form of needle keys.
    pub fn key(&self, random: &mut Random) -> String {
        format!("{}-{}", random.choose(&self.adjectives), random.choose(&self.nouns))
    }

    /// How many plain words there are.
    pub fn plain_words(&self) -> usize {
        self.adjectives.len() + self.nouns.len() + self.verbs.len()
    }

    /// How many words there are with the compounds of an adjective and a noun.
    pub fn all_words(&self) -> usize {
        self.plain_words() + self.adjectives.len() * self.nouns.len()
    }

    /// The word at a position: nouns, adjectives, verbs, then compounds.
    pub fn word(&self, index: usize) -> String {
        let mut rest = index;
        for list in [&self.nouns, &self.adjectives, &self.verbs] {
            if let Some(word) = list.get(rest) {
                return (*word).to_owned();
            }
            rest -= list.len();
        }
        let (first, second) = (rest / self.nouns.len(), rest % self.nouns.len());
        format!("{}{}", self.adjectives[first % self.adjectives.len()], self.nouns[second])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn lists_are_long_and_disjoint() {
        let lexicon = Lexicon::get();
        assert!(lexicon.adjectives.len() >= 200 && lexicon.nouns.len() >= 200 && lexicon.verbs.len() >= 200);
        let lists = [&lexicon.adjectives, &lexicon.nouns, &lexicon.verbs];
        let distinct: HashSet<&str> = lists.into_iter().flatten().copied().collect();
        assert_eq!(distinct.len(), lexicon.plain_words());
        assert!(distinct.iter().all(|word| word.chars().all(|c| c.is_ascii_lowercase())));
    }

    #[test]
    fn all_words_differ() {
        let lexicon = Lexicon::get();
        let distinct: HashSet<String> = (0..lexicon.all_words()).map(|i| lexicon.word(i)).collect();
        assert_eq!(distinct.len(), lexicon.all_words());
    }
}
