//! Scoring of predictions.
//!
//! There are two kinds. Chat tasks have one right answer (exact match, and the position of the
//! first wrong character); RULER asks whether reference strings occur in the prediction. A score
//! lies in `0..=1`.

/// How a RULER task is scored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metric {
    /// The share of references that occur.
    StringMatchAll,
    /// Whether any reference occurs.
    StringMatchPart,
}

impl Metric {
    /// The metric's name in RULER's configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::StringMatchAll => "string_match_all",
            Self::StringMatchPart => "string_match_part",
        }
    }

    /// The score of one prediction, in `0..=1`.
    pub fn score<S: AsRef<str>>(self, prediction: &str, references: &[S]) -> f64 {
        match self {
            Self::StringMatchAll => string_match_all(prediction, references),
            Self::StringMatchPart => string_match_part(prediction, references),
        }
    }
}

/// Whether prediction and answer are the same text, ignoring blanks at both ends.
pub fn exact_match(prediction: &str, answer: &str) -> bool {
    prediction.trim() == answer.trim()
}

/// The position, in characters of the trimmed texts, where prediction and answer first differ;
/// `None` when they are equal. If one text is a prefix of the other, that is the length of the
/// shorter.
pub fn first_divergence(prediction: &str, answer: &str) -> Option<usize> {
    let (mut left, mut right) = (prediction.trim().chars(), answer.trim().chars());
    let mut position = 0;
    loop {
        match (left.next(), right.next()) {
            (None, None) => return None,
            (a, b) if a != b => return Some(position),
            _ => position += 1,
        }
    }
}

/// The share of references that occur in the prediction, letter case aside; 0 without references.
pub fn string_match_all<S: AsRef<str>>(prediction: &str, references: &[S]) -> f64 {
    if references.is_empty() {
        return 0.0;
    }
    occurrences(prediction, references) as f64 / references.len() as f64
}

/// 1 if any reference occurs in the prediction, letter case aside, else 0.
pub fn string_match_part<S: AsRef<str>>(prediction: &str, references: &[S]) -> f64 {
    if occurrences(prediction, references) > 0 { 1.0 } else { 0.0 }
}

fn occurrences<S: AsRef<str>>(prediction: &str, references: &[S]) -> usize {
    let prediction = prediction.to_lowercase();
    references.iter().filter(|reference| prediction.contains(&reference.as_ref().to_lowercase())).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn exact_match_ignores_only_outer_blanks() {
        assert!(exact_match(" 12 34\n", "12 34"));
        assert!(!exact_match("12  34", "12 34"));
        assert!(!exact_match("12 34.", "12 34"));
        assert!(exact_match("", "  "));
    }

    #[test]
    fn divergence_counts_characters() {
        assert_eq!(first_divergence("abc", "abc"), None);
        assert_eq!(first_divergence("abc", "abd"), Some(2));
        assert_eq!(first_divergence("ab", "abc"), Some(2));
        assert_eq!(first_divergence("", "x"), Some(0));
        assert_eq!(first_divergence("aéx", "aéy"), Some(2), "characters, not bytes");
        assert_eq!(first_divergence("\n ok ", "ok"), None);
    }

    #[test]
    fn all_is_a_share_and_part_is_any() {
        let references = ["4821937", "1000001", "7777777", "1234567"];
        let prediction = "They are 4821937 and 7777777.";
        assert_eq!(string_match_all(prediction, &references), 0.5);
        assert_eq!(string_match_part(prediction, &references), 1.0);
        assert_eq!(string_match_all("none of them", &references), 0.0);
        assert_eq!(string_match_part("none of them", &references), 0.0);
        assert_eq!(string_match_all("ANSWER: Paris", &["paris"]), 1.0);
        assert_eq!(string_match_all("anything", &[] as &[&str]), 0.0);
    }

    #[test]
    fn names_and_dispatch() {
        assert_eq!(Metric::StringMatchAll.name(), "string_match_all");
        assert_eq!(Metric::StringMatchPart.name(), "string_match_part");
        assert_eq!(Metric::StringMatchAll.score("b", &["a", "b"]), 0.5);
        assert_eq!(Metric::StringMatchPart.score("b", &["a", "b"]), 1.0);
    }

    proptest! {
        #[test]
        fn divergence_and_exact_match_agree(a in "[ab ]{0,8}", b in "[ab ]{0,8}") {
            prop_assert_eq!(exact_match(&a, &b), first_divergence(&a, &b).is_none());
            prop_assert_eq!(first_divergence(&a, &b), first_divergence(&b, &a));
        }

        #[test]
        fn part_bounds_all(prediction in "[abc]{0,12}", references in prop::collection::vec("[abc]{1,3}", 1..5)) {
            let all = string_match_all(&prediction, &references);
            let part = string_match_part(&prediction, &references);
            prop_assert!((0.0..=1.0).contains(&all));
            prop_assert!(all <= part);
            prop_assert_eq!(all > 0.0, part > 0.0);
        }
    }
}
