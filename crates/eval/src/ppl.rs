//! Perplexity, KL divergence and top-1 agreement over text, all formats in one pass.
//!
//! The text is cut into windows; each window is fed to every runner chunk by chunk, and where a position is scored
//! the runners' next-token distributions are compared with those of the first runner, the reference. Only one
//! chunk of logits is held at a time.

use oscar_backend::Backend;
use oscar_engine::{EngineError, Logits, Runner, Sequence, StepRequest};

#[derive(Debug, thiserror::Error)]
pub enum PplError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(
        "the text has {tokens} tokens, too few for one window of {window}: give more text or a smaller --window"
    )]
    TooShort { tokens: usize, window: usize },
    #[error("--score-from {score_from} leaves nothing to score in a window of {window}")]
    NothingScored { score_from: usize, window: usize },
}

#[derive(Clone, Copy, Debug)]
pub struct PplOptions {
    /// Tokens of a window.
    pub window: usize,
    /// First position of a window that is scored.
    pub score_from: usize,
    /// Most windows, spread evenly over the text; 0 takes all that fit.
    pub limit: usize,
    /// Tokens fed at a time; the result does not depend on it.
    pub chunk: usize,
}

/// What one runner scored.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PplResult {
    pub scored: usize,
    pub perplexity: f64,
    /// Mean KL(reference ‖ this) in nats.
    pub kl: f64,
    /// Share of positions where the most likely token is the reference's.
    pub top1: f64,
}

#[derive(Clone, Copy, Default)]
struct Sums {
    scored: usize,
    nll: f64,
    kl: f64,
    agree: usize,
}

/// Scores `tokens` with every runner; the first is the reference. `progress` hears (tokens done, tokens in all).
pub fn evaluate<B: Backend>(
    runners: &mut [Runner<B>],
    tokens: &[u32],
    options: &PplOptions,
    mut progress: impl FnMut(usize, usize),
) -> Result<Vec<PplResult>, PplError> {
    let window = options.window;
    if options.score_from + 1 >= window {
        return Err(PplError::NothingScored { score_from: options.score_from, window });
    }
    let mut windows: Vec<&[u32]> = tokens.chunks_exact(window).collect();
    if windows.is_empty() {
        return Err(PplError::TooShort { tokens: tokens.len(), window });
    }
    if options.limit > 0 && options.limit < windows.len() {
        // Spread over the whole text, so that one kind of text does not stand for all.
        windows = (0..options.limit).map(|i| windows[i * windows.len() / options.limit]).collect();
    }
    let total = windows.len() * window;
    let mut sums = vec![Sums::default(); runners.len()];
    let mut reference = Vec::new();
    let mut logits = Vec::new();
    for (index, window_tokens) in windows.iter().enumerate() {
        let mut sequences: Vec<Sequence> = runners.iter().map(|_| Sequence::new()).collect();
        let mut start = 0;
        for chunk in window_tokens.chunks(options.chunk.max(1)) {
            // Position t predicts token t + 1; a window's last position predicts nothing in it.
            let end = start + chunk.len();
            let scored = options.score_from.max(start)..end.min(window - 1);
            for (i, (runner, sequence)) in runners.iter_mut().zip(&mut sequences).enumerate() {
                let is_reference = i == 0;
                let sums = &mut sums[i];
                let wanted = if scored.is_empty() { Logits::None } else { Logits::All };
                let request = StepRequest { sequence, tokens: chunk, logits: wanted };
                runner.step(&mut [request], &mut logits)?;
                if scored.is_empty() {
                    continue;
                }
                let vocab = runner.config().vocab_size;
                if is_reference {
                    reference.clear();
                }
                for (row, position) in (start..end).enumerate() {
                    if !scored.contains(&position) {
                        continue;
                    }
                    let row = &mut logits[row * vocab..(row + 1) * vocab];
                    log_softmax(row);
                    let next = window_tokens[position + 1] as usize;
                    sums.scored += 1;
                    sums.nll -= f64::from(row[next]);
                    if is_reference {
                        sums.agree += 1;
                        reference.extend_from_slice(row);
                    } else {
                        let exact = &reference[(position - scored.start) * vocab..][..vocab];
                        sums.kl += divergence(exact, row);
                        sums.agree += usize::from(argmax(exact) == argmax(row));
                    }
                }
            }
            start = end;
            progress(index * window + end, total);
        }
    }
    Ok(sums.iter().map(Sums::result).collect())
}

impl Sums {
    fn result(&self) -> PplResult {
        let n = self.scored.max(1) as f64;
        PplResult {
            scored: self.scored,
            perplexity: (self.nll / n).exp(),
            kl: self.kl / n,
            top1: self.agree as f64 / n,
        }
    }
}

fn log_softmax(row: &mut [f32]) {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|&l| f64::from(l - max).exp()).sum();
    let shift = max + sum.ln() as f32;
    row.iter_mut().for_each(|l| *l -= shift);
}

/// KL(p ‖ q) of two rows of log-probabilities.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    p.iter().zip(q).map(|(&p, &q)| f64::from(p).exp() * f64::from(p - q)).sum()
}

fn argmax(row: &[f32]) -> usize {
    row.iter()
        .enumerate()
        .fold((0, f32::NEG_INFINITY), |best, (i, &v)| if v > best.1 { (i, v) } else { best })
        .0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_of_known_distributions() {
        let mut p = [0.0f32.ln(), 0.5f32.ln(), 0.5f32.ln()];
        p[0] = -40.0;
        let mut q = [0.0, 1.0, 1.0];
        log_softmax(&mut q);
        let expected = -(f64::from(q[1])) - std::f64::consts::LN_2;
        assert!((divergence(&p, &q) - expected).abs() < 1e-6);
        assert!(divergence(&q, &q).abs() < 1e-9);
        let total: f64 = q.iter().map(|&l| f64::from(l).exp()).sum();
        assert!((total - 1.0).abs() < 1e-6);
        assert_eq!(argmax(&q), 1);
    }
}
