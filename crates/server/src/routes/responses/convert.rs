//! From a request of the Responses API to a chat request.

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::refused;
use crate::routes::lowered::{Lowered, PassedOn};
use crate::schema::{Kind, request_fields, shown};

/// Tools that OpenAI runs and agents offer unasked.
const SEARCHES: &[&str] = &["web_search", "web_search_preview"];

/// The fields of a request.
pub type ResponsesBody = (ResponsesFields, PassedOn);

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
        /// /v1/chat/completions. `web_search`, which runs at OpenAI, is left out where the model may
        /// choose its tools; the answer lists the tools that were offered
        pub tools: Option<Vec<Map<String, Value>>>,
        /// `auto`, `none`, `required`, or the function that must be called
        pub tool_choice: Option<Value>,
        /// False ends the answer with its first call; true if absent
        pub parallel_tool_calls: Option<bool>,
        /// `{"format": …}`: text, json_object or json_schema. `verbosity`: only `medium`
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
        /// What the answer should show beside its text: nothing that is kept here.
        /// `message.output_text.logprobs` is not supported
        pub include: Option<Vec<String>>,
        /// Repeated in the response
        pub metadata: Option<Value>,
        /// Repeated in the response
        pub user: Option<Value>,
    }
    ignored {
        /// Ignored: no response is kept
        store,
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
        for (name, value) in self.text.iter().flatten() {
            match (name.as_str(), value) {
                ("format", _) | (_, Value::Null) => {}
                ("verbosity", value) if value == "medium" => {}
                ("verbosity", _) => {
                    let problem = "is not supported; use \"medium\" and say it in the instructions";
                    return Err(ApiError::param("text.verbosity", problem));
                }
                _ => refused::skip(),
            }
        }
        let logprobs = "message.output_text.logprobs";
        match self.include.iter().flatten().position(|shown| shown == logprobs) {
            Some(index) => {
                let problem = format!("{logprobs} is not supported here; use /v1/chat/completions");
                Err(ApiError::param(format!("include[{index}]"), problem))
            }
            None => Ok(()),
        }
    }

    /// Tools that run at OpenAI are left out where the model need not call any.
    fn leaves_out(&self, tool: &Map<String, Value>) -> bool {
        let free = self.tool_choice.as_ref().is_none_or(|choice| choice == "auto" || choice == "none");
        free && tool.get("type").and_then(Value::as_str).is_some_and(|kind| SEARCHES.contains(&kind))
    }

    /// The tools that the model is offered.
    pub fn offered(&self) -> Vec<Map<String, Value>> {
        self.tools.iter().flatten().filter(|tool| !self.leaves_out(tool)).cloned().collect()
    }

    /// The chat request of the same meaning.
    pub fn to_chat(&self) -> Result<Lowered, ApiError> {
        self.refuse_unsupported()?;
        let mut chat = Lowered::default();
        chat.set("model", "model", self.model.clone());
        chat.set("max_completion_tokens", "max_output_tokens", self.max_output_tokens.map(Value::from));
        chat.name("max_tokens", "max_output_tokens");
        chat.set("temperature", "temperature", self.temperature.clone());
        chat.set("top_p", "top_p", self.top_p.clone());
        chat.set("tool_choice", "tool_choice", self.tool_choice.clone());
        chat.name("tool_choice.function", "tool_choice");
        let parallel = self.parallel_tool_calls.map(Value::Bool);
        chat.set("parallel_tool_calls", "parallel_tool_calls", parallel);
        chat.set("stream", "stream", self.stream.clone());
        let format = self.text.as_ref().and_then(|text| text.get("format").cloned());
        if format.as_ref().is_some_and(|format| !format.is_null()) {
            chat.name("response_format.json_schema", "text.format");
        }
        chat.set("response_format", "text.format", format);
        let effort = self.reasoning.as_ref().and_then(|reasoning| reasoning.get("effort").cloned());
        chat.set("reasoning_effort", "reasoning.effort", effort);
        let mut tools = Vec::new();
        for (index, tool) in self.tools.iter().flatten().enumerate() {
            match self.leaves_out(tool) {
                true => refused::skip(),
                false => add_tool(&format!("tools[{index}]"), tool, None, &mut tools, &mut chat)?,
            }
        }
        chat.set("tools", "tools", (!tools.is_empty()).then_some(Value::Array(tools)));
        self.add_messages(&mut chat)?;
        Ok(chat)
    }

    /// The names of all namespaces of functions.
    pub fn namespaces(&self) -> Vec<String> {
        let namespaces =
            self.tools.iter().flatten().filter(|tool| tool.get("type") == Some(&json!("namespace")));
        namespaces.filter_map(|tool| Some(tool.get("name")?.as_str()?.to_owned())).collect()
    }

    fn add_messages(&self, chat: &mut Lowered) -> Result<(), ApiError> {
        chat.name("messages", "input");
        if let Some(instructions) = &self.instructions {
            chat.message(json!({"role": "system", "content": instructions}), "instructions");
        }
        match &self.input {
            Value::String(text) => chat.message(json!({"role": "user", "content": text}), "input"),
            Value::Array(items) if items.is_empty() => {
                return Err(ApiError::param("input", "is empty: at least one item is needed"));
            }
            Value::Array(items) => {
                for (index, item) in items.iter().enumerate() {
                    add_item(&format!("input[{index}]"), item, chat)?;
                }
            }
            other => {
                let problem = format!("must be a string or a list of items, not {}", shown(other));
                return Err(ApiError::param("input", problem));
            }
        }
        Ok(())
    }
}

/// Adds an item of the input, which is at `at`. The items of one answer become one message.
fn add_item(at: &str, item: &Value, chat: &mut Lowered) -> Result<(), ApiError> {
    let text = |name: &str| {
        let param = format!("{at}.{name}");
        item[name].as_str().ok_or_else(|| ApiError::param(param, "must be a string"))
    };
    match item["type"].as_str() {
        None | Some("message") => {
            let role = text("role")?;
            let content = match &item["content"] {
                Value::Null => return Err(ApiError::param(format!("{at}.content"), "is missing")),
                content => content.clone(),
            };
            match role {
                "assistant" => {
                    let old = add_content(answer(chat, at), content);
                    for part in 0..item["content"].as_array().map_or(0, Vec::len) {
                        let path = format!(".content[{}]", old + part);
                        chat.name_in_message(&path, &format!("{at}.content[{part}]"));
                    }
                }
                _ => chat.message(json!({"role": role, "content": content}), at),
            }
        }
        Some("function_call") => {
            let name = in_namespace(item["namespace"].as_str(), text("name")?);
            let function = json!({"name": name, "arguments": text("arguments")?});
            let call = json!({"id": text("call_id")?, "type": "function", "function": function});
            match &mut answer(chat, at)["tool_calls"] {
                Value::Array(calls) => calls.push(call),
                none => *none = json!([call]),
            }
        }
        Some("function_call_output") => {
            let (id, output) = (text("call_id")?, item["output"].clone());
            if output.is_null() {
                return Err(ApiError::param(format!("{at}.output"), "is missing"));
            }
            chat.message(json!({"role": "tool", "tool_call_id": id, "content": output}), at);
            chat.name_in_message(".content", &format!("{at}.output"));
        }
        Some("reasoning") => {
            let parts = item["content"].as_array().into_iter().flatten();
            let thought: String = parts.filter_map(|part| part["text"].as_str()).collect();
            if !thought.is_empty() {
                // Reasoning opens an answer.
                let message = json!({"role": "assistant", "content": "", "reasoning_content": thought});
                chat.message(message, at);
            }
        }
        Some(kind) => {
            let problem = format!("items of type \"{kind}\" are not supported");
            return Err(ApiError::param(format!("{at}.type"), problem));
        }
    }
    Ok(())
}

/// The answer that is being put together; a new one, for the item at `at`, if the last message is
/// none.
fn answer<'a>(chat: &'a mut Lowered, at: &str) -> &'a mut Value {
    if !chat.last_message().is_some_and(|last| last["role"] == "assistant") {
        chat.message(json!({"role": "assistant", "content": ""}), at);
    }
    chat.last_message().expect("the last message is the assistant's")
}

/// Adds what an item says to the answer, below what it has: agents send a comment and the final text
/// as two items. Returns the number of parts that stood before.
fn add_content(answer: &mut Value, content: Value) -> usize {
    let (content, old) = match (answer["content"].take(), content) {
        (Value::String(text), content) if text.is_empty() => (content, 0),
        (old, Value::String(text)) if text.is_empty() => (old, 0),
        // Text parts of a message are joined with a line break.
        (old, new) => {
            let parts = |content: Value| match content {
                Value::Array(parts) => parts,
                text => vec![text],
            };
            let (old, new) = (parts(old), parts(new));
            let count = old.len();
            (Value::Array([old, new].concat()), count)
        }
    };
    answer["content"] = content;
    old
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
    chat: &mut Lowered,
) -> Result<(), ApiError> {
    match (tool.get("type").and_then(Value::as_str), namespace) {
        (Some("function"), _) => {
            let mut function = tool.clone();
            function.remove("type");
            if let (Some(_), Some(Value::String(name))) = (namespace, function.get_mut("name")) {
                *name = in_namespace(namespace, name);
            }
            chat.name(format!("tools[{}].function", tools.len()), at);
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
                add_tool(&at, tool, Some(name), tools, chat)?;
            }
            Ok(())
        }
        (Some(kind), _) if SEARCHES.contains(&kind) => {
            let problem = format!("{kind} runs at OpenAI, not here, so it cannot be demanded: leave it out");
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
