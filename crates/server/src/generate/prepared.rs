//! HTTP requests that are ready for the engine.

use oscar_engine::{GenerationParams, Request};

use super::TextOptions;
use crate::app::App;
use crate::error::ApiError;
use crate::keys::{Admission, Caller};
use crate::limits;

/// An HTTP request ready to be submitted: one engine request for each prompt, and how their answers
/// become text.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The name by which `/abort_request` and the logs know it.
    pub name: String,
    pub caller: Caller,
    /// The model's name as the client wrote it.
    pub model: String,
    /// At least one. Their parameters are the same.
    pub requests: Vec<Request>,
    pub text: TextOptions,
    pub stream: bool,
    pub include_usage: bool,
}

/// Valid requests for the engine, one for each prompt.
pub fn requests(
    app: &App,
    prompts: Vec<Vec<u32>>,
    params: &GenerationParams,
) -> Result<Vec<Request>, ApiError> {
    let request = |prompt| Request::new(app.engine.info(), app.next_request_id(), prompt, params.clone());
    prompts.into_iter().map(request).collect::<Result<_, _>>().map_err(|error| app.engine_error(error))
}

impl Prepared {
    pub fn params(&self) -> &GenerationParams {
        self.requests[0].params()
    }

    fn prompt_tokens(&self) -> usize {
        self.requests.iter().map(|request| request.prompt().len()).sum()
    }

    /// Counts the work against the tenant's quota until the result is dropped.
    pub fn admit(&self, app: &App) -> Result<Admission, ApiError> {
        let (params, count) = (self.params(), self.requests.len());
        self.caller.admit(
            count.saturating_mul(params.choices),
            limits::tokens_in_flight(params, self.prompt_tokens(), count),
            app.config.retry_after_seconds,
        )
    }

    /// About how many bytes the answer can have.
    pub fn answer_size(&self) -> usize {
        const TOKEN: usize = 8;
        const LOGPROB: usize = 64;
        let (params, count) = (self.params(), self.requests.len());
        let tokens = limits::tokens_in_flight(params, 0, count);
        let logprobs = limits::logprobs(params, self.prompt_tokens(), count);
        tokens.saturating_mul(TOKEN).saturating_add(logprobs.saturating_mul(LOGPROB))
    }
}
