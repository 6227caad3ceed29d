//! Scorers: how rows of history are ranked.
//!
//! | name | score of a row |
//! |---|---|
//! | `recent` | its position |
//! | `snapkv` | attention of the last 64 queries, mean over the query heads, averaged over 5 neighbours |
//! | `tova` | attention of the last query, mean over all heads of the layer |
//! | `h2o` | attention of all queries so far, summed |
//! | `keydiff` | −cosine between its key and the mean of the unit keys of the head |
//! | `expected` | attention expected of queries at the next 512 positions, times the size of its value |
//! | `kvzip` | largest attention while the model repeats the text of its chunk, [blended](crate::blend) with `keydiff` |
//!
//! Attention is the softmax weight as `oscar_codec::scores` defines it. A scorer that needs queries
//! feeds tokens to a fork of the sequence; the fork is dropped afterwards.

use crate::expected;
use crate::observe::{Observed, observe};
use crate::policy::Evict;
use crate::probing::Probing;
use oscar_backend::{Backend, CacheHead, HeadHistory, HistoryRows, Reduce, Scoring};
use oscar_cache::view_end;
use oscar_codec::PAGE_TOKENS;
use oscar_runner::{Runner, Sequence, StepError};

/// Queries of `snapkv`: the last page.
const SNAP_QUERIES: usize = PAGE_TOKENS;
/// Rows that `snapkv` averages.
const SNAP_POOL: usize = 5;
/// Tokens that `kvzip` repeats at a time.
pub(crate) const ZIP_CHUNK: usize = 2048;
/// Tokens of the chunk before, which begin the repetition of a later chunk.
pub(crate) const ZIP_CUE: usize = 8;

/// A sequence whose history is to be scored. It must be forkable, and `len` the end of a page.
pub struct History<'a> {
    pub sequence: &'a Sequence,
    /// The tokens of the sequence, at least `len`.
    pub tokens: &'a [u32],
    pub len: usize,
    /// What was seen while the sequence was computed, if anyone looked.
    pub observed: Option<&'a Observed>,
}

/// Tokens that lead a model to speak of its context: the turn of a user and the beginning of an
/// answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// Asks to repeat the context; for `kvzip`.
    pub repeat: Vec<u32>,
    /// Asks to recall what was told; for episodes.
    pub recall: Vec<u32>,
}

/// Scores of all rows of a history; larger is better.
#[derive(Clone, Debug, PartialEq)]
pub struct Scores {
    /// Positions of the rows, ascending, by layer and head.
    pub positions: Vec<Vec<u32>>,
    pub rows: Vec<Vec<f64>>,
    /// Tokens computed for the scores.
    pub probe_tokens: usize,
}

impl Scores {
    /// The largest score of each row that any of the lists has.
    ///
    /// # Panics
    /// If there is no list, or the lists are of different models.
    pub fn largest<'a>(lists: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut lists = lists.into_iter();
        let Some(mut total) = lists.next().cloned() else { panic!("at least one list of scores") };
        for other in lists {
            total.probe_tokens += other.probe_tokens;
            for head in 0..total.rows.len() {
                let rows = |scores: &Self| -> Vec<(u32, f64)> {
                    scores.positions[head].iter().copied().zip(scores.rows[head].iter().copied()).collect()
                };
                let mut both = rows(&total);
                both.extend(rows(other));
                // The better one of two equal positions comes first and stays.
                both.sort_by(|a, b| a.0.cmp(&b.0).then(b.1.total_cmp(&a.1)));
                both.dedup_by_key(|row| row.0);
                (total.positions[head], total.rows[head]) = both.into_iter().unzip();
            }
        }
        total
    }

    /// The scores at some of the positions (ascending, by layer and head).
    pub fn at(&self, kept: &[Vec<u32>]) -> Self {
        let of = |(head, kept): (usize, &Vec<u32>)| -> Vec<f64> {
            let score =
                |position: &u32| self.positions[head].binary_search(position).map(|i| self.rows[head][i]);
            kept.iter().map(|position| score(position).unwrap_or(0.0)).collect()
        };
        let rows = kept.iter().enumerate().map(of).collect();
        Self { positions: kept.to_vec(), rows, probe_tokens: self.probe_tokens }
    }
}

/// Ranks the rows of a history.
pub trait Scorer<B: Backend> {
    /// Scores by layer and head, in the order of the rows, and the number of tokens computed.
    fn score(
        &self,
        runner: &mut Runner<B>,
        history: &History<'_>,
        probe: &Probe,
    ) -> Result<(Vec<Vec<f64>>, usize), StepError>;
}

/// The scorer of a policy.
pub fn scorer<B: Backend>(evict: Evict) -> Box<dyn Scorer<B>> {
    match evict {
        Evict::Recent => Box::new(Recent),
        Evict::SnapKv => Box::new(SnapKv),
        Evict::Tova => Box::new(Tova),
        Evict::H2o => Box::new(H2o),
        Evict::KeyDiff => Box::new(KeyDiff),
        Evict::Expected => Box::new(expected::Expected),
        Evict::KvZip => Box::new(KvZip),
    }
}

/// The scores of a history under a policy's scorer.
pub fn score<B: Backend>(
    runner: &mut Runner<B>,
    history: &History<'_>,
    evict: Evict,
    probe: &Probe,
) -> Result<Scores, StepError> {
    let positions = positions(runner, history);
    let (rows, probe_tokens) = scorer(evict).score(runner, history, probe)?;
    Ok(Scores { positions, rows, probe_tokens })
}

/// Positions of the rows that a view of this history may keep, by layer and head.
pub(crate) fn positions<B: Backend>(runner: &Runner<B>, history: &History<'_>) -> Vec<Vec<u32>> {
    let layout = runner.layout();
    let end = view_end(layout, history.len) as u32;
    let view = history.sequence.pages().view();
    (0..layout.layers() * layout.kv_heads())
        .map(|head| match view {
            Some(view) => view.kept(head).iter().copied().chain(view.end() as u32..end).collect(),
            None => (layout.windows().sink() as u32..end).collect(),
        })
        .collect()
}

/// An empty scoring of the rows that a view of this history may keep.
pub(crate) fn scoring<B: Backend>(runner: &Runner<B>, len: usize, reduce: Reduce) -> Scoring {
    let layout = runner.layout();
    let heads = layout.layers() * layout.kv_heads();
    Scoring {
        queries: 0..0,
        until: view_end(layout, len),
        over: None,
        reduce,
        scores: vec![Vec::new(); heads],
    }
}

/// The scores as numbers.
pub(crate) fn weights(scoring: &Scoring) -> Vec<Vec<f64>> {
    let one = f64::from(Scoring::ONE);
    scoring.scores.iter().map(|head| head.iter().map(|&score| score as f64 / one).collect()).collect()
}

/// A fork at this length, or the reason why there is none.
pub(crate) fn fork<B: Backend>(
    runner: &Runner<B>,
    history: &History<'_>,
    len: usize,
) -> Result<Sequence, StepError> {
    let fork = runner.fork(history.sequence, len);
    fork.ok_or(StepError::Eviction("the sequence no longer holds the rows that its last queries read"))
}

/// The weights that the last `queries` queries, at most a page, give to the history.
fn last_queries<B: Backend>(
    runner: &mut Runner<B>,
    history: &History<'_>,
    queries: usize,
) -> Result<(Vec<Vec<f64>>, usize), StepError> {
    let mut fork = fork(runner, history, history.len - PAGE_TOKENS)?;
    let mut scoring = scoring(runner, history.len, Reduce::Sum);
    let tokens = &history.tokens[history.len - PAGE_TOKENS..history.len];
    runner.score(&mut fork, tokens, PAGE_TOKENS - queries, &mut scoring)?;
    Ok((weights(&scoring), PAGE_TOKENS))
}

struct Recent;

impl<B: Backend> Scorer<B> for Recent {
    fn score(
        &self,
        runner: &mut Runner<B>,
        history: &History<'_>,
        _: &Probe,
    ) -> Result<(Vec<Vec<f64>>, usize), StepError> {
        let rows = positions(runner, history);
        Ok((rows.into_iter().map(|head| head.into_iter().map(f64::from).collect()).collect(), 0))
    }
}

struct SnapKv;

impl<B: Backend> Scorer<B> for SnapKv {
    fn score(
        &self,
        runner: &mut Runner<B>,
        history: &History<'_>,
        _: &Probe,
    ) -> Result<(Vec<Vec<f64>>, usize), StepError> {
        let (rows, tokens) = last_queries(runner, history, SNAP_QUERIES)?;
        Ok((rows.iter().map(|head| pooled(head, SNAP_POOL)).collect(), tokens))
    }
}

/// Means over `width` neighbours; beyond the ends there is nothing.
fn pooled(scores: &[f64], width: usize) -> Vec<f64> {
    let half = width / 2;
    (0..scores.len())
        .map(|i| {
            let near = &scores[i.saturating_sub(half)..scores.len().min(i + half + 1)];
            near.iter().sum::<f64>() / width as f64
        })
        .collect()
}

struct Tova;

impl<B: Backend> Scorer<B> for Tova {
    fn score(
        &self,
        runner: &mut Runner<B>,
        history: &History<'_>,
        _: &Probe,
    ) -> Result<(Vec<Vec<f64>>, usize), StepError> {
        let (mut rows, tokens) = last_queries(runner, history, 1)?;
        for layer in rows.chunks_mut(runner.layout().kv_heads()) {
            // Heads of a view may have different rows; then each counts for itself.
            if layer.iter().all(|head| head.len() == layer[0].len()) {
                let sums: Vec<f64> =
                    (0..layer[0].len()).map(|i| layer.iter().map(|head| head[i]).sum()).collect();
                layer.iter_mut().for_each(|head| head.copy_from_slice(&sums));
            }
        }
        Ok((rows, tokens))
    }
}

struct H2o;

impl<B: Backend> Scorer<B> for H2o {
    fn score(
        &self,
        runner: &mut Runner<B>,
        history: &History<'_>,
        _: &Probe,
    ) -> Result<(Vec<Vec<f64>>, usize), StepError> {
        if let Some(observed) = history.observed {
            return Ok((weights(observed.attention(runner, history.len)?), 0));
        }
        let observed = replay(runner, history)?;
        Ok((weights(observed.attention(runner, history.len)?), history.len))
    }
}

/// Computes the history once more and looks at it. Only for histories that were computed as a whole.
pub(crate) fn replay<B: Backend>(
    runner: &mut Runner<B>,
    history: &History<'_>,
) -> Result<Observed, StepError> {
    if history.sequence.pages().view().is_some() {
        return Err(StepError::Eviction(
            "this policy needs the whole history, and some of it was evicted before: use snapkv, tova, keydiff or recent",
        ));
    }
    let mut again = Sequence::new();
    observe(runner, &mut again, &history.tokens[..history.len])
}

struct KeyDiff;

impl<B: Backend> Scorer<B> for KeyDiff {
    fn score(
        &self,
        runner: &mut Runner<B>,
        history: &History<'_>,
        _: &Probe,
    ) -> Result<(Vec<Vec<f64>>, usize), StepError> {
        let mut ranking = Ranking::new(runner, history);
        while !ranking.advance(runner, history)? {}
        Ok((ranking.rows, 0))
    }
}

/// Elements of keys that one call of [`Ranking::advance`] reads, or compares. That takes a few milliseconds:
/// less than a step of a model for which it matters.
const RANKED: usize = 1 << 20;

/// The scores of `keydiff`, in pieces of bounded size: each call reads some keys of a head and adds them to
/// the mean of its unit keys, or compares some with that mean.
pub struct Ranking {
    positions: Vec<Vec<u32>>,
    rows: Vec<Vec<f64>>,
    /// The head under way.
    head: HeadMean,
    /// Rows of a call.
    piece: usize,
}

/// The keys of a head as far as they are read, and the sum of their directions.
#[derive(Default)]
struct HeadMean {
    keys: Vec<f32>,
    sum: Vec<f64>,
    /// Scores, once all keys are read.
    scores: Vec<f64>,
}

impl Ranking {
    pub fn new<B: Backend>(runner: &Runner<B>, history: &History<'_>) -> Self {
        let piece = (RANKED / runner.layout().head_dim()).max(1);
        Self { positions: positions(runner, history), rows: Vec::new(), head: HeadMean::default(), piece }
    }

    /// The same with calls that read or compare at most so many rows.
    pub fn in_pieces(self, rows: usize) -> Self {
        Self { piece: rows.max(1), ..self }
    }

    /// Does the next piece of work. Returns whether it was the last.
    ///
    /// # Errors
    /// If keys cannot be read.
    pub fn advance<B: Backend>(
        &mut self,
        runner: &Runner<B>,
        history: &History<'_>,
    ) -> Result<bool, StepError> {
        let Some(positions) = self.positions.get(self.rows.len()) else { return Ok(true) };
        let (heads, d) = (runner.layout().kv_heads(), runner.layout().head_dim());
        let read = self.head.keys.len() / d;
        if read < positions.len() {
            let until = view_end(runner.layout(), history.len);
            let head = CacheHead { layer: self.rows.len() / heads, kv_head: self.rows.len() % heads };
            let rows = HeadHistory { head, until, rows: read..read + self.piece, values: false };
            let keys = read_history(runner, history, rows)?.keys;
            if keys.is_empty() {
                return Err(StepError::Eviction("the sequence no longer holds the keys of its history"));
            }
            // Memory that grows piece by piece would be copied.
            self.head.keys.reserve_exact(positions.len() * d - read * d);
            self.head.add(keys, d);
        }
        if self.head.keys.len() / d < positions.len() {
            return Ok(false);
        }
        // A head that is read at once is compared at once, too.
        if read == 0 || read == positions.len() {
            self.head.compare(self.piece, d);
        }
        if self.head.scores.len() == positions.len() {
            self.rows.push(std::mem::take(&mut self.head).scores);
        }
        Ok(self.is_done())
    }

    pub fn is_done(&self) -> bool {
        self.rows.len() == self.positions.len()
    }

    pub fn scores(self) -> Scores {
        Scores { positions: self.positions, rows: self.rows, probe_tokens: 0 }
    }
}

impl HeadMean {
    fn add(&mut self, mut keys: Vec<f32>, d: usize) {
        self.sum.resize(d, 0.0);
        for key in keys.chunks_exact(d) {
            self.sum.iter_mut().zip(unit(key)).for_each(|(sum, u)| *sum += u);
        }
        self.keys.append(&mut keys);
    }

    /// −cosine between each of the next `count` keys and the mean of the unit keys.
    fn compare(&mut self, count: usize, d: usize) {
        let norm = self.sum.iter().map(|m| m * m).sum::<f64>().sqrt().max(1e-30);
        let cosine = |key: &[f32]| unit(key).zip(&self.sum).map(|(u, m)| u * m).sum::<f64>() / norm;
        let next = self.keys.chunks_exact(d).skip(self.scores.len()).take(count);
        let scores: Vec<f64> = next.map(|key| -cosine(key)).collect();
        self.scores.extend(scores);
    }
}

/// A key of length 1.
fn unit(key: &[f32]) -> impl Iterator<Item = f64> {
    let norm = key.iter().map(|&k| f64::from(k) * f64::from(k)).sum::<f64>().sqrt().max(1e-30);
    key.iter().map(move |&k| f64::from(k) / norm)
}

/// Calls `work(keys, values, head size)` with the dequantized rows of every layer and head, in the
/// cache's basis. Keys have their mean again.
pub(crate) fn for_each_head<B: Backend>(
    runner: &mut Runner<B>,
    history: &History<'_>,
    mut work: impl FnMut(&[f32], &[f32], usize),
) -> Result<(), StepError> {
    let (layers, heads, d) =
        (runner.layout().layers(), runner.layout().kv_heads(), runner.layout().head_dim());
    for layer in 0..layers {
        for kv_head in 0..heads {
            let until = view_end(runner.layout(), history.len);
            let head = HeadHistory::whole(CacheHead { layer, kv_head }, until);
            let rows = read_history(runner, history, head)?;
            work(&rows.keys, &rows.values, d);
        }
    }
    Ok(())
}

/// Dequantized rows of one head, in the cache's basis. Keys have their mean again.
fn read_history<B: Backend>(
    runner: &Runner<B>,
    history: &History<'_>,
    rows: HeadHistory,
) -> Result<HistoryRows, StepError> {
    let head = rows.head;
    let mut rows = runner.history(history.sequence, rows)?;
    if let Some(mean) = rotated_key_mean(runner, head) {
        for key in rows.keys.chunks_exact_mut(runner.layout().head_dim()) {
            key.iter_mut().zip(&mean).for_each(|(k, m)| *k += m);
        }
    }
    Ok(rows)
}

/// The mean that was subtracted from the keys of a head, in the cache's basis.
fn rotated_key_mean<B: Backend>(runner: &Runner<B>, head: CacheHead) -> Option<Vec<f32>> {
    let heads = runner.layout().kv_heads();
    let rotation = &runner.rotations()?.heads()[head.layer * heads + head.kv_head];
    let mean = rotation.key_mean.as_ref()?;
    let mut rotated = vec![0.0; mean.len()];
    for (m, row) in mean.iter().zip(rotation.key.matrix().chunks_exact(mean.len())) {
        rotated.iter_mut().zip(row).for_each(|(r, x)| *r += m * x);
    }
    Some(rotated)
}

struct KvZip;

impl<B: Backend> Scorer<B> for KvZip {
    fn score(
        &self,
        runner: &mut Runner<B>,
        history: &History<'_>,
        probe: &Probe,
    ) -> Result<(Vec<Vec<f64>>, usize), StepError> {
        let scores = Probing::repeating(runner, history, probe)?.run(runner, history)?;
        let tokens = scores.iter().map(|scores| scores.probe_tokens).sum();
        Ok((Scores::largest(&scores).rows, tokens))
    }
}
