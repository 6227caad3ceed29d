//! Bounds that are checked before the work they bound is done.

use oscar_engine::{GenerationParams, RequestError};
use oscar_text::{TextError, Tokenizer};
use serde_json::{Map, Value};

use crate::ServerConfig;
use crate::app::App;
use crate::error::ApiError;
use crate::json;

/// Most log-probabilities one answer may hold: tokens times choices times alternatives.
const MOST_LOGPROBS: usize = 1 << 20;

/// Most of them in a stream that begins with those of the prompt, which are one chunk.
const MOST_STREAMED_LOGPROBS: usize = 1 << 15;

/// Largest `chat_template_kwargs`, by the bytes of its texts and 16 for every other value.
const MOST_TEMPLATE_BYTES: usize = 64 << 10;

/// Bytes of JSON that one byte of text takes at most, as `\u00XX`.
const JSON_BYTES: usize = 6;

/// Memory that the values of a body may always take.
const LEAST_VALUES: usize = 32 << 20;

/// Sizes that follow from the model.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Largest request body.
    pub body_bytes: usize,
    /// Bytes of all large bodies together.
    pub bodies_in_flight: usize,
    /// Memory that the values of one body may take.
    pub value_bytes: usize,
    /// Longest text that could fit the context.
    pub prompt_bytes: usize,
}

impl Limits {
    pub fn new(config: &ServerConfig, context: usize, tokenizer: &Tokenizer) -> Self {
        let prompt_bytes = context.saturating_mul(tokenizer.most_bytes_per_token());
        let derived = prompt_bytes.saturating_mul(JSON_BYTES).saturating_add(1 << 20).min(32 << 20);
        let body_bytes = config.max_body_bytes.unwrap_or(derived);
        // A body of text alone always fits, and two contexts of token ids.
        let ids = context.saturating_mul(2 * json::VALUE);
        Self {
            body_bytes,
            bodies_in_flight: body_bytes.saturating_mul(4).max(64 << 20),
            value_bytes: ids.max(body_bytes.saturating_add(1 << 20)).max(LEAST_VALUES),
            prompt_bytes,
        }
    }
}

/// Token ids of a text that may fit the context; refuses longer ones before the work is done.
pub fn encode(app: &App, param: &str, text: &str, add_special: bool) -> Result<Vec<u32>, ApiError> {
    check_length(app, param, text)?;
    let context = app.engine.info().context;
    app.text.tokenizer.encode_at_most(text, add_special, context).map_err(|error| match error {
        TextError::TooManyTokens { bytes, most } => {
            let problem = format!("the text of {bytes} bytes has more than the {most} tokens of the context");
            too_long(param, &problem)
        }
        _ => ApiError::text(param, &error),
    })
}

/// Refuses a text that has more bytes than the tokens of the context can hold.
pub fn check_length(app: &App, param: &str, text: &str) -> Result<(), ApiError> {
    let (bytes, most) = (text.len(), app.limits.prompt_bytes);
    match bytes > most {
        true => {
            let context = app.engine.info().context;
            let problem =
                format!("the text has {bytes} bytes, but a context of {context} tokens holds at most {most}");
            Err(too_long(param, &problem))
        }
        false => Ok(()),
    }
}

/// The error of a text or prompt that is longer than the context.
pub fn too_long(param: &str, problem: &str) -> ApiError {
    ApiError::Invalid {
        message: format!("{param}: {problem}: shorten it"),
        param: Some(param.to_owned()),
        code: Some("context_length_exceeded"),
    }
}

/// Refuses more prompts than sequences are allowed, before any is looked at.
pub fn check_prompts(app: &App, prompts: usize, choices: usize) -> Result<(), ApiError> {
    let limit = app.config.max_choices;
    match (prompts, choices) {
        _ if choices.saturating_mul(prompts) <= limit => Ok(()),
        (1, _) => Err(ApiError::param("n", format!("must be at most {limit}, not {choices}"))),
        (_, 1) => {
            let problem = format!("{prompts} prompts are more than the {limit} allowed in one request");
            Err(ApiError::param("prompt", problem))
        }
        _ => {
            let problem = format!(
                "{choices} answers to each of {prompts} prompts are more than the {limit} allowed in one request"
            );
            Err(ApiError::param("n", problem))
        }
    }
}

/// Log-probabilities that an answer to `prompt_tokens` tokens of prompt can hold.
pub fn logprobs(params: &GenerationParams, prompt_tokens: usize, prompts: usize) -> usize {
    let of = |top: Option<usize>, tokens: usize| top.map_or(0, |top| tokens.saturating_mul(top + 1));
    let generated = of(params.logprobs, params.max_tokens.saturating_mul(prompts));
    of(params.prompt_logprobs, prompt_tokens).saturating_add(generated).saturating_mul(params.choices)
}

/// Refuses answers with too many log-probabilities. `shorten` lowers `max_tokens` instead where the
/// client gave none.
pub fn check_logprobs(
    params: &mut GenerationParams,
    prompt_tokens: usize,
    prompts: usize,
    streams: bool,
    shorten: bool,
) -> Result<(), ApiError> {
    let streamed = streams && params.prompt_logprobs.is_some();
    let most = if streamed { MOST_STREAMED_LOGPROBS } else { MOST_LOGPROBS };
    if shorten && let Some(top) = params.logprobs {
        let each = (top + 1).saturating_mul(params.choices).saturating_mul(prompts);
        params.max_tokens = params.max_tokens.min((most / each.max(1)).max(1));
    }
    let wanted = logprobs(params, prompt_tokens, prompts);
    if wanted <= most {
        return Ok(());
    }
    let param = if params.prompt_logprobs.is_some() { "prompt_logprobs" } else { "logprobs" };
    let further = if streamed { ", do not stream" } else { "" };
    let problem = format!(
        "{wanted} log-probabilities (tokens × n × alternatives) are more than the {most} of one answer: lower n, \
         max_tokens or the alternatives, shorten the prompt{further}"
    );
    Err(ApiError::param(param, problem))
}

/// Refuses template variables that are too large.
pub fn check_template_variables(variables: &Map<String, Value>) -> Result<(), ApiError> {
    let mut left = MOST_TEMPLATE_BYTES;
    let fits =
        variables.iter().all(|(name, value)| take(&mut left, name.len()) && take_value(&mut left, value));
    match fits {
        true => Ok(()),
        false => Err(ApiError::param(
            "chat_template_kwargs",
            format!("is larger than the {MOST_TEMPLATE_BYTES} bytes allowed"),
        )),
    }
}

fn take(left: &mut usize, bytes: usize) -> bool {
    left.checked_sub(bytes).inspect(|rest| *left = *rest).is_some()
}

fn take_value(left: &mut usize, value: &Value) -> bool {
    const OTHER: usize = 16;
    take(left, OTHER)
        && match value {
            Value::String(text) => take(left, text.len()),
            Value::Array(items) => items.iter().all(|item| take_value(left, item)),
            Value::Object(fields) => {
                fields.iter().all(|(name, item)| take(left, name.len()) && take_value(left, item))
            }
            _ => true,
        }
}

/// Tokens that a job may have in flight.
pub fn tokens_in_flight(params: &GenerationParams, prompt_tokens: usize, prompts: usize) -> usize {
    let generated = params.max_tokens.saturating_mul(params.choices).saturating_mul(prompts);
    prompt_tokens.saturating_add(generated)
}

/// The error of a prompt whose length is known.
pub fn context_exceeded(app: &App, prompt: usize, max_tokens: usize) -> ApiError {
    let context = app.engine.info().context;
    app.engine_error(RequestError::ContextExceeded { prompt, max_tokens, context })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn logprobs_are_counted_by_tokens_choices_and_alternatives() {
        let mut params = GenerationParams {
            prompt_logprobs: Some(20),
            choices: 128,
            max_tokens: 0,
            ..GenerationParams::default()
        };
        assert_eq!(logprobs(&params, 5000, 1), 5000 * 21 * 128);
        assert!(check_logprobs(&mut params, 5000, 1, false, false).is_err());
        params.choices = 1;
        assert!(
            check_logprobs(&mut params, 32_767, 1, false, false).is_ok(),
            "one answer of a whole context"
        );
        assert!(check_logprobs(&mut params, 32_767, 1, true, false).is_err(), "in one chunk");
        let mut params = GenerationParams {
            logprobs: Some(20),
            choices: 100,
            max_tokens: usize::MAX,
            ..GenerationParams::default()
        };
        assert!(check_logprobs(&mut params, 7, 1, false, false).is_err());
        check_logprobs(&mut params, 7, 1, false, true).unwrap();
        assert_eq!(params.max_tokens, (1 << 20) / 2100);
    }

    #[test]
    fn template_variables_are_weighed() {
        let check = |value: Value| check_template_variables(value.as_object().unwrap());
        assert!(check(json!({"enable_thinking": true, "list": [1, 2], "text": "x".repeat(60_000)})).is_ok());
        assert!(check(json!({"text": "x".repeat(70_000)})).is_err());
        assert!(check(json!({"list": vec![0; 5000]})).is_err());
        assert!(check(json!({"x".repeat(70_000): 1})).is_err());
    }
}
