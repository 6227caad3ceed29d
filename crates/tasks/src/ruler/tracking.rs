//! Variable tracking: one chain of assignments in noise, after a worked example.

use super::niah::NOISE;
use super::{Draft, depth_of, fit};
use crate::Random;
use std::collections::HashSet;

const HOPS: usize = 4;
/// Assignments stand between noise lines, so there is at least one line for each assignment.
pub(super) const LEAST_LINES: usize = HOPS + 1;
/// The worked example is as long as fits into this many tokens.
const EXAMPLE_TOKENS: usize = 500;
const TEMPLATE: &str = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find all variables that are assigned the value {query} in the text above.";
const ANSWER_PREFIX: &str = " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are assigned the value {query}, they are: ";

struct Chain {
    value: String,
    names: Vec<String>,
    lines: Vec<String>,
    /// For line positions, which depend on the size.
    random: Random,
}

impl Chain {
    fn draw(random: &mut Random, letters: usize, avoid_value: &str) -> Self {
        // The keyword must not be a name, or the example would contradict itself.
        let mut seen = HashSet::from(["VAR".to_owned()]);
        let mut names = Vec::new();
        while names.len() < HOPS + 1 {
            let name = random.letters(b'A', letters);
            if seen.insert(name.clone()) {
                names.push(name);
            }
        }
        let value = loop {
            let value = random.between(10_000, 99_998).to_string();
            if value != avoid_value {
                break value;
            }
        };
        let mut lines = vec![format!("VAR {} = {value}", names[0])];
        // The trailing blank is part of the official text.
        lines.extend(names.windows(2).map(|pair| format!("VAR {} = VAR {} ", pair[1], pair[0])));
        let stream = Random::new("chain lines", random.below(u64::MAX), 0);
        Self { value, names, lines, random: stream }
    }

    /// The chain, in order, at random places among `size` lines of noise.
    fn context(&self, size: usize) -> String {
        let mut lines = vec![NOISE; size];
        let mut places = self.random.clone().sample_indices(size, self.lines.len());
        places.sort_unstable();
        for (i, (place, line)) in places.into_iter().zip(&self.lines).enumerate() {
            lines.insert(place + i, line);
        }
        lines.join("\n")
    }

    fn question(&self, context: &str) -> String {
        TEMPLATE.replace("{query}", &self.value).replace("{context}", context)
    }

    fn answer_prefix(&self) -> String {
        ANSWER_PREFIX.replace("{num_v}", &self.names.len().to_string()).replace("{query}", &self.value)
    }
}

/// Everything about a case except its size.
pub(super) struct Plan {
    example: String,
    chain: Chain,
}

impl Plan {
    pub fn draw(mut random: Random, count_tokens: &dyn Fn(&str) -> usize) -> Self {
        let example = Chain::draw(&mut random, 3, "");
        let chain = Chain::draw(&mut random, 5, &example.value);
        let write = |size| format!("{}{}", example.question(&example.context(size)), example.answer_prefix());
        let worked =
            fit::largest_fitting(LEAST_LINES..=EXAMPLE_TOKENS, EXAMPLE_TOKENS, write, |text: &String| {
                count_tokens(text)
            })
            // If even the shortest example is too long for the tokenizer, the shortest is used.
            .unwrap_or_else(|_| write(LEAST_LINES));
        Self { example: format!("{worked} {}\n\n", example.names.join(" ")), chain }
    }

    pub fn compose(&self, size: usize) -> Draft {
        let context = self.chain.context(size);
        Draft {
            depths: self.chain.lines.iter().map(|line| depth_of(line, &context)).collect(),
            prompt: format!("{}{}", self.example, self.chain.question(&context)),
            answer_prefix: self.chain.answer_prefix(),
            references: self.chain.names.clone(),
        }
    }
}
