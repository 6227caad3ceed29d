//! One model on one device, or on several ranks, and the loop that runs its steps.
//!
//! [`Runner`] owns a model, its page storage and its page budget. It runs steps over any number of
//! [`Sequence`]s at once: prefill chunks and single decode tokens alike. Every command and the
//! serving engine use this loop.
//!
//! **Invariants:** knows no request, no sampling and no clock. A sequence's result depends on that
//! sequence alone: not on the chunks its prompt came in, not on the other sequences of the step. A
//! [`CacheLayout`] is put into the device's form here, once.

mod chunks;
mod ranks;
mod sequence;
mod trials;
mod views;

pub use chunks::{longest_step, next_chunk};
pub use oscar_models::StepOutput;
pub use ranks::Ranks;
pub use sequence::{Logits, Sequence, StepRequest};
pub use trials::{Compared, Trials};

use oscar_backend::{Backend, BackendError, Benchmarks, BlockId, StepSize, Tap, WeightFormat};
use oscar_cache::{OutOfPages, PagePool, PoolUsage};
use oscar_codec::{CacheLayout, RotationSet};
use oscar_models::{BuildError, DecoderConfig, StepInput, Transformer, Weights};
use ranks::Rank;
use std::sync::Arc;

/// What can stop a step. The sequences of a refused step are as they were before.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    OutOfPages(#[from] OutOfPages),
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error(
        "position {position} is beyond the context of {context} tokens: shorten the prompt or raise --context"
    )]
    Context { position: usize, context: usize },
    #[error("rows of this sequence cannot be evicted: {0}")]
    Eviction(&'static str),
    #[error("rank {rank} of the model panicked in a step: {why}")]
    RankPanicked { rank: usize, why: String },
    #[error("token {token} does not exist: the vocabulary has {vocab} tokens")]
    Token { token: u32, vocab: usize },
}

/// How a model is to be run.
pub struct RunnerOptions<'a> {
    /// The cache, in any byte order.
    pub layout: CacheLayout,
    /// Rotations of the cache; none for formats that store rows as they are.
    pub rotations: Option<&'a RotationSet>,
    /// Longest sequence, in tokens.
    pub context: usize,
    pub kv_memory: KvMemory,
    /// Prompt tokens of one sequence in one step; see [`next_chunk`].
    pub prefill_chunk: usize,
}

/// Memory for KV pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvMemory {
    Bytes(usize),
    /// Enough for `count` sequences of `tokens` tokens.
    Sequences {
        count: usize,
        tokens: usize,
    },
}

impl KvMemory {
    /// The budget in bytes, for a layout in the device's form and prompts read in these chunks.
    pub fn bytes(self, layout: &CacheLayout, prefill_chunk: usize) -> usize {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Sequences { count, tokens } => {
                count * layout.working_bytes(tokens, longest_step(prefill_chunk))
            }
        }
    }
}

/// A loaded model with its cache.
pub struct Runner<B: Backend> {
    /// The first rank, usually the only one.
    lead: Rank<B>,
    others: Vec<Rank<B>>,
    layout: CacheLayout,
    pool: PagePool,
    prefill_chunk: usize,
}

impl<B: Backend> Runner<B> {
    pub fn load(
        backend: impl Into<Ranks<B>>,
        config: &DecoderConfig,
        weights: &Weights,
        options: RunnerOptions<'_>,
        progress: impl FnMut(usize),
    ) -> Result<Self, BuildError> {
        let (ranks, layout, budget) = Self::load_ranks(backend.into(), config, weights, &options, progress)?;
        Self::with_ranks(ranks, layout, budget, options.prefill_chunk)
    }

    /// The same model with another cache, on the same device and sharing its weights, except the
    /// projections that other rotations are folded into. The context is this runner's.
    pub fn with_cache(&self, weights: &Weights, options: RunnerOptions<'_>) -> Result<Self, BuildError> {
        let mut models = Vec::with_capacity(self.ranks());
        for Rank { backend, model, .. } in self.each_rank() {
            models.push((backend.clone(), model.with_rotations(backend, weights, options.rotations)?));
        }
        Self::over(models, &options.layout, options.kv_memory, options.prefill_chunk)
    }

    /// A cache of its own for a model that is on the device already.
    pub fn new(
        backend: Arc<B>,
        model: Transformer<B>,
        layout: &CacheLayout,
        kv_memory: KvMemory,
        prefill_chunk: usize,
    ) -> Result<Self, BuildError> {
        Self::over([(backend, model)], layout, kv_memory, prefill_chunk)
    }

    /// `ranks` has at least one.
    fn with_ranks(
        mut ranks: Vec<Rank<B>>,
        layout: CacheLayout,
        budget: usize,
        prefill_chunk: usize,
    ) -> Result<Self, BuildError> {
        let prefill_chunk = prefill_chunk.max(1);
        let others = ranks.split_off(1);
        let lead = ranks.remove(0);
        let expected = lead.backend.communicator().map_or(1, |communicator| communicator.ranks());
        if expected != 1 + others.len() {
            let why = format!("{} of them were given", 1 + others.len());
            return Err(BuildError::Ranks { ranks: expected, why });
        }
        check_group(lead.model.config(), &layout)?;
        check_step(&*lead.backend, &lead.model, &layout, longest_step(prefill_chunk), budget)?;
        Ok(Self { lead, others, pool: PagePool::new(&layout, budget), layout, prefill_chunk })
    }

    fn each_rank(&self) -> impl Iterator<Item = &Rank<B>> {
        std::iter::once(&self.lead).chain(&self.others)
    }

    /// The device of the first rank.
    pub fn backend(&self) -> &B {
        &self.lead.backend
    }

    pub fn config(&self) -> &DecoderConfig {
        self.lead.model.config()
    }

    /// The cache as the device keeps it.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Rotations of the cache.
    pub fn rotations(&self) -> Option<&RotationSet> {
        self.lead.model.rotations()
    }

    /// Longest sequence, in tokens.
    pub fn context(&self) -> usize {
        self.lead.model.max_positions()
    }

    /// Bytes of the matrices that a step of this many rows reads, as the device holds them. Experts
    /// are counted as often as a router that takes all of them equally often would choose them.
    pub fn weight_bytes(&self, rows: usize) -> usize {
        self.each_rank().map(|rank| rank.model.matrix_bytes(&rank.backend, rows)).sum()
    }

    /// The experts of each layer of the first rank, with the number of different ones that a step of
    /// this many rows is expected to choose.
    pub fn experts(&self, rows: usize) -> impl Iterator<Item = (&B::Experts, f64)> {
        self.lead.model.experts(rows)
    }

    pub fn usage(&self) -> PoolUsage {
        self.pool.usage()
    }

    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// Prompt tokens of one sequence in one step; see [`next_chunk`].
    pub fn prefill_chunk(&self) -> usize {
        self.prefill_chunk
    }

    /// Reserves the pages that a step of `tokens` tokens needs. Changes nothing on failure.
    pub fn reserve(&self, sequence: &mut Sequence, tokens: usize) -> Result<(), OutOfPages> {
        sequence.reserved = None;
        sequence.reserved = Some(sequence.pages.prepare(&self.layout, &self.pool, tokens)?);
        Ok(())
    }

    /// Runs one step over all requests together; `out` receives logits, picks and hidden states in request order.
    pub fn step(&mut self, requests: &mut [StepRequest<'_>], out: &mut StepOutput) -> Result<(), StepError> {
        self.tapped_step(requests, out, None)
    }

    /// Waits until the device has run all steps. A step without logits returns before that.
    pub fn wait(&self) -> Result<(), StepError> {
        self.each_rank().try_for_each(|rank| Ok(rank.backend.wait()?))
    }

    /// [`Runner::step`] with a tap on every layer.
    pub fn tapped_step(
        &mut self,
        requests: &mut [StepRequest<'_>],
        out: &mut StepOutput,
        tap: Option<&mut dyn Tap>,
    ) -> Result<(), StepError> {
        self.check(requests)?;
        let mut steps = Vec::with_capacity(requests.len());
        for request in requests.iter_mut() {
            // A refusal half-way leaves earlier sequences with pages they will need anyway. Their
            // length, and so their answers, stay unchanged until `commit`.
            let sequence = &mut *request.sequence;
            steps.push(match sequence.reserved.take() {
                Some(step) if step.positions.len() == request.tokens.len() => step,
                _ => sequence.pages.prepare(&self.layout, &self.pool, request.tokens.len())?,
            });
        }
        let (mut tokens, mut rows) = (Vec::new(), Vec::with_capacity(requests.len()));
        let (mut wanted, mut picks, mut hidden) = (Vec::new(), Vec::new(), Vec::new());
        for (request, step) in requests.iter().zip(&steps) {
            let first = tokens.len();
            rows.push(request.sequence.pages.rows(step, first));
            tokens.extend_from_slice(request.tokens);
            let logits = request.logits.rows(request.tokens.len());
            match &request.logits {
                Logits::Pick(what) if !logits.is_empty() => picks.push((wanted.len(), *what)),
                Logits::PickAmong(what, mask) if !logits.is_empty() => {
                    picks.push((wanted.len(), what.among(mask)));
                }
                _ => {}
            }
            wanted.extend(logits.map(|row| first + row));
            if request.logits == Logits::Hidden && !request.tokens.is_empty() {
                hidden.push(tokens.len() - 1);
            }
        }
        if tokens.is_empty() {
            *out = StepOutput::default();
            return Ok(());
        }
        let input = StepInput { tokens: &tokens, logits: &wanted, picks: &picks, hidden: &hidden };
        self.step_ranks(&rows, &input, out, tap)?;
        for (request, step) in requests.iter_mut().zip(&steps) {
            request.sequence.pages.commit(&self.layout, step);
        }
        Ok(())
    }

    fn check(&self, requests: &[StepRequest<'_>]) -> Result<(), StepError> {
        let (context, vocab) = (self.context(), self.config().vocab_size);
        for request in requests {
            let end = request.sequence.len() + request.tokens.len();
            if end > context {
                return Err(StepError::Context { position: end - 1, context });
            }
            if let Some(&token) = request.tokens.iter().find(|&&t| t as usize >= vocab) {
                return Err(StepError::Token { token, vocab });
            }
        }
        Ok(())
    }

    /// Feeds a prompt in chunks and leaves the last token's logits in `out`. `progress` is called
    /// with the number of stored prompt tokens.
    pub fn prefill(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        out: &mut StepOutput,
        mut progress: impl FnMut(usize),
    ) -> Result<(), StepError> {
        let mut done = 0;
        while done < tokens.len() {
            let end = done + next_chunk(tokens.len() - done, self.prefill_chunk);
            let logits = if end == tokens.len() { Logits::Last } else { Logits::None };
            self.step(&mut [StepRequest { sequence, tokens: &tokens[done..end], logits }], out)?;
            done = end;
            progress(done);
        }
        Ok(())
    }

    /// Appends the bytes of each block to its `Vec`.
    pub fn read_blocks(&self, blocks: &mut [(BlockId, &mut Vec<u8>)]) -> Result<(), StepError> {
        self.alone("the page store")?;
        Ok(self.lead.backend.read_blocks(&self.lead.storage, blocks)?)
    }

    /// Replaces the bytes of blocks by those that [`Runner::read_blocks`] gave, here or in another
    /// process with the same model, cache and device.
    pub fn write_blocks(&mut self, blocks: &[(BlockId, &[u8])]) -> Result<(), StepError> {
        self.alone("the page store")?;
        Ok(self.lead.backend.write_blocks(&mut self.lead.storage, blocks)?)
    }
}

/// Refuses a cache whose layers, states or sliding layers are not the model's. A cache with all layers in
/// one group is right for any model.
fn check_group(config: &DecoderConfig, layout: &CacheLayout) -> Result<(), BackendError> {
    let found = (layout.layers(), layout.state_bytes());
    if found != (config.cache_layers(), config.state_bytes()) {
        return Err(BackendError::Shape {
            what: "a cache".into(),
            detail: format!(
                "the cache was made for {} layers and states of {} bytes, the model has {} layers with attention and \
                 states of {}: make it with this model's configuration",
                found.0,
                found.1,
                config.cache_layers(),
                config.state_bytes()
            ),
        });
    }
    let Some(group) = layout.sliding() else { return Ok(()) };
    let window = |layer| layout.slides(layer).then_some(group.window());
    let agrees = |layer| config.window_of(layer) == window(layer);
    match (0..config.layers).all(agrees) {
        true => Ok(()),
        false => Err(BackendError::Shape {
            what: "a cache".into(),
            detail: format!("its sliding layers ({}) are not those of the model", layout.describe()),
        }),
    }
}

/// Refuses pages and steps that do not fit on the device together: now, not in the middle of a prompt.
fn check_step<B: Backend>(
    backend: &B,
    model: &Transformer<B>,
    layout: &CacheLayout,
    rows: usize,
    pages: usize,
) -> Result<(), BuildError> {
    let Some(free) = backend.free_memory()? else { return Ok(()) };
    let size = model.config().step_size(rows, 1, model.max_positions());
    let memory = backend.step_memory(&StepSize { quantized: layout.coded().is_some(), ..size });
    // The rest has its memory already.
    let needed = memory.activations + memory.expanded_pages;
    match needed.saturating_add(pages) > free {
        true => Err(BuildError::StepMemory { rows, needed, pages, free }),
        false => Ok(()),
    }
}

impl<B: Benchmarks> Runner<B> {
    /// A model of this shape with random weights; `skew` makes some experts more frequent than
    /// others.
    pub fn random(
        backend: impl Into<Ranks<B>>,
        config: &DecoderConfig,
        weights: WeightFormat,
        skew: f32,
        options: RunnerOptions<'_>,
    ) -> Result<Self, BuildError> {
        let mut models = Vec::new();
        for backend in backend.into() {
            let RunnerOptions { rotations, context, .. } = options;
            let model = Transformer::random(&*backend, config, weights, skew, rotations, context)?;
            models.push((backend, model));
        }
        Self::over(models, &options.layout, options.kv_memory, options.prefill_chunk)
    }

    /// Gives a sequence the pages of `tokens` more tokens with random contents, without computing
    /// anything. Returns `false`, and changes nothing, if the device cannot.
    pub fn pretend(&mut self, sequence: &mut Sequence, tokens: usize) -> Result<bool, StepError> {
        let Rank { backend, storage, .. } = &mut self.lead;
        if !self.others.is_empty() || !backend.randomize(storage, 0, 0)? {
            return Ok(false);
        }
        let end = sequence.len() + tokens;
        while sequence.len() < end {
            let chunk = self.prefill_chunk.min(end - sequence.len());
            let step = sequence.pages.prepare(&self.layout, &self.pool, chunk)?;
            let last = |ids: &mut dyn Iterator<Item = u32>| ids.max().map_or(0, |id| id as usize + 1);
            let full = last(&mut sequence.pages.full().iter().flatten().map(|id| id.0));
            let coded = last(&mut sequence.pages.coded().iter().flatten().map(|id| id.0));
            self.lead.backend.randomize(&mut self.lead.storage, full, coded)?;
            sequence.pages.commit(&self.layout, &step);
        }
        Ok(true)
    }
}
