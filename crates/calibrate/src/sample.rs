//! A bounded sample of key and value rows, kept while a text streams by.
//!
//! The sampled tokens are chosen before the first one passes, from their number alone: the same
//! tokens for every layer and head and for every chunking. Rows are kept in BF16, as in the cache's
//! own windows, before any rotation. The first positions of a sequence are left out if there are
//! enough others: the cache never quantizes its sink, and the rows of the first tokens are unlike
//! all others.

use crate::text_input::spread;
use half::bf16;
use oscar_codec::{Rotation, window::Windows};

/// Rows of every layer and KV head.
#[derive(Clone, Debug)]
pub struct RowSample {
    head_dim: usize,
    /// Tokens of the whole run that are kept, ascending.
    tokens: Vec<usize>,
    /// `[layer and head][slot][key | value][d]`.
    rows: Vec<bf16>,
}

/// The sample of one head.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadSample {
    pub head_dim: usize,
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
}

impl RowSample {
    /// Chooses up to `rows` tokens of sequences of these lengths, run one after another.
    pub fn new(heads: usize, head_dim: usize, lengths: &[usize], rows: usize, seed: u64) -> Self {
        let sink = Windows::default().sink();
        let eligible: usize = lengths.iter().map(|n| n.saturating_sub(sink)).sum();
        let skip = if eligible >= rows { sink } else { 0 };
        let total = lengths.iter().map(|n| n.saturating_sub(skip)).sum();
        let mut chosen = spread(total, rows, seed).into_iter().peekable();
        let mut tokens = Vec::with_capacity(rows.min(total));
        // Ranks among the eligible become numbers among all.
        let (mut first_rank, mut first_token) = (0, 0);
        for &length in lengths {
            let usable = length.saturating_sub(skip);
            while let Some(rank) = chosen.next_if(|&rank| rank < first_rank + usable) {
                tokens.push(first_token + skip + rank - first_rank);
            }
            first_rank += usable;
            first_token += length;
        }
        let rows = vec![bf16::ZERO; heads * tokens.len() * 2 * head_dim];
        Self { head_dim, tokens, rows }
    }

    /// Rows kept of each head.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Offers consecutive rows of one head, beginning with token `first`; `key_value(row)` gives
    /// row `first + row`.
    pub fn offer<'a>(
        &mut self,
        head: usize,
        first: usize,
        count: usize,
        key_value: impl Fn(usize) -> (&'a [f32], &'a [f32]),
    ) {
        let start = self.tokens.partition_point(|&t| t < first);
        let d = self.head_dim;
        for (slot, &token) in
            self.tokens.iter().enumerate().skip(start).take_while(|(_, t)| **t < first + count)
        {
            let (key, value) = key_value(token - first);
            let target = &mut self.rows[(head * self.tokens.len() + slot) * 2 * d..][..2 * d];
            for (out, &v) in target.iter_mut().zip(key.iter().chain(value)) {
                *out = bf16::from_f32(v);
            }
        }
    }

    pub fn head(&self, head: usize) -> HeadSample {
        let (d, n) = (self.head_dim, self.tokens.len());
        let mut sample =
            HeadSample { head_dim: d, keys: Vec::with_capacity(n * d), values: Vec::with_capacity(n * d) };
        for row in self.rows[head * n * 2 * d..][..n * 2 * d].chunks_exact(2 * d) {
            sample.keys.extend(row[..d].iter().map(|v| v.to_f32()));
            sample.values.extend(row[d..].iter().map(|v| v.to_f32()));
        }
        sample
    }
}

/// Rows as the cache holds them before quantization: `mean` subtracted, rotated, rounded to BF16.
pub fn rotate_rows(rows: &[f32], mean: Option<&[f32]>, rotation: &Rotation) -> Vec<f32> {
    let d = rotation.head_dim();
    let mut out = vec![0.0; rows.len()];
    let mut centred = vec![0.0; d];
    for (row, out) in rows.chunks_exact(d).zip(out.chunks_exact_mut(d)) {
        centred.copy_from_slice(row);
        if let Some(mean) = mean {
            centred.iter_mut().zip(mean).for_each(|(v, m)| *v -= m);
        }
        rotation.apply(&centred, out);
        out.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sinks_are_left_out_where_others_suffice() {
        let sample = RowSample::new(1, 32, &[100, 40, 300], 50, 3);
        assert_eq!(sample.rows(), 50);
        let positions: Vec<(usize, usize)> = sample
            .tokens
            .iter()
            .map(|&t| {
                if t < 100 {
                    (0, t)
                } else if t < 140 {
                    (1, t - 100)
                } else {
                    (2, t - 140)
                }
            })
            .collect();
        assert!(positions.iter().all(|&(_, p)| p >= 64), "{positions:?}");
        assert!(positions.iter().any(|&(s, _)| s == 0) && positions.iter().any(|&(s, _)| s == 2));
        assert_eq!(RowSample::new(1, 32, &[100, 40], 50, 3).rows(), 50, "sinks are better than nothing");
        assert_eq!(RowSample::new(1, 32, &[10], 50, 3).rows(), 10);
        assert_eq!(RowSample::new(1, 32, &[], 50, 3).rows(), 0);
    }

    #[test]
    fn chunks_do_not_show() {
        let (d, n) = (32, 500);
        let rows: Vec<f32> = (0..n * 2 * d).map(|i| i as f32).collect();
        let run = |chunk: usize| {
            let mut sample = RowSample::new(2, d, &[200, 300], 64, 9);
            for first in (0..n).step_by(chunk) {
                for head in 0..2 {
                    sample.offer(head, first, chunk.min(n - first), |r| {
                        rows[(first + r) * 2 * d..][..2 * d].split_at(d)
                    });
                }
            }
            (sample.head(0), sample.head(1))
        };
        let whole = run(500);
        assert_eq!(run(7), whole);
        assert_eq!(run(64), whole);
        assert_eq!(whole.0, whole.1);
        assert!(whole.0.keys.chunks(d).all(|row| row.iter().any(|&v| v != 0.0)), "every slot was filled");
    }
}
