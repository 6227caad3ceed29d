//! From a request in Anthropic's words to a chat request in OpenAI's.

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::refused;
use crate::schema::{Kind, request_fields, shown};

/// Claude Code begins its system prompt with a line that changes with every request. It says
/// nothing to the model and would keep the whole prompt out of the prefix cache.
const BILLING_HEADER: &str = "x-anthropic-billing-header:";

/// The fields of a request.
pub type MessagesBody = (MessagesFields,);

request_fields! {
    /// The fields of `/v1/messages`.
    pub struct MessagesFields {
        /// Name of the model or one of its aliases; the served one if absent
        model: Option<Value>,
        /// The conversation: text, thinking, tool_use and tool_result blocks. Text blocks of a
        /// message are joined with a line break. If the last message is the assistant's, the answer
        /// continues it
        messages: Vec<Map<String, Value>>,
        /// Most tokens of the answer; shortened to the rest of the context
        max_tokens: Option<usize> = Kind::AT_LEAST_ONE,
        /// The system prompt: text or text blocks
        system: Option<Value>,
        /// Text that ends the answer
        stop_sequences: Option<Value>,
        /// Answer as server-sent events
        stream: Option<Value>,
        /// 0 picks the most likely token
        temperature: Option<Value>,
        /// Keep the smallest set of tokens whose probability reaches this
        top_p: Option<Value>,
        /// Keep the k most likely tokens
        top_k: Option<Value>,
        /// Tools with `name`, `description` and `input_schema`; `strict` as in /v1/chat/completions
        tools: Option<Vec<Map<String, Value>>>,
        /// `{"type": "auto" | "any" | "tool" | "none"}`
        tool_choice: Option<Map<String, Value>>,
        /// `{"type": "enabled" | "adaptive" | "disabled"}`. `budget_tokens` is accepted, not
        /// enforced and counted in `oscar_unknown_request_fields_total`; `max_tokens` limits
        /// reasoning and answer together
        thinking: Option<Map<String, Value>>,
        /// `{"type": "json_schema", "schema": …}`
        output_format: Option<Value> = Kind::Object,
        /// `{"format": {"type": "json_schema", "schema": …}}`
        output_config: Option<Map<String, Value>>,
        /// Not supported
        mcp_servers: Option<Value>,
        /// Not supported
        container: Option<Value>,
    }
    ignored {
        /// Ignored
        metadata,
        /// Ignored
        service_tier,
        /// Ignored
        context_management,
    }
}

impl MessagesFields {
    /// The chat request of the same meaning. `counting`: only the prompt is wanted.
    pub fn into_chat(self, counting: bool) -> Result<Map<String, Value>, ApiError> {
        for (name, value) in [("mcp_servers", &self.mcp_servers), ("container", &self.container)] {
            if value.as_ref().is_some_and(|value| *value != json!([])) {
                return Err(ApiError::param(name, "is not supported"));
            }
        }
        let mut chat = Map::new();
        let mut set = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                chat.insert(name.to_owned(), value);
            }
        };
        if self.max_tokens.is_none() && !counting {
            return Err(ApiError::param("max_tokens", "is missing"));
        }
        set("max_completion_tokens", self.max_tokens.map(Value::from));
        set("model", self.model);
        set("stop", self.stop_sequences);
        set("stream", self.stream);
        set("temperature", self.temperature);
        set("top_p", self.top_p);
        set("top_k", self.top_k);
        if let Some(thinking) = &self.thinking {
            let enabled = match thinking.get("type").and_then(Value::as_str) {
                Some("enabled" | "adaptive") => true,
                Some("disabled") => false,
                _ => {
                    let problem = "must be \"enabled\", \"adaptive\" or \"disabled\"";
                    return Err(ApiError::param("thinking.type", problem));
                }
            };
            match thinking.get("budget_tokens") {
                None | Some(Value::Null) => {}
                Some(budget) if Kind::AT_LEAST_ONE.accepts(budget) => refused::skip(),
                Some(other) => {
                    let problem = format!("must be {}, not {}", Kind::AT_LEAST_ONE.expected(), shown(other));
                    return Err(ApiError::param("thinking.budget_tokens", problem));
                }
            }
            set("enable_thinking", Some(Value::Bool(enabled)));
        }
        let format = self.output_format.or_else(|| self.output_config?.remove("format"));
        set("response_format", format.filter(|format| !format.is_null()));
        if let Some(choice) = &self.tool_choice {
            let (choice, single) = tool_choice(choice)?;
            set("tool_choice", Some(choice));
            set("parallel_tool_calls", single.then_some(Value::Bool(false)));
        }
        let tools = self.tools.iter().flatten().enumerate().map(|(index, tool)| one_tool(index, tool));
        let tools: Vec<Value> = tools.collect::<Result<_, _>>()?;
        set("tools", (!tools.is_empty()).then_some(Value::Array(tools)));
        let mut messages = Vec::new();
        if let Some(system) = &self.system {
            let text = system_text(system)?;
            if !text.is_empty() {
                messages.push(json!({"role": "system", "content": text}));
            }
        }
        for (index, message) in self.messages.into_iter().enumerate() {
            one_message(index, &Value::Object(message), &mut messages)?;
        }
        // A last message of the assistant is the beginning of the answer; an empty one is dropped.
        if let Some(last) = messages.last().filter(|last| last["role"] == "assistant")
            && last.get("tool_calls").is_none()
        {
            match last["content"].as_str().is_some_and(|text| !text.trim().is_empty()) {
                true => set("continue_final_message", Some(Value::Bool(true))),
                false => drop(messages.pop()),
            }
        }
        set("messages", Some(Value::Array(messages)));
        Ok(chat)
    }
}

fn system_text(system: &Value) -> Result<String, ApiError> {
    let texts: Vec<&str> = match system {
        Value::String(text) => vec![text],
        Value::Array(blocks) => blocks
            .iter()
            .enumerate()
            .map(|(index, block)| {
                let text = block["text"].as_str().filter(|_| block["type"] == "text");
                text.ok_or_else(|| ApiError::param(format!("system[{index}]"), "must be a text block"))
            })
            .collect::<Result<_, _>>()?,
        other => {
            let problem = format!("must be a string or text blocks, not {}", shown(other));
            return Err(ApiError::param("system", problem));
        }
    };
    let kept: Vec<&str> = texts.into_iter().filter_map(without_billing).collect();
    Ok(kept.join("\n"))
}

/// A text of the system prompt without the billing line that it may begin with; none if nothing
/// else is in it. Gateways join the line and the prompt into one text.
fn without_billing(text: &str) -> Option<&str> {
    if !text.starts_with(BILLING_HEADER) {
        return Some(text);
    }
    let (_, rest) = text.split_once('\n')?;
    (!rest.is_empty()).then_some(rest)
}

fn tool_choice(choice: &Map<String, Value>) -> Result<(Value, bool), ApiError> {
    let single = choice.get("disable_parallel_tool_use").is_some_and(|single| single == true);
    let lowered = match choice.get("type").and_then(Value::as_str) {
        Some("auto") => json!("auto"),
        Some("none") => json!("none"),
        Some("any") => json!("required"),
        Some("tool") => json!({"type": "function", "function": {"name": choice.get("name")}}),
        _ => return Err(ApiError::param("tool_choice.type", "must be auto, any, tool or none")),
    };
    Ok((lowered, single))
}

fn one_tool(index: usize, tool: &Map<String, Value>) -> Result<Value, ApiError> {
    match tool.get("type") {
        None | Some(Value::Null) => {}
        Some(kind) if kind == "custom" => {}
        Some(other) => {
            let problem = format!("{} is not supported, only custom tools are", shown(other));
            return Err(ApiError::param(format!("tools[{index}].type"), problem));
        }
    }
    let mut function = Map::new();
    let fields = [
        ("name", "name"),
        ("description", "description"),
        ("input_schema", "parameters"),
        ("strict", "strict"),
    ];
    for (from, to) in fields {
        if let Some(value) = tool.get(from) {
            function.insert(to.to_owned(), value.clone());
        }
    }
    Ok(json!({"type": "function", "function": function}))
}

fn one_message(index: usize, message: &Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let at = |path: &str| format!("messages[{index}]{path}");
    let role = match message["role"].as_str() {
        Some(role @ ("user" | "assistant" | "system")) => role,
        _ => return Err(ApiError::param(at(".role"), "must be \"user\" or \"assistant\"")),
    };
    let blocks = match &message["content"] {
        Value::String(text) => {
            messages.push(json!({"role": role, "content": text}));
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        other => {
            let problem = format!("must be a string or a list of blocks, not {}", shown(other));
            return Err(ApiError::param(at(".content"), problem));
        }
    };
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (part, block) in blocks.iter().enumerate() {
        let param = || at(&format!(".content[{part}]"));
        let text = |name: &str| {
            let problem = format!("must have a string `{name}`");
            block[name].as_str().ok_or_else(|| ApiError::param(param(), problem))
        };
        match (role, block["type"].as_str()) {
            (_, Some("text")) => texts.push(text("text")?),
            (_, Some("thinking")) => thoughts.push(text("thinking")?),
            (_, Some("redacted_thinking")) => {}
            ("assistant", Some("tool_use")) => {
                let arguments = block["input"].to_string();
                let function = json!({"name": text("name")?, "arguments": arguments});
                calls.push(json!({"id": text("id")?, "type": "function", "function": function}));
            }
            ("user", Some("tool_result")) => {
                let content = match &block["content"] {
                    Value::Null => json!(""),
                    content => content.clone(),
                };
                let id = text("tool_use_id")?;
                messages.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
            }
            (_, kind) => {
                let kind = kind.map_or("without a type".to_owned(), |kind| format!("of type \"{kind}\""));
                let problem = format!("blocks {kind} are not supported in a message of the {role}");
                return Err(ApiError::param(param(), problem));
            }
        }
    }
    if texts.is_empty() && calls.is_empty() && role == "user" {
        return Ok(());
    }
    let mut lowered = json!({"role": role, "content": texts.join("\n")});
    if !thoughts.is_empty() {
        lowered["reasoning_content"] = json!(thoughts.join("\n"));
    }
    if !calls.is_empty() {
        lowered["tool_calls"] = Value::Array(calls);
    }
    messages.push(lowered);
    Ok(())
}
