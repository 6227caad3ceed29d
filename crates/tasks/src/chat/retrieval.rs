//! Needles in haystacks: magic numbers, variable chains, pass keys.

use super::words::{ADJECTIVES, NOISE, NOUNS};
use super::{Task, Turn, chars, exchange};
use crate::random::uuid_text;
use crate::{Filler, Random};
use std::collections::{HashMap, HashSet};

/// Largest number of distractors, so that drawing distinct keys stays quick; filler takes the rest
/// of the budget.
const MOST_WORD_KEYS: usize = ADJECTIVES.len() * NOUNS.len() * 3 / 4;

/// Spreads needle sentences at random depths through the first `share` of filler worth `budget`
/// characters.
pub(super) fn haystack(
    random: &mut Random,
    budget: usize,
    filler: &dyn Filler,
    needles: &[String],
    share: f64,
) -> String {
    let noise = random.unit() < 0.3;
    let mut parts = Vec::new();
    let mut size = 0;
    while size < budget {
        let part = if noise { NOISE.to_owned() } else { filler.paragraph(random) };
        size += chars(&part) + 1;
        parts.push(part);
    }
    for needle in needles {
        let places = (parts.len() as f64 * share) as usize + 1;
        parts.insert(random.index(places), needle.clone());
    }
    parts.join("\n")
}

/// One shape of the magic-number task.
pub(super) struct Niah {
    budget: usize,
    keys: usize,
    values: usize,
    queries: usize,
    distractors: usize,
    uuids: bool,
}

impl Niah {
    /// The shape of one of the six `niah_*` families.
    pub(super) fn of(task: Task, budget: usize) -> Self {
        let single = Self { budget, keys: 1, values: 1, queries: 1, distractors: 0, uuids: false };
        match task {
            Task::NiahMultikey => Self { distractors: 3, ..single },
            Task::NiahLines => {
                let wanted = (budget / 60).max(3);
                let distractors = wanted.min(MOST_WORD_KEYS);
                Self { budget: if wanted > distractors { budget } else { 0 }, distractors, ..single }
            }
            Task::NiahUuid => {
                Self { budget: budget / 2, distractors: (budget / 400).max(1), uuids: true, ..single }
            }
            Task::NiahMultivalue => Self { values: 4, ..single },
            Task::NiahMultiquery => Self { keys: 4, queries: 4, ..single },
            _ => single,
        }
    }

    pub(super) fn turns(&self, random: &mut Random, filler: &dyn Filler) -> Vec<Turn> {
        let keys = self.distinct_keys(random);
        let mut values: HashMap<&str, Vec<String>> = HashMap::new();
        let what = if self.uuids { "uuid" } else { "number" };
        let mut needles = Vec::new();
        for key in &keys {
            for _ in 0..self.values {
                let value = if self.uuids { uuid_text(random.bits128()) } else { random.number(7) };
                needles.push(format!("One of the special magic {what}s for {key} is: {value}."));
                values.entry(key.as_str()).or_default().push(value);
            }
        }
        random.shuffle(&mut needles);

        let mut asked = random.sample(&keys[..self.keys], self.queries.min(self.keys));
        if self.distractors > 0 && random.unit() < 0.5 {
            asked = random.sample(&keys, self.queries.min(keys.len()));
        }
        let needle_chars: usize = needles.iter().map(|needle| chars(needle)).sum();
        let text = haystack(random, self.budget.saturating_sub(needle_chars), filler, &needles, 1.0);

        // Values are answered in the order in which the text mentions them.
        let in_order = |key: &str| {
            let mut found = values[key].clone();
            found.sort_by_key(|value| text.find(value.as_str()));
            found.join(", ")
        };
        let (question, answer) = match asked.as_slice() {
            [key] if self.values > 1 => (
                format!("What are all the special magic {what}s for {key} mentioned in the text?"),
                in_order(key),
            ),
            [key] => {
                (format!("What is the special magic {what} for {key} mentioned in the text?"), in_order(key))
            }
            several => (
                format!(
                    "What are the special magic {what}s for {} mentioned in the text?",
                    several.join(", ")
                ),
                several.iter().map(|key| format!("{key}: {}", in_order(key))).collect::<Vec<_>>().join("\n"),
            ),
        };
        exchange(
            format!("Some special magic {what}s are hidden in the text. Memorize them.\n{text}\n{question}"),
            answer,
        )
    }

    fn distinct_keys(&self, random: &mut Random) -> Vec<String> {
        let mut seen = HashSet::new();
        let mut keys = Vec::new();
        while keys.len() < self.keys + self.distractors {
            let key = if self.uuids {
                uuid_text(random.bits128())
            } else {
                format!("{}-{}", random.choose(&ADJECTIVES), random.choose(&NOUNS))
            };
            if seen.insert(key.clone()) {
                keys.push(key);
            }
        }
        keys
    }
}

/// Two chains of variable assignments; the question asks for all names of the first.
pub(super) fn vt(random: &mut Random, budget: usize, filler: &dyn Filler) -> Vec<Turn> {
    const CHAINS: usize = 2;
    const HOPS: usize = 4;
    let mut seen = HashSet::new();
    let mut fresh_name = |random: &mut Random| loop {
        let name = random.letters(b'A', 5);
        if seen.insert(name.clone()) {
            return name;
        }
    };
    let mut chains = Vec::new();
    for _ in 0..CHAINS {
        let value = random.number(5);
        let mut names = vec![fresh_name(random)];
        let mut lines = vec![format!("VAR {} = {value}", names[0])];
        for hop in 0..HOPS {
            let name = fresh_name(random);
            lines.push(format!("VAR {name} = VAR {}", names[hop]));
            names.push(name);
        }
        chains.push((value, names, lines));
    }

    let noise = random.unit() < 0.5;
    let mut parts = Vec::new();
    let mut size = 0;
    while size < budget {
        let part = if noise { NOISE.to_owned() } else { filler.paragraph(random) };
        // An empty paragraph must still advance the loop.
        size += chars(&part).max(1);
        parts.push(part);
    }
    for (_, _, lines) in &chains {
        let mut places: Vec<usize> = lines.iter().map(|_| random.index(parts.len() + 1)).collect();
        places.sort_unstable();
        for (i, (place, line)) in places.into_iter().zip(lines).enumerate() {
            parts.insert(place + i, line.clone());
        }
    }
    let (value, names, _) = &chains[0];
    exchange(
        format!(
            "Memorize and track the chain(s) of variable assignment hidden in the text.\n{}\n\
             Find all variables that are assigned the value {value}.",
            parts.join("\n")
        ),
        names.join(" "),
    )
}

pub(super) fn passkey(random: &mut Random, budget: usize, filler: &dyn Filler) -> Vec<Turn> {
    let key = random.number(5);
    let needle = format!("The pass key is {key}. Remember it. {key} is the pass key.");
    let text = haystack(random, budget, filler, &[needle], 1.0);
    exchange(
        format!(
            "There is important info hidden inside a lot of irrelevant text. Find it.\n{text}\n\
             What is the pass key?"
        ),
        key,
    )
}
