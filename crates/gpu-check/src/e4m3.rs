//! Attention with E4M3 keys, as prefill on Hopper computes it for codes of few bits, in f64: each
//! page of keys and each query is multiplied by a power of two, then rounded. The power brings the
//! largest magnitude to 128 .. 256.

use crate::growing::HeadTwin;
use half::f16;
use oscar_backend::SequenceRows;
use oscar_codec::{PAGE_TOKENS, RowPageCodec, Side, Windows, fp8};
use std::ops::Range;

/// One head's keys and values.
pub struct RoundedKeys<'a> {
    twin: &'a HeadTwin,
    /// First position that the kernel takes.
    first: usize,
    windows: &'a Windows,
    /// Positions that have codes, and their rounded keys.
    coded: Range<usize>,
    keys: Vec<f32>,
    head_dim: usize,
}

impl<'a> RoundedKeys<'a> {
    /// The keys that the rows of a step read as codes, if they have at most `bits` bits and the kernel
    /// rounds such heads.
    pub fn of(
        codec: Option<&RowPageCodec>,
        twin: &'a HeadTwin,
        rows: &SequenceRows<'_>,
        windows: &'a Windows,
        bits: u32,
    ) -> Option<Self> {
        let codec = codec.filter(|codec| codec.keeps_history())?;
        let (d, width) = (codec.head_dim(), codec.spec(Side::Key).bits);
        // After an approximate hit, rows that read codes within their windows go to the decode kernel.
        let positions = rows.first_position..rows.first_position + rows.rows.len();
        let first = positions.clone().find(|&t| windows.boundary(t) >= rows.coded_until())?;
        if width > bits || d < 128 || positions.end - first < 2 {
            return None;
        }
        let coded = windows.sink()..windows.boundary(positions.end - 1);
        let params = |position: usize| {
            let page = &twin.coded_pages[&(position / PAGE_TOKENS)];
            codec.group_params(Side::Key, page, position % PAGE_TOKENS, 0)
        };
        let mut keys = Vec::new();
        for position in coded.clone() {
            let (block, token) = (position / PAGE_TOKENS, position % PAGE_TOKENS);
            let of_page = block * PAGE_TOKENS..(block + 1) * PAGE_TOKENS;
            let of_page = of_page.start.max(coded.start)..of_page.end.min(coded.end);
            let top = ((1 << width) - 1) as f32;
            let most = of_page
                .map(params)
                .fold(0f32, |most, p| most.max(p.offset.abs()).max(p.scale.mul_add(top, p.offset).abs()));
            let power = 2f32.powi((134 - (most.to_bits() >> 23) as i32).clamp(-14, 15));
            let times = |x: f32| f64::from(f16::from_f32(x * power));
            let p = params(position);
            keys.extend((0..d).map(|c| {
                let code = codec.code(Side::Key, &twin.coded_pages[&block], token, c);
                let key = f16::from_f64(f64::from(code) * times(p.scale) + times(p.offset));
                fp8::dequantize(fp8::quantize(key.to_f32())) / power
            }));
        }
        Some(Self { twin, first, windows, coded, keys, head_dim: d })
    }

    /// Whether the query at `t` reads these keys.
    pub fn serve(&self, t: usize) -> bool {
        t >= self.first
    }

    /// Attention of the query at `t` with the sink of its head, and how far the kernel's weighted means may be off because of its
    /// scores: tensor cores add E4M3 products with about 13 bits, and a mean moves by twice the error of
    /// its scores.
    pub fn attend(&self, query: &[f32], scale: f32, t: usize, sink: Option<f32>) -> (Vec<f64>, f64) {
        let (d, boundary) = (self.head_dim, self.windows.boundary(t));
        let most = query.iter().fold(0f32, |most, q| most.max(q.abs()));
        let power = 2f32.powi(134 - (most.to_bits() >> 23).max(64) as i32);
        let rounded: Vec<f32> =
            query.iter().map(|q| fp8::dequantize(fp8::quantize(q * power)) / power).collect();
        let dot = |a: &[f32], b: &[f32]| -> f64 {
            a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() * f64::from(scale)
        };
        let rows: Vec<(f64, &[f32])> = (0..=t)
            .map(|j| match self.coded.contains(&j) && j < boundary {
                true => {
                    let key = &self.keys[(j - self.coded.start) * d..][..d];
                    (dot(&rounded, key), &self.twin.coded_values[j * d..][..d])
                }
                false => (dot(query, &self.twin.keys[j * d..][..d]), &self.twin.values[j * d..][..d]),
            })
            .collect();
        let sink = sink.map_or(f64::NEG_INFINITY, f64::from);
        let largest = rows.iter().map(|row| row.0).fold(sink, f64::max);
        let most = rows.iter().map(|row| row.0.abs()).fold(0.0, f64::max);
        let total = rows.iter().map(|row| (row.0 - largest).exp()).sum::<f64>() + (sink - largest).exp();
        let mean = |c: usize| {
            rows.iter().map(|(score, value)| (score - largest).exp() * f64::from(value[c])).sum::<f64>()
                / total
        };
        ((0..d).map(mean).collect(), 2.0 * most * 2f64.powi(-11))
    }
}
