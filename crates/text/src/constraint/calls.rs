//! Grammars of tool calls, for answers that must be calls.

use serde_json::{Map, Value, json};

use super::{literal, marker, plain_json};
use crate::Tokenizer;
use crate::tools::Dialect;

/// Calls that an answer must consist of.
#[derive(Clone, Debug, PartialEq)]
pub struct CallGrammar {
    pub dialect: Dialect,
    /// Names and parameter schemas; at least one.
    pub tools: Vec<(String, Value)>,
    /// More than one call is allowed.
    pub parallel: bool,
}

impl CallGrammar {
    pub(super) fn to_lark(&self, tokenizer: &Tokenizer) -> String {
        let mut lark = Lark { tokenizer, text: String::new(), rules: 0 };
        let calls: Vec<String> =
            self.tools.iter().map(|(name, schema)| self.call(&mut lark, name, schema)).collect();
        let call = lark.rule(&calls.join(" | "));
        let mark = |text: &str| marker(tokenizer, text);
        let again = |separator: &str| match self.parallel {
            true => {
                format!("({} {call})*", if separator.is_empty() { String::new() } else { literal(separator) })
            }
            false => String::new(),
        };
        let start = match self.dialect {
            Dialect::Hermes | Dialect::QwenXml | Dialect::Glm => format!("{call} {}", again("\n")),
            Dialect::Llama => format!("{call} {}", again("; ")),
            Dialect::Mistral if lists_calls(tokenizer) => {
                format!("{} \" [\" {call} {} \"]\"", mark("[TOOL_CALLS]"), again(", "))
            }
            Dialect::Mistral => format!("{call} {}", again("")),
            Dialect::MiniMax => {
                let (open, close) = (mark("<minimax:tool_call>"), mark("</minimax:tool_call>"));
                format!("{open} \"\\n\" {call} {} \"\\n\" {close}", again("\n"))
            }
            // The end of a call is a stop token, so an answer has one call.
            Dialect::Harmony => call,
        };
        format!("start: {start}\n{}", lark.text)
    }

    /// The rule of one tool's call.
    fn call(&self, lark: &mut Lark<'_>, name: &str, schema: &Value) -> String {
        let mark = |text: &str| marker(lark.tokenizer, text);
        let object = |name: &str, key: &str| literal(&format!("{{\"name\": {}, \"{key}\": ", json!(name)));
        let body = match self.dialect {
            Dialect::Hermes => {
                let (open, close) = (mark("<tool_call>"), mark("</tool_call>"));
                let arguments = json_rule(schema);
                format!("{open} \"\\n\" {} {arguments} \"}}\\n\" {close}", object(name, "arguments"))
            }
            Dialect::Llama => format!("{} {} \"}}\"", object(name, "parameters"), json_rule(schema)),
            Dialect::Mistral if lists_calls(lark.tokenizer) => {
                format!("{} {} \"}}\"", object(name, "arguments"), json_rule(schema))
            }
            Dialect::Mistral => {
                let (open, arguments) = (mark("[TOOL_CALLS]"), mark("[ARGS]"));
                format!("{open} {} {arguments} {}", literal(name), json_rule(schema))
            }
            Dialect::QwenXml => {
                let (open, close) = (mark("<tool_call>"), mark("</tool_call>"));
                let parameters = parameters(lark, schema, |lark, key, value| {
                    let value = value.unwrap_or_else(|| lark.text_until("\n</parameter>\n"));
                    let head = literal(&format!("<parameter={key}>\n"));
                    match value {
                        Written::Json(rule) => format!("{head} {rule} \"\\n</parameter>\\n\""),
                        Written::Text(rule) => format!("{head} {rule}"),
                    }
                });
                let head = literal(&format!("\n<function={name}>\n"));
                format!("{open} {head} {parameters} \"</function>\\n\" {close}")
            }
            Dialect::Glm => {
                let (open, close) = (mark("<tool_call>"), mark("</tool_call>"));
                let (key_open, key_close) = (mark("<arg_key>"), mark("</arg_key>"));
                let (value_open, value_close) = (mark("<arg_value>"), mark("</arg_value>"));
                let parameters = parameters(lark, schema, |lark, key, value| {
                    let value = value.unwrap_or_else(|| lark.text_before("</arg_value>"));
                    let head = format!("{key_open} {} {key_close} \"\\n\" {value_open}", literal(key));
                    match value {
                        Written::Json(rule) => format!("{head} {rule} {value_close} \"\\n\""),
                        Written::Text(rule) => format!("{head} {rule} \"\\n\""),
                    }
                });
                format!("{open} {} \"\\n\" {parameters} {close}", literal(name))
            }
            Dialect::MiniMax => {
                let parameters = parameters(lark, schema, |lark, key, value| {
                    let value = value.unwrap_or_else(|| lark.text_until("</parameter>\n"));
                    let head = literal(&format!("<parameter name=\"{key}\">"));
                    match value {
                        Written::Json(rule) => format!("{head} {rule} \"</parameter>\\n\""),
                        Written::Text(rule) => format!("{head} {rule}"),
                    }
                });
                let head = literal(&format!("<invoke name=\"{name}\">\n"));
                format!("{head} {parameters} \"</invoke>\"")
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

/// The parameters of a call in the dialects that write them one by one, in the order of the schema.
/// Text that is not an enumeration is free.
fn parameters(
    lark: &mut Lark<'_>,
    schema: &Value,
    one: impl Fn(&mut Lark<'_>, &str, Option<Written>) -> String,
) -> String {
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
    parts.join(" ")
}

/// A grammar under construction.
struct Lark<'a> {
    tokenizer: &'a Tokenizer,
    text: String,
    rules: usize,
}

impl Lark<'_> {
    /// Adds a rule and returns its name.
    fn rule(&mut self, body: &str) -> String {
        let name = format!("r{}", self.rules);
        self.rules += 1;
        self.text += &format!("{name}: {body}\n");
        name
    }

    /// Text up to and including `end`.
    fn text_until(&mut self, end: &str) -> Written {
        let name = format!("r{}", self.rules);
        self.rules += 1;
        self.text += &format!("{name}[suffix={}]: /(.|\\n)*/\n", literal(end));
        Written::Text(name)
    }

    /// Text up to and including a marker, which may be a special token.
    fn text_before(&mut self, end: &str) -> Written {
        match super::special(self.tokenizer, end) {
            Some(token) => {
                let name = self.rule("/(.|\\n)+/");
                Written::Text(format!("{name}? {token}"))
            }
            None => self.text_until(end),
        }
    }
}
