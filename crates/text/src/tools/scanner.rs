//! An incremental check of one JSON value, character by character.
//!
//! Invariant: a value is accepted if and only if `serde_json` accepts it, with two exceptions:
//! control characters inside strings, which models write often and which the caller escapes, and
//! numbers beyond the range of `f64` are let through.

/// Nesting that is allowed; `serde_json` has the same limit.
const MAX_DEPTH: usize = 127;

/// What a character did to the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    More,
    /// The character completed the value.
    Done,
    /// The value was complete before this character, which does not belong to it.
    DoneBefore,
    /// The value cannot be completed any more.
    Bad,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Value,
    /// After `[`.
    FirstItem,
    /// After `{`.
    FirstKey,
    Key,
    Colon,
    /// After a value inside a list or an object.
    Next,
    String {
        key: bool,
    },
    Escape {
        key: bool,
    },
    Unicode {
        key: bool,
        digits: u8,
        code: u16,
    },
    /// After a high surrogate: `\u` must follow.
    LowSurrogate {
        key: bool,
        slash: bool,
    },
    Number(Number),
    Literal {
        rest: &'static str,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

/// The check of one value.
#[derive(Clone, Debug)]
pub(super) struct Scanner {
    state: State,
    /// True for an object, false for a list.
    open: Vec<bool>,
    after_high: bool,
}

impl Scanner {
    pub fn new() -> Self {
        Self { state: State::Value, open: Vec::new(), after_high: false }
    }

    pub fn in_string(&self) -> bool {
        matches!(self.state, State::String { .. })
    }

    pub fn push(&mut self, c: char) -> Step {
        let space = matches!(c, ' ' | '\t' | '\n' | '\r');
        match (self.state, c) {
            (
                State::Value | State::FirstItem | State::FirstKey | State::Key | State::Colon | State::Next,
                _,
            ) if space => Step::More,
            (State::FirstItem, ']') | (State::FirstKey, '}') => self.close(),
            (State::Value | State::FirstItem, _) => self.begin(c),
            (State::FirstKey | State::Key, '"') => self.go(State::String { key: true }),
            (State::Colon, ':') => self.go(State::Value),
            (State::Next, ',') => {
                let object = self.open.last() == Some(&true);
                self.go(if object { State::Key } else { State::Value })
            }
            (State::Next, '}') if self.open.last() == Some(&true) => self.close(),
            (State::Next, ']') if self.open.last() == Some(&false) => self.close(),
            (State::String { key: true }, '"') => self.go(State::Colon),
            (State::String { key: false }, '"') => self.complete(),
            (State::String { key }, '\\') => self.go(State::Escape { key }),
            (State::String { .. }, _) => Step::More,
            (State::Escape { key }, 'u') => self.go(State::Unicode { key, digits: 0, code: 0 }),
            (State::Escape { key }, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => {
                self.go(State::String { key })
            }
            (State::Unicode { key, digits, code }, _) => self.unicode(c, key, digits, code),
            (State::LowSurrogate { key, slash: false }, '\\') => {
                self.go(State::LowSurrogate { key, slash: true })
            }
            (State::LowSurrogate { key, slash: true }, 'u') => {
                self.after_high = true;
                self.go(State::Unicode { key, digits: 0, code: 0 })
            }
            (State::Literal { rest }, _) => match rest.strip_prefix(c) {
                Some("") => self.complete(),
                Some(rest) => self.go(State::Literal { rest }),
                None => Step::Bad,
            },
            (State::Number(number), _) => self.number(number, c),
            _ => Step::Bad,
        }
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    fn begin(&mut self, c: char) -> Step {
        match c {
            '{' | '[' if self.open.len() == MAX_DEPTH => Step::Bad,
            '{' | '[' => {
                self.open.push(c == '{');
                self.go(if c == '{' { State::FirstKey } else { State::FirstItem })
            }
            '"' => self.go(State::String { key: false }),
            't' => self.go(State::Literal { rest: "rue" }),
            'f' => self.go(State::Literal { rest: "alse" }),
            'n' => self.go(State::Literal { rest: "ull" }),
            '-' => self.go(State::Number(Number::Minus)),
            '0' => self.go(State::Number(Number::Zero)),
            '1'..='9' => self.go(State::Number(Number::Integer)),
            _ => Step::Bad,
        }
    }

    fn unicode(&mut self, c: char, key: bool, digits: u8, code: u16) -> Step {
        let Some(digit) = c.to_digit(16) else { return Step::Bad };
        let code = code << 4 | digit as u16;
        if digits < 3 {
            return self.go(State::Unicode { key, digits: digits + 1, code });
        }
        let low = (0xDC00..0xE000).contains(&code);
        if std::mem::take(&mut self.after_high) != low {
            return Step::Bad;
        }
        match (0xD800..0xDC00).contains(&code) {
            true => self.go(State::LowSurrogate { key, slash: false }),
            false => self.go(State::String { key }),
        }
    }

    fn number(&mut self, number: Number, c: char) -> Step {
        let next = match (number, c) {
            (Number::Minus, '0') => Number::Zero,
            (Number::Minus | Number::Integer, '1'..='9') | (Number::Integer, '0') => Number::Integer,
            (Number::Zero | Number::Integer, '.') => Number::Point,
            (Number::Point | Number::Fraction, '0'..='9') => Number::Fraction,
            (Number::Zero | Number::Integer | Number::Fraction, 'e' | 'E') => Number::Exponent,
            (Number::Exponent, '+' | '-') => Number::ExponentSign,
            (Number::Exponent | Number::ExponentSign | Number::ExponentDigits, '0'..='9') => {
                Number::ExponentDigits
            }
            (Number::Zero | Number::Integer | Number::Fraction | Number::ExponentDigits, _) => {
                return match self.complete() {
                    Step::Done => Step::DoneBefore,
                    _ => self.push(c),
                };
            }
            _ => return Step::Bad,
        };
        self.go(State::Number(next))
    }

    /// Ends the innermost list or object.
    fn close(&mut self) -> Step {
        self.open.pop();
        self.complete()
    }

    fn complete(&mut self) -> Step {
        self.state = State::Next;
        if self.open.is_empty() { Step::Done } else { Step::More }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn accepts(text: &str) -> bool {
        let mut scanner = Scanner::new();
        let mut done = false;
        for c in text.chars().chain(['\n']) {
            if done {
                if c.is_ascii_whitespace() {
                    continue;
                }
                return false;
            }
            match scanner.push(c) {
                Step::More => {}
                Step::Done => done = true,
                Step::DoneBefore if c.is_ascii_whitespace() => done = true,
                Step::DoneBefore | Step::Bad => return false,
            }
        }
        done
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(3000))]
        #[test]
        fn accepts_what_serde_json_accepts(
            parts in prop::collection::vec(prop::sample::select(vec![
                "{", "}", "[", "]", ",", ":", "\"", "\"a\"", "\"é\\n\"", "\\", "\\u00e9", "\\ud83d\\ude00", "\\ud83d",
                "\\ude00", "\"\\u12", "0", "1", "-", ".", "e", "+", "12.5e-3", "01", "true", "false", "null", "nul",
                " ", "{\"a\":", "[1,", "\"b\":2",
            ]), 0..12),
        ) {
            let text = parts.concat();
            let parsed = serde_json::from_str::<serde_json::Value>(&text);
            prop_assume!(!parsed.as_ref().is_err_and(|error| error.to_string().contains("out of range")));
            prop_assert_eq!(accepts(&text), parsed.is_ok(), "{}", text);
        }
    }

    #[test]
    fn depth_is_bounded() {
        let deep = |levels: usize| "[".repeat(levels) + &"]".repeat(levels);
        for levels in [1, MAX_DEPTH, MAX_DEPTH + 1, 5000] {
            assert_eq!(
                accepts(&deep(levels)),
                serde_json::from_str::<serde_json::Value>(&deep(levels)).is_ok()
            );
        }
    }
}
