//! Checks of attention after an approximate prefix hit: the first queries read codes where the windows
//! alone would say BF16.

use crate::growing::{Checks, Compared, Growing, Inspected, Pattern};
use crate::{Extent, Report};
use anyhow::{Context, Result, ensure};
use oscar_backend::{Backend, SequenceRows};
use oscar_cache::{RadixCache, SequencePages};
use oscar_codec::{CacheLayout, CodeLayout, FormatTable, KvFormat, Windows};

const CHECKS: Checks = Checks {
    history: "approximate hit, codes",
    decode: "approximate hit, decode attention",
    prefill: "approximate hit, prefill attention",
    // As for any codes: see `cache`.
    allowed: 1.0 / 128.0,
    e4m3_bits: 0,
    compared: Compared::EVERYTHING,
};

pub fn check<B: Backend<Pool: Inspected>>(
    gpu: &B,
    e4m3_bits: u32,
    extent: Extent,
    report: &mut Report,
) -> Result<()> {
    let mut seed = 700;
    for head_dim in [64, 128, 256] {
        for widths in [(2, 2), (3, 1), (4, 4)] {
            for (sink, recent, stored) in [(16, 200, 780), (64, 256, 960), (0, 128, 460)] {
                for first in [1, 40, 150] {
                    seed += 1;
                    if !extent.takes(seed) {
                        continue;
                    }
                    let what = format!(
                        "head {head_dim}, widths {widths:?}, sink {sink} recent {recent}, {stored} tokens stored, then {first}"
                    );
                    let windows = Windows::new(sink, recent)?;
                    let checks = Checks { e4m3_bits, ..CHECKS };
                    let outcome =
                        resume(gpu, checks, head_dim, widths, windows, stored, first, seed, &what, report);
                    if let Err(error) = outcome {
                        report.case("approximate hit, steps run", f64::INFINITY, 0.0, || {
                            format!("{what}: {error:#}")
                        });
                    }
                }
            }
        }
    }
    Ok(())
}

fn resume<B: Backend<Pool: Inspected>>(
    gpu: &B,
    checks: Checks,
    head_dim: usize,
    widths: (u32, u32),
    windows: Windows,
    stored: usize,
    first: usize,
    seed: u64,
    what: &str,
    report: &mut Report,
) -> Result<()> {
    let (kv_heads, order) = (2, CodeLayout::GpuTile);
    let layout = CacheLayout::new(KvFormat::OSCAR2, 1, kv_heads, head_dim, windows, order)?;
    let table = FormatTable::from_widths(1, kv_heads, head_dim, &[widths, (2, 2)], order)?;
    let layout = layout.with_coded_table(table);
    if !gpu.reads_codes_in_window(&layout) {
        report.case("approximate hit, not on this GPU", 0.0, 0.0, String::new);
        return Ok(());
    }
    let scale = 1.0 / (head_dim as f32).sqrt();
    let total = stored + first + 400;
    let mut growing = Growing::new(gpu, layout, 4, scale, 1, total, seed, checks, what.to_owned())?;
    growing.pages[0] = SequencePages::resumable();
    growing.step(&[stored], Pattern::Plain, report)?;

    let length = lose_tail(&mut growing, stored)?;
    let pages = &growing.pages[0];
    let probe = SequenceRows {
        rows: 0..0,
        first_position: length,
        full: pages.full(),
        coded: pages.coded(),
        sliding: &[],
        demote: 0..0,
        demote_values: 0..0,
        view: None,
        states: None,
    };
    let beyond = probe.coded_until() > windows.boundary(length);
    report.case("approximate hit, read beyond the windows", f64::from(u8::from(!beyond)), 0.0, || {
        what.to_owned()
    });
    // One token, some or many, then single ones until the windows have caught up and beyond.
    for rows in [first, 1, 1, 130, 1, 64, 1] {
        growing.step(&[rows], Pattern::Plain, report).with_context(|| format!("{rows} rows more"))?;
    }
    Ok(())
}

/// The first sequence, of `stored` tokens, ends and begins anew from a prefix that has lost its tail.
/// Returns the length of that prefix.
pub fn lose_tail<B: Backend<Pool: Inspected>>(growing: &mut Growing<'_, B>, stored: usize) -> Result<usize> {
    let tokens: Vec<u32> = (0..stored as u32).collect();
    let mut tree = RadixCache::with_approximate_hits(growing.layout.clone());
    tree.insert(&tokens, &mut growing.pages[0]);
    growing.pages[0] = SequencePages::new();
    // The prefix is idle now.
    while tree.find(&tokens).is_exact() {
        ensure!(tree.reclaim(1).bytes > 0, "no approximate hit before the whole prefix is gone");
    }
    let prefix = tree.find(&tokens);
    let (length, head_dim) = (prefix.len(), growing.layout.head_dim());
    growing.pages[0] = SequencePages::resume(&growing.layout, prefix);
    growing.twins[0].iter_mut().for_each(|twin| twin.truncate(length, head_dim));
    Ok(length)
}
