//! From a request of the Responses API to a chat request.

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::schema::{Kind, request_fields, shown};

/// The fields of a request.
pub type ResponsesBody = (ResponsesFields,);

request_fields! {
    /// The fields of `/v1/responses`.
    pub struct ResponsesFields {
        /// Name of the model or one of its aliases; the served one if absent
        pub model: Option<Value>,
        /// Text, or a list of messages, function calls, their outputs and reasoning. Text parts of
        /// a message are joined with a line break
        pub input: Value = Kind::Any,
        /// The system prompt
        pub instructions: Option<String>,
        /// Most tokens of the answer; shortened to the rest of the context
        pub max_output_tokens: Option<usize> = Kind::AT_LEAST_ONE,
        /// 0 picks the most likely token
        pub temperature: Option<Value>,
        /// Keep the smallest set of tokens whose probability reaches this
        pub top_p: Option<Value>,
        /// Functions that the model may call, and namespaces of functions; `strict` as in
        /// /v1/chat/completions
        pub tools: Option<Vec<Map<String, Value>>>,
        /// `auto`, `none`, `required`, or the function that must be called
        pub tool_choice: Option<Value>,
        /// False ends the answer with its first call; true if absent
        pub parallel_tool_calls: Option<bool>,
        /// `{"format": …}`: text, json_object or json_schema
        pub text: Option<Map<String, Value>>,
        /// `effort` is handed to the chat template
        pub reasoning: Option<Map<String, Value>>,
        /// Answer as server-sent events
        pub stream: Option<Value>,
        /// Not supported: no response is kept
        pub previous_response_id: Option<Value>,
        /// Not supported: no conversation is kept
        pub conversation: Option<Value>,
        /// Only false
        pub background: Option<Value>,
        /// Only `disabled`
        pub truncation: Option<Value>,
        /// Only 0
        pub top_logprobs: Option<Value>,
        /// Not supported
        pub max_tool_calls: Option<Value>,
        /// Not supported
        pub prompt: Option<Value>,
    }
    ignored {
        /// Ignored: no response is kept
        store,
        /// Ignored
        metadata,
        /// Ignored
        user,
        /// Ignored
        include,
        /// Ignored
        service_tier,
        /// Ignored
        prompt_cache_key,
        /// Ignored
        safety_identifier,
    }
}

impl ResponsesFields {
    /// Refuses state that is not kept and settings that nothing here follows.
    fn refuse_unsupported(&self) -> Result<(), ApiError> {
        let stateless = "is not supported: responses are not kept; send the whole conversation as input";
        let refused = [
            ("previous_response_id", &self.previous_response_id, json!(null), stateless),
            ("conversation", &self.conversation, json!(null), stateless),
            ("background", &self.background, json!(false), "is not supported"),
            ("truncation", &self.truncation, json!("disabled"), "is not supported; use \"disabled\""),
            ("top_logprobs", &self.top_logprobs, json!(0), "is not supported here; use /v1/chat/completions"),
            ("max_tool_calls", &self.max_tool_calls, json!(null), "is not supported"),
            ("prompt", &self.prompt, json!(null), "is not supported; send instructions and input"),
        ];
        for (name, value, harmless, problem) in refused {
            if value.as_ref().is_some_and(|value| *value != harmless) {
                return Err(ApiError::param(name, problem));
            }
        }
        Ok(())
    }

    /// The chat request of the same meaning.
    pub fn to_chat(&self) -> Result<Map<String, Value>, ApiError> {
        self.refuse_unsupported()?;
        let mut chat = Map::new();
        let mut set = |name: &str, value: Option<Value>| {
            if let Some(value) = value.filter(|value| !value.is_null()) {
                chat.insert(name.to_owned(), value);
            }
        };
        set("model", self.model.clone());
        set("max_completion_tokens", self.max_output_tokens.map(Value::from));
        set("temperature", self.temperature.clone());
        set("top_p", self.top_p.clone());
        set("tool_choice", self.tool_choice.clone());
        set("parallel_tool_calls", self.parallel_tool_calls.map(Value::Bool));
        set("stream", self.stream.clone());
        set("response_format", self.text.as_ref().and_then(|text| text.get("format").cloned()));
        set(
            "reasoning_effort",
            self.reasoning.as_ref().and_then(|reasoning| reasoning.get("effort").cloned()),
        );
        let mut tools = Vec::new();
        for (index, tool) in self.tools.iter().flatten().enumerate() {
            add_tool(&format!("tools[{index}]"), tool, None, &mut tools)?;
        }
        set("tools", (!tools.is_empty()).then_some(Value::Array(tools)));
        set("messages", Some(Value::Array(self.messages()?)));
        Ok(chat)
    }

    /// The names of all namespaces of functions.
    pub fn namespaces(&self) -> Vec<String> {
        let namespaces =
            self.tools.iter().flatten().filter(|tool| tool.get("type") == Some(&json!("namespace")));
        namespaces.filter_map(|tool| Some(tool.get("name")?.as_str()?.to_owned())).collect()
    }

    fn messages(&self) -> Result<Vec<Value>, ApiError> {
        let mut messages = Messages::default();
        if let Some(instructions) = &self.instructions {
            messages.list.push(json!({"role": "system", "content": instructions}));
        }
        match &self.input {
            Value::String(text) => messages.list.push(json!({"role": "user", "content": text})),
            Value::Array(items) if items.is_empty() => {
                return Err(ApiError::param("input", "is empty: at least one item is needed"));
            }
            Value::Array(items) => {
                for (index, item) in items.iter().enumerate() {
                    messages.item(index, item)?;
                }
            }
            other => {
                let problem = format!("must be a string or a list of items, not {}", shown(other));
                return Err(ApiError::param("input", problem));
            }
        }
        Ok(messages.list)
    }
}

/// Messages in the making: the items of one answer become one message.
#[derive(Default)]
struct Messages {
    list: Vec<Value>,
}

impl Messages {
    fn item(&mut self, index: usize, item: &Value) -> Result<(), ApiError> {
        let text = |name: &str| {
            let param = format!("input[{index}].{name}");
            item[name].as_str().ok_or_else(|| ApiError::param(param, "must be a string"))
        };
        match item["type"].as_str() {
            None | Some("message") => {
                let role = text("role")?;
                let content = match &item["content"] {
                    Value::Null => {
                        return Err(ApiError::param(format!("input[{index}].content"), "is missing"));
                    }
                    content => content.clone(),
                };
                match role {
                    "assistant" => add_content(self.answer(), content),
                    _ => self.list.push(json!({"role": role, "content": content})),
                }
            }
            Some("function_call") => {
                let name = in_namespace(item["namespace"].as_str(), text("name")?);
                let function = json!({"name": name, "arguments": text("arguments")?});
                let call = json!({"id": text("call_id")?, "type": "function", "function": function});
                match &mut self.answer()["tool_calls"] {
                    Value::Array(calls) => calls.push(call),
                    none => *none = json!([call]),
                }
            }
            Some("function_call_output") => {
                let (id, output) = (text("call_id")?, item["output"].clone());
                self.list.push(json!({"role": "tool", "tool_call_id": id, "content": output}));
            }
            Some("reasoning") => {
                let parts = item["content"].as_array().into_iter().flatten();
                let thought: String = parts.filter_map(|part| part["text"].as_str()).collect();
                if !thought.is_empty() {
                    // Reasoning opens an answer.
                    let message = json!({"role": "assistant", "content": "", "reasoning_content": thought});
                    self.list.push(message);
                }
            }
            Some(kind) => {
                let problem = format!("items of type \"{kind}\" are not supported");
                return Err(ApiError::param(format!("input[{index}].type"), problem));
            }
        }
        Ok(())
    }

    /// The answer that is being put together; a new one if the last message is none.
    fn answer(&mut self) -> &mut Value {
        let is_answer = self.list.last().is_some_and(|last| last["role"] == "assistant");
        if !is_answer {
            self.list.push(json!({"role": "assistant", "content": ""}));
        }
        let last = self.list.len() - 1;
        &mut self.list[last]
    }
}

/// Adds what an item says to the answer, below what it has: agents send a comment and the final text
/// as two items.
fn add_content(answer: &mut Value, content: Value) {
    let content = match (answer["content"].take(), content) {
        (Value::String(text), content) if text.is_empty() => content,
        (old, Value::String(text)) if text.is_empty() => old,
        // Text parts of a message are joined with a line break.
        (old, new) => {
            let parts = |content: Value| match content {
                Value::Array(parts) => parts,
                text => vec![text],
            };
            Value::Array([parts(old), parts(new)].concat())
        }
    };
    answer["content"] = content;
}

/// The name of a function that the model sees: behind its namespace, if it has one.
fn in_namespace(namespace: Option<&str>, name: &str) -> String {
    namespace.map_or_else(|| name.to_owned(), |namespace| format!("{namespace}.{name}"))
}

/// Adds a function, or the functions of a namespace, which Codex sends.
fn add_tool(
    at: &str,
    tool: &Map<String, Value>,
    namespace: Option<&str>,
    tools: &mut Vec<Value>,
) -> Result<(), ApiError> {
    match (tool.get("type").and_then(Value::as_str), namespace) {
        (Some("function"), _) => {
            let mut function = tool.clone();
            function.remove("type");
            if let (Some(_), Some(Value::String(name))) = (namespace, function.get_mut("name")) {
                *name = in_namespace(namespace, name);
            }
            tools.push(json!({"type": "function", "function": function}));
            Ok(())
        }
        (Some("namespace"), None) => {
            let Some(name) = tool.get("name").and_then(Value::as_str) else {
                return Err(ApiError::param(format!("{at}.name"), "must be a string"));
            };
            let Some(Value::Array(inner)) = tool.get("tools") else {
                return Err(ApiError::param(format!("{at}.tools"), "must be a list of functions"));
            };
            for (index, tool) in inner.iter().enumerate() {
                let at = format!("{at}.tools[{index}]");
                let Value::Object(tool) = tool else {
                    return Err(ApiError::param(at, "must be an object"));
                };
                add_tool(&at, tool, Some(name), tools)?;
            }
            Ok(())
        }
        (Some(kind @ ("web_search" | "web_search_preview")), _) => {
            let problem =
                format!("{kind} runs at OpenAI, not here: switch it off (Codex: `-c web_search=disabled`)");
            Err(ApiError::param(format!("{at}.type"), problem))
        }
        (kind, _) => {
            let problem = match kind {
                Some(kind) => format!("{kind} is not supported; use \"function\" or \"namespace\""),
                None => "is missing; use \"function\" or \"namespace\"".to_owned(),
            };
            Err(ApiError::param(format!("{at}.type"), problem))
        }
    }
}
