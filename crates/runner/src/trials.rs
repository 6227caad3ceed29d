//! Many readings of one ending, each over another version of its history.
//!
//! Calibration asks how far predictions move if part of the history is quantized. All readings of
//! an ending share the exact prefix in the cache. A *version* is a second set of pages for the
//! history in which some heads of some layers were recoded. A reading begins at the first layer
//! whose history it changes: its input is the exact one. So one step over a batch of readings
//! answers as many questions, and layers before the change are not computed again.

use crate::ranks::Rank;
use crate::{Runner, Sequence, StepError};
use oscar_backend::{Calibrates, Divergence, SequenceRows, Step};
use oscar_codec::{CacheLayout, FullPageId, PAGE_TOKENS};
use std::ops::Range;

/// What becomes of the logits of a step.
pub enum Compared<'a, R> {
    /// They are kept on the device.
    Kept(&'a mut R),
    /// They are compared with these.
    With(&'a R, &'a mut Vec<Divergence>),
}

impl<B: Calibrates> Runner<B> {
    /// Rows of logits on the device, empty.
    pub fn logits_rows(&self) -> B::Rows {
        self.lead.backend.rows(self.config().vocab_size)
    }

    /// Runs `tokens` behind a sequence. The logits of its tokens from `scored` on stay on the
    /// device.
    pub fn compared_step(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        scored: usize,
        compared: Compared<'_, B::Rows>,
    ) -> Result<(), StepError> {
        let request = crate::StepRequest { sequence, tokens, logits: crate::Logits::None };
        self.alone("calibration")?;
        self.check(std::slice::from_ref(&request))?;
        let sequence = request.sequence;
        sequence.reserved = None;
        let pages = sequence.pages.prepare(&self.layout, &self.pool, tokens.len())?;
        let wanted: Vec<usize> = (scored..tokens.len()).collect();
        {
            let Rank { backend, model, storage, workspace } = &mut self.lead;
            let rows = [sequence.pages.rows(&pages, 0)];
            let mut step = backend.step(&rows, storage)?;
            model.embed(&mut step, tokens, workspace)?;
            for layer in 0..model.config().layers {
                model.layer(&mut step, layer, workspace, None)?;
            }
            model.head(&mut step, &wanted, tokens.len(), workspace)?;
            match compared {
                Compared::Kept(rows) => std::mem::swap(rows, workspace.logits()),
                Compared::With(exact, out) => {
                    backend.divergences(&mut step, exact, workspace.logits(), out)?;
                }
            }
            step.finish()?;
        }
        sequence.pages.commit(&self.layout, &pages);
        Ok(())
    }
}

/// An exact prefix, its ending, and versions of its history.
pub struct Trials<'r, B: Calibrates> {
    runner: &'r mut Runner<B>,
    base: Sequence,
    versions: Vec<Sequence>,
    /// The pages of each reading's ending.
    endings: Vec<Sequence>,
    /// Exact inputs of each layer.
    inputs: Vec<B::Rows>,
    /// Exact logits of the scored rows.
    reference: B::Rows,
    history: Range<usize>,
    /// First position of the ending, a multiple of a page.
    end: usize,
    rows: usize,
    scored: Vec<usize>,
}

impl<'r, B: Calibrates> Trials<'r, B> {
    /// Bytes of pages for probes of up to `tokens` tokens with endings of up to `ending` tokens.
    pub fn bytes(
        layout: &CacheLayout,
        tokens: usize,
        ending: usize,
        versions: usize,
        readings: usize,
    ) -> usize {
        let blocks = |tokens: usize| tokens.div_ceil(PAGE_TOKENS);
        let all = (1 + versions) * blocks(tokens) + readings * blocks(ending);
        all * layout.full_block_bytes()
    }

    /// Reads the ending `tokens` of `base`, exactly. `base` holds the prefix, whole pages of it, in
    /// a cache whose windows are unlimited and which has all layers in one group. `history` are the positions that versions recode;
    /// `scored` the rows of the ending whose predictions count.
    pub fn new(
        runner: &'r mut Runner<B>,
        mut base: Sequence,
        tokens: &[u32],
        history: Range<usize>,
        scored: Range<usize>,
    ) -> Result<Self, StepError> {
        runner.alone("calibration")?;
        let (end, layers) = (base.len(), runner.config().layers);
        assert!(end.is_multiple_of(PAGE_TOKENS) && history.end <= end, "history and prefix in whole pages");
        let scored: Vec<usize> = scored.collect();
        let all: Vec<usize> = (0..tokens.len()).collect();
        let pages = base.pages.prepare(&runner.layout, &runner.pool, tokens.len())?;
        let mut inputs: Vec<B::Rows> =
            (0..layers).map(|_| runner.lead.backend.rows(runner.config().hidden_size)).collect();
        let mut reference = runner.logits_rows();
        {
            let Rank { backend, model, storage, workspace } = &mut runner.lead;
            let rows = [base.pages.rows(&pages, 0)];
            let mut step = backend.step(&rows, storage)?;
            model.embed(&mut step, tokens, workspace)?;
            for (layer, input) in inputs.iter_mut().enumerate() {
                step.select(workspace.hidden(), &all, input)?;
                model.layer(&mut step, layer, workspace, None)?;
            }
            model.head(&mut step, &scored, tokens.len(), workspace)?;
            std::mem::swap(&mut reference, workspace.logits());
            step.finish()?;
        }
        base.pages.commit(&runner.layout, &pages);
        let rows = tokens.len();
        let (versions, endings) = (Vec::new(), Vec::new());
        Ok(Self { runner, base, versions, endings, inputs, reference, history, end, rows, scored })
    }

    /// Gives a version the history of one layer at these widths of keys and values, by head; 0 is
    /// exact.
    pub fn set(&mut self, version: usize, layer: usize, widths: &[(u32, u32)]) -> Result<(), StepError> {
        while self.versions.len() <= version {
            let pages = self.pages_for(self.history.end)?;
            self.versions.push(pages);
        }
        let Self { runner, base, versions, history, .. } = self;
        let (from, to) = (base.pages.full(), versions[version].pages.full());
        let Rank { backend, storage, .. } = &mut runner.lead;
        Ok(backend.recode(layer, history.clone(), from, to, widths, storage)?)
    }

    /// Takes the inputs of each layer from a reading of this version instead of the exact one, so
    /// that later readings may differ from it in single layers.
    pub fn start_from(&mut self, version: usize) -> Result<(), StepError> {
        let (layers, rows) = (self.inputs.len(), self.rows);
        if self.endings.is_empty() {
            let pages = self.pages_for(rows)?;
            self.endings.push(pages);
        }
        let all: Vec<usize> = (0..rows).collect();
        let table = self.page_table(0, Some(version));
        let sequences = [self.sequence_rows(0, &table)];
        let Rank { backend, model, storage, workspace } = &mut self.runner.lead;
        let mut step = backend.step(&sequences, storage)?;
        // The first layer reads embeddings: they are the same for all versions.
        step.select(&self.inputs[0], &all, workspace.hidden())?;
        for layer in 0..layers - 1 {
            model.layer(&mut step, layer, workspace, None)?;
            step.select(workspace.hidden(), &all, &mut self.inputs[layer + 1])?;
        }
        Ok(step.finish()?)
    }

    fn pages_for(&self, tokens: usize) -> Result<Sequence, StepError> {
        let mut sequence = Sequence::new();
        let Runner { layout, pool, .. } = &*self.runner;
        let step = sequence.pages.prepare(layout, pool, tokens)?;
        sequence.pages.commit(layout, &step);
        Ok(sequence)
    }

    /// Reads the ending `readings` times, from `first_layer` on. `version(reading, layer)` names
    /// the version that a reading has in a layer, `None` for the exact history. Appends the
    /// divergences of all scored positions, reading by reading.
    pub fn run(
        &mut self,
        first_layer: usize,
        readings: usize,
        version: impl Fn(usize, usize) -> Option<usize>,
        out: &mut Vec<Divergence>,
    ) -> Result<(), StepError> {
        while self.endings.len() < readings {
            let pages = self.pages_for(self.rows)?;
            self.endings.push(pages);
        }
        let (layers, rows) = (self.inputs.len(), self.rows);
        let versions =
            |layer: usize| -> Vec<Option<usize>> { (0..readings).map(|r| version(r, layer)).collect() };
        let repeated: Vec<usize> = (0..readings).flat_map(|_| 0..rows).collect();
        let scored: Vec<usize> =
            (0..readings).flat_map(|r| self.scored.iter().map(move |row| r * rows + row)).collect();
        let mut layer = first_layer;
        while layer < layers {
            // Layers with the same page tables share a step.
            let now = versions(layer);
            let until = (layer + 1..layers).find(|&l| versions(l) != now).unwrap_or(layers);
            let tables: Vec<Vec<Option<FullPageId>>> =
                now.iter().enumerate().map(|(r, &version)| self.page_table(r, version)).collect();
            let sequences: Vec<SequenceRows<'_>> =
                tables.iter().enumerate().map(|(r, full)| self.sequence_rows(r, full)).collect();
            let Rank { backend, model, storage, workspace } = &mut self.runner.lead;
            let mut step = backend.step(&sequences, storage)?;
            if layer == first_layer {
                step.select(&self.inputs[layer], &repeated, workspace.hidden())?;
            }
            for layer in layer..until {
                model.layer(&mut step, layer, workspace, None)?;
            }
            if until == layers {
                model.head(&mut step, &scored, repeated.len(), workspace)?;
                backend.divergences(&mut step, &self.reference, workspace.logits(), out)?;
            }
            step.finish()?;
            layer = until;
        }
        Ok(())
    }

    fn sequence_rows<'t>(&self, reading: usize, full: &'t [Option<FullPageId>]) -> SequenceRows<'t> {
        SequenceRows {
            rows: reading * self.rows..(reading + 1) * self.rows,
            first_position: self.end,
            full,
            coded: &[],
            sliding: &[],
            demote: 0..0,
            demote_values: 0..0,
            view: None,
            states: None,
        }
    }

    /// The pages of a reading: the exact prefix, a version of the history, and its own ending.
    fn page_table(&self, reading: usize, version: Option<usize>) -> Vec<Option<FullPageId>> {
        let blocks = self.end / PAGE_TOKENS;
        let mut table = self.base.pages.full()[..blocks].to_vec();
        if let Some(version) = version {
            let history = self.history.start / PAGE_TOKENS..self.history.end.div_ceil(PAGE_TOKENS);
            table[history.clone()].copy_from_slice(&self.versions[version].pages.full()[history]);
        }
        table.extend_from_slice(self.endings[reading].pages.full());
        table
    }
}
