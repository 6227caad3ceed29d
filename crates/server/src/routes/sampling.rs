//! The fields that chat and plain completions share, and what they ask of the engine.

use oscar_engine::{GenerationParams, SamplingParams};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::app::App;
use crate::error::ApiError;
use crate::generate::{MAX_LOGPROBS, TextOptions};
use crate::limits::{check_prompts, context_exceeded};
use crate::schema::{Field, Kind, shown};

const ANY_INTEGER: Kind = Kind::Integer { min: i64::MIN, max: i64::MAX };
const COUNT: Kind = Kind::Integer { min: 0, max: i64::MAX };

pub const FIELDS: &[Field] = &[
    Field::new("model", Kind::Text, "Name of the model or one of its aliases; the served one if absent"),
    Field::new(
        "temperature",
        Kind::Number { min: 0.0, max: 100.0, above: false },
        "0 picks the most likely token",
    ),
    Field::new(
        "top_p",
        Kind::Number { min: 0.0, max: 1.0, above: true },
        "Keep the smallest set of tokens whose probability reaches this",
    ),
    Field::new(
        "top_k",
        Kind::Integer { min: -1, max: u32::MAX as i64 },
        "Keep the k most likely tokens; 0 or -1 keeps all",
    ),
    Field::new(
        "min_p",
        Kind::Number { min: 0.0, max: 1.0, above: false },
        "Drop tokens less likely than this share of the most likely one",
    ),
    Field::new(
        "repetition_penalty",
        Kind::Number { min: 0.0, max: 100.0, above: true },
        "1 changes nothing; more makes tokens already seen less likely",
    ),
    Field::new(
        "presence_penalty",
        Kind::Number { min: -2.0, max: 2.0, above: false },
        "Subtracted from tokens the answer already has",
    ),
    Field::new(
        "frequency_penalty",
        Kind::Number { min: -2.0, max: 2.0, above: false },
        "Subtracted from tokens for each time the answer has them",
    ),
    Field::new(
        "logit_bias",
        Kind::Object,
        "Token id to a number from -100 to 100, added to the token's logit",
    ),
    Field::new("seed", ANY_INTEGER, "Same seed, same draws; choice i of n uses seed + i"),
    Field::new("stop", Kind::TextOrTexts, "Text that ends the answer, wherever token borders fall"),
    Field::new("stop_token_ids", Kind::Tokens, "Tokens that end the answer"),
    Field::new("include_stop_str_in_output", Kind::Boolean, "Leave the stop string in the text"),
    Field::new("no_stop_trim", Kind::Boolean, "Another name for include_stop_str_in_output"),
    Field::new("ignore_eos", Kind::Boolean, "Go on past the model's own end tokens"),
    Field::new("min_tokens", COUNT, "Neither stop tokens nor stop strings count before this many tokens"),
    Field::new("max_tokens", COUNT, "Most tokens of each choice"),
    Field::new("n", Kind::Integer { min: 1, max: i64::MAX }, "Independent answers to the same prompt"),
    Field::new("stream", Kind::Boolean, "Answer as server-sent events"),
    Field::new(
        "stream_options",
        Kind::Object,
        "`include_usage`: true adds a last chunk with the token counts",
    ),
    Field::new(
        "prompt_logprobs",
        Kind::Integer { min: 0, max: MAX_LOGPROBS },
        "Log-probabilities of the prompt's tokens, with that many alternatives",
    ),
    Field::new("skip_special_tokens", Kind::Boolean, "Leave special tokens out of the text; true if absent"),
    Field::new("add_special_tokens", Kind::Boolean, "Frame the prompt with the tokenizer's special tokens"),
    Field::new(
        "cache_salt",
        Kind::Text,
        "Shares cached prefixes only with requests that carry the same salt",
    ),
    Field::new("use_beam_search", Kind::Any, "Only false"),
    Field::new("user", Kind::Ignored, "Ignored"),
    Field::new("metadata", Kind::Ignored, "Ignored"),
];

/// The shared fields as they arrive.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct SamplingFields {
    pub model: Option<String>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<Map<String, Value>>,
    seed: Option<i64>,
    stop: Option<OneOrMany>,
    stop_token_ids: Option<Vec<u32>>,
    include_stop_str_in_output: Option<bool>,
    no_stop_trim: Option<bool>,
    ignore_eos: Option<bool>,
    min_tokens: Option<usize>,
    pub max_tokens: Option<usize>,
    n: Option<usize>,
    pub stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    pub prompt_logprobs: Option<usize>,
    skip_special_tokens: Option<bool>,
    pub add_special_tokens: Option<bool>,
    pub cache_salt: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: Option<bool>,
}

impl SamplingFields {
    pub fn streams(&self) -> bool {
        self.stream == Some(true)
    }

    pub fn includes_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|options| options.include_usage) == Some(true)
    }

    pub fn choices(&self) -> usize {
        self.n.unwrap_or(1)
    }

    /// Reads and checks everything that needs more than a type. `max_tokens` is left for [`fit`].
    pub fn params(&self, app: &App, prompts: usize) -> Result<GenerationParams, ApiError> {
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
            cache_salt: None,
        })
    }

    /// How the answer's text is to be cut; `prompt_end` and `reasoning` are the endpoint's to fill in.
    pub fn text_options(&self, app: &App) -> Result<TextOptions, ApiError> {
        let stop = match self.stop.clone() {
            None => Vec::new(),
            Some(OneOrMany::One(stop)) => vec![stop],
            Some(OneOrMany::Many(stops)) => stops,
        };
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
            reasoning: crate::Reasoning::Off,
            prompt_end: String::new(),
        })
    }
}

/// The tokens that may be generated after `prompt` of them: what was asked for if it fits the context, the rest of
/// the context if nothing was.
pub fn fit(app: &App, prompt: usize, asked: Option<usize>) -> Result<usize, ApiError> {
    let context = app.engine.info().context;
    let exceeded = |max_tokens| context_exceeded(app, prompt, max_tokens);
    let room = context.saturating_sub(prompt);
    match asked {
        Some(asked) if asked <= room => Ok(asked),
        Some(asked) => Err(exceeded(asked)),
        None if room == 0 => Err(exceeded(1)),
        None => Ok(app.defaults.max_tokens.unwrap_or(room).min(room)),
    }
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
            match value.as_f64() {
                Some(value) if (-100.0..=100.0).contains(&value) => Ok((id, value as f32)),
                _ => {
                    let problem = format!(
                        "the bias of token {id} must be a number from -100 to 100, not {}",
                        shown(value)
                    );
                    Err(ApiError::param("logit_bias", problem))
                }
            }
        })
        .collect()
}

/// Refuses a field whose meaning the server cannot give, unless it asks for what happens anyway.
pub fn refuse_unless(
    body: &Map<String, Value>,
    name: &str,
    harmless: impl Fn(&Value) -> bool,
    instead: &str,
) -> Result<(), ApiError> {
    match body.get(name) {
        None | Some(Value::Null) => Ok(()),
        Some(value) if harmless(value) => Ok(()),
        Some(value) => Err(ApiError::param(name, format!("{} is not supported; {instead}", shown(value)))),
    }
}
