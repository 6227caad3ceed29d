//! The tables of a step on the host, as one run of words.
//!
//! After an approximate prefix hit, queries read codes where the windows alone would give them
//! BF16. The decode kernel takes the boundary from the tables. So each such query becomes a
//! sequence of one row over the same pages. From the first query whose own boundary lies behind the
//! hit, the rest of the rows stays together.

use super::hazards::{delay_shared_codes, old_codes, quantizes_only_earlier_rows};
use super::layout::{DemotedTile, NO_PAGE, NO_VIEW, SEQUENCE_WORDS, SequenceInfo, StepTables, window};
use super::views::ViewPlace;
use crate::error::{CudaError, Result};
use crate::memory::DevicePtr;
use crate::storage::Storage;
use oscar_backend::SequenceRows;
use oscar_codec::{PAGE_TOKENS, Side, TILE_TOKENS, Windows};
use std::ops::Range;

/// A summary of a step's tables, for decisions of the host.
#[derive(Clone, Debug, Default)]
pub struct StepSummary {
    pub rows: usize,
    pub sequences: Vec<SequenceInfo>,
    /// Largest page ids + 1.
    pub full_pages: usize,
    pub coded_pages: usize,
    pub sliding_pages: usize,
    /// Tiles that the step quantizes.
    pub tiles: usize,
    /// Whether earlier steps wrote all of these tiles, so that they are quantized before this one.
    pub quantizes_ahead: bool,
    /// Longest context of the step, in tokens.
    pub longest: usize,
    /// Whether every sequence brings one row.
    pub decode: bool,
    /// Whether some sequence reads a view.
    pub views: bool,
}

impl StepSummary {
    /// Whether every sequence brings one row, no layer quantizes anything, and every new token is
    /// read in BF16.
    pub fn only_new_tokens(&self, windows: &Windows) -> bool {
        let in_bf16 = |s: &SequenceInfo| s.boundary as usize <= windows.sink().max(s.first_position as usize);
        let by_layer = !self.quantizes_ahead && self.tiles > 0;
        self.decode && !by_layer && self.sequences.iter().all(in_bf16)
    }
}

/// The words of a step, and the word each table begins at.
#[derive(Default)]
pub struct Words {
    pub words: Vec<u32>,
    pub row_sequence: usize,
    pub row_position: usize,
    pub full: usize,
    pub coded: usize,
    /// Page ids of the sliding layers; nothing in models without any.
    pub sliding: usize,
    pub demoted: usize,
    /// The view of each sequence, if there are any.
    pub views: Vec<Option<ViewPlace>>,
}

impl Words {
    /// Makes the tables of a step.
    pub fn fill(
        &mut self,
        windows: &Windows,
        storage: Storage,
        sequences: &[SequenceRows<'_>],
    ) -> Result<StepSummary> {
        let rows = sequences.iter().map(|s| s.rows.end).max().unwrap_or(0);
        let mut summary = StepSummary { rows, decode: true, ..StepSummary::default() };
        summary.quantizes_ahead = storage == Storage::Codes && quantizes_only_earlier_rows(sequences);
        let mut table = 0;
        // Rows of each entry, and the sequence whose pages they read.
        let mut entries: Vec<(Range<usize>, usize)> = Vec::with_capacity(sequences.len());
        for (index, s) in sequences.iter().enumerate() {
            check(s)?;
            summary.decode &= s.rows.len() == 1;
            summary.longest = summary.longest.max(s.first_position + s.rows.len());
            let view =
                self.views.get(index).copied().flatten().filter(|view| view.end as usize > windows.sink());
            summary.views |= view.is_some();
            summary.coded_pages = summary.coded_pages.max(view.map_or(0, |view| view.pages));
            let coded_until = if storage == Storage::Codes { s.coded_until() } else { 0 };
            for rows in parts(s, windows, coded_until) {
                let first = s.first_position + (rows.start - s.rows.start);
                let end = first + rows.len();
                let boundary = match storage {
                    Storage::Bf16 => windows.sink(),
                    Storage::Codes => windows.boundary(end - 1).max(coded_until).min(end),
                    Storage::Dequantized => windows.boundary(end - 1).min(end),
                };
                summary.sequences.push(SequenceInfo {
                    first_row: rows.start as u32,
                    rows: rows.len() as u32,
                    first_position: first as u32,
                    table: table as u32,
                    old_codes: old_codes(s, rows.len(), boundary, summary.quantizes_ahead) as u32,
                    boundary: boundary as u32,
                    view: view.map_or(NO_VIEW, |view| view.head),
                    view_end: view.map_or(0, |view| view.end),
                });
                entries.push((rows, index));
            }
            table += blocks_of(s);
        }
        if storage == Storage::Codes && !summary.quantizes_ahead {
            delay_shared_codes(&mut summary.sequences, &entries, sequences);
        }
        let slides = sequences.iter().any(|s| !s.sliding.is_empty());
        self.lay_out(entries.len(), rows, table, slides);
        self.write_rows(&entries, &summary.sequences);
        self.write_pages(sequences);
        // One more than the largest id; `NO_PAGE` wraps around to 0.
        let count = |ids: &[u32]| ids.iter().map(|id| id.wrapping_add(1)).max().unwrap_or(0) as usize;
        summary.full_pages = count(&self.words[self.full..][..table]);
        summary.coded_pages = summary.coded_pages.max(count(&self.words[self.coded..][..table]));
        summary.sliding_pages = count(&self.words[self.sliding..self.demoted]);
        // Dequantized history is made on the host: its positions need not be whole tiles.
        if storage == Storage::Codes {
            self.add_tiles(&mut summary, sequences)?;
        }
        Ok(summary)
    }

    /// Says where each table begins. Places depend on rounded-up sizes alone, so that most steps
    /// have the same addresses and recorded launches stay the same.
    fn lay_out(&mut self, entries: usize, rows: usize, table: usize, slides: bool) {
        let room = |count: usize| count.next_power_of_two().max(16);
        self.row_sequence = room(entries) * SEQUENCE_WORDS;
        self.row_position = self.row_sequence + room(rows);
        self.full = self.row_position + room(rows);
        self.coded = self.full + room(table);
        self.sliding = self.coded + room(table);
        self.demoted = self.sliding + if slides { room(table) } else { 0 };
    }

    fn write_rows(&mut self, entries: &[(Range<usize>, usize)], infos: &[SequenceInfo]) {
        self.words.clear();
        self.words.extend_from_slice(bytemuck::cast_slice(infos));
        self.words.resize(self.full, 0);
        for (entry, ((rows, _), info)) in entries.iter().zip(infos).enumerate() {
            for (i, row) in rows.clone().enumerate() {
                self.words[self.row_sequence + row] = entry as u32;
                self.words[self.row_position + row] = info.first_position + i as u32;
            }
        }
    }

    /// Page ids by sequence and block. A sequence has one table, even if its rows attend one by
    /// one. This is most of the host's work in a step.
    fn write_pages(&mut self, sequences: &[SequenceRows<'_>]) {
        for s in sequences {
            self.words.extend(s.full[..blocks_of(s)].iter().map(|id| id.map_or(NO_PAGE, |id| id.0)));
        }
        self.words.resize(self.coded, 0);
        for s in sequences {
            self.write_held(s.coded.iter().map(|id| id.map(|id| id.0)), blocks_of(s));
        }
        self.words.resize(self.sliding, 0);
        if self.sliding < self.demoted {
            for s in sequences {
                self.write_held(s.sliding.iter().map(|id| id.map(|id| id.0)), blocks_of(s));
            }
            // Page 0 is not named by what fills the table up.
            self.words.resize(self.demoted, NO_PAGE);
        }
    }

    /// Appends the ids of the first `blocks` blocks, of which a sequence may hold fewer.
    fn write_held(&mut self, ids: impl Iterator<Item = Option<u32>>, blocks: usize) {
        let end = self.words.len() + blocks;
        self.words.extend(ids.take(blocks).map(|id| id.unwrap_or(NO_PAGE)));
        self.words.resize(end, NO_PAGE);
    }

    /// Appends the tiles that are quantized, and counts their pages.
    fn add_tiles(&mut self, summary: &mut StepSummary, sequences: &[SequenceRows<'_>]) -> Result<()> {
        for s in sequences {
            for position in s.demote.clone().step_by(TILE_TOKENS) {
                let block = position / PAGE_TOKENS;
                let (Some(Some(full)), Some(Some(coded))) = (s.full.get(block), s.coded.get(block)) else {
                    let detail = format!("block {block} is to be quantized but lacks one of its pages");
                    return Err(CudaError::Shape { what: "a sequence of the step", detail });
                };
                let tile = DemotedTile::new(full.0, coded.0, position);
                self.words.extend_from_slice(bytemuck::cast_slice(&[tile]));
                summary.tiles += 1;
                summary.full_pages = summary.full_pages.max(full.0 as usize + 1);
                summary.coded_pages = summary.coded_pages.max(coded.0 as usize + 1);
            }
        }
        Ok(())
    }

    /// The tables whose words begin here.
    pub fn tables(
        &self,
        base: DevicePtr<u32>,
        views: Option<DevicePtr<u32>>,
        windows: &Windows,
        summary: &StepSummary,
    ) -> StepTables {
        StepTables {
            sequences: base.cast(),
            row_sequence: base.add(self.row_sequence),
            row_position: base.add(self.row_position),
            full: base.add(self.full),
            coded: base.add(self.coded),
            demoted: base.add(self.demoted).cast(),
            view_heads: views.map(DevicePtr::cast),
            view_pages: views,
            sequence_count: summary.sequences.len() as u32,
            rows: summary.rows as u32,
            demoted_count: summary.tiles as u32,
            sink: window(windows.sink()),
            recent: window(windows.recent()),
            unit: window(windows.tail(Side::Key).unit),
        }
    }
}

impl Words {
    /// The tables for sliding layers: the same sequences and rows, over the pages of their group. No
    /// rows of these layers are quantized.
    pub fn of_sliding(&self, tables: &StepTables) -> Option<StepTables> {
        let full = tables.full.add(self.sliding - self.full);
        (self.sliding < self.demoted).then_some(StepTables { full, demoted_count: 0, ..*tables })
    }
}

fn check(s: &SequenceRows<'_>) -> Result<()> {
    let end = s.first_position + s.rows.len();
    if s.rows.is_empty() || end > u32::MAX as usize / 2 || s.full.len() < end.div_ceil(PAGE_TOKENS) {
        let detail =
            format!("{} rows from position {} on {} pages", s.rows.len(), s.first_position, s.full.len());
        return Err(CudaError::Shape { what: "a sequence of the step", detail });
    }
    Ok(())
}

/// Blocks of a sequence up to its last new token.
fn blocks_of(s: &SequenceRows<'_>) -> usize {
    (s.first_position + s.rows.len()).div_ceil(PAGE_TOKENS)
}

/// The rows of a sequence by how they attend: one by one while their own boundary lies before
/// `coded_until`, then all others together.
fn parts(s: &SequenceRows<'_>, windows: &Windows, coded_until: usize) -> Vec<Range<usize>> {
    let alone =
        (0..s.rows.len()).take_while(|i| windows.boundary(s.first_position + i) < coded_until).count();
    let mut parts: Vec<Range<usize>> = (s.rows.start..s.rows.start + alone).map(|row| row..row + 1).collect();
    parts.extend((alone < s.rows.len()).then_some(s.rows.start + alone..s.rows.end));
    parts
}

#[cfg(test)]
mod tests;
