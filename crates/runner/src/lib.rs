//! One model on one device, and the loop that runs its steps.
//!
//! [`Runner`] owns a model, its page storage and its page budget. It runs steps over any number of
//! [`Sequence`]s at once: prefill chunks and single decode tokens alike. Every command and the
//! serving engine use this loop.
//!
//! **Invariants:** knows no request, no sampling and no clock. A sequence's result depends on that
//! sequence alone: not on the chunks its prompt came in, not on the other sequences of the step. A
//! [`CacheLayout`] is put into the device's form here, once.

mod chunks;
mod sequence;
mod trials;
mod views;

pub use chunks::{longest_step, next_chunk};
pub use oscar_models::StepOutput;
pub use sequence::{Logits, Sequence, StepRequest};
pub use trials::{Compared, Trials};

use oscar_backend::{Backend, BackendError, Benchmarks, BlockId, Step, StepSize, Tap, WeightFormat};
use oscar_cache::{OutOfPages, PagePool, PoolUsage, SequenceRows, TailDemotion};
use oscar_codec::{CacheLayout, RotationSet};
use oscar_models::{BuildError, DecoderConfig, StepInput, Transformer, Weights, Workspace};
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
    backend: Arc<B>,
    model: Transformer<B>,
    storage: B::Pool,
    workspace: Workspace<B>,
    layout: CacheLayout,
    pool: PagePool,
    prefill_chunk: usize,
}

impl<B: Backend> Runner<B> {
    pub fn load(
        backend: impl Into<Arc<B>>,
        config: &DecoderConfig,
        weights: &Weights,
        options: RunnerOptions<'_>,
        progress: impl FnMut(usize),
    ) -> Result<Self, BuildError> {
        let backend = backend.into();
        let RunnerOptions { rotations, context, prefill_chunk, .. } = options;
        let layout = backend.held_layout(&options.layout);
        let budget = options.kv_memory.bytes(&layout, prefill_chunk);
        // The kernels of a cache are compiled meanwhile.
        let (model, storage) = std::thread::scope(|scope| {
            let storage = scope.spawn(|| backend.pool(&layout, &config.heads(), budget));
            let model = Transformer::build(&*backend, config, weights, rotations, context, progress);
            (model, storage.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        Self::with_storage(backend, model?, layout, storage?, budget, prefill_chunk)
    }

    /// The same model with another cache, on the same device and sharing its weights, except the
    /// projections that other rotations are folded into. The context is this runner's.
    pub fn with_cache(&self, weights: &Weights, options: RunnerOptions<'_>) -> Result<Self, BuildError> {
        let model = self.model.with_rotations(&self.backend, weights, options.rotations)?;
        Self::new(self.backend.clone(), model, &options.layout, options.kv_memory, options.prefill_chunk)
    }

    /// A cache of its own for a model that is on the device already.
    pub fn new(
        backend: Arc<B>,
        model: Transformer<B>,
        layout: &CacheLayout,
        kv_memory: KvMemory,
        prefill_chunk: usize,
    ) -> Result<Self, BuildError> {
        let layout = backend.held_layout(layout);
        let budget = kv_memory.bytes(&layout, prefill_chunk);
        let storage = backend.pool(&layout, model.heads(), budget)?;
        Self::with_storage(backend, model, layout, storage, budget, prefill_chunk)
    }

    fn with_storage(
        backend: Arc<B>,
        model: Transformer<B>,
        layout: CacheLayout,
        storage: B::Pool,
        budget: usize,
        prefill_chunk: usize,
    ) -> Result<Self, BuildError> {
        let prefill_chunk = prefill_chunk.max(1);
        check_step(&*backend, &model, &layout, longest_step(prefill_chunk), budget)?;
        Ok(Self {
            storage,
            workspace: model.workspace(&backend),
            pool: PagePool::new(&layout, budget),
            layout,
            prefill_chunk,
            backend,
            model,
        })
    }

    pub fn backend(&self) -> &B {
        &self.backend
    }

    pub fn config(&self) -> &DecoderConfig {
        self.model.config()
    }

    /// The cache as the device keeps it.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Rotations of the cache.
    pub fn rotations(&self) -> Option<&RotationSet> {
        self.model.rotations()
    }

    /// Longest sequence, in tokens.
    pub fn context(&self) -> usize {
        self.model.max_positions()
    }

    /// Bytes of the matrices that a step of this many rows reads, as the device holds them. Experts
    /// are counted as often as a router that takes all of them equally often would choose them.
    pub fn weight_bytes(&self, rows: usize) -> usize {
        self.model.matrix_bytes(&self.backend, rows)
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
        Ok(self.backend.wait()?)
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
            if let (Logits::Pick(what), false) = (&request.logits, logits.is_empty()) {
                picks.push((wanted.len(), *what));
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
        let mut step = self.backend.step(&rows, &mut self.storage)?;
        self.model.forward(&mut step, &input, &mut self.workspace, out, tap)?;
        step.finish()?;
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

    /// Appends the bytes of a block to `out`. Tails that the prefix cache gave up must be quantized
    /// before.
    pub fn read_block(&self, block: BlockId, out: &mut Vec<u8>) -> Result<(), StepError> {
        Ok(self.backend.read_block(&self.storage, block, out)?)
    }

    /// Replaces the bytes of a block by those that [`Runner::read_block`] gave, here or in another
    /// process with the same model, cache and device.
    pub fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), StepError> {
        Ok(self.backend.write_block(&mut self.storage, block, bytes)?)
    }

    /// Quantizes the rows of stored pages that the prefix cache gave up.
    pub fn demote_tails(&mut self, tails: &[TailDemotion]) -> Result<(), StepError> {
        if tails.is_empty() {
            return Ok(());
        }
        // Each as a sequence that holds only this block.
        let tables: Vec<_> = tails
            .iter()
            .map(|tail| {
                let (mut full, mut coded) = (vec![None; tail.block + 1], vec![None; tail.block + 1]);
                (full[tail.block], coded[tail.block]) = (Some(tail.full), Some(tail.coded));
                (full, coded)
            })
            .collect();
        let rows: Vec<SequenceRows<'_>> = tails
            .iter()
            .zip(&tables)
            .map(|(tail, (full, coded))| SequenceRows {
                rows: 0..0,
                first_position: tail.positions.end,
                full,
                coded,
                demote: tail.positions.clone(),
                demote_values: tail.positions.clone(),
                view: None,
            })
            .collect();
        Ok(self.backend.demote(&rows, &mut self.storage)?)
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
        backend: B,
        config: &DecoderConfig,
        weights: WeightFormat,
        skew: f32,
        options: RunnerOptions<'_>,
    ) -> Result<Self, BuildError> {
        let model = Transformer::random(&backend, config, weights, skew, options.rotations, options.context)?;
        Self::new(Arc::new(backend), model, &options.layout, options.kv_memory, options.prefill_chunk)
    }

    /// Gives a sequence the pages of `tokens` more tokens with random contents, without computing
    /// anything. Returns `false`, and changes nothing, if the device cannot.
    pub fn pretend(&mut self, sequence: &mut Sequence, tokens: usize) -> Result<bool, StepError> {
        if !self.backend.randomize(&mut self.storage, 0, 0)? {
            return Ok(false);
        }
        let end = sequence.len() + tokens;
        while sequence.len() < end {
            let chunk = self.prefill_chunk.min(end - sequence.len());
            let step = sequence.pages.prepare(&self.layout, &self.pool, chunk)?;
            let last = |ids: &mut dyn Iterator<Item = u32>| ids.max().map_or(0, |id| id as usize + 1);
            let full = last(&mut sequence.pages.full().iter().flatten().map(|id| id.0));
            let coded = last(&mut sequence.pages.coded().iter().flatten().map(|id| id.0));
            self.backend.randomize(&mut self.storage, full, coded)?;
            sequence.pages.commit(&self.layout, &step);
        }
        Ok(true)
    }
}
