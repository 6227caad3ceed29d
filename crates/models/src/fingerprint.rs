//! A digest of the model that ties files computed from it (rotations, widths) to its weights.
//!
//! SHA-256 over, for every tensor in name order: name, dtype and shape, then the whole data of
//! small tensors, and of large ones [`SAMPLES`] evenly spaced blocks, including the first and last
//! bytes. A different size, a renamed tensor or a fine-tuned weight changes it, while an
//! 8-billion-parameter model costs a read of about 25 MB. It identifies and does not authenticate:
//! a change confined to bytes between the blocks goes unseen.
//!
//! Checkpoints with experts have their own recipe: of the tensors of experts (up to some 90,000)
//! names, dtypes and shapes count as before, but data only of one in [`EXPERT_SHARE`], one block
//! each. A 230 GB checkpoint costs a read of about 50 MB.
//!
//! Frozen: rotation files carry these digests, so any change here needs a new domain.

use sha2::{Digest, Sha256};

use crate::tensor_names::is_expert;

/// DO NOT CHANGE without changing the recipe: it names the recipe, so that two recipes never agree
/// by chance.
const DOMAIN: &[u8] = b"oscar weights fingerprint v1";
/// The same for checkpoints with experts.
const EXPERT_DOMAIN: &[u8] = b"oscar weights fingerprint v2";
/// One expert tensor in this many is sampled, chosen by its name.
const EXPERT_SHARE: u64 = 16;
/// Blocks taken from a tensor too large to be read whole.
const SAMPLES: usize = 16;
/// Bytes in a block: one page of the file system.
const BLOCK: usize = 4096;

/// Digests tensors given in name order.
pub(crate) fn fingerprint<'a>(
    tensors: impl Iterator<Item = (&'a str, String, &'a [usize], &'a [u8])> + Clone,
) -> String {
    let mut hash = Sha256::new();
    let experts = tensors.clone().any(|(name, ..)| is_expert(name));
    hash.update(if experts { EXPERT_DOMAIN } else { DOMAIN });
    for (name, dtype, shape, bytes) in tensors {
        // Lengths first, so that no two lists of tensors run together into the same stream.
        update_with_length(&mut hash, name.as_bytes());
        update_with_length(&mut hash, dtype.as_bytes());
        hash.update((shape.len() as u64).to_le_bytes());
        for dimension in shape {
            hash.update((*dimension as u64).to_le_bytes());
        }
        let starts = match is_expert(name) {
            true if !sampled(name) => Vec::new(),
            true => vec![bytes.len() / 2 / BLOCK * BLOCK],
            false => block_starts(bytes.len()),
        };
        for start in starts {
            hash.update(&bytes[start..bytes.len().min(start + BLOCK)]);
        }
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether the data of this expert tensor counts: by FNV-1a of its name.
fn sampled(name: &str) -> bool {
    let hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    (hash >> 32).is_multiple_of(EXPERT_SHARE)
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
    fn of_experts_some_data_counts_and_every_name_does() {
        let names: Vec<String> =
            (0..64).map(|e| format!("model.layers.1.mlp.experts.{e}.up_proj.weight")).collect();
        let of = |names: &[String], bytes: &[u8]| {
            fingerprint(names.iter().map(|name| (name.as_str(), "BF16".to_owned(), &[4usize][..], bytes)))
        };
        let base = of(&names, &[1; 8]);
        assert_ne!(base, of(&names, &[2; 8]));
        assert_ne!(base, of(&names[1..], &[1; 8]));
        let counted = names.iter().filter(|name| sampled(name)).count();
        assert!((1..=16).contains(&counted), "{counted}");
        assert_ne!(
            of(&[], &[]),
            fingerprint([("w", "BF16".to_owned(), &[1usize][..], &[0u8, 0][..])].into_iter())
        );
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
