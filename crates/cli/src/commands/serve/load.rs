//! A model at work: from flags to an engine that answers. `serve` and `batch` share this.

use super::calibrate;
use super::eviction::EvictionArgs;
use crate::cache::Cache;
use crate::cpu_experts::{self, WeightBytes};
use crate::device::AnyBackend;
use crate::options::{CacheArgs, ModelArgs, OpenModel, at_least_one, serialize_optional_display};
use crate::parallel::ParallelArgs;
use crate::progress::{self, note};
use crate::served::Served;
use crate::sizing::{self, FixedMemory, Sizing, Wishes, parse_share};
use crate::store::StoreArgs;
use crate::transfer::TransferArgs;
use anyhow::{Context, Result, anyhow};
use oscar_backend::{Backend, BackendError};
use oscar_codec::{CodeLayout, KvFormat};
use oscar_engine::{Engine, EngineApi, EngineOptions, SchedulerOptions};
use oscar_hybrid::HybridBackend;
use oscar_models::{BuildError, ModelSource};
use oscar_runner::{Runner, longest_step};
use oscar_server::{GenerationDefaults, ServerConfig, StartProgress};
use oscar_text::ModelText;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Settings of the model, its cache and its engine.
#[derive(clap::Args, Clone, Serialize)]
pub struct LoadArgs {
    #[command(flatten)]
    #[serde(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub parallel: ParallelArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub cache: CacheArgs,
    /// KV-cache format, served as asked; `oscar doctor` lists them. If absent, `oscar` where the
    /// model has verified widths, `oscar4` where it has none, and `bf16` where it has latent attention
    /// (MLA)
    #[arg(long, value_name = "FORMAT")]
    #[serde(serialize_with = "serialize_optional_display")]
    pub kv: Option<KvFormat>,
    /// What is calibrated at the first start if the model comes without it, and kept for the next;
    /// `widths` on a GPU and `rotations` on a CPU if absent
    #[arg(long, value_enum, value_name = "WHAT")]
    pub calibrate: Option<CalibrateArg>,
    /// Longest sequence in tokens; the model's own limit if absent, or what the KV memory holds
    #[arg(long, visible_alias = "max-context", value_name = "N", value_parser = at_least_one)]
    pub context: Option<usize>,
    /// Share of the memory left beside weights and activations that becomes KV pages if --kv-memory
    /// is absent; 0.9 on a GPU and 0.5 on a CPU by default
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    pub kv_memory_share: Option<f64>,
    /// Maximum number of sequences running at once
    #[arg(long, value_name = "N", value_parser = at_least_one, default_value_t = SchedulerOptions::default().max_batch)]
    pub max_batch: usize,
    /// Maximum number of tokens in one engine step, prompts and decodes together; chosen by
    /// predicted time if absent
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub step_tokens: Option<usize>,
    /// Milliseconds that a step may take while streams decode: prompts are read in chunks that
    /// keep to it
    #[arg(long, value_name = "MS", value_parser = at_least_one, default_value_t = 80)]
    pub inter_token_target: usize,
    /// Do not keep pages of finished sequences for later requests
    #[arg(long)]
    pub no_prefix_cache: bool,
    /// Never continue from a stored prefix that lost its BF16 tail to make room: compute it again, so
    /// that every hit gives the answer of a cold run
    #[arg(long)]
    pub exact_hits: bool,
    #[command(flatten)]
    #[serde(flatten)]
    pub eviction: EvictionArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub store: StoreArgs,
    /// Chat template (Jinja) instead of the model's own
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
}

/// What is calibrated at the first start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CalibrateArg {
    /// Nothing
    No,
    /// Rotations: seconds on a GPU, minutes on a CPU
    Rotations,
    /// Rotations, and a code width for each head
    Widths,
}

/// A model on its device, and everything that answering needs.
pub struct Loaded {
    pub model: OpenModel,
    pub options: EngineOptions,
    runner: Runner<AnyBackend>,
    text: ModelText,
    defaults: GenerationDefaults,
    served: Served,
}

impl LoadArgs {
    /// Opens the model, finds or makes its rotations, divides the memory and loads the weights.
    pub fn load(&self, transfer: &TransferArgs, progress: &StartProgress) -> Result<Loaded> {
        self.parallel.refuse("--store", self.store.store.is_some())?;
        self.parallel.refuse("--store-ram", self.store.store_ram.is_some())?;
        self.parallel.refuse("--store-redis", self.store.store_redis.is_some())?;
        self.parallel.refuse("--store-s3", self.store.s3().is_some())?;
        self.parallel.refuse("--kv-transfer-listen", transfer.kv_transfer_listen.is_some())?;
        self.parallel.refuse("--kv-transfer-peer", transfer.fetches())?;
        self.parallel.refuse("--kv-budget", self.eviction.kv_budget.is_some())?;
        progress.begin("opening the model", 0);
        let model = self.model.open()?;
        self.kv.map_or(Ok(()), |format| model.config.check_format(format))?;
        if self.eviction.kv_budget.is_some() {
            model.config.evicts_rows().map_err(|why| anyhow!("--kv-budget: {why}"))?;
        }
        let text = model.text_with(self.chat_template.as_deref())?;
        let generation = model.generation()?;
        let ranks = self.parallel.ranks(&self.model, &model.config)?;
        let backend = ranks.lead().clone();
        place_experts(self, &model, &backend)?;
        let found = match self.cache.rotations {
            Some(_) => model.found_rotations(&self.cache)?,
            None => {
                // Calibration needs a device that holds the whole model.
                let whole = match ranks.count() {
                    1 => backend.clone(),
                    _ => Arc::new(self.model.backend()?),
                };
                calibrate::rotations(self, &model, &text, &whole, progress)?
            }
        };
        let mut served = Served::choose(self.kv, found.as_ref(), model.config.latent.is_some());
        let cache = model.cache_of(served.format, &self.cache, found.as_ref())?;
        served.warn(&cache.layout);
        let sizing = size(self, &model, &cache, &backend)?;
        note!("{}: {}", model.name, backend.describe());
        if let Some(weights) = model.describe_weights(&cache, &backend) {
            note!("{weights}");
        }
        note!("cache: {}; rotations: {}", cache.layout.describe(), cache.rotation_origin);
        note!("attention: {}", backend.attention(&cache.layout).description);
        model.config.describe_delta().iter().for_each(|line| note!("{line}"));
        for line in served.note.iter().map(String::as_str).chain(served.advice) {
            note!("{line}");
        }
        for line in &sizing.notes {
            note!("{line}");
        }
        let cache_args = CacheArgs { kv_memory: Some(sizing.kv_memory), ..self.cache.clone() };
        let (total, began) = (model.weights.total_bytes(), Instant::now());
        let bar = progress::bytes_bar("loading", total);
        progress.begin("loading weights", total as usize);
        let runner = cache.runner(&model, ranks, &cache_args, sizing.context, 1, |bytes| {
            bar.set_position(bytes as u64);
            progress.set(bytes);
        });
        let runner = runner.map_err(|error| explain(error, &sizing))?;
        bar.finish_and_clear();
        let seconds = began.elapsed().as_secs_f64();
        let rate = progress::bytes((total as f64 / seconds) as usize);
        note!("weights: {} in {seconds:.1} s ({rate}/s)", progress::bytes(total as usize));
        note!("KV memory: {}", progress::bytes(sizing.kv_memory));
        let defaults = GenerationDefaults {
            sampling: OpenModel::default_sampling(&generation),
            stop_tokens: generation.stop_token_ids(&model.config).to_vec(),
            max_tokens: None,
        };
        let prefix_cache = !self.no_prefix_cache;
        let (store, desk) = self.store.open(
            transfer,
            &self.model,
            &(&model).into(),
            &cache,
            runner.backend(),
            prefix_cache,
        )?;
        let (cap, post) = (self.eviction.cap(&runner)?, self.eviction.post(&text, &model.weights)?);
        let options = EngineOptions { store, desk, cap, post, ..self.engine(&model.name) };
        Ok(Loaded { model, options, runner, text, defaults, served })
    }

    fn engine(&self, model: &str) -> EngineOptions {
        EngineOptions {
            scheduler: SchedulerOptions {
                max_batch: self.max_batch,
                step_tokens: self.step_tokens,
                // The runner knows its chunk.
                prefill_chunk: usize::MAX,
                inter_token_target: self.inter_token_target as f64 / 1e3,
                ..SchedulerOptions::default()
            },
            prefix_cache: !self.no_prefix_cache,
            approximate_hits: !self.exact_hits,
            ..EngineOptions::new(model)
        }
    }
}

impl Loaded {
    pub fn backend(&self) -> &AnyBackend {
        self.runner.backend()
    }

    /// Tells the server the model's names and what is known about its cache.
    pub fn introduce(&self, config: &mut ServerConfig) {
        config.model_aliases.extend(self.model.repository.clone());
        config.calibration = self.served.calibration.name();
        config.cache_note = self.served.note.clone();
    }

    /// Where the model's files are: its folder, or its name if it is compiled in.
    pub fn model_id(&self) -> String {
        match &self.model.source {
            ModelSource::Dir(folder) => {
                let folder = folder.canonicalize().unwrap_or_else(|_| folder.clone());
                folder.display().to_string()
            }
            ModelSource::Embedded(_) => self.model.name.clone(),
        }
    }

    /// Starts the engine.
    pub fn start(self) -> Result<(Arc<dyn EngineApi>, ModelText, GenerationDefaults)> {
        let engine = Engine::start(self.runner, self.options).context("the engine thread could not start")?;
        Ok((Arc::new(engine), self.text, self.defaults))
    }
}

/// Says what would fit if the device ran out of memory, e.g. because another program took some.
fn explain(error: anyhow::Error, sizing: &Sizing) -> anyhow::Error {
    match error.downcast_ref::<BuildError>() {
        Some(BuildError::Backend(BackendError::OutOfMemory { .. })) => error.context(format!(
            "the model does not fit: {}; free some memory, or lower it with --weights fp8, --kv-memory or --prefill-chunk",
            sizing.parts
        )),
        _ => error,
    }
}

/// Decides `--cpu-experts auto`. The cache is not known yet, so 4 bits are assumed if no format is asked
/// for.
fn place_experts(args: &LoadArgs, model: &OpenModel, backend: &AnyBackend) -> Result<()> {
    let Some(hybrid) = backend.as_hybrid().filter(|hybrid| hybrid.host_layers().is_none()) else {
        return Ok(());
    };
    let config = &model.config;
    let format = args.kv.unwrap_or(KvFormat::Oscar { bits: 4 });
    let windows = format.windows(args.cache.sink, args.cache.recent)?;
    let layout = backend.held_layout(&config.cache_layout(format, windows, CodeLayout::Logical)?);
    let chunk = args.cache.prefill_chunk(backend, config);
    let steps = SchedulerOptions { prefill_chunk: chunk, ..args.engine(&model.name).scheduler };
    let context = args.context.unwrap_or(config.max_position_embeddings).min(config.max_position_embeddings);
    let step = backend.step_memory(&model.step_size(&steps, &layout, context));
    let free = backend.available_memory()?.unwrap_or(usize::MAX);
    let kv = args.cache.kv_memory.unwrap_or_else(|| {
        let share = args.kv_memory_share.unwrap_or_else(|| backend.default_kv_share());
        let sequence = layout.working_bytes(context, longest_step(chunk));
        (cpu_experts::kv_reserve(sequence, free) as f64 / share) as usize
    });
    let holding = args.model.holding(backend.multiplies_fp8());
    hybrid.place(WeightBytes::of(model, layout.coded().is_some(), holding).fewest(step.total() + kv, free));
    Ok(())
}

/// Divides the device's memory.
fn size(args: &LoadArgs, model: &OpenModel, cache: &Cache, backend: &AnyBackend) -> Result<Sizing> {
    let chunk = args.cache.prefill_chunk(backend, &model.config);
    let steps = SchedulerOptions { prefill_chunk: chunk, ..args.engine(&model.name).scheduler };
    let positions = model.config.max_position_embeddings;
    let context = args.context.unwrap_or(positions);
    let holding = args.model.holding(backend.multiplies_fp8());
    let step = backend.step_memory(&model.step_size(&steps, &cache.layout, context));
    let host_layers = backend.as_hybrid().and_then(HybridBackend::host_layers).unwrap_or(0);
    let weights = WeightBytes::of(model, cache.rotations.is_some(), holding);
    let fixed = FixedMemory::of(&weights, host_layers, step);
    cpu_experts::check_host(fixed.host)?;
    let fixed = args.parallel.fixed_memory(fixed, &model.config, holding);
    let wishes = Wishes {
        kv_memory: args.cache.kv_memory,
        context: args.context,
        share: args.kv_memory_share.unwrap_or_else(|| backend.default_kv_share()),
    };
    let available = backend.available_memory()?;
    if let Some(available) = available {
        note!("memory: {} free; {}", progress::bytes(available), fixed.describe());
    }
    let layout = backend.held_layout(&cache.layout);
    sizing::divide(available, &fixed, &layout, longest_step(chunk), positions, wishes)
}
