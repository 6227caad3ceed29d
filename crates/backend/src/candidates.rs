//! The most likely tokens of a row of logits: all that most requests need of it.
//!
//! A list is exact, in values and in order, so that a sampler draws from it what it would have
//! drawn from the whole row.

/// A logit and its token.
pub type Candidate = (f32, u32);

/// Most candidates that can be asked for.
pub const MOST_CANDIDATES: usize = 256;

/// What is wanted of a row of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick {
    /// The most likely token, the lowest id among equals (−0 equals 0); NaN and −∞ never win.
    /// Nothing if there is no other.
    Greedy,
    /// This many of the largest logits, from 1 to [`MOST_CANDIDATES`]; all that are not NaN if
    /// there are fewer. Largest first (−0 below 0), the lower id first among equals.
    Top(usize),
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
    match what {
        Pick::Greedy => {
            let token = argmax(logits);
            let best = logits.get(token as usize).filter(|&&logit| logit > f32::NEG_INFINITY);
            // Adding 0 turns −0 into 0, so a device may return either.
            best.map(|&logit| (logit + 0.0, token)).into_iter().collect()
        }
        Pick::Top(count) => {
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
}
