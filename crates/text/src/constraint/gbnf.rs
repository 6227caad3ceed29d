//! llama.cpp's grammars (GBNF) as Lark: rules, alternatives, groups, strings, character classes and
//! repetitions.

use std::collections::HashSet;

use crate::TextError;

/// GBNF writes `::=` where Lark writes `:`.
pub(super) fn is_gbnf(source: &str) -> bool {
    source.contains("::=")
}

/// Translates a grammar. What GBNF has and we do not (token references, `.` in odd places) is
/// refused by name.
pub(super) fn to_lark(source: &str) -> Result<String, TextError> {
    let mut out = String::new();
    let mut rest = source;
    let (mut used, mut defined) = (Vec::new(), HashSet::new());
    while let Some(c) = rest.chars().next() {
        let refuse = |what: String| Err(TextError::Grammar { reason: format!("GBNF: {what}") });
        match c {
            '#' => rest = &rest[rest.find('\n').unwrap_or(rest.len())..],
            '"' => {
                let end = end_of(rest, '"').ok_or_else(|| unterminated("string"))?;
                out += &string(&rest[..end]);
                rest = &rest[end..];
            }
            '[' => {
                let end = end_of(rest, ']').ok_or_else(|| unterminated("character class"))?;
                out += &format!("/{}/", rest[..end].replace('/', "\\/"));
                rest = &rest[end..];
            }
            '.' => {
                out += "/(.|\\n)/";
                rest = &rest[1..];
            }
            '<' | '!' => return refuse("token references are not supported".to_owned()),
            _ if rest.starts_with("::=") => {
                out.push(':');
                rest = &rest[3..];
            }
            _ if c.is_ascii_alphabetic() => {
                let end = rest
                    .find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_')))
                    .unwrap_or(rest.len());
                let name = &rest[..end];
                rest = &rest[end..];
                if rest.trim_start().starts_with("::=") {
                    defined.insert(rule_name(name));
                } else {
                    used.push(name);
                }
                out += &rule_name(name);
            }
            // Inside a group a line break is white space in GBNF; Lark takes it as well.
            ' ' | '\t' | '\r' | '\n' | '|' | '(' | ')' | '*' | '+' | '?' | '{' | '}' | ',' | '0'..='9' => {
                out.push(c);
                rest = &rest[1..];
            }
            _ => return refuse(format!("`{c}` is not understood")),
        }
    }
    if !defined.contains(&rule_name("root")) {
        return Err(TextError::Grammar { reason: "GBNF: there is no rule `root`".to_owned() });
    }
    match used.iter().find(|name| !defined.contains(&rule_name(name))) {
        Some(name) => {
            let reason = format!("GBNF: the rule `{name}` is used but not defined; add `{name} ::= …`");
            Err(TextError::Grammar { reason })
        }
        None => Ok(join_alternatives(&out)),
    }
}

/// Lark reads lower-case names of letters, digits and `_`; `root` is its `start`.
fn rule_name(name: &str) -> String {
    match name {
        "root" => "start".to_owned(),
        _ => format!("g_{}", name.to_ascii_lowercase().replace('-', "_")),
    }
}

fn unterminated(what: &str) -> TextError {
    TextError::Grammar { reason: format!("GBNF: a {what} has no end") }
}

/// The offset behind the closing character, escapes skipped.
fn end_of(text: &str, close: char) -> Option<usize> {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == close => return Some(at + c.len_utf8()),
            _ => {}
        }
    }
    None
}

/// A GBNF string as Lark writes it: single quotes and brackets need no escape there.
fn string(text: &str) -> String {
    let mut out = String::new();
    let mut characters = text.chars();
    while let Some(c) = characters.next() {
        match c {
            '\\' => match characters.next() {
                Some(next @ ('[' | ']' | '\'')) => out.push(next),
                Some(next) => out.extend(['\\', next]),
                None => out.push('\\'),
            },
            c => out.push(c),
        }
    }
    out
}

/// Lark continues a rule on the next line only after `|` at its beginning, which GBNF also writes
/// at the end.
fn join_alternatives(lark: &str) -> String {
    let mut out = String::new();
    for line in lark.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let continues =
            out.trim_end().ends_with(['|', '(', ':']) || line.starts_with(['|', ')']) || !line.contains(':');
        out.push(if continues { ' ' } else { '\n' });
        out += line;
    }
    out + "\n"
}
