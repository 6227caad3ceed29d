//! The settings of `oscar serve`.
//!
//! A setting is declared once, as a field of [`Config`]: its doc comment is the help text, its
//! `default_value` is the default, its name is the key in the configuration file.
//! [`Flags::resolve`] merges defaults, file and command line; the values of the file are parsed and
//! checked like flags.

use super::events::EventArgs;
use super::grpc::GrpcArgs;
use super::keys::KeySource;
use super::load::LoadArgs;
use crate::device::AnyBackend;
use crate::options::{at_least_one, parse_size, serialize_optional_size};
use crate::transfer::TransferArgs;
use anyhow::{Context, Result, bail};
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, FromArgMatches};
use oscar_engine::EngineOptions;
use oscar_server::{Keys, LogFormat, Reasoning, ServerConfig, ToolCallParser, check_log_filter};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Every setting of the server. `--print-config` prints exactly this.
#[derive(Args, Serialize)]
pub struct Config {
    #[command(flatten)]
    #[serde(flatten)]
    pub load: LoadArgs,
    /// Maximum number of waiting requests; further ones get 429
    #[arg(long, value_name = "N", value_parser = at_least_one, default_value_t = EngineOptions::new("").max_queue)]
    pub max_queue: usize,
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value_t = ServerConfig::default().host)]
    pub host: String,
    /// Port to listen on; 0 picks a free one
    #[arg(long, value_name = "N", default_value_t = ServerConfig::default().port)]
    pub port: u16,
    /// File with API keys, one on each line: `KEY` or `user|operator NAME KEY [requests=N]
    /// [tokens=N]`; read again on SIGHUP. OSCAR_API_KEYS and OSCAR_OPERATOR_KEYS (comma-separated)
    /// work too
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Serve HTTPS: PEM file with the server's certificate and those that lead to its authority; read again on SIGHUP
    #[cfg(feature = "tls")]
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_certificate: Option<PathBuf>,
    /// PEM file with the private key of --tls-certificate
    #[cfg(feature = "tls")]
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    pub tls_key: Option<PathBuf>,
    /// Send traces for OpenTelemetry to the collector at this address (OTLP over HTTP), e.g.
    /// http://127.0.0.1:4318
    #[cfg(feature = "otel")]
    #[arg(long, value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// Share of the requests without a `traceparent` that are traced. Each step of a traced request is a span
    #[cfg(feature = "otel")]
    #[arg(long, value_name = "SHARE", default_value_t = 1.0)]
    pub otlp_sample: f64,
    /// Serve other machines without API keys
    #[arg(long)]
    pub allow_anonymous: bool,
    /// Give every key's tenant its own prefix cache, so that none can learn what another sent
    #[arg(long)]
    pub isolate_keys: bool,
    /// Names besides localhost that clients may use for a server on a loopback address, e.g. behind
    /// a proxy
    #[arg(long, value_name = "NAME")]
    pub allowed_host: Vec<String>,
    /// Further names of the model in requests; its repository and its short name always work
    #[arg(long, visible_alias = "model-alias", value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub served_model_name: Vec<String>,
    /// Web origins that may call the API, `*` for all
    #[arg(long, value_name = "ORIGIN")]
    pub cors_origin: Vec<String>,
    /// Largest request body; by default enough for a prompt of the whole context, at most 32M
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    #[serde(serialize_with = "serialize_optional_size")]
    pub max_body_bytes: Option<usize>,
    /// Maximum number of connections; health checks are answered beyond it
    #[arg(long, value_name = "N", value_parser = at_least_one, default_value_t = ServerConfig::default().max_connections)]
    pub max_connections: usize,
    /// Seconds that the head of a request may take
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..), default_value_t = ServerConfig::default().header_timeout.as_secs())]
    pub header_timeout: u64,
    /// Seconds that a connection may stay open between two requests
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..), default_value_t = ServerConfig::default().idle_timeout.as_secs())]
    pub idle_timeout: u64,
    /// Seconds that a request may take, its answer included; 0 for no limit
    #[arg(long, value_name = "SECONDS", default_value_t = ServerConfig::default().request_timeout.map_or(0, |t| t.as_secs()))]
    pub request_timeout: u64,
    /// Seconds that running requests get to finish after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = ServerConfig::default().drain_timeout.as_secs())]
    pub drain_timeout: u64,
    /// Seconds after which a step of the engine counts as stuck: `/health` then answers 503 and the
    /// server ends; 0 for never. 120 on a GPU and 1800 on a CPU if absent, in any case ten times
    /// the longest step so far
    #[arg(long, value_name = "SECONDS")]
    pub stuck_after: Option<u64>,
    /// Render a chat template that arrives in a request; only for trusted clients
    #[arg(long)]
    pub allow_request_template: bool,
    /// Keep `<think>` text in the content instead of `reasoning_content`
    #[arg(long)]
    pub no_reasoning_split: bool,
    /// Dialect in which the model writes tool calls: `auto` takes the chat template's, `none` leaves calls in
    /// the text
    #[arg(long, value_name = "NAME", value_parser = tool_call_parser, default_value = "auto")]
    pub tool_call_parser: String,
    #[command(flatten)]
    #[serde(flatten)]
    pub events: EventArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub grpc: GrpcArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub transfer: TransferArgs,
    /// Format of the log lines
    #[arg(long, value_name = "FORMAT", value_parser = ["text", "json"], default_value = "text")]
    pub log_format: String,
    /// Log filter, e.g. `info` or `warn,oscar_server=debug`
    #[arg(long, value_name = "FILTER", value_parser = log_filter, default_value = "info")]
    pub log: String,
}

fn tool_call_parser(name: &str) -> Result<String, String> {
    ToolCallParser::from_name(name).map(|_| name.to_owned()).map_err(|error| error.to_string())
}

fn log_filter(text: &str) -> Result<String, String> {
    check_log_filter(text).map(|()| text.to_owned()).map_err(|e| e.to_string())
}

/// The command line: any setting, and where further ones are.
#[derive(Args)]
pub struct Flags {
    #[command(flatten)]
    typed: Values,
    /// TOML file with any of these settings (underscores for dashes); flags win over it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the configuration that would be used, as TOML, and exit
    #[arg(long)]
    pub print_config: bool,
}

impl Flags {
    /// Defaults, then the file, then the flags.
    pub fn resolve(&self) -> Result<Config> {
        let Some(path) = &self.config else { return Ok(self.typed.parse()?) };
        let resolve = || -> Result<Config> {
            let mut values = Values::from_toml(&std::fs::read_to_string(path)?)?;
            values.0.extend(self.typed.0.clone());
            values.parse().map_err(|error| {
                let text = error.to_string();
                let line = text.lines().next().unwrap_or_default();
                anyhow::Error::msg(line.trim_start_matches("error: ").to_owned())
            })
        };
        resolve().with_context(|| format!("--config {}", path.display()))
    }
}

/// Settings as text, by field name; only those that somebody gave. A switch has the value `true` or
/// `false`.
#[derive(Clone, Default)]
struct Values(BTreeMap<String, Vec<OsString>>);

impl Values {
    fn command() -> clap::Command {
        Config::augment_args(clap::Command::new("oscar serve"))
    }

    fn from_toml(text: &str) -> Result<Self> {
        let command = Self::command();
        let mut values = BTreeMap::new();
        for (name, value) in text.parse::<toml::Table>()? {
            let Some(arg) = command.get_arguments().find(|arg| arg.get_id() == name.as_str()) else {
                bail!("unknown setting `{name}`");
            };
            let list = match value {
                toml::Value::Array(list) => list,
                toml::Value::Boolean(_) if !arg.get_action().takes_values() => vec![value],
                _ if !arg.get_action().takes_values() => bail!("`{name}`: use true or false"),
                other => vec![other],
            };
            let list: Result<Vec<OsString>> = list
                .into_iter()
                .map(|value| match value {
                    toml::Value::String(text) => Ok(text.into()),
                    toml::Value::Array(_) | toml::Value::Table(_) => bail!("`{name}`: use a plain value"),
                    other => Ok(other.to_string().into()),
                })
                .collect();
            values.insert(name, list?);
        }
        Ok(Self(values))
    }

    fn parse(&self) -> Result<Config, clap::Error> {
        let mut line = vec![OsString::from("oscar serve")];
        for arg in Self::command().get_arguments() {
            let (Some(values), Some(long)) = (self.0.get(arg.get_id().as_str()), arg.get_long()) else {
                continue;
            };
            for value in values {
                if arg.get_action().takes_values() {
                    let mut text = OsString::from(format!("--{long}="));
                    text.push(value);
                    line.push(text);
                } else if value == "true" {
                    line.push(format!("--{long}").into());
                }
            }
        }
        Config::from_arg_matches(&Self::command().try_get_matches_from(line)?)
    }
}

impl Args for Values {
    fn augment_args(command: clap::Command) -> clap::Command {
        Config::augment_args(command)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Config::augment_args_for_update(command)
    }
}

impl FromArgMatches for Values {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut values = Self::default();
        values.update_from_arg_matches(matches)?;
        Ok(values)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for arg in Self::command().get_arguments() {
            let name = arg.get_id().as_str();
            let source = matches.value_source(name);
            if let Some(raw) = matches.get_raw(name).filter(|_| source != Some(ValueSource::DefaultValue)) {
                self.0.insert(name.to_owned(), raw.map(ToOwned::to_owned).collect());
            }
        }
        Ok(())
    }
}

impl Config {
    pub fn log_format(&self) -> LogFormat {
        if self.log_format == "json" { LogFormat::Json } else { LogFormat::Text }
    }

    pub fn server(&self) -> Result<ServerConfig> {
        Ok(ServerConfig {
            host: self.host.clone(),
            port: self.port,
            keys: Keys::new(self.key_source().read()?),
            allow_anonymous: self.allow_anonymous,
            isolate_keys: self.isolate_keys,
            allowed_hosts: self.allowed_host.clone(),
            model_aliases: self.served_model_name.clone(),
            max_body_bytes: self.max_body_bytes,
            max_connections: self.max_connections,
            header_timeout: Duration::from_secs(self.header_timeout),
            idle_timeout: Duration::from_secs(self.idle_timeout),
            request_timeout: (self.request_timeout > 0).then(|| Duration::from_secs(self.request_timeout)),
            drain_timeout: Duration::from_secs(self.drain_timeout),
            allow_request_template: self.allow_request_template,
            reasoning: if self.no_reasoning_split { Reasoning::Off } else { Reasoning::think() },
            tool_call_parser: ToolCallParser::from_name(&self.tool_call_parser)?,
            cors_origins: self.cors_origin.clone(),
            #[cfg(feature = "tls")]
            tls: self.tls()?,
            ..ServerConfig::default()
        })
    }

    /// The engine's options with those that only a server has.
    pub fn complete(&self, options: EngineOptions, backend: &AnyBackend) -> EngineOptions {
        let stuck_after = self.stuck_after.unwrap_or_else(|| backend.default_stuck_after().as_secs());
        let stuck_after = (stuck_after > 0).then(|| Duration::from_secs(stuck_after));
        EngineOptions { stuck_after, max_queue: self.max_queue, ..options }
    }

    /// Sets up logging and, where they are wanted, traces.
    pub fn init_logging(&self) -> Result<oscar_server::LogGuard> {
        #[cfg(feature = "otel")]
        if let Some(endpoint) = &self.otlp_endpoint {
            let traces = oscar_server::TraceOptions::new(endpoint, self.otlp_sample)
                .context("--otlp-endpoint and --otlp-sample")?;
            return Ok(oscar_server::init_logging_and_traces(self.log_format(), &self.log, &traces)?);
        }
        Ok(oscar_server::init_logging(self.log_format(), &self.log)?)
    }

    #[cfg(feature = "tls")]
    fn tls(&self) -> Result<Option<oscar_server::Tls>> {
        let (Some(certificate), Some(key)) = (&self.tls_certificate, &self.tls_key) else { return Ok(None) };
        oscar_server::Tls::read(certificate, key).map(Some).context("--tls-certificate and --tls-key")
    }

    pub fn key_source(&self) -> KeySource {
        KeySource::new(self.api_key_file.as_deref())
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
