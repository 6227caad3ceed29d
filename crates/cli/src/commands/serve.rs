//! `oscar serve`: the OpenAI-compatible server.
//!
//! What the user typed ([`Flags`]) is laid over the configuration file and the defaults, giving a [`Config`] in
//! which everything is decided; `--print-config` prints exactly that.

use crate::options::{
    CacheArgs, Device, ModelArgs, OpenModel, PrecisionArg, WeightsArg, parse_size, working_bytes,
};
use crate::progress;
use anyhow::{Context, Result, bail};
use oscar_backend::Backend;
use oscar_codec::KvFormat;
use oscar_engine::{Engine, EngineApi, EngineOptions, SchedulerOptions};
use oscar_server::{
    GenerationDefaults, LogFormat, Reasoning, ServerConfig, check_log_filter, init_logging, serve_on,
};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// What may be given on the command line; every field but the last two may also stand in the file.
#[derive(clap::Args, Serialize)]
pub struct Flags {
    /// Model: a directory, or a name in the local Hugging Face cache; the embedded model if absent
    #[arg(long, value_name = "DIR|NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    /// KV-cache format; `oscar doctor` lists them [default: oscar2]
    #[arg(long, value_name = "FORMAT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    kv: Option<String>,
    /// Rotations of the cache: a file made by `oscar calibrate`, or `hadamard`; the model's own file if absent
    #[arg(long, value_name = "FILE|hadamard")]
    #[serde(skip_serializing_if = "Option::is_none")]
    rotations: Option<String>,
    /// Tokens at the beginning of a sequence kept in BF16 [default: 64, or what the format's source publishes]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    sink: Option<usize>,
    /// Most recent tokens kept in BF16 [default: 256, or what the format's source publishes]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    recent: Option<usize>,
    /// Memory for KV pages, e.g. 8G [default: room for 8 sequences of the whole context, at most half the memory]
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_memory: Option<String>,
    /// Longest sequence in tokens; the model's own limit if absent
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    context: Option<usize>,
    /// auto, cpu or cuda [default: auto]
    #[arg(long, value_name = "DEVICE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<Device>,
    /// Threads; all cores if absent
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    threads: Option<usize>,
    /// bf16, fast or f32 [default: bf16]
    #[arg(long, value_name = "PRECISION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    precision: Option<PrecisionArg>,
    /// Weights of the layers, bf16 or fp8; as the checkpoint has them if absent
    #[arg(long, value_name = "FORMAT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    weights: Option<WeightsArg>,
    /// Most sequences running at once [default: 32]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_batch: Option<usize>,
    /// Most tokens of one engine step, prompts and decodes together [default: 256]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    step_tokens: Option<usize>,
    /// Most prompt tokens of one sequence in a step [default: 512]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_chunk: Option<usize>,
    /// Most requests that may wait; further ones get 429 [default: 256]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_queue: Option<usize>,
    /// Forget every sequence when it ends
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    no_prefix_cache: bool,
    /// Never code the BF16 tail of a stored prefix to make room: evict it instead, so that a hit is always exact
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    exact_hits: bool,
    /// Address to listen on [default: 127.0.0.1]
    #[arg(long, value_name = "ADDRESS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<String>,
    /// Port to listen on; 0 picks a free one [default: 8000]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    /// File with API keys, one a line; OSCAR_API_KEYS (comma-separated) works too
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    api_key_file: Option<PathBuf>,
    /// Further names the model answers to
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    model_alias: Vec<String>,
    /// Web origins that may call the API, `*` for all
    #[arg(long, value_name = "ORIGIN")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cors_origin: Vec<String>,
    /// Largest request body [default: 32M]
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_body_bytes: Option<String>,
    /// Seconds that running requests get after SIGTERM [default: 30]
    #[arg(long, value_name = "SECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    drain_timeout: Option<u64>,
    /// Render a chat template that arrives in a request; only for trusted clients
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    allow_request_template: bool,
    /// Keep `<think>` text in the content instead of `reasoning_content`
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    no_reasoning_split: bool,
    /// Log lines as `text` or `json` [default: text]
    #[arg(long, value_name = "FORMAT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    log_format: Option<String>,
    /// Log filter, e.g. `info` or `warn,oscar_server=debug` [default: info]
    #[arg(long, value_name = "FILTER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    log: Option<String>,
    /// TOML file with any of these settings (underscores for dashes); flags win over it
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    config: Option<PathBuf>,
    /// Print the configuration that would be used, as TOML, and exit
    #[arg(long)]
    #[serde(skip)]
    print_config: bool,
}

/// Everything decided.
#[derive(Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Config {
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    kv: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    rotations: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sink: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    recent: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_memory: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    context: Option<usize>,
    device: Device,
    #[serde(skip_serializing_if = "Option::is_none")]
    threads: Option<usize>,
    precision: PrecisionArg,
    #[serde(skip_serializing_if = "Option::is_none")]
    weights: Option<WeightsArg>,
    max_batch: usize,
    step_tokens: usize,
    prefill_chunk: usize,
    max_queue: usize,
    no_prefix_cache: bool,
    exact_hits: bool,
    host: String,
    port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    api_key_file: Option<PathBuf>,
    model_alias: Vec<String>,
    cors_origin: Vec<String>,
    max_body_bytes: String,
    drain_timeout: u64,
    allow_request_template: bool,
    no_reasoning_split: bool,
    log_format: String,
    log: String,
}

impl Default for Config {
    fn default() -> Self {
        let scheduler = SchedulerOptions::default();
        Self {
            model: None,
            kv: "oscar".into(),
            rotations: None,
            sink: None,
            recent: None,
            kv_memory: None,
            context: None,
            device: Device::Auto,
            threads: None,
            precision: PrecisionArg::Bf16,
            weights: None,
            max_batch: scheduler.max_batch,
            step_tokens: scheduler.step_tokens,
            prefill_chunk: scheduler.prefill_chunk,
            max_queue: 256,
            no_prefix_cache: false,
            exact_hits: false,
            host: "127.0.0.1".into(),
            port: 8000,
            api_key_file: None,
            model_alias: Vec::new(),
            cors_origin: Vec::new(),
            max_body_bytes: "32M".into(),
            drain_timeout: 30,
            allow_request_template: false,
            no_reasoning_split: false,
            log_format: "text".into(),
            log: "info".into(),
        }
    }
}

impl Config {
    /// Defaults, then the file, then the flags.
    fn resolve(flags: &Flags) -> Result<Self> {
        let mut table = match &flags.config {
            Some(path) => {
                let text =
                    std::fs::read_to_string(path).with_context(|| format!("--config {}", path.display()))?;
                text.parse::<toml::Table>().with_context(|| format!("--config {}", path.display()))?
            }
            None => toml::Table::new(),
        };
        table.extend(toml::Table::try_from(flags).context("the flags")?);
        let config: Self = table.try_into().with_context(|| match &flags.config {
            Some(path) => format!("--config {}", path.display()),
            None => "the flags".into(),
        })?;
        if config.max_batch == 0 || config.step_tokens == 0 || config.prefill_chunk == 0 {
            bail!("max_batch, step_tokens and prefill_chunk must be at least 1");
        }
        config.log_format()?;
        check_log_filter(&config.log).context("log")?;
        config.kv.parse::<KvFormat>().context("kv")?;
        config.kv_memory()?;
        config.max_body_bytes()?;
        Ok(config)
    }

    fn log_format(&self) -> Result<LogFormat> {
        match self.log_format.as_str() {
            "text" => Ok(LogFormat::Text),
            "json" => Ok(LogFormat::Json),
            other => bail!("log_format '{other}': use text or json"),
        }
    }

    fn kv_memory(&self) -> Result<Option<usize>> {
        let size = self.kv_memory.as_deref().map(parse_size).transpose();
        size.map_err(anyhow::Error::msg).context("kv_memory")
    }

    fn max_body_bytes(&self) -> Result<usize> {
        parse_size(&self.max_body_bytes).map_err(anyhow::Error::msg).context("max_body_bytes")
    }

    fn server(&self) -> Result<ServerConfig> {
        Ok(ServerConfig {
            host: self.host.clone(),
            port: self.port,
            api_keys: self.api_keys()?,
            model_aliases: self.model_alias.clone(),
            max_body_bytes: self.max_body_bytes()?,
            drain_timeout: Duration::from_secs(self.drain_timeout),
            allow_request_template: self.allow_request_template,
            reasoning: if self.no_reasoning_split { Reasoning::Off } else { Reasoning::think() },
            cors_origins: self.cors_origin.clone(),
            ..ServerConfig::default()
        })
    }

    fn api_keys(&self) -> Result<Vec<String>> {
        let mut keys = Vec::new();
        if let Some(path) = &self.api_key_file {
            keys = read_keys(path)?;
        }
        if let Ok(list) = std::env::var("OSCAR_API_KEYS") {
            keys.extend(list.split(',').map(str::trim).filter(|k| !k.is_empty()).map(str::to_owned));
        }
        Ok(keys)
    }
}

/// Keys of a file, one a line, `#` begins a comment. A file without a key is an error: it would open the server.
fn read_keys(path: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("--api-key-file {}", path.display()))?;
    let keys: Vec<String> = text
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
        .map(str::to_owned)
        .collect();
    if keys.is_empty() {
        bail!("--api-key-file {} holds no key: the server would be open to everyone", path.display());
    }
    Ok(keys)
}

pub fn run(flags: &Flags) -> Result<()> {
    let config = Config::resolve(flags)?;
    if flags.print_config {
        print!("{}", toml::to_string_pretty(&config)?);
        return Ok(());
    }
    init_logging(config.log_format()?, &config.log)?;
    let server = config.server()?;

    let model_args = ModelArgs {
        model: config.model.clone(),
        device: config.device,
        threads: config.threads,
        precision: config.precision,
        weights: config.weights,
    };
    let model = model_args.open()?;
    let text = model.text()?;
    let generation = model.generation()?;
    let format: KvFormat = config.kv.parse()?;
    let cache_args = CacheArgs {
        rotations: config.rotations.clone(),
        sink: config.sink,
        recent: config.recent,
        prefill_chunk: config.prefill_chunk,
        kv_memory: config.kv_memory()?,
    };
    let cache = model.cache(format, &cache_args)?;
    let context = config.context.unwrap_or(model.config.max_position_embeddings);
    if context == 0 {
        bail!("context 0: at least one token must fit");
    }
    let backend = model_args.backend()?;
    let held = backend.held_layout(&cache.layout);
    let least = working_bytes(&held, context.min(config.prefill_chunk), config.prefill_chunk);
    if let Some(bytes) = cache_args.kv_memory.filter(|&bytes| bytes < least) {
        bail!(
            "kv_memory of {} cannot hold one prefill step of this model: give at least {}",
            progress::bytes(bytes),
            progress::bytes(least)
        );
    }
    eprintln!("{}: {}", model.name, backend.describe());
    if let Some(weights) = model.describe_weights(&cache, &backend) {
        eprintln!("{weights}");
    }
    eprintln!("cache: {}; rotations: {}", cache.layout.describe(), cache.rotation_origin);
    eprintln!("attention: {}", backend.describe_attention(&cache.layout));
    let cache_args = CacheArgs {
        kv_memory: Some(
            cache_args.kv_memory.unwrap_or_else(|| default_kv_memory(&held, context, config.prefill_chunk)),
        ),
        ..cache_args
    };
    let bar = progress::bar("loading", model.config.layers as u64);
    let runner =
        cache.runner(&model, backend, &cache_args, context, 1, |layers| bar.set_position(layers as u64))?;
    bar.finish_and_clear();
    eprintln!("KV memory: {}", progress::bytes(cache_args.kv_memory.unwrap_or_default()));

    let defaults = GenerationDefaults {
        sampling: OpenModel::default_sampling(&generation),
        stop_tokens: generation.stop_token_ids(&model.config).to_vec(),
        max_tokens: None,
    };
    let options = EngineOptions {
        scheduler: SchedulerOptions {
            max_batch: config.max_batch,
            step_tokens: config.step_tokens,
            prefill_chunk: config.prefill_chunk,
            ..SchedulerOptions::default()
        },
        max_queue: config.max_queue,
        prefix_cache: !config.no_prefix_cache,
        demote_idle_tails: !config.exact_hits,
        ..EngineOptions::new(model.name.clone())
    };
    let engine: Arc<dyn EngineApi> =
        Arc::new(Engine::start(runner, options).context("the engine thread could not start")?);
    listen(server, engine, Arc::new(text), defaults, &model.name)
}

/// Room for 8 sequences of the whole context, at most half of the machine's memory.
fn default_kv_memory(layout: &oscar_codec::CacheLayout, context: usize, chunk: usize) -> usize {
    let wanted = 8 * working_bytes(layout, context, chunk);
    super::doctor::memory_gib().map_or(wanted, |gib| wanted.min((gib * 0.5 * (1u64 << 30) as f64) as usize))
}

fn listen(
    config: ServerConfig,
    engine: Arc<dyn EngineApi>,
    text: Arc<oscar_text::ModelText>,
    defaults: GenerationDefaults,
    name: &str,
) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let address = format!("{}:{}", config.host, config.port);
        let listener = tokio::net::TcpListener::bind((config.host.as_str(), config.port))
            .await
            .with_context(|| format!("cannot listen on {address}: is the port taken? choose another with --port"))?;
        let address = listener.local_addr()?;
        let stop = stop_signal().context("signals cannot be caught")?;
        eprintln!("\nserving {name} on http://{address}   (web page: the same address; Ctrl-C stops)\n");
        eprintln!("  curl http://{address}/v1/chat/completions -H 'Content-Type: application/json' \\");
        eprintln!("       -d '{{\"model\": \"{name}\", \"messages\": [{{\"role\": \"user\", \"content\": \"Who are you?\"}}]}}'\n");
        serve_on(listener, config, engine, text, defaults, stop).await.context("the server failed")
    })
}

/// A future that ends on Ctrl-C or SIGTERM. Both are caught from this call on, not from its first poll: a signal that
/// comes while the first request is being answered must already drain.
#[cfg(unix)]
fn stop_signal() -> std::io::Result<impl Future<Output = ()> + Send + 'static> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

#[cfg(not(unix))]
fn stop_signal() -> std::io::Result<impl Future<Output = ()> + Send + 'static> {
    let mut interrupt = tokio::signal::windows::ctrl_c()?;
    Ok(async move {
        interrupt.recv().await;
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_configuration_survives_its_own_toml() {
        let printed = toml::to_string_pretty(&Config::default()).unwrap();
        let again: Config = toml::from_str(&printed).unwrap();
        assert_eq!(toml::to_string_pretty(&again).unwrap(), printed);
    }

    #[test]
    fn unknown_settings_are_refused_by_name() {
        let error = toml::from_str::<Config>("max_batsch = 3").err().unwrap().to_string();
        assert!(error.contains("max_batsch"), "{error}");
    }
}
