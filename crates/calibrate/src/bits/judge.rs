//! How far a quantized cache moves the model's predictions.

use super::layers::WidthLayers;
use super::probe::Probe;
use super::scores::Scores;
use super::table::{ABSENT, WidthTable};
use crate::error::CalibrateError;
use oscar_backend::{Backend, Calibrates, Divergence};
use oscar_codec::{CacheLayout, CodeLayout, KvFormat, PAGE_TOKENS, Rounding, Windows};
use oscar_models::Transformer;
use oscar_runner::{Compared, KvMemory, Logits, Runner, Sequence, StepOutput, StepRequest, Trials};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Readings of an ending in one step, at most.
const MOST_READINGS: usize = 32;
const LEAST_READINGS: usize = 2;
/// Bytes of logits of one step.
const LOGITS_BYTES: usize = 1 << 30;

/// A model that answers probes with whatever cache it is given. It must have been built with the
/// rotations of the cache that is judged.
pub struct Judge<'a, B: Backend> {
    pub backend: &'a Arc<B>,
    pub transformer: &'a Transformer<B>,
    pub windows: Windows,
    /// Of each layer and KV head.
    pub roundings: &'a [Rounding],
    /// Tokens run at once.
    pub chunk: usize,
    /// Bytes for versions of the history.
    pub memory: usize,
    pub cancelled: &'a AtomicBool,
}

impl<B: Backend> Judge<'_, B> {
    /// The layers that have widths.
    pub(super) fn layers(&self) -> WidthLayers {
        WidthLayers::of(self.transformer.config())
    }

    /// The cache that serves with this table.
    fn table_layout(&self, table: &WidthTable) -> Result<CacheLayout, CalibrateError> {
        let config = self.transformer.config();
        self.with_table(config.cache_layout(KvFormat::OSCAR, self.windows, CodeLayout::Logical)?, table)
    }

    /// A cache that stays exact and has all layers in one group. Its coded table only says how
    /// versions of it are rounded.
    fn exact_layout(&self) -> Result<CacheLayout, CalibrateError> {
        let c = self.transformer.config();
        let (windows, order) = (Windows::unlimited(), CodeLayout::Logical);
        let layout = CacheLayout::new(KvFormat::OSCAR, c.layers, c.kv_heads, c.head_dim, windows, order)?;
        self.with_table(layout, &WidthTable::uniform(c.layers, c.kv_heads, 2))
    }

    fn with_table(&self, layout: CacheLayout, table: &WidthTable) -> Result<CacheLayout, CalibrateError> {
        let formats = table.formats(&layout)?.with_roundings(self.roundings.to_vec())?;
        Ok(layout.with_coded_table(formats))
    }

    pub(super) fn check_cancelled(&self) -> Result<(), CalibrateError> {
        match self.cancelled.load(Ordering::Relaxed) {
            true => Err(CalibrateError::Cancelled),
            false => Ok(()),
        }
    }

    /// Runs `tokens` behind a sequence in chunks.
    fn prefill(
        &self,
        runner: &mut Runner<B>,
        sequence: &mut Sequence,
        tokens: &[u32],
    ) -> Result<(), CalibrateError> {
        let mut output = StepOutput::default();
        for tokens in tokens.chunks(self.chunk.max(1)) {
            self.check_cancelled()?;
            runner.step(&mut [StepRequest { sequence, tokens, logits: Logits::None }], &mut output)?;
        }
        Ok(())
    }

    fn runner(&self, layout: &CacheLayout, memory: KvMemory) -> Result<Runner<B>, CalibrateError> {
        Ok(Runner::new(self.backend.clone(), self.transformer.clone(), layout, memory, self.chunk)?)
    }
}

/// Puts a whole table into a version of the history. Sliding layers keep their exact rows.
pub(super) fn set_table<B: Calibrates>(
    trials: &mut Trials<'_, B>,
    version: usize,
    table: &WidthTable,
    layers: &WidthLayers,
) -> Result<(), CalibrateError> {
    let exact = vec![(ABSENT, ABSENT); table.kv_heads];
    for layer in 0..layers.depth() {
        let widths = layers.place(layer).map_or(&exact[..], |place| table.of_layer(place));
        trials.set(version, layer, widths)?;
    }
    Ok(())
}

/// One cache for the endings of many probes.
pub(super) struct Stage<B: Backend> {
    runner: Runner<B>,
    /// Readings in one step.
    pub readings: usize,
}

impl<B: Calibrates> Judge<'_, B> {
    /// A cache for endings of these probes.
    pub(super) fn stage(&self, probes: &[Probe]) -> Result<Stage<B>, CalibrateError> {
        let layout = self.exact_layout()?;
        let tokens = probes.iter().map(|p| p.tokens.len()).max().unwrap_or(0);
        let ending = probes.iter().map(|p| p.tokens.len() - p.end()).max().unwrap_or(0);
        let scored = probes.iter().map(|p| p.scored.len()).max().unwrap_or(0);
        let bytes = |readings| Trials::<B>::bytes(&layout, tokens, ending, readings + 1, readings);
        let logits = 4 * scored * self.transformer.config().vocab_size;
        let fits = |&readings: &usize| bytes(readings) <= self.memory && readings * logits <= LOGITS_BYTES;
        let readings = (LEAST_READINGS..=MOST_READINGS).rev().find(fits).unwrap_or(LEAST_READINGS);
        let runner = self.runner(&layout, KvMemory::Bytes(bytes(readings)))?;
        Ok(Stage { runner, readings })
    }

    /// Reads a probe up to its ending and makes it ready for trials.
    pub(super) fn trials<'r>(
        &self,
        stage: &'r mut Stage<B>,
        probe: &Probe,
    ) -> Result<Trials<'r, B>, CalibrateError> {
        let end = probe.end();
        // The boundary moves while the ending is read; that of its middle stands for all.
        let middle = end + (probe.tokens.len() - end) / 2;
        let history = self.windows.sink()..self.windows.boundary(middle).min(end);
        if history.is_empty() {
            let (group, tokens) = (&probe.group, probe.tokens.len());
            let problem = format!(
                "a '{group}' probe of {tokens} tokens leaves nothing to quantize outside of the BF16 windows"
            );
            return Err(CalibrateError::option("--bits", problem));
        }
        let mut sequence = Sequence::new();
        self.prefill(&mut stage.runner, &mut sequence, &probe.tokens[..end])?;
        let scored = probe.scored.start - end..probe.scored.end - end;
        Ok(Trials::new(&mut stage.runner, sequence, &probe.tokens[end..], history, scored)?)
    }

    /// What tables of widths do to the predictions if every token passes through the quantized
    /// cache, as in serving. The exact predictions are made once for all tables. `progress` is
    /// called after each reading of a probe.
    pub fn verify(
        &self,
        probes: &[Probe],
        tables: &[WidthTable],
        mut progress: impl FnMut(),
    ) -> Result<Vec<Scores>, CalibrateError> {
        let tokens = probes.iter().map(|p| p.tokens.len()).max().unwrap_or(0);
        let one = KvMemory::Sequences { count: 1, tokens };
        let mut exact = self.runner(&self.exact_layout()?, one)?;
        let layouts = tables.iter().map(|table| self.table_layout(table)).collect::<Result<Vec<_>, _>>()?;
        let mut all = vec![Scores::default(); tables.len()];
        let mut reference = exact.logits_rows();
        for probe in probes {
            self.read(&mut exact, probe, Compared::Kept(&mut reference))?;
            progress();
            for (layout, scores) in layouts.iter().zip(&mut all) {
                let mut found: Vec<Divergence> = Vec::new();
                // One cache at a time: there may be a table for every third head of a large model.
                let mut runner = self.runner(layout, one)?;
                self.read(&mut runner, probe, Compared::With(&reference, &mut found))?;
                scores.add(&probe.group, &found);
                progress();
            }
        }
        Ok(all)
    }

    /// Reads a whole probe in a cache of its own.
    fn read(
        &self,
        runner: &mut Runner<B>,
        probe: &Probe,
        compared: Compared<'_, B::Rows>,
    ) -> Result<(), CalibrateError> {
        let mut sequence = Sequence::new();
        // Whole pages, so that chunks are as in the other readings.
        let split = probe.scored.start / PAGE_TOKENS * PAGE_TOKENS;
        self.prefill(runner, &mut sequence, &probe.tokens[..split])?;
        self.check_cancelled()?;
        let tokens = &probe.tokens[split..probe.scored.end];
        Ok(runner.compared_step(&mut sequence, tokens, probe.scored.start - split, compared)?)
    }
}
