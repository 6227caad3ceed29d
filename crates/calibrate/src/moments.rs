//! Second moments of queries, keys and values, added up while a text streams through the model.
//!
//! For a KV head whose group has `r` query heads, over `T` tokens (post-norm, post-RoPE rows):
//!
//! ```text
//! query      C = QᵀQ / (T·r)                 weighs key errors: ‖Q(K−K̂)ᵀ‖² = T·r · tr((K−K̂) C (K−K̂)ᵀ)
//! key        the mean key
//! value      paper   (SV)ᵀ(SV) / (T·r)       of attention outputs, softmax and mask included
//!            coded   Vᵀ diag(w) V / Σw       with w_t = k_t C k_tᵀ, after a first pass has found C
//!            plain   VᵀV / T
//! ```
//!
//! **Invariant:** sums are f64 and there is one packed matrix a statistic and head, so neither the
//! error nor the memory grows with the text.

use crate::options::Statistic;
use crate::sample::RowSample;
use crate::symmetric::Symmetric;
use oscar_backend::{BackendError, Tap, TappedRows};
use oscar_models::DecoderConfig;

/// The heads of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadGrid {
    pub layers: usize,
    pub query_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl HeadGrid {
    pub fn of(config: &DecoderConfig) -> Self {
        let DecoderConfig { query_heads, kv_heads, head_dim, .. } = *config;
        Self { layers: config.cache_layers(), query_heads, kv_heads, head_dim }
    }

    /// Query heads that share a KV head.
    pub fn group(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// KV heads of all layers.
    pub fn heads(&self) -> usize {
        self.layers * self.kv_heads
    }
}

/// Running sums of one KV head.
#[derive(Clone, Debug)]
struct Sums {
    query: Symmetric,
    key_sum: Vec<f64>,
    value: Symmetric,
    /// Σw of the `coded` statistic.
    weight: f64,
}

/// Finished statistics of one KV head.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadStatistics {
    pub query: Symmetric,
    pub key_mean: Vec<f64>,
    pub value: Symmetric,
}

/// Statistics of a whole model while they grow.
#[derive(Clone, Debug)]
pub struct Moments {
    grid: HeadGrid,
    statistic: Statistic,
    tokens: usize,
    sums: Vec<Sums>,
    sample: RowSample,
}

impl Moments {
    /// Empty sums; `sample` collects rows during the first pass.
    pub fn new(grid: HeadGrid, statistic: Statistic, sample: RowSample) -> Self {
        let empty = || Symmetric::zeros(grid.head_dim);
        let sums = Sums { query: empty(), key_sum: vec![0.0; grid.head_dim], value: empty(), weight: 0.0 };
        Self { grid, statistic, tokens: 0, sums: vec![sums; grid.heads()], sample }
    }

    /// Passes over the text that the statistic needs.
    pub fn passes(statistic: Statistic) -> usize {
        if statistic == Statistic::Coded { 2 } else { 1 }
    }

    /// An observer for pass 0 or 1. Tell it the number of tokens run before each chunk.
    pub fn pass(&mut self, pass: usize) -> Pass<'_> {
        Pass { moments: self, pass, first_token: 0, rows: Vec::new(), gram: Vec::new(), weights: Vec::new() }
    }

    /// Divides the sums: the statistics in `[layer][kv_head]` order, and the sample.
    pub fn finish(self) -> (Vec<HeadStatistics>, RowSample) {
        let (tokens, group) = (self.tokens.max(1) as f64, self.grid.group() as f64);
        let statistic = self.statistic;
        let heads = self.sums.into_iter().map(|sums| {
            let Sums { mut query, mut key_sum, mut value, weight } = sums;
            query.scale(1.0 / (tokens * group));
            key_sum.iter_mut().for_each(|v| *v /= tokens);
            value.scale(match statistic {
                Statistic::Paper => 1.0 / (tokens * group),
                Statistic::Coded => 1.0 / weight.max(1e-12),
                Statistic::Plain => 1.0 / tokens,
            });
            HeadStatistics { query, key_mean: key_sum, value }
        });
        (heads.collect(), self.sample)
    }
}

/// The tap of one pass over the text.
#[derive(Debug)]
pub struct Pass<'a> {
    moments: &'a mut Moments,
    pass: usize,
    /// Tokens of earlier chunks.
    pub first_token: usize,
    rows: Vec<f32>,
    gram: Vec<f64>,
    weights: Vec<f32>,
}

impl Pass<'_> {
    /// `Σ xᵀx` over the columns of `count` heads from `first` on.
    fn gram(
        &mut self,
        x: &mut dyn TappedRows,
        first: usize,
        count: usize,
        weights: Option<&[f32]>,
    ) -> Result<(), BackendError> {
        let d = self.moments.grid.head_dim;
        self.gram.clear();
        self.gram.resize(d * d, 0.0);
        for head in 0..count {
            x.accumulate_gram(first + head * d, d, weights, &mut self.gram)?;
        }
        Ok(())
    }

    fn first_pass(&mut self, layer: usize, qkv: &mut dyn TappedRows) -> Result<(), BackendError> {
        let HeadGrid { query_heads, kv_heads, head_dim: d, .. } = self.moments.grid;
        let group = query_heads / kv_heads;
        let width = (query_heads + 2 * kv_heads) * d;
        let rows = std::mem::take(&mut self.rows);
        let count = rows.len() / width;
        if layer == 0 {
            self.moments.tokens += count;
        }
        for head in 0..kv_heads {
            let index = layer * kv_heads + head;
            let (key_at, value_at) = ((query_heads + head) * d, (query_heads + kv_heads + head) * d);
            self.gram(qkv, head * group * d, group, None)?;
            self.moments.sums[index].query.add_full(&self.gram);
            if self.moments.statistic == Statistic::Plain {
                self.gram(qkv, value_at, 1, None)?;
                self.moments.sums[index].value.add_full(&self.gram);
            }
            for row in rows.chunks_exact(width) {
                let sums = self.moments.sums[index].key_sum.iter_mut();
                sums.zip(&row[key_at..key_at + d]).for_each(|(sum, &v)| *sum += f64::from(v));
            }
            self.moments.sample.offer(index, self.first_token, count, |row| {
                let row = &rows[row * width..][..width];
                (&row[key_at..key_at + d], &row[value_at..value_at + d])
            });
        }
        self.rows = rows;
        Ok(())
    }

    /// The `coded` statistic: every value row is weighted by the energy of its key's logits.
    fn second_pass(&mut self, layer: usize, qkv: &mut dyn TappedRows) -> Result<(), BackendError> {
        let HeadGrid { query_heads, kv_heads, head_dim: d, .. } = self.moments.grid;
        let width = (query_heads + 2 * kv_heads) * d;
        let queries = (self.moments.tokens.max(1) * self.moments.grid.group()) as f64;
        let mut weights = std::mem::take(&mut self.weights);
        for head in 0..kv_heads {
            let index = layer * kv_heads + head;
            let key_at = (query_heads + head) * d;
            let query = &self.moments.sums[index].query;
            weights.clear();
            weights.extend(
                self.rows
                    .chunks_exact(width)
                    .map(|row| (query.quadratic(&row[key_at..key_at + d]) / queries) as f32),
            );
            self.gram(qkv, key_at + kv_heads * d, 1, Some(&weights))?;
            let sums = &mut self.moments.sums[index];
            sums.value.add_full(&self.gram);
            sums.weight += weights.iter().map(|&w| f64::from(w)).sum::<f64>();
        }
        self.weights = weights;
        Ok(())
    }
}

impl Tap for Pass<'_> {
    fn heads(&mut self, layer: usize, qkv: &mut dyn TappedRows) -> Result<(), BackendError> {
        self.rows.clear();
        qkv.read(&mut self.rows)?;
        match self.pass {
            0 => self.first_pass(layer, qkv),
            _ => self.second_pass(layer, qkv),
        }
    }

    fn attended(&mut self, layer: usize, attended: &mut dyn TappedRows) -> Result<(), BackendError> {
        if self.pass > 0 || self.moments.statistic != Statistic::Paper {
            return Ok(());
        }
        let HeadGrid { kv_heads, head_dim: d, .. } = self.moments.grid;
        let group = self.moments.grid.group();
        for head in 0..kv_heads {
            self.gram(attended, head * group * d, group, None)?;
            self.moments.sums[layer * kv_heads + head].value.add_full(&self.gram);
        }
        Ok(())
    }
}
