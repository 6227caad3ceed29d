//! Episodes: one view for each topic of a conversation, and one for all (EpiCache in `post` mode).
//!
//! The history is computed once. For each topic a *probe* is then fed to a fork of it: a request to
//! recall, and as the answer the segments closest to the topic's centroid. A row's weight is the
//! largest softmax weight that any query of the recited segments gives it, the softmax over the
//! history alone. Its score is the [blend](crate::blend) of the ranking by these weights with the
//! ranking of keys. The union of episodes takes the larger score of each row, and the *global* scores
//! take the largest over all episodes: within one budget, without another probe.

use crate::probing::Probing;
use crate::scorers::{History, Probe, Scores};
use crate::topics::{Route, Topics};
use oscar_backend::Backend;
use oscar_runner::{Runner, StepError};

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
        let scores = Probing::reciting(runner, history, &topics, probe)?.run(runner, history)?;
        Ok(Self { topics, scores })
    }

    /// Tokens computed for all episodes together.
    pub fn probe_tokens(&self) -> usize {
        self.scores.iter().map(|scores| scores.probe_tokens).sum()
    }

    /// Every view that is kept for a conversation: one for each episode, and the global one.
    pub fn routes(&self) -> impl Iterator<Item = Route> + use<> {
        Route::kept(self.scores.len())
    }

    /// The scores of the rows for a route.
    ///
    /// # Panics
    /// If the conversation has no such episode.
    pub fn scores(&self, route: Route) -> Scores {
        Scores::largest(route.episodes(self.scores.len()).map(|episode| &self.scores[episode]))
    }
}
