//! Every family of chat tasks, over many seeds: same in, same out, and answers that a solver
//! confirms.

use oscar_tasks::{Case, GrammarFiller, ParagraphFiller, Role, Task, TaskError};
use proptest::prelude::*;
use std::collections::HashMap;

fn case(name: &str, seed: u64, budget: usize) -> Case {
    Task::generate(name, seed, budget, &GrammarFiller).unwrap()
}

fn prompt(case: &Case) -> &str {
    &case.turns[case.turns.len() - 2].text
}

/// Answers the question from the prompt alone, the slow and obvious way.
fn solve(case: &Case) -> Option<String> {
    let text = prompt(case);
    let after = |marker: &str| text.split_once(marker).map(|(_, rest)| rest);
    Some(match case.name {
        "niah_single" | "niah_multikey" | "niah_lines" | "niah_uuid" | "niah_multivalue"
        | "niah_multiquery" => {
            let question = text.lines().last()?;
            let keys = question.split_once(" for ")?.1.strip_suffix(" mentioned in the text?")?;
            let values = |key: &str| {
                let marker = format!(" for {key} is: ");
                let found: Vec<&str> = text
                    .split(&marker)
                    .skip(1)
                    .filter_map(|rest| rest.split_once(".\n"))
                    .map(|x| x.0)
                    .collect();
                found.join(", ")
            };
            let keys: Vec<&str> = keys.split(", ").collect();
            match keys.as_slice() {
                [key] => values(key),
                keys => {
                    keys.iter().map(|key| format!("{key}: {}", values(key))).collect::<Vec<_>>().join("\n")
                }
            }
        }
        "vt" => {
            let value = after("assigned the value ")?.trim_end_matches('.');
            let mut names: Vec<&str> = Vec::new();
            for line in text.lines().filter_map(|line| line.strip_prefix("VAR ")) {
                let (name, source) = line.split_once(" = ")?;
                if source == value || source.strip_prefix("VAR ").is_some_and(|from| names.contains(&from)) {
                    names.push(name);
                }
            }
            names.join(" ")
        }
        "cwe" => {
            let list = text.lines().nth(1)?;
            let mut counts: HashMap<&str, usize> = HashMap::new();
            for word in list.split(' ') {
                *counts.entry(word).or_default() += 1;
            }
            let mut ranked: Vec<(&str, usize)> = counts.into_iter().collect();
            ranked.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
            let mut top: Vec<&str> = ranked.iter().take(5).map(|&(word, _)| word).collect();
            top.sort_unstable();
            top.join(" ")
        }
        "running_sum" => {
            let mut sum = 0u64;
            let mut steps = String::new();
            for term in after("step by step: ")?.split(' ') {
                let term: u64 = term.parse().ok()?;
                steps += &format!("{sum}+{term}={}\n", (sum + term) % 100);
                sum = (sum + term) % 100;
            }
            format!("{steps}Answer: {sum}")
        }
        "program" => {
            let asked = after("then print ")?.chars().next()?.to_string();
            let mut values: HashMap<&str, i64> = HashMap::new();
            let mut trace = String::new();
            for line in text.lines().skip(1) {
                let words: Vec<&str> = line.split(' ').collect();
                let value = if let [_, _, number] = words[..] {
                    trace += &format!("{line}\n");
                    number.parse().ok()?
                } else {
                    let (a, b) = (values[words[2]], values[words[4]]);
                    let value = match words[3] {
                        "+" => a + b,
                        "-" => a - b,
                        _ => a * b,
                    };
                    let value = ((value % 100) + 100) % 100;
                    trace += &format!("{} = {a} {} {b} = {value}\n", words[0], words[3]);
                    value
                };
                values.insert(words[0], value);
            }
            format!("{trace}print {asked}: {}", values[asked.as_str()])
        }
        "copy" => match after("Repeat in reverse order: ") {
            Some(list) => list.split(' ').rev().collect::<Vec<_>>().join(" "),
            None => after("Repeat this list: ")?.to_owned(),
        },
        "sort" => {
            let mut numbers: Vec<u64> =
                after("Sort ascending: ")?.split(' ').map(|x| x.parse().unwrap()).collect();
            numbers.sort_unstable();
            numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(" ")
        }
        "memory" => {
            let kind = match text.split(' ').next()? {
                "Where" => "city",
                "Which" if text.starts_with("Which pet") => "pet",
                "Which" => "code",
                _ if text.ends_with("work as?") => "job",
                _ => "food",
            };
            let noted = case.turns.iter().filter_map(|turn| turn.text.strip_prefix("Noted: "));
            let facts = noted.filter_map(|fact| {
                let mut parts = fact.strip_suffix('.')?.split(", ");
                Some((parts.next()?, parts.next()?, parts.next()?))
            });
            let mut asked = facts.filter(|(person, what, _)| *what == kind && text.contains(person));
            asked.next_back()?.2.to_owned()
        }
        "passkey" => after("The pass key is ")?.split_once('.')?.0.to_owned(),
        _ => return None,
    })
}

#[test]
fn names_round_trip() {
    assert_eq!(Task::all().len(), 16);
    for task in Task::all() {
        assert_eq!(Task::parse(task.name()).unwrap(), task);
    }
}

#[test]
fn an_unknown_name_lists_the_names() {
    let error = Task::generate("niah", 0, 100, &GrammarFiller).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("`niah`") && message.contains("niah_single, niah_multikey"), "{message}");
    assert!(message.contains("passkey"));
}

#[test]
fn wordings_are_those_of_the_training_data() {
    let ends = |name: &str, opening: &str, closing: &str| {
        let case = case(name, 3, 600);
        let text = prompt(&case);
        assert!(text.starts_with(opening) && text.ends_with(closing), "{name}: {text}");
    };
    let numbers = "Some special magic numbers are hidden in the text. Memorize them.\n";
    ends("niah_single", numbers, " mentioned in the text?");
    ends("niah_multivalue", numbers, " mentioned in the text?");
    ends("niah_uuid", "Some special magic uuids are hidden in the text. Memorize them.\n", "?");
    ends("vt", "Memorize and track the chain(s) of variable assignment hidden in the text.\n", ".");
    ends("cwe", "Below is a list of words.\n", "\nWhat are the 5 most common words, in alphabetical order?");
    ends("running_sum", "Add these numbers modulo 100, step by step: ", "");
    ends("program", "Run this program, every operation modulo 100, one line at a time, then print ", "");
    ends("sort", "Sort ascending: ", "");
    ends(
        "passkey",
        "There is important info hidden inside a lot of irrelevant text. Find it.\n",
        "\nWhat is the pass key?",
    );
    ends("resume", "Continue this text: ", ".");
    assert!(
        prompt(&case("niah_multivalue", 3, 600)).contains("\nWhat are all the special magic numbers for ")
    );
    assert!(prompt(&case("niah_multiquery", 3, 600)).contains("\nWhat are the special magic numbers for "));
    assert!(prompt(&case("niah_single", 3, 600)).contains("\nWhat is the special magic number for "));
    assert!(case("memory", 3, 600).turns[0].text.starts_with("My friend "));
}

#[test]
fn draws_have_the_stated_shares() {
    let share = |name: &str, test: &dyn Fn(&Case) -> bool| {
        (0..400).filter(|&seed| test(&case(name, seed, 300))).count() as f64 / 400.0
    };
    let reversed = share("copy", &|case| prompt(case).starts_with("Repeat in reverse"));
    assert!((0.22..0.38).contains(&reversed), "{reversed}");
    let noise = share("niah_single", &|case| prompt(case).contains("The grass is green."));
    assert!((0.22..0.38).contains(&noise), "{noise}");
    let noise = share("vt", &|case| prompt(case).contains("The grass is green."));
    assert!((0.41..0.59).contains(&noise), "{noise}");
}

#[test]
fn lists_longer_than_the_supply_of_keys_are_filled_up() {
    let long = case("niah_lines", 1, 400_000);
    assert!(prompt(&long).len() >= 300_000);
    assert_eq!(solve(&long).unwrap(), long.answer);
}

#[test]
fn a_filler_of_short_paragraphs_cannot_be_resumed() {
    let filler = ParagraphFiller::from_text("One.\n\nTwo.").unwrap();
    let error = Task::generate("resume", 0, 100, &filler).unwrap_err();
    assert!(matches!(error, TaskError::ShortFiller { .. }), "{error}");
    assert!(Task::generate("memory", 0, 1000, &filler).is_ok());
}

#[test]
fn a_resumed_passage_is_the_rest_of_the_paragraph() {
    for seed in 0..50 {
        let case = case("resume", seed, 0);
        let given = prompt(&case).strip_prefix("Continue this text: ").unwrap();
        assert!(given.ends_with('.') && !case.answer.is_empty());
    }
}

/// With this seed a filler word once came as often as the common ones.
#[test]
fn the_most_common_words_are_not_ambiguous() {
    let case = case("cwe", 6259410406844264234, 590);
    assert_eq!(solve(&case), Some(case.answer.clone()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn every_task_is_deterministic_and_well_formed(seed: u64, budget in 0usize..6000) {
        for name in Task::names() {
            let case = case(name, seed, budget);
            prop_assert_eq!(&case, &Task::generate(name, seed, budget, &GrammarFiller).unwrap());
            prop_assert_eq!((case.name, case.seed), (name, seed));
            let last = case.turns.last().unwrap();
            prop_assert_eq!(&last.text, &case.answer);
            prop_assert_eq!(case.question().len() + 1, case.turns.len());
            for (i, turn) in case.turns.iter().enumerate() {
                let expected = if i % 2 == 0 { Role::User } else { Role::Assistant };
                prop_assert_eq!(turn.role, expected);
                prop_assert!(!turn.text.is_empty());
            }
            prop_assert_eq!(last.role.as_str(), "assistant");
            if let Some(answer) = solve(&case) {
                prop_assert_eq!(answer, case.answer, "{}", name);
            }
        }
    }

    #[test]
    fn haystacks_use_their_budget(seed: u64, budget in 1000usize..20_000) {
        // `memory` books a few characters more than it writes, as the training data did.
        for name in ["niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery", "vt", "memory", "passkey"] {
            let size: usize = case(name, seed, budget).turns.iter().map(|turn| turn.text.len()).sum();
            prop_assert!(size + 100 + budget / 20 >= budget && size <= budget + 3000, "{}: {} for {}", name, size, budget);
        }
    }

    #[test]
    fn seeds_make_different_cases(seed in 0u64..1 << 39) {
        for name in Task::names().into_iter().filter(|&name| name != "hello") {
            prop_assert_ne!(case(name, seed, 400).turns, case(name, seed + 1, 400).turns);
        }
    }
}
