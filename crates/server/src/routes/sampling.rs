//! The fields that chat and plain completions share, and the engine parameters they give.

use oscar_engine::{GenerationParams, KvRequest, SamplingParams};
use oscar_text::ReplyOptions;
use serde_json::{Map, Value};

use crate::app::App;
use crate::error::ApiError;
use crate::generate::{MAX_LOGPROBS, TextOptions};
use crate::limits::check_prompts;
use crate::refused;
use crate::routes::transfer;
use crate::schema::{Kind, request_fields, shown};

request_fields! {
    /// The shared fields.
    pub struct SamplingFields {
        /// Name of the model or one of its aliases; the served one if absent
        pub model: Option<String>,
        /// 0 picks the most likely token
        temperature: Option<f32> = Kind::Number(SamplingParams::TEMPERATURE),
        /// Keep the smallest set of tokens whose probability reaches this
        top_p: Option<f32> = Kind::Number(SamplingParams::TOP_P),
        /// Keep the k most likely tokens; 0 or -1 keeps all
        top_k: Option<i64> = Kind::Integer { min: -1, max: u32::MAX as i64 },
        /// Drop tokens less likely than this share of the most likely one
        min_p: Option<f32> = Kind::Number(SamplingParams::MIN_P),
        /// 1 changes nothing; more makes tokens already seen less likely
        repetition_penalty: Option<f32> = Kind::Number(SamplingParams::REPETITION_PENALTY),
        /// Subtracted from tokens the answer already has
        presence_penalty: Option<f32> = Kind::Number(SamplingParams::PENALTY),
        /// Subtracted from tokens for each time the answer has them
        frequency_penalty: Option<f32> = Kind::Number(SamplingParams::PENALTY),
        /// Token id to a number from -100 to 100, added to the token's logit
        logit_bias: Option<Map<String, Value>>,
        /// Same seed, same draws; choice i of n uses seed + i
        seed: Option<i64>,
        /// Text that ends the answer, wherever token borders fall
        stop: Option<Vec<String>>,
        /// Tokens that end the answer
        stop_token_ids: Option<Vec<u32>>,
        /// Leave the stop string in the text
        include_stop_str_in_output: Option<bool>,
        /// Another name for include_stop_str_in_output
        no_stop_trim: Option<bool>,
        /// Go on past the model's own end tokens
        pub ignore_eos: Option<bool>,
        /// Neither stop tokens nor stop strings count before this many tokens
        min_tokens: Option<usize>,
        /// Most tokens of each choice
        pub max_tokens: Option<usize>,
        /// Independent answers to the same prompt
        n: Option<usize> = Kind::AT_LEAST_ONE,
        /// Answer as server-sent events
        stream: Option<bool>,
        /// `include_usage`: true adds a last chunk with the token counts. `continuous_usage_stats`: only
        /// false
        stream_options: Option<Map<String, Value>>,
        /// Log-probabilities of the prompt's tokens, with that many alternatives
        pub prompt_logprobs: Option<usize> = Kind::Integer { min: 0, max: MAX_LOGPROBS },
        /// Leave special tokens out of the text; true if absent
        skip_special_tokens: Option<bool>,
        /// Frame the prompt with the tokenizer's special tokens
        pub add_special_tokens: Option<bool>,
        /// Shares cached prefixes only with requests that carry the same salt
        pub cache_salt: Option<String>,
        /// Keep the prompt's pages for another machine (`do_remote_decode`) or fetch them from one
        /// (`do_remote_prefill` and the other fields of its answer)
        kv_transfer_params: Option<Map<String, Value>>,
        /// Only false
        use_beam_search: Option<Value>,
    }
    ignored {
        /// Ignored
        user,
        /// Ignored
        metadata,
    }
}

impl SamplingFields {
    pub fn streams(&self) -> bool {
        self.stream == Some(true)
    }

    /// Whether a stream ends with the token counts.
    pub fn includes_usage(&self) -> Result<bool, ApiError> {
        let mut includes = false;
        for (name, value) in self.stream_options.iter().flatten() {
            let param = format!("stream_options.{name}");
            match (name.as_str(), value) {
                (_, Value::Null) => {}
                ("include_usage", Value::Bool(include)) => includes = *include,
                ("include_usage", other) => {
                    let problem = format!("must be true or false, not {}", shown(other));
                    return Err(ApiError::param(param, problem));
                }
                ("continuous_usage_stats", value) => {
                    let instead = "use include_usage, which counts once at the end";
                    refuse_unless(&param, Some(value), |value| value == false, instead)?;
                }
                _ => refused::skip(),
            }
        }
        Ok(includes)
    }

    pub fn choices(&self) -> usize {
        self.n.unwrap_or(1)
    }

    /// The engine's parameters. `max_tokens`, `logprobs` and `cache_salt` are left for the
    /// endpoint. The engine checks them when the request is made.
    pub fn params(&self, app: &App, prompts: usize) -> Result<GenerationParams, ApiError> {
        refuse_unless("use_beam_search", self.use_beam_search.as_ref(), |v| v == false, "raise n instead")?;
        let choices = self.choices();
        check_prompts(app, prompts, choices)?;
        let defaults = &app.defaults.sampling;
        let vocabulary = app.engine.info().vocab_size;
        let sampling = SamplingParams {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.map_or(defaults.top_k, |k| usize::try_from(k).unwrap_or(0)),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            // Both stay below 2^63, so that seed + i cannot overflow.
            seed: self.seed.map_or_else(|| app.ids.seed(), |seed| (seed & i64::MAX) as u64),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            logit_bias: match &self.logit_bias {
                Some(bias) => logit_bias(bias, vocabulary)?,
                None => defaults.logit_bias.clone(),
            },
        };
        let ours: &[u32] = if self.ignore_eos == Some(true) { &[] } else { &app.defaults.stop_tokens };
        let theirs = self.stop_token_ids.as_deref().unwrap_or_default();
        check_tokens("stop_token_ids", theirs, vocabulary)?;
        let mut stop_tokens = [ours, theirs].concat();
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        Ok(GenerationParams {
            sampling,
            max_tokens: 0,
            min_tokens: self.min_tokens.unwrap_or(0),
            stop_tokens,
            choices,
            logprobs: None,
            prompt_logprobs: self.prompt_logprobs,
            embedding: false,
            transfer: transfer::wanted(app, self.kv_transfer_params.as_ref(), prompts, self.streams())?,
            cache_salt: None,
            constraint: None,
            kv: KvRequest::default(),
        })
    }

    /// How the answer's text is cut. `reply`, `single_call` and `prompt_end` are left for
    /// the endpoint.
    pub fn text_options(&self, app: &App) -> Result<TextOptions, ApiError> {
        let stop = self.stop.clone().unwrap_or_default();
        let config = &app.config;
        if stop.len() > config.max_stop_strings {
            let problem =
                format!("{} strings are more than the {} allowed", stop.len(), config.max_stop_strings);
            return Err(ApiError::param("stop", problem));
        }
        if let Some(index) =
            stop.iter().position(|stop| stop.is_empty() || stop.len() > config.max_stop_bytes)
        {
            let problem = format!("string number {index} must have 1 to {} bytes", config.max_stop_bytes);
            return Err(ApiError::param("stop", problem));
        }
        Ok(TextOptions {
            stop,
            include_stop: self.include_stop_str_in_output.or(self.no_stop_trim).unwrap_or(false),
            skip_special: self.skip_special_tokens.unwrap_or(true),
            min_tokens: self.min_tokens.unwrap_or(0),
            reply: ReplyOptions::default(),
            single_call: false,
            prompt_end: String::new(),
        })
    }
}

/// The number of tokens to generate after a prompt: the requested number, else the rest of the
/// context or the model's default.
pub fn max_tokens(app: &App, prompt: usize, asked: Option<usize>) -> usize {
    let room = app.engine.info().context.saturating_sub(prompt);
    asked.unwrap_or_else(|| app.defaults.max_tokens.unwrap_or(room).min(room).max(1))
}

pub fn check_tokens(param: &str, tokens: &[u32], vocabulary: usize) -> Result<(), ApiError> {
    match tokens.iter().find(|&&token| token as usize >= vocabulary) {
        Some(token) => Err(ApiError::param(
            param,
            format!("token id {token} is not below the vocabulary's {vocabulary}"),
        )),
        None => Ok(()),
    }
}

fn logit_bias(bias: &Map<String, Value>, vocabulary: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    bias.iter()
        .map(|(token, value)| {
            let id = token.parse::<u32>().ok().filter(|&id| (id as usize) < vocabulary).ok_or_else(|| {
                let token = shown(&Value::String(token.clone()));
                ApiError::param("logit_bias", format!("{token} is no token id below {vocabulary}"))
            })?;
            let bias = Kind::Number(SamplingParams::LOGIT_BIAS);
            match value.as_f64() {
                Some(number) if bias.accepts(value) => Ok((id, number as f32)),
                _ => {
                    let (allowed, sent) = (bias.expected(), shown(value));
                    let problem = format!("the bias of token {id} must be {allowed}, not {sent}");
                    Err(ApiError::param("logit_bias", problem))
                }
            }
        })
        .collect()
}

/// Refuses a field that the server cannot serve, unless its value asks for nothing else than what
/// happens anyway.
pub fn refuse_unless(
    name: &str,
    value: Option<&Value>,
    harmless: impl Fn(&Value) -> bool,
    instead: &str,
) -> Result<(), ApiError> {
    match value {
        Some(value) if !harmless(value) => {
            Err(ApiError::param(name, format!("{} is not supported; {instead}", shown(value))))
        }
        _ => Ok(()),
    }
}
