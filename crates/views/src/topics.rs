//! Topics of a conversation: its utterances in segments, the segments in groups, and the group that
//! a question belongs to.

use crate::clusters::Clusters;
use crate::embedding::{Embedder, InputEmbeddings, dot};
use std::ops::Range;

/// How a conversation is divided into episodes, and when a question belongs to one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EpisodeOptions {
    /// Episodes of a conversation, at most.
    pub count: usize,
    /// Utterances of a segment.
    pub segment: usize,
    /// Segments that the probe of an episode recites, at most.
    pub recited: usize,
    /// A question less similar than this to every episode is asked of the global view.
    pub threshold: f64,
    /// A question whose two best similarities differ by less is asked of both episodes together.
    pub margin: f64,
}

impl Default for EpisodeOptions {
    fn default() -> Self {
        Self { count: 4, segment: 4, recited: 8, threshold: 0.3, margin: 0.05 }
    }
}

/// The view that a question is asked of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    Episode(usize),
    /// Two episodes together, the more similar one first.
    Union(usize, usize),
    Global,
}

impl Route {
    /// The views that are kept of a history with this many episodes: one for each, and the global one.
    pub(crate) fn kept(episodes: usize) -> impl Iterator<Item = Self> {
        (0..episodes).map(Self::Episode).chain([Self::Global])
    }

    /// The episodes that it reads, of `count`.
    pub(crate) fn episodes(self, count: usize) -> impl Iterator<Item = usize> {
        let (first, rest) = match self {
            Self::Episode(only) => (only..only + 1, None),
            Self::Union(a, b) => (a..a + 1, Some(b)),
            Self::Global => (0..count, None),
        };
        first.chain(rest)
    }

    /// Whether the view was made for this episode among others.
    pub fn covers(self, episode: usize) -> bool {
        match self {
            Self::Episode(only) => only == episode,
            Self::Union(a, b) => a == episode || b == episode,
            Self::Global => true,
        }
    }
}

/// See the [module](self).
#[derive(Clone, Debug)]
pub struct Topics {
    options: EpisodeOptions,
    segments: Vec<Range<usize>>,
    vectors: Vec<Vec<f64>>,
    clusters: Clusters,
    embedder: Embedder,
}

impl Topics {
    /// Groups the utterances (ranges of `tokens`, ascending) of a conversation.
    pub fn new(
        tokens: &[u32],
        utterances: &[Range<usize>],
        embeddings: &InputEmbeddings,
        options: EpisodeOptions,
    ) -> Self {
        let whole = |part: &[Range<usize>]| Some(part.first()?.start..part.last()?.end);
        let segments: Vec<Range<usize>> =
            utterances.chunks(options.segment.max(1)).filter_map(whole).filter(|s| !s.is_empty()).collect();
        let (embedder, vectors) = Embedder::new(tokens, &segments, embeddings);
        let clusters = Clusters::of(&vectors, options.count);
        Self { options, segments, vectors, clusters, embedder }
    }

    /// Episodes of the conversation.
    pub fn episodes(&self) -> usize {
        self.clusters.centroids.len()
    }

    /// The episode that a position belongs to.
    pub fn episode_at(&self, position: usize) -> Option<usize> {
        let segment = self.segments.iter().position(|segment| segment.contains(&position))?;
        Some(self.clusters.of[segment])
    }

    /// Segments of an episode that are most similar to its centroid, in the order of time, together
    /// at most `tokens` long. The most similar one is always among them.
    pub fn recited(&self, episode: usize, tokens: usize) -> Vec<Range<usize>> {
        let centroid = &self.clusters.centroids[episode];
        let mut members: Vec<usize> =
            (0..self.segments.len()).filter(|&i| self.clusters.of[i] == episode).collect();
        let cosine = |i: usize| dot(&self.vectors[i], centroid);
        members.sort_by(|&a, &b| cosine(b).total_cmp(&cosine(a)).then(a.cmp(&b)));
        let mut length = 0;
        let mut chosen: Vec<Range<usize>> = Vec::new();
        for segment in members.into_iter().take(self.options.recited.max(1)) {
            let segment = self.segments[segment].clone();
            if chosen.is_empty() || length + segment.len() <= tokens {
                length += segment.len();
                chosen.push(segment);
            }
        }
        chosen.sort_by_key(|segment| segment.start);
        chosen
    }

    /// The view for a question, the bare text of the user, and its largest similarity to an episode.
    pub fn route(&self, question: &[u32], embeddings: &InputEmbeddings) -> (Route, f64) {
        let vector = self.embedder.embed(question, embeddings);
        let mut similar: Vec<(f64, usize)> =
            self.clusters.centroids.iter().enumerate().map(|(i, c)| (dot(&vector, c), i)).collect();
        similar.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let route = match similar[..] {
            [] => Route::Global,
            [(best, _), ..] if best < self.options.threshold => Route::Global,
            [(best, first), (next, second), ..] if best - next < self.options.margin => {
                Route::Union(first, second)
            }
            [(_, first), ..] => Route::Episode(first),
        };
        (route, similar.first().map_or(0.0, |(cosine, _)| *cosine))
    }
}
