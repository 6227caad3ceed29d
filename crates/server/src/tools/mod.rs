//! Tools of a request: what it offers, what it demands, and how the prompt shows it.

mod prompt;
mod structured;

use std::sync::Arc;

use oscar_text::{CallGrammar, Dialect, ToolSchemas};
use serde_json::{Map, Value, json};

pub use prompt::{describe, for_template, with_tools_in_text};
pub use structured::{FormFields, refuse_ignore_eos};

use crate::error::ApiError;
use crate::schema::shown;

/// Longest name of a tool, as OpenAI has it, and a margin for names with a server's name in front.
const MAX_NAME: usize = 128;

/// Most tools of a request.
const MAX_TOOLS: usize = 1024;

/// Which calls a request wants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model does not see the tools.
    None,
    #[default]
    Auto,
    /// The answer is one call or more.
    Required,
    /// The answer is a call of this tool.
    Named(String),
}

/// The tools of a request.
#[derive(Clone, Debug, Default)]
pub struct ToolUse {
    /// As OpenAI writes them; templates print them.
    tools: Vec<Value>,
    pub choice: ToolChoice,
    /// Several calls in one answer are allowed.
    pub parallel: bool,
}

impl ToolUse {
    /// Reads `tools`, `tool_choice` and `parallel_tool_calls`.
    pub fn read(
        tools: Option<&Value>,
        choice: Option<&Value>,
        parallel: Option<bool>,
    ) -> Result<Self, ApiError> {
        let tools = match tools {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(tools)) if tools.len() <= MAX_TOOLS => tools
                .iter()
                .enumerate()
                .map(|(index, tool)| one_tool(index, tool))
                .collect::<Result<_, _>>()?,
            Some(Value::Array(tools)) => {
                let problem = format!("{} tools are more than the {MAX_TOOLS} allowed", tools.len());
                return Err(ApiError::param("tools", problem));
            }
            Some(other) => {
                return Err(ApiError::param("tools", format!("must be a list, not {}", shown(other))));
            }
        };
        let read = Self { choice: tool_choice(choice)?, tools, parallel: parallel.unwrap_or(true) };
        match &read.choice {
            ToolChoice::Named(name) if read.find(name).is_none() => {
                Err(ApiError::param("tool_choice", format!("there is no tool named `{name}` in tools")))
            }
            ToolChoice::Required if read.tools.is_empty() => {
                Err(ApiError::param("tool_choice", "needs tools to choose from"))
            }
            _ => Ok(read),
        }
    }

    /// The tools that the model is shown; none if there are none or none are wanted.
    pub fn shown(&self) -> Option<Value> {
        (!self.tools.is_empty() && self.choice != ToolChoice::None).then(|| Value::Array(self.tools.clone()))
    }

    /// Whether the answer may hold calls.
    pub fn may_call(&self) -> bool {
        !self.tools.is_empty() && self.choice != ToolChoice::None
    }

    /// Whether the answer must consist of calls.
    pub fn must_call(&self) -> bool {
        matches!(self.choice, ToolChoice::Required | ToolChoice::Named(_))
    }

    /// The grammar of calls where any tool is strict and may be called. Arguments of the others are
    /// free.
    pub fn strict(&self, dialect: Dialect) -> Option<CallGrammar> {
        (self.may_call() && self.any_strict()).then(|| {
            let mut grammar = self.grammar(dialect);
            let free = grammar.tools.iter_mut().zip(&self.tools).filter(|(_, tool)| !is_strict(tool));
            free.for_each(|((_, schema), _)| *schema = Value::Null);
            grammar
        })
    }

    /// Whether the arguments of any tool must follow its schema.
    pub fn any_strict(&self) -> bool {
        self.tools.iter().any(is_strict)
    }

    pub fn schemas(&self) -> Arc<ToolSchemas> {
        Arc::new(ToolSchemas::from_openai(&self.tools))
    }

    /// The grammar of the calls that are allowed.
    pub fn grammar(&self, dialect: Dialect) -> CallGrammar {
        let allowed = |tool: &&Value| match &self.choice {
            ToolChoice::Named(name) => tool["function"]["name"] == name.as_str(),
            _ => true,
        };
        let entry = |tool: &Value| {
            let function = &tool["function"];
            (function["name"].as_str().unwrap_or_default().to_owned(), function["parameters"].clone())
        };
        CallGrammar {
            dialect,
            tools: self.tools.iter().filter(allowed).map(entry).collect(),
            // OpenAI answers a named choice with that one call.
            parallel: self.parallel && !matches!(self.choice, ToolChoice::Named(_)),
        }
    }

    fn find(&self, name: &str) -> Option<&Value> {
        self.tools.iter().find(|tool| tool["function"]["name"] == name)
    }
}

fn is_strict(tool: &Value) -> bool {
    tool["function"]["strict"] == true
}

fn one_tool(index: usize, tool: &Value) -> Result<Value, ApiError> {
    let at = |path: &str| format!("tools[{index}]{path}");
    match &tool["type"] {
        Value::String(kind) if kind == "function" => {}
        Value::Null if tool.get("function").is_some() => {}
        other => {
            let problem = match other {
                Value::Null => "is missing; use \"function\"".to_owned(),
                other => format!("{} is not supported, only \"function\" is", shown(other)),
            };
            return Err(ApiError::param(at(".type"), problem));
        }
    }
    let Value::Object(function) = &tool["function"] else {
        return Err(ApiError::param(at(".function"), "must be an object with `name` and `parameters`"));
    };
    match function.get("name") {
        Some(Value::String(name)) if valid_name(name) => {}
        Some(Value::String(_)) => {
            let problem = format!("must have 1 to {MAX_NAME} letters, digits or any of `_.:/-`");
            return Err(ApiError::param(at(".function.name"), problem));
        }
        _ => return Err(ApiError::param(at(".function.name"), "must be a string")),
    }
    match function.get("parameters") {
        None | Some(Value::Null | Value::Object(_)) => {}
        Some(other) => {
            let problem = format!("must be a JSON schema, not {}", shown(other));
            return Err(ApiError::param(at(".function.parameters"), problem));
        }
    }
    match function.get("strict") {
        None | Some(Value::Null | Value::Bool(_)) => {}
        Some(other) => {
            let problem = format!("must be true or false, not {}", shown(other));
            return Err(ApiError::param(at(".function.strict"), problem));
        }
    }
    // Templates and grammars expect a schema.
    let mut function = function.clone();
    if matches!(function.get("parameters"), None | Some(Value::Null)) {
        function.insert("parameters".to_owned(), json!({"type": "object", "properties": {}}));
    }
    Ok(json!({"type": "function", "function": function}))
}

fn valid_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
    (1..=MAX_NAME).contains(&name.len()) && name.chars().all(allowed)
}

fn tool_choice(choice: Option<&Value>) -> Result<ToolChoice, ApiError> {
    match choice {
        None | Some(Value::Null) => Ok(ToolChoice::Auto),
        Some(Value::String(choice)) if choice == "auto" => Ok(ToolChoice::Auto),
        Some(Value::String(choice)) if choice == "none" => Ok(ToolChoice::None),
        Some(Value::String(choice)) if choice == "required" || choice == "any" => Ok(ToolChoice::Required),
        Some(Value::Object(object)) if object.get("type").is_some_and(|kind| kind == "function") => {
            named(object).ok_or_else(|| ApiError::param("tool_choice.function.name", "must be a string"))
        }
        Some(other) => {
            let problem = format!(
                "{} is not supported; use \"none\", \"auto\", \"required\" or {{\"type\": \"function\", \"function\": {{\"name\": …}}}}",
                shown(other)
            );
            Err(ApiError::param("tool_choice", problem))
        }
    }
}

fn named(choice: &Map<String, Value>) -> Option<ToolChoice> {
    let name = choice.get("function").and_then(|function| function["name"].as_str());
    // The Responses API has the name one level up.
    let name = name.or_else(|| choice.get("name").and_then(Value::as_str))?;
    Some(ToolChoice::Named(name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn param(error: ApiError) -> String {
        match error {
            ApiError::Invalid { param, .. } => param.unwrap_or_default(),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn tools_are_read_and_wrong_ones_named() {
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        let read = |choice: Value| ToolUse::read(Some(&tools), Some(&choice), None);
        assert_eq!(read(json!("auto")).unwrap().choice, ToolChoice::Auto);
        assert!(!read(json!("none")).unwrap().may_call());
        assert!(read(json!("required")).unwrap().must_call());
        let named = read(json!({"type": "function", "function": {"name": "f"}})).unwrap();
        assert_eq!(named.grammar(Dialect::Hermes).tools[0].0, "f");
        assert!(!named.grammar(Dialect::Hermes).parallel);
        for (choice, name) in [
            (json!("sometimes"), "tool_choice"),
            (json!({"type": "function", "function": {"name": "g"}}), "tool_choice"),
            (json!({"type": "function"}), "tool_choice.function.name"),
            (json!({"type": "allowed_tools"}), "tool_choice"),
        ] {
            assert_eq!(param(read(choice).unwrap_err()), name);
        }
        for (tools, name) in [
            (json!({}), "tools"),
            (json!([{"type": "web_search"}]), "tools[0].type"),
            (json!([{"type": "function"}]), "tools[0].function"),
            (json!([{"type": "function", "function": {}}]), "tools[0].function.name"),
            (json!([{"type": "function", "function": {"name": "a b"}}]), "tools[0].function.name"),
            (
                json!([{"type": "function", "function": {"name": "a", "parameters": []}}]),
                "tools[0].function.parameters",
            ),
            (
                json!([{"type": "function", "function": {"name": "a", "strict": "yes"}}]),
                "tools[0].function.strict",
            ),
        ] {
            assert_eq!(param(ToolUse::read(Some(&tools), None, None).unwrap_err()), name);
        }
        assert_eq!(param(ToolUse::read(None, Some(&json!("required")), None).unwrap_err()), "tool_choice");
        assert!(ToolUse::read(None, None, None).unwrap().shown().is_none());
    }
}
