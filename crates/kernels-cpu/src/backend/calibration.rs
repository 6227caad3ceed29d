//! Recoded history and compared predictions, for calibration.

use super::pages::HeadPages;
use super::{CpuBackend, CpuPages, CpuRows, CpuStep, shape_error};
use crate::attention;
use crate::ops::exp::exp;
use oscar_backend::{Calibrates, Divergence, Result, argmax};
use oscar_codec::format::default_clip;
use oscar_codec::{FullPageId, PAGE_TOKENS, RowPageCodec, Side};
use std::ops::Range;

impl Calibrates for CpuBackend {
    fn recode(
        &self,
        layer: usize,
        positions: Range<usize>,
        from: &[Option<FullPageId>],
        to: &[Option<FullPageId>],
        widths: &[(u32, u32)],
        pool: &mut CpuPages,
    ) -> Result<()> {
        let (layout, full, _) = pool.layer_mut(layer);
        let Some(table) = layout.coded() else {
            return Err(shape_error("history to recode", "the cache has no coded table"));
        };
        if widths.len() != layout.kv_heads() {
            let detail = format!("widths of {} heads for {}", widths.len(), layout.kv_heads());
            return Err(shape_error("history to recode", detail));
        }
        let held = |pages: &[Option<FullPageId>], block: usize| {
            let id = pages.get(block).copied().flatten();
            id.ok_or_else(|| shape_error("history to recode", format!("block {block} has no full page")))
        };
        let blocks = positions.start / PAGE_TOKENS..positions.end.div_ceil(PAGE_TOKENS);
        let pages = blocks
            .map(|block| Ok((block, held(from, block)?.0, held(to, block)?.0)))
            .collect::<Result<Vec<_>>>()?;
        let mut heads: Vec<(usize, &mut HeadPages)> = full.iter_mut().enumerate().collect();
        self.pool.run_chunks(&mut heads, 1, |_, head| {
            let (head, region) = &mut head[0];
            let codecs = (layout.full().codec(layer, *head), table.codec(layer, *head));
            for &(block, from, to) in &pages {
                let page = region.page(from).to_vec();
                region.page_mut(to).copy_from_slice(&page);
                let start = (block * PAGE_TOKENS).max(positions.start) - block * PAGE_TOKENS;
                let end = ((block + 1) * PAGE_TOKENS).min(positions.end) - block * PAGE_TOKENS;
                recode_page(codecs, widths[*head], start..end, &page, region.page_mut(to));
            }
        });
        Ok(())
    }

    fn divergences(
        &self,
        _step: &mut CpuStep<'_>,
        exact: &CpuRows,
        other: &CpuRows,
        out: &mut Vec<Divergence>,
    ) -> Result<()> {
        let (width, count) = (exact.width(), exact.count());
        if other.width() != width || count == 0 || !other.count().is_multiple_of(count) {
            let detail = format!("{} rows of {} beside {count} of {width}", other.count(), other.width());
            return Err(shape_error("rows to compare", detail));
        }
        let first = out.len();
        out.resize(first + other.count(), Divergence::default());
        self.pool.run_chunks(&mut out[first..], 1, |row, found| {
            let exact = &exact.values()[row % count * width..][..width];
            found[0] = divergence(exact, &other.values()[row * width..][..width]);
        });
        Ok(())
    }
}

/// Replaces rows of a page by those that their codes dequantize to. `codecs` are those of full and
/// of quantized pages.
fn recode_page(
    codecs: (&RowPageCodec, &RowPageCodec),
    widths: (u32, u32),
    tokens: Range<usize>,
    from: &[u8],
    to: &mut [u8],
) {
    let (full, coded) = codecs;
    let d = full.head_dim();
    if widths == (0, 0) {
        return;
    }
    let mut codes = vec![0; d];
    let (mut keys, mut values) = (vec![0.0; d], vec![0.0; d]);
    for token in tokens {
        for (side, bits, row) in [(Side::Key, widths.0, &mut keys), (Side::Value, widths.1, &mut values)] {
            full.dequantize_row(side, from, token, row);
            if bits > 0 {
                coded.rounding(side).recode(row, default_clip(side, bits), bits, &mut codes);
            }
        }
        attention::append_rows(full, to, token, &keys, &values).expect("pages have their codec's sizes");
    }
}

/// [`Divergence::between`] in f32, in loops that become vector code.
fn divergence(exact: &[f32], other: &[f32]) -> Divergence {
    const LANES: usize = 16;
    let largest = exact.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut weights = exact.to_vec();
    let (mut totals, mut means) = ([0.0f32; LANES], [0.0f32; LANES]);
    for ((weights, exact), other) in
        weights.chunks_mut(LANES).zip(exact.chunks(LANES)).zip(other.chunks(LANES))
    {
        for (lane, weight) in weights.iter_mut().enumerate() {
            *weight = exp(*weight - largest);
            totals[lane] += *weight;
            means[lane] += *weight * (exact[lane] - other[lane]);
        }
    }
    let total: f32 = totals.iter().sum();
    let mean = means.iter().sum::<f32>() / total;
    let mut sums = [0.0f32; LANES];
    for ((weights, exact), other) in weights.chunks(LANES).zip(exact.chunks(LANES)).zip(other.chunks(LANES)) {
        for (lane, weight) in weights.iter().enumerate() {
            let y = exact[lane] - other[lane] - mean;
            let series = y * y * (0.5 - y * (1.0 / 6.0 - y / 24.0));
            let whole = exp((-y).min(MOST_DIFFERENCE)) - 1.0 + y;
            sums[lane] += weight * if y.abs() < 0.05 { series } else { whole };
        }
    }
    let kl = f64::from(sums.iter().sum::<f32>() / total).max(0.0).ln_1p();
    Divergence { kl, agrees: argmax(exact) == argmax(other) }
}

/// Larger differences of logits would overflow.
const MOST_DIFFERENCE: f32 = 80.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_matches_scalar() {
        for (count, scale) in [(1, 1.0f32), (15, 0.001), (6144, 0.01), (6144, 1.0), (1000, 10.0)] {
            let noise = |i: usize| ((i * 7919 % 10_007) as f32 / 5003.5 - 1.0) * scale;
            let a: Vec<f32> = (0..count).map(|i| (i * 131 % 997) as f32 / 60.0).collect();
            let b: Vec<f32> = a.iter().enumerate().map(|(i, x)| x + noise(i)).collect();
            let (found, wanted) = (divergence(&a, &b), Divergence::between(&a, &b));
            assert!((found.kl - wanted.kl).abs() <= 1e-4 * wanted.kl + 1e-9, "{found:?} {wanted:?}");
            assert_eq!(found.agrees, wanted.agrees);
        }
    }
}
