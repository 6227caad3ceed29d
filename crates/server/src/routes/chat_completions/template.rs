//! From a conversation to the prompt's text, for `/v1/chat/completions` and `/tokenize`.

use oscar_text::{ChatInput, ChatTemplate, Dialect};
use serde_json::{Map, Value};

use super::validate;
use crate::ToolCallParser;
use crate::app::App;
use crate::error::ApiError;
use crate::limits::{check_length, check_template_variables};
use crate::schema::{Kind, request_fields};
use crate::tools::{ToolUse, describe, for_template, with_tools_in_text};

request_fields! {
    /// The fields that decide how a conversation is rendered.
    pub struct TemplateFields {
        /// Functions that the model may call. Arguments follow `parameters` of functions with `strict:
        /// true`, and of all where tool_choice or a response_format constrains the answer; a schema
        /// that cannot be enforced is refused
        pub tools: Option<Value> = Kind::Objects,
        /// `auto`, `none`, `required`, or the function that must be called
        pub tool_choice: Option<Value>,
        /// False ends the answer with its first call; true if absent
        pub parallel_tool_calls: Option<bool>,
        /// Documents, handed to the chat template
        pub documents: Option<Value> = Kind::Objects,
        /// Name of one of the model's templates; template source only where the server allows it
        pub chat_template: Option<String>,
        /// Further variables of the chat template
        pub chat_template_kwargs: Option<Map<String, Value>>,
        /// Short for the template variable of that name
        pub enable_thinking: Option<bool>,
        /// Handed to the chat template; `none` also sets `enable_thinking` to false, unless the
        /// request says otherwise
        pub reasoning_effort: Option<String>,
        /// Open the assistant's turn; true if absent
        pub add_generation_prompt: Option<bool>,
        /// Go on in the last message instead of opening a new turn
        pub continue_final_message: Option<bool>,
    }
}

/// A conversation, rendered.
#[derive(Debug)]
pub struct Conversation {
    pub prompt: String,
    pub tools: ToolUse,
    pub messages: Vec<Printed>,
}

/// A message as the template printed it.
#[derive(Debug)]
pub struct Printed {
    /// As the client sent it; `None` for a message that the server added.
    pub role: Option<String>,
    pub content: String,
}

/// Checks messages and tools and renders them.
pub fn conversation(
    app: &App,
    fields: &TemplateFields,
    messages: Vec<Map<String, Value>>,
) -> Result<Conversation, ApiError> {
    let (tools, choice) = (fields.tools.as_ref(), fields.tool_choice.as_ref());
    let tools = ToolUse::read(tools, choice, fields.parallel_tool_calls)?;
    if tools.may_call() && app.dialect.is_none() && app.config.tool_call_parser == ToolCallParser::Auto {
        let problem = "the chat template writes tool calls in a form that is not known here: start the server with --tool-call-parser";
        return Err(ApiError::param("tools", problem));
    }
    for text in messages.iter().filter_map(|message| message.get("content")?.as_str()) {
        check_length(app, "messages", text)?;
    }
    let own = app.text.chat.as_ref();
    let prints = |role: &str| fields.chat_template.is_some() || own.is_some_and(|own| own.mentions(role));
    let mut messages = validate::messages(messages, prints)?;
    let mut roles: Vec<_> =
        messages.iter().map(|message| message["role"].as_str().map(str::to_owned)).collect();
    for_template(&mut messages, app.dialect);
    if !app.template_prints_tools && fields.chat_template.is_none() {
        with_tools_in_text(&mut messages, tools.shown().as_ref());
    }
    // Tools may have got a message of their own.
    (roles.len()..messages.len()).for_each(|_| roles.insert(0, None));
    let mut messages = Value::Array(messages);
    let prompt = render(app, fields, &tools, &messages)?;
    let texts =
        messages.as_array_mut().into_iter().flatten().map(|message| match message["content"].take() {
            Value::String(text) => text,
            _ => String::new(),
        });
    let messages = roles.into_iter().zip(texts).map(|(role, content)| Printed { role, content }).collect();
    Ok(Conversation { prompt, tools, messages })
}

/// The prompt text of a conversation.
fn render(app: &App, fields: &TemplateFields, tools: &ToolUse, messages: &Value) -> Result<String, ApiError> {
    let continues = fields.continue_final_message == Some(true);
    if continues && fields.add_generation_prompt == Some(true) {
        let problem = "cannot be combined with add_generation_prompt: either go on in the last message or open a new turn";
        return Err(ApiError::param("continue_final_message", problem));
    }
    let mut extra: Map<String, Value> = fields.chat_template_kwargs.clone().unwrap_or_default();
    check_template_variables(&extra)?;
    if let Some(thinking) = fields.enable_thinking {
        extra.insert("enable_thinking".to_owned(), Value::Bool(thinking));
    }
    if let Some(effort) = &fields.reasoning_effort {
        if effort == "none" {
            extra.entry("enable_thinking").or_insert(Value::Bool(false));
        }
        extra.insert("reasoning_effort".to_owned(), Value::String(effort.clone()));
    }
    let mut tools = tools.shown();
    if let (Some(tools), Some(Dialect::Harmony)) = (&mut tools, app.dialect) {
        describe(tools);
    }
    let own = app.text.chat.as_ref();
    let mut input = ChatInput {
        messages,
        tools: tools.as_ref(),
        documents: fields.documents.as_ref(),
        add_generation_prompt: fields.add_generation_prompt.unwrap_or(!continues),
        extra: Some(&extra),
        template: None,
    };
    let sent;
    let template = match &fields.chat_template {
        None => own,
        Some(name) if own.is_some_and(|own| own.names().contains(name)) => {
            input.template = Some(name);
            own
        }
        Some(_) if !app.config.allow_request_template => {
            let names = own.map_or(String::new(), |own| own.names().join(", "));
            let problem = format!(
                "templates in requests are not allowed here (the operator can start the server with --allow-request-template); the model's own are: {names}"
            );
            return Err(ApiError::param("chat_template", problem));
        }
        Some(source) => {
            sent = ChatTemplate::from_source(source, app.text.tokenizer.special())
                .map_err(|error| ApiError::param("chat_template", error))?;
            Some(&sent)
        }
    };
    let template =
        template.ok_or_else(|| ApiError::text("messages", &oscar_text::TextError::NoChatTemplate))?;
    let prompt = template.render(&input).map_err(|error| ApiError::text("messages", &error))?;
    if continues { cut_after_last(prompt, messages) } else { Ok(prompt) }
}

/// Cuts the prompt where the last message's text ends, so that the model goes on in it.
fn cut_after_last(mut prompt: String, messages: &Value) -> Result<String, ApiError> {
    let last = messages.as_array().and_then(|messages| messages.last());
    let text = last.and_then(|message| message["content"].as_str()).unwrap_or_default();
    let wrong = |problem| Err(ApiError::param("continue_final_message", problem));
    if text.trim().is_empty() {
        return wrong("the last message has no text to go on from");
    }
    // Some templates trim their output.
    for text in [text, text.trim_end(), text.trim()] {
        if let Some(at) = prompt.rfind(text) {
            prompt.truncate(at + text.len());
            return Ok(prompt);
        }
    }
    wrong("the chat template does not print the last message as it is")
}
