//! Grammars of tool calls, for answers that must be calls.

use serde_json::{Map, Value, json};

use super::{literal, marker, plain_json};
use crate::Tokenizer;
use crate::tools::Dialect;

/// Calls that an answer may hold.
#[derive(Clone, Debug, PartialEq)]
pub struct CallGrammar {
    pub dialect: Dialect,
    /// Names and parameter schemas; at least one. Arguments under the schema `null` are free.
    pub tools: Vec<(String, Value)>,
    /// More than one call is allowed.
    pub parallel: bool,
}

impl CallGrammar {
    /// The grammar of an answer that consists of calls.
    pub(super) fn to_lark(&self, tokenizer: &Tokenizer) -> String {
        let mut lark = Lark::new(tokenizer);
        let block = self.block(&mut lark);
        let open = self.opener().map(|open| marker(tokenizer, open)).unwrap_or_default();
        let more = match self.parallel {
            true => self.separator().map(|separator| format!("({separator} {open} {block})*")),
            false => None,
        };
        format!("start: {open} {block} {}\n{}", more.unwrap_or_default(), lark.text)
    }

    /// The marker that opens a block of calls.
    pub(super) fn opener(&self) -> Option<&'static str> {
        match self.dialect {
            Dialect::Hermes | Dialect::QwenXml | Dialect::Glm => Some("<tool_call>"),
            Dialect::Mistral => Some("[TOOL_CALLS]"),
            Dialect::MiniMax => Some("<minimax:tool_call>"),
            Dialect::Llama | Dialect::Harmony => None,
        }
    }

    /// What stands between blocks, in the dialects whose blocks hold one call.
    fn separator(&self) -> Option<&'static str> {
        match self.dialect {
            Dialect::Hermes | Dialect::QwenXml | Dialect::Glm => Some("\"\\n\""),
            Dialect::Mistral => Some(""),
            // The end of a harmony call is a stop token, so an answer has one.
            Dialect::Llama | Dialect::MiniMax | Dialect::Harmony => None,
        }
    }

    /// The rule of a block behind its opening marker.
    pub(super) fn block(&self, lark: &mut Lark<'_>) -> String {
        let calls: Vec<String> =
            self.tools.iter().map(|(name, schema)| self.call(lark, name, schema)).collect();
        let call = lark.rule(&calls.join(" | "));
        let again = |separator: &str| match self.parallel {
            true => format!("({} {call})*", literal(separator)),
            false => String::new(),
        };
        let body = match self.dialect {
            Dialect::Llama => format!("{call} {}", again("; ")),
            Dialect::Mistral if lists_calls(lark.tokenizer) => {
                format!("\" [\" {call} {} \"]\"", again(", "))
            }
            Dialect::MiniMax => {
                let close = marker(lark.tokenizer, "</minimax:tool_call>");
                format!("\"\\n\" {call} {} \"\\n\" {close}", again("\n"))
            }
            _ => return call,
        };
        lark.rule(&body)
    }

    /// The rule of one tool's call.
    fn call(&self, lark: &mut Lark<'_>, name: &str, schema: &Value) -> String {
        let mark = |text: &str| marker(lark.tokenizer, text);
        let object = |name: &str, key: &str| literal(&format!("{{\"name\": {}, \"{key}\": ", json!(name)));
        let body = match self.dialect {
            Dialect::Hermes => {
                let (close, arguments) = (mark("</tool_call>"), json_rule(schema));
                format!("\"\\n\" {} {arguments} \"}}\\n\" {close}", object(name, "arguments"))
            }
            Dialect::Llama => format!("{} {} \"}}\"", object(name, "parameters"), json_rule(schema)),
            Dialect::Mistral if lists_calls(lark.tokenizer) => {
                format!("{} {} \"}}\"", object(name, "arguments"), json_rule(schema))
            }
            Dialect::Mistral => format!("{} {} {}", literal(name), mark("[ARGS]"), json_rule(schema)),
            Dialect::QwenXml => {
                let close = mark("</tool_call>");
                let parameters = parameters(lark, schema, "</function>", |lark, key, value| {
                    let value = value.unwrap_or_else(|| lark.text_until("\n</parameter>\n"));
                    let head = literal(&format!("<parameter={key}>\n"));
                    match value {
                        Written::Json(rule) => format!("{head} {rule} \"\\n</parameter>\\n\""),
                        Written::Text(rule) => format!("{head} {rule}"),
                    }
                });
                let head = literal(&format!("\n<function={name}>\n"));
                format!("{head} {parameters} \"\\n\" {close}")
            }
            Dialect::Glm => {
                let (key_open, key_close) = (mark("<arg_key>"), mark("</arg_key>"));
                let (value_open, value_close) = (mark("<arg_value>"), mark("</arg_value>"));
                if schema.is_null() {
                    let gap = lark.rule("/[ \\n]+/");
                    let (key, value) = (lark.before("</arg_key>"), lark.before("</arg_value>"));
                    let pair = format!("{key_open} {key} {gap}? {value_open} {value} {gap}?");
                    return lark.rule(&format!(
                        "{} \"\\n\" ({pair})* {}",
                        literal(name),
                        mark("</tool_call>")
                    ));
                }
                let parameters = parameters(lark, schema, "</tool_call>", |lark, key, value| {
                    let value = value.unwrap_or_else(|| lark.text_before("</arg_value>"));
                    let head = format!("{key_open} {} {key_close} \"\\n\" {value_open}", literal(key));
                    match value {
                        Written::Json(rule) => format!("{head} {rule} {value_close} \"\\n\""),
                        Written::Text(rule) => format!("{head} {rule} \"\\n\""),
                    }
                });
                format!("{} \"\\n\" {parameters}", literal(name))
            }
            Dialect::MiniMax => {
                let parameters = parameters(lark, schema, "</invoke>", |lark, key, value| {
                    let value = value.unwrap_or_else(|| lark.text_until("</parameter>\n"));
                    let head = literal(&format!("<parameter name=\"{key}\">"));
                    match value {
                        Written::Json(rule) => format!("{head} {rule} \"</parameter>\\n\""),
                        Written::Text(rule) => format!("{head} {rule}"),
                    }
                });
                let head = literal(&format!("<invoke name=\"{name}\">\n"));
                format!("{head} {parameters}")
            }
            Dialect::Harmony => {
                let (channel, message) = (mark("<|channel|>"), mark("<|message|>"));
                let head = literal(&format!("commentary to=functions.{name} "));
                format!("{channel} {head} {} \"json\" {message} {}", mark("<|constrain|>"), json_rule(schema))
            }
        };
        lark.rule(&body)
    }
}

/// Any text, as Lark writes it.
const ANY: &str = "/(.|\\n)*/";

/// A parameter's value: JSON, or free text with its end.
enum Written {
    Json(String),
    Text(String),
}

/// Older Mistral models write a list of calls; newer ones have a token before the arguments.
fn lists_calls(tokenizer: &Tokenizer) -> bool {
    tokenizer.token_to_id("[ARGS]").is_none()
}

/// The Lark form of a schema.
fn json_rule(schema: &Value) -> String {
    let schema = match schema {
        Value::Object(members) if !members.is_empty() => schema.clone(),
        _ => json!({"type": "object"}),
    };
    format!("%json {}", plain_json(schema))
}

/// The parameters of a call and the end of the call, in the dialects that write parameters one by
/// one, in the order of the schema. Text that is not an enumeration is free.
fn parameters(
    lark: &mut Lark<'_>,
    schema: &Value,
    end: &str,
    one: impl Fn(&mut Lark<'_>, &str, Option<Written>) -> String,
) -> String {
    if schema.is_null() {
        return lark.before(end);
    }
    let none = Map::new();
    let properties = schema["properties"].as_object().unwrap_or(&none);
    let required =
        |name: &str| schema["required"].as_array().is_some_and(|names| names.iter().any(|n| n == name));
    let mut parts = Vec::new();
    for (name, property) in properties {
        let text = property["type"] == "string" && property.get("enum").is_none();
        let choices = property["enum"].as_array().filter(|values| values.iter().all(Value::is_string));
        let value = match choices {
            _ if text => None,
            Some(values) => {
                let options: Vec<String> = values.iter().filter_map(Value::as_str).map(literal).collect();
                Some(Written::Json(format!("({})", options.join(" | "))))
            }
            None => {
                let mut property = property.clone();
                // References point into the whole schema.
                for key in ["$defs", "definitions"] {
                    if let (Value::Object(members), Some(definitions)) = (&mut property, schema.get(key)) {
                        members.insert(key.to_owned(), definitions.clone());
                    }
                }
                Some(Written::Json(format!("%json {}", plain_json(property))))
            }
        };
        let body = one(lark, name, value);
        let rule = lark.rule(&body);
        parts.push(if required(name) { rule } else { format!("({rule})?") });
    }
    parts.push(marker(lark.tokenizer, end));
    parts.join(" ")
}

/// A grammar under construction.
pub(super) struct Lark<'a> {
    pub tokenizer: &'a Tokenizer,
    pub text: String,
    rules: usize,
}

impl<'a> Lark<'a> {
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, text: String::new(), rules: 0 }
    }

    /// Adds a rule and returns its name.
    pub fn rule(&mut self, body: &str) -> String {
        self.rule_with("", body)
    }

    fn rule_with(&mut self, attributes: &str, body: &str) -> String {
        let name = format!("r{}", self.rules);
        self.rules += 1;
        self.text += &format!("{name}{attributes}: {body}\n");
        name
    }

    /// Text up to and including `end`.
    fn text_until(&mut self, end: &str) -> Written {
        Written::Text(self.rule_with(&format!("[suffix={}]", literal(end)), ANY))
    }

    /// Text up to and including a marker, which may be a special token.
    fn text_before(&mut self, end: &str) -> Written {
        Written::Text(self.before(end))
    }

    fn before(&mut self, end: &str) -> String {
        self.text_and(ANY, end)
    }

    /// Text that matches a terminal, and a marker behind it, which may be a special token.
    pub fn text_and(&mut self, text: &str, end: &str) -> String {
        match super::special(self.tokenizer, end) {
            Some(token) => {
                let name = self.rule(text);
                format!("{name}? {token}")
            }
            None => self.rule_with(&format!("[suffix={}]", literal(end)), text),
        }
    }
}
