//! `POST /v1/chat/completions/render` and `/v1/completions/render`: the tokens and the parameters
//! with which a request would run, without running it.
//!
//! Routers that choose a replica by its cached prefix call them (llm-d's token producer, Dynamo's
//! endpoint picker) and read `token_ids`. The names of the answer are vLLM's.

use axum::response::Response;
use oscar_engine::{GenerationParams, Request};
use serde::Serialize;

use super::chat_completions::types::ChatBody;
use super::{chat_completions, completions};
use crate::body::{Asked, json_answer, off_thread};
use crate::error::ApiError;
use crate::generate::{Prepared, TextOptions};
use crate::schema::RequestBody;

/// One prompt, ready for an engine.
#[derive(Serialize)]
struct Rendered {
    request_id: String,
    model: String,
    token_ids: Vec<u32>,
    sampling_params: SamplingReport,
    stream: bool,
}

/// The parameters, resolved: what the request left open has the model's default.
#[derive(Clone, Serialize)]
struct SamplingReport {
    n: usize,
    temperature: f32,
    top_p: f32,
    /// 0 keeps all tokens.
    top_k: usize,
    min_p: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    repetition_penalty: f32,
    max_tokens: usize,
    min_tokens: usize,
    stop: Vec<String>,
    stop_token_ids: Vec<u32>,
    include_stop_str_in_output: bool,
    skip_special_tokens: bool,
    logprobs: Option<usize>,
    prompt_logprobs: Option<usize>,
}

impl SamplingReport {
    fn new(params: &GenerationParams, text: &TextOptions) -> Self {
        let sampling = &params.sampling;
        Self {
            n: params.choices,
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            repetition_penalty: sampling.repetition_penalty,
            max_tokens: params.max_tokens,
            min_tokens: params.min_tokens,
            stop: text.stop.clone(),
            stop_token_ids: params.stop_tokens.clone(),
            include_stop_str_in_output: text.include_stop,
            skip_special_tokens: text.skip_special,
            logprobs: params.logprobs,
            prompt_logprobs: params.prompt_logprobs,
        }
    }
}

/// One answer for each prompt.
fn rendered(prepared: &Prepared) -> Vec<Rendered> {
    let params = SamplingReport::new(prepared.params(), &prepared.text);
    let one = |request: &Request| Rendered {
        request_id: prepared.name.clone(),
        model: prepared.model.clone(),
        token_ids: request.prompt().to_vec(),
        sampling_params: params.clone(),
        stream: prepared.stream,
    };
    prepared.requests.iter().map(one).collect()
}

pub async fn chat(Asked { app, name, caller, body }: Asked) -> Result<Response, ApiError> {
    let size = body.bytes().len();
    let answer = off_thread(&app, body, move |app, body| {
        let prepared = chat_completions::prepare::prepare(
            app,
            &name,
            caller,
            ChatBody::parse(body, app.limits.value_bytes)?,
            None,
        )?;
        Ok(rendered(&prepared).pop())
    });
    json_answer(&app, size, answer.await?).await
}

pub async fn completion(Asked { app, name, caller, body }: Asked) -> Result<Response, ApiError> {
    let size = body.bytes().len();
    let answer = off_thread(&app, body, move |app, body| {
        let (prepared, _) = completions::prepare::prepare(app, &name, caller, body)?;
        Ok(rendered(&prepared))
    });
    json_answer(&app, size, answer.await?).await
}
