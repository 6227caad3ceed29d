//! From the body of a completion request to requests for the engine, one for each prompt.

use oscar_text::Thinking;

use super::types::{CompletionBody, Prompt};
use super::validate;
use crate::app::App;
use crate::error::ApiError;
use crate::generate::{Prepared, requests};
use crate::keys::Caller;
use crate::limits::{check_logprobs, check_prompts, encode};
use crate::schema::RequestBody;
use crate::tools::refuse_ignore_eos;

/// OpenAI's default for this endpoint.
const DEFAULT_MAX_TOKENS: usize = 16;

/// How the prompts are repeated in the answer.
#[derive(Debug)]
pub struct Echo {
    /// The client asked for the prompts' log-probabilities by that name.
    pub prompt_logprobs: bool,
    /// The prompts as text, if they are to be repeated.
    pub texts: Option<Vec<String>>,
}

pub fn prepare(app: &App, name: &str, caller: Caller, body: &[u8]) -> Result<(Prepared, Echo), ApiError> {
    prepare_fields(app, name, caller, CompletionBody::parse(body, app.limits.value_bytes)?)
}

/// The same for fields that were read already.
pub fn prepare_fields(
    app: &App,
    name: &str,
    caller: Caller,
    (fields, form, sampling): CompletionBody,
) -> Result<(Prepared, Echo), ApiError> {
    validate::refuse_unsupported(&fields, sampling.choices())?;
    let model = app.served_model(sampling.model.as_deref())?;
    let echo = fields.echo == Some(true);
    check_prompts(app, fields.prompt.count(), sampling.choices())?;
    let add_special = sampling.add_special_tokens.unwrap_or(true);
    let (prompts, texts) = match fields.prompt {
        Prompt::Tokens(lists) => (lists, None),
        Prompt::Texts(texts) => {
            let tokens = texts.iter().map(|text| encode(app, "prompt", text, add_special));
            (tokens.collect::<Result<Vec<_>, _>>()?, Some(texts))
        }
    };

    let mut params = sampling.params(app, prompts.len())?;
    params.max_tokens = fields.max_completion_tokens.or(sampling.max_tokens).unwrap_or(DEFAULT_MAX_TOKENS);
    params.logprobs = fields.logprobs;
    if echo && fields.logprobs.is_some() {
        params.prompt_logprobs = params.prompt_logprobs.max(fields.logprobs);
    }
    let total = prompts.iter().map(Vec::len).sum();
    check_logprobs(&mut params, total, prompts.len(), sampling.streams(), false)?;
    params.cache_salt = caller.cache_salt(app.config.isolate_keys, sampling.cache_salt.as_deref());
    if let Some((param, grammar)) = form.answer_form()? {
        refuse_ignore_eos(&param, sampling.ignore_eos)?;
        params.constraint = Some(app.constraint(&param, &grammar, &Thinking::None)?);
    }
    let requests = requests(app, prompts, &params)?;
    let decode = |tokens: &[u32]| {
        app.text.tokenizer.decode(tokens, false).map_err(|error| ApiError::text("prompt", &error))
    };
    let texts = match texts {
        _ if !echo => None,
        Some(texts) => Some(texts),
        None => Some(requests.iter().map(|request| decode(request.prompt())).collect::<Result<_, _>>()?),
    };
    let prepared = Prepared {
        name: name.to_owned(),
        caller,
        model,
        requests,
        text: sampling.text_options(app)?,
        stream: sampling.streams(),
        include_usage: sampling.includes_usage()?,
    };
    Ok((prepared, Echo { prompt_logprobs: sampling.prompt_logprobs.is_some(), texts }))
}
