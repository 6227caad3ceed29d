//! Chat requests that are refused, and the form of messages.

use serde_json::{Map, Value, json};

use super::types::ChatFields;
use crate::error::ApiError;
use crate::schema::shown;

/// Refuses combinations that make no sense.
pub fn combinations(chat: &ChatFields) -> Result<(), ApiError> {
    match chat.top_logprobs.is_some_and(|top| top > 0) && chat.logprobs != Some(true) {
        true => Err(ApiError::param("top_logprobs", "needs logprobs: true")),
        false => Ok(()),
    }
}

/// Roles that every chat template may be given.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Checks the messages and brings them into the form that chat templates expect: text parts joined,
/// `developer` as `system`, the arguments of tool calls as objects. `prints` tells whether the
/// template knows another role.
pub fn messages(
    messages: Vec<Map<String, Value>>,
    prints: impl Fn(&str) -> bool,
) -> Result<Vec<Value>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::param("messages", "is empty: at least one message is needed"));
    }
    messages.into_iter().enumerate().map(|(index, message)| one_message(index, message, &prints)).collect()
}

fn one_message(
    index: usize,
    mut message: Map<String, Value>,
    prints: &impl Fn(&str) -> bool,
) -> Result<Value, ApiError> {
    let at = |field: &str| format!("messages[{index}].{field}");
    match message.get("role") {
        Some(Value::String(role)) if role == "developer" => {
            message.insert("role".to_owned(), json!("system"));
        }
        Some(Value::String(role)) if ROLES.contains(&role.as_str()) || prints(role) => {}
        Some(Value::String(role)) if !role.is_empty() => {
            let role = shown(&json!(role));
            let problem = format!(
                "must be one of {}, or one that the chat template knows, not {role}",
                ROLES.join(", ")
            );
            return Err(ApiError::param(at("role"), problem));
        }
        Some(other) => {
            return Err(ApiError::param(
                at("role"),
                format!("must be a string such as \"user\", not {}", shown(other)),
            ));
        }
        None => return Err(ApiError::param(at("role"), "is missing")),
    }
    let says = |name: &str| message.get(name).and_then(Value::as_str);
    if says("role") == Some("tool") && !message.contains_key("tool_call_id") {
        return Err(ApiError::param(at("tool_call_id"), "is missing: whose result is this?"));
    }
    // An answer may consist of calls or of a refusal, and a tool may have nothing to say.
    let may_be_empty = matches!(says("role"), Some("assistant" | "tool"));
    let refusal = says("refusal").unwrap_or_default().to_owned();
    match message.get("content") {
        Some(Value::String(_)) => {}
        None | Some(Value::Null) if may_be_empty => {
            message.insert("content".to_owned(), json!(refusal));
        }
        None | Some(Value::Null) => return Err(ApiError::param(at("content"), "is missing")),
        Some(Value::Array(parts)) => {
            let text = join_parts(index, parts)?;
            message.insert("content".to_owned(), Value::String(text));
        }
        Some(other) => {
            let problem = format!("must be a string or a list of text parts, not {}", shown(other));
            return Err(ApiError::param(at("content"), problem));
        }
    }
    for name in ["name", "tool_call_id", "reasoning_content"] {
        if let Some(other) = message.get(name).filter(|value| !value.is_string() && !value.is_null()) {
            return Err(ApiError::param(at(name), format!("must be a string, not {}", shown(other))));
        }
    }
    match message.get_mut("tool_calls") {
        None | Some(Value::Null) => {}
        Some(Value::Array(calls)) => {
            for (number, call) in calls.iter_mut().enumerate() {
                check_call(&at(&format!("tool_calls[{number}]")), call)?;
                parse_arguments(call);
            }
        }
        Some(other) => {
            let problem = format!("must be a list of calls, not {}", shown(other));
            return Err(ApiError::param(at("tool_calls"), problem));
        }
    }
    Ok(Value::Object(message))
}

fn check_call(at: &str, call: &Value) -> Result<(), ApiError> {
    let Value::Object(function) = &call["function"] else {
        return Err(ApiError::param(at, "must be an object with `id`, `type` and `function`"));
    };
    if !function.get("name").is_some_and(Value::is_string) {
        return Err(ApiError::param(format!("{at}.function.name"), "must be a string"));
    }
    match function.get("arguments") {
        None | Some(Value::Null | Value::String(_) | Value::Object(_)) => Ok(()),
        Some(other) => {
            let problem = format!("must be a string of JSON, not {}", shown(other));
            Err(ApiError::param(format!("{at}.function.arguments"), problem))
        }
    }
}

fn join_parts(index: usize, parts: &[Value]) -> Result<String, ApiError> {
    let texts: Result<Vec<&str>, ApiError> = parts
        .iter()
        .enumerate()
        .map(|(part_index, part)| {
            let param = || format!("messages[{index}].content[{part_index}]");
            if let Value::String(text) = part {
                return Ok(text.as_str());
            }
            let kind = part.get("type").and_then(Value::as_str);
            match (kind, part.get("text")) {
                (Some("refusal"), _) => part["refusal"]
                    .as_str()
                    .ok_or_else(|| ApiError::param(format!("{}.refusal", param()), "must be a string")),
                (Some("text" | "input_text" | "output_text"), Some(Value::String(text))) => Ok(text.as_str()),
                (Some("text" | "input_text" | "output_text"), _) => {
                    Err(ApiError::param(format!("{}.text", param()), "must be a string"))
                }
                (Some(kind), _) => {
                    let kind = shown(&Value::String(kind.to_owned()));
                    Err(ApiError::param(
                        param(),
                        format!("parts of type {kind} are not supported, only text is"),
                    ))
                }
                (None, _) => Err(ApiError::param(param(), "must be an object with `type` and `text`")),
            }
        })
        .collect();
    Ok(texts?.join("\n"))
}

/// OpenAI sends arguments as a string of JSON; templates print objects.
fn parse_arguments(call: &mut Value) {
    if let Some(arguments) = call.get_mut("function").and_then(|function| function.get_mut("arguments"))
        && let Value::String(text) = &*arguments
        && let Ok(parsed @ Value::Object(_)) = serde_json::from_str(text)
    {
        *arguments = parsed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(message: Value) -> Result<Value, String> {
        let Value::Object(message) = message else { panic!("not an object") };
        one_message(0, message, &|role: &str| role == "ipython").map_err(|error| match error {
            ApiError::Invalid { param, .. } => param.unwrap_or_default(),
            other => other.to_string(),
        })
    }

    #[test]
    fn messages_are_brought_into_template_form() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        assert_eq!(check(json!({"role": "user", "content": parts})).unwrap()["content"], "a\nb");
        assert_eq!(check(json!({"role": "developer", "content": "x"})).unwrap()["role"], "system");
        let call = json!({"role": "assistant", "content": null,
            "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": 1}"}}]});
        let message = check(call).unwrap();
        assert_eq!(message["tool_calls"][0]["function"]["arguments"]["a"], 1);
        assert_eq!(message["content"], "");
        for (message, content) in [
            (json!({"role": "assistant", "content": null}), ""),
            (json!({"role": "assistant"}), ""),
            (json!({"role": "assistant", "content": null, "refusal": "No."}), "No."),
            (json!({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}), "No."),
            (json!({"role": "tool", "tool_call_id": "c", "content": null}), ""),
            (json!({"role": "ipython", "content": "x"}), "x"),
        ] {
            assert_eq!(check(message).unwrap()["content"], content);
        }
    }

    #[test]
    fn wrong_messages_are_named() {
        let cases = [
            (json!({"content": "x"}), "messages[0].role"),
            (json!({"role": 1, "content": "x"}), "messages[0].role"),
            (json!({"role": "robot", "content": "x"}), "messages[0].role"),
            (json!({"role": "tool", "content": "x"}), "messages[0].tool_call_id"),
            (
                json!({"role": "assistant", "content": [{"type": "refusal"}]}),
                "messages[0].content[0].refusal",
            ),
            (json!({"role": "user"}), "messages[0].content"),
            (json!({"role": "user", "content": 5}), "messages[0].content"),
            (json!({"role": "user", "content": [{"type": "image_url"}]}), "messages[0].content[0]"),
            (json!({"role": "user", "content": [{"type": "text"}]}), "messages[0].content[0].text"),
            (json!({"role": "user", "content": [7]}), "messages[0].content[0]"),
            (json!({"role": "user", "content": "x", "name": 5}), "messages[0].name"),
            (json!({"role": "tool", "content": "x", "tool_call_id": []}), "messages[0].tool_call_id"),
            (json!({"role": "assistant", "content": "x", "tool_calls": "zz"}), "messages[0].tool_calls"),
            (json!({"role": "assistant", "tool_calls": ["zz"]}), "messages[0].tool_calls[0]"),
            (
                json!({"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}),
                "messages[0].tool_calls[0].function.name",
            ),
            (
                json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}),
                "messages[0].tool_calls[0].function.arguments",
            ),
        ];
        for (message, param) in cases {
            assert_eq!(check(message).unwrap_err(), param);
        }
    }
}
