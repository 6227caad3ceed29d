//! Talk: greetings, continuing a passage, and facts told long before they are asked for.

use super::words::{CITIES, FOODS, GREETINGS, JOBS, NAMES, PETS};
use super::{Turn, chars, exchange};
use crate::{Filler, Random, TaskError};

/// After this many draws a filler whose paragraphs are all too short is reported.
const RESUME_TRIES: usize = 1000;

pub(super) fn hello(random: &mut Random) -> Vec<Turn> {
    let (greetings, answer) = GREETINGS[random.index(GREETINGS.len())];
    exchange(random.choose(greetings).to_owned(), answer.to_owned())
}

/// A passage cut at the end of a sentence, to be continued.
pub(super) fn resume(random: &mut Random, filler: &dyn Filler) -> Result<Vec<Turn>, TaskError> {
    for _ in 0..RESUME_TRIES {
        let paragraph = filler.paragraph(random);
        let sentences: Vec<&str> = paragraph.split(". ").collect();
        if sentences.len() >= 3 {
            let cut = random.between(1, sentences.len() as u64 - 1) as usize;
            let (given, expected) = sentences.split_at(cut);
            return Ok(exchange(format!("Continue this text: {}.", given.join(". ")), expected.join(". ")));
        }
    }
    Err(TaskError::ShortFiller { tries: RESUME_TRIES })
}

/// A fact about a friend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    City,
    Job,
    Pet,
    Food,
    Code,
}

impl Kind {
    pub(super) const ALL: [Self; 5] = [Self::City, Self::Job, Self::Pet, Self::Food, Self::Code];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::City => "city",
            Self::Job => "job",
            Self::Pet => "pet",
            Self::Food => "food",
            Self::Code => "code",
        }
    }

    pub(super) fn phrase(self) -> &'static str {
        match self {
            Self::City => "lives in",
            Self::Job => "works as a",
            Self::Pet => "has a pet",
            Self::Food => "loves to eat",
            Self::Code => "keeps a box with code",
        }
    }

    pub(super) fn value(self, random: &mut Random) -> String {
        match self {
            Self::City => random.choose(&CITIES).to_owned(),
            Self::Job => random.choose(&JOBS).to_owned(),
            Self::Pet => random.choose(&PETS).to_owned(),
            Self::Food => random.choose(&FOODS).to_owned(),
            Self::Code => random.number(4),
        }
    }

    pub(super) fn question(self, person: &str) -> String {
        match self {
            Self::City => format!("Where does {person} live?"),
            Self::Job => format!("What does {person} work as?"),
            Self::Pet => format!("Which pet does {person} have?"),
            Self::Food => format!("What does {person} love to eat?"),
            Self::Code => format!("Which code does the box of {person} have?"),
        }
    }
}

/// A long conversation in episodes; the last question asks for a fact told in one of them.
pub(super) fn memory(random: &mut Random, budget: usize, filler: &dyn Filler) -> Vec<Turn> {
    let people = random.sample(&NAMES, 12);
    let mut turns = Vec::new();
    let mut facts: Vec<(&str, Kind, String)> = Vec::new();
    let mut size = 0;
    for person in people.into_iter().cycle() {
        if size >= budget && !facts.is_empty() {
            break;
        }
        let mut kind = Kind::ALL[random.index(Kind::ALL.len())];
        if facts.iter().any(|fact| fact.0 == person && fact.1 == kind) {
            // Only a code can change: the last one told counts.
            kind = Kind::Code;
            facts.retain(|fact| !(fact.0 == person && fact.1 == Kind::Code));
        }
        let value = kind.value(random);
        let told = format!("My friend {person} {} {value}.", kind.phrase());
        let noted = format!("Noted: {person}, {}, {value}.", kind.name());
        size += chars(&told) + chars(&noted);
        turns.extend(exchange(told, noted));
        facts.push((person, kind, value));
        for _ in 0..random.below(3) {
            let shown = format!("Read this: {}", filler.paragraph(random));
            size += chars(&shown) + 20;
            turns.extend(exchange(shown, "I have read it.".to_owned()));
        }
    }
    let (person, kind, value) = &facts[random.index(facts.len())];
    turns.extend(exchange(kind.question(person), value.clone()));
    turns
}
