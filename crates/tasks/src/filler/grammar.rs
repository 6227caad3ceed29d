//! The grammar behind generated haystacks: parsing `grammar.txt` and expanding its templates.
//!
//! Invariant: the built-in grammar is complete. Every slot that it names exists (a test expands
//! them all), so expansion cannot fail. An unknown slot would be written as its name.

use crate::Random;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// First names by pronoun; none of them occurs in the chat tasks, where names carry facts.
const WOMEN: [&str; 14] = [
    "Agnes",
    "Harriet",
    "Lucinda",
    "Maren",
    "Odile",
    "Petra",
    "Ruth",
    "Sunniva",
    "Thelma",
    "Yolanda",
    "Imogen",
    "Freya",
    "Constance",
    "Brigid",
];
const MEN: [&str; 14] = [
    "Albert", "Casper", "Edmund", "Gideon", "Leopold", "Magnus", "Oswin", "Rupert", "Tobias", "Wendel",
    "Ivor", "Barnaby", "Dunstan", "Felix",
];
const SHARED: &str = "shared";

#[derive(Debug, Default)]
struct Topic {
    slots: BTreeMap<&'static str, Vec<&'static str>>,
    sentences: Vec<&'static str>,
}

#[derive(Debug)]
pub(super) struct Grammar {
    shared: Topic,
    topics: Vec<Topic>,
}

/// The two people of a paragraph and the pronouns of the first.
struct Cast {
    who: &'static str,
    other: &'static str,
    woman: bool,
}

impl Cast {
    fn draw(random: &mut Random) -> Self {
        let woman = random.below(2) == 0;
        let who = random.choose(if woman { &WOMEN } else { &MEN });
        let other = loop {
            let names = if random.below(2) == 0 { &WOMEN } else { &MEN };
            let other = random.choose(names);
            if other != who {
                break other;
            }
        };
        Self { who, other, woman }
    }

    fn word(&self, slot: &str) -> Option<&'static str> {
        Some(match (slot, self.woman) {
            ("who", _) => self.who,
            ("other", _) => self.other,
            ("she", true) => "she",
            ("she", false) => "he",
            ("her", true) | ("obj", true) => "her",
            ("her", false) => "his",
            ("obj", false) => "him",
            _ => return None,
        })
    }
}

impl Grammar {
    pub(super) fn builtin() -> &'static Self {
        static GRAMMAR: LazyLock<Grammar> = LazyLock::new(|| Grammar::parse(include_str!("grammar.txt")));
        &GRAMMAR
    }

    fn parse(text: &'static str) -> Self {
        let mut shared = Topic::default();
        let mut topics: Vec<Topic> = Vec::new();
        let mut in_shared = true;
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if let Some(name) = line.strip_prefix("topic ") {
                in_shared = name == SHARED;
                if !in_shared {
                    topics.push(Topic::default());
                }
                continue;
            }
            let topic = match topics.last_mut() {
                Some(topic) if !in_shared => topic,
                _ => &mut shared,
            };
            if let Some(sentence) = line.strip_prefix("- ") {
                topic.sentences.push(sentence);
            } else if let Some((slot, choices)) = line.split_once(": ") {
                topic.slots.insert(slot, choices.split(" | ").collect());
            }
        }
        Self { shared, topics }
    }

    /// Five to eight sentences on one topic, with one or two general ones among them.
    pub(super) fn paragraph(&self, random: &mut Random) -> String {
        let topic = &self.topics[random.index(self.topics.len())];
        let cast = Cast::draw(random);
        let own = 4 + random.index(3);
        let general = 1 + random.index(2);
        let mut templates = random.sample(&topic.sentences, own);
        for template in random.sample(&self.shared.sentences, general) {
            // Never first: a paragraph opens with its subject.
            let place = 1 + random.index(templates.len());
            templates.insert(place, template);
        }
        let sentences: Vec<String> =
            templates.into_iter().map(|template| self.sentence(template, topic, &cast, random)).collect();
        sentences.join(" ")
    }

    fn sentence(&self, template: &str, topic: &Topic, cast: &Cast, random: &mut Random) -> String {
        let mut used = Vec::new();
        self.expand(template, topic, cast, random, &mut used)
    }

    fn expand(
        &self,
        template: &str,
        topic: &Topic,
        cast: &Cast,
        random: &mut Random,
        used: &mut Vec<&'static str>,
    ) -> String {
        let mut out = String::new();
        let mut rest = template;
        while let Some((before, after)) = rest.split_once('{') {
            let Some((slot, after)) = after.split_once('}') else { break };
            out.push_str(before);
            out.push_str(&self.slot(slot, topic, cast, random, used));
            rest = after;
        }
        out + rest
    }

    fn slot(
        &self,
        slot: &str,
        topic: &Topic,
        cast: &Cast,
        random: &mut Random,
        used: &mut Vec<&'static str>,
    ) -> String {
        let capital = slot.starts_with(|c: char| c.is_uppercase());
        let lower = slot.to_lowercase();
        let (article, name) = match lower.strip_prefix("a ") {
            Some(name) => (true, name),
            None => (false, lower.as_str()),
        };
        let mut text = if let Some(word) = cast.word(name) {
            word.to_owned()
        } else if let Some(choices) = topic.slots.get(name).or_else(|| self.shared.slots.get(name)) {
            // The same choice twice in a sentence reads like a mistake; a few draws avoid it.
            let mut choice = random.choose(choices);
            for _ in 0..8 {
                if !used.contains(&choice) {
                    break;
                }
                choice = random.choose(choices);
            }
            used.push(choice);
            self.expand(choice, topic, cast, random, used)
        } else {
            name.to_owned()
        };
        if article {
            let vowel = text.starts_with(['a', 'e', 'i', 'o', 'u']);
            text.insert_str(0, if vowel { "an " } else { "a " });
        }
        if capital {
            text = capitalised(&text);
        }
        text
    }
}

fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::Task;

    fn slots_of(template: &str) -> Vec<String> {
        template
            .split('{')
            .skip(1)
            .filter_map(|piece| piece.split_once('}'))
            .map(|(slot, _)| slot.to_lowercase())
            .map(|slot| slot.strip_prefix("a ").unwrap_or(&slot).to_owned())
            .collect()
    }

    #[test]
    fn every_slot_exists_and_every_choice_is_clean() {
        let grammar = Grammar::builtin();
        let cast = Cast { who: "Ruth", other: "Ivor", woman: true };
        assert!(grammar.topics.len() >= 14);
        assert!(grammar.shared.sentences.len() >= 20);
        for topic in grammar.topics.iter().chain([&grammar.shared]) {
            assert!(topic.sentences.len() >= 15);
            let choices = topic.slots.values().flatten();
            for text in topic.sentences.iter().chain(choices) {
                assert!(!text.contains(|c: char| c.is_ascii_digit()), "{text}");
                assert_eq!(text.matches('{').count(), text.matches('}').count(), "{text}");
                for slot in slots_of(text) {
                    let known = cast.word(&slot).is_some()
                        || topic.slots.contains_key(slot.as_str())
                        || grammar.shared.slots.contains_key(slot.as_str());
                    assert!(known, "`{slot}` in: {text}");
                }
            }
            for sentence in &topic.sentences {
                assert!(sentence.ends_with(['.', '"']), "{sentence}");
            }
            for (slot, choices) in &topic.slots {
                let mut unique = choices.clone();
                unique.sort_unstable();
                unique.dedup();
                assert!(unique.len() == choices.len() && unique.len() >= 4, "{slot}");
            }
        }
    }

    #[test]
    fn articles_capitals_and_pronouns() {
        let grammar = Grammar::parse("topic shared\ntopic t\nfruit: apple\ntree: pear\n- x.");
        let cast = Cast { who: "Ivor", other: "Ruth", woman: false };
        let expand =
            |template| grammar.sentence(template, &grammar.topics[0], &cast, &mut Random::new("t", 0, 0));
        assert_eq!(expand("{A fruit} and {a tree}."), "An apple and a pear.");
        assert_eq!(
            expand("{Who} saw {other}; {she} took {her} {fruit}."),
            "Ivor saw Ruth; he took his apple."
        );
        assert_eq!(expand("Give {obj} the {Tree}."), "Give him the Pear.");
    }

    #[test]
    fn names_of_the_cast_do_not_occur_in_memory_tasks() {
        let case = |seed| Task::Memory.case(seed, 4000, &crate::filler::GrammarFiller).unwrap();
        for seed in 0..20 {
            for turn in case(seed).turns.iter().filter(|turn| turn.text.starts_with("My friend")) {
                let name = turn.text.split(' ').nth(2).unwrap();
                assert!(!WOMEN.contains(&name) && !MEN.contains(&name), "{name}");
            }
        }
    }
}
