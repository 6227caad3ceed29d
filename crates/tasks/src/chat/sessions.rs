//! Conversations in sessions: many facts by topic, told long before several of them are asked for.
//!
//! Sentences are those of the `memory` task. One conversation serves all questions of a case, so that
//! a cache that drops rows has to choose them before it knows what will be asked.

use super::conversation::Kind;
use super::words::NAMES;
use super::{Turn, chars, exchange};
use crate::{Filler, Random, TaskError};

/// What the questions of a conversation ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Variant {
    /// Facts of any session.
    Sessions,
    /// Codes that were told twice; the later one counts.
    Update,
    /// Two facts of two sessions, one question after the other.
    Cross,
    /// Facts that were never told.
    Absent,
    /// Facts of the first messages, which the caller protects like a system message.
    System,
    /// A fact told after the long history, asked after a change of topic.
    Late,
}

impl Variant {
    /// Every variant with its name.
    pub const NAMES: [(Self, &'static str); 6] = [
        (Self::Sessions, "sessions"),
        (Self::Update, "update"),
        (Self::Cross, "cross"),
        (Self::Absent, "absent"),
        (Self::System, "system"),
        (Self::Late, "late"),
    ];

    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }

    /// The variant of that name.
    pub fn parse(name: &str) -> Result<Self, TaskError> {
        let known = || Self::NAMES.iter().map(|(_, name)| *name).collect();
        let found = Self::NAMES.iter().find(|(_, known)| *known == name);
        found
            .map(|(variant, _)| *variant)
            .ok_or_else(|| TaskError::UnknownTask { name: name.to_owned(), known: known() })
    }
}

/// One question of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inquiry {
    /// Turns between the history and the answer; the last is the question.
    pub turns: Vec<Turn>,
    /// The right answer; `None` if nobody told it.
    pub answer: Option<String>,
    /// Turns of the history that tell what is asked for.
    pub needs: Vec<usize>,
    /// Words that would be answers to such a question.
    pub plausible: Vec<String>,
}

/// A long conversation and several questions about it, each to be asked by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dialogue {
    pub variant: Variant,
    pub seed: u64,
    pub history: Vec<Turn>,
    /// The first turns of the history that a cache must keep.
    pub protected: usize,
    pub inquiries: Vec<Inquiry>,
}

/// Questions of a conversation.
const QUESTIONS: usize = 8;

struct Fact {
    person: &'static str,
    kind: Kind,
    value: String,
    turn: usize,
    session: usize,
}

/// The conversation for this seed, with about `budget` characters of history.
pub fn dialogue(variant: Variant, seed: u64, budget: usize, filler: &dyn Filler) -> Dialogue {
    let random = &mut Random::new(&format!("sessions/{}", variant.name()), seed, budget as u64);
    let mut telling = Telling { turns: Vec::new(), size: 0, facts: Vec::new() };
    let sessions = random.between(6, 10) as usize;
    let protected = if variant == Variant::System { telling.opening(random) } else { 0 };
    for session in 0..sessions {
        telling.session(random, variant, session, budget * (session + 1) / sessions, filler);
    }
    let inquiries = telling.inquiries(random, variant, filler);
    Dialogue { variant, seed, history: telling.turns, protected, inquiries }
}

/// A conversation while it is written.
struct Telling {
    turns: Vec<Turn>,
    size: usize,
    facts: Vec<Fact>,
}

impl Telling {
    fn say(&mut self, turns: Vec<Turn>) {
        self.size += turns.iter().map(|turn| chars(&turn.text) + 20).sum::<usize>();
        self.turns.extend(turns);
    }

    /// Tells a fact; an earlier one about the same thing counts no longer.
    fn tell(&mut self, random: &mut Random, person: &'static str, kind: Kind, session: usize) {
        let value = kind.value(random);
        let turn = self.turns.len();
        self.facts.retain(|fact| (fact.person, fact.kind) != (person, kind));
        self.say(told(person, kind, &value));
        self.facts.push(Fact { person, kind, value, turn, session });
    }

    /// Three facts before everything else; returns the number of turns.
    fn opening(&mut self, random: &mut Random) -> usize {
        for (person, kind) in random.sample(&NAMES, 3).into_iter().zip([Kind::City, Kind::Code, Kind::Job]) {
            self.tell(random, person, kind, usize::MAX);
        }
        self.turns.len()
    }

    /// One topic: facts about several people, and texts to read until the session has its share.
    fn session(
        &mut self,
        random: &mut Random,
        variant: Variant,
        session: usize,
        until: usize,
        filler: &dyn Filler,
    ) {
        let kind = match variant {
            Variant::Update if session.is_multiple_of(2) => Kind::Code,
            _ => Kind::ALL[(session + random.index(2)) % Kind::ALL.len()],
        };
        let count = random.between(4, 8) as usize;
        let repeated: Vec<&'static str> = self
            .facts
            .iter()
            .filter(|fact| variant == Variant::Update && fact.kind == Kind::Code && kind == Kind::Code)
            .map(|fact| fact.person)
            .collect();
        let mut people = random.sample(&repeated, count / 2);
        for person in random.sample(&NAMES, NAMES.len()) {
            let known = self.facts.iter().any(|fact| (fact.person, fact.kind) == (person, kind));
            if people.len() < count && !known && !people.contains(&person) {
                people.push(person);
            }
        }
        random.shuffle(&mut people);
        let start = self.size;
        for (i, &person) in people.iter().enumerate() {
            self.tell(random, person, kind, session);
            let share = start + until.saturating_sub(start) * (i + 1) / people.len();
            while self.size < share {
                let text = filler.paragraph(random);
                self.say(read(&text));
            }
        }
    }

    fn inquiries(&self, random: &mut Random, variant: Variant, filler: &dyn Filler) -> Vec<Inquiry> {
        let asked = |fact: &Fact| match variant {
            Variant::Update => fact.kind == Kind::Code && self.was_updated(fact),
            Variant::System => fact.session == usize::MAX,
            _ => true,
        };
        let facts: Vec<&Fact> = self.facts.iter().filter(|fact| asked(fact)).collect();
        let chosen: Vec<&Fact> = random.sample(&facts, QUESTIONS);
        match variant {
            Variant::Sessions | Variant::Update | Variant::System => {
                chosen.into_iter().map(|fact| fact.inquiry()).collect()
            }
            Variant::Cross => chosen.iter().filter_map(|first| self.cross(random, first)).collect(),
            Variant::Absent => self.absent(random),
            Variant::Late => (0..QUESTIONS).filter_map(|_| self.late(random, filler)).collect(),
        }
    }

    /// Whether the person's code was told before.
    fn was_updated(&self, fact: &Fact) -> bool {
        let sentence = format!("My friend {} {} ", fact.person, fact.kind.phrase());
        self.turns.iter().filter(|turn| turn.text.starts_with(&sentence)).count() > 1
    }

    fn cross(&self, random: &mut Random, first: &Fact) -> Option<Inquiry> {
        let others: Vec<&Fact> = self.facts.iter().filter(|fact| fact.session != first.session).collect();
        let second = others.get(random.index(others.len()))?;
        let mut turns = first.inquiry().turns;
        turns.push(Turn::assistant(first.value.clone()));
        turns.extend(second.inquiry().turns);
        Some(Inquiry { turns, needs: vec![first.turn, second.turn], ..second.inquiry() })
    }

    fn absent(&self, random: &mut Random) -> Vec<Inquiry> {
        let mut all = Vec::new();
        for person in random.sample(&NAMES, NAMES.len()) {
            let kind = Kind::ALL[random.index(Kind::ALL.len())];
            if all.len() < QUESTIONS && !self.facts.iter().any(|f| (f.person, f.kind) == (person, kind)) {
                let turns = vec![Turn::user(kind.question(person))];
                let plausible = self.facts.iter().map(|fact| fact.value.clone()).collect();
                all.push(Inquiry { turns, answer: None, needs: Vec::new(), plausible });
            }
        }
        all
    }

    fn late(&self, random: &mut Random, filler: &dyn Filler) -> Option<Inquiry> {
        let kind = Kind::ALL[random.index(Kind::ALL.len())];
        let known = |person: &&'static str| self.facts.iter().any(|f| f.person == *person && f.kind == kind);
        let person = random.sample(&NAMES, NAMES.len()).into_iter().find(|person| !known(person))?;
        let value = kind.value(random);
        let mut turns = told(person, kind, &value);
        for _ in 0..3 {
            turns.extend(read(&filler.paragraph(random)));
        }
        turns.push(Turn::user(kind.question(person)));
        Some(Inquiry { turns, answer: Some(value), needs: Vec::new(), plausible: Vec::new() })
    }
}

impl Fact {
    fn inquiry(&self) -> Inquiry {
        Inquiry {
            turns: vec![Turn::user(self.kind.question(self.person))],
            answer: Some(self.value.clone()),
            needs: vec![self.turn],
            plausible: Vec::new(),
        }
    }
}

fn told(person: &str, kind: Kind, value: &str) -> Vec<Turn> {
    exchange(
        format!("My friend {person} {} {value}.", kind.phrase()),
        format!("Noted: {person}, {}, {value}.", kind.name()),
    )
}

fn read(text: &str) -> Vec<Turn> {
    exchange(format!("Read this: {text}"), "I have read it.".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GrammarFiller;
    use crate::chat::Role;

    #[test]
    fn every_question_has_its_answer_in_the_history() {
        for (variant, name) in Variant::NAMES {
            assert_eq!(Variant::parse(name).unwrap(), variant);
            let mut questions = 0;
            for seed in 0..20 {
                let case = dialogue(variant, seed, 8000, &GrammarFiller);
                assert_eq!(case, dialogue(variant, seed, 8000, &GrammarFiller));
                let size: usize = case.history.iter().map(|turn| chars(&turn.text)).sum();
                assert!((4000..14000).contains(&size), "{name} {seed}: {size}");
                questions += case.inquiries.len();
                for inquiry in &case.inquiries {
                    assert_eq!(inquiry.turns.last().map(|turn| turn.role), Some(Role::User));
                    let last_told = inquiry.needs.last().map(|&turn| &case.history[turn].text);
                    match (&inquiry.answer, variant) {
                        (None, variant) => assert_eq!(variant, Variant::Absent),
                        (Some(answer), Variant::Late) => assert!(inquiry.turns[0].text.contains(answer)),
                        (Some(answer), _) => assert!(last_told.unwrap().ends_with(&format!("{answer}."))),
                    }
                    if variant == Variant::Update {
                        // No later turn tells another code of the same person.
                        let told = &case.history[inquiry.needs[0]].text;
                        let about = told.split(" code ").next().unwrap();
                        let later = &case.history[inquiry.needs[0] + 1..];
                        assert!(later.iter().all(|turn| !turn.text.starts_with(about)));
                    }
                }
                let protected = &case.history[..case.protected];
                assert_eq!(protected.len(), if variant == Variant::System { 6 } else { 0 });
            }
            assert!(questions >= 50, "{name}: {questions}");
        }
        assert!(Variant::parse("session").is_err());
    }
}
