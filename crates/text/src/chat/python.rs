//! Python's behaviour of values: `str()` and `repr()`, string methods, and Jinja2's view of types.
//!
//! Invariant: names and results follow Python 3; a method that Python lacks stays unknown. Methods
//! that change their object (`append`, `update`, `pop`) stay unknown too, as in the immutable
//! sandbox of `transformers`.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::limits::{charge, charge_join, charge_replace, check_format};

/// Nesting printed before the output turns into `...`.
const MAX_DEPTH: usize = 200;

/// Makes printing, methods, tests and the filters that print follow Python.
pub(super) fn install(environment: &mut Environment<'_>) {
    environment.set_formatter(|out, _, value| {
        match value.as_str() {
            Some(text) => {
                charge(text.len())?;
                out.write_str(text)?;
            }
            None => {
                let text = str_of(value);
                charge(text.len())?;
                out.write_str(&text)?;
            }
        }
        Ok(())
    });
    environment.set_unknown_method_callback(call_method);
    environment.add_filter("string", |value: &Value| str_of(value));
    environment.add_filter("join", join);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    // In Python a boolean is a number, and a text or a dictionary has a length and items.
    environment
        .add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    environment.add_test("sequence", |value: &Value| {
        use ValueKind::{Iterable, Map, Seq, String};
        matches!(value.kind(), Seq | Iterable | String | Map)
    });
    environment.add_test("iterable", |value: &Value| {
        use ValueKind::{Iterable, Map, Seq, String, Undefined};
        matches!(value.kind(), Seq | Iterable | String | Map | Undefined)
    });
}

/// Python's `len(value)`; undefined has no items, as in Jinja2.
fn length(value: &Value) -> Result<usize, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(0),
        ValueKind::Iterable => Ok(value.try_iter()?.count()),
        kind => value.len().ok_or_else(|| {
            Error::new(ErrorKind::InvalidOperation, format!("a value of type {kind} has no length"))
        }),
    }
}

/// Jinja2's `join(separator, attribute)`.
fn join(
    value: &Value,
    separator: Option<Value>,
    attribute: Option<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let separator = match separator {
        Some(separator) => Some(separator),
        None => kwargs.get::<Option<Value>>("d")?,
    };
    let attribute = match attribute {
        Some(attribute) => Some(attribute),
        None => kwargs.get::<Option<Value>>("attribute")?,
    };
    kwargs.assert_all_used()?;
    let separator = separator.map_or(String::new(), |separator| str_of(&separator));
    charge_join(value, separator.len())?;
    let mut parts = Vec::new();
    for item in value.try_iter()? {
        parts.push(match &attribute {
            Some(name) => str_of(&item.get_item(name)?),
            None => str_of(&item),
        });
    }
    Ok(parts.join(&separator))
}

/// Python's `str(value)`; undefined prints as nothing, as in Jinja2.
pub(super) fn str_of(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => {
            let mut out = String::new();
            write_repr(value, &mut out, 0);
            out
        }
    }
}

fn write_repr(value: &Value, out: &mut String, depth: usize) {
    if depth > MAX_DEPTH {
        out.push_str("...");
        return;
    }
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => match integer(value) {
            Some(digits) => out.push_str(&digits),
            None => out.push_str(&float_repr(f64::try_from(value.clone()).unwrap_or(f64::NAN))),
        },
        ValueKind::String => write_string_repr(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (at, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                write_repr(&item, out, depth + 1);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (at, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                write_repr(&key, out, depth + 1);
                out.push_str(": ");
                write_repr(&value.get_item(&key).unwrap_or_default(), out, depth + 1);
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
}

/// Python prefers single quotes, and takes double ones only to save escaping.
fn write_string_repr(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if !printable(c) => out.push_str(&match u32::from(c) {
                code @ ..0x100 => format!("\\x{code:02x}"),
                code @ ..0x1_0000 => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            }),
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// Close to Python's `str.isprintable`: not control, format, private-use or blank (except the plain
/// space). Unassigned code points, which Python escapes as well, print as they are.
fn printable(c: char) -> bool {
    let format = matches!(c, '\u{AD}' | '\u{200B}'..='\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2060}'..='\u{206F}' | '\u{FEFF}');
    let private = matches!(c, '\u{E000}'..='\u{F8FF}' | '\u{F0000}'..);
    !(c.is_control() || format || private || (c.is_whitespace() && c != ' '))
}

/// The digits of an integer value; none for a float.
pub(super) fn integer(value: &Value) -> Option<String> {
    value.is_integer().then(|| value.to_string())
}

/// Python's `repr` of a float: shortest digits that read back the same, an exponent below 1e-4 and
/// from 1e16.
pub(super) fn float_repr(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = value.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}

/// Python methods that `minijinja-contrib` lacks, or counts in bytes where Python counts
/// characters.
fn call_method(state: &State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args);
    };
    match (method, args) {
        ("replace", [from, to, ..]) => {
            charge_replace(text, from.as_str().unwrap_or_default(), to.as_str().unwrap_or_default())?;
        }
        ("join", [items, ..]) => charge_join(items, text.len())?,
        ("format", _) => check_format(text)?,
        _ => {}
    }
    let characters = |bytes: usize| text[..bytes].chars().count() as i64;
    Ok(match method {
        "find" => {
            let (needle,): (&str,) = from_args(args)?;
            Value::from(text.find(needle).map_or(-1, characters))
        }
        "rfind" => {
            let (needle,): (&str,) = from_args(args)?;
            Value::from(text.rfind(needle).map_or(-1, characters))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            let (before, after) = text.split_once(separator).unwrap_or((text, ""));
            let found = if text.contains(separator) { separator } else { "" };
            list_of(&[before, found, after])
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let (before, after) = text.rsplit_once(separator).unwrap_or(("", text));
            let found = if text.contains(separator) { separator } else { "" };
            list_of(&[before, found, after])
        }
        "split" | "rsplit" => split(text, args, method == "rsplit")?,
        // Python returns false for the empty text.
        "isalnum" | "isalpha" | "isdigit" | "isnumeric" | "isspace" if text.is_empty() => Value::from(false),
        // Python requires at least one cased letter and ignores the rest.
        "isupper" => {
            Value::from(text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase))
        }
        "islower" => {
            Value::from(text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase))
        }
        _ => return minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    })
}

fn list_of(parts: &[&str]) -> Value {
    parts.iter().map(|part| Value::from(*part)).collect()
}

/// `str.split` and `str.rsplit`, with `sep` and `maxsplit` by position or by name.
fn split(text: &str, args: &[Value], from_right: bool) -> Result<Value, Error> {
    let (separator, limit, kwargs): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = match separator {
        Some(separator) => Some(separator),
        None => kwargs.get::<Option<Value>>("sep")?,
    };
    let limit = match limit {
        Some(limit) => Some(limit),
        None => kwargs.get::<Option<i64>>("maxsplit")?,
    };
    kwargs.assert_all_used()?;
    // A negative count means no limit.
    let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
    let parts: Vec<&str> = match separator.filter(|separator| !separator.is_none()) {
        Some(separator) => {
            let separator =
                separator.as_str().filter(|separator| !separator.is_empty()).ok_or_else(|| {
                    Error::new(
                        ErrorKind::InvalidOperation,
                        "split: the separator must be a text that is not empty",
                    )
                })?;
            if from_right {
                let mut parts: Vec<&str> = text.rsplitn(limit.saturating_add(1), separator).collect();
                parts.reverse();
                parts
            } else {
                text.splitn(limit.saturating_add(1), separator).collect()
            }
        }
        None => split_whitespace(text, limit, from_right),
    };
    Ok(list_of(&parts))
}

/// Splits at runs of white space, at most `limit` times; the last part keeps its inner white space.
fn split_whitespace(text: &str, limit: usize, from_right: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let border = match from_right {
            _ if parts.len() == limit => None,
            false => rest.find(char::is_whitespace),
            true => rest.rfind(char::is_whitespace),
        };
        let Some(at) = border else {
            parts.push(rest);
            break;
        };
        let (left, right) = rest.split_at(at);
        if from_right {
            parts.push(right.trim_start());
            rest = left.trim_end();
        } else {
            parts.push(left);
            rest = right.trim_start();
        }
    }
    if from_right {
        parts.reverse();
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected texts come from Python's `repr`.
    #[test]
    fn floats_print_as_in_python() {
        for (value, expected) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (0.0001, "0.0001"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.25e22, "1.25e+22"),
            (1e100, "1e+100"),
            (5e-324, "5e-324"),
            (123_456.789, "123456.789"),
            (f64::INFINITY, "inf"),
            (f64::NAN, "nan"),
        ] {
            assert_eq!(float_repr(value), expected);
        }
    }

    #[test]
    fn values_print_as_in_python() {
        let value = Value::from_serialize(
            serde_json::json!([null, true, 1, 2.0, "it's", "a\"b'c", {"k\n": [], "é": false}]),
        );
        assert_eq!(str_of(&value), r#"[None, True, 1, 2.0, "it's", 'a"b\'c', {'k\n': [], 'é': False}]"#);
        assert_eq!(str_of(&Value::UNDEFINED), "");
        assert_eq!(str_of(&Value::from("plain")), "plain");
    }

    #[test]
    fn white_space_splits_as_in_python() {
        assert_eq!(split_whitespace("  a b \n c ", usize::MAX, false), ["a", "b", "c"]);
        assert_eq!(split_whitespace(" a  b  c ", 1, false), ["a", "b  c"]);
        assert_eq!(split_whitespace(" a  b  c ", 1, true), ["a  b", "c"]);
        assert!(split_whitespace(" \n", usize::MAX, false).is_empty());
    }
}
