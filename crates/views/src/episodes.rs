//! Episodes: one view for each topic of a conversation, and one for all (EpiCache in `post` mode).
//!
//! The history is computed once. For each topic a *probe* is then fed to a fork of it: a request to
//! recall, and as the answer the segments closest to the topic's centroid. A row's score is the
//! largest softmax weight that any query of the recited segments gives it, the softmax over the
//! history alone. Scores are maxima, so the union of episodes is the maximum of their scores, and the
//! *global* scores are the maximum over all episodes: within one budget, without another probe.

use crate::scorers::{History, Probe, Scores, fork, positions, scoring, weights};
use crate::topics::{Route, Topics};
use oscar_backend::{Backend, Reduce};
use oscar_runner::{Runner, StepError};

/// Tokens of the segments that a probe recites, at most.
const RECITED_TOKENS: usize = 2048;

/// Topics of a history and the scores of its rows under each.
#[derive(Clone, Debug)]
pub struct Episodes {
    pub topics: Topics,
    scores: Vec<Scores>,
}

impl Episodes {
    /// Probes every episode of a history that was computed as a whole.
    ///
    /// # Errors
    /// If rows of the history were evicted before, or a probe does not fit behind it.
    pub fn score<B: Backend>(
        runner: &mut Runner<B>,
        history: &History<'_>,
        topics: Topics,
        probe: &Probe,
    ) -> Result<Self, StepError> {
        if history.sequence.pages().view().is_some() {
            return Err(StepError::Eviction(
                "episodes need the whole history, and some of it was evicted before: use snapkv, tova, keydiff or recent",
            ));
        }
        if topics.episodes() == 0 {
            return Err(StepError::Eviction("a conversation without utterances has no episodes"));
        }
        let mut scores = Vec::with_capacity(topics.episodes());
        for episode in 0..topics.episodes() {
            let mut fork = fork(runner, history, history.len)?;
            let mut total = scoring(runner, history.len, Reduce::Max);
            total.over = Some(std::iter::once(0..history.len).collect());
            let mut fed = probe.recall.clone();
            let first = fed.len();
            for segment in topics.recited(episode, RECITED_TOKENS) {
                fed.extend_from_slice(&history.tokens[segment]);
            }
            runner.score(&mut fork, &fed, first, &mut total)?;
            let (positions, rows) = (positions(runner, history), weights(&total));
            scores.push(Scores { positions, rows, probe_tokens: fed.len() });
        }
        Ok(Self { topics, scores })
    }

    /// Tokens computed for all episodes together.
    pub fn probe_tokens(&self) -> usize {
        self.scores.iter().map(|scores| scores.probe_tokens).sum()
    }

    /// Every view that is kept for a conversation: one for each episode, and the global one.
    pub fn routes(&self) -> impl Iterator<Item = Route> + use<> {
        (0..self.scores.len()).map(Route::Episode).chain([Route::Global])
    }

    /// The scores of the rows for a route.
    ///
    /// # Panics
    /// If the conversation has no such episode.
    pub fn scores(&self, route: Route) -> Scores {
        let of: Vec<usize> = match route {
            Route::Episode(only) => vec![only],
            Route::Union(a, b) => vec![a, b],
            Route::Global => (0..self.scores.len()).collect(),
        };
        let mut total = self.scores[of[0]].clone();
        for &other in &of[1..] {
            let other = &self.scores[other];
            total.probe_tokens += other.probe_tokens;
            for (rows, more) in total.rows.iter_mut().zip(&other.rows) {
                rows.iter_mut().zip(more).for_each(|(score, more)| *score = score.max(*more));
            }
        }
        total
    }
}
