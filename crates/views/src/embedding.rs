//! Vectors of texts without another model: means of the input embeddings of their tokens.
//!
//! A token counts by its inverse document frequency: `ln((n + 1) / (f + 1))` if it is in `f` of the
//! `n` segments of a conversation. Tokens in all segments count nothing, and neither do those in none:
//! words of a question that the conversation never had say nothing about its topics. The
//! conversation's mean is subtracted, because input embeddings share a large common direction, and the
//! rest is normalized.

use oscar_models::{LoadError, TensorView, Weights};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// The input embeddings of a model, read from its checkpoint a row at a time.
#[derive(Clone, Debug)]
pub struct InputEmbeddings {
    weights: Arc<Weights>,
    name: String,
}

impl InputEmbeddings {
    /// # Errors
    /// If the checkpoint has no embedding of a readable type.
    pub fn new(weights: Arc<Weights>) -> Result<Self, LoadError> {
        let name = weights.names().embedding();
        weights.tensor(&name)?;
        Ok(Self { weights, name })
    }

    /// The row of a token; empty if there is none.
    fn row(&self, token: u32) -> Vec<f32> {
        let Ok(table) = self.weights.tensor(&self.name) else { return Vec::new() };
        let bytes = table.bytes.len() / table.shape.first().copied().unwrap_or(1).max(1);
        let start = token as usize * bytes;
        match table.bytes.get(start..start + bytes) {
            Some(bytes) => TensorView { shape: &table.shape[1..], bytes, ..table }.to_f32_vec(),
            None => Vec::new(),
        }
    }
}

/// How texts of one conversation become vectors.
#[derive(Clone, Debug)]
pub(crate) struct Embedder {
    /// Weight of each token of the conversation.
    weights: BTreeMap<u32, f64>,
    mean: Vec<f64>,
}

impl Embedder {
    /// Learns the weights and the mean of a conversation, and embeds its segments.
    pub fn new(
        tokens: &[u32],
        segments: &[Range<usize>],
        embeddings: &InputEmbeddings,
    ) -> (Self, Vec<Vec<f64>>) {
        let mut frequency: BTreeMap<u32, usize> = BTreeMap::new();
        for segment in segments {
            let distinct: BTreeSet<u32> = tokens[segment.clone()].iter().copied().collect();
            distinct.into_iter().for_each(|token| *frequency.entry(token).or_default() += 1);
        }
        let idf = |f: usize| ((segments.len() + 1) as f64 / (f + 1) as f64).ln();
        let weights = frequency.into_iter().map(|(token, f)| (token, idf(f))).collect();
        let mut embedder = Self { weights, mean: Vec::new() };
        let mut vectors: Vec<Vec<f64>> = segments
            .iter()
            .map(|segment| embedder.weighted_mean(&tokens[segment.clone()], embeddings))
            .collect();
        let width = vectors.iter().map(Vec::len).max().unwrap_or(0);
        let mut mean = vec![0.0; width];
        for vector in &vectors {
            mean.iter_mut().zip(vector).for_each(|(m, v)| *m += v / vectors.len() as f64);
        }
        embedder.mean = mean;
        vectors.iter_mut().for_each(|vector| embedder.centre(vector));
        (embedder, vectors)
    }

    /// The vector of a text, of length one or zero.
    pub fn embed(&self, tokens: &[u32], embeddings: &InputEmbeddings) -> Vec<f64> {
        let mut vector = self.weighted_mean(tokens, embeddings);
        self.centre(&mut vector);
        vector
    }

    fn weighted_mean(&self, tokens: &[u32], embeddings: &InputEmbeddings) -> Vec<f64> {
        let (mut sum, mut total) = (Vec::new(), 0.0);
        for token in tokens {
            let Some(&weight) = self.weights.get(token) else { continue };
            let row = embeddings.row(*token);
            sum.resize(row.len().max(sum.len()), 0.0);
            sum.iter_mut().zip(&row).for_each(|(s, x)| *s += weight * f64::from(*x));
            total += weight;
        }
        match total > 0.0 {
            true => sum.iter_mut().for_each(|s| *s /= total),
            // Words of every segment count nothing: this is a text without a known word.
            false => sum.clear(),
        }
        sum
    }

    fn centre(&self, vector: &mut Vec<f64>) {
        // A text without a known word is like none of the segments.
        if vector.is_empty() {
            return vector.resize(self.mean.len(), 0.0);
        }
        vector.resize(self.mean.len(), 0.0);
        vector.iter_mut().zip(&self.mean).for_each(|(v, m)| *v -= m);
        normalize(vector);
    }
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Scales a vector to length one, unless it is zero.
pub(crate) fn normalize(vector: &mut [f64]) {
    let norm = dot(vector, vector).sqrt();
    if norm > 1e-12 {
        vector.iter_mut().for_each(|v| *v /= norm);
    }
}
