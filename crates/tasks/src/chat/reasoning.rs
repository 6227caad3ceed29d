//! Tasks whose answer is computed from the prompt: counting, sums, programs, copying, sorting.

use super::words::{ADJECTIVES, NOUNS};
use super::{Turn, exchange};
use crate::Random;

/// The most common words of a list.
pub(super) fn cwe(random: &mut Random, budget: usize) -> Vec<Turn> {
    const TOP: usize = 5;
    let words: Vec<String> = ADJECTIVES
        .iter()
        .flat_map(|first| NOUNS.iter().map(move |second| format!("{first}{second}")))
        .collect();
    let mut common = random.sample(&words, TOP);
    let mut rest = random.sample(&words, 200);
    rest.retain(|word| !common.contains(word));

    let length = (budget / 13).max(20);
    let repeats = (length / (TOP * 2)).max(4);
    let mut list: Vec<&str> =
        common.iter().flat_map(|word| std::iter::repeat_n(word.as_str(), repeats)).collect();
    let mut counts = vec![0; rest.len()];
    while list.len() < length {
        let index = random.index(rest.len());
        // A word that came as often as the common ones would make the question ambiguous.
        if counts[index] + 1 < repeats {
            counts[index] += 1;
            list.push(&rest[index]);
        }
    }
    random.shuffle(&mut list);
    let question = format!(
        "Below is a list of words.\n{}\nWhat are the {TOP} most common words, in alphabetical order?",
        list.join(" ")
    );
    common.sort_unstable();
    exchange(question, common.join(" "))
}

/// A running sum modulo 100, written out step by step.
pub(super) fn running_sum(random: &mut Random, budget: usize) -> Vec<Turn> {
    let terms: Vec<u64> = (0..(budget / 22).clamp(5, 400)).map(|_| random.between(1, 99)).collect();
    let mut sum = 0;
    let mut steps = String::new();
    for term in &terms {
        let next = (sum + term) % 100;
        steps.push_str(&format!("{sum}+{term}={next}\n"));
        sum = next;
    }
    exchange(
        format!("Add these numbers modulo 100, step by step: {}", spaced(&terms)),
        format!("{steps}Answer: {sum}"),
    )
}

/// A straight-line program on the variables a to z, executed modulo 100.
pub(super) fn program(random: &mut Random, budget: usize) -> Vec<Turn> {
    // In order of first assignment, as the draws below are made by position.
    let mut variables: Vec<(char, i64)> = Vec::new();
    let mut source = Vec::new();
    let mut trace = Vec::new();
    for _ in 0..(budget / 34).clamp(4, 300) {
        let target = char::from(b'a' + random.below(26) as u8);
        let value = if variables.len() < 2 || random.unit() < 0.15 {
            let value = random.between(0, 99) as i64;
            source.push(format!("{target} = {value}"));
            trace.push(format!("{target} = {value}"));
            value
        } else {
            let (left, a) = variables[random.index(variables.len())];
            let (right, b) = variables[random.index(variables.len())];
            let operator = ['+', '-', '*'][random.index(3)];
            let value = match operator {
                '+' => a + b,
                '-' => a - b,
                _ => a * b,
            }
            .rem_euclid(100);
            source.push(format!("{target} = {left} {operator} {right}"));
            trace.push(format!("{target} = {a} {operator} {b} = {value}"));
            value
        };
        match variables.iter_mut().find(|(name, _)| *name == target) {
            Some(variable) => variable.1 = value,
            None => variables.push((target, value)),
        }
    }
    let (asked, value) = variables[random.index(variables.len())];
    exchange(
        format!(
            "Run this program, every operation modulo 100, one line at a time, then print {asked}.\n{}",
            source.join("\n")
        ),
        format!("{}\nprint {asked}: {value}", trace.join("\n")),
    )
}

/// A list to repeat, sometimes backwards.
pub(super) fn copy(random: &mut Random, budget: usize) -> Vec<Turn> {
    const LONGEST_REVERSED: usize = 40;
    let mut items: Vec<String> = (0..(budget / 14).clamp(5, 600))
        .map(|_| if random.unit() < 0.6 { random.choose(&NOUNS).to_owned() } else { random.number(4) })
        .collect();
    if random.unit() < 0.3 {
        items.truncate(LONGEST_REVERSED);
        let question = format!("Repeat in reverse order: {}", items.join(" "));
        items.reverse();
        return exchange(question, items.join(" "));
    }
    exchange(format!("Repeat this list: {}", items.join(" ")), items.join(" "))
}

/// Numbers to sort.
pub(super) fn sort(random: &mut Random) -> Vec<Turn> {
    let mut numbers: Vec<u64> = (0..random.between(4, 30)).map(|_| random.between(0, 999)).collect();
    let question = format!("Sort ascending: {}", spaced(&numbers));
    numbers.sort_unstable();
    exchange(question, spaced(&numbers))
}

fn spaced(numbers: &[u64]) -> String {
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(" ")
}
