//! GPQA: four choices, one letter.

use super::{after_thoughts, field, math};
use oscar_tasks::Random;
use serde_json::Value;

const LETTERS: [char; 4] = ['A', 'B', 'C', 'D'];

/// The question with its choices, and the right letter.
pub(super) fn problem(record: &Value, mut random: Random) -> Result<(String, char), String> {
    if let Ok(right) = field(record, &["Correct Answer"]) {
        let question = field(record, &["Question"])?;
        let mut choices = vec![right.clone()];
        for i in 1..=3 {
            choices.push(field(record, &[&format!("Incorrect Answer {i}")])?);
        }
        random.shuffle(&mut choices);
        let place = choices.iter().position(|choice| *choice == right).unwrap_or(0);
        return Ok((with_choices(&question, &choices), LETTERS[place]));
    }
    let question = field(record, &["question", "Question", "problem", "prompt"])?;
    let answer = field(record, &["answer", "Answer", "solution"])?;
    let listed = ["choices", "options"].iter().find_map(|name| record[*name].as_array());
    let Some(list) = listed else {
        // The choices are part of the question.
        let letter =
            letter(&answer).ok_or_else(|| format!("the answer `{answer}` is no letter from A to D"))?;
        return Ok((question, letter));
    };
    let choices: Vec<String> = list.iter().filter_map(|c| c.as_str().map(str::to_owned)).collect();
    if choices.len() != LETTERS.len() {
        return Err(format!("there are {} choices instead of four", list.len()));
    }
    let place = choices
        .iter()
        .position(|choice| choice.trim() == answer.trim())
        .or_else(|| answer.trim().parse::<usize>().ok().filter(|&i| i < LETTERS.len()))
        .or_else(|| letter(&answer).and_then(|l| LETTERS.iter().position(|&c| c == l)));
    let place = place.ok_or_else(|| format!("the answer `{answer}` is none of the choices"))?;
    Ok((with_choices(&question, &choices), LETTERS[place]))
}

fn with_choices(question: &str, choices: &[String]) -> String {
    let mut text = format!(
        "Answer the following multiple choice question. The last line of your response should be of the following \
         format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.\n\n{}\n\n",
        question.trim()
    );
    for (letter, choice) in LETTERS.iter().zip(choices) {
        text.push_str(&format!("{letter}) {}\n", choice.trim()));
    }
    text.trim_end().to_owned()
}

/// The letter of an answer: in a box, after its last "Answer", or the whole answer.
pub fn letter(answer: &str) -> Option<char> {
    let answer = after_thoughts(answer);
    let alone = |text: &str| {
        let text = text.trim().trim_start_matches(['*', '(', '$', '{', ' ', ':', '\'']);
        let text = text.strip_prefix("\\text{").unwrap_or(text);
        let mut chars = text.chars();
        let letter = chars.next().filter(|c| LETTERS.contains(c))?;
        chars.next().is_none_or(|next| !next.is_alphanumeric()).then_some(letter)
    };
    if let Some(boxed) = math::boxed(answer) {
        return alone(&boxed);
    }
    let lower = answer.to_ascii_lowercase();
    let mut places: Vec<usize> = lower.match_indices("answer").map(|(at, word)| at + word.len()).collect();
    places.reverse();
    let after = |at: usize| {
        let rest = answer[at..].trim_start_matches(['*', ' ']);
        alone(rest.strip_prefix("is").unwrap_or(rest))
    };
    places.into_iter().find_map(after).or_else(|| if answer.trim().len() <= 4 { alone(answer) } else { None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn letters_are_found() {
        for (answer, expected) in [
            ("Thus.\nAnswer: C", Some('C')),
            ("**Answer: (B)**", Some('B')),
            ("The answer is D.", Some('D')),
            ("so \\boxed{A}", Some('A')),
            ("\\boxed{\\text{B}}", Some('B')),
            ("Answer: A, no wait. Answer: B", Some('B')),
            ("<think>Answer: A</think>Answer: C", Some('C')),
            ("C)", Some('C')),
            ("Answer: because", None),
            ("I do not know", None),
            ("", None),
        ] {
            assert_eq!(letter(answer), expected, "{answer}");
        }
    }

    #[test]
    fn all_forms_of_a_problem() {
        let official = json!({"Question": "Which?", "Correct Answer": "red", "Incorrect Answer 1": "a",
            "Incorrect Answer 2": "b", "Incorrect Answer 3": "c"});
        let mut seen = std::collections::HashSet::new();
        for seed in 0..40 {
            let (question, letter) = problem(&official, Random::new("t", seed, 0)).unwrap();
            assert!(question.contains(&format!("{letter}) red")), "{question}");
            seen.insert(letter);
        }
        assert_eq!(seen.len(), 4, "choices are shuffled");
        let fixed = |answer: Value| {
            let record = json!({"question": "q", "choices": ["w", "x", "y", "z"], "answer": answer});
            problem(&record, Random::new("t", 0, 0)).map(|p| p.1)
        };
        assert_eq!((fixed(json!("y")), fixed(json!(3)), fixed(json!("B"))), (Ok('C'), Ok('D'), Ok('B')));
        assert!(fixed(json!("none")).unwrap_err().contains("none of the choices"));
        let inside = json!({"prompt": "Which?\n(A) 1\n(B) 2", "answer": "\\boxed{B}"});
        let (question, letter) = problem(&inside, Random::new("t", 0, 0)).unwrap();
        assert_eq!((question.as_str(), letter), ("Which?\n(A) 1\n(B) 2", 'B'));
    }
}
