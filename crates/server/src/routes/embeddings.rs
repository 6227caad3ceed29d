//! `POST /v1/embeddings`: the hidden state of the last token of each input, after the final norm,
//! scaled to length 1.
//!
//! A model that was trained for embeddings with last-token pooling gives the vectors it was trained
//! for. Vectors of any other model work only as rough features.

use std::sync::Arc;

use axum::response::Response;
use oscar_engine::{GenerationParams, Request};
use serde::Serialize;
use serde_json::{Value, json};

use super::completions::types::Prompt;
use crate::app::App;
use crate::body::{Asked, json_answer, off_thread};
use crate::error::ApiError;
use crate::generate::{Generation, Output, Prepared, TextOptions, requests};
use crate::keys::Caller;
use crate::limits::{encode, too_long};
use crate::schema::{Kind, RequestBody, request_fields};

/// Most inputs of a request, as OpenAI has it.
const MOST_INPUTS: usize = 2048;

pub type EmbeddingsBody = (EmbeddingsFields,);

request_fields! {
    /// The fields of an embeddings request.
    pub struct EmbeddingsFields {
        /// Name of the model or one of its aliases; the served one if absent
        model: Option<String>,
        /// Text or token ids, or a list of at most 2048 of either
        input: Prompt,
        /// float (a list of numbers, if absent) or base64 (little-endian f32)
        encoding_format: Option<String>,
        /// Only the model's own length: a shorter vector would be another model's
        dimensions: Option<usize> = Kind::AT_LEAST_ONE,
        /// Frame the input with the tokenizer's special tokens; true if absent
        add_special_tokens: Option<bool>,
        /// Shares cached prefixes only with requests that carry the same salt
        cache_salt: Option<String>,
    }
    ignored {
        /// Ignored
        user,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    Float,
    Base64,
}

#[derive(Serialize)]
struct Answer {
    object: &'static str,
    data: Vec<Embedding>,
    model: String,
    usage: Value,
}

#[derive(Serialize)]
struct Embedding {
    object: &'static str,
    index: usize,
    embedding: Vector,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Vector {
    Float(Vec<f32>),
    Base64(String),
}

pub async fn create(Asked { app, name, caller, body }: Asked) -> Result<Response, ApiError> {
    let (mut prepared, encoding) =
        off_thread(&app, body, move |app, body| prepare(app, &name, caller, body)).await?;
    let (model, count) = (prepared.model.clone(), prepared.requests.len());
    let mut found: Vec<Option<Vec<f32>>> = vec![None; count];
    let mut usage = oscar_engine::Usage::default();
    // One group after the other: the engine's queue is shorter than the longest list of inputs.
    let requests = std::mem::take(&mut prepared.requests);
    let size = app.config.max_choices.min(count).max(1);
    let tokens = |group: &[Request]| group.iter().map(|request| request.prompt().len()).sum();
    let tokens = requests.chunks(size).map(tokens).max().unwrap_or(0);
    let admission = Arc::new(prepared.caller.admit(size, tokens, app.config.retry_after_seconds)?);
    for (number, group) in requests.chunks(size).enumerate() {
        let (begin, group) = (number * size, Prepared { requests: group.to_vec(), ..prepared.clone() });
        let mut generation = Generation::admitted(&app, group, &admission)?;
        while let Some(output) = generation.next().await {
            match output {
                Output::Embedding { prompt, values } => found[begin + prompt] = Some(values),
                Output::Done(totals) => usage += totals.usage,
                Output::Failed(error) => return Err(app.engine_error(error)),
                Output::Started { .. } | Output::Kept(_) | Output::Delta { .. } | Output::Finished { .. } => {
                }
            }
        }
    }
    let aborted =
        || ApiError::Internal("the request was aborted before its vectors were computed".to_owned());
    let vectors: Vec<Vec<f32>> = found.into_iter().collect::<Option<_>>().ok_or_else(aborted)?;
    let size = vectors.iter().map(Vec::len).sum::<usize>() * 12;
    let data = vectors.into_iter().enumerate();
    let data = data.map(|(index, values)| Embedding {
        object: "embedding",
        index,
        embedding: encoded(unit(values), encoding),
    });
    let answer = Answer {
        object: "list",
        data: data.collect(),
        model,
        usage: json!({"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}),
    };
    json_answer(&app, size, answer).await
}

fn prepare(app: &App, name: &str, caller: Caller, body: &[u8]) -> Result<(Prepared, Encoding), ApiError> {
    let (fields,) = EmbeddingsBody::parse(body, app.limits.value_bytes)?;
    let model = app.served_model(fields.model.as_deref())?;
    let encoding = match fields.encoding_format.as_deref() {
        None | Some("float") => Encoding::Float,
        Some("base64") => Encoding::Base64,
        Some(other) => {
            return Err(ApiError::param(
                "encoding_format",
                format!("must be float or base64, not {other:?}"),
            ));
        }
    };
    let own = app.engine.info().hidden_size;
    if let Some(other) = fields.dimensions.filter(|&dimensions| dimensions != own) {
        let problem = format!("{other} is not supported: vectors of this model have {own} dimensions");
        return Err(ApiError::param("dimensions", problem));
    }
    let (inputs, context) = (fields.input.count(), app.engine.info().context);
    if inputs > MOST_INPUTS {
        let problem = format!("{inputs} inputs are more than the {MOST_INPUTS} allowed in one request");
        return Err(ApiError::param("input", problem));
    }
    let add_special = fields.add_special_tokens.unwrap_or(true);
    let prompts = match fields.input {
        Prompt::Tokens(lists) => lists,
        Prompt::Texts(texts) => {
            texts.iter().map(|text| encode(app, "input", text, add_special)).collect::<Result<Vec<_>, _>>()?
        }
    };
    if prompts.iter().any(Vec::is_empty) {
        let problem = match inputs {
            1 => "is empty: at least one token is needed",
            _ => "has an empty text: each needs at least one token",
        };
        return Err(ApiError::param("input", problem));
    }
    if let Some(tokens) = prompts.iter().map(Vec::len).find(|&tokens| tokens > context) {
        let problem = format!("{tokens} tokens are more than the {context} of the context");
        return Err(too_long("input", &problem));
    }
    let params = GenerationParams {
        max_tokens: 0,
        embedding: true,
        cache_salt: caller.cache_salt(app.config.isolate_keys, fields.cache_salt.as_deref()),
        ..GenerationParams::default()
    };
    let requests = requests(app, prompts, &params)?;
    let prepared = Prepared {
        name: name.to_owned(),
        caller,
        model,
        requests,
        text: TextOptions::default(),
        stream: false,
        include_usage: false,
    };
    Ok((prepared, encoding))
}

/// A vector of length 1 in the same direction; zero stays zero.
fn unit(mut values: Vec<f32>) -> Vec<f32> {
    let length = values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        values.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
    values
}

fn encoded(values: Vec<f32>, encoding: Encoding) -> Vector {
    match encoding {
        Encoding::Float => Vector::Float(values),
        Encoding::Base64 => {
            Vector::Base64(base64(&values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()))
        }
    }
}

/// Base64 with padding, as RFC 4648 has it.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let group = (0..3).fold(0, |group, at| group << 8 | u32::from(three.get(at).copied().unwrap_or(0)));
        for at in 0..4 {
            let letter = LETTERS[(group >> (18 - 6 * at)) as usize & 63];
            text.push(if at <= three.len() { char::from(letter) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of RFC 4648.
    #[test]
    fn base64_is_padded() {
        for (bytes, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xff, 0xfe, 0xfb]), "//77");
    }

    #[test]
    fn vectors_have_length_one_or_none() {
        assert_eq!(unit(vec![3.0, 4.0]), [0.6, 0.8]);
        assert_eq!(unit(vec![0.0, 0.0]), [0.0, 0.0]);
    }
}
