//! `oscar serve`: the OpenAI-compatible server.

mod config;
mod keys;
mod signals;
mod socket;

use crate::options::{CacheArgs, OpenModel};
use crate::progress::{self, note};
use anyhow::{Context, Result, bail};
pub use config::Flags;
use oscar_backend::Backend;
use oscar_engine::{Engine, EngineApi};
use oscar_server::{GenerationDefaults, init_logging};
use socket::Socket;
use std::sync::Arc;

pub fn run(flags: &Flags) -> Result<()> {
    let config = flags.resolve()?;
    if flags.print_config {
        print!("{}", toml::to_string_pretty(&config)?);
        return Ok(());
    }
    let _log = init_logging(config.log_format(), &config.log)?;
    let socket = Socket::open(config.server()?, config.key_source())?;
    let progress = socket.progress();

    progress.begin("opening the model", 0);
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
    let engine_options = config.engine(&model.name, &backend);
    let bar = progress::bar("loading", model.config.layers as u64);
    progress.begin("loading weights", model.config.layers);
    let runner = cache.runner(&model, backend, &cache_args, context, 1, |layers| {
        bar.set_position(layers as u64);
        progress.set(layers);
    })?;
    bar.finish_and_clear();
    progress.begin("starting the engine", 0);
    note!("KV memory: {}", progress::bytes(kv_memory));

    let defaults = GenerationDefaults {
        sampling: OpenModel::default_sampling(&generation),
        stop_tokens: generation.stop_token_ids(&model.config).to_vec(),
        max_tokens: None,
    };
    let engine: Arc<dyn EngineApi> =
        Arc::new(Engine::start(runner, engine_options).context("the engine thread could not start")?);
    socket.serve(engine, Arc::new(text), defaults, &model.name)
}

/// Room for 8 sequences of the whole context, at most half of the machine's memory.
fn default_kv_memory(layout: &oscar_codec::CacheLayout, context: usize, chunk: usize) -> usize {
    let wanted = 8 * layout.working_bytes(context, chunk);
    super::doctor::memory_gib().map_or(wanted, |gib| wanted.min((gib * 0.5 * (1u64 << 30) as f64) as usize))
}
