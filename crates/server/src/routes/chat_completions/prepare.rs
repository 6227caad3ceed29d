//! From the body of a chat request to a request for the engine.

use std::sync::Arc;

use oscar_text::{Dialect, Grammar, ReplyOptions, Thinking};
use serde_json::{Map, Value};

use super::kv::KvFields;
use super::template::{Conversation, conversation};
use super::types::ChatBody;
use super::validate;
use crate::app::App;
use crate::error::ApiError;
use crate::generate::{Prepared, requests};
use crate::keys::Caller;
use crate::limits::{check_logprobs, encode};
use crate::routes::lowered::Names;
use crate::routes::sampling::max_tokens;
use crate::schema::RequestBody;
use crate::tools::{FormFields, ToolUse, refuse_ignore_eos};

/// Characters at the prompt's end that may show that reasoning has begun.
const PROMPT_END: usize = 64;

/// Prepares a chat. One that is `lowered` from a request in other words is shortened where its answer
/// does not fit the context, not refused.
pub fn prepare(
    app: &App,
    name: &str,
    caller: Caller,
    (chat, template, form, sampling): ChatBody,
    lowered: Option<&Names>,
) -> Result<Prepared, ApiError> {
    validate::combinations(&chat)?;
    let model = app.served_model(sampling.model.as_deref())?;
    let kv = KvFields::read(chat.kv.as_ref())?;
    let Conversation { prompt, tools, messages } = conversation(app, &template, chat.messages)?;

    let mut params = sampling.params(app, 1)?;
    let mut text = sampling.text_options(app)?;
    let tokens = encode(app, "messages", &prompt, sampling.add_special_tokens.unwrap_or(false))?;
    if tokens.is_empty() {
        return Err(ApiError::param("messages", "the chat template made an empty prompt of them"));
    }
    if sampling.max_tokens == Some(0) {
        return Err(ApiError::param("max_tokens", "must be at least 1 in a chat"));
    }
    let asked = chat.max_completion_tokens.or(sampling.max_tokens);
    params.max_tokens = max_tokens(app, tokens.len(), asked);
    if lowered.is_some() {
        let room = app.engine.info().context.saturating_sub(tokens.len());
        params.max_tokens = params.max_tokens.min(room.max(1));
    }
    params.logprobs = (chat.logprobs == Some(true)).then(|| chat.top_logprobs.unwrap_or(0));
    check_logprobs(&mut params, tokens.len(), 1, sampling.streams(), asked.is_none())?;
    params.kv = kv.request(app, &prompt, &messages, sampling.add_special_tokens.unwrap_or(false))?;
    params.cache_salt = caller.cache_salt(app.config.isolate_keys, sampling.cache_salt.as_deref());

    let start = prompt.char_indices().rev().nth(PROMPT_END).map_or(0, |(at, _)| at);
    text.prompt_end = prompt[start..].to_owned();
    let separates = chat.separate_reasoning != Some(false);
    text.reply = ReplyOptions {
        reasoning: app.config.reasoning.tags().filter(|_| separates),
        dialect: app.dialect.filter(|dialect| tools.may_call() || dialect.has_channels()),
        tools: if tools.may_call() { tools.schemas() } else { Arc::default() },
    };
    text.single_call = !tools.parallel;
    if let Some((param, grammar)) = demanded(app.dialect, &form, &tools)? {
        // Later errors of the engine name it too.
        let param = lowered.map_or_else(|| param.clone(), |names| names.of(&param));
        refuse_ignore_eos(&param, sampling.ignore_eos)?;
        // Reasoning that is left in the content is text, and a call in it is a call.
        let holds_calls = matches!(grammar, Grammar::Calls(_) | Grammar::Amid(_) | Grammar::OrCalls(..));
        let thinking = match holds_calls && !separates && !app.dialect.is_some_and(Dialect::has_channels) {
            true => Thinking::None,
            false => thinking(app, &text.prompt_end),
        };
        params.constraint = Some(app.constraint(&param, &grammar, &thinking)?);
    }
    Ok(Prepared {
        name: name.to_owned(),
        caller,
        model,
        requests: requests(app, vec![tokens], &params)?,
        text,
        stream: sampling.streams(),
        include_usage: sampling.includes_usage()?,
    })
}

/// The number of tokens of a chat's prompt.
pub fn prompt_tokens(app: &App, chat: Map<String, Value>) -> Result<usize, ApiError> {
    let (chat, template, _, sampling) = ChatBody::from_object(chat)?;
    app.served_model(sampling.model.as_deref())?;
    let prompt = conversation(app, &template, chat.messages)?.prompt;
    Ok(encode(app, "messages", &prompt, sampling.add_special_tokens.unwrap_or(false))?.len())
}

/// The form that the answer must have, and the field that asks for it.
fn demanded(
    dialect: Option<Dialect>,
    form: &FormFields,
    tools: &ToolUse,
) -> Result<Option<(String, Grammar)>, ApiError> {
    let form = form.answer_form()?;
    let Some(dialect) = dialect.filter(|_| tools.may_call()) else {
        return match tools.must_call() {
            true => {
                Err(ApiError::param("tool_choice", "needs a tool-call parser, which is switched off here"))
            }
            false if tools.may_call() && tools.any_strict() => {
                let problem = "`strict` needs a tool-call parser, which is switched off here: leave it out";
                Err(ApiError::param("tools", problem))
            }
            false => Ok(form),
        };
    };
    let calls = tools.grammar(dialect);
    Ok(match form {
        _ if tools.must_call() => Some(("tools".to_owned(), Grammar::Calls(calls))),
        // The answer may still be calls.
        Some((param, grammar)) => Some((param, Grammar::OrCalls(Box::new(grammar), calls))),
        None => tools.strict(dialect).map(|calls| ("tools".to_owned(), Grammar::Amid(calls))),
    })
}

/// The form of reasoning, as the model's template writes it, that may precede a constrained answer.
fn thinking(app: &App, prompt_end: &str) -> Thinking {
    if app.dialect.is_some_and(Dialect::has_channels) {
        return match prompt_end.ends_with("<|start|>assistant") {
            true => Thinking::Channels,
            // The answer goes on in a message.
            false => Thinking::None,
        };
    }
    let Some(tags) = app.config.reasoning.tags() else { return Thinking::None };
    let end = prompt_end.trim_end();
    let known = app.text.chat.as_ref().is_some_and(|chat| chat.mentions(&tags.open));
    match () {
        () if end.ends_with(tags.open.as_str()) => Thinking::Opened(tags),
        () if !known || end.ends_with(tags.close.as_str()) => Thinking::None,
        () => Thinking::Allowed(tags),
    }
}
