//! The `tojson` filter with the output of Python's `json.dumps`.
//!
//! Invariant: the text equals `json.dumps(value, ensure_ascii=..., indent=..., separators=...,
//! sort_keys=...)` with the defaults of `transformers` (`ensure_ascii=False`, separators `", "` and
//! `": "`). Nothing is escaped for HTML, unlike in Jinja2's own filter and in `minijinja`'s.

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Value};

use super::limits::charge;
use super::python::{float_repr, integer};

/// Nesting allowed in a value, so that a template cannot exhaust the stack by wrapping lists in
/// lists.
const MAX_DEPTH: usize = 200;

type Arguments = (Option<Value>, Option<Value>, Option<Value>, Option<Value>, Kwargs);

/// `value | tojson(ensure_ascii, indent, separators, sort_keys)`, each by position or by name.
pub(super) fn tojson(value: &Value, args: Rest<Value>) -> Result<Value, Error> {
    let (ensure_ascii, indent, separators, sort_keys, kwargs): Arguments = from_args(&args)?;
    let argument = |positional: Option<Value>, name: &str| -> Result<Option<Value>, Error> {
        let given = match positional {
            Some(value) => Some(value),
            None => kwargs.get::<Option<Value>>(name)?,
        };
        Ok(given.filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let ensure_ascii = argument(ensure_ascii, "ensure_ascii")?.is_some_and(|flag| flag.is_true());
    let indent = argument(indent, "indent")?.map(indentation).transpose()?;
    let sort_keys = argument(sort_keys, "sort_keys")?.is_some_and(|flag| flag.is_true());
    let (item_separator, key_separator) = match argument(separators, "separators")? {
        Some(pair) => separator_pair(&pair)?,
        // As in Python: a line break takes the place of the space after the comma.
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    kwargs.assert_all_used()?;

    let mut writer =
        Writer { out: String::new(), ensure_ascii, indent, sort_keys, item_separator, key_separator };
    writer.value(value, 0)?;
    Ok(Value::from(writer.out))
}

/// Python takes a string, or a count of spaces.
fn indentation(value: Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    match i64::try_from(value) {
        Ok(spaces) if spaces <= 64 => Ok(" ".repeat(usize::try_from(spaces).unwrap_or(0))),
        _ => Err(invalid("tojson: `indent` must be a string or a number of at most 64 spaces")),
    }
}

fn separator_pair(value: &Value) -> Result<(String, String), Error> {
    let parts: Vec<Value> = value.try_iter()?.collect();
    match parts.as_slice() {
        [item, key] => match (item.as_str(), key.as_str()) {
            (Some(item), Some(key)) => Ok((item.to_owned(), key.to_owned())),
            _ => Err(invalid("tojson: `separators` must be two strings")),
        },
        _ => Err(invalid("tojson: `separators` must be a pair such as (',', ':')")),
    }
}

fn invalid(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

struct Writer {
    out: String,
    ensure_ascii: bool,
    indent: Option<String>,
    sort_keys: bool,
    item_separator: String,
    key_separator: String,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("tojson: the value is nested too deeply"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.block(['[', ']'], items.iter(), depth, |writer, item| writer.value(item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut entries = Vec::new();
                for key in value.try_iter()? {
                    entries.push((key_text(&key)?, value.get_item(&key)?));
                }
                if self.sort_keys {
                    entries.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.block(['{', '}'], entries.iter(), depth, |writer, (key, item)| {
                    writer.string(key);
                    writer.out.push_str(&writer.key_separator);
                    writer.value(item, depth + 1)
                })?;
            }
            other => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("tojson: a value of type {other} has no JSON form"),
                ));
            }
        }
        Ok(())
    }

    /// Writes a list or an object, one item a line if there is an indentation.
    fn block<T>(
        &mut self,
        [open, close]: [char; 2],
        items: impl ExactSizeIterator<Item = T>,
        depth: usize,
        mut write: impl FnMut(&mut Self, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let empty = items.len() == 0;
        self.out.push(open);
        let indentation = self.indent.as_ref().map_or(0, |indent| indent.len() * (depth + 1));
        for (at, item) in items.enumerate() {
            charge(self.item_separator.len() + self.key_separator.len() + indentation)?;
            if at > 0 {
                self.out.push_str(&self.item_separator);
            }
            self.line_break(depth + 1);
            write(self, item)?;
        }
        if !empty {
            self.line_break(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line_break(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{C}' => self.out.push_str("\\f"),
                '\0'..='\x1F' => self.unicode_escape(c),
                '\x7F'.. if self.ensure_ascii => self.unicode_escape(c),
                _ => self.out.push(c),
            }
        }
        self.out.push('"');
    }

    /// `\uXXXX`, twice for characters beyond the basic plane.
    fn unicode_escape(&mut self, c: char) {
        for unit in c.encode_utf16(&mut [0; 2]) {
            self.out.push_str(&format!("\\u{unit:04x}"));
        }
    }
}

fn number(value: &Value) -> String {
    match integer(value) {
        Some(digits) => digits,
        None => {
            let float = f64::try_from(value.clone()).unwrap_or(f64::NAN);
            match float {
                f if f.is_nan() => "NaN".to_owned(),
                f64::INFINITY => "Infinity".to_owned(),
                f64::NEG_INFINITY => "-Infinity".to_owned(),
                f => float_repr(f),
            }
        }
    }
}

/// Python turns numbers, booleans and None into string keys.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::Number => Ok(number(key)),
        ValueKind::Bool => Ok(key.is_true().to_string()),
        ValueKind::None => Ok("null".to_owned()),
        other => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("tojson: a value of type {other} cannot be a key"),
        )),
    }
}
