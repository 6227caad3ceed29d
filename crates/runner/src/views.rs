//! Sequences that read a part of their history: forks, views and the scores that choose rows.

use crate::{Logits, Runner, Sequence, StepError, StepOutput, StepRequest, next_chunk};
use oscar_backend::{Backend, HeadHistory, HistoryRows, Result, Scoring, SequenceRows, Tap, TappedRows};
use oscar_cache::{PrefixPages, View, view_end};
use std::sync::Arc;

/// Asks every layer for scores.
struct ScoreTap<'a>(&'a mut Scoring);

impl Tap for ScoreTap<'_> {
    fn heads(&mut self, _: usize, _: &mut dyn TappedRows) -> Result<()> {
        Ok(())
    }

    fn attended(&mut self, _: usize, _: &mut dyn TappedRows) -> Result<()> {
        Ok(())
    }

    fn scoring(&mut self) -> Option<&mut Scoring> {
        Some(self.0)
    }
}

impl Sequence {
    /// An empty sequence that can be forked at its last whole page.
    pub fn forkable<B: Backend>(runner: &Runner<B>) -> Self {
        Self::resume(runner.layout(), PrefixPages::default())
    }

    /// The rows of a sequence outside of a step.
    fn stored(&self) -> SequenceRows<'_> {
        SequenceRows {
            rows: 0..0,
            first_position: self.len(),
            full: self.pages.full(),
            coded: self.pages.coded(),
            sliding: self.pages.sliding(),
            demote: 0..0,
            demote_values: 0..0,
            view: self.pages.view().map(|view| &**view),
            states: None,
        }
    }
}

impl<B: Backend> Runner<B> {
    /// Another continuation of the first `len` tokens, whole pages. `None` if the sequence no longer
    /// holds a page that it would read.
    pub fn fork(&self, sequence: &Sequence, len: usize) -> Option<Sequence> {
        let pages = sequence.pages.fork(&self.layout, len, None)?;
        Some(Sequence { pages, reserved: None })
    }

    /// Another continuation of the first `len` tokens that reads, of the history before
    /// [`view_end`], only the rows at the positions `kept` (ascending, by layer and head).
    ///
    /// # Errors
    /// If there is no room, the device or the format cannot evict rows, or the sequence no longer
    /// holds a page that the new one would read.
    pub fn derive(
        &mut self,
        sequence: &Sequence,
        len: usize,
        kept: Vec<Vec<u32>>,
    ) -> std::result::Result<Sequence, StepError> {
        let view = self.gather(sequence, len, kept)?;
        let derived = self.fork_reading(sequence, len, view);
        derived.ok_or(StepError::Eviction("the sequence no longer holds its recent rows"))
    }

    /// Copies the rows at the positions `kept` (ascending, by layer and head) of the history before
    /// [`view_end`] of the first `len` tokens into a view.
    ///
    /// # Errors
    /// If there is no room, or the device or the format cannot evict rows.
    pub fn gather(
        &mut self,
        sequence: &Sequence,
        len: usize,
        kept: Vec<Vec<u32>>,
    ) -> std::result::Result<Arc<View>, StepError> {
        self.alone("eviction of rows")?;
        self.config().evicts_rows().map_err(StepError::Eviction)?;
        self.layout.evicts_rows().map_err(StepError::Eviction)?;
        let view = Arc::new(View::new(&self.layout, &self.pool, view_end(&self.layout, len), kept)?);
        self.lead.backend.gather(&sequence.stored(), &view, &mut self.lead.storage)?;
        Ok(view)
    }

    /// Another continuation of the first `len` tokens, whole pages, that reads a view of its history
    /// in place of the rows before the view's end. `None` if the sequence no longer holds a page that
    /// it would read.
    pub fn fork_reading(&self, sequence: &Sequence, len: usize, view: Arc<View>) -> Option<Sequence> {
        let pages = sequence.pages.fork(&self.layout, len, Some(view))?;
        Some(Sequence { pages, reserved: None })
    }

    /// Feeds tokens to a sequence in chunks and adds the attention weights of those from `first` on
    /// to `scoring`, whose `queries` are set here.
    pub fn score(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        first: usize,
        scoring: &mut Scoring,
    ) -> std::result::Result<(), StepError> {
        let mut out = StepOutput::default();
        let mut done = 0;
        while done < tokens.len() {
            let end = done + next_chunk(tokens.len() - done, self.prefill_chunk);
            scoring.queries = first.clamp(done, end) - done..end - done;
            let request = StepRequest { sequence, tokens: &tokens[done..end], logits: Logits::None };
            let mut tap = ScoreTap(scoring);
            let tap = (first < end).then_some(&mut tap as &mut dyn Tap);
            self.tapped_step(&mut [request], &mut out, tap)?;
            done = end;
        }
        Ok(())
    }

    /// Dequantized rows of a head's history, those of a view first.
    pub fn history(
        &self,
        sequence: &Sequence,
        rows: HeadHistory,
    ) -> std::result::Result<HistoryRows, StepError> {
        self.alone("reading the history")?;
        Ok(self.lead.backend.history(&sequence.stored(), rows, &self.lead.storage)?)
    }
}
