//! The operator's settings; every one has a default that suits a laptop.

use std::time::Duration;

use oscar_engine::{PeerRules, SamplingParams};
use oscar_text::{Dialect, ReasoningTags, TextError};
use serde::Serialize;

use crate::keys::Keys;

/// Settings of the HTTP side. The engine and the model have their own.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    pub host: String,
    pub port: u16,
    /// Whether the server is only reachable from this machine. [`serve_on`](crate::serve_on) finds
    /// out by the address.
    pub loopback: bool,
    /// Who may call; with none, no key is asked for. `/health` never asks.
    pub keys: Keys,
    /// Serve other machines without keys.
    pub allow_anonymous: bool,
    /// Give every tenant a prefix cache of its own.
    pub isolate_keys: bool,
    /// Names besides the loopback ones that `Host` may hold on a loopback address, for reverse
    /// proxies.
    pub allowed_hosts: Vec<String>,
    /// Names the model answers to besides its own.
    pub model_aliases: Vec<String>,
    /// What is calibrated for the model: `none`, `rotations` or `widths`.
    pub calibration: &'static str,
    /// What users should know about the cache format that is served.
    pub cache_note: Option<String>,
    /// Where changes of the prefix cache are published, for `/server_info`.
    pub kv_events: Option<KvEvents>,
    /// How prompts are shared with other machines.
    pub transfer: TransferConfig,
    /// Largest request body; longer ones are refused with 413. By default enough for a prompt of
    /// the whole context.
    pub max_body_bytes: Option<usize>,
    /// How long a client may take to send its body.
    pub body_timeout: Duration,
    /// Most connections at once; lower where the process may not open that many files.
    pub max_connections: usize,
    /// How long the head of a request may take from its first byte on, or from the connection's
    /// beginning.
    pub header_timeout: Duration,
    /// How long a connection may stay open between two requests.
    pub idle_timeout: Duration,
    /// How long a client may leave an answer unread.
    pub write_timeout: Duration,
    /// How long a request may take from its head to the last byte of its answer, if that is
    /// limited.
    pub request_timeout: Option<Duration>,
    /// Most sequences one HTTP request may ask for: prompts times `n`.
    pub max_choices: usize,
    /// Most stop strings of one request.
    pub max_stop_strings: usize,
    /// Longest stop string in bytes.
    pub max_stop_bytes: usize,
    /// The value of `Retry-After` when the queue is full or the server is draining, in seconds.
    pub retry_after_seconds: u64,
    /// Silence after which a stream carries a comment, so that proxies keep it open.
    pub keep_alive: Duration,
    /// How long running requests may go on after the shutdown signal before they are cancelled.
    pub drain_timeout: Duration,
    /// How long health checks are answered with 503 after the engine has died or is stuck, before
    /// the server gives up.
    pub fault_grace: Duration,
    /// Render a `chat_template` that arrives in a request.
    pub allow_request_template: bool,
    /// How a model's reasoning is told from its answer.
    pub reasoning: Reasoning,
    /// How tool calls are read out of a model's answers.
    pub tool_call_parser: ToolCallParser,
    /// Origins whose web pages may call this server, `*` for all; none by default.
    pub cors_origins: Vec<String>,
    /// One log line for each request.
    pub access_log: bool,
    /// Certificate and key; without them the server speaks plain HTTP.
    #[cfg(feature = "tls")]
    pub tls: Option<crate::Tls>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 8000,
            loopback: true,
            keys: Keys::default(),
            allow_anonymous: false,
            isolate_keys: false,
            allowed_hosts: Vec::new(),
            model_aliases: Vec::new(),
            calibration: "none",
            cache_note: None,
            kv_events: None,
            transfer: TransferConfig::default(),
            max_body_bytes: None,
            body_timeout: Duration::from_secs(60),
            max_connections: 1024,
            header_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(75),
            write_timeout: Duration::from_secs(60),
            request_timeout: Some(Duration::from_secs(3600)),
            max_choices: 128,
            max_stop_strings: 32,
            max_stop_bytes: 1024,
            retry_after_seconds: 1,
            keep_alive: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(30),
            fault_grace: Duration::from_secs(5),
            allow_request_template: false,
            reasoning: Reasoning::think(),
            tool_call_parser: ToolCallParser::Auto,
            cors_origins: Vec::new(),
            access_log: true,
            #[cfg(feature = "tls")]
            tls: None,
        }
    }
}

/// Pages of prompts between machines: what tickets say, and whose tickets are taken.
#[derive(Clone, Debug, Default)]
pub struct TransferConfig {
    /// Where other machines fetch the pages that this one keeps, if it does.
    pub desk: Option<DeskAddress>,
    /// Machines whose tickets are taken.
    pub peers: PeerRules,
}

/// Where the pages of a ticket are fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeskAddress {
    pub host: String,
    pub port: u16,
}

/// The publisher of cache events as routers find it: the names are SGLang's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KvEvents {
    pub publisher: &'static str,
    /// `*` if it is the server's own.
    pub endpoint_host: String,
    pub endpoint_port_base: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replay_endpoint_port_base: Option<u16>,
    pub topic: String,
    pub block_size: usize,
    pub dp_size: usize,
}

/// The server would be open to other machines without a key.
#[derive(Debug, thiserror::Error)]
#[error(
    "anyone who reaches {host} could use this server: give it keys (--api-key-file or OSCAR_API_KEYS), listen on \
     127.0.0.1, or say --allow-anonymous"
)]
pub struct ExposedError {
    host: String,
}

impl ServerConfig {
    /// Refuses to serve other machines without keys, unless that is wanted.
    pub fn check_exposure(&self) -> Result<(), ExposedError> {
        match self.loopback || self.allow_anonymous || !self.keys.is_empty() {
            true => Ok(()),
            false => Err(ExposedError { host: self.host.clone() }),
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

/// Which dialect of tool calls is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolCallParser {
    /// The one that the chat template writes.
    #[default]
    Auto,
    /// None: calls stay in the text.
    Off,
    Dialect(Dialect),
}

impl ToolCallParser {
    /// Reads the name of a parser, `auto` or `none`.
    ///
    /// # Errors
    /// Lists the names if there is no such parser.
    pub fn from_name(name: &str) -> Result<Self, TextError> {
        match name {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::Off),
            _ => Dialect::from_name(name).map(Self::Dialect),
        }
    }
}

impl Reasoning {
    /// The tags, if reasoning is split off.
    pub fn tags(&self) -> Option<ReasoningTags> {
        match self {
            Self::Off => None,
            Self::Tags { open, close } => Some(ReasoningTags { open: open.clone(), close: close.clone() }),
        }
    }

    /// Qwen3's tags, which GLM and DeepSeek share. Harmless for models that never write them.
    pub fn think() -> Self {
        Self::Tags { open: "<think>".to_owned(), close: "</think>".to_owned() }
    }
}

/// Defaults of requests: the model's `generation_config.json`, resolved.
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
    /// One JSON object on each line.
    Json,
}
