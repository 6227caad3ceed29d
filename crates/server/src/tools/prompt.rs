//! Tools and calls in the messages that a chat template prints.

use oscar_text::Dialect;
use serde_json::{Value, json};

/// Length of the call ids that templates of Mistral models demand.
const MISTRAL_ID: usize = 9;

/// Brings messages into the form that the template of a dialect expects.
pub fn for_template(messages: &mut Vec<Value>, dialect: Option<Dialect>) {
    for message in messages.iter_mut() {
        // Some clients send the reasoning back under the name that newer servers give it.
        if message.get("reasoning_content").is_none()
            && let Some(reasoning) =
                message.get("reasoning").filter(|reasoning| reasoning.is_string()).cloned()
        {
            message["reasoning_content"] = reasoning;
        }
        if dialect == Some(Dialect::Mistral) {
            shorten_id(message.get_mut("tool_call_id"));
            for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
                shorten_id(call.get_mut("id"));
            }
        }
    }
    if dialect == Some(Dialect::Harmony) {
        *messages = one_call_each(std::mem::take(messages));
        messages.iter_mut().for_each(with_thinking);
    }
}

/// The template of gpt-oss prints one call of a message, and takes the results after it for that
/// call's. A message with several becomes several, each with its result.
fn one_call_each(messages: Vec<Value>) -> Vec<Value> {
    let mut split = Vec::with_capacity(messages.len());
    let mut rest = messages.into_iter().peekable();
    while let Some(mut message) = rest.next() {
        let calls = match message.get_mut("tool_calls").map(Value::take) {
            Some(Value::Array(calls)) if !calls.is_empty() => calls,
            other => {
                // The template takes the field itself for a call.
                if let (Some(_), Value::Object(members)) = (other, &mut message) {
                    members.shift_remove("tool_calls");
                }
                split.push(message);
                continue;
            }
        };
        let mut results = Vec::new();
        while calls.len() > 1 && rest.peek().is_some_and(|next| next["role"] == "tool") {
            results.extend(rest.next());
        }
        for (index, call) in calls.into_iter().enumerate() {
            let id = call["id"].clone();
            match index {
                0 => message["tool_calls"] = json!([call]),
                _ => message = json!({"role": "assistant", "content": "", "tool_calls": [call]}),
            }
            split.push(message.clone());
            let own = |result: &Value| !id.is_null() && result["tool_call_id"] == id;
            if let Some(at) = results.iter().position(own) {
                split.push(results.remove(at));
            }
        }
        split.extend(results);
    }
    split
}

/// The template of gpt-oss knows reasoning as `thinking`. In a message with a call it prints that or
/// the content, both as analysis, and refuses both together.
fn with_thinking(message: &mut Value) {
    let Some(reasoning) = message["reasoning_content"].as_str() else { return };
    let content = message["content"].as_str().unwrap_or_default();
    if message.get("tool_calls").is_none() || content.is_empty() {
        message["thinking"] = json!(reasoning);
        return;
    }
    message["thinking"] = json!(format!("{reasoning}\n\n{content}"));
    message["content"] = json!("");
}

/// Gives every tool a description: the template of gpt-oss fails without one.
pub fn describe(tools: &mut Value) {
    for tool in tools.as_array_mut().into_iter().flatten() {
        if let Value::Object(function) = &mut tool["function"]
            && !function.get("description").is_some_and(Value::is_string)
        {
            function.insert("description".to_owned(), json!(""));
        }
    }
}

/// Keeps the last characters, so that a call and its result still belong together.
fn shorten_id(id: Option<&mut Value>) {
    let Some(Value::String(text)) = id else { return };
    let letters: String = text.chars().filter(char::is_ascii_alphanumeric).collect();
    *text = match letters.len().checked_sub(MISTRAL_ID) {
        Some(surplus) => letters[surplus..].to_owned(),
        None => format!("{letters:0>MISTRAL_ID$}"),
    };
}

/// Writes tools, calls and results into the text of the messages, in Hermes form, for a template
/// that prints none of them.
pub fn with_tools_in_text(messages: &mut Vec<Value>, tools: Option<&Value>) {
    for message in messages.iter_mut() {
        let calls = message.get_mut("tool_calls").map(Value::take);
        for call in calls.iter().filter_map(Value::as_array).flatten() {
            let function = &call["function"];
            let call = json!({"name": function["name"], "arguments": function["arguments"]});
            append(message, &format!("<tool_call>\n{call}\n</tool_call>"));
        }
        if message["role"] == "tool" {
            let result = message["content"].as_str().unwrap_or_default();
            *message =
                json!({"role": "user", "content": format!("<tool_response>\n{result}\n</tool_response>")});
        }
    }
    let Some(Value::Array(tools)) = tools else { return };
    let listed: String = tools.iter().map(|tool| format!("{tool}\n")).collect();
    let text = format!(
        "You can call functions. They are described here:\n<tools>\n{listed}</tools>\nTo call one, write its name and its arguments as JSON between tags:\n<tool_call>\n{{\"name\": \"…\", \"arguments\": {{…}}}}\n</tool_call>"
    );
    match messages.first_mut() {
        Some(first) if first["role"] == "system" => append(first, &text),
        _ => messages.insert(0, json!({"role": "system", "content": text})),
    }
}

fn append(message: &mut Value, text: &str) {
    let content = message["content"].as_str().unwrap_or_default();
    let separator = if content.is_empty() { "" } else { "\n\n" };
    message["content"] = Value::from(format!("{content}{separator}{text}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_and_calls_become_text() {
        let mut messages = vec![
            json!({"role": "user", "content": "hi"}),
            json!({"role": "assistant", "content": "", "tool_calls": [
                {"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}]}),
            json!({"role": "tool", "content": "7", "tool_call_id": "c"}),
        ];
        with_tools_in_text(&mut messages, Some(&json!([{"type": "function", "function": {"name": "f"}}])));
        assert_eq!(messages[0]["role"], "system");
        assert!(messages[0]["content"].as_str().unwrap().contains("\"name\":\"f\""));
        assert_eq!(
            messages[2]["content"],
            "<tool_call>\n{\"name\":\"f\",\"arguments\":{\"a\":1}}\n</tool_call>"
        );
        assert_eq!(messages[3], json!({"role": "user", "content": "<tool_response>\n7\n</tool_response>"}));
    }

    #[test]
    fn gpt_oss_gets_one_call_in_each_message_and_its_reasoning() {
        let call = |id: &str| json!({"id": id, "function": {"name": id, "arguments": {}}});
        let result = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": id});
        let mut messages = vec![
            json!({"role": "user", "content": "hi", "tool_calls": []}),
            json!({"role": "assistant", "content": "Let me see.", "reasoning": "why",
                "tool_calls": [call("a"), call("b"), call("c")]}),
            result("b"),
            result("a"),
            result("x"),
            json!({"role": "assistant", "content": "so", "reasoning_content": "because"}),
        ];
        for_template(&mut messages, Some(Dialect::Harmony));
        let seen: Vec<String> = messages
            .iter()
            .map(|message| match message.get("tool_calls") {
                Some(calls) => format!("call {}", calls[0]["id"].as_str().unwrap()),
                None => message["content"].as_str().unwrap().to_owned(),
            })
            .collect();
        assert_eq!(seen, ["hi", "call a", "a", "call b", "b", "call c", "x", "so"]);
        assert_eq!(
            (&messages[1]["thinking"], &messages[1]["content"]),
            (&json!("why\n\nLet me see."), &json!(""))
        );
        assert!(messages[3].get("thinking").is_none());
        assert_eq!(messages[7]["thinking"], "because");
        let mut tools = json!([{"function": {"name": "f"}}, {"function": {"name": "g", "description": "x"}}]);
        describe(&mut tools);
        assert_eq!(tools[0]["function"]["description"], "");
        assert_eq!(tools[1]["function"]["description"], "x");
    }

    #[test]
    fn mistral_ids_have_nine_characters() {
        let mut messages = vec![
            json!({"role": "assistant", "tool_calls": [{"id": "call_0123456789abcdef"}, {"id": "x"}]}),
            json!({"role": "tool", "tool_call_id": "call_0123456789abcdef"}),
            json!({"role": "assistant", "reasoning": "why"}),
        ];
        for_template(&mut messages, Some(Dialect::Mistral));
        assert_eq!(messages[0]["tool_calls"][0]["id"], "789abcdef");
        assert_eq!(messages[0]["tool_calls"][1]["id"], "00000000x");
        assert_eq!(messages[1]["tool_call_id"], "789abcdef");
        assert_eq!(messages[2]["reasoning_content"], "why");
    }
}
