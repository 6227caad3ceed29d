//! Attention weights by row of history, added up on the device (`scores.cu`).
//!
//! Each layer of a scored step launches three kernels behind its attention. The scores of several
//! layers lie in one buffer, which the host reads when it is full and after the last layer: it waits
//! once, unless the history is long.

use super::{CudaRows, CudaStep, State, grow};
use crate::device::{Function, LaunchShape};
use crate::error::{CudaError, Result};
use crate::layout::{Layout, shared_struct};
use crate::memory::{Buffer, DevicePtr};
use crate::pages::HeadPages;
use crate::sources::SCORES;
use crate::step::StepTables;
use crate::storage::Storage;
use oscar_backend::{Reduce, Scoring, SequenceRows, View};
use oscar_codec::{PAGE_TOKENS, Side, Windows};
use std::ops::Range;

shared_struct! {
    /// The keys of a block in one form, and which of them the softmax runs over.
    #[derive(PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
    struct KeyTile {
        block: u32,
        coded: u32,
        over: u64,
    }
}

shared_struct! {
    /// A row of the step whose queries count.
    #[derive(PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
    struct ScoredRow {
        position: u32,
        boundary: u32,
    }
}

shared_struct! {
    struct ScoreParams {
        step: StepTables,
        pages: DevicePtr<HeadPages>,
        queries: DevicePtr<f32>,
        tiles: DevicePtr<KeyTile>,
        rows: DevicePtr<ScoredRow>,
        parts: DevicePtr<f32>,
        softmax: DevicePtr<f32>,
        scores: DevicePtr<u64>,
        tile_count: u32,
        first_row: u32,
        count: u32,
        query_heads: u32,
        kv_heads: u32,
        until: u32,
        start: u32,
        stride: u32,
        sums: u32,
        scale: f32,
    }
}

pub const LAYOUTS: &[Layout] = &[KeyTile::LAYOUT, ScoredRow::LAYOUT, ScoreParams::LAYOUT];

/// Threads of a block of `scores.cu`.
const THREADS: u32 = 256;
/// Queries of a thread block of `score_softmax`.
const SOFTMAX_QUERIES: usize = 32;
/// As in the tables of a step.
const MOST_POSITIONS: usize = u32::MAX as usize / 2;
/// Bytes of scores that wait on the device, unless a single layer has more.
const SCORES_BYTES: usize = 32 << 20;
/// Bytes of softmaxes of single tiles, unless a single row of the step has more.
const PARTS_BYTES: usize = 16 << 20;

/// Memory on the device that is kept from step to step.
#[derive(Default)]
pub(super) struct ScoreMemory {
    /// Tiles, then rows.
    tables: Option<Buffer>,
    parts: Option<Buffer>,
    softmax: Option<Buffer>,
    scores: Option<Buffer>,
}

/// What all layers of a scored step share.
#[derive(Clone, Copy)]
pub(super) struct ScoredStep {
    kernels: ScoreKernels,
    tiles: usize,
    /// Of the [`Scoring`], which every layer must repeat.
    queries: (usize, usize),
    until: usize,
    reduce: Reduce,
    /// The first row of the sequence.
    first_row: usize,
    /// Rows of the step in one launch.
    batch: usize,
    /// Without a view: the position of the first row that the buffer has room for.
    start: usize,
    /// Rows of history that a head has room for.
    stride: usize,
    /// Layers whose scores the buffer has room for.
    room: usize,
    /// Layers whose scores wait in the buffer: `read..scored`.
    read: usize,
    scored: usize,
}

#[derive(Clone, Copy)]
struct ScoreKernels {
    parts: Function,
    softmax: Function,
    rows: Function,
}

/// The tables of a scored step.
#[derive(Debug, PartialEq)]
struct ScoreTables {
    tiles: Vec<KeyTile>,
    rows: Vec<ScoredRow>,
}

impl ScoreTables {
    fn new(s: &SequenceRows<'_>, windows: &Windows, scoring: &Scoring) -> Self {
        let (sink, view_end) = (windows.sink(), s.view.map_or(0, View::end));
        let coded_until = s.coded_until().max(view_end);
        let row = |query: usize| {
            let position = s.first_position + query;
            let boundary = windows.side_boundary(Side::Key, position).max(coded_until);
            ScoredRow { position: position as u32, boundary: boundary as u32 }
        };
        let rows: Vec<ScoredRow> = scoring.queries.clone().map(row).collect();
        let (Some(first), Some(last)) = (rows.first(), rows.last()) else {
            return Self { tiles: Vec::new(), rows };
        };
        // Nothing lies between the sink and the longest head of a view.
        let longest = |view: &View| (0..view.heads()).map(|head| view.pages(head).len()).max();
        let start = s.view.map_or(0, |view| view_end / PAGE_TOKENS - longest(view).unwrap_or(0));
        let mut tiles = Vec::new();
        for block in 0..(last.position as usize + 1).div_ceil(PAGE_TOKENS) {
            let (begin, end) = (block * PAGE_TOKENS, (block + 1) * PAGE_TOKENS);
            let over = positions_over(scoring.over.as_deref(), begin);
            let full = begin < sink || end > first.boundary as usize;
            let boundary = last.boundary as usize;
            let coded = block >= start && boundary > sink && end > sink && begin < boundary;
            for (coded, _) in [(0, full), (1, coded)].into_iter().filter(|(_, read)| *read && over != 0) {
                tiles.push(KeyTile { block: block as u32, coded, over });
            }
        }
        Self { tiles, rows }
    }
}

/// The bits of those positions of a block that the softmax runs over.
fn positions_over(over: Option<&[Range<usize>]>, begin: usize) -> u64 {
    let Some(over) = over else { return u64::MAX };
    let is_over = |bit: &usize| over.iter().any(|range| range.contains(&(begin + bit)));
    (0..PAGE_TOKENS).filter(is_over).map(|bit| 1u64 << bit).sum()
}

/// The positions from the sink to `until` whose blocks are among the tiles: other rows get no weight.
fn reached(tiles: &[KeyTile], sink: usize, until: usize) -> Range<usize> {
    let positions = |tile: &KeyTile| {
        let begin = tile.block as usize * PAGE_TOKENS;
        begin.max(sink)..(begin + PAGE_TOKENS).min(until)
    };
    let all = tiles.iter().map(positions).filter(|range| !range.is_empty());
    all.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(sink..sink)
}

/// Rows of a head's history before `until`, those of a view first.
fn scored_rows(view: Option<&View>, head: usize, sink: usize, until: usize) -> usize {
    let Some(view) = view else { return until.saturating_sub(sink) };
    let first = view.end() - view.pages(head).len() * PAGE_TOKENS;
    view.kept(head).len().min(until.saturating_sub(first)) + until.saturating_sub(view.end())
}

fn refuse(detail: String) -> CudaError {
    CudaError::Shape { what: "a scored step", detail }
}

impl CudaStep<'_> {
    /// Adds the weights of a layer's rotated queries to the scores. The scores of a step are complete
    /// after its last layer.
    pub(super) fn score(&mut self, layer: usize, queries: &CudaRows, scoring: &mut Scoring) -> Result<()> {
        let (kv_heads, layers) = (self.pool.layout().kv_heads(), self.pool.layout().layers());
        let mut scored = match self.scored {
            Some(scored) => scored,
            None => self.begin_scores(queries.count(), scoring)?,
        };
        let same = scored.queries == (scoring.queries.start, scoring.queries.end)
            && (scored.until, scored.reduce) == (scoring.until, scoring.reduce);
        if scored.scored != layer || !same || scoring.scores.len() != layers * kv_heads {
            let detail = format!(
                "layer {layer} of {layers} behind {} others, {} lists of scores for {kv_heads} heads, queries and rows as                  before: {same}",
                scored.scored,
                scoring.scores.len()
            );
            return Err(refuse(detail));
        }
        if scored.tiles > 0 && scored.stride > 0 {
            self.launch_scores(&scored, layer, queries, scoring)?;
        }
        scored.scored += 1;
        if scored.scored == layers || scored.scored - scored.read == scored.room {
            self.read_scores(&scored, scoring)?;
            scored.read = scored.scored;
        }
        self.scored = Some(scored);
        Ok(())
    }

    /// Checks the step, makes room and sends the tables that its layers share.
    fn begin_scores(&mut self, rows: usize, scoring: &Scoring) -> Result<ScoredStep> {
        let Self { backend, state, sequences, pool, .. } = self;
        let (device, layout) = (&backend.device, pool.layout());
        let [sequence] = *sequences else {
            return Err(refuse(format!("{} sequences, not one", sequences.len())));
        };
        if pool.storage() != Storage::Codes {
            return Err(refuse(format!("{} has no quantized rows on the GPU", layout.format())));
        }
        let Range { start, end } = scoring.queries;
        if start > end || end > sequence.rows.len() || sequence.rows.end > rows {
            return Err(refuse(format!("queries {start}..{end} of {:?}, {rows} rows", sequence.rows)));
        }
        if scoring.until > MOST_POSITIONS {
            return Err(refuse(format!("rows before position {}", scoring.until)));
        }
        if scoring.over.is_some() && sequence.view.is_some() {
            return Err(refuse("a softmax over some positions of a view".into()));
        }
        let windows = layout.windows();
        let (kv_heads, layers, group) = (layout.kv_heads(), layout.layers(), pool.shape().group());
        let ScoreTables { tiles, rows } = ScoreTables::new(sequence, windows, scoring);
        let reached = reached(&tiles, windows.sink(), scoring.until);
        let room = |head| match sequence.view {
            Some(_) => scored_rows(sequence.view, head, windows.sink(), scoring.until),
            None => reached.len(),
        };
        let stride = (0..layers * kv_heads).map(room).max().unwrap_or(0);
        let batch = (PARTS_BYTES / (8 * kv_heads * group * tiles.len().max(1))).clamp(1, rows.len().max(1));
        let layer_bytes = 8 * kv_heads * stride.max(1);
        let room = (SCORES_BYTES / layer_bytes).clamp(1, layers.max(1));
        // Copies and new buffers must not meet launches that are only noted.
        device.flush()?;
        let State { scores: memory, transfers, .. } = &mut **state;
        let queries = kv_heads * group * batch;
        grow(device, &mut memory.parts, 8 * queries * tiles.len(), "softmaxes of tiles")?;
        grow(device, &mut memory.softmax, 8 * queries, "softmaxes of queries")?;
        grow(device, &mut memory.scores, layer_bytes * room, "scores of rows")?;
        let mut words: Vec<u32> = bytemuck::cast_slice(&tiles).to_vec();
        words.extend_from_slice(bytemuck::cast_slice(&rows));
        let (tables, _) = grow(device, &mut memory.tables, 4 * words.len(), "the tables of scores")?;
        transfers.enqueue(&words, tables.slice().part(0..words.len())?)?;
        let defines = vec![("HEAD_DIM", layout.head_dim())];
        let function = |name| backend.kernels.function(&SCORES, &defines, name, 0);
        let kernels = ScoreKernels {
            parts: function(c"score_parts")?,
            softmax: function(c"score_softmax")?,
            rows: function(c"score_rows")?,
        };
        Ok(ScoredStep {
            kernels,
            tiles: tiles.len(),
            queries: (start, end),
            until: scoring.until,
            reduce: scoring.reduce,
            first_row: sequence.rows.start,
            batch,
            start: reached.start,
            stride,
            room,
            read: 0,
            scored: 0,
        })
    }

    fn launch_scores(
        &mut self,
        scored: &ScoredStep,
        layer: usize,
        queries: &CudaRows,
        scoring: &Scoring,
    ) -> Result<()> {
        let tables = self.tables().ok_or_else(|| refuse("a step without tables".into()))?;
        let (device, pool) = (&self.backend.device, &*self.pool);
        let shape = pool.shape();
        let memory = &self.state.scores;
        let no_memory = || refuse("its buffers have no memory".into());
        let [lists, parts, softmax, scores] =
            [&memory.tables, &memory.parts, &memory.softmax, &memory.scores].map(|b| b.as_ref());
        let scores = scores.ok_or_else(no_memory)?;
        if layer == scored.read {
            device.fill(scores, 0)?;
        }
        let lists = lists.ok_or_else(no_memory)?.ptr::<u32>();
        let rows = lists.add(scored.tiles * size_of::<KeyTile>() / 4).cast::<ScoredRow>();
        let waiting = (layer - scored.read) * shape.kv_heads * scored.stride;
        let params = ScoreParams {
            step: tables.of_layer(layer, shape.kv_heads),
            pages: pool.layer(layer),
            queries: queries.held_values("queries")?.ptr(),
            tiles: lists.cast(),
            rows,
            parts: parts.ok_or_else(no_memory)?.ptr(),
            softmax: softmax.ok_or_else(no_memory)?.ptr(),
            scores: scores.ptr::<u64>().add(waiting),
            tile_count: scored.tiles as u32,
            first_row: 0,
            count: 0,
            query_heads: shape.query_heads as u32,
            kv_heads: shape.kv_heads as u32,
            until: scoring.until as u32,
            start: scored.start as u32,
            stride: scored.stride as u32,
            sums: u32::from(scoring.reduce == Reduce::Sum),
            scale: shape.scale,
        };
        for start in scoring.queries.clone().step_by(scored.batch) {
            let batch = scored.batch.min(scoring.queries.end - start);
            let count = batch * shape.group();
            let params = ScoreParams {
                rows: rows.add(start - scoring.queries.start),
                first_row: (scored.first_row + start) as u32,
                count: count as u32,
                ..params
            };
            let tiles = LaunchShape::grid2(scored.tiles, shape.kv_heads, THREADS);
            let merged = LaunchShape::grid2(count.div_ceil(SOFTMAX_QUERIES), shape.kv_heads, THREADS);
            // SAFETY: the tables are of this step, over these pages, which have memory for all ids. The
            // tiles are blocks that the step's rows read, so their pages are in the tables
            // (`required`). The queries are rows of the step, and the scoring is the one that the
            // buffers were made for (both checked): they have room for every tile and query of a
            // batch, and for the rows of history of every head.
            unsafe {
                device.launch(scored.kernels.parts, tiles, params)?;
                device.launch(scored.kernels.softmax, merged, params)?;
                device.launch(scored.kernels.rows, tiles, params)?;
            }
        }
        Ok(())
    }

    /// Waits for the layers `read..scored` and joins their scores with those of earlier steps.
    fn read_scores(&mut self, scored: &ScoredStep, scoring: &mut Scoring) -> Result<()> {
        let Self { state, sequences, pool, .. } = self;
        let (kv_heads, sink) = (pool.layout().kv_heads(), pool.layout().windows().sink());
        let view = sequences.first().and_then(|s| s.view);
        let heads = scored.read * kv_heads..scored.scored * kv_heads;
        for head in heads.clone() {
            scoring.scores[head].resize(scored_rows(view, head, sink, scoring.until), 0);
        }
        if scored.tiles == 0 || scored.stride == 0 {
            return Ok(());
        }
        let State { scores, transfers, .. } = &mut **state;
        let buffer = scores.scores.as_ref().ok_or_else(|| refuse("no scores".into()))?;
        let held = buffer.slice::<u64>().part(0..heads.len() * scored.stride)?;
        let first = view.map_or(scored.start - sink, |_| 0);
        let mut at = 0;
        transfers.read(held, |mut part| {
            while !part.is_empty() {
                let (head, row) = (heads.start + at / scored.stride, at % scored.stride);
                let (found, rest) = part.split_at(part.len().min(scored.stride - row));
                join(scoring.reduce, scoring.scores[head].iter_mut().skip(first + row), found);
                (at, part) = (at + found.len(), rest);
            }
        })
    }
}

/// Joins scores with those of another step.
fn join<'a>(reduce: Reduce, scores: impl Iterator<Item = &'a mut u64>, found: &[u64]) {
    for (score, &found) in scores.zip(found) {
        *score = match reduce {
            Reduce::Max => found.max(*score),
            Reduce::Sum => *score + found,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_cache::PagePool;
    use oscar_codec::{CacheLayout, CodeLayout, CodedPageId, FullPageId, KvFormat};

    fn scoring(queries: Range<usize>, over: Option<Vec<Range<usize>>>) -> Scoring {
        Scoring { queries, until: 192, over, reduce: Reduce::Sum, scores: Vec::new() }
    }

    fn blocks(tiles: &[KeyTile]) -> Vec<(u32, u32)> {
        tiles.iter().map(|tile| (tile.block, tile.coded)).collect()
    }

    /// Sink 64, recent 64: the query at 271 reads 64..208 as codes, the one at 288 reads 64..224.
    #[test]
    fn tiles_are_the_blocks_that_queries_read() {
        let windows = Windows::new(64, 64).unwrap();
        let full: Vec<_> = (0..5).map(|b| Some(FullPageId(b))).collect();
        let coded: Vec<_> = (0..5).map(|b| Some(CodedPageId(b))).collect();
        let mut rows = SequenceRows {
            rows: 0..18,
            first_position: 271,
            full: &full,
            coded: &coded,
            sliding: &[],
            demote: 0..0,
            demote_values: 0..0,
            view: None,
            states: None,
        };
        let tables = ScoreTables::new(&rows, &windows, &scoring(0..18, None));
        assert_eq!(tables.rows.first(), Some(&ScoredRow { position: 271, boundary: 208 }));
        assert_eq!(tables.rows.last(), Some(&ScoredRow { position: 288, boundary: 224 }));
        assert_eq!(blocks(&tables.tiles), [(0, 0), (1, 1), (2, 1), (3, 0), (3, 1), (4, 0)]);
        assert!(tables.tiles.iter().all(|tile| tile.over == u64::MAX));
        let over = vec![0..64, 100..130, 280..usize::MAX];
        assert_eq!(reached(&tables.tiles, 64, 192), 64..192);
        let tables = ScoreTables::new(&rows, &windows, &scoring(2..3, Some(over)));
        assert_eq!(blocks(&tables.tiles), [(0, 0), (1, 1), (2, 1), (4, 0)]);
        let masks: Vec<u64> = tables.tiles.iter().map(|tile| tile.over).collect();
        assert_eq!(masks, [u64::MAX, u64::MAX << 36, 3, u64::MAX << 24]);
        assert_eq!(reached(&tables.tiles, 64, 192), 64..192);
        assert_eq!(reached(&tables.tiles[2..], 64, 150), 128..150);
        assert_eq!(reached(&tables.tiles[..1], 64, 192), 64..64);
        // Block 3 exists as codes alone, so everything before 256 is read as code.
        let full: Vec<_> = (0..5).map(|b| (b == 0 || b == 4).then_some(FullPageId(b))).collect();
        rows.full = &full;
        let tables = ScoreTables::new(&rows, &windows, &scoring(0..1, None));
        assert_eq!(blocks(&tables.tiles), [(0, 0), (1, 1), (2, 1), (3, 1), (4, 0)]);
        assert_eq!(tables.rows, [ScoredRow { position: 271, boundary: 256 }]);
        // Nothing is quantized yet; the sink ends in the middle of a block.
        rows.first_position = 70;
        let full: Vec<_> = (0..2).map(|b| Some(FullPageId(b))).collect();
        (rows.full, rows.coded) = (&full, &[]);
        let tables = ScoreTables::new(&rows, &Windows::new(16, 64).unwrap(), &scoring(0..1, None));
        assert_eq!(blocks(&tables.tiles), [(0, 0), (1, 0)]);
    }

    #[test]
    fn rows_of_a_view_come_first() {
        let windows = Windows::new(64, 64).unwrap();
        let layout = CacheLayout::new(KvFormat::OSCAR2, 1, 3, 64, windows, CodeLayout::GpuTile).unwrap();
        let layout = layout.with_views_in_blocks();
        let pool = PagePool::new(&layout, 1 << 30);
        let kept = vec![(70..80).collect(), vec![], (64..192).collect()];
        let view = View::new(&layout, &pool, 192, kept).unwrap();
        let rows = |until| [0, 1, 2].map(|head| scored_rows(Some(&view), head, 64, until));
        assert_eq!(rows(240), [58, 48, 176]);
        // As the compact sequence has them, whose rows stand just before the view's end.
        assert_eq!(rows(130), [2, 0, 66]);
        assert_eq!(scored_rows(None, 0, 64, 240), 176);
        assert_eq!(scored_rows(None, 0, 64, 10), 0);
        let (full, coded) = ([0, 9, 9, 3, 4].map(|b| (b != 9).then_some(FullPageId(b))), [None; 5]);
        let rows = SequenceRows {
            rows: 0..1,
            first_position: 256,
            full: &full,
            coded: &coded,
            sliding: &[],
            demote: 0..0,
            demote_values: 0..0,
            view: Some(&view),
            states: None,
        };
        let tables = ScoreTables::new(&rows, &windows, &scoring(0..1, None));
        assert_eq!(blocks(&tables.tiles), [(0, 0), (1, 1), (2, 1), (3, 0), (4, 0)]);
    }
}
