//! A model over several ranks: each has its own weights, pages and thread, all share page tables.
//!
//! A page id means the same slot in the pages of every head, so one page table serves all ranks.
//! The page budget counts the bytes of all heads together.
//!
//! **Invariant:** a rank that fails or panics ends the step of all ranks with its error. Nobody is
//! left waiting for it.

use crate::{KvMemory, Runner, RunnerOptions, StepError};
use oscar_backend::{Backend, BackendError, SequenceRows, Step, Tap};
use oscar_codec::{CacheLayout, FormatTable};
use oscar_models::{
    BuildError, DecoderConfig, Shard, StepInput, StepOutput, Transformer, Weights, Workspace,
};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// The devices of a model, in rank order: one alone, or ranks that share a communicator.
pub struct Ranks<B>(Vec<Arc<B>>);

impl<B> Ranks<B> {
    /// The first rank, which reads results.
    pub fn lead(&self) -> &Arc<B> {
        &self.0[0]
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }
}

impl<B> Clone for Ranks<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B> IntoIterator for Ranks<B> {
    type Item = Arc<B>;
    type IntoIter = std::vec::IntoIter<Arc<B>>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<B> From<B> for Ranks<B> {
    fn from(backend: B) -> Self {
        Self(vec![Arc::new(backend)])
    }
}

impl<B> From<Arc<B>> for Ranks<B> {
    fn from(backend: Arc<B>) -> Self {
        Self(vec![backend])
    }
}

impl<B: Backend> TryFrom<Vec<B>> for Ranks<B> {
    type Error = BackendError;

    /// Backends that are the ranks of one model, all of them, in order.
    fn try_from(backends: Vec<B>) -> Result<Self, BackendError> {
        let place = |backend: &B| backend.communicator().map_or((0, 1), |c| (c.rank(), c.ranks()));
        let places: Vec<_> = backends.iter().map(place).collect();
        let expected: Vec<_> = (0..backends.len()).map(|rank| (rank, backends.len())).collect();
        match places == expected && !backends.is_empty() {
            true => Ok(Self(backends.into_iter().map(Arc::new).collect())),
            false => Err(BackendError::Shape {
                what: "a list of ranks".into(),
                detail: format!("(rank, ranks) are {places:?}"),
            }),
        }
    }
}

/// One rank of a model: a device, its part of the model and of the pages.
pub(crate) struct Rank<B: Backend> {
    pub backend: Arc<B>,
    pub model: Transformer<B>,
    pub storage: B::Pool,
    pub workspace: Workspace<B>,
}

impl<B: Backend> Rank<B> {
    /// A rank for a model that is on its device already. `layout` and `budget` are those of all
    /// ranks.
    pub fn new(
        backend: Arc<B>,
        model: Transformer<B>,
        layout: &CacheLayout,
        budget: usize,
    ) -> Result<Self, BuildError> {
        let shard = Shard::of(&*backend, model.config())?;
        let storage = pool(&*backend, &shard, layout, budget)?;
        let workspace = model.workspace(&backend);
        Ok(Self { backend, model, storage, workspace })
    }

    fn load(
        backend: Arc<B>,
        config: &DecoderConfig,
        weights: &Weights,
        options: &RunnerOptions<'_>,
        (layout, budget): (&CacheLayout, usize),
        progress: impl FnMut(usize),
    ) -> Result<Self, BuildError> {
        let shard = Shard::of(&*backend, config)?;
        // The kernels of a cache are compiled meanwhile.
        let (model, storage) = std::thread::scope(|scope| {
            let storage = scope.spawn(|| pool(&*backend, &shard, layout, budget));
            let RunnerOptions { rotations, context, .. } = *options;
            let model = Transformer::build(&*backend, config, weights, rotations, context, progress);
            (model, storage.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        let (model, storage) = (model?, storage?);
        let workspace = model.workspace(&backend);
        Ok(Self { backend, model, storage, workspace })
    }

    fn step(
        &mut self,
        rows: &[SequenceRows<'_>],
        input: &StepInput<'_>,
        out: &mut StepOutput,
        tap: Option<&mut dyn Tap>,
    ) -> Result<(), BackendError> {
        let mut step = self.backend.step(rows, &mut self.storage)?;
        self.model.forward(&mut step, input, &mut self.workspace, out, tap)?;
        step.finish()
    }

    /// [`Self::step`] as one of several ranks: if it fails or panics, the others are told.
    fn step_among(
        &mut self,
        rows: &[SequenceRows<'_>],
        input: &StepInput<'_>,
        out: &mut StepOutput,
    ) -> Result<(), StepError> {
        let ended = catch_unwind(AssertUnwindSafe(|| self.step(rows, input, out, None)));
        let failure = match ended {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => StepError::Backend(error),
            Err(panic) => StepError::RankPanicked {
                rank: self.backend.communicator().map_or(0, |c| c.rank()),
                why: message(&*panic),
            },
        };
        self.abandon(&failure.to_string());
        Err(failure)
    }

    fn abandon(&self, why: &str) {
        if let Some(communicator) = self.backend.communicator() {
            communicator.abandon(why);
        }
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message").to_owned()
}

/// Page storage of a rank for all page ids that a cache of `budget` bytes hands out.
fn pool<B: Backend>(
    backend: &B,
    shard: &Shard,
    layout: &CacheLayout,
    budget: usize,
) -> Result<B::Pool, BuildError> {
    let heads = shard.part().heads();
    if !shard.is_split() {
        return Ok(backend.pool(layout, &heads, budget)?);
    }
    let part = part_of_layout(shard, layout)?;
    Ok(backend.pool(&part, &heads, part_of_budget(layout, &part, budget))?)
}

/// The cache of this rank's heads.
fn part_of_layout(shard: &Shard, layout: &CacheLayout) -> Result<CacheLayout, BuildError> {
    let wrong = |error: oscar_codec::CodecError| BackendError::Shape {
        what: "the cache of a rank".into(),
        detail: error.to_string(),
    };
    let (layers, heads) = (layout.layers(), shard.kv_heads());
    let order = layout.full().codec(0, 0).layout();
    let windows = *layout.windows();
    let part = CacheLayout::new(layout.format(), layers, heads.len(), layout.head_dim(), windows, order)
        .map_err(wrong)?;
    let part = part.with_sliding_of(layout);
    let Some(coded) = layout.coded() else { return Ok(part) };
    let codecs = (0..layers).flat_map(|layer| heads.clone().map(move |head| (layer, head)));
    let codecs = codecs.map(|(layer, head)| coded.codec(layer, head).clone()).collect();
    Ok(part.with_coded_table(FormatTable::new(layers, heads.len(), codecs).map_err(wrong)?))
}

/// A budget for the pages of a rank that has room for as many blocks of each kind as `budget`
/// has in the whole cache. Widths differ by head, so a rank's share of the bytes differs by format.
fn part_of_budget(whole: &CacheLayout, part: &CacheLayout, budget: usize) -> usize {
    let share = |part: usize, whole: usize| -> usize {
        let bytes = (budget as u128 * part as u128).div_ceil(whole.max(1) as u128);
        bytes.min(usize::MAX as u128 / 2) as usize + part
    };
    share(part.full_block_bytes(), whole.full_block_bytes())
        .max(share(part.coded_block_bytes(), whole.coded_block_bytes()))
        .max(share(part.sliding_block_bytes(), whole.sliding_block_bytes()))
}

impl<B: Backend> Runner<B> {
    /// Loads the part of every rank.
    pub(crate) fn load_ranks(
        ranks: Ranks<B>,
        config: &DecoderConfig,
        weights: &Weights,
        options: &RunnerOptions<'_>,
        mut progress: impl FnMut(usize),
    ) -> Result<(Vec<Rank<B>>, CacheLayout, usize), BuildError> {
        let layout = ranks.lead().held_layout(&options.layout);
        let budget = options.kv_memory.bytes(&layout, options.prefill_chunk);
        let (count, total) = (ranks.count(), weights.total_bytes() as usize);
        let mut loaded = Vec::with_capacity(count);
        for (rank, backend) in ranks.into_iter().enumerate() {
            let progress = |bytes: usize| progress((rank * total + bytes) / count);
            loaded.push(Rank::load(backend, config, weights, options, (&layout, budget), progress)?);
        }
        Ok((loaded, layout, budget))
    }

    /// Gives every rank's model to a new runner with its own cache.
    pub(crate) fn over(
        models: impl IntoIterator<Item = (Arc<B>, Transformer<B>)>,
        layout: &CacheLayout,
        kv_memory: KvMemory,
        prefill_chunk: usize,
    ) -> Result<Self, BuildError> {
        let models: Vec<_> = models.into_iter().collect();
        let layout =
            models.first().map_or_else(|| layout.clone(), |(backend, _)| backend.held_layout(layout));
        let budget = kv_memory.bytes(&layout, prefill_chunk);
        let ranks = models.into_iter().map(|(backend, model)| Rank::new(backend, model, &layout, budget));
        Self::with_ranks(ranks.collect::<Result<_, _>>()?, layout, budget, prefill_chunk)
    }

    /// Number of ranks that share the model.
    pub fn ranks(&self) -> usize {
        1 + self.others.len()
    }

    /// Refuses what only a model on one device can do.
    pub(crate) fn alone(&self, what: &str) -> Result<(), StepError> {
        if self.others.is_empty() {
            return Ok(());
        }
        Err(StepError::Backend(BackendError::Unsupported {
            device: self.lead.backend.describe(),
            why: format!("{what} does not work on several ranks yet: leave --tensor-parallel out"),
        }))
    }

    /// One step of all ranks at the same time, each on a thread of its own.
    pub(crate) fn step_ranks(
        &mut self,
        rows: &[SequenceRows<'_>],
        input: &StepInput<'_>,
        out: &mut StepOutput,
        tap: Option<&mut dyn Tap>,
    ) -> Result<(), StepError> {
        if self.others.is_empty() {
            return Ok(self.lead.step(rows, input, out, tap)?);
        }
        if tap.is_some() {
            self.alone("looking into the layers of a step")?;
        }
        let Self { lead, others, .. } = self;
        if let Some(communicator) = lead.backend.communicator() {
            communicator.restart();
        }
        let ends: Vec<Result<(), StepError>> = std::thread::scope(|scope| {
            let mut running = Vec::with_capacity(others.len());
            for (index, rank) in others.iter_mut().enumerate() {
                let builder = std::thread::Builder::new().name(format!("oscar-rank-{}", index + 1));
                let step = move || rank.step_among(rows, input, &mut StepOutput::default());
                match builder.spawn_scoped(scope, step) {
                    Ok(thread) => running.push(thread),
                    Err(error) => {
                        let why = format!("no thread for rank {}: {error}", index + 1);
                        lead.abandon(&why);
                        return vec![Err(StepError::RankPanicked { rank: index + 1, why })];
                    }
                }
            }
            let first = lead.step_among(rows, input, out);
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            std::iter::once(first).chain(running.into_iter().map(join)).collect()
        });
        // Ranks that only noticed that another one left say nothing new.
        let (noticed, causes): (Vec<StepError>, Vec<StepError>) = ends
            .into_iter()
            .filter_map(Result::err)
            .partition(|error| matches!(error, StepError::Backend(BackendError::RankLeft { .. })));
        causes.into_iter().chain(noticed).next().map_or(Ok(()), Err)
    }
}
