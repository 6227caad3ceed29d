//! From the body of a chat request to a request for the engine.

use serde_json::Value;

use super::template::render;
use super::types::ChatBody;
use super::validate;
use crate::app::App;
use crate::error::ApiError;
use crate::generate::{Prepared, requests};
use crate::keys::Caller;
use crate::limits::{check_logprobs, encode};
use crate::routes::sampling::max_tokens;
use crate::schema::RequestBody;

/// Characters at the prompt's end that may show that reasoning has begun.
const PROMPT_END: usize = 64;

pub fn prepare(app: &App, name: &str, caller: Caller, body: &[u8]) -> Result<Prepared, ApiError> {
    let (chat, template, sampling) = ChatBody::parse(body)?;
    validate::refuse_unsupported(&chat, &template)?;
    let model = app.served_model(sampling.model.as_deref())?;
    let messages = Value::Array(validate::messages(chat.messages)?);

    let mut params = sampling.params(app, 1)?;
    let mut text = sampling.text_options(app)?;
    let prompt = render(app, &template, &messages)?;
    let tokens = encode(app, "messages", &prompt, sampling.add_special_tokens.unwrap_or(false))?;
    if tokens.is_empty() {
        return Err(ApiError::param("messages", "the chat template made an empty prompt of them"));
    }
    if sampling.max_tokens == Some(0) {
        return Err(ApiError::param("max_tokens", "must be at least 1 in a chat"));
    }
    let asked = chat.max_completion_tokens.or(sampling.max_tokens);
    params.max_tokens = max_tokens(app, tokens.len(), asked);
    params.logprobs = (chat.logprobs == Some(true)).then(|| chat.top_logprobs.unwrap_or(0));
    check_logprobs(&mut params, tokens.len(), 1, sampling.streams(), asked.is_none())?;
    params.cache_salt = caller.cache_salt(app.config.isolate_keys, sampling.cache_salt.as_deref());
    if chat.separate_reasoning != Some(false) {
        text.reasoning = app.config.reasoning.clone();
    }
    let start = prompt.char_indices().rev().nth(PROMPT_END).map_or(0, |(at, _)| at);
    text.prompt_end = prompt[start..].to_owned();
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
