//! From a plain completion request to tokens.

use serde_json::Value;

use super::types::{CompletionFields, FIELDS, Prompt};
use super::validate;
use crate::app::App;
use crate::body::parse_object;
use crate::error::ApiError;
use crate::generate::Job;
use crate::keys::Caller;
use crate::limits::{check_logprobs, check_prompts, encode};
use crate::routes::chat_completions::convert::typed;
use crate::routes::sampling::{self, SamplingFields, check_tokens, fit};
use crate::schema;

/// OpenAI's default for this endpoint.
const DEFAULT_MAX_TOKENS: usize = 16;

/// A request ready to be submitted.
#[derive(Debug)]
pub struct Prepared {
    pub job: Job,
    pub model: String,
    pub stream: bool,
    pub include_usage: bool,
    pub wants_prompt_logprobs: bool,
    /// The prompts as text, if they are to be repeated.
    pub echo: Option<Vec<String>>,
}

pub fn prepare(app: &App, name: &str, caller: Caller, body: &[u8]) -> Result<Prepared, ApiError> {
    let body = parse_object(body, &[FIELDS, sampling::FIELDS])?;
    schema::check(&[FIELDS, sampling::FIELDS], &body)?;
    validate::refuse_unsupported(&body)?;
    let body = Value::Object(body);
    let shared = typed::<SamplingFields>(&body)?;
    let fields = typed::<CompletionFields>(&body)?;
    let model = app.served_model(shared.model.as_deref())?;
    let echo = fields.echo == Some(true);
    check_prompts(app, fields.prompt.count(), shared.choices())?;
    let (prompts, texts) = prompts(app, &fields.prompt, shared.add_special_tokens.unwrap_or(true), echo)?;

    let mut params = shared.params(app, prompts.len())?;
    let asked = fields.max_completion_tokens.or(shared.max_tokens).unwrap_or(DEFAULT_MAX_TOKENS);
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    params.max_tokens = fit(app, longest, Some(asked))?;
    params.logprobs = fields.logprobs;
    if echo && fields.logprobs.is_some() {
        params.prompt_logprobs = params.prompt_logprobs.max(fields.logprobs);
    }
    let total = prompts.iter().map(Vec::len).sum();
    check_logprobs(&mut params, total, prompts.len(), shared.streams(), false)?;
    params.cache_salt = caller.cache_salt(app.config.isolate_keys, shared.cache_salt.as_deref());
    let job = Job { name: name.to_owned(), caller, prompts, params, text: shared.text_options(app)? };
    Ok(Prepared {
        job,
        model,
        stream: shared.streams(),
        include_usage: shared.includes_usage(),
        wants_prompt_logprobs: shared.prompt_logprobs.is_some(),
        echo: echo.then_some(texts),
    })
}

/// The prompts as tokens and, where they are to be repeated, as text.
fn prompts(
    app: &App,
    prompt: &Prompt,
    add_special: bool,
    echo: bool,
) -> Result<(Vec<Vec<u32>>, Vec<String>), ApiError> {
    let tokenizer = &app.text.tokenizer;
    let encode = |text: &str| encode(app, "prompt", text, add_special);
    let (tokens, texts) = match prompt {
        Prompt::Text(text) => (vec![encode(text)?], vec![text.clone()]),
        Prompt::Texts(texts) => {
            (texts.iter().map(|text| encode(text)).collect::<Result<_, _>>()?, texts.clone())
        }
        Prompt::Tokens(tokens) => (vec![tokens.clone()], Vec::new()),
        Prompt::TokenLists(lists) => (lists.clone(), Vec::new()),
    };
    if tokens.is_empty() || tokens.iter().any(Vec::is_empty) {
        return Err(ApiError::param("prompt", "is empty: at least one token is needed"));
    }
    for list in &tokens {
        check_tokens("prompt", list, app.engine.info().vocab_size)?;
    }
    let texts = match echo && texts.is_empty() {
        true => tokens
            .iter()
            .map(|list| tokenizer.decode(list, false).map_err(|error| ApiError::text("prompt", &error)))
            .collect::<Result<_, _>>()?,
        false => texts,
    };
    Ok((tokens, texts))
}
