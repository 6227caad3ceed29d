//! Views: rows of history copied into the pages of a view, and rows dequantized for the host.

use super::{CudaBackend, grow};
use crate::device::LaunchShape;
use crate::error::{CudaError, Result};
use crate::layout::{Layout, shared_struct};
use crate::memory::DevicePtr;
use crate::pages::{CudaPages, HeadPages};
use crate::sources::VIEWS;
use crate::storage::Storage;
use oscar_backend::{HeadHistory, HistoryRows, SequenceRows, View};
use oscar_codec::{CodedPageId, PAGE_TOKENS, RowPageCodec};
use std::ops::Range;

shared_struct! {
    /// A page of a view, and the sources of its rows.
    #[derive(bytemuck::Pod, bytemuck::Zeroable)]
    struct GatherJob {
        head: u32,
        page: u32,
        first: u32,
        rows: u32,
    }
}

shared_struct! {
    struct GatherParams {
        heads: DevicePtr<HeadPages>,
        jobs: DevicePtr<GatherJob>,
        sources: DevicePtr<u32>,
        head_dim: u32,
    }
}

shared_struct! {
    struct HistoryParams {
        heads: DevicePtr<HeadPages>,
        sources: DevicePtr<u32>,
        keys: DevicePtr<f32>,
        values: DevicePtr<f32>,
        head: u32,
        rows: u32,
        head_dim: u32,
        sides: u32,
    }
}

pub const LAYOUTS: &[Layout] = &[GatherJob::LAYOUT, GatherParams::LAYOUT, HistoryParams::LAYOUT];

/// Threads of a block of `views.cu`.
const THREADS: u32 = 256;
const JOB_WORDS: usize = size_of::<GatherJob>() / 4;

/// The quantized rows of a sequence. A row is named by its page id times 64 plus its place.
struct Rows<'a> {
    sequence: &'a SequenceRows<'a>,
    /// Where whole positions begin.
    start: usize,
}

impl<'a> Rows<'a> {
    /// Refuses histories that are not quantized as far as `until`.
    fn new(sequence: &'a SequenceRows<'a>, pool: &CudaPages, until: usize) -> Result<Self> {
        let refuse = |detail| Err(CudaError::Shape { what: "a history", detail });
        if pool.storage() != Storage::Codes {
            return refuse(format!("{} has no quantized rows on the GPU", pool.layout().format()));
        }
        let start = sequence.view.map_or(pool.layout().windows().sink(), View::end);
        let id = |block: usize| sequence.coded.get(block).copied().flatten();
        if let Some(block) = (start / PAGE_TOKENS..until.div_ceil(PAGE_TOKENS)).find(|&b| id(b).is_none()) {
            return refuse(format!("block {block} before {until} is not quantized"));
        }
        if let Some(id) =
            sequence.coded.iter().flatten().find(|id| id.0 as usize >= u32::MAX as usize / PAGE_TOKENS)
        {
            return refuse(format!("page id {}", id.0));
        }
        Ok(Self { sequence, start })
    }

    /// The row of a position that is kept.
    fn at(&self, head: usize, position: usize) -> Option<u32> {
        let (page, place) = match self.sequence.view {
            Some(view) if position < self.start => {
                let row = view.kept(head).binary_search(&(position as u32)).ok()?;
                (view.pages(head)[row / PAGE_TOKENS], row % PAGE_TOKENS)
            }
            _ => {
                let CodedPageId(page) = self.sequence.coded.get(position / PAGE_TOKENS).copied().flatten()?;
                (page, position % PAGE_TOKENS)
            }
        };
        Some((page as usize * PAGE_TOKENS + place) as u32)
    }

    /// Some of a head's rows before `until`, those of the view first.
    fn some(&self, head: usize, until: usize, wanted: &Range<usize>) -> Vec<u32> {
        let kept = self.sequence.view.map_or(&[][..], |view| view.kept(head));
        let positions = kept.iter().map(|&p| p as usize).chain(self.start..until);
        let wanted = positions.take(wanted.end).skip(wanted.start);
        wanted.filter_map(|position| self.at(head, position)).collect()
    }
}

impl CudaBackend {
    pub(super) fn gather_rows(
        &self,
        from: &SequenceRows<'_>,
        view: &View,
        pool: &mut CudaPages,
    ) -> Result<()> {
        let rows = Rows::new(from, pool, view.end())?;
        let (mut jobs, mut sources) = (Vec::new(), Vec::new());
        let codecs: Vec<RowPageCodec> = pool.layout().coded().map_or(Vec::new(), |t| t.codecs().to_vec());
        if codecs.len() != view.heads() {
            let detail = format!("{} heads of {}", view.heads(), codecs.len());
            return Err(CudaError::Shape { what: "a view", detail });
        }
        for head in (0..view.heads()).filter(|&head| codecs[head].keeps_history()) {
            for (kept, &page) in view.kept(head).chunks(PAGE_TOKENS).zip(view.pages(head)) {
                let (first, rows_of_page) = (sources.len() as u32, kept.len() as u32);
                jobs.push(GatherJob { head: head as u32, page, first, rows: rows_of_page });
                for &position in kept {
                    let row = rows.at(head, position as usize).ok_or_else(|| CudaError::Shape {
                        what: "a view",
                        detail: format!("position {position} of head {head} was evicted before"),
                    })?;
                    sources.push(row);
                }
            }
        }
        if jobs.is_empty() {
            return Ok(());
        }
        let pages = jobs.iter().map(|job| job.page).chain(sources.iter().map(|row| row / PAGE_TOKENS as u32));
        pool.ensure(0, pages.max().map_or(0, |id| id as usize + 1), 0)?;
        let mut words: Vec<u32> = bytemuck::cast_slice(&jobs).to_vec();
        words.append(&mut sources);
        let function = self.kernels.function(&VIEWS, &Vec::new(), c"gather_rows", 0)?;
        let mut state = self.state();
        let state = &mut *state;
        let (buffer, _) = grow(&self.device, &mut state.row_sources, 4 * words.len(), "rows of a view")?;
        state.transfers.enqueue(&words, buffer.slice().part(0..words.len())?)?;
        let params = GatherParams {
            heads: pool.layer(0),
            jobs: buffer.ptr(),
            sources: buffer.ptr().add(jobs.len() * JOB_WORDS),
            head_dim: pool.layout().head_dim() as u32,
        };
        let bytes = codecs.iter().map(RowPageCodec::page_bytes).max().unwrap_or(0);
        // SAFETY: all pages have memory (ensured), heads exist (checked), every job has its rows among
        // the sources, and the shared memory holds the largest page.
        unsafe { self.device.launch(function, LaunchShape::new(jobs.len(), THREADS).shared(bytes), params) }
    }

    pub(super) fn read_rows(
        &self,
        from: &SequenceRows<'_>,
        HeadHistory { head, until, rows: wanted, values }: HeadHistory,
        pool: &CudaPages,
    ) -> Result<HistoryRows> {
        let (layout, mut out) = (pool.layout(), HistoryRows::default());
        let (d, index) = (layout.head_dim(), head.layer * layout.kv_heads() + head.kv_head);
        let rows = Rows::new(from, pool, until)?.some(index, until, &wanted);
        let (side, sides) = (rows.len() * d, 1 + usize::from(values));
        let codec = layout.coded().map(|table| table.codec(head.layer, head.kv_head));
        if rows.is_empty() || codec.is_none_or(|codec| !codec.keeps_history()) {
            out.keys.resize(side, 0.0);
            out.values.resize((sides - 1) * side, 0.0);
            return Ok(out);
        }
        let last = rows.iter().max().map_or(0, |row| row / PAGE_TOKENS as u32);
        // Refuses a page without memory.
        pool.page_at(head.layer, head.kv_head, last, true)?;
        let function = self.kernels.function(&VIEWS, &Vec::new(), c"read_history", 0)?;
        let mut state = self.state();
        let state = &mut *state;
        let (sources, _) = grow(&self.device, &mut state.row_sources, 4 * rows.len(), "rows of a history")?;
        state.transfers.enqueue(&rows, sources.slice().part(0..rows.len())?)?;
        let (buffer, _) = grow(&self.device, &mut state.history, 4 * sides * side, "a dequantized history")?;
        let params = HistoryParams {
            heads: pool.layer(0),
            sources: sources.ptr(),
            keys: buffer.ptr(),
            values: buffer.ptr().add((sides - 1) * side),
            head: index as u32,
            rows: rows.len() as u32,
            head_dim: d as u32,
            sides: sides as u32,
        };
        let grid = LaunchShape::new(rows.len().div_ceil(PAGE_TOKENS), THREADS);
        // SAFETY: the head exists and its pages up to the largest id have memory (`page_at`); the buffer
        // has a row for each source and side, and values are written only if there are two sides.
        unsafe { self.device.launch(function, grid, params) }?;
        state.transfers.download(buffer.slice().part(0..side)?, &mut out.keys)?;
        if values {
            state.transfers.download(buffer.slice().part(side..2 * side)?, &mut out.values)?;
        }
        Ok(out)
    }
}
