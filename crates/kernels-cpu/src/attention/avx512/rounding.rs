//! Query-aware rounding on AVX-512: `oscar_codec::rounding` in the same operations and the same
//! order.
//!
//! Feedback runs through a row channel by channel, so sixteen rows are processed side by side: the
//! errors of a channel are one vector, and each earlier channel takes one product.

use std::arch::x86_64::*;

use oscar_codec::affine::max_code;
use oscar_codec::rounding::{LARGEST_MIN, MOST_GROWTH};
use oscar_codec::{Feedback, TILE_TOKENS};

use super::demote::{Rows, halve, halve_lanes, level};
use crate::attention::block::LANES;

impl Rows {
    /// Levels of all keys, the last channel first: sixteen rows side by side.
    #[target_feature(enable = "avx512f,avx512dq")]
    pub(in crate::attention) fn round_keys(&mut self, d: usize, bits: u32, feedback: Option<&Feedback>) {
        // SAFETY: sixteen floats each.
        let (scale, min) =
            unsafe { (_mm512_loadu_ps(self.scale.as_ptr()), _mm512_loadu_ps(self.min.as_ptr())) };
        let top = max_code(bits) as f32;
        if feedback.is_some() {
            self.x[..LANES * d].copy_from_slice(&self.raw[..LANES * d]);
        }
        for channel in (0..d).rev() {
            let (before, at) = self.x[..LANES * (channel + 1)].split_at_mut(LANES * channel);
            // SAFETY: channels are sixteen floats.
            let error = unsafe {
                let level = level(_mm512_loadu_ps(at.as_ptr()), scale, min, top);
                _mm512_storeu_ps(at.as_mut_ptr(), level);
                let raw = _mm512_loadu_ps(self.raw.as_ptr().add(LANES * channel));
                _mm512_sub_ps(raw, _mm512_add_ps(_mm512_mul_ps(scale, level), min))
            };
            let Some(feedback) = feedback else { continue };
            for (aim, &weight) in before.chunks_exact_mut(LANES).zip(feedback.row(channel)) {
                // SAFETY: sixteen floats.
                unsafe {
                    let moved = _mm512_mul_ps(_mm512_set1_ps(weight), error);
                    _mm512_storeu_ps(aim.as_mut_ptr(), _mm512_add_ps(_mm512_loadu_ps(aim.as_ptr()), moved));
                }
            }
        }
        self.levelled = true;
    }

    /// Levels of all values.
    #[target_feature(enable = "avx512f,avx512dq")]
    pub(in crate::attention) fn round_values(&mut self, d: usize, bits: u32) {
        let top = max_code(bits) as f32;
        for (token, row) in self.x[..LANES * d].chunks_exact_mut(d).enumerate() {
            let (scale, min) = (_mm512_set1_ps(self.scale[token]), _mm512_set1_ps(self.min[token]));
            for slab in row.chunks_exact_mut(LANES) {
                // SAFETY: sixteen floats.
                unsafe {
                    let level = level(_mm512_loadu_ps(slab.as_ptr()), scale, min, top);
                    _mm512_storeu_ps(slab.as_mut_ptr(), level);
                }
            }
        }
        self.levelled = true;
    }

    /// The pairs that make mean and length of each key row exact; false if a row must be left to
    /// the specification.
    #[target_feature(enable = "avx512f,avx512dq,avx512vl,f16c")]
    pub(in crate::attention) fn refit_keys(&mut self, d: usize) -> bool {
        // SAFETY: a channel is sixteen floats.
        let raw = |c: usize| unsafe { _mm512_loadu_ps(self.raw.as_ptr().add(LANES * c)) };
        // SAFETY: likewise.
        let levels = |c: usize| unsafe { _mm512_loadu_ps(self.x.as_ptr().add(LANES * c)) };
        let n = _mm512_set1_ps(d as f32);
        let mut sums = [_mm512_setzero_ps(); LANES];
        // Sums of levels are small integers, exact in any order.
        let mut level = _mm512_setzero_ps();
        for c in 0..d {
            sums[c % LANES] = _mm512_add_ps(sums[c % LANES], raw(c));
            level = _mm512_add_ps(level, levels(c));
        }
        let (mean, level) = (_mm512_div_ps(halve(sums), n), _mm512_div_ps(level, n));
        let (mut own, mut common) = ([_mm512_setzero_ps(); LANES], [_mm512_setzero_ps(); LANES]);
        for c in 0..d {
            let x = _mm512_sub_ps(raw(c), mean);
            let lane = c % LANES;
            own[lane] = _mm512_add_ps(own[lane], _mm512_mul_ps(x, x));
            common[lane] = _mm512_add_ps(common[lane], _mm512_mul_ps(x, _mm512_sub_ps(levels(c), level)));
        }
        let mut rows = [[0.0f32; LANES]; 4];
        for (row, values) in rows.iter_mut().zip([mean, level, halve(own), halve(common)]) {
            // SAFETY: sixteen floats.
            unsafe { _mm512_storeu_ps(row.as_mut_ptr(), values) };
        }
        let [mean, level, own, common] = rows;
        (0..LANES).all(|token| self.refit(token, mean[token], level[token], own[token], common[token]))
    }

    /// The same for value rows.
    #[target_feature(enable = "avx512f,avx512dq,avx512vl,f16c")]
    pub(in crate::attention) fn refit_values(&mut self, d: usize) -> bool {
        (0..TILE_TOKENS).all(|token| {
            let at = token * d;
            // SAFETY: slabs of sixteen floats within the row.
            let raw = |s: usize| unsafe { _mm512_loadu_ps(self.raw.as_ptr().add(at + LANES * s)) };
            // SAFETY: likewise.
            let levels = |s: usize| unsafe { _mm512_loadu_ps(self.x.as_ptr().add(at + LANES * s)) };
            let zero = _mm512_setzero_ps();
            let slabs = d / LANES;
            let mean = halve_lanes((0..slabs).fold(zero, |sum, s| _mm512_add_ps(sum, raw(s)))) / d as f32;
            // Small integers, exact in any order.
            let level = halve_lanes((0..slabs).fold(zero, |sum, s| _mm512_add_ps(sum, levels(s)))) / d as f32;
            let (mut own, mut common) = (zero, zero);
            for s in 0..slabs {
                let x = _mm512_sub_ps(raw(s), _mm512_set1_ps(mean));
                own = _mm512_add_ps(own, _mm512_mul_ps(x, x));
                let distance = _mm512_sub_ps(levels(s), _mm512_set1_ps(level));
                common = _mm512_add_ps(common, _mm512_mul_ps(x, distance));
            }
            self.refit(token, mean, level, halve_lanes(own), halve_lanes(common))
        })
    }

    /// The end of `oscar_codec::rounding`'s unbiased pair; false if the minimum is not a normal
    /// number.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,f16c")]
    fn refit(&mut self, token: usize, mean: f32, level: f32, own: f32, common: f32) -> bool {
        if common > 0.0 {
            let scale = half((own / common).min(self.scale[token] * MOST_GROWTH));
            let min = mean - scale * level;
            if min.abs() <= LARGEST_MIN {
                if !min.is_normal() {
                    return false;
                }
                (self.scale[token], self.min[token]) = (scale, half(min));
            }
        }
        true
    }
}

/// Through fp16 and back.
#[inline]
#[target_feature(enable = "f16c")]
fn half(x: f32) -> f32 {
    let half = _mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm_set_ss(x));
    _mm_cvtss_f32(_mm_cvtph_ps(half))
}
