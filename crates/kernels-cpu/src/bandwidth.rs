//! How fast this machine can read memory: the yardstick for kernels that are bound by it.

use std::hint::black_box;

use crate::bench::time_median;
use crate::buffer::Buffer;
use crate::kernels::Kernels;
use crate::pool::ThreadPool;

/// ORs all words of a slice: each is read once and nothing is written.
pub(crate) type ReadKernel = unsafe fn(&[u32]) -> u32;

/// Words one task reads: large enough to stream, small enough to balance.
const TASK_WORDS: usize = 1 << 20;
/// Words in flight: eight of the widest vectors.
const LANES: usize = 128;

#[inline(always)]
fn or_all(words: &[u32]) -> u32 {
    let mut lanes = [0_u32; LANES];
    let (chunks, rest) = words.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] |= chunk[lane];
        }
    }
    lanes.iter().chain(rest).fold(0, |all, word| all | word)
}

pub(crate) mod scalar {
    pub(crate) fn read(words: &[u32]) -> u32 {
        super::or_all(words)
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    #[target_feature(enable = "avx2")]
    pub(crate) fn read(words: &[u32]) -> u32 {
        super::or_all(words)
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512 {
    use std::arch::x86_64::*;

    /// Written out: compilers prefer 256-bit vectors here.
    #[target_feature(enable = "avx512f")]
    pub(crate) fn read(words: &[u32]) -> u32 {
        let mut lanes = [_mm512_setzero_si512(); 8];
        let (chunks, rest) = words.as_chunks::<{ super::LANES }>();
        for chunk in chunks {
            for (i, lane) in lanes.iter_mut().enumerate() {
                // SAFETY: the chunk holds eight vectors; the prefetch past its end reads nothing.
                let vector = unsafe {
                    let at = chunk.as_ptr().add(16 * i);
                    _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(1024).cast());
                    _mm512_loadu_si512(at.cast())
                };
                *lane = _mm512_or_si512(*lane, vector);
            }
        }
        let all = lanes.into_iter().fold(_mm512_setzero_si512(), |all, lane| _mm512_or_si512(all, lane));
        rest.iter().fold(_mm512_reduce_or_epi32(all).cast_unsigned(), |all, word| all | word)
    }
}

/// The best rate, in GB/s, at which the pool's threads read a buffer of `bytes` bytes, out of
/// `repetitions` readings (at least one). Choose the buffer well beyond the last-level cache, 256
/// MB or more.
pub fn read_ceiling(kernels: &Kernels, pool: &ThreadPool, bytes: usize, repetitions: usize) -> f64 {
    let mut buffer = Buffer::zeroed((bytes / 4).max(1));
    // Zeroed pages of a fresh allocation may all be one page; written ones are memory.
    pool.run_chunks(buffer.words_mut(), TASK_WORDS, |_, words| words.fill(0x5a5a_5a5a));
    let words = buffer.words();
    let read = || {
        pool.run(words.len().div_ceil(TASK_WORDS), &|task| {
            let start = task * TASK_WORDS;
            let part = &words[start..words.len().min(start + TASK_WORDS)];
            // SAFETY: `Kernels` exist only for variants this processor can run.
            black_box(unsafe { (kernels.read)(part) });
        });
    };
    let timing = time_median(1, repetitions, read);
    buffer.bytes() as f64 / timing.min.as_secs_f64().max(1e-12) / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Variant;
    use crate::kernels::testing::kernels_or_note;

    #[test]
    fn ceiling_is_a_positive_number_for_any_size() {
        let pool = ThreadPool::new(2).unwrap();
        for variant in Variant::available() {
            let kernels = Kernels::for_variant(variant).unwrap();
            for bytes in [0, 12, 9 << 20] {
                let rate = read_ceiling(kernels, &pool, bytes, 2);
                assert!(rate.is_finite() && rate > 0.0, "{variant}: {rate}");
            }
        }
    }

    fn check_reads_every_word(variant: Variant) {
        let Some(kernels) = kernels_or_note(variant) else { return };
        for len in [1, 15, 127, 128, 129, 300] {
            for position in 0..len {
                let mut words = vec![0_u32; len];
                words[position] = 1 << (position % 32);
                // SAFETY: the variant is available.
                assert_eq!(unsafe { (kernels.read)(&words) }, 1 << (position % 32));
            }
        }
    }

    #[test]
    fn scalar_reads_every_word() {
        check_reads_every_word(Variant::Scalar);
    }

    #[test]
    fn avx2_reads_every_word() {
        check_reads_every_word(Variant::Avx2);
    }

    #[test]
    fn avx512_reads_every_word() {
        check_reads_every_word(Variant::Avx512);
    }
}
