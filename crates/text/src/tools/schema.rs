//! What the request's tools say of their parameters, as far as a parser needs it.

use std::collections::HashMap;

use serde_json::Value;

/// References followed inside a parameter's schema.
const MAX_REFERENCES: usize = 8;

/// Names and parameter types of the tools of one request.
#[derive(Clone, Debug, Default)]
pub struct ToolSchemas {
    tools: HashMap<String, HashMap<String, Types>>,
}

/// JSON types that a parameter may have. No type at all means that the schema does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Types(u8);

impl Types {
    const STRING: Self = Self(1);

    fn named(name: &str) -> Self {
        match name {
            "string" => Self::STRING,
            "integer" | "number" => Self(2),
            "boolean" => Self(4),
            "null" => Self(8),
            "array" => Self(16),
            "object" => Self(32),
            _ => Self(0),
        }
    }

    pub fn of(value: &Value) -> Self {
        Self::named(match value {
            Value::String(_) => "string",
            Value::Number(_) => "number",
            Value::Bool(_) => "boolean",
            Value::Null => "null",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        })
    }

    fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The value is text and nothing else.
    pub fn only_string(self) -> bool {
        self == Self::STRING
    }

    /// Whether a value of type `other` is allowed. Everything but text is where the schema does not
    /// say: text needs no quotes in the dialects that ask.
    pub fn allows(self, other: Self) -> bool {
        if self.0 == 0 { other != Self::STRING } else { self.0 & other.0 != 0 }
    }
}

impl ToolSchemas {
    /// Reads a list of tools as OpenAI writes them: `{"type": "function", "function": {"name",
    /// "parameters"}}`.
    pub fn from_openai(tools: &[Value]) -> Self {
        let entry = |tool: &Value| -> Option<(String, HashMap<String, Types>)> {
            let function = &tool["function"];
            let schema = &function["parameters"];
            let types = schema["properties"]
                .as_object()
                .map(|properties| {
                    let of = |property| types(schema, property, MAX_REFERENCES);
                    properties.iter().map(|(name, property)| (name.clone(), of(property))).collect()
                })
                .unwrap_or_default();
            Some((function["name"].as_str()?.to_owned(), types))
        };
        Self { tools: tools.iter().filter_map(entry).collect() }
    }

    pub fn is_empty(&self) -> bool {
        self.tools.is_empty()
    }

    pub fn contains(&self, name: &str) -> bool {
        self.tools.contains_key(name)
    }

    pub(super) fn types(&self, tool: &str, parameter: &str) -> Types {
        self.tools.get(tool).and_then(|tool| tool.get(parameter)).copied().unwrap_or_default()
    }
}

/// The types a schema allows.
fn types(root: &Value, schema: &Value, references: usize) -> Types {
    if let Some(reference) = schema["$ref"].as_str() {
        let target = reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
        return match (target, references) {
            (Some(target), 1..) => types(root, target, references - 1),
            _ => Types::default(),
        };
    }
    match &schema["type"] {
        Value::String(name) => return Types::named(name),
        Value::Array(names) => {
            return names.iter().filter_map(Value::as_str).map(Types::named).fold(Types(0), Types::or);
        }
        _ => {}
    }
    for key in ["anyOf", "oneOf"] {
        if let (Value::Array(options), 1..) = (&schema[key], references) {
            let options: Vec<Types> =
                options.iter().map(|option| types(root, option, references - 1)).collect();
            // An option that does not say leaves everything open.
            return match options.contains(&Types(0)) {
                true => Types(0),
                false => options.into_iter().fold(Types(0), Types::or),
            };
        }
    }
    if let Value::Array(values) = &schema["enum"] {
        return values.iter().map(Types::of).fold(Types(0), Types::or);
    }
    schema.get("const").map_or(Types(0), Types::of)
}
