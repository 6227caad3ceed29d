//! Checks of formats without kernels: their history is dequantized on the CPU and kept on the GPU
//! in BF16, bit for bit. Attention reads each side of each position by the format's own windows.

use crate::growing::{Checks, Compared, Growing, Inspected, Pattern};
use crate::{Extent, Report};
use anyhow::{Context, Result};
use oscar_backend::Backend;
use oscar_codec::{CacheLayout, CodeLayout, KvFormat};
use oscar_kernels_cuda::Storage;

/// One of each kind of codec and of windows.
const FORMATS: [&str; 11] = [
    "int8",
    "int4-g32",
    "quarot2",
    "kivi2-g32",
    "kivi2",
    "kitty",
    "turboquant3",
    "turboquant2.5-prod",
    "fp8",
    "oscar2-official",
    "oscar2-lloyd",
];

const CHECKS: Checks = Checks {
    history: "dequantized formats, history",
    decode: "dequantized formats, decode attention",
    prefill: "dequantized formats, prefill attention",
    // Everything but the rows is f32. Outliers make scores of hundreds; their last bits move
    // weights.
    allowed: 5e-4,
    e4m3_bits: 0,
    compared: Compared::EVERYTHING,
};

pub fn check<B: Backend<Pool: Inspected>>(gpu: &B, extent: Extent, report: &mut Report) -> Result<()> {
    let mut seed = 900;
    for name in FORMATS {
        let format: KvFormat = name.parse()?;
        for (head_dim, kv_heads, group) in [(64, 2, 4), (128, 1, 3), (256, 1, 1)] {
            for pattern in [Pattern::Plain, Pattern::Outliers] {
                seed += 1;
                if !extent.takes(seed) {
                    continue;
                }
                let what =
                    format!("{name}, head {head_dim}, {kv_heads} KV heads, group {group}, {pattern:?}");
                let outcome = grow(gpu, format, (head_dim, kv_heads, group), pattern, seed, &what, report);
                // A case that cannot run counts as a failure; the other cases still run.
                if let Err(error) = outcome.with_context(|| what.clone()) {
                    report.case("dequantized formats run", f64::INFINITY, 0.0, || format!("{error:#}"));
                }
            }
        }
    }
    Ok(())
}

fn grow<B: Backend<Pool: Inspected>>(
    gpu: &B,
    format: KvFormat,
    (head_dim, kv_heads, group): (usize, usize, usize),
    pattern: Pattern,
    seed: u64,
    what: &str,
    report: &mut Report,
) -> Result<()> {
    // Formats with their own windows keep them. The others get narrow ones, so that a short context
    // has history.
    let published = format.windows(None, None)?;
    let windows = if published.sides_agree() { format.windows(Some(16), Some(48))? } else { published };
    let layout = CacheLayout::new(format, 1, kv_heads, head_dim, windows, CodeLayout::GpuTile)?;
    let kept_decoded = Storage::of(&layout)? == Storage::Dequantized;
    report.case("dequantized formats run", f64::from(u8::from(!kept_decoded)), 0.0, || {
        format!("{what}: this format has kernels, so its history is not dequantized")
    });
    let steps = [[150, 1], [1, 200], [1, 1], [130, 70], [1, 1]];
    let total = steps.iter().flatten().sum();
    let scale = 1.0 / (head_dim as f32).sqrt();
    let mut growing = Growing::new(gpu, layout, group, scale, 2, total, seed, CHECKS, what.to_owned())?;
    for rows in steps {
        growing.step(&rows, pattern, report)?;
    }
    Ok(())
}
