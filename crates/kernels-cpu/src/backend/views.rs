//! Views on the CPU: the pages that attention reads, copying rows, reading them, scoring them.

use super::step::CpuStep;
use super::{CpuBackend, CpuPages, Scratch, heads, shape_error};
use crate::attention::{self, ScoreTask};
use oscar_backend::{BackendError, HeadHistory, HistoryRows, Result, Scoring, SequenceRows, View};
use oscar_codec::attention::PagedContext;
use oscar_codec::{PAGE_TOKENS, RowPageCodec, Side, Survivors};

type Pages<'p> = Vec<Option<&'p [u8]>>;

/// The pages of one sequence, layer and head, as attention reads them: with a view those of the
/// compact sequence.
pub(super) struct HeadContext<'p> {
    full_codec: &'p RowPageCodec,
    coded_codec: &'p RowPageCodec,
    full: Pages<'p>,
    coded: Pages<'p>,
    view: Option<Survivors>,
}

impl<'p> HeadContext<'p> {
    pub fn new(pool: &'p CpuPages, layer: usize, head: usize, s: &SequenceRows<'_>) -> Self {
        if pool.layout().slides(layer) {
            let codec = pool.full_codec(layer, head);
            let pages = s.sliding.iter().map(|id| id.map(|id| pool.sliding_page(layer, head, id)));
            let (full, coded) = (pages.collect(), Vec::new());
            return Self { full_codec: codec, coded_codec: codec, full, coded, view: None };
        }
        let full = |ids: &[Option<_>]| -> Pages<'p> {
            ids.iter().map(|id| id.map(|id| pool.full_page(layer, head, id))).collect()
        };
        let coded = |ids: &[Option<_>]| -> Pages<'p> {
            ids.iter().map(|id| id.map(|id| pool.coded_page(layer, head, id))).collect()
        };
        let sink = pool.layout().windows().sink() / PAGE_TOKENS;
        let index = layer * pool.layout().kv_heads() + head;
        let (full, coded, view) = match s.view {
            None => (full(s.full), coded(s.coded), None),
            Some(view) => {
                let end = view.end() / PAGE_TOKENS;
                let pages = view.pages(index);
                let mut all_full = full(&s.full[..sink]);
                all_full.resize(sink + pages.len(), None);
                all_full.extend(full(&s.full[end..]));
                let mut all_coded = coded(&s.coded[..sink]);
                all_coded.extend(pages.iter().map(|&id| Some(pool.view_page(index, id))));
                all_coded.extend(coded(&s.coded[end..]));
                (all_full, all_coded, Some(view.survivors(index)))
            }
        };
        Self {
            full_codec: pool.full_codec(layer, head),
            coded_codec: pool.coded_codec(layer, head),
            full,
            coded,
            view,
        }
    }

    pub fn pages(&self) -> PagedContext<'_> {
        PagedContext {
            full_codec: self.full_codec,
            coded_codec: self.coded_codec,
            full: &self.full,
            coded: &self.coded,
            view: self.view,
        }
    }
}

/// The page and the row in it of each row of a head's history before position `until`: those of the
/// view, then whole positions.
fn history_rows<'a>(
    s: &'a SequenceRows<'_>,
    index: usize,
    sink: usize,
    until: usize,
) -> impl Iterator<Item = (u32, usize)> + 'a {
    let view_rows = s.view.into_iter().flat_map(move |view| {
        (0..view.kept(index).len()).map(move |row| (view.pages(index)[row / PAGE_TOKENS], row % PAGE_TOKENS))
    });
    let from = s.view.map_or(sink, |view| view.end());
    let coded = |block: usize| s.coded.get(block).copied().flatten().map(|id| id.0);
    // A position without a quantized page cannot be read; the checks of the callers refuse that.
    view_rows.chain(
        (from..until)
            .map(move |position| (coded(position / PAGE_TOKENS).unwrap_or(u32::MAX), position % PAGE_TOKENS)),
    )
}

/// Refuses histories that are not quantized as far as `until`.
fn check_history(s: &SequenceRows<'_>, sink: usize, until: usize) -> Result<()> {
    let from = s.view.map_or(sink, |view| view.end());
    let missing = (from / PAGE_TOKENS..until.div_ceil(PAGE_TOKENS))
        .find(|&block| s.coded.get(block).copied().flatten().is_none());
    match missing {
        Some(block) => {
            Err(shape_error("a history", format!("block {block} before {until} is not quantized")))
        }
        None => Ok(()),
    }
}

impl CpuBackend {
    pub(super) fn gather_rows(
        &self,
        from: &SequenceRows<'_>,
        view: &View,
        pool: &mut CpuPages,
    ) -> Result<()> {
        let layout = pool.layout().clone();
        let unsupported = |why: &str| BackendError::Unsupported { device: "cpu".into(), why: why.into() };
        layout.evicts_rows().map_err(unsupported)?;
        let (sink, until) = (layout.windows().sink(), view.end());
        check_history(from, sink, until)?;
        let table = layout.coded().ok_or_else(|| unsupported("nothing is quantized"))?;
        let start = from.view.map_or(sink, |view| view.end());
        let mut heads: Vec<_> = pool.coded_heads_mut().iter_mut().enumerate().collect();
        self.pool.run_chunks(&mut heads, 1, |_, task| {
            let (index, pages) = &mut task[0];
            let codec = table.codec(*index / layout.kv_heads(), *index % layout.kv_heads());
            if !codec.keeps_history() {
                return;
            }
            let kept = view.kept(*index);
            let old = from.view.map_or(&[][..], |view| view.kept(*index));
            let positions = old.iter().copied().chain(start as u32..until as u32);
            let mut places = positions.zip(history_rows(from, *index, sink, until));
            for (row, &position) in kept.iter().enumerate() {
                let found = places.find(|(p, _)| *p == position);
                let (_, (page, source)) = found.expect("a view keeps rows of the history");
                let to = view.pages(*index)[row / PAGE_TOKENS];
                let (from, to) = pages.pair(page, to);
                codec.copy_row((from, source), (to, row % PAGE_TOKENS)).expect("pages of this codec");
            }
        });
        Ok(())
    }

    pub(super) fn read_history(
        &self,
        from: &SequenceRows<'_>,
        HeadHistory { head, until, rows: wanted, values }: HeadHistory,
        pool: &CpuPages,
    ) -> Result<HistoryRows> {
        let layout = pool.layout();
        let mut out = HistoryRows::default();
        let sink = layout.windows().sink();
        check_history(from, sink, until)?;
        let index = head.layer * layout.kv_heads() + head.kv_head;
        let codec = pool.coded_codec(head.layer, head.kv_head);
        let d = codec.head_dim();
        let rows = history_rows(from, index, sink, until).take(wanted.end).skip(wanted.start);
        let rows: Vec<_> = rows.collect();
        let sides = [(Side::Key, &mut out.keys), (Side::Value, &mut out.values)];
        for (side, values) in sides.into_iter().take(1 + usize::from(values)) {
            values.resize(rows.len() * d, 0.0);
            let first = index;
            self.pool.run_chunks(values, d * PAGE_TOKENS, |chunk, values| {
                for (row, &(page, token)) in values.chunks_exact_mut(d).zip(&rows[chunk * PAGE_TOKENS..]) {
                    codec.dequantize_row(side, pool.view_page(first, page), token, row);
                }
            });
        }
        Ok(out)
    }
}

impl CpuStep<'_> {
    /// Adds the weights of the queries that `append` left to the scores of a layer.
    pub(super) fn score(&mut self, layer: usize, rows: usize, scoring: &mut Scoring) -> Result<()> {
        let [sequence] = self.sequences else {
            return Err(shape_error("a scored step", format!("{} sequences, not one", self.sequences.len())));
        };
        let pool = &*self.pool;
        let shape = pool.heads();
        let (d, group, heads) = (shape.head_dim, shape.group(), shape.kv_heads);
        if scoring.scores.len() != pool.layout().layers() * heads || scoring.queries.end > rows {
            return Err(shape_error("a scored step", format!("{:?} of {rows} rows", scoring.queries)));
        }
        let windows = pool.layout().windows();
        let positions: Vec<u32> = heads::positions(self.sequences, rows)[scoring.queries.clone()]
            .iter()
            .flat_map(|&p| std::iter::repeat_n(p, group))
            .collect();
        let Scratch { queries, .. } = &mut *self.scratch;
        for head in 0..heads {
            let context = HeadContext::new(pool, layer, head, sequence);
            let context = context.pages();
            let (shift, hole) = context.compaction(windows.sink());
            let until = scoring.until.saturating_sub(shift);
            let places: Vec<usize> = (windows.sink()..until).filter(|place| !hole.contains(place)).collect();
            let start = (head * rows + scoring.queries.start) * group * d;
            let task = ScoreTask {
                queries: &queries[start..start + positions.len() * d],
                positions: &positions,
                scale: shape.scale,
                windows,
                context: &context,
                over: scoring.over.as_deref(),
            };
            let mut scores = std::mem::take(&mut scoring.scores[layer * heads + head]);
            scores.resize(places.len(), 0);
            let scoring_ref = &*scoring;
            let add = |score: &mut u64, weight: f32| scoring_ref.add(score, weight);
            let (kernels, threads) = (self.backend.kernels, &self.backend.pool);
            attention::add_scores(kernels, threads, &task, &places, &mut scores, add);
            scoring.scores[layer * heads + head] = scores;
        }
        Ok(())
    }
}
