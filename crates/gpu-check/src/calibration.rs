//! Operations of calibration: recoded history and compared predictions.

use crate::growing::{Inspected, Pattern};
use crate::{Extent, Numbers, Report, upload, without_cache};
use anyhow::Result;
use half::bf16;
use oscar_backend::{CacheHead, Calibrates, Divergence, HeadShape};
use oscar_codec::format::default_clip;
use oscar_codec::{
    CacheLayout, CodeLayout, Composition, Feedback, FormatTable, FullPageId, KvFormat, PAGE_TOKENS, Rounding,
    Side, Windows,
};

/// Rows of logits against the scalar definition.
pub fn check_divergence<B: Calibrates>(gpu: &B, extent: Extent, report: &mut Report) -> Result<()> {
    let mut numbers = Numbers::new(77);
    for width in [1, 31, 1000, 6144, 151_936].into_iter().filter(|&width| extent.fits(width, 4096)) {
        for scale in [0.01, 1.0, 8.0] {
            let (exact, readings) = (3, 2);
            let round = |x: f32| bf16::from_f32(x).to_f32();
            let a: Vec<f32> = numbers.vector(exact * width).iter().map(|x| round(x * 12.0)).collect();
            let b: Vec<f32> =
                (0..readings * a.len()).map(|i| round(a[i % a.len()] + scale * numbers.unit())).collect();
            let (rows, others) = (upload(gpu, &a, width)?, upload(gpu, &b, width)?);
            let mut found = Vec::new();
            without_cache(gpu, |step| Ok(gpu.divergences(step, &rows, &others, &mut found)?))?;
            report.case("divergences that came", found.len().abs_diff(exact * readings) as f64, 0.0, || {
                format!("{} rows of {width}", found.len())
            });
            for (i, found) in found.iter().enumerate() {
                let at = |x: &[f32], row: usize| x[row * width..][..width].to_vec();
                let expected = Divergence::between(&at(&a, i % exact), &at(&b, i));
                let difference = (found.kl - expected.kl).abs() / (expected.kl + 1e-6);
                report.case("divergence of rows", difference, 1e-3, || {
                    format!("{found:?} instead of {expected:?}, width {width}, scale {scale}")
                });
                let differs = f64::from(u8::from(found.agrees != expected.agrees));
                report.case("divergence, most likely token", differs, 0.0, || format!("row {i} of {width}"));
            }
        }
    }
    Ok(())
}

/// Recoded pages against the codec, bit for bit.
pub fn check_recode<B: Calibrates>(gpu: &B, extent: Extent, report: &mut Report) -> Result<()>
where
    B::Pool: Inspected,
{
    let mut numbers = Numbers::new(78);
    for d in [64, 128, 256] {
        let falling: Vec<f32> = (0..d).map(|i| 0.9f32.powi(i as i32)).collect();
        let feedback = Feedback::of_spectrum(&falling, Composition::RHPbr)?;
        let roundings = [
            Rounding::default(),
            Rounding { unbiased: true, feedback: feedback.clone() },
            Rounding { unbiased: true, feedback: None },
        ];
        for (case, rounding) in roundings.into_iter().enumerate() {
            for pattern in Pattern::ALL {
                if !extent.takes(numbers.below(1 << 20) as u64) {
                    continue;
                }
                let widths = [(1, 2), (3, 4), (0, 8), (8, 0)];
                recode_pages(gpu, d, &rounding, pattern, &widths, &mut numbers, report, case)?;
            }
        }
    }
    Ok(())
}

#[expect(clippy::too_many_arguments, reason = "one case of a check")]
fn recode_pages<B: Calibrates>(
    gpu: &B,
    d: usize,
    rounding: &Rounding,
    pattern: Pattern,
    widths: &[(u32, u32)],
    numbers: &mut Numbers,
    report: &mut Report,
    case: usize,
) -> Result<()>
where
    B::Pool: Inspected,
{
    let kv_heads = widths.len();
    let heads = HeadShape { query_heads: kv_heads, kv_heads, head_dim: d, rms_norm_eps: 1e-6, scale: 1.0 };
    let order = CodeLayout::Logical;
    let table = FormatTable::from_widths(2, kv_heads, d, &vec![(2, 2); 2 * kv_heads], order)?
        .with_roundings(vec![rounding.clone(); 2 * kv_heads])?;
    let layout = CacheLayout::new(KvFormat::OSCAR, 2, kv_heads, d, Windows::unlimited(), order)?;
    let layout = gpu.held_layout(&layout.with_coded_table(table));
    let mut pool = gpu.pool(&layout, &heads, 8 * layout.full_block_bytes())?;
    let (layer, first, end) = (1, 48, 2 * PAGE_TOKENS + 16);
    let (from, to) = (
        [Some(FullPageId(1)), Some(FullPageId(3)), Some(FullPageId(0))],
        [4, 2, 5].map(|id| Some(FullPageId(id))),
    );
    let nothing = vec![(0, 0); kv_heads];
    // Gives the pages memory.
    gpu.recode(layer, first..end, &from, &to, &nothing, &mut pool)?;
    let mut rows = Vec::new();
    for head in 0..kv_heads {
        let codec = layout.full().codec(layer, head);
        for id in from.iter().flatten() {
            let keys: Vec<f32> = (0..PAGE_TOKENS).flat_map(|_| pattern.row(numbers, d)).collect();
            let values: Vec<f32> = (0..PAGE_TOKENS).flat_map(|_| pattern.row(numbers, d)).collect();
            let mut page = vec![0; codec.page_bytes()];
            codec.quantize(&keys, &values, &mut page)?;
            pool.set_full_page(CacheHead { layer, kv_head: head }, *id, &page)?;
            rows.push((keys, values));
        }
    }
    gpu.recode(layer, first..end, &from, &to, widths, &mut pool)?;
    for (head, &width) in widths.iter().enumerate() {
        let codec = layout.full().codec(layer, head);
        for (block, id) in to.iter().flatten().enumerate() {
            let page = pool.full_page(CacheHead { layer, kv_head: head }, *id)?;
            let (keys, values) = &rows[head * from.len() + block];
            for (side, bits, rows) in [(Side::Key, width.0, keys), (Side::Value, width.1, values)] {
                let rounding = if side == Side::Key { rounding.clone() } else { rounding.of_values() };
                for (token, row) in rows.chunks_exact(d).enumerate() {
                    let mut expected = row.to_vec();
                    let position = block * PAGE_TOKENS + token;
                    if bits > 0 && (first..end).contains(&position) {
                        rounding.recode(&mut expected, default_clip(side, bits), bits, &mut vec![0; d]);
                    }
                    let mut found = vec![0.0; d];
                    codec.dequantize_row(side, &page, token, &mut found);
                    let differs =
                        |(a, b): &(&f32, &f32)| a.to_bits() != bf16::from_f32(**b).to_f32().to_bits();
                    let count = found.iter().zip(&expected).filter(differs).count();
                    report.case("recoded rows", count as f64, 0.0, || {
                        format!("{pattern:?}, {bits} bits, {side:?}, heads of {d}, rounding {case}, position {position}")
                    });
                }
            }
        }
    }
    Ok(())
}
