//! Sums of sketches on AVX-512: the values of the signs of a TurboQuant residual, for all tokens of
//! a page.
//!
//! A sketch dequantizes to `Σ ± direction` over as many directions as there are channels.
//! Directions are taken four at a time from a table of their sixteen sums, sixteen channels of it
//! at a time: that part (32 KiB for a head of 128) stays in the nearest cache while all tokens read
//! it. The sums differ from the specification's by the rounding of another order.

use std::arch::x86_64::*;
use std::sync::OnceLock;

use oscar_codec::PAGE_TOKENS;
use oscar_codec::turboquant::Instance;

use crate::attention::block::{LANES, MAX_DIM};

/// Tokens summed at a time: enough chains to hide the latency of an addition.
const TOKENS: usize = 8;

/// Sixteen channels on a cache line of their own.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Slab([f32; LANES]);

/// Sums of four directions by the four signs.
type Four = [Slab; 16];

/// The table of one size of sketch.
pub(in crate::attention) struct SketchSums {
    fours: usize,
    /// `[sixteen channels][four directions]`.
    sums: Vec<Four>,
}

impl SketchSums {
    /// The table for an instance's sketch, made once for each size: matrices of a size are the same
    /// everywhere.
    pub(in crate::attention) fn of(instance: &Instance) -> Option<&'static Self> {
        static TABLES: [OnceLock<SketchSums>; MAX_DIM / 8 + 1] = [const { OnceLock::new() }; MAX_DIM / 8 + 1];
        let (matrix, channels) = (instance.sketch.as_deref()?, instance.channels);
        Some(TABLES[channels / 8].get_or_init(|| Self::new(matrix, channels)))
    }

    fn new(matrix: &[f32], channels: usize) -> Self {
        let fours = channels / 4;
        // Rows are dequantized 32 channels at a time.
        let slabs = 2 * channels.div_ceil(2 * LANES);
        let mut sums = vec![[Slab([0.0; LANES]); 16]; slabs * fours];
        for (i, table) in sums.iter_mut().enumerate() {
            let (slab, four) = (i / fours, i % fours);
            for (bit, direction) in matrix.chunks_exact(channels).skip(4 * four).take(4).enumerate() {
                for (signs, sums) in table.iter_mut().enumerate() {
                    let sign = if signs >> bit & 1 == 1 { 1.0 } else { -1.0 };
                    let part = direction.get(slab * LANES..).unwrap_or_default();
                    sums.0.iter_mut().zip(part).for_each(|(sum, g)| *sum += sign * g);
                }
            }
        }
        Self { fours, sums }
    }

    /// Floats from one token's sums to the next's.
    pub(in crate::attention) fn stride(&self) -> usize {
        self.sums.len() / self.fours * LANES
    }

    /// The sums of a page's tokens, given each one's signs.
    #[target_feature(enable = "avx512f")]
    pub(in crate::attention) fn of_page<'a>(&self, signs: impl Fn(usize) -> &'a [u8], out: &mut Vec<f32>) {
        let stride = self.stride();
        out.resize(PAGE_TOKENS * stride, 0.0);
        let mut nibbles = [[0u32; PAGE_TOKENS]; MAX_DIM / 4];
        for token in 0..PAGE_TOKENS {
            for (two, &byte) in nibbles.as_chunks_mut::<2>().0.iter_mut().zip(signs(token)) {
                two[0][token] = u32::from(byte & 15);
                two[1][token] = u32::from(byte >> 4);
            }
        }
        for (slab, table) in self.sums.chunks_exact(self.fours).enumerate() {
            for token in (0..PAGE_TOKENS).step_by(TOKENS) {
                let mut sums = [_mm512_setzero_ps(); TOKENS];
                for (table, nibbles) in table.iter().zip(&nibbles) {
                    for (i, sum) in sums.iter_mut().enumerate() {
                        let part = &table[nibbles[token + i] as usize & 15].0;
                        // SAFETY: sixteen floats.
                        *sum = _mm512_add_ps(*sum, unsafe { _mm512_loadu_ps(part.as_ptr()) });
                    }
                }
                for (i, sum) in sums.into_iter().enumerate() {
                    let out = &mut out[(token + i) * stride + slab * LANES..][..LANES];
                    // SAFETY: room for sixteen floats.
                    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sum) };
                }
            }
        }
    }
}
