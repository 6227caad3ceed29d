//! One model on one device, and the steps it runs.

use oscar_backend::{Backend, BackendError, Candidate, Pick, SequenceRows, WeightFormat};
use oscar_cache::{
    OutOfPages, PagePool, PoolUsage, PrefixKey, PrefixPages, RadixCache, SequencePages, StepPages,
    TailDemotion,
};
use oscar_codec::{CacheLayout, RotationSet};
use oscar_models::{BuildError, DecoderConfig, Observer, StepInput, Transformer, Weights, Workspace};
use std::sync::Arc;

/// What can stop a step. The sequences of a refused step are as they were before.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    OutOfPages(#[from] OutOfPages),
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error(
        "position {position} is beyond the context of {context} tokens: shorten the prompt or raise --context"
    )]
    Context { position: usize, context: usize },
    #[error("token {token} does not exist: the vocabulary has {vocab} tokens")]
    Token { token: u32, vocab: usize },
}

/// How a model is to be run.
pub struct RunnerOptions<'a> {
    pub layout: CacheLayout,
    /// Rotations of the cache; none for formats that store rows as they are.
    pub rotations: Option<&'a RotationSet>,
    /// Longest sequence, in tokens.
    pub context: usize,
    /// Bytes for KV pages.
    pub kv_memory: usize,
    /// Most prompt tokens of one sequence in one step.
    pub prefill_chunk: usize,
}

/// A sequence in the cache.
#[derive(Debug, Default)]
pub struct Sequence {
    pages: SequencePages,
    /// A step whose pages are set aside.
    reserved: Option<StepPages>,
}

impl Sequence {
    pub fn new() -> Self {
        Self::default()
    }

    /// A sequence that goes on from a stored prefix (which may be empty) and can be put into the prefix cache.
    pub fn resume(layout: &CacheLayout, prefix: PrefixPages) -> Self {
        Self { pages: SequencePages::resume(layout, prefix), reserved: None }
    }

    /// Offers the whole pages of the sequence, whose tokens these are, to the prefix cache.
    pub fn publish<'a>(&mut self, cache: &mut RadixCache, key: impl Into<PrefixKey<'a>>) -> usize {
        let PrefixKey { salt, tokens } = key.into();
        let stored = &tokens[..self.pages.len().min(tokens.len())];
        cache.insert(PrefixKey::new(salt, stored), &mut self.pages)
    }

    /// Lets go of full pages that were kept for a prefix cache.
    pub fn trim(&mut self, layout: &CacheLayout) {
        self.pages.trim(layout);
    }

    /// First position at or beyond the sink that is not coded; the sink itself where nothing ever is.
    pub fn boundary(&self, layout: &CacheLayout) -> usize {
        match layout.coded() {
            Some(_) => self.pages.boundary(layout),
            None => layout.windows().sink(),
        }
    }

    /// Tokens stored.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    pub fn pages(&self) -> &SequencePages {
        &self.pages
    }
}

/// What one sequence brings to a step.
pub struct StepRequest<'a> {
    pub sequence: &'a mut Sequence,
    pub tokens: &'a [u32],
    /// Which of `tokens` want logits.
    pub logits: Logits,
}

/// Rows whose logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    None,
    Last,
    All,
    /// Of the last, only these tokens. For [`Runner::step_picking`]; elsewhere it is as good as `Last`.
    Pick(Pick),
}

/// A loaded model with its cache.
pub struct Runner<B: Backend> {
    backend: Arc<B>,
    model: Transformer<B>,
    storage: B::Pool,
    workspace: Workspace<B>,
    layout: CacheLayout,
    pool: PagePool,
    context: usize,
    prefill_chunk: usize,
    weight_bytes: usize,
}

impl<B: Backend> Runner<B> {
    pub fn load(
        backend: B,
        config: &DecoderConfig,
        weights: &Weights,
        options: RunnerOptions<'_>,
        progress: impl FnMut(usize),
    ) -> Result<Self, BuildError> {
        let model =
            Transformer::build(&backend, config, weights, options.rotations, options.context, progress)?;
        Self::assemble(Arc::new(backend), model, options)
    }

    /// A model of this shape with random weights: for benchmarks.
    pub fn random(
        backend: B,
        config: &DecoderConfig,
        weights: WeightFormat,
        options: RunnerOptions<'_>,
    ) -> Result<Self, BuildError> {
        let model = Transformer::random(&backend, config, weights, options.rotations, options.context)?;
        Self::assemble(Arc::new(backend), model, options)
    }

    /// The same model with another cache, on the same device and sharing its weights (but for the projections that
    /// other rotations are folded into). The context is this runner's.
    pub fn with_cache(&self, weights: &Weights, options: RunnerOptions<'_>) -> Result<Self, BuildError> {
        let model = self.model.with_rotations(&self.backend, weights, options.rotations)?;
        Self::assemble(self.backend.clone(), model, options)
    }

    fn assemble(
        backend: Arc<B>,
        model: Transformer<B>,
        options: RunnerOptions<'_>,
    ) -> Result<Self, BuildError> {
        let layout = backend.held_layout(&options.layout);
        let storage = backend.pool(&layout, options.kv_memory)?;
        let workspace = model.workspace(&backend);
        let weight_bytes = model.matrix_bytes(&backend);
        let pool = PagePool::new(&layout, options.kv_memory);
        Ok(Self {
            context: model.max_positions(),
            prefill_chunk: options.prefill_chunk.max(1),
            weight_bytes,
            layout,
            backend,
            model,
            storage,
            workspace,
            pool,
        })
    }

    pub fn backend(&self) -> &B {
        &self.backend
    }

    pub fn config(&self) -> &DecoderConfig {
        self.model.config()
    }

    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Rotations of the cache.
    pub fn rotations(&self) -> Option<&RotationSet> {
        self.model.rotations()
    }

    pub fn context(&self) -> usize {
        self.context
    }

    /// Bytes of the matrices as the device holds them: what a decode step reads besides the cache.
    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    pub fn usage(&self) -> PoolUsage {
        self.pool.usage()
    }

    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// Sets the pages aside that a step of `tokens` tokens will need. Changes nothing if there are too few.
    pub fn reserve(&self, sequence: &mut Sequence, tokens: usize) -> Result<(), OutOfPages> {
        sequence.reserved = None;
        sequence.reserved = Some(sequence.pages.prepare(&self.layout, &self.pool, tokens)?);
        Ok(())
    }

    /// Most prompt tokens of one sequence in one step.
    pub fn prefill_chunk(&self) -> usize {
        self.prefill_chunk
    }

    /// Changes the prefill chunk; answers do not depend on it.
    pub fn set_prefill_chunk(&mut self, tokens: usize) {
        self.prefill_chunk = tokens.max(1);
    }

    /// Runs one step over all requests together; `logits` receives the wanted rows in request order.
    pub fn step(
        &mut self,
        requests: &mut [StepRequest<'_>],
        logits: &mut Vec<f32>,
    ) -> Result<(), EngineError> {
        self.observed_step(requests, logits, None)
    }

    /// [`Runner::step`] with an observer of every layer.
    pub fn observed_step(
        &mut self,
        requests: &mut [StepRequest<'_>],
        logits: &mut Vec<f32>,
        observer: Option<&mut dyn Observer<B>>,
    ) -> Result<(), EngineError> {
        self.run_step(requests, |model, backend, input, _, storage, workspace| {
            model.forward(backend, input, storage, workspace, logits, observer)
        })
    }

    /// [`Runner::step`], but requests for [`Logits::Pick`] get a list in `picked` instead of logits, both in request
    /// order. For backends that [pick](Backend::picks).
    pub fn step_picking(
        &mut self,
        requests: &mut [StepRequest<'_>],
        logits: &mut Vec<f32>,
        picked: &mut Vec<Vec<Candidate>>,
    ) -> Result<(), EngineError> {
        self.run_step(requests, |model, backend, input, picks, storage, workspace| {
            model.forward_picking(backend, input, picks, storage, workspace, logits, picked)
        })
    }

    fn run_step(
        &mut self,
        requests: &mut [StepRequest<'_>],
        forward: impl FnOnce(
            &Transformer<B>,
            &B,
            &StepInput<'_>,
            &[(usize, Pick)],
            &mut B::Pool,
            &mut Workspace<B>,
        ) -> Result<(), BackendError>,
    ) -> Result<(), EngineError> {
        self.check(requests)?;
        let mut steps = Vec::with_capacity(requests.len());
        for request in requests.iter_mut() {
            // A refusal half-way leaves earlier sequences with pages they will need anyway; their length, and so
            // what they answer, is unchanged until `commit`.
            let sequence = &mut *request.sequence;
            steps.push(match sequence.reserved.take() {
                Some(step) if step.positions.len() == request.tokens.len() => step,
                _ => sequence.pages.prepare(&self.layout, &self.pool, request.tokens.len())?,
            });
        }
        let mut tokens = Vec::new();
        let mut rows = Vec::with_capacity(requests.len());
        let (mut wanted, mut picks) = (Vec::new(), Vec::new());
        for (request, step) in requests.iter().zip(&steps) {
            let first = tokens.len();
            tokens.extend_from_slice(request.tokens);
            match request.logits {
                Logits::None => {}
                Logits::Last | Logits::Pick(_) => {
                    let last = tokens.len().checked_sub(1).filter(|&last| last >= first);
                    if let (Logits::Pick(what), Some(_)) = (request.logits, last) {
                        picks.push((wanted.len(), what));
                    }
                    wanted.extend(last);
                }
                Logits::All => wanted.extend(first..tokens.len()),
            }
            rows.push(SequenceRows {
                rows: first..tokens.len(),
                first_position: step.positions.start,
                full: request.sequence.pages.full(),
                coded: request.sequence.pages.coded(),
                demote: step.demote.clone(),
                demote_values: step.demote_values.clone(),
            });
        }
        let input = StepInput { tokens: &tokens, sequences: &rows, logits: &wanted };
        forward(&self.model, &self.backend, &input, &picks, &mut self.storage, &mut self.workspace)?;
        for (request, step) in requests.iter_mut().zip(&steps) {
            request.sequence.pages.commit(&self.layout, step);
        }
        Ok(())
    }

    /// Codes the rows of stored pages that the prefix cache gave up.
    pub fn demote_tails(&mut self, tails: &[TailDemotion]) -> Result<(), EngineError> {
        if tails.is_empty() {
            return Ok(());
        }
        // Each as a sequence of which only this block is held.
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
            })
            .collect();
        self.backend.begin_demotion(&rows, &mut self.storage)?;
        for layer in 0..self.layout.layers() {
            self.backend.demote(layer, &rows, &mut self.storage)?;
        }
        self.backend.end_step()?;
        Ok(())
    }

    /// Gives a sequence the pages of `tokens` more tokens without computing anything, their contents random: for
    /// benchmarks of long contexts. `false` if the device cannot, and nothing has changed.
    pub fn pretend(&mut self, sequence: &mut Sequence, tokens: usize) -> Result<bool, EngineError> {
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

    fn check(&self, requests: &[StepRequest<'_>]) -> Result<(), EngineError> {
        for request in requests {
            let end = request.sequence.len() + request.tokens.len();
            if end > self.context {
                return Err(EngineError::Context { position: end - 1, context: self.context });
            }
            let vocab = self.config().vocab_size;
            if let Some(&token) = request.tokens.iter().find(|&&t| t as usize >= vocab) {
                return Err(EngineError::Token { token, vocab });
            }
        }
        Ok(())
    }

    /// Feeds a prompt in chunks and leaves the last token's logits in `logits`. `progress` hears how many prompt
    /// tokens are stored.
    pub fn prefill(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        logits: &mut Vec<f32>,
        mut progress: impl FnMut(usize),
    ) -> Result<(), EngineError> {
        let mut done = 0;
        for chunk in tokens.chunks(self.prefill_chunk) {
            done += chunk.len();
            let wanted = if done == tokens.len() { Logits::Last } else { Logits::None };
            self.step(&mut [StepRequest { sequence, tokens: chunk, logits: wanted }], logits)?;
            progress(done);
        }
        Ok(())
    }
}
