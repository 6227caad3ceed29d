//! The compiled forms of the decode kernel.

use crate::error::{CudaError, Result};
use crate::sources::{Defines, HEAD_DIMS};

/// Most query heads that share a KV head.
pub const MAX_GROUP: usize = 16;
/// Slots of a warp's ring: more slots hide more latency and take more shared memory.
const STAGES: std::ops::RangeInclusive<usize> = 2..=4;

/// One compiled form of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    pub head_dim: usize,
    /// Tiles of eight query heads.
    pub query_tiles: usize,
    /// Warps that compute; one more fills their rings.
    pub warps: usize,
    pub stages: usize,
    /// Tiles of four query heads whose high and low bytes are multiplied with two-bit keys; 0 for
    /// fp16 queries.
    pub split_query: usize,
    /// Whether it also does the work of `append`: it makes queries, and the new token's key and
    /// value, from projections.
    pub fused: bool,
    /// Whether the layer has attention sinks; not together with `fused`.
    pub sinks: bool,
}

impl Variant {
    /// The largest form for this shape that fits a block's shared memory.
    pub fn fitting(head_dim: usize, group: usize, shared_memory: usize) -> Result<Self> {
        if !HEAD_DIMS.contains(&head_dim) || group == 0 || group > MAX_GROUP {
            return Err(CudaError::Unsupported(format!(
                "attention with head size {head_dim} and {group} query heads to a KV head: kernels exist \
                 for head sizes 64, 128 and 256 and up to {MAX_GROUP} query heads"
            )));
        }
        let query_tiles = group.div_ceil(8);
        // The results and queries of every warp, the filling one included, must fit the registers.
        let warps = match query_tiles * head_dim {
            0..=128 => 15,
            129..=256 => 7,
            _ => 4,
        };
        let split_query = if head_dim == 128 && group <= 8 { group.div_ceil(4) } else { 0 };
        let mut variant = Self {
            head_dim,
            query_tiles,
            warps,
            stages: *STAGES.end(),
            split_query,
            fused: false,
            sinks: false,
        };
        while variant.shared_bytes() > shared_memory {
            if variant.stages > *STAGES.start() {
                variant.stages -= 1;
            } else if variant.warps > 1 {
                (variant.warps, variant.stages) = (variant.warps / 2, *STAGES.end());
            } else {
                return Err(CudaError::Unsupported(format!(
                    "attention needs {} bytes of shared memory, the GPU has {shared_memory} a block",
                    variant.shared_bytes()
                )));
            }
        }
        // A warp of its own makes each plane of four heads.
        if variant.warps < 4 * variant.split_query {
            variant.split_query = 0;
        }
        Ok(variant)
    }

    /// Bytes of a slot: a two-bit page, half of any other, or one side of a BF16 tile.
    pub(super) fn slot_bytes(&self) -> usize {
        32 * self.head_dim + 512
    }

    /// The form that takes projections instead of queries, if there is one. It needs a warp for
    /// every vector and for every 16 channels, registers for the rotation, and a little more shared
    /// memory.
    pub fn fused(self, shared_memory: usize) -> Option<Self> {
        let variant = Self { fused: true, ..self };
        let takes = !self.sinks && self.query_tiles == 1 && self.head_dim <= 128 && self.warps >= 10;
        (takes && variant.shared_bytes() <= shared_memory).then_some(variant)
    }

    /// Dynamic shared memory; the kernel asserts that its `Shared` fits.
    pub fn shared_bytes(&self) -> usize {
        let Self { head_dim, query_tiles, warps, stages, .. } = *self;
        let (steps, heads, slot) = (head_dim / 16, 8 * query_tiles, self.slot_bytes());
        let slots = warps * stages * (slot + 20);
        // A warp's result goes into a slot if it fits.
        let result = heads * (head_dim + 4) * 4;
        let results = if result <= slot { 16 } else { warps * result };
        let query = query_tiles * steps * (32 * 24 + 32);
        let by_warp = (warps + 3) * (8 + heads * 8 + 104);
        // Vectors in two parts before their rotation, queries after it, a key and a value.
        let new_heads = match self.fused {
            true => 4 * 9 * (head_dim + 8) + 32 * (head_dim + 4) + 4 * head_dim + 32,
            false => 0,
        };
        // The last number: page addresses of 32 KV heads, and single values.
        (slots + results + query + by_warp + new_heads + heads * 4 + steps * 16 + 1280).next_multiple_of(128)
    }

    pub fn defines(&self) -> Defines {
        let mut defines = vec![
            ("HEAD_DIM", self.head_dim),
            ("QUERY_TILES", self.query_tiles),
            ("WARPS", self.warps),
            ("STAGES", self.stages),
            ("SPLIT_QUERY", self.split_query),
            ("FROM_PROJECTIONS", usize::from(self.fused)),
            ("BLOCKS", 1),
            ("SHARED_BYTES", self.shared_bytes()),
        ];
        defines.extend(self.sinks.then_some(("SINKS", 1)));
        defines
    }

    /// Every variant that a GPU with this much shared memory per block may need.
    pub fn all(shared_memory: usize) -> impl Iterator<Item = Self> {
        HEAD_DIMS.into_iter().flat_map(move |d| {
            let fitting = move |g| Self::fitting(d, g, shared_memory).ok();
            let plain = [4, 8, 16].into_iter().filter_map(fitting);
            let sinks = |v| Some(Self { sinks: true, ..v });
            plain.flat_map(move |v| [Some(v), v.fused(shared_memory), sinks(v)].into_iter().flatten())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_has_a_variant_on_every_supported_gpu() {
        // Shared memory of a block on sm_80, sm_89 and sm_90.
        for shared in [163 << 10, 99 << 10, 227 << 10] {
            for d in HEAD_DIMS {
                for group in 1..=MAX_GROUP {
                    let v = Variant::fitting(d, group, shared).unwrap();
                    assert!(
                        v.shared_bytes() <= shared && v.query_tiles * 8 >= group && v.warps >= 2,
                        "{v:?}"
                    );
                }
            }
        }
        let tuned = Variant::fitting(128, 4, 227 << 10).unwrap();
        assert_eq!((tuned.warps, tuned.stages, tuned.split_query), (15, 3, 1));
    }

    #[test]
    fn shapes_without_a_kernel_say_which_exist() {
        for (d, group) in [(96, 4), (128, 17), (128, 0)] {
            let error = Variant::fitting(d, group, 227 << 10).unwrap_err().to_string();
            assert!(error.contains("64, 128 and 256"), "{error}");
        }
        assert!(Variant::fitting(256, 16, 8 << 10).unwrap_err().to_string().contains("shared memory"));
    }
}
