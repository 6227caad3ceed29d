//! Needles in a haystack: magic numbers or uuids hidden in noise, in an essay, or among other
//! needles.
//!
//! Invariant: a [`Plan`] fixes keys, values, depths and questions before the size is searched, so
//! that a larger haystack is the same case with more hay.

use super::lexicon::Lexicon;
use super::{Draft, depth_of};
use crate::Random;
use crate::random::uuid_text;
use std::collections::HashSet;

pub(super) const NOISE: &str =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";
const TEMPLATE: &str = "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz you about the {type_needle_v} afterwards.\n{context}\nWhat are all the special magic {type_needle_v} for {query} mentioned in the provided text?";
const ANSWER_PREFIX: &str =
    " The special magic {type_needle_v} for {query} mentioned in the provided text are";
/// Needles stand at different depths out of this many, evenly spaced from the first to the last
/// sentence.
const DEPTH_POINTS: usize = 40;
/// A distractor key repeats only after this many unsuccessful draws.
const KEY_TRIES: usize = 64;

/// The haystack that needles are hidden in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Haystack {
    Noise,
    Essay,
    Needles,
}

/// The parameters of the eight tasks of this generator.
#[derive(Debug, Clone, Copy)]
pub(super) struct NiahShape {
    pub haystack: Haystack,
    pub uuid_keys: bool,
    pub uuid_values: bool,
    pub keys: usize,
    pub values: usize,
    pub queries: usize,
}

impl NiahShape {
    fn kind(self) -> &'static str {
        if self.uuid_values { "uuids" } else { "numbers" }
    }

    fn key(self, random: &mut Random) -> String {
        if self.uuid_keys { uuid4(random) } else { Lexicon::get().key(random) }
    }

    fn value(self, random: &mut Random) -> String {
        if self.uuid_values { uuid4(random) } else { random.number(7) }
    }

    fn needle(self, key: &str, value: &str) -> String {
        format!("One of the special magic {} for {key} is: {value}.", self.kind())
    }
}

fn uuid4(random: &mut Random) -> String {
    // Version 4 and the standard variant.
    let bits = random.bits128() & !(0xf << 76) & !(0x3 << 62);
    uuid_text(bits | (0x4 << 76) | (0x2 << 62))
}

/// Running text cut into words, with the words that begin a sentence marked.
#[derive(Debug, Default)]
pub(super) struct Essay {
    words: Vec<String>,
    starts_sentence: Vec<bool>,
}

impl Essay {
    pub fn new(text: &str) -> Self {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        let starts_sentence = (0..words.len())
            .map(|i| {
                let Some(before) = i.checked_sub(1).map(|i| &words[i]) else { return true };
                let closed = before.trim_end_matches(['"', '\'', ')', '\u{201d}', '\u{2019}']);
                let opens = words[i].trim_start_matches(['"', '\'', '(', '\u{201c}', '\u{2018}']);
                closed.ends_with(['.', '!', '?']) && opens.starts_with(|c: char| !c.is_lowercase())
            })
            .collect();
        Self { words, starts_sentence }
    }

    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// The first `size` words (from the start again when there are too few), with needles put in
    /// front of the sentences that their depths point at.
    fn with_needles(&self, size: usize, needles: &[(usize, String)]) -> String {
        let length = self.words.len();
        let starts = |i: usize| self.starts_sentence[i % length];
        let sentences = (0..size).filter(|&i| starts(i)).count();
        let place = |percent: usize| sentences * percent / 100;

        let mut pieces: Vec<&str> = Vec::with_capacity(size + needles.len());
        let mut waiting = needles.iter().peekable();
        let mut sentence = 0;
        for i in 0..size {
            if starts(i) {
                while let Some((_, needle)) = waiting.next_if(|(percent, _)| place(*percent) <= sentence) {
                    pieces.push(needle);
                }
                sentence += 1;
            }
            pieces.push(&self.words[i % length]);
        }
        pieces.extend(waiting.map(|(_, needle)| needle.as_str()));
        pieces.join(" ")
    }
}

/// Everything about a case except its size.
pub(super) struct Plan {
    shape: NiahShape,
    /// In the order in which the text shows them, with depths in percent.
    needles: Vec<(usize, String)>,
    /// Keys and values that distractors must not use.
    taken: HashSet<String>,
    query: String,
    /// Answers and the needles that hold them.
    answers: Vec<(String, String)>,
    /// For parts that depend on the size: line positions and distractors.
    random: Random,
}

impl Plan {
    pub fn draw(shape: NiahShape, mut random: Random) -> Self {
        let mut taken = HashSet::new();
        let mut fresh = |random: &mut Random, draw: fn(NiahShape, &mut Random) -> String| loop {
            let text = draw(shape, random);
            if taken.insert(text.clone()) {
                return text;
            }
        };
        let table: Vec<(String, Vec<String>)> = (0..shape.keys)
            .map(|_| {
                let key = fresh(&mut random, NiahShape::key);
                (key, (0..shape.values).map(|_| fresh(&mut random, NiahShape::value)).collect())
            })
            .collect();

        let mut sentences: Vec<String> = table
            .iter()
            .flat_map(|(key, values)| values.iter().map(|value| shape.needle(key, value)))
            .collect();
        random.shuffle(&mut sentences);
        let mut depths: Vec<usize> = random
            .sample_indices(DEPTH_POINTS, sentences.len())
            .into_iter()
            .map(|point| (point as f64 * 100.0 / (DEPTH_POINTS - 1) as f64).round_ties_even() as usize)
            .collect();
        depths.sort_unstable();

        let asked = random.sample(&table, shape.queries);
        let queries: Vec<&str> = asked.iter().map(|(key, _)| key.as_str()).collect();
        let query = match queries.split_last() {
            Some((last, [])) => (*last).to_owned(),
            Some((last, others)) => format!("{}, and {last}", others.join(", ")),
            None => String::new(),
        };
        let answers = asked
            .iter()
            .flat_map(|(key, values)| values.iter().map(|value| (value.clone(), shape.needle(key, value))))
            .collect();
        Self { shape, needles: depths.into_iter().zip(sentences).collect(), taken, query, answers, random }
    }

    /// A needle at each of these depths in one haystack, and for each needle the plan that asks for
    /// it: the prompts differ only in their question. One depth gives the single needle at a depth
    /// of the caller's choice.
    pub fn at_depths(shape: NiahShape, percents: &[usize], random: Random) -> Vec<Self> {
        let several = NiahShape { keys: percents.len(), values: 1, queries: percents.len(), ..shape };
        let mut plan = Self::draw(several, random);
        let mut depths = percents.to_vec();
        depths.sort_unstable();
        for (needle, depth) in plan.needles.iter_mut().zip(depths) {
            needle.0 = depth;
        }
        let key_of = |needle: &str| {
            needle
                .split_once(" for ")
                .and_then(|(_, rest)| rest.split_once(" is: "))
                .map(|(key, _)| key.to_owned())
        };
        plan.needles
            .iter()
            .map(|(_, needle)| Self {
                shape: NiahShape { keys: percents.len(), values: 1, queries: 1, ..shape },
                needles: plan.needles.clone(),
                taken: plan.taken.clone(),
                query: key_of(needle).unwrap_or_default(),
                answers: plan.answers.iter().filter(|answer| answer.1 == *needle).cloned().collect(),
                random: plan.random.clone(),
            })
            .collect()
    }

    /// The least number of essay words or noise lines. Needles stand between lines, so there is at
    /// least one line for each needle.
    pub fn least_size(&self) -> usize {
        self.needles.len()
    }

    pub fn compose(&self, size: usize, essay: &Essay) -> Draft {
        let context = match self.shape.haystack {
            Haystack::Essay => essay.with_needles(size, &self.needles),
            Haystack::Noise => self.between_lines(vec![NOISE.to_owned(); size]),
            Haystack::Needles => self.between_lines(self.distractors(size)),
        };
        let (template, prefix, kind) = self.phrasing();
        let fill = |text: &str| text.replace("{type_needle_v}", kind).replace("{query}", &self.query);
        Draft {
            prompt: fill(&template).replace("{context}", &context),
            answer_prefix: fill(&prefix),
            references: self.answers.iter().map(|(value, _)| value.clone()).collect(),
            depths: self.answers.iter().map(|(_, needle)| depth_of(needle, &context)).collect(),
        }
    }

    /// One answer is asked for in the singular, by the same text replacements as the official code.
    fn phrasing(&self) -> (String, String, &'static str) {
        let kind = self.shape.kind();
        if self.shape.queries * self.shape.values > 1 {
            return (TEMPLATE.to_owned(), ANSWER_PREFIX.to_owned(), kind);
        }
        let singular = |text: &str| text.replace("Some", "A").replace("are all", "is").replace("are", "is");
        (singular(TEMPLATE), singular(ANSWER_PREFIX), kind.trim_end_matches('s'))
    }

    fn between_lines(&self, mut lines: Vec<String>) -> String {
        let mut places = self.random.clone().sample_indices(lines.len(), self.needles.len());
        places.sort_unstable();
        for (i, (place, (_, needle))) in places.into_iter().zip(&self.needles).enumerate() {
            lines.insert(place + i, needle.clone());
        }
        lines.join("\n")
    }

    fn distractors(&self, count: usize) -> Vec<String> {
        // A stream of its own: the first lines stay the same when the haystack grows.
        let mut random = Random::new("distractors", self.random.clone().below(u64::MAX), 0);
        let mut seen = self.taken.clone();
        let mut fresh = |draw: fn(NiahShape, &mut Random) -> String| {
            let mut text = draw(self.shape, &mut random);
            for _ in 0..KEY_TRIES {
                if !seen.contains(&text) {
                    break;
                }
                text = draw(self.shape, &mut random);
            }
            while self.taken.contains(&text) {
                text = draw(self.shape, &mut random);
            }
            seen.insert(text.clone());
            text
        };
        (0..count)
            .map(|_| {
                let key = fresh(NiahShape::key);
                self.shape.needle(&key, &fresh(NiahShape::value))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_of_an_essay() {
        let essay = Essay::new("One two. Three! \"Four five?\" six (Seven). Eight e.g. nine");
        let starts: Vec<&str> = essay
            .words
            .iter()
            .zip(&essay.starts_sentence)
            .filter(|(_, starts)| **starts)
            .map(|(word, _)| word.as_str())
            .collect();
        assert_eq!(starts, ["One", "Three!", "\"Four", "Eight"]);
    }

    #[test]
    fn needles_stand_at_their_depths() {
        let essay = Essay::new("A. B. C. D. E. F. G. H. I. J.");
        let needles = [(0, "zero".to_owned()), (51, "half".to_owned()), (100, "end".to_owned())];
        assert_eq!(essay.with_needles(10, &needles), "zero A. B. C. D. E. half F. G. H. I. J. end");
        assert_eq!(essay.with_needles(12, &needles), "zero A. B. C. D. E. F. half G. H. I. J. A. B. end");
    }

    #[test]
    fn uuids_are_version_four() {
        let mut random = Random::new("uuid", 0, 0);
        for _ in 0..200 {
            let uuid = uuid4(&mut random);
            assert_eq!(&uuid[14..15], "4");
            assert!("89ab".contains(&uuid[19..20]), "{uuid}");
        }
    }
}
