//! Checks of views: rows gathered bit for bit, rows read back, and attention over what is left, with
//! different numbers of rows in each head.

use crate::growing::{Checks, Compared, Growing, Inspected, Pattern};
use crate::{Extent, Report};
use anyhow::{Context, Result, ensure};
use oscar_backend::{Backend, CacheHead, HeadHistory, RowEviction, SequenceRows};
use oscar_cache::{SequencePages, View, view_end};
use oscar_codec::random::SplitMix64;
use oscar_codec::{CacheLayout, CodeLayout, FormatTable, KvFormat, PAGE_TOKENS, Side, Windows};
use std::sync::Arc;

const LAYERS: usize = 2;

/// What a view keeps of a head's positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    All,
    /// Some, or none, or whole pages: different ones in each head.
    Mixed,
    /// Of each head equally many.
    Even(usize),
}

impl Kept {
    fn of(self, head: usize, positions: &[u32], random: &mut SplitMix64) -> Vec<u32> {
        let count = match self {
            Self::All => positions.len(),
            Self::Even(count) => count,
            Self::Mixed => [0, 1, 64, 65, 127, 30, 200, positions.len()][(head + random.below(8)) % 8],
        };
        let mut left = count.min(positions.len());
        let mut kept = Vec::new();
        for (i, &position) in positions.iter().enumerate() {
            if random.below(positions.len() - i) < left {
                kept.push(position);
                left -= 1;
            }
        }
        kept
    }
}

struct Case {
    head_dim: usize,
    group: usize,
    widths: Vec<(u32, u32)>,
    kept: Kept,
    sequences: usize,
    windows: Windows,
    stored: usize,
}

impl Case {
    fn describe(&self) -> String {
        format!(
            "head {}, group {}, widths {:?}, {:?} of {} tokens, recent {}, {} sequences",
            self.head_dim,
            self.group,
            self.widths,
            self.kept,
            self.stored,
            self.windows.recent(),
            self.sequences
        )
    }

    fn layout(&self) -> Result<CacheLayout> {
        let order = CodeLayout::GpuTile;
        let layout = CacheLayout::new(KvFormat::OSCAR2, LAYERS, 2, self.head_dim, self.windows, order)?;
        let widths: Vec<(u32, u32)> = self.widths.iter().copied().cycle().take(LAYERS * 2).collect();
        Ok(layout.with_coded_table(FormatTable::from_widths(LAYERS, 2, self.head_dim, &widths, order)?))
    }
}

/// Names of the checks of one kind of attention kernels, and the bits up to which it rounds the keys of
/// sequences without a view.
pub fn checks(decode: &'static str, prefill: &'static str, e4m3_bits: u32) -> Checks {
    // As for any codes.
    let compared = Compared::EVERYTHING;
    Checks { history: "views, codes", decode, prefill, allowed: 1.0 / 128.0, compared, e4m3_bits }
}

pub fn check<B: Backend<Pool: Inspected>>(
    gpu: &B,
    checks: Checks,
    extent: Extent,
    report: &mut Report,
) -> Result<()> {
    let mut seed = 900;
    for head_dim in [64, 128, 256] {
        for widths in [vec![(2, 2)], vec![(2, 2), (3, 1), (4, 2)], vec![(1, 4), (0, 0), (2, 2)]] {
            for kept in [Kept::All, Kept::Mixed, Kept::Even(128), Kept::Mixed, Kept::Even(70)] {
                for (sequences, group) in [(1, 4), (3, 1), (2, 8)] {
                    seed += 1;
                    if !extent.takes(seed) {
                        continue;
                    }
                    let (recent, stored) = [(64, 640), (256, 960), (16, 448)][seed as usize % 3];
                    let (widths, windows) = (widths.clone(), Windows::new(64, recent)?);
                    let case = Case { head_dim, group, widths, kept, sequences, windows, stored };
                    if let Err(error) = run(gpu, &case, seed, checks, report) {
                        report.case("views, steps run", f64::INFINITY, 0.0, || {
                            format!("{}: {error:#}", case.describe())
                        });
                    }
                }
            }
        }
    }
    Ok(())
}

/// The rows of a sequence outside of a step.
fn stored(pages: &SequencePages) -> SequenceRows<'_> {
    SequenceRows {
        rows: 0..0,
        first_position: pages.len(),
        full: pages.full(),
        coded: pages.coded(),
        sliding: &[],
        demote: 0..0,
        demote_values: 0..0,
        view: pages.view().map(|view| &**view),
        states: None,
    }
}

fn run<B: Backend<Pool: Inspected>>(
    gpu: &B,
    case: &Case,
    seed: u64,
    checks: Checks,
    report: &mut Report,
) -> Result<()> {
    let (layout, n) = (case.layout()?, case.sequences);
    ensure!(!matches!(gpu.evicts_rows(&layout), RowEviction::Never(_)), "this device has no views");
    let scale = 1.0 / (case.head_dim as f32).sqrt();
    let total = 3 * (case.stored + 512);
    let mut growing = Growing::new(gpu, layout, case.group, scale, n, total, seed, checks, case.describe())?;
    growing.pages.iter_mut().for_each(|pages| *pages = SequencePages::resumable());
    // Other checks compare steps without views.
    growing.checks.compared = Compared::NOTHING;
    growing.step(&vec![case.stored; n], Pattern::Plain, report)?;
    growing.checks.compared = checks.compared;
    let base: Vec<SequencePages> =
        growing.pages.iter().map(|p| fork(&growing, p, None)).collect::<Result<_>>()?;
    let mut random = SplitMix64::new(seed);
    // The last sequence of several keeps its whole history.
    for s in 0..n.max(2) - 1 {
        derive(&mut growing, s, case.kept, &mut random, report)?;
    }
    let steps: [&[usize]; 4] = [&[1, 1, 1], &[3, 1, 70], &[1, 1, 1], &[130, 40, 1]];
    for rows in steps {
        growing.step(&rows[..n], Pattern::Plain, report)?;
    }
    if n == 1 {
        // A view of a view: tokens up to the end of a page, then fewer rows.
        let rest = PAGE_TOKENS - growing.pages[0].len() % PAGE_TOKENS;
        growing.step(&[rest], Pattern::Plain, report)?;
        derive(&mut growing, 0, Kept::Mixed, &mut random, report)?;
        growing.step(&[1], Pattern::Plain, report)?;
        growing.step(&[9], Pattern::Plain, report)?;
    }
    // Rounded keys are not those of a view.
    if case.kept == Kept::All && checks.e4m3_bits == 0 {
        keeps_everything(&mut growing, base, seed, report)?;
    }
    Ok(())
}

pub fn fork<B: Backend<Pool: Inspected>>(
    growing: &Growing<'_, B>,
    pages: &SequencePages,
    view: Option<Arc<View>>,
) -> Result<SequencePages> {
    pages.fork(&growing.layout, pages.len(), view).context("the sequence lacks recent rows")
}

/// Gives a sequence a view of its history, and compares the rows of the view.
pub fn derive<B: Backend<Pool: Inspected>>(
    growing: &mut Growing<'_, B>,
    sequence: usize,
    kept: Kept,
    random: &mut SplitMix64,
    report: &mut Report,
) -> Result<()> {
    let layout = growing.layout.clone();
    let pages = &growing.pages[sequence];
    let (sink, end) = (layout.windows().sink(), view_end(&layout, pages.len()));
    let heads = LAYERS * layout.kv_heads();
    let positions = |head: usize| -> Vec<u32> {
        let old = pages.view().map_or(&[][..], |view| view.kept(head));
        let start = pages.view().map_or(sink, |view| view.end());
        old.iter().copied().chain(start as u32..end as u32).collect()
    };
    let all: Vec<Vec<u32>> = (0..heads).map(positions).collect();
    let kept = all.iter().enumerate().map(|(head, all)| kept.of(head, all, random)).collect();
    let view = Arc::new(View::new(&layout, &growing.page_pool, end, kept)?);
    growing.gpu.gather(&stored(pages), &view, &mut growing.pool)?;
    let derived = fork(growing, pages, Some(view.clone()))?;
    let table = layout.coded().context("codes")?;
    for head in 0..heads {
        let at = CacheHead { layer: head / layout.kv_heads(), kv_head: head % layout.kv_heads() };
        let (codec, twin) = (table.codec(at.layer, at.kv_head), &growing.twins[sequence][head]);
        let whole = HeadHistory::whole(at, end);
        let found = growing.gpu.history(&stored(&derived), whole.clone(), &growing.pool)?;
        let some = HeadHistory { rows: 3..90, values: false, ..whole };
        let part = growing.gpu.history(&stored(&derived), some, &growing.pool)?;
        let d = layout.head_dim();
        let wanted = 3.min(view.kept(head).len())..90.min(view.kept(head).len());
        let differs = part.keys != found.keys[wanted.start * d..wanted.end * d] || !part.values.is_empty();
        report.case("views, some keys read back", f64::from(u8::from(differs)), 0.0, || {
            format!("{at:?}, rows {wanted:?} of {}", view.kept(head).len())
        });
        let rows = |side| view.kept(head).iter().flat_map(move |&p| twin.coded_row(side, p as usize, codec));
        let same = |found: &[f32], side| {
            let expected: Vec<f32> = rows(side).collect();
            found.len() == expected.len()
                && found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits())
        };
        let differs = !same(&found.keys, Side::Key) || !same(&found.values, Side::Value);
        report.case("views, rows read back", f64::from(u8::from(differs)), 0.0, || {
            format!("{at:?}, {} rows of {}", view.kept(head).len(), all[head].len())
        });
        if !codec.keeps_history() {
            continue;
        }
        for (rows, &id) in view.kept(head).chunks(PAGE_TOKENS).zip(view.pages(head)) {
            let Some(page) = growing.pool.history_page(at, id)? else { continue };
            let differing: usize = rows
                .iter()
                .enumerate()
                .map(|(row, &p)| twin.differing_row(codec, p as usize, &page, row))
                .sum();
            report.case("views, gathered codes", differing as f64, 0.0, || {
                format!("{at:?}, page {id}, {} rows", rows.len())
            });
        }
    }
    growing.pages[sequence] = derived;
    Ok(())
}

/// A view of everything gives every bit that its base gives.
fn keeps_everything<B: Backend<Pool: Inspected>>(
    growing: &mut Growing<'_, B>,
    base: Vec<SequencePages>,
    seed: u64,
    report: &mut Report,
) -> Result<()> {
    let length = base[0].len();
    let d = growing.layout.head_dim();
    growing.twins.iter_mut().flatten().for_each(|twin| twin.truncate(length, d));
    let twins = growing.twins.clone();
    let mut found = Vec::new();
    for with_view in [false, true] {
        growing.pages = base.iter().map(|p| fork(growing, p, None)).collect::<Result<_>>()?;
        growing.twins = twins.clone();
        if with_view {
            let mut random = SplitMix64::new(seed);
            (0..growing.pages.len()).try_for_each(|s| derive(growing, s, Kept::All, &mut random, report))?;
        }
        growing.reseed(seed);
        let mut outputs = Vec::new();
        for rows in [1, 70, 1] {
            outputs.extend(growing.step(&vec![rows; base.len()], Pattern::Plain, report)?);
        }
        found.push(outputs);
    }
    let bits = |outputs: &[Vec<f32>]| outputs.iter().flatten().map(|x| x.to_bits()).collect::<Vec<u32>>();
    let differing = bits(&found[0]).iter().zip(bits(&found[1])).filter(|(a, b)| **a != *b).count();
    report.case("views, everything kept is the base", differing as f64, 0.0, || {
        format!("{} values of {}, {:?} tokens", differing, found[0].len(), length)
    });
    Ok(())
}
