//! llama.cpp's grammars (GBNF) as Lark: rules, alternatives, groups, strings, character classes and
//! repetitions.
//!
//! Invariant: every rule of the translation stands on one line, since a line break means something
//! else in Lark, and different names stay different.

use std::collections::HashSet;

use super::literal;
use crate::TextError;

/// What `.` and an empty exclusion match.
const ANY: &str = "/(.|\\n)/";

/// GBNF writes `name ::=` where Lark writes `name:`. Inside a literal the sign means nothing.
pub(super) fn is_gbnf(source: &str) -> bool {
    let begins_rule = |line: &str| line.trim_start_matches(is_word).trim_start().starts_with("::=");
    source.lines().map(str::trim).any(|line| line.starts_with(is_word) && begins_rule(line))
}

/// Translates a grammar. What GBNF has and we do not (token references) is refused by name.
pub(super) fn to_lark(source: &str) -> Result<String, TextError> {
    let mut out = String::new();
    let mut rest = source;
    let (mut used, mut defined) = (Vec::new(), HashSet::new());
    while let Some(c) = rest.chars().next() {
        match c {
            '#' => rest = &rest[rest.find('\n').unwrap_or(rest.len())..],
            '"' => {
                let (text, behind) = string(&rest[1..])?;
                out += &literal(&text);
                rest = behind;
            }
            '[' => {
                let (class, behind) = class(&rest[1..])?;
                out += &class;
                rest = behind;
            }
            '{' => {
                let end = rest.find('}').ok_or_else(|| unterminated("repetition"))? + 1;
                out += &rest[..end];
                rest = &rest[end..];
            }
            '.' => {
                out += ANY;
                rest = &rest[1..];
            }
            '<' | '!' => return Err(refuse("token references are not supported; write the text")),
            _ if is_word(c) => {
                let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
                let (name, behind) = rest.split_at(end);
                match behind.trim_start_matches([' ', '\t']).strip_prefix("::=") {
                    Some(body) => {
                        if !defined.insert(name) {
                            return Err(refuse(format!("the rule `{name}` is defined twice")));
                        }
                        out += &format!("\n{}:", rule_name(name));
                        rest = body;
                    }
                    None => {
                        used.push(name);
                        out += &rule_name(name);
                        rest = behind;
                    }
                }
            }
            // A rule goes on until the next one begins.
            ' ' | '\t' | '\r' | '\n' => {
                out.push(' ');
                rest = &rest[1..];
            }
            '|' | '(' | ')' | '*' | '+' | '?' => {
                out.push(c);
                rest = &rest[1..];
            }
            _ => return Err(refuse(format!("`{c}` is not understood"))),
        }
    }
    if !defined.contains("root") {
        return Err(refuse("there is no rule `root`"));
    }
    match used.iter().find(|name| !defined.contains(*name)) {
        Some(name) => Err(refuse(format!("the rule `{name}` is used but not defined; add `{name} ::= …`"))),
        None => Ok(out + "\n"),
    }
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_')
}

/// Lark reads lower-case names of letters, digits and `_`; `root` is its `start`. Other characters
/// are written behind `_`, so that names which differ in them still differ.
fn rule_name(name: &str) -> String {
    if name == "root" {
        return "start".to_owned();
    }
    let mut out = "g_".to_owned();
    for c in name.chars() {
        match c {
            '_' => out += "__",
            '-' => out += "_0",
            'A'..='Z' => out.extend(['_', c.to_ascii_lowercase()]),
            c => out.push(c),
        }
    }
    out
}

fn refuse(what: impl std::fmt::Display) -> TextError {
    TextError::Grammar { reason: format!("GBNF: {what}") }
}

fn unterminated(what: &str) -> TextError {
    refuse(format!("a {what} has no end"))
}

/// The text of a string, and what follows its closing quote.
fn string(source: &str) -> Result<(String, &str), TextError> {
    let (mut text, mut rest) = (String::new(), source);
    loop {
        if let Some(behind) = rest.strip_prefix('"') {
            return Ok((text, behind));
        }
        let (c, behind) = character(rest, "string")?;
        text.push(c);
        rest = behind;
    }
}

/// A character class as a regular expression, and what follows its closing bracket.
fn class(source: &str) -> Result<(String, &str), TextError> {
    let (excludes, mut rest) = match source.strip_prefix('^') {
        Some(behind) => (true, behind),
        None => (false, source),
    };
    let mut members = String::new();
    loop {
        if let Some(behind) = rest.strip_prefix(']') {
            return match (members.is_empty(), excludes) {
                (true, false) => Err(refuse("the character class `[]` is empty; add characters")),
                (true, true) => Ok((ANY.to_owned(), behind)),
                (false, _) => Ok((format!("/[{}{members}]/", if excludes { "^" } else { "" }), behind)),
            };
        }
        let (first, behind) = character(rest, "character class")?;
        let to = behind.strip_prefix('-').filter(|to| !to.starts_with(']'));
        let (last, behind) = to.map_or(Ok((first, behind)), |to| character(to, "character class"))?;
        if last < first {
            return Err(refuse(format!(
                "the range `{first}-{last}` in a character class is empty; turn it round"
            )));
        }
        members += &member(first);
        if last != first {
            members += &format!("-{}", member(last));
        }
        rest = behind;
    }
}

/// A character inside a class: as a number where it could mean something.
fn member(c: char) -> String {
    match c.is_alphanumeric() {
        true => c.to_string(),
        false => format!("\\x{{{:x}}}", u32::from(c)),
    }
}

/// The next character of a string or a class, escapes read, and what follows it.
fn character<'a>(source: &'a str, inside: &str) -> Result<(char, &'a str), TextError> {
    let mut rest = source.chars();
    let c = match rest.next().ok_or_else(|| unterminated(inside))? {
        '\\' => match rest.next().ok_or_else(|| unterminated(inside))? {
            't' => '\t',
            'r' => '\r',
            'n' => '\n',
            kind @ ('x' | 'u' | 'U') => {
                let digits = match kind {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                };
                let hex: String = rest.by_ref().take(digits).collect();
                let number = u32::from_str_radix(&hex, 16).ok().filter(|_| hex.len() == digits);
                number.and_then(char::from_u32).ok_or_else(|| {
                    refuse(format!("`\\{kind}{hex}` is no character; write {digits} hexadecimal digits"))
                })?
            }
            // Any other escaped character, `/` among them, stands for itself.
            c => c,
        },
        c => c,
    };
    Ok((c, rest.as_str()))
}
