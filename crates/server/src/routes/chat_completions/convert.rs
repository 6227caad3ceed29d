//! From a chat request to tokens.

use oscar_text::{ChatInput, ChatTemplate};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::types::{ChatFields, FIELDS};
use super::validate;
use crate::app::App;
use crate::body::parse_object;
use crate::error::ApiError;
use crate::generate::Job;
use crate::keys::Caller;
use crate::limits::{check_logprobs, check_template_variables, encode};
use crate::routes::sampling::{self, SamplingFields, fit};
use crate::schema;

/// A request ready to be submitted.
#[derive(Debug)]
pub struct Prepared {
    pub job: Job,
    pub model: String,
    pub stream: bool,
    pub include_usage: bool,
}

/// Characters at the prompt's end that may show that reasoning has begun.
const PROMPT_END: usize = 64;

pub fn prepare(app: &App, name: &str, caller: Caller, body: &[u8]) -> Result<Prepared, ApiError> {
    let body = parse_object(body, &[FIELDS, sampling::FIELDS])?;
    schema::check(&[FIELDS, sampling::FIELDS], &body)?;
    validate::refuse_unsupported(&body)?;
    let body = Value::Object(body);
    let shared = typed::<SamplingFields>(&body)?;
    let mut fields = typed::<ChatFields>(&body)?;
    drop(body);
    let model = app.served_model(shared.model.as_deref())?;
    validate::combinations(&fields)?;
    let messages = Value::Array(validate::messages(std::mem::take(&mut fields.messages))?);

    let mut params = shared.params(app, 1)?;
    let mut text = shared.text_options(app)?;
    let prompt = render(app, &fields, &messages)?;
    let tokens = encode(app, "messages", &prompt, shared.add_special_tokens.unwrap_or(false))?;
    if tokens.is_empty() {
        return Err(ApiError::param("messages", "the chat template made an empty prompt of them"));
    }
    if shared.max_tokens == Some(0) {
        return Err(ApiError::param("max_tokens", "must be at least 1 in a chat"));
    }
    let asked = fields.max_completion_tokens.or(shared.max_tokens);
    params.max_tokens = fit(app, tokens.len(), asked)?;
    params.logprobs = (fields.logprobs == Some(true)).then(|| fields.top_logprobs.unwrap_or(0));
    check_logprobs(&mut params, tokens.len(), 1, shared.streams(), asked.is_none())?;
    params.cache_salt = caller.cache_salt(app.config.isolate_keys, shared.cache_salt.as_deref());
    if fields.separate_reasoning != Some(false) {
        text.reasoning = app.config.reasoning.clone();
    }
    let start = prompt.char_indices().rev().nth(PROMPT_END).map_or(0, |(at, _)| at);
    text.prompt_end = prompt[start..].to_owned();
    let job = Job { name: name.to_owned(), caller, prompts: vec![tokens], params, text };
    Ok(Prepared { job, model, stream: shared.streams(), include_usage: shared.includes_usage() })
}

/// Reads the fields of one structure; the schema has seen their types already.
pub fn typed<'a, T: Deserialize<'a>>(body: &'a Value) -> Result<T, ApiError> {
    T::deserialize(body).map_err(|error| ApiError::invalid(format!("the request is not understood: {error}")))
}

/// The prompt text of a conversation.
pub fn render(app: &App, fields: &ChatFields, messages: &Value) -> Result<String, ApiError> {
    let continues = fields.continue_final_message == Some(true);
    let mut extra: Map<String, Value> = fields.chat_template_kwargs.clone().unwrap_or_default();
    check_template_variables(&extra)?;
    if let Some(thinking) = fields.enable_thinking {
        extra.insert("enable_thinking".to_owned(), Value::Bool(thinking));
    }
    if let Some(effort) = &fields.reasoning_effort {
        extra.insert("reasoning_effort".to_owned(), Value::String(effort.clone()));
    }
    let no_tools = fields.tool_choice.as_ref().is_some_and(|choice| choice == "none");
    let tools =
        fields.tools.as_ref().filter(|tools| !no_tools && tools.as_array().is_some_and(|t| !t.is_empty()));
    let own = app.text.chat.as_ref();
    let mut input = ChatInput {
        messages,
        tools,
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
    // Some templates trim what they print.
    for text in [text, text.trim_end(), text.trim()] {
        if let Some(at) = prompt.rfind(text) {
            prompt.truncate(at + text.len());
            return Ok(prompt);
        }
    }
    wrong("the chat template does not print the last message as it is")
}
