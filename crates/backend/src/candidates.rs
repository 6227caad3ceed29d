//! The most likely tokens of a row of logits: all that most requests need of it.
//!
//! A list is exact, in values and in order, so that a sampler draws from it what it would have
//! drawn from the whole row.

use std::sync::OnceLock;

/// A logit and its token.
pub type Candidate = (f32, u32);

/// Most candidates that can be asked for.
pub const MOST_CANDIDATES: usize = 256;

/// The tokens that may be chosen: bit `i % 32` of word `i / 32` is set for token `i`; tokens behind the
/// last word may not. They are found by another thread while the device computes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TokenMask(OnceLock<Vec<u32>>);

impl TokenMask {
    /// Says which tokens are allowed. Only the first call counts.
    pub fn set(&self, words: Vec<u32>) {
        let _ = self.0.set(words);
    }

    /// The words, once they are known.
    pub fn words(&self) -> &[u32] {
        self.0.wait()
    }
}

/// Whether a mask allows a token.
pub fn allows(words: &[u32], token: usize) -> bool {
    words.get(token / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// What is wanted of a row of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick<'a> {
    /// The most likely token, the lowest id among equals (−0 equals 0); NaN and −∞ never win.
    /// Nothing if there is no other.
    Greedy,
    /// This many of the largest logits, from 1 to [`MOST_CANDIDATES`]; all that are not NaN if
    /// there are fewer. Largest first (−0 below 0), the lower id first among equals.
    Top(usize),
    /// [`Pick::Greedy`] among the tokens that are allowed.
    GreedyAmong(&'a TokenMask),
    /// [`Pick::Top`] among the tokens that are allowed.
    TopAmong(usize, &'a TokenMask),
}

impl Pick<'static> {
    /// The same among the tokens that `mask` allows.
    pub fn among(self, mask: &TokenMask) -> Pick<'_> {
        match self {
            Self::Greedy | Self::GreedyAmong(_) => Pick::GreedyAmong(mask),
            Self::Top(count) | Self::TopAmong(count, _) => Pick::TopAmong(count, mask),
        }
    }
}

impl<'a> Pick<'a> {
    /// Candidates of a list; `None` for the most likely token alone.
    pub fn count(self) -> Option<usize> {
        match self {
            Self::Greedy | Self::GreedyAmong(_) => None,
            Self::Top(count) | Self::TopAmong(count, _) => Some(count),
        }
    }

    /// The tokens that are allowed, if not all are.
    pub fn mask(self) -> Option<&'a TokenMask> {
        match self {
            Self::Greedy | Self::Top(_) => None,
            Self::GreedyAmong(mask) | Self::TopAmong(_, mask) => Some(mask),
        }
    }
}

/// The place of a candidate in the order of [`Pick::Top`]: the larger comes first. 0 for NaN, which
/// has no place.
pub fn candidate_key(logit: f32, token: u32) -> u64 {
    if logit.is_nan() {
        return 0;
    }
    let bits = logit.to_bits();
    let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(ordered) << 32 | u64::from(!token)
}

/// The candidate of a key that is not 0.
pub fn candidate_of(key: u64) -> Candidate {
    let ordered = (key >> 32) as u32;
    let bits = if ordered >> 31 == 1 { ordered & !(1 << 31) } else { !ordered };
    (f32::from_bits(bits), !(key as u32))
}

/// The most likely token: the first of equals (−0 equals 0). NaN never wins. 0 if nothing is above
/// −∞.
///
/// Every greedy choice in the project uses this function, so that ties are broken the same way
/// everywhere.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (token, &logit) in logits.iter().enumerate() {
        if logit > best.0 {
            best = (logit, token as u32);
        }
    }
    best.1
}

/// What `pick` says, in plain form: the reference of every device.
pub fn pick(logits: &[f32], what: Pick) -> Vec<Candidate> {
    if let Some(mask) = what.mask() {
        let words = mask.words();
        let open = |(token, &logit)| if allows(words, token) { logit } else { f32::NAN };
        let left: Vec<f32> = logits.iter().enumerate().map(open).collect();
        return pick(&left, what.count().map_or(Pick::Greedy, Pick::Top));
    }
    match what.count() {
        None => {
            let token = argmax(logits);
            let best = logits.get(token as usize).filter(|&&logit| logit > f32::NEG_INFINITY);
            // Adding 0 turns −0 into 0, so a device may return either.
            best.map(|&logit| (logit + 0.0, token)).into_iter().collect()
        }
        Some(count) => {
            let mut keys: Vec<u64> = logits
                .iter()
                .enumerate()
                .map(|(token, &logit)| candidate_key(logit, token as u32))
                .filter(|&key| key != 0)
                .collect();
            if count < keys.len() {
                keys.select_nth_unstable_by(count.max(1) - 1, |a, b| b.cmp(a));
                keys.truncate(count);
            }
            keys.sort_unstable_by(|a, b| b.cmp(a));
            keys.into_iter().map(candidate_of).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: [f32; 12] = [
        -0.0,
        0.0,
        f32::NAN,
        1.5,
        f32::NEG_INFINITY,
        -3.0,
        1.5,
        f32::INFINITY,
        f32::MIN_POSITIVE / 2.0,
        -f32::MIN_POSITIVE / 2.0,
        f32::MAX,
        -f32::NAN,
    ];

    #[test]
    fn keys_order_as_candidates_do_and_turn_back() {
        for (a, &x) in ROW.iter().enumerate().filter(|(_, x)| !x.is_nan()) {
            let key = candidate_key(x, a as u32);
            let (logit, token) = candidate_of(key);
            assert_eq!((logit.to_bits(), token), (x.to_bits(), a as u32));
            for (b, &y) in ROW.iter().enumerate().filter(|(_, y)| !y.is_nan()) {
                let order = y.total_cmp(&x).then(a.cmp(&b));
                assert_eq!(candidate_key(y, b as u32).cmp(&key), order, "{x} and {y}");
            }
        }
        assert_eq!((candidate_key(f32::NAN, 3), candidate_key(-f32::NAN, 3)), (0, 0));
        assert_ne!(candidate_key(f32::NEG_INFINITY, u32::MAX), 0, "a place of its own");
    }

    #[test]
    fn argmax_takes_the_first_of_equals_and_no_nan() {
        assert_eq!(argmax(&ROW), 7);
        assert_eq!(argmax(&[f32::NAN, 1.0, 3.0, 3.0, f32::NAN]), 2);
        assert_eq!(argmax(&[-1.0, -0.0, 0.0]), 1);
        assert_eq!((argmax(&[f32::NAN; 3]), argmax(&[f32::NEG_INFINITY; 3]), argmax(&[])), (0, 0, 0));
    }

    #[test]
    fn lists_are_sorted_and_leave_nan_out() {
        let tokens =
            |list: Vec<Candidate>| -> Vec<u32> { list.into_iter().map(|(_, token)| token).collect() };
        assert_eq!(tokens(pick(&ROW, Pick::Top(256))), [7, 10, 3, 6, 8, 1, 0, 9, 5, 4]);
        assert_eq!(tokens(pick(&ROW, Pick::Top(4))), [7, 10, 3, 6]);
        assert_eq!(tokens(pick(&ROW, Pick::Greedy)), [7]);
        assert_eq!(pick(&[-0.0, 0.0], Pick::Greedy), [(0.0, 0)]);
        assert_eq!(tokens(pick(&[-0.0, 0.0], Pick::Top(1))), [1]);
        assert!(pick(&[f32::NAN, f32::NEG_INFINITY], Pick::Greedy).is_empty());
        assert!(pick(&[], Pick::Top(3)).is_empty() && pick(&[f32::NAN], Pick::Top(3)).is_empty());
    }

    #[test]
    fn a_mask_leaves_the_allowed_tokens_and_those_behind_its_end_out() {
        let mask = TokenMask::default();
        std::thread::scope(|scope| {
            scope.spawn(|| mask.set(vec![0b10_0010_1001]));
            // Waits for the other thread.
            let tokens: Vec<u32> = pick(&ROW, Pick::Top(9).among(&mask)).iter().map(|c| c.1).collect();
            assert_eq!(tokens, [3, 0, 9, 5]);
        });
        assert_eq!(pick(&ROW, Pick::Greedy.among(&mask)), [(1.5, 3)]);
        let none = TokenMask::default();
        none.set(Vec::new());
        none.set(vec![u32::MAX]);
        assert!(pick(&ROW, Pick::Greedy.among(&none)).is_empty(), "only the first call counts");
    }
}
