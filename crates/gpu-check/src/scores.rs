//! Checks of attention weights by row: every score against `oscar_codec::scores`, and pieces of a prompt
//! against the whole of it, which must agree in every bit.

use crate::approximate::lose_tail;
use crate::growing::{Checks, Compared, Growing, Inspected, Pattern};
use crate::twin::HeadTwin;
use crate::twin_pages::TwinPages;
use crate::views::{Kept, derive, fork};
use crate::{Extent, Report};
use anyhow::{Context, Result, anyhow, ensure};
use oscar_backend::{
    Backend, CacheHead, HeadShape, Reduce, Result as BackendResult, RowEviction, Scoring, SequenceRows, Tap,
    TappedRows,
};
use oscar_cache::{SequencePages, view_end};
use oscar_codec::random::SplitMix64;
use oscar_codec::scores::key_weights;
use oscar_codec::{CacheLayout, CodeLayout, FormatTable, KvFormat, PAGE_TOKENS, Windows};
use std::ops::Range;

const LAYERS: usize = 2;
const KV_HEADS: usize = 2;

/// What is compared of the steps that store rows: nothing, other parts do that.
const STORED: Checks = Checks {
    history: "scores, stored codes",
    decode: "scores, decode attention",
    prefill: "scores, prefill attention",
    allowed: 1.0 / 128.0,
    e4m3_bits: 0,
    compared: Compared::NOTHING,
};

/// A scoring beside the scores that the codec defines.
pub struct Scored {
    scoring: Scoring,
    /// By layer and head, then by row: the score, and how far another may be from it.
    expected: Vec<Vec<(f64, f64)>>,
}

impl Tap for Scored {
    fn heads(&mut self, _: usize, _: &mut dyn TappedRows) -> BackendResult<()> {
        Ok(())
    }

    fn attended(&mut self, _: usize, _: &mut dyn TappedRows) -> BackendResult<()> {
        Ok(())
    }

    fn scoring(&mut self) -> Option<&mut Scoring> {
        Some(&mut self.scoring)
    }
}

impl Scored {
    fn new(reduce: Reduce, until: usize, over: Option<Vec<Range<usize>>>) -> Self {
        let heads = LAYERS * KV_HEADS;
        let scoring = Scoring { queries: 0..0, until, over, reduce, scores: vec![Vec::new(); heads] };
        Self { scoring, expected: vec![Vec::new(); heads] }
    }

    /// Adds the weights that the queries of a step give to the rows of a layer, by the definition.
    pub fn expect(
        &mut self,
        shape: &HeadShape,
        layout: &CacheLayout,
        layer: usize,
        (values, width): (&[f32], usize),
        s: &SequenceRows<'_>,
        twins: &[HeadTwin],
    ) -> Result<()> {
        let (d, windows, group) = (shape.head_dim, layout.windows(), shape.group());
        for (kv_head, twin) in twins.iter().enumerate() {
            let head = CacheHead { layer, kv_head };
            let index = layer * shape.kv_heads + kv_head;
            let seen = s.view.map(|view| twin.seen(view, index, layout));
            let twin = seen.as_ref().unwrap_or(twin);
            let pages = TwinPages::of(twin, layout, head, s)?;
            let lists = pages.lists();
            let context = lists.context();
            let (shift, hole) = context.compaction(windows.sink());
            let places = windows.sink()..self.scoring.until.saturating_sub(shift).max(windows.sink());
            let places: Vec<usize> = places.filter(|place| !hole.contains(place)).collect();
            let bound = Bound::new(shape, twin);
            let Scoring { queries, over, reduce, .. } = &self.scoring;
            let queries: Vec<(usize, usize)> =
                queries.clone().flat_map(|query| (0..group).map(move |member| (query, member))).collect();
            // The scores of some queries.
            let score = |queries: &[(usize, usize)]| {
                let mut scores = vec![(0.0, 0.0); places.len()];
                for &(query, member) in queries {
                    let (row, t) = (s.rows.start + query, s.first_position + query);
                    let query = &values[row * width + (kv_head * group + member) * d..][..d];
                    let weights = key_weights(query, shape.scale, t, windows, &context, over.as_deref());
                    let share = bound.share(query);
                    for (score, &place) in scores.iter_mut().zip(&places) {
                        let weight = weights.get(place).map_or(0.0, |&weight| f64::from(weight));
                        add(*reduce, score, (weight, weight * share + Bound::UNIT));
                    }
                }
                scores
            };
            let expected = &mut self.expected[index];
            expected.resize(places.len(), (0.0, 0.0));
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            std::thread::scope(|scope| {
                let parts = queries.chunks(queries.len().div_ceil(threads).max(1));
                let parts: Vec<_> = parts.map(|part| scope.spawn(|| score(part))).collect();
                for part in parts {
                    let found = part.join().map_err(|_| anyhow!("the reference failed"))?;
                    expected.iter_mut().zip(found).for_each(|(score, found)| add(*reduce, score, found));
                }
                Ok::<_, anyhow::Error>(())
            })?;
        }
        Ok(())
    }

    /// Compares the scores of each head. A failure says which rows differ, and by how much.
    fn compare(&self, name: &str, view: Option<&oscar_cache::View>, what: &str, report: &mut Report) {
        for (head, (found, expected)) in self.scoring.scores.iter().zip(&self.expected).enumerate() {
            let found: Vec<f64> = found.iter().map(|&score| score as f64 / f64::from(Scoring::ONE)).collect();
            let share = |i: usize| {
                let (score, allowed) = expected[i];
                (found[i] - score).abs() / allowed.max(f64::MIN_POSITIVE)
            };
            let wrong: Vec<usize> = match found.len() == expected.len() {
                true => (0..found.len()).filter(|&i| share(i) > 1.0).collect(),
                false => Vec::new(),
            };
            let worst = match found.len() == expected.len() {
                true => (0..found.len()).map(share).fold(0.0, f64::max),
                false => f64::INFINITY,
            };
            report.case(name, worst, 1.0, || {
                let at = format!("layer {}, head {}", head / KV_HEADS, head % KV_HEADS);
                let kept = view.map(|view| (view.kept(head).len(), view.end()));
                let sum = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>();
                let sums = (
                    sum(&mut found.iter().copied()),
                    sum(&mut expected.iter().map(|(score, _)| *score)),
                );
                let rows: Vec<String> = wrong
                    .iter()
                    .take(6)
                    .map(|&i| format!("row {i}: {:.6e} for {:.6e}", found[i], expected[i].0))
                    .collect();
                format!(
                    "{what}, {at}, view (rows, end) {kept:?}: {} rows found, {} expected, {} wrong ({:?} to {:?}), all \
                     together {:.6} for {:.6}; {}",
                    found.len(),
                    expected.len(),
                    wrong.len(),
                    wrong.first(),
                    wrong.last(),
                    sums.0,
                    sums.1,
                    rows.join(", ")
                )
            });
        }
    }
}

/// Adds a score, and how far it may be from another.
fn add(reduce: Reduce, total: &mut (f64, f64), found: (f64, f64)) {
    *total = match reduce {
        Reduce::Max => (total.0.max(found.0), total.1.max(found.1)),
        Reduce::Sum => (total.0 + found.0, total.1 + found.1),
    };
}

/// How far a weight may be from the definition's, as a share of it.
///
/// A query enters the products as the sum of two BF16 numbers, 2^-18 of it too far at most. A key of codes
/// is two summands, each of at most √d · its largest element. Sums of d products in f32, here and in
/// the definition, are rounded d + d/8 times, by 2^-24 and 2^-23. With an error of δ in every score a
/// weight and the sum under it are off by the factor e^δ each.
struct Bound {
    /// Largest score of a query of norm 1.
    largest: f64,
    error: f64,
}

impl Bound {
    /// Weights are rounded down to units.
    const UNIT: f64 = 1.0 / (1u64 << 40) as f64;

    fn new(shape: &HeadShape, twin: &HeadTwin) -> Self {
        let d = shape.head_dim as f64;
        let key = twin.keys.iter().chain(&twin.coded_keys).fold(0f32, |a, k| a.max(k.abs()));
        let largest = f64::from(shape.scale) * 2.0 * d.sqrt() * f64::from(key);
        // The rest: scaling, exponentials and sums of weights.
        let error = 2f64.powi(-18) + d * 2f64.powi(-24) + d / 8.0 * 2f64.powi(-23) + 2f64.powi(-21);
        Self { largest, error }
    }

    fn share(&self, query: &[f32]) -> f64 {
        let norm = query.iter().map(|&q| f64::from(q) * f64::from(q)).sum::<f64>().sqrt();
        (2.0 * self.largest * norm * self.error).exp_m1() + 2f64.powi(-19)
    }
}

struct Case {
    head_dim: usize,
    group: usize,
    widths: Vec<(u32, u32)>,
    windows: Windows,
    stored: usize,
    scale: f32,
}

impl Case {
    fn describe(&self) -> String {
        let Self { head_dim, group, widths, windows, stored, scale } = self;
        format!(
            "head {head_dim}, group {group}, widths {widths:?}, sink {} recent {}, {stored} tokens, scale {scale:.3}",
            windows.sink(),
            windows.recent()
        )
    }

    fn layout(&self, order: CodeLayout) -> Result<CacheLayout> {
        let layout =
            CacheLayout::new(KvFormat::OSCAR2, LAYERS, KV_HEADS, self.head_dim, self.windows, order)?;
        let widths: Vec<_> = self.widths.iter().copied().cycle().take(LAYERS * KV_HEADS).collect();
        Ok(layout.with_coded_table(FormatTable::from_widths(
            LAYERS,
            KV_HEADS,
            self.head_dim,
            &widths,
            order,
        )?))
    }

    fn growing<'a, B: Backend<Pool: Inspected>>(
        &self,
        gpu: &'a B,
        seed: u64,
        report: &mut Report,
    ) -> Result<Growing<'a, B>> {
        let layout = self.layout(CodeLayout::GpuTile)?;
        ensure!(
            gpu.evicts_rows(&gpu.held_layout(&layout)) == RowEviction::ByScores,
            "this device adds up no attention weights"
        );
        let total = 3 * (self.stored + 512);
        let what = self.describe();
        let mut growing = Growing::new(gpu, layout, self.group, self.scale, 1, total, seed, STORED, what)?;
        growing.pages[0] = SequencePages::resumable();
        growing.step(&[self.stored], Pattern::Plain, report)?;
        Ok(growing)
    }
}

pub fn check<B: Backend<Pool: Inspected>>(gpu: &B, extent: Extent, report: &mut Report) -> Result<()> {
    let mut seed = 1300;
    for head_dim in [64, 128, 256] {
        for widths in [vec![(2, 2)], vec![(1, 2), (3, 1), (4, 4)], vec![(2, 2), (0, 0), (4, 2)]] {
            for (group, scaled) in [(1, 1.0), (4, 1.0), (3, 4.0), (8, 1.0)] {
                seed += 1;
                if !extent.takes(seed) {
                    continue;
                }
                let (recent, stored) = [(64, 640), (256, 960), (16, 448)][seed as usize % 3];
                let (widths, windows) = (widths.clone(), Windows::new(64, recent)?);
                let scale = scaled / (head_dim as f32).sqrt();
                let case = Case { head_dim, group, widths, windows, stored, scale };
                run_part(&case, report, |report| whole(gpu, &case, seed, report));
                run_part(&case, report, |report| pieces(gpu, &case, seed, report));
                run_part(&case, report, |report| views(gpu, &case, seed, report));
                run_part(&case, report, |report| in_the_window(gpu, &case, seed, report));
            }
        }
    }
    Ok(())
}

fn run_part(case: &Case, report: &mut Report, run: impl FnOnce(&mut Report) -> Result<()>) {
    if let Err(error) = run(report) {
        let what = || format!("{}: {error:#}", case.describe());
        report.case("scores, steps run", f64::INFINITY, 0.0, what);
    }
}

/// One step, whose rows `queries` score.
fn scored_step<B: Backend<Pool: Inspected>>(
    growing: &mut Growing<'_, B>,
    rows: usize,
    queries: Range<usize>,
    scored: &mut Scored,
    report: &mut Report,
) -> Result<()> {
    scored.scoring.queries = queries;
    growing.scored_step(rows, scored, report)
}

/// A whole history: maxima and sums, all queries and some, until different positions, a softmax over some
/// positions alone.
fn whole<B: Backend<Pool: Inspected>>(gpu: &B, case: &Case, seed: u64, report: &mut Report) -> Result<()> {
    let mut growing = case.growing(gpu, seed, report)?;
    let (what, stored) = (case.describe(), case.stored);
    let end = view_end(&growing.layout, stored);
    for (rows, queries, until, reduce) in [
        (1, 0..1, end, Reduce::Sum),
        (70, 0..70, end, Reduce::Sum),
        (64, 63..64, end, Reduce::Max),
        (37, 5..30, 200, Reduce::Max),
        // Rows that early queries read in BF16 and later ones as codes, and rows that do not exist.
        (90, 0..90, stored + 600, Reduce::Sum),
        (20, 0..20, stored + 200, Reduce::Max),
        (9, 4..4, end, Reduce::Sum),
        (5, 0..5, 10, Reduce::Sum),
    ] {
        let mut scored = Scored::new(reduce, until, None);
        scored_step(&mut growing, rows, queries.clone(), &mut scored, report)?;
        let name = if reduce == Reduce::Sum { "scores, sums" } else { "scores, maxima" };
        let what = format!("{what}, {rows} rows, queries {queries:?}, until {until}");
        scored.compare(name, None, &what, report);
    }
    let length = growing.pages[0].len();
    let mut totals = Scored::new(Reduce::Max, end, None);
    for (rows, over) in [
        (24, vec![0..64, 100..230, length..usize::MAX]),
        (1, std::iter::once(0..length).collect()),
        (16, std::iter::once(64..end).collect()),
        (12, std::iter::once(90..91).collect()),
        (12, Vec::new()),
    ] {
        // Steps of different softmaxes add to the same scores.
        totals.scoring.over = Some(over);
        scored_step(&mut growing, rows, 0..rows, &mut totals, report)?;
        let what = format!("{what}, {rows} rows, over {:?}", totals.scoring.over);
        totals.compare("scores, some positions", None, &what, report);
    }
    Ok(())
}

/// The same rows in one step and in pieces give every bit of a score alike.
fn pieces<B: Backend<Pool: Inspected>>(gpu: &B, case: &Case, seed: u64, report: &mut Report) -> Result<()> {
    let mut growing = case.growing(gpu, seed, report)?;
    let rest = PAGE_TOKENS - case.stored % PAGE_TOKENS;
    growing.step(&[rest], Pattern::Plain, report)?;
    let length = growing.pages[0].len();
    let (base, twins) = (fork(&growing, &growing.pages[0], None)?, growing.twins.clone());
    let end = view_end(&growing.layout, length + 64);
    for reduce in [Reduce::Sum, Reduce::Max] {
        let mut found = Vec::new();
        for pieces in [&[50][..], &[1, 17, 2, 30]] {
            growing.pages[0] = fork(&growing, &base, None)?;
            growing.twins.clone_from(&twins);
            growing.bring(50, seed);
            let mut scored = Scored::new(reduce, end, None);
            for &rows in pieces {
                scored_step(&mut growing, rows, 0..rows, &mut scored, report)?;
            }
            let what = format!("{}, pieces {pieces:?}", case.describe());
            scored.compare("scores, pieces", None, &what, report);
            found.push(scored.scoring.scores);
        }
        let pairs = found[0].iter().flatten().zip(found[1].iter().flatten());
        let (rows, differing) = (pairs.clone().count(), pairs.filter(|(a, b)| a != b).count());
        report.case("scores, pieces are the whole", differing as f64, 0.0, || {
            format!("{}, {reduce:?}, {differing} rows of {rows}", case.describe())
        });
    }
    Ok(())
}

/// Views with different numbers of rows in each head, then a view of a view.
fn views<B: Backend<Pool: Inspected>>(gpu: &B, case: &Case, seed: u64, report: &mut Report) -> Result<()> {
    let mut random = SplitMix64::new(seed);
    for kept in [Kept::Mixed, Kept::Even(70)] {
        let mut growing = case.growing(gpu, seed, report)?;
        let rest = PAGE_TOKENS - case.stored % PAGE_TOKENS;
        growing.step(&[rest], Pattern::Plain, report)?;
        for _ in 0..2 {
            derive(&mut growing, 0, kept, &mut random, report)?;
            let view = growing.pages[0].view().cloned().context("a view was derived")?;
            let length = growing.pages[0].len();
            let end = view_end(&growing.layout, length + 128);
            for (rows, queries, until, reduce) in [
                (1, 0..1, view.end(), Reduce::Sum),
                (63, 40..63, end, Reduce::Sum),
                (64, 60..64, end, Reduce::Max),
            ] {
                let mut scored = Scored::new(reduce, until, None);
                scored_step(&mut growing, rows, queries.clone(), &mut scored, report)?;
                let what = format!("{}, {kept:?}, {rows} rows, until {until}", case.describe());
                scored.compare("scores, views", Some(&view), &what, report);
            }
        }
    }
    Ok(())
}

/// After an approximate hit the first queries read codes where the windows say BF16.
fn in_the_window<B: Backend<Pool: Inspected>>(
    gpu: &B,
    case: &Case,
    seed: u64,
    report: &mut Report,
) -> Result<()> {
    if !gpu.reads_codes_in_window(&gpu.held_layout(&case.layout(CodeLayout::GpuTile)?)) {
        return Ok(());
    }
    let mut growing = case.growing(gpu, seed, report)?;
    let length = lose_tail(&mut growing, case.stored)?;
    for rows in [20, 1] {
        let mut scored = Scored::new(Reduce::Sum, length, None);
        scored_step(&mut growing, rows, 0..rows, &mut scored, report)?;
        let what = format!("{}, resumed at {length}, {rows} rows", case.describe());
        scored.compare("scores, codes in the window", None, &what, report);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_row_is_found_and_named() {
        let mut scored = Scored::new(Reduce::Sum, 0, None);
        for head in 0..LAYERS * KV_HEADS {
            scored.scoring.scores[head] = vec![1 << 30; 200];
            scored.expected[head] = vec![(2f64.powi(-10), 1e-9); 200];
        }
        let mut report = Report::default();
        scored.compare("scores", None, "a case", &mut report);
        assert_eq!(report.failures().count(), 0);
        scored.scoring.scores[3][77] += 1 << 11;
        scored.compare("scores", None, "a case", &mut report);
        let failure = report.findings[0].failure.clone().unwrap();
        assert!(failure.contains("layer 1, head 1") && failure.contains("1 wrong (Some(77)"), "{failure}");
        scored.scoring.scores[3].pop();
        let mut report = Report::default();
        scored.compare("scores", None, "a case", &mut report);
        assert!(report.findings[0].failure.as_ref().unwrap().contains("199 rows found, 200 expected"));
    }
}
