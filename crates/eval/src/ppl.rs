//! Perplexity, KL divergence and top-1 agreement over text, all formats in one pass.
//!
//! The text is cut into windows. Each window is fed to every runner chunk by chunk. At scored
//! positions the runners' next-token distributions are compared with those of the first runner, the
//! reference. Only one chunk of logits is held at a time.

use crate::{EvalError, Journal};
use oscar_backend::{Backend, argmax};
use oscar_runner::{Logits, Runner, Sequence, StepError, StepOutput, StepRequest};
use serde::{Deserialize, Serialize};

#[derive(Debug, thiserror::Error)]
pub enum PplError {
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
    /// Largest number of windows, spread evenly over the text; 0 takes all that fit.
    pub limit: usize,
    /// Tokens fed at a time; the result does not depend on it.
    pub chunk: usize,
}

/// The scores of one runner.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PplResult {
    pub scored: usize,
    pub perplexity: f64,
    /// Mean KL(reference ‖ this) in nats.
    pub kl: f64,
    /// Share of positions where the most likely token is the same as the reference's.
    pub top1: f64,
}

/// Sums over one window for one runner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WindowSums {
    pub scored: usize,
    pub nll: f64,
    pub kl: f64,
    pub agree: usize,
}

/// The windows of a text that the options select.
pub fn windows<'a>(tokens: &'a [u32], options: &PplOptions) -> Result<Vec<&'a [u32]>, PplError> {
    let window = options.window;
    if options.score_from + 1 >= window {
        return Err(PplError::NothingScored { score_from: options.score_from, window });
    }
    let windows: Vec<&[u32]> = tokens.chunks_exact(window).collect();
    if windows.is_empty() {
        return Err(PplError::TooShort { tokens: tokens.len(), window });
    }
    if options.limit == 0 || options.limit >= windows.len() {
        return Ok(windows);
    }
    // Spread over the whole text, so that the result does not rest on one kind of text.
    Ok((0..options.limit).map(|i| windows[i * windows.len() / options.limit]).collect())
}

/// Scores all windows with the formats that the journal does not hold yet. BF16, the first, is scored
/// too if any is missing. Returns the sums of each format and the sequences after the last window;
/// those of formats that were not scored are empty. `progress` is called with the number of finished
/// tokens.
pub fn score_recorded<B: Backend>(
    journal: &mut Journal,
    names: &[&str],
    runners: &mut [Runner<B>],
    windows: &[&[u32]],
    options: &PplOptions,
    mut progress: impl FnMut(usize),
) -> Result<(Vec<Vec<WindowSums>>, Vec<Sequence>), EvalError> {
    let (mut sums, mut sequences) = (vec![Vec::new(); names.len()], Vec::new());
    for (index, window) in windows.iter().enumerate() {
        let key = |name: &str| format!("{name}/window/{index}");
        let mut known: Vec<Option<WindowSums>> = names.iter().map(|name| journal.get(&key(name))).collect();
        sequences.clear();
        sequences.resize_with(names.len(), Sequence::new);
        if known.iter().any(Option::is_none) {
            let missing: Vec<usize> = (0..names.len()).filter(|&i| i == 0 || known[i].is_none()).collect();
            let wanted = runners.iter_mut().enumerate().filter(|(i, _)| missing.contains(i));
            let mut wanted: Vec<&mut Runner<B>> = wanted.map(|(_, runner)| runner).collect();
            let mut filled: Vec<Sequence> = missing.iter().map(|_| Sequence::new()).collect();
            let tick = |tokens| progress(index * options.window + tokens);
            let scored = score_window(&mut wanted, &mut filled, window, options, tick)?;
            for ((&i, scored), sequence) in missing.iter().zip(scored).zip(filled) {
                if known[i].is_none() {
                    journal.record(&key(names[i]), &scored)?;
                }
                (known[i], sequences[i]) = (Some(scored), sequence);
            }
        }
        sums.iter_mut().zip(known.into_iter().flatten()).for_each(|(all, one)| all.push(one));
    }
    Ok((sums, sequences))
}

/// Scores one window with every runner; the first is the reference. The sequences, one for each
/// runner, are new and hold the window afterwards. `progress` is called with the number of finished
/// tokens.
pub fn score_window<B: Backend>(
    runners: &mut [&mut Runner<B>],
    sequences: &mut [Sequence],
    tokens: &[u32],
    options: &PplOptions,
    mut progress: impl FnMut(usize),
) -> Result<Vec<WindowSums>, StepError> {
    let mut sums = vec![WindowSums::default(); runners.len()];
    let (mut reference, mut output) = (Reference::default(), StepOutput::default());
    let mut start = 0;
    for chunk in tokens.chunks(options.chunk.max(1)) {
        // Position t predicts token t + 1; the last position of a window predicts nothing inside
        // it.
        let end = start + chunk.len();
        let scored = options.score_from.max(start)..end.min(tokens.len() - 1);
        reference.clear();
        for (i, (runner, sequence)) in runners.iter_mut().zip(sequences.iter_mut()).enumerate() {
            let wanted = if scored.is_empty() { Logits::None } else { Logits::All };
            runner.step(&mut [StepRequest { sequence, tokens: chunk, logits: wanted }], &mut output)?;
            let (vocab, sums) = (runner.config().vocab_size, &mut sums[i]);
            for position in scored.clone() {
                let row = &mut output.logits[(position - start) * vocab..][..vocab];
                log_softmax(row);
                sums.scored += 1;
                sums.nll -= f64::from(row[tokens[position + 1] as usize]);
                if i == 0 {
                    sums.agree += 1;
                    reference.push(row);
                } else {
                    let (kl, agrees) = reference.compare(position - scored.start, row);
                    sums.kl += kl;
                    sums.agree += usize::from(agrees);
                }
            }
        }
        start = end;
        progress(end);
    }
    Ok(sums)
}

/// The reference's distributions of one chunk.
#[derive(Default)]
struct Reference {
    log_probabilities: Vec<f32>,
    probabilities: Vec<f32>,
    most_likely: Vec<u32>,
}

impl Reference {
    fn clear(&mut self) {
        self.log_probabilities.clear();
        self.probabilities.clear();
        self.most_likely.clear();
    }

    fn push(&mut self, row: &[f32]) {
        self.log_probabilities.extend_from_slice(row);
        self.probabilities.extend(row.iter().map(|l| l.exp()));
        self.most_likely.push(argmax(row));
    }

    /// KL(reference ‖ row) of a position, and whether both have the same most likely token.
    fn compare(&self, index: usize, row: &[f32]) -> (f64, bool) {
        let range = index * row.len()..(index + 1) * row.len();
        let kl = divergence(&self.probabilities[range.clone()], &self.log_probabilities[range], row);
        (kl, self.most_likely[index] == argmax(row))
    }
}

impl PplResult {
    /// All windows together.
    pub fn of(windows: &[WindowSums]) -> Self {
        let scored: usize = windows.iter().map(|w| w.scored).sum();
        let n = scored.max(1) as f64;
        let total = |of: fn(&WindowSums) -> f64| windows.iter().map(of).sum::<f64>();
        Self {
            scored,
            perplexity: (total(|w| w.nll) / n).exp(),
            kl: total(|w| w.kl) / n,
            top1: total(|w| w.agree as f64) / n,
        }
    }
}

fn log_softmax(row: &mut [f32]) {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|&l| f64::from(l - max).exp()).sum();
    let shift = max + sum.ln() as f32;
    row.iter_mut().for_each(|l| *l -= shift);
}

/// KL(p ‖ q) from `p`'s probabilities and both rows of log-probabilities.
fn divergence(p: &[f32], log_p: &[f32], log_q: &[f32]) -> f64 {
    p.iter().zip(log_p.iter().zip(log_q)).map(|(&p, (&a, &b))| f64::from(p) * f64::from(a - b)).sum()
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
        let exp = |row: &[f32]| row.iter().map(|l| l.exp()).collect::<Vec<_>>();
        assert!((divergence(&exp(&p), &p, &q) - expected).abs() < 1e-6);
        assert!(divergence(&exp(&q), &q, &q).abs() < 1e-9);
        let total: f64 = q.iter().map(|&l| f64::from(l).exp()).sum();
        assert!((total - 1.0).abs() < 1e-6);
        assert_eq!(argmax(&q), 1);
    }
}
