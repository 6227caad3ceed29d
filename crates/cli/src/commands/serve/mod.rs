//! `oscar serve`: the OpenAI-compatible server.

mod config;
mod keys;
mod signals;

use crate::options::{CacheArgs, OpenModel};
use crate::progress::{self, note};
use anyhow::{Context, Result, bail};
pub use config::Flags;
use keys::KeySource;
use oscar_backend::Backend;
use oscar_engine::{Engine, EngineApi};
use oscar_server::{GenerationDefaults, ServerConfig, init_logging, serve_on};
use signals::Stops;
use std::sync::Arc;

pub fn run(flags: &Flags) -> Result<()> {
    let config = flags.resolve()?;
    if flags.print_config {
        print!("{}", toml::to_string_pretty(&config)?);
        return Ok(());
    }
    let _log = init_logging(config.log_format(), &config.log)?;
    let server = config.server()?;

    let model = config.model.open()?;
    let text = model.text()?;
    let generation = model.generation()?;
    let cache = model.cache(config.kv, &config.cache)?;
    let context = config.context.unwrap_or(model.config.max_position_embeddings);
    let backend = config.model.backend()?;
    let held = backend.held_layout(&cache.layout);
    let chunk = config.cache.prefill_chunk(&backend);
    let least = held.working_bytes(context.min(chunk), chunk);
    let kv_memory = config.cache.kv_memory.unwrap_or_else(|| default_kv_memory(&held, context, chunk));
    if config.cache.kv_memory.is_some() && kv_memory < least {
        bail!(
            "kv_memory of {} cannot hold one prefill step of this model: give at least {}",
            progress::bytes(kv_memory),
            progress::bytes(least)
        );
    }
    note!("{}: {}", model.name, backend.describe());
    if let Some(weights) = model.describe_weights(&cache, &backend) {
        note!("{weights}");
    }
    note!("cache: {}; rotations: {}", cache.layout.describe(), cache.rotation_origin);
    note!("attention: {}", backend.attention(&cache.layout).description);
    let cache_args = CacheArgs { kv_memory: Some(kv_memory), ..config.cache.clone() };
    let bar = progress::bar("loading", model.config.layers as u64);
    let runner =
        cache.runner(&model, backend, &cache_args, context, 1, |layers| bar.set_position(layers as u64))?;
    bar.finish_and_clear();
    note!("KV memory: {}", progress::bytes(kv_memory));

    let defaults = GenerationDefaults {
        sampling: OpenModel::default_sampling(&generation),
        stop_tokens: generation.stop_token_ids(&model.config).to_vec(),
        max_tokens: None,
    };
    let engine: Arc<dyn EngineApi> = Arc::new(
        Engine::start(runner, config.engine(&model.name)).context("the engine thread could not start")?,
    );
    listen(server, config.key_source(), engine, Arc::new(text), defaults, &model.name)
}

/// Room for 8 sequences of the whole context, at most half of the machine's memory.
fn default_kv_memory(layout: &oscar_codec::CacheLayout, context: usize, chunk: usize) -> usize {
    let wanted = 8 * layout.working_bytes(context, chunk);
    super::doctor::memory_gib().map_or(wanted, |gib| wanted.min((gib * 0.5 * (1u64 << 30) as f64) as usize))
}

fn listen(
    config: ServerConfig,
    source: KeySource,
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
        let exposed = ServerConfig { loopback: address.ip().is_loopback(), ..config.clone() };
        exposed.check_exposure()?;
        if !config.keys.is_empty() && !config.keys.has_operator() {
            note!("no key is an operator's: /metrics and other routes for operators refuse everyone");
        }
        let stops = Stops::listen(source, config.keys.clone()).context("signals cannot be caught")?;
        note!("\nserving {name} on http://{address}   (web page: the same address; Ctrl-C stops)\n");
        note!("  curl http://{address}/v1/chat/completions -H 'Content-Type: application/json' \\");
        note!("       -d '{{\"model\": \"{name}\", \"messages\": [{{\"role\": \"user\", \"content\": \"Who are you?\"}}]}}'\n");
        tokio::spawn(release_memory_when_idle(engine.clone()));
        let (stop, abandon) = (stops.asked(1), stops.asked(2));
        serve_on(listener, config, engine, text, defaults, stop, abandon).await.context("the server failed")
    })
}

/// A burst of large requests leaves free memory in the allocator; it goes back while nothing runs.
async fn release_memory_when_idle(engine: Arc<dyn EngineApi>) {
    const PAUSE: std::time::Duration = std::time::Duration::from_secs(10);
    loop {
        tokio::time::sleep(PAUSE).await;
        let stats = engine.stats();
        if stats.running + stats.waiting == 0 {
            // It cannot fail; a runtime that is shutting down may not run it.
            let _ = tokio::task::spawn_blocking(oscar_kernels_cpu::allocator::release_free_memory).await;
        }
    }
}
