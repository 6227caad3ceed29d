//! `oscar serve`: the OpenAI-compatible server.

mod calibrate;
mod config;
mod keys;
mod signals;
mod socket;

use crate::cache::Cache;
use crate::device::AnyBackend;
use crate::options::{CacheArgs, OpenModel};
use crate::progress::{self, note};
use crate::rotations::{Calibration, Found};
use crate::sizing::{self, Extent, FixedMemory, Sizing, Wishes};
use anyhow::{Context, Result};
use config::Config;
pub use config::Flags;
use oscar_backend::Backend;
use oscar_codec::{KvFormat, RotationKind};
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
    let text = model.text_with(config.chat_template.as_deref())?;
    let generation = model.generation()?;
    let backend = Arc::new(config.model.backend()?);
    let found = match config.cache.rotations {
        Some(_) => model.found_rotations(&config.cache)?,
        None => calibrate::rotations(&config, &model, &text, &backend, &progress)?,
    };
    let served = Served::choose(config.kv, found.as_ref());
    let cache = model.cache_of(served.format, &config.cache, found.as_ref())?;
    let sizing = size(&config, &model, &cache, &backend)?;
    note!("{}: {}", model.name, backend.describe());
    if let Some(weights) = model.describe_weights(&cache, &backend) {
        note!("{weights}");
    }
    note!("cache: {}; rotations: {}", cache.layout.describe(), cache.rotation_origin);
    note!("attention: {}", backend.attention(&cache.layout).description);
    for line in [&served.note, &sizing.note].into_iter().flatten() {
        note!("{line}");
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
    socket.serve(engine, Arc::new(text), defaults, &model, served)
}

/// The format that is served, and what the user should know about it.
pub struct Served {
    pub format: KvFormat,
    pub calibration: Calibration,
    pub note: Option<String>,
}

impl Served {
    /// The format that was asked for. Otherwise the default one if its widths were measured and
    /// verified on this model, else four bits for every head: two bits without them fail long
    /// copying and arithmetic.
    fn choose(asked: Option<KvFormat>, found: Option<&Found>) -> Self {
        let calibration = Calibration::of(found);
        let lacks = match calibration {
            Calibration::None => "this model is not calibrated",
            Calibration::Rotations => "this model has no verified table of widths",
            Calibration::Widths => "",
        };
        let (format, note) = match (asked, calibration) {
            (Some(format), _) => {
                let risky =
                    format.rotation() == RotationKind::Calibrated && calibration != Calibration::Widths;
                let narrow = risky && !matches!(format, KvFormat::Oscar { bits: 4.. });
                let warning = || {
                    format!(
                        "warning: --kv {format} is served as asked, but {lacks}: answers that copy or \
                    add up over a long context may be wrong; --calibrate widths measures them"
                    )
                };
                (format, narrow.then(warning))
            }
            (None, Calibration::Widths) => (KvFormat::OscarMixed { mean: None }, None),
            (None, _) => {
                let format = KvFormat::Oscar { bits: 4 };
                let note = format!(
                    "note: {lacks}: serving {format} (4 bits for every head) instead of 2.25 bits; \
                    --calibrate widths measures them, --kv chooses a format"
                );
                (format, Some(note))
            }
        };
        Self { format, calibration, note }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_bits_are_served_only_if_calibrated_or_asked_for() {
        let served = |asked: Option<&str>| Served::choose(asked.map(|kv| kv.parse().unwrap()), None);
        let default = served(None);
        assert_eq!((default.format.to_string().as_str(), default.calibration), ("oscar4", Calibration::None));
        assert!(default.note.unwrap().contains("not calibrated"));
        for risky in ["oscar", "oscar2", "oscar3"] {
            let served = served(Some(risky));
            assert_eq!(served.format.to_string(), risky);
            assert!(served.note.unwrap().starts_with("warning"), "{risky}");
        }
        for safe in ["oscar4", "bf16", "int4", "kivi2"] {
            assert_eq!(served(Some(safe)).note, None, "{safe}");
        }
    }
}
