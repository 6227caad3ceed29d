//! Expected Attention: the weight that queries at the next positions are expected to give a row.
//!
//! Queries before RoPE are taken as Gaussian with the mean and covariance that the prompt's queries
//! had. Over the next 512 positions RoPE turns them, on average, by `R̄`. The expected weight of key
//! `k` is then `softmax(k·R̄μ/√d + kᵀ R̄ΣR̄ᵀ k/2d)`; a row's score is its mean over the query heads
//! of the group plus 0.02, times the length of its value.

use crate::observe::QueryMoments;
use crate::scorers::{History, Probe, Scorer, for_each_head, replay};
use oscar_backend::Backend;
use oscar_codec::Rotation;
use oscar_codec::scores::softmax;
use oscar_models::RopeTable;
use oscar_runner::{Runner, StepError};

/// Positions over which the rotation is averaged.
const FUTURE: usize = 512;
/// Added to the weight, so that values of some size are not lost.
const EPSILON: f64 = 0.02;

pub(crate) struct Expected;

impl<B: Backend> Scorer<B> for Expected {
    fn score(
        &self,
        runner: &mut Runner<B>,
        history: &History<'_>,
        _: &Probe,
    ) -> Result<(Vec<Vec<f64>>, usize), StepError> {
        let (moments, tokens) = match history.observed {
            Some(observed) => (observed.queries.clone(), 0),
            None => (replay(runner, history)?.queries, history.len),
        };
        let config = runner.config().clone();
        let group = config.query_heads / config.kv_heads;
        let end = (history.len + FUTURE).min(runner.context().max(history.len + 1));
        let rope = RopeTable::new(&config.rope, config.rotary_width(), end);
        let turn = AverageTurn::new(&rope, history.len..end);
        let rotations = runner.rotations().cloned();
        let scale = f64::from(config.heads().scale);
        let mut all = Vec::new();
        for_each_head(runner, history, |keys, values, d| {
            let index = all.len();
            let (layer, head) = (index / config.kv_heads, index % config.kv_heads);
            let rotation = rotations.as_ref().map(|set| &set.heads()[index].key);
            let mut mean = vec![0.0; keys.len() / d];
            for query in 0..group {
                let moments = &moments[layer * config.query_heads + head * group + query];
                let future = Future::new(moments, &turn, rotation, d);
                let scores = keys.chunks_exact(d).map(|key| future.score(key, scale) as f32).collect();
                let weights = softmax(scores);
                mean.iter_mut().zip(weights).for_each(|(m, w)| *m += f64::from(w) / group as f64);
            }
            let size = |value: &[f32]| value.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
            let values = values.chunks_exact(d);
            all.push(mean.iter().zip(values).map(|(m, v)| (m + EPSILON) * size(v)).collect());
        })?;
        Ok((all, tokens))
    }
}

/// The mean of RoPE's rotations over some positions: a 2×2 block for each pair of channels.
struct AverageTurn {
    cos: Vec<f64>,
    sin: Vec<f64>,
}

impl AverageTurn {
    fn new(rope: &RopeTable, positions: std::ops::Range<usize>) -> Self {
        let count = positions.len().max(1) as f64;
        let mut turn = Self { cos: vec![0.0; rope.half_dim()], sin: vec![0.0; rope.half_dim()] };
        for position in positions {
            for i in 0..rope.half_dim() {
                turn.cos[i] += f64::from(rope.cos(position)[i]) / count;
                turn.sin[i] += f64::from(rope.sin(position)[i]) / count;
            }
        }
        turn
    }

    fn apply(&self, x: &mut [f64]) {
        let half = self.cos.len();
        for i in 0..half {
            let (a, b) = (x[i], x[i + half]);
            x[i] = a * self.cos[i] - b * self.sin[i];
            x[i + half] = a * self.sin[i] + b * self.cos[i];
        }
    }
}

/// Future queries of one head in the cache's basis.
struct Future {
    mean: Vec<f32>,
    covariance: Vec<f32>,
}

impl Future {
    fn new(moments: &QueryMoments, turn: &AverageTurn, rotation: Option<&Rotation>, d: usize) -> Self {
        let count = moments.count.max(1) as f64;
        let mut mean: Vec<f64> = moments.sum.iter().map(|s| s / count).collect();
        mean.resize(d, 0.0);
        let mut covariance: Vec<f64> = moments.products.iter().map(|p| p / count).collect();
        covariance.resize(d * d, 0.0);
        for i in 0..d {
            for j in 0..d {
                covariance[i * d + j] -= mean[i] * mean[j];
            }
        }
        let into_basis = |x: &mut [f64]| {
            turn.apply(x);
            if let Some(rotation) = rotation {
                let mut rotated = vec![0.0; d];
                for (a, row) in x.iter().zip(rotation.matrix().chunks_exact(d)) {
                    rotated.iter_mut().zip(row).for_each(|(r, m)| *r += a * f64::from(*m));
                }
                x.copy_from_slice(&rotated);
            }
        };
        into_basis(&mut mean);
        // Rows, then columns.
        for _ in 0..2 {
            covariance.chunks_exact_mut(d).for_each(into_basis);
            let before = covariance.clone();
            for i in 0..d {
                for j in 0..d {
                    covariance[i * d + j] = before[j * d + i];
                }
            }
        }
        let narrow = |x: Vec<f64>| x.into_iter().map(|v| v as f32).collect();
        Self { mean: narrow(mean), covariance: narrow(covariance) }
    }

    /// `scale·k·μ + scale²·kᵀΣk/2`.
    fn score(&self, key: &[f32], scale: f64) -> f64 {
        let d = key.len();
        let linear: f32 = key.iter().zip(&self.mean).map(|(k, m)| k * m).sum();
        let mut square = 0.0f32;
        for (k, row) in key.iter().zip(self.covariance.chunks_exact(d)) {
            let mut lanes = [0.0f32; 16];
            for (a, b) in row.chunks_exact(16).zip(key.chunks_exact(16)) {
                for i in 0..16 {
                    lanes[i] += a[i] * b[i];
                }
            }
            square += k * lanes.iter().sum::<f32>();
        }
        scale * f64::from(linear) + scale * scale * f64::from(square) / 2.0
    }
}
