//! Stop strings, found across the borders of tokens and pieces.
//!
//! Invariant: the result does not depend on how the text was cut into pieces. The text ends at the
//! first character that completes a stop string; if several end there, the longest counts. Only
//! text that could still be the beginning of a stop string is held back.

use crate::TextError;

/// Watches one reply for its stop strings.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    include_stop: bool,
    held: String,
    stopped: Option<usize>,
}

/// The text that may be shown after a piece, and whether the reply is over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopOutput {
    pub emit: String,
    /// Index of the stop string that ended the reply.
    pub stopped: Option<usize>,
}

impl StopMatcher {
    /// `include_stop` keeps the stop string itself in the emitted text.
    pub fn new<S: Into<String>>(
        stops: impl IntoIterator<Item = S>,
        include_stop: bool,
    ) -> Result<Self, TextError> {
        let stops: Vec<String> = stops.into_iter().map(Into::into).collect();
        match stops.iter().position(String::is_empty) {
            Some(index) => Err(TextError::EmptyStopString { index }),
            None => Ok(Self { stops, include_stop, held: String::new(), stopped: None }),
        }
    }

    /// Takes the next piece. After a stop string all text is dropped.
    pub fn push(&mut self, text: &str) -> StopOutput {
        if self.stopped.is_some() {
            return StopOutput { emit: String::new(), stopped: self.stopped };
        }
        let mut text = std::mem::take(&mut self.held) + text;
        // The held text begins with the longest tail that could start a stop string, so no stop
        // string can begin before it, and the first occurrence of each inside `text` is its first
        // in the whole reply.
        let first = self
            .stops
            .iter()
            .enumerate()
            .filter_map(|(index, stop)| text.find(stop).map(|start| (start + stop.len(), start, index)))
            .min();
        if let Some((end, start, index)) = first {
            text.truncate(if self.include_stop { end } else { start });
            self.stopped = Some(index);
        } else {
            self.held = text.split_off(text.len() - self.longest_beginning(&text));
        }
        StopOutput { emit: text, stopped: self.stopped }
    }

    /// Ends the reply and returns the text that was held back.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The stop string that was found, if any.
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    /// Length of the longest end of `text` that is a proper beginning of a stop string.
    fn longest_beginning(&self, text: &str) -> usize {
        let beginnings =
            self.stops.iter().flat_map(|stop| stop.char_indices().map(move |(at, _)| &stop[..at]));
        beginnings.filter(|beginning| text.ends_with(beginning)).map(str::len).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feeds the pieces; returns all emitted text and the stop string found.
    fn run(stops: &[String], include_stop: bool, pieces: &[String]) -> (String, Option<usize>) {
        let mut matcher = StopMatcher::new(stops.iter().cloned(), include_stop).unwrap();
        let mut shown = String::new();
        for piece in pieces {
            shown += &matcher.push(piece).emit;
        }
        shown += &matcher.flush();
        (shown, matcher.stopped())
    }

    /// The definition: try every end in order, and there the longest stop string, the first of
    /// equals.
    fn naive(stops: &[String], include_stop: bool, text: &str) -> (String, Option<usize>) {
        for end in (0..=text.len()).filter(|&end| text.is_char_boundary(end)) {
            let ending = stops.iter().enumerate().filter(|(_, stop)| text[..end].ends_with(stop.as_str()));
            if let Some((index, stop)) = ending.min_by_key(|(index, stop)| (usize::MAX - stop.len(), *index))
            {
                let keep = if include_stop { end } else { end - stop.len() };
                return (text[..keep].to_owned(), Some(index));
            }
        }
        (text.to_owned(), None)
    }

    fn cut(text: &str, cuts: &[bool]) -> Vec<String> {
        let mut pieces = vec![String::new()];
        for (c, cut) in text.chars().zip(cuts.iter().cycle()) {
            if *cut {
                pieces.push(String::new());
            }
            pieces.last_mut().unwrap().push(c);
        }
        pieces
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn agrees_with_a_search_of_the_whole_text(
            text in "[abé]{0,24}",
            stops in prop::collection::vec("[abé]{1,5}", 0..4),
            cuts in prop::collection::vec(any::<bool>(), 1..24),
            include_stop: bool,
        ) {
            prop_assert_eq!(run(&stops, include_stop, &cut(&text, &cuts)), naive(&stops, include_stop, &text));
        }

        #[test]
        fn holds_back_only_what_may_become_a_stop(
            text in "[ab]{0,24}",
            stops in prop::collection::vec("[ab]{1,5}", 0..4),
            cuts in prop::collection::vec(any::<bool>(), 1..24),
        ) {
            let mut matcher = StopMatcher::new(stops.clone(), false).unwrap();
            let (mut seen, mut shown) = (String::new(), String::new());
            for piece in cut(&text, &cuts) {
                let output = matcher.push(&piece);
                if output.stopped.is_some() {
                    break;
                }
                seen += &piece;
                shown += &output.emit;
                let held = &seen[shown.len()..];
                prop_assert!(seen.starts_with(&shown));
                prop_assert!(held.is_empty() || stops.iter().any(|stop| stop.starts_with(held)));
            }
        }
    }

    #[test]
    fn a_stop_string_may_span_many_pieces() {
        let mut matcher = StopMatcher::new(["</answer>"], false).unwrap();
        assert_eq!(matcher.push("yes <").emit, "yes ");
        assert_eq!(matcher.push("/ans").emit, "");
        assert_eq!(matcher.push("wer> more"), StopOutput { emit: String::new(), stopped: Some(0) });
        assert_eq!(matcher.push("text"), StopOutput { emit: String::new(), stopped: Some(0) });
        assert_eq!(matcher.flush(), "");
    }

    #[test]
    fn a_false_start_is_released() {
        let mut matcher = StopMatcher::new(["###", "\n\n"], false).unwrap();
        assert_eq!(matcher.push("a##").emit, "a");
        assert_eq!(matcher.push("b\n").emit, "##b");
        assert_eq!(matcher.flush(), "\n");
    }

    #[test]
    fn the_stop_string_may_be_kept() {
        let mut matcher = StopMatcher::new(["END"], true).unwrap();
        assert_eq!(matcher.push("the EN").emit, "the ");
        assert_eq!(matcher.push("D!"), StopOutput { emit: "END".into(), stopped: Some(0) });
    }

    #[test]
    fn an_empty_stop_string_is_refused() {
        let error = StopMatcher::new(["a", ""], false).unwrap_err();
        assert!(matches!(error, TextError::EmptyStopString { index: 1 }));
    }
}
