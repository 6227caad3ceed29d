//! Log-probabilities of the model's own distribution.

use crate::request::TokenLogprobs;
use std::cmp::Ordering;

/// Log-softmax of `logits` at `token` and at the `top` most likely tokens, descending, ties by
/// token id.
pub fn token_logprobs(logits: &[f32], token: u32, top: usize) -> TokenLogprobs {
    let known = |l: f32| if l.is_nan() { f32::NEG_INFINITY } else { l };
    let max = logits.iter().map(|&l| known(l)).fold(f32::NEG_INFINITY, f32::max) as f64;
    let sum: f64 = logits.iter().map(|&l| (known(l) as f64 - max).exp()).sum();
    let normalizer = max + sum.ln();
    let logprob = |l: f32| (known(l) as f64 - normalizer) as f32;

    let order = |&a: &u32, &b: &u32| -> Ordering {
        known(logits[b as usize]).total_cmp(&known(logits[a as usize])).then(a.cmp(&b))
    };
    let top = top.min(logits.len());
    let mut ids: Vec<u32> = Vec::new();
    if top > 0 {
        ids.extend(0..logits.len() as u32);
        if top < ids.len() {
            ids.select_nth_unstable_by(top - 1, order);
            ids.truncate(top);
        }
        ids.sort_unstable_by(order);
    }
    TokenLogprobs {
        token,
        logprob: logits.get(token as usize).map_or(f32::NEG_INFINITY, |&l| logprob(l)),
        top: ids.into_iter().map(|id| (id, logprob(logits[id as usize]))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_are_the_log_softmax_and_sorted() {
        let logits = [0.25f32.ln() + 7.0, 0.5f32.ln() + 7.0, 0.25f32.ln() + 7.0, f32::NAN];
        let got = token_logprobs(&logits, 2, 3);
        assert!((got.logprob - 0.25f32.ln()).abs() < 1e-5);
        assert_eq!(got.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 0, 2]);
        assert!((got.top[0].1 - 0.5f32.ln()).abs() < 1e-5);
        assert_eq!(token_logprobs(&logits, 0, 99).top.len(), 4, "never more than there are");
        assert!(token_logprobs(&logits, 0, 0).top.is_empty());
    }
}
