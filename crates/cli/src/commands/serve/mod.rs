//! `oscar serve`: the OpenAI-compatible server.

mod config;
mod keys;
mod signals;
mod socket;

use crate::device::AnyBackend;
use crate::options::{Cache, CacheArgs, OpenModel};
use crate::progress::{self, note};
use crate::sizing::{self, Extent, FixedMemory, Sizing, Wishes};
use anyhow::{Context, Result};
use config::Config;
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
    let backend = config.model.backend()?;
    let sizing = size(&config, &model, &cache, &backend)?;
    note!("{}: {}", model.name, backend.describe());
    if let Some(weights) = model.describe_weights(&cache, &backend) {
        note!("{weights}");
    }
    note!("cache: {}; rotations: {}", cache.layout.describe(), cache.rotation_origin);
    note!("attention: {}", backend.attention(&cache.layout).description);
    if let Some(limited) = &sizing.note {
        note!("{limited}");
    }
    let cache_args = CacheArgs { kv_memory: Some(sizing.kv_memory), ..config.cache.clone() };
    let engine_options = config.engine(&model.name, &backend);
    let bar = progress::bar("loading", model.config.layers as u64);
    progress.begin("loading weights", model.config.layers);
    let runner = cache.runner(&model, backend, &cache_args, sizing.context, 1, |layers| {
        bar.set_position(layers as u64);
        progress.set(layers);
    })?;
    bar.finish_and_clear();
    progress.begin("starting the engine", 0);
    note!("KV memory: {}", progress::bytes(sizing.kv_memory));

    let defaults = GenerationDefaults {
        sampling: OpenModel::default_sampling(&generation),
        stop_tokens: generation.stop_token_ids(&model.config).to_vec(),
        max_tokens: None,
    };
    let engine: Arc<dyn EngineApi> =
        Arc::new(Engine::start(runner, engine_options).context("the engine thread could not start")?);
    socket.serve(engine, Arc::new(text), defaults, &model.name)
}

/// Divides the device's memory.
fn size(config: &Config, model: &OpenModel, cache: &Cache, backend: &AnyBackend) -> Result<Sizing> {
    let chunk = config.cache.prefill_chunk(backend);
    let positions = model.config.max_position_embeddings;
    let context = config.context.unwrap_or(positions);
    let extent = Extent {
        context,
        rows: config.step_tokens.unwrap_or(chunk + config.max_batch),
        logits: config.max_batch,
    };
    let holding = config.model.holding(backend.multiplies_fp8());
    let fixed = FixedMemory::of(model, cache.rotations.is_some(), holding, extent);
    let wishes = Wishes {
        kv_memory: config.cache.kv_memory,
        context: config.context,
        share: config.kv_memory_share.unwrap_or_else(|| backend.default_kv_share()),
    };
    let available = backend.available_memory()?;
    if let Some(available) = available {
        note!("memory: {} free; {}", progress::bytes(available), fixed.describe());
    }
    sizing::divide(available, &fixed, &backend.held_layout(&cache.layout), chunk, positions, wishes)
}
