//! Tokens of a text as the sequences that a calibration runs.

use oscar_codec::random::SplitMix64;
use sha2::{Digest, Sha256};

/// `count` of `0..total`, ascending, one from each of `count` equal parts; all of them if there are
/// no more.
pub(crate) fn spread(total: usize, count: usize, seed: u64) -> Vec<usize> {
    if count >= total {
        return (0..total).collect();
    }
    let mut random = SplitMix64::new(seed);
    let part = |i: usize| (i as u128 * total as u128 / count as u128) as usize;
    (0..count).map(|i| part(i) + random.below(part(i + 1) - part(i))).collect()
}

/// Cuts a text into sequences of `sequence_len` tokens, `budget` tokens in all.
///
/// A text longer than the budget is sampled: pieces are taken from all over it, chosen by `seed`, in the order of
/// the text. A shorter one is used whole, its last piece being what is left over.
pub fn split_tokens(tokens: Vec<u32>, sequence_len: usize, budget: usize, seed: u64) -> Vec<Vec<u32>> {
    if sequence_len == 0 || budget == 0 {
        return Vec::new();
    }
    let pieces: Vec<&[u32]> = if tokens.len() <= budget {
        tokens.chunks(sequence_len).collect()
    } else {
        let whole: Vec<&[u32]> = tokens.chunks_exact(sequence_len).collect();
        if whole.is_empty() {
            vec![&tokens[..budget]]
        } else {
            let wanted = budget.div_ceil(sequence_len);
            spread(whole.len(), wanted, seed).into_iter().map(|i| whole[i]).collect()
        }
    };
    let mut left = budget;
    let mut sequences = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let piece = &piece[..piece.len().min(left)];
        if piece.is_empty() {
            break;
        }
        left -= piece.len();
        sequences.push(piece.to_vec());
    }
    sequences
}

/// SHA-256 of token sequences, their lengths included, in hexadecimal: names the text without quoting it.
pub(crate) fn digest(sequences: &[&[u32]]) -> String {
    let mut hash = Sha256::new();
    hash.update(b"oscar calibration tokens v1");
    for sequence in sequences {
        hash.update((sequence.len() as u64).to_le_bytes());
        for token in *sequence {
            hash.update(token.to_le_bytes());
        }
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_short_text_is_used_whole() {
        let sequences = split_tokens((0..10).collect(), 4, 100, 7);
        assert_eq!(sequences, [vec![0, 1, 2, 3], vec![4, 5, 6, 7], vec![8, 9]]);
        assert_eq!(split_tokens(vec![1, 2, 3], 0, 10, 0), Vec::<Vec<u32>>::new());
        assert_eq!(split_tokens(Vec::new(), 8, 10, 0), Vec::<Vec<u32>>::new());
        assert_eq!(split_tokens((0..100).collect(), 1000, 30, 0), [(0..30).collect::<Vec<u32>>()]);
    }

    #[test]
    fn the_seed_chooses_pieces_of_a_long_text() {
        let tokens: Vec<u32> = (0..10_000).collect();
        let (a, b) = (split_tokens(tokens.clone(), 64, 640, 1), split_tokens(tokens.clone(), 64, 640, 2));
        assert_ne!(a, b);
        assert_eq!(a, split_tokens(tokens, 64, 640, 1));
        assert!(a[0][0] < 1000 && a[9][0] > 8_900, "pieces come from all over the text");
    }

    #[test]
    fn digests_see_boundaries() {
        assert_ne!(digest(&[&[1, 2, 3]]), digest(&[&[1, 2], &[3]]));
        assert_eq!(digest(&[&[1, 2, 3]]).len(), 64);
    }

    proptest! {
        #[test]
        fn pieces_are_in_order_disjoint_and_within_the_budget(
            length in 0usize..3000, sequence in 1usize..300, budget in 0usize..4000, seed: u64,
        ) {
            let sequences = split_tokens((0..length as u32).collect(), sequence, budget, seed);
            let all: Vec<u32> = sequences.iter().flatten().copied().collect();
            prop_assert!(all.len() <= budget);
            prop_assert!(all.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(sequences.iter().all(|s| !s.is_empty() && s.len() <= sequence.max(budget)));
            if length <= budget {
                prop_assert_eq!(all.len(), length);
            } else if length >= sequence * budget.div_ceil(sequence) {
                prop_assert_eq!(all.len(), budget);
            }
        }
    }
}
