//! From a request in Anthropic's words to a chat request in OpenAI's.

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::refused;
use crate::routes::lowered::{Lowered, PassedOn};
use crate::schema::{Kind, request_fields, shown};

/// Claude Code begins its system prompt with a line that changes with every request. It says
/// nothing to the model and would keep the whole prompt out of the prefix cache.
const BILLING_HEADER: &str = "x-anthropic-billing-header:";

/// The fields of a request.
pub type MessagesBody = (MessagesFields, PassedOn);

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
        /// reasoning and answer together. `display`: `omitted` leaves the text of thinking blocks
        /// empty
        thinking: Option<Map<String, Value>>,
        /// `{"type": "json_schema", "schema": …}`
        output_format: Option<Value> = Kind::Object,
        /// `{"format": {"type": "json_schema", "schema": …}}`; `effort` is handed to the chat template
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
        user,
        /// Ignored
        service_tier,
        /// Ignored
        context_management,
    }
}

impl MessagesFields {
    /// Thinking blocks are wanted without their text.
    pub fn omits_thinking(&self) -> bool {
        self.thinking.as_ref().is_some_and(|thinking| thinking.get("display") == Some(&json!("omitted")))
    }

    /// The chat request of the same meaning. `counting`: only the prompt is wanted.
    pub fn into_chat(mut self, counting: bool) -> Result<Lowered, ApiError> {
        for (name, value) in [("mcp_servers", &self.mcp_servers), ("container", &self.container)] {
            if value.as_ref().is_some_and(|value| *value != json!([])) {
                return Err(ApiError::param(name, "is not supported"));
            }
        }
        let mut chat = Lowered::default();
        if self.max_tokens.is_none() && !counting {
            return Err(ApiError::param("max_tokens", "is missing"));
        }
        chat.set("max_completion_tokens", "max_tokens", self.max_tokens.map(Value::from));
        chat.set("model", "model", self.model.take());
        chat.set("stop", "stop_sequences", self.stop_sequences.take());
        chat.set("stream", "stream", self.stream.take());
        chat.set("temperature", "temperature", self.temperature.take());
        chat.set("top_p", "top_p", self.top_p.take());
        chat.set("top_k", "top_k", self.top_k.take());
        if let Some(thinking) = &self.thinking {
            chat.set("enable_thinking", "thinking", Some(Value::Bool(thinks(thinking)?)));
        }
        self.set_form(&mut chat)?;
        if let Some(choice) = &self.tool_choice {
            let (choice, single) = tool_choice(choice)?;
            chat.set("tool_choice", "tool_choice", Some(choice));
            chat.name("tool_choice.function", "tool_choice");
            let name = "tool_choice.disable_parallel_tool_use";
            chat.set("parallel_tool_calls", name, single.then_some(Value::Bool(false)));
        }
        let tools = self.tools.iter().flatten().enumerate().map(|(index, tool)| one_tool(index, tool));
        let tools: Vec<Value> = tools.collect::<Result<_, _>>()?;
        for index in 0..tools.len() {
            chat.name(format!("tools[{index}].function"), format!("tools[{index}]"));
            chat.name(format!("tools[{index}].function.parameters"), format!("tools[{index}].input_schema"));
        }
        chat.set("tools", "tools", (!tools.is_empty()).then_some(Value::Array(tools)));
        if let Some(system) = &self.system {
            let text = system_text(system)?;
            if !text.is_empty() {
                chat.message(json!({"role": "system", "content": text}), "system");
            }
        }
        for (index, message) in self.messages.into_iter().enumerate() {
            one_message(index, &Value::Object(message), &mut chat)?;
        }
        // A last message of the assistant is the beginning of the answer; an empty one is dropped.
        if let Some(last) = chat.last_message().filter(|last| last["role"] == "assistant")
            && last.get("tool_calls").is_none()
        {
            match last["content"].as_str().is_some_and(|text| !text.trim().is_empty()) {
                true => chat.set("continue_final_message", "messages", Some(Value::Bool(true))),
                false => chat.drop_last_message(),
            }
        }
        Ok(chat)
    }

    /// The form of the answer and the effort of reasoning.
    fn set_form(&mut self, chat: &mut Lowered) -> Result<(), ApiError> {
        chat.set("response_format", "output_format", self.output_format.take());
        for (name, value) in self.output_config.take().into_iter().flatten() {
            let param = format!("output_config.{name}");
            match name.as_str() {
                "format" if chat.has("response_format") && !value.is_null() => {
                    return Err(ApiError::param(
                        param,
                        "says the same as output_format: leave one of them out",
                    ));
                }
                "format" => {
                    chat.set("response_format", &param, Some(value));
                }
                "effort" => chat.set("reasoning_effort", &param, Some(value)),
                _ => refused::skip(),
            }
        }
        // Anthropic has the schema one level up.
        if let Some(name) = chat.name_of("response_format") {
            chat.name("response_format.json_schema", name);
        }
        Ok(())
    }
}

/// Whether the model may think.
fn thinks(thinking: &Map<String, Value>) -> Result<bool, ApiError> {
    match thinking.get("budget_tokens") {
        None | Some(Value::Null) => {}
        Some(budget) if Kind::AT_LEAST_ONE.accepts(budget) => refused::skip(),
        Some(other) => {
            let problem = format!("must be {}, not {}", Kind::AT_LEAST_ONE.expected(), shown(other));
            return Err(ApiError::param("thinking.budget_tokens", problem));
        }
    }
    match thinking.get("display") {
        None | Some(Value::Null) => {}
        // Thoughts are shown as they are.
        Some(Value::String(display)) if ["summarized", "omitted"].contains(&display.as_str()) => {}
        Some(other) => {
            let problem = format!("must be \"summarized\" or \"omitted\", not {}", shown(other));
            return Err(ApiError::param("thinking.display", problem));
        }
    }
    match thinking.get("type").and_then(Value::as_str) {
        Some("enabled" | "adaptive") => Ok(true),
        Some("disabled") => Ok(false),
        _ => {
            let problem = "must be \"enabled\", \"adaptive\" or \"disabled\"";
            Err(ApiError::param("thinking.type", problem))
        }
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

fn one_message(index: usize, message: &Value, chat: &mut Lowered) -> Result<(), ApiError> {
    let at = |path: &str| format!("messages[{index}]{path}");
    let role = match message["role"].as_str() {
        Some(role @ ("user" | "assistant" | "system")) => role,
        _ => return Err(ApiError::param(at(".role"), "must be \"user\" or \"assistant\"")),
    };
    let blocks = match &message["content"] {
        Value::String(text) => {
            chat.message(json!({"role": role, "content": text}), &at(""));
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
                chat.message(json!({"role": "tool", "tool_call_id": id, "content": content}), &param());
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
    chat.message(lowered, &at(""));
    Ok(())
}
