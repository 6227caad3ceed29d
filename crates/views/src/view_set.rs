//! The views that were made of one history: which rows each keeps, and the one that a question reads.

use crate::budget::Budget;
use crate::embedding::InputEmbeddings;
use crate::policy::HeadSplit;
use crate::scorers::Scores;
use crate::select::{Selection, select};
use crate::topics::{Route, Topics};
use oscar_codec::CacheLayout;
use std::ops::Range;
use std::sync::Arc;

/// What decides which of the scored rows are kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Keep {
    pub budget: Budget,
    pub heads: HeadSplit,
    /// Positions that are always kept, ascending.
    pub protected: Arc<[Range<usize>]>,
}

/// Tokens of a question that are compared with the episodes, at most.
const QUESTION_TOKENS: usize = 1024;

/// See the [module](self). Only the scores of rows that some view keeps are held: the best rows by the
/// largest of several scores are among the best by one of them, so unions need no others.
#[derive(Debug)]
pub struct ViewSet {
    layout: CacheLayout,
    keep: Keep,
    /// By episode; one if there is no router.
    scores: Vec<Scores>,
    topics: Option<Topics>,
    /// Rows of a layer and head that each view of [`ViewSet::routes`] keeps, on average.
    rows: Vec<usize>,
    pub probe_tokens: usize,
}

impl ViewSet {
    /// Chooses the rows of every episode, or of the one view if there are no topics. Sorts all rows of
    /// the history: not for a thread that others wait for.
    pub fn new(layout: CacheLayout, scores: Vec<Scores>, topics: Option<Topics>, keep: Keep) -> Self {
        let probe_tokens = scores.iter().map(|scores| scores.probe_tokens).sum();
        let scores: Vec<Scores> = scores
            .into_iter()
            .map(|scores| {
                let kept = select(&layout, &scores, keep.budget, keep.heads, &keep.protected).kept;
                scores.at(&kept)
            })
            .collect();
        let mut set = Self { layout, keep, scores, topics, rows: Vec::new(), probe_tokens };
        let heads = set.layout.coded().map_or(0, |t| t.codecs().iter().filter(|c| c.keeps_history()).count());
        let rows = |route| set.selection(route).kept.iter().map(Vec::len).sum::<usize>() / heads.max(1);
        set.rows = set.routes().map(rows).collect();
        set
    }

    /// Every view that is made in advance.
    pub fn routes(&self) -> impl Iterator<Item = Route> + use<> {
        Route::kept(if self.topics.is_some() { self.scores.len() } else { 0 })
    }

    /// Rows of a layer and head that each of them keeps, on average.
    pub fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// The view for a question, the bare text of the user, and its largest similarity to an episode.
    pub fn route(&self, question: &[u32], embeddings: &InputEmbeddings) -> (Route, Option<f64>) {
        let Some(topics) = &self.topics else { return (Route::Global, None) };
        let (route, similarity) = topics.route(&question[..question.len().min(QUESTION_TOKENS)], embeddings);
        (route, Some(similarity))
    }

    /// The rows of a view.
    pub fn selection(&self, route: Route) -> Selection {
        let scores = Scores::largest(route.episodes(self.scores.len()).map(|episode| &self.scores[episode]));
        select(&self.layout, &scores, self.keep.budget, self.keep.heads, &self.keep.protected)
    }

    /// Bytes of the scores that are held.
    pub fn bytes(&self) -> usize {
        let rows = self.scores.iter().flat_map(|scores| &scores.rows).map(Vec::len).sum::<usize>();
        rows * (size_of::<f64>() + size_of::<u32>())
    }
}
