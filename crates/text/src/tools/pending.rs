//! Reply text that has arrived and is not yet understood.
//!
//! Invariant: what a reader takes depends on the text alone, never on how it was cut into pieces: a
//! reader that cannot decide yet takes nothing and is asked again when more text is there.

use super::MAX_NAME;

/// Result of a comparison with the front of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Match {
    /// The option with this index stood in front and was taken.
    Yes(usize),
    No,
    /// More text is needed to tell.
    Maybe,
}

/// Result of looking for a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Name {
    /// The name and the index of the marker that ended it; both were taken.
    Found(String, usize),
    TooLong,
    /// More text is needed to tell.
    Maybe,
}

/// The text, read from the front.
#[derive(Clone, Debug, Default)]
pub(super) struct Pending {
    text: String,
    start: usize,
    ended: bool,
    /// Everything taken since [`record`](Self::record), for a call that may turn out to be ordinary
    /// text.
    recorded: Option<String>,
    /// What stood before the recording and has become events, since `record`.
    committed: String,
}

impl Pending {
    pub fn push(&mut self, piece: &str) {
        self.text.drain(..self.start);
        self.start = 0;
        self.text.push_str(piece);
    }

    /// No more text will come: nothing is undecided any longer.
    pub fn end(&mut self) {
        self.ended = true;
    }

    pub fn ended(&self) -> bool {
        self.ended
    }

    pub fn is_empty(&self) -> bool {
        self.start == self.text.len()
    }

    fn rest(&self) -> &str {
        &self.text[self.start..]
    }

    /// Starts to keep a copy of everything taken.
    pub fn record(&mut self) {
        self.recorded = Some(String::new());
        self.committed.clear();
    }

    /// Ends the recording and returns it.
    pub fn recorded(&mut self) -> String {
        self.recorded.take().unwrap_or_default()
    }

    /// Empties the recording but for its last `keep` bytes: the text before them has become events.
    pub fn commit(&mut self, keep: usize) {
        if let Some(recorded) = &mut self.recorded {
            self.committed.extend(recorded.drain(..recorded.len() - keep));
        }
    }

    /// Returns the text that has become events since the recording began, and forgets it.
    pub fn committed(&mut self) -> String {
        std::mem::take(&mut self.committed)
    }

    /// Gives back the last `bytes` taken since the last piece arrived.
    pub fn untake(&mut self, bytes: usize) {
        self.start -= bytes;
        if let Some(recorded) = &mut self.recorded {
            recorded.truncate(recorded.len() - bytes);
        }
    }

    /// Puts text back in front.
    pub fn put_back(&mut self, text: &str) {
        self.text.replace_range(..self.start, text);
        self.start = 0;
    }

    pub fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    pub fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.take(c.len_utf8());
        Some(c)
    }

    fn take(&mut self, bytes: usize) -> &str {
        let taken = &self.text[self.start..self.start + bytes];
        if let Some(recorded) = &mut self.recorded {
            recorded.push_str(taken);
        }
        self.start += bytes;
        taken
    }

    /// Takes white space and returns it.
    pub fn space(&mut self) -> String {
        let rest = self.rest();
        let bytes = rest.len() - rest.trim_start().len();
        self.take(bytes).to_owned()
    }

    /// Takes the option that stands in front. No option may begin with another one.
    pub fn literal(&mut self, options: &[&str]) -> Match {
        let rest = self.rest();
        if let Some(index) = options.iter().position(|option| rest.starts_with(option)) {
            self.take(options[index].len());
            return Match::Yes(index);
        }
        match !self.ended && options.iter().any(|option| option.starts_with(rest)) {
            true => Match::Maybe,
            false => Match::No,
        }
    }

    /// Takes a name and the marker that ends it. Takes nothing if there is no marker after at most
    /// [`MAX_NAME`] bytes.
    pub fn name(&mut self, markers: &[&str]) -> Name {
        let rest = self.rest();
        match first(rest, markers) {
            Some((end, start, index)) if start <= MAX_NAME => {
                let text = rest[..start].to_owned();
                self.take(end);
                Name::Found(text, index)
            }
            None if rest.len() - longest_beginning(rest, markers) <= MAX_NAME => Name::Maybe,
            _ => Name::TooLong,
        }
    }

    /// Takes the text in front of the first marker, and the marker. Without a marker it takes all
    /// text that cannot be the beginning of one.
    pub fn until(&mut self, markers: &[&str]) -> (String, Option<usize>) {
        let rest = self.rest();
        if let Some((end, start, index)) = first(rest, markers) {
            let text = rest[..start].to_owned();
            self.take(end);
            return (text, Some(index));
        }
        let held = if self.ended { 0 } else { longest_beginning(rest, markers) };
        let certain = rest.len() - held;
        (self.take(certain).to_owned(), None)
    }
}

/// End, start and index of the marker that ends first.
fn first(text: &str, markers: &[&str]) -> Option<(usize, usize, usize)> {
    let found = markers.iter().enumerate();
    found
        .filter_map(|(index, marker)| text.find(marker).map(|start| (start + marker.len(), start, index)))
        .min()
}

/// Length of the longest end of `text` that is a proper beginning of a marker.
fn longest_beginning(text: &str, markers: &[&str]) -> usize {
    let beginnings =
        markers.iter().flat_map(|marker| marker.char_indices().map(move |(at, _)| &marker[..at]));
    beginnings.filter(|beginning| text.ends_with(beginning)).map(str::len).max().unwrap_or(0)
}
