//! What the operator decides; everything has a default that serves a laptop.

use std::time::Duration;

use oscar_engine::SamplingParams;

/// Settings of the HTTP side. The engine and the model have their own.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerConfig {
    pub host: String,
    pub port: u16,
    /// Any of these opens every route; with none, no key is asked for. `/health` never asks.
    pub api_keys: Vec<String>,
    /// Names the model answers to besides its own.
    pub model_aliases: Vec<String>,
    /// Largest request body; longer ones are refused with 413.
    pub max_body_bytes: usize,
    /// How long a client may take to send its body.
    pub body_timeout: Duration,
    /// Most sequences one HTTP request may ask for: prompts times `n`.
    pub max_choices: usize,
    /// Most stop strings of one request.
    pub max_stop_strings: usize,
    /// Longest stop string in bytes.
    pub max_stop_bytes: usize,
    /// What `Retry-After` says when the queue is full or the server is draining, in seconds.
    pub retry_after_seconds: u64,
    /// Silence after which a stream carries a comment, so that proxies keep it open.
    pub keep_alive: Duration,
    /// How long running requests may go on after the shutdown signal before they are cancelled.
    pub drain_timeout: Duration,
    /// Render a `chat_template` that arrives in a request. A template can use any amount of memory, so only for
    /// clients that are trusted like the operator.
    pub allow_request_template: bool,
    /// How a model's reasoning is told from its answer.
    pub reasoning: Reasoning,
    /// Origins whose web pages may call this server, `*` for all; none by default.
    pub cors_origins: Vec<String>,
    /// One log line for each request.
    pub access_log: bool,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 8000,
            api_keys: Vec::new(),
            model_aliases: Vec::new(),
            max_body_bytes: 32 << 20,
            body_timeout: Duration::from_secs(120),
            max_choices: 128,
            max_stop_strings: 32,
            max_stop_bytes: 1024,
            retry_after_seconds: 1,
            keep_alive: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(30),
            allow_request_template: false,
            reasoning: Reasoning::think(),
            cors_origins: Vec::new(),
            access_log: true,
        }
    }
}

/// Whether and how `reasoning_content` is split off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reasoning {
    /// Everything is content.
    Off,
    /// Text between the two tags is reasoning.
    Tags { open: String, close: String },
}

impl Reasoning {
    /// Qwen3's tags, which GLM and DeepSeek share. Harmless for models that never write them.
    pub fn think() -> Self {
        Self::Tags { open: "<think>".to_owned(), close: "</think>".to_owned() }
    }
}

/// What applies where a request says nothing: the model's `generation_config.json`, resolved.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct GenerationDefaults {
    /// The seed is ignored: a request without one gets a fresh seed.
    pub sampling: SamplingParams,
    /// The model's own end-of-turn tokens.
    pub stop_tokens: Vec<u32>,
    /// Most tokens of a chat answer; the rest of the context if absent.
    pub max_tokens: Option<usize>,
}

/// Form of the log lines on standard error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}
