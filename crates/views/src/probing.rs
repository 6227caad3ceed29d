//! Probes in bounded pieces: tokens fed to forks of a history, whose queries score its rows.
//!
//! A probe is a list of passes. Each pass forks the history, feeds some tokens behind it and adds
//! the attention of their queries to one of the totals. Totals are maxima of integers, so neither
//! the pieces nor a pass that is begun again change a score. Afterwards the keys are compared, and
//! the scores are [a blend](crate::blend) of both rankings.

use crate::blend::blend;
use crate::scorers::{History, Probe, Ranking, Scores, ZIP_CHUNK, ZIP_CUE, fork, scoring, weights};
use crate::topics::Topics;
use oscar_backend::{Backend, Reduce, Scoring};
use oscar_codec::PAGE_TOKENS;
use oscar_runner::{Runner, Sequence, StepError};
use std::ops::Range;

/// Tokens of the segments that the probe of an episode recites, at most.
const RECITED_TOKENS: usize = 2048;

/// Tokens fed to one fork of the history.
struct Pass {
    fed: Vec<u32>,
    /// The queries that count begin here.
    first: usize,
    /// Positions that the softmax runs over.
    over: Vec<Range<usize>>,
    /// The total that it adds to.
    total: usize,
}

/// See the [module](self).
pub struct Probing {
    passes: Vec<Pass>,
    totals: Vec<Scoring>,
    keys: Ranking,
    /// Passes that are done, and the fork of the one under way with the tokens it was fed.
    done: usize,
    under_way: Option<(Sequence, usize)>,
}

impl Probing {
    /// The probe of `kvzip`: the text is repeated, a chunk at a time.
    ///
    /// # Errors
    /// If rows of the history were evicted before, or there is no room behind it in the context.
    pub fn repeating<B: Backend>(
        runner: &Runner<B>,
        history: &History<'_>,
        probe: &Probe,
    ) -> Result<Self, StepError> {
        let mut probing = Self::new(runner, history, 1)?;
        let room = room(runner, history, &probe.repeat)?.saturating_sub(ZIP_CUE);
        let sink = runner.layout().windows().sink();
        let until = probing.totals[0].until;
        let mut start = sink;
        while start < until {
            let end = until.min(start + ZIP_CHUNK.min(room));
            let cue = if start == sink { start..start } else { start - ZIP_CUE..start };
            let mut fed = probe.repeat.clone();
            fed.extend_from_slice(&history.tokens[cue]);
            let first = fed.len();
            fed.extend_from_slice(&history.tokens[start..end]);
            // The softmax runs over the sink, the chunk and its repetition.
            let over = vec![0..sink, start..end, history.len..usize::MAX];
            probing.passes.push(Pass { fed, first, over, total: 0 });
            start = end;
        }
        Ok(probing)
    }

    /// The probes of episodes: each recites the segments closest to its centroid.
    ///
    /// # Errors
    /// As [`Probing::repeating`], or if there are no episodes.
    pub fn reciting<B: Backend>(
        runner: &Runner<B>,
        history: &History<'_>,
        topics: &Topics,
        probe: &Probe,
    ) -> Result<Self, StepError> {
        if topics.episodes() == 0 {
            return Err(StepError::Eviction("a conversation without utterances has no episodes"));
        }
        let mut probing = Self::new(runner, history, topics.episodes())?;
        let room = room(runner, history, &probe.recall)?;
        for total in 0..topics.episodes() {
            let mut fed = probe.recall.clone();
            let first = fed.len();
            for segment in topics.recited(total, RECITED_TOKENS.min(room)) {
                fed.extend_from_slice(&history.tokens[segment]);
            }
            fed.truncate(first + room);
            let over = std::iter::once(0..history.len).collect();
            probing.passes.push(Pass { fed, first, over, total });
        }
        Ok(probing)
    }

    fn new<B: Backend>(runner: &Runner<B>, history: &History<'_>, totals: usize) -> Result<Self, StepError> {
        if history.sequence.pages().view().is_some() {
            return Err(StepError::Eviction(
                "kvzip and episodes need the whole history, and some of it was evicted before: use snapkv, tova, keydiff or recent",
            ));
        }
        let totals = (0..totals).map(|_| scoring(runner, history.len, Reduce::Max)).collect();
        let keys = Ranking::new(runner, history);
        Ok(Self { passes: Vec::new(), totals, keys, done: 0, under_way: None })
    }

    pub fn is_done(&self) -> bool {
        self.done == self.passes.len() && self.keys.is_done()
    }

    /// Feeds at most `most` tokens; returns how many. Once all are fed, compares keys: see
    /// [`Ranking`].
    ///
    /// # Errors
    /// If a step fails. After [`StepError::OutOfPages`] it may be called again.
    pub fn advance<B: Backend>(
        &mut self,
        runner: &mut Runner<B>,
        history: &History<'_>,
        most: usize,
    ) -> Result<usize, StepError> {
        let Some(pass) = self.passes.get(self.done) else {
            return self.keys.advance(runner, history).map(|_| 0);
        };
        let (fork, fed) = match &mut self.under_way {
            Some(known) => known,
            free => free.insert((fork(runner, history, history.len)?, 0)),
        };
        let end = pass.fed.len().min(*fed + most.max(1));
        let total = &mut self.totals[pass.total];
        total.over = Some(pass.over.clone());
        runner.score(fork, &pass.fed[*fed..end], pass.first.saturating_sub(*fed), total)?;
        let count = end - *fed;
        *fed = end;
        if end == pass.fed.len() {
            self.done += 1;
            self.under_way = None;
        }
        Ok(count)
    }

    /// Gives the pages of the pass under way back; it will begin again.
    pub fn release(&mut self) {
        self.under_way = None;
    }

    /// The scores of each total, once everything is done.
    pub fn scores(self) -> Vec<Scores> {
        let fed =
            |total| self.passes.iter().filter(|pass| pass.total == total).map(|pass| pass.fed.len()).sum();
        let Scores { positions, rows: keys, .. } = self.keys.scores();
        let of = |(i, total)| Scores {
            positions: positions.clone(),
            rows: blend(&weights(total), &keys),
            probe_tokens: fed(i),
        };
        self.totals.iter().enumerate().map(of).collect()
    }

    /// Feeds everything at once.
    ///
    /// # Errors
    /// If a step fails.
    pub fn run<B: Backend>(
        mut self,
        runner: &mut Runner<B>,
        history: &History<'_>,
    ) -> Result<Vec<Scores>, StepError> {
        while !self.is_done() {
            self.advance(runner, history, usize::MAX / 2)?;
        }
        Ok(self.scores())
    }
}

/// Positions behind a history that are left for a probe's text.
fn room<B: Backend>(runner: &Runner<B>, history: &History<'_>, asked: &[u32]) -> Result<usize, StepError> {
    let room = runner.context().saturating_sub(history.len + asked.len());
    match room >= 2 * PAGE_TOKENS {
        true => Ok(room),
        false => Err(StepError::Eviction("the context ends too soon behind the history to probe it")),
    }
}
