//! A digest of the model that ties files computed from it (rotations, widths) to its weights.
//!
//! SHA-256 over, for every tensor in name order: name, dtype and shape, then the whole data of
//! small tensors, and of large ones [`SAMPLES`] evenly spaced blocks, including the first and last
//! bytes. A different size, a renamed tensor or a fine-tuned weight changes it, while an
//! 8-billion-parameter model costs a read of about 25 MB. It identifies and does not authenticate:
//! a change confined to bytes between the blocks goes unseen.
//!
//! Frozen: rotation files carry these digests, so any change here needs a new [`DOMAIN`].

use sha2::{Digest, Sha256};

/// DO NOT CHANGE without changing the recipe: it names the recipe, so that two recipes never agree
/// by chance.
const DOMAIN: &[u8] = b"oscar weights fingerprint v1";
/// Blocks taken from a tensor too large to be read whole.
const SAMPLES: usize = 16;
/// Bytes in a block: one page of the file system.
const BLOCK: usize = 4096;

/// Digests tensors given in name order.
pub(crate) fn fingerprint<'a>(
    tensors: impl Iterator<Item = (&'a str, String, &'a [usize], &'a [u8])>,
) -> String {
    let mut hash = Sha256::new();
    hash.update(DOMAIN);
    for (name, dtype, shape, bytes) in tensors {
        // Lengths first, so that no two lists of tensors run together into the same stream.
        update_with_length(&mut hash, name.as_bytes());
        update_with_length(&mut hash, dtype.as_bytes());
        hash.update((shape.len() as u64).to_le_bytes());
        for dimension in shape {
            hash.update((*dimension as u64).to_le_bytes());
        }
        for start in block_starts(bytes.len()) {
            hash.update(&bytes[start..bytes.len().min(start + BLOCK)]);
        }
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn update_with_length(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

/// Where the blocks of a tensor of this many bytes begin: back to back if they cover it, else
/// spread evenly.
fn block_starts(bytes: usize) -> Vec<usize> {
    if bytes <= SAMPLES * BLOCK {
        return (0..bytes).step_by(BLOCK).collect();
    }
    let last = bytes - BLOCK;
    (0..SAMPLES).map(|i| (last as u128 * i as u128 / (SAMPLES as u128 - 1)) as usize).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(name: &str, shape: &[usize], bytes: &[u8]) -> String {
        fingerprint([(name, "F32".to_owned(), shape, bytes)].into_iter())
    }

    #[test]
    fn the_recipe_is_frozen() {
        // Python: hashlib.sha256(DOMAIN + q(1)+b"w" + q(3)+b"F32" + q(1)+q(2) +
        // bytes(range(8))).hexdigest() with q(n) = struct.pack("<Q", n).
        let bytes: Vec<u8> = (0..8).collect();
        assert_eq!(of("w", &[2], &bytes), "aba22245b2bd66fde36439b6ce6764df2b53d7d572c3e4b71ab145db703ec16b");
    }

    #[test]
    fn every_part_counts() {
        let bytes = vec![7u8; 3 * SAMPLES * BLOCK];
        let base = of("w", &[1, 2], &bytes);
        assert_ne!(base, of("v", &[1, 2], &bytes));
        assert_ne!(base, of("w", &[2, 1], &bytes));
        for position in [0, bytes.len() - 1, block_starts(bytes.len())[7] + 5] {
            let mut changed = bytes.clone();
            changed[position] ^= 1;
            assert_ne!(base, of("w", &[1, 2], &changed), "byte {position}");
        }
    }

    proptest! {
        #[test]
        fn blocks_stay_inside_and_reach_both_ends(bytes in 1usize..3_000_000) {
            let starts = block_starts(bytes);
            prop_assert_eq!(starts[0], 0);
            prop_assert!(starts.len() <= SAMPLES);
            prop_assert!(starts.windows(2).all(|pair| pair[0] + BLOCK <= pair[1]));
            let last = *starts.last().unwrap();
            prop_assert!(last < bytes && last + BLOCK >= bytes);
        }
    }
}
