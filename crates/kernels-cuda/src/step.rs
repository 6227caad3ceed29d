//! The tables of a step: which rows belong to which sequence, where their pages lie, what is demoted. Made on the host
//! once for all layers and sent to the device in one copy.
//!
//! Where a stored prefix had its tail demoted, queries read as code what the windows alone would give them in BF16. The
//! decode kernel takes the boundary from here, so such queries become sequences of one row each, over the same pages;
//! from the first query on whose own boundary lies beyond, the rest of the rows stays together.
//!
//! What a step codes was mostly written by earlier ones (a decoded token is the oldest of its window when it is coded): then the
//! tiles of all layers are coded at once before the step, which is then like any other, and not layer by layer.
//!
//! **Invariant:** the structs here have the layout of those in `kernels/common.cuh`.

use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::memory::Buffer;
use crate::pages::CudaPages;
use crate::storage::Storage;
use crate::uploads::Uploads;
use oscar_backend::SequenceRows;
use oscar_codec::{PAGE_TOKENS, Side, TILE_TOKENS, Windows};
use std::ops::Range;
use std::sync::Weak;

const NO_PAGE: u32 = u32::MAX;

/// `SequenceInfo` of the kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct SequenceInfo {
    pub first_row: u32,
    pub rows: u32,
    pub first_position: u32,
    pub table: u32,
    /// See [`old_codes`].
    pub old_codes: u32,
    pub boundary: u32,
}

/// `StepTables` of the kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::NoUninit)]
pub struct StepTables {
    pub sequences: u64,
    pub row_sequence: u64,
    pub row_position: u64,
    pub full: u64,
    pub coded: u64,
    pub demoted: u64,
    pub sequence_count: u32,
    pub rows: u32,
    pub demoted_count: u32,
    pub sink: u32,
    pub recent: u32,
    pub unit: u32,
}

/// What the host plans with.
#[derive(Clone, Debug, Default)]
pub struct StepSummary {
    pub rows: usize,
    pub sequences: Vec<SequenceInfo>,
    /// Largest page ids + 1.
    pub full_pages: usize,
    pub coded_pages: usize,
    pub demoted_tiles: usize,
    /// Was all that is coded written by earlier steps, so that it can be coded before this one?
    pub codes_ahead: bool,
    /// Longest context of the step, in tokens.
    pub longest: usize,
    /// Does every sequence bring one row?
    pub decode: bool,
}

impl StepSummary {
    /// Does every sequence bring one row, is nothing coded in the middle of the step, and is every new token read in BF16?
    pub fn only_new_tokens(&self, windows: &Windows) -> bool {
        let in_bf16 = |s: &SequenceInfo| s.boundary as usize <= windows.sink().max(s.first_position as usize);
        self.decode && self.coded_by_layer() == 0 && self.sequences.iter().all(in_bf16)
    }

    /// Tiles that every layer codes when its turn comes.
    fn coded_by_layer(&self) -> usize {
        if self.codes_ahead { 0 } else { self.demoted_tiles }
    }
}

impl Words {
    /// Makes of a step's tables those of the next one, every sequence one token on, and says how many tiles that codes. `None`, and
    /// nothing changed, where it cannot be foreseen: it needs a page whose id nobody knows, or the step is not one of single tokens.
    fn advance(&mut self, summary: &StepSummary, windows: &Windows, storage: Storage) -> Option<usize> {
        if storage == Storage::Decoded || !summary.only_new_tokens(windows) {
            return None;
        }
        let mut tiles = Vec::new();
        let mut infos = summary.sequences.clone();
        for s in &mut infos {
            let (this, next) = (s.first_position as usize, s.first_position as usize + 1);
            if next.is_multiple_of(PAGE_TOKENS) {
                return None;
            }
            s.first_position += 1;
            if storage == Storage::Plain {
                continue;
            }
            let coded_until = s.boundary as usize;
            let boundary = windows.boundary(next).max(coded_until);
            // Before the end of the sink the boundary moves with the token.
            if coded_until > this || boundary > next {
                return None;
            }
            for position in (coded_until..boundary).step_by(TILE_TOKENS) {
                tiles.extend(self.tile(s, position)?);
            }
            // What was coded before the step begins is as old as the rest.
            (s.boundary, s.old_codes) = (boundary as u32, boundary as u32);
        }
        if storage == Storage::Codes {
            for s in &summary.sequences {
                self.give_back_full_page(s, windows);
            }
        }
        self.words[..infos.len() * SEQUENCE_WORDS].copy_from_slice(bytemuck::cast_slice(&infos));
        for row in 0..summary.rows {
            self.words[self.row_position + row] += 1;
        }
        self.words.truncate(self.demoted);
        self.words.extend_from_slice(&tiles);
        Some(tiles.len() / TILE_WORDS)
    }

    /// The tile of a position that is to be coded, if both its pages are there.
    fn tile(&self, s: &SequenceInfo, position: usize) -> Option<[u32; TILE_WORDS]> {
        let block = position / PAGE_TOKENS;
        let [full, coded] = [self.full, self.coded].map(|table| self.words[table + s.table as usize + block]);
        (full != NO_PAGE && coded != NO_PAGE).then(|| tile_words(full, coded, position))
    }

    /// After a step that coded the last tile of a page the sequence has no use for the full one. (Of several pages that a large unit
    /// ends, only the last is foreseen; then the step that comes is another.)
    fn give_back_full_page(&mut self, s: &SequenceInfo, windows: &Windows) {
        let boundary = s.boundary as usize;
        if boundary.is_multiple_of(PAGE_TOKENS) && boundary >= windows.sink() + PAGE_TOKENS {
            self.words[self.full + s.table as usize + boundary / PAGE_TOKENS - 1] = NO_PAGE;
        }
    }
}

/// Words of a [`SequenceInfo`], and of a tile: its pages and where in them it lies.
const SEQUENCE_WORDS: usize = size_of::<SequenceInfo>() / 4;
const TILE_WORDS: usize = 3;

/// `DemotedTile` of the kernels: the tile of a position in these pages.
fn tile_words(full: u32, coded: u32, position: usize) -> [u32; TILE_WORDS] {
    [full, coded, (position % PAGE_TOKENS / TILE_TOKENS) as u32]
}

/// The words of a step, and where each table begins in them.
#[derive(Default)]
struct Words {
    words: Vec<u32>,
    row_sequence: usize,
    row_position: usize,
    full: usize,
    coded: usize,
    demoted: usize,
}

/// Makes the tables; kept from step to step.
///
/// While the GPU is at a step the host has nothing to do, and mostly the next step is the same sequences one token on: its
/// tables are [foreseen](StepPlanner::foresee) and sent ahead, and what it codes is coded. What comes is compared with them, word by
/// word. If another step comes, tiles were coded that nobody has asked for. This sequence reads them as code only when it has coded
/// them again; others that share the page may be further on, and find the codes that they or someone else made of the same rows.
#[derive(Default)]
pub struct StepPlanner {
    device_tables: Option<Buffer>,
    words: Words,
    summary: StepSummary,
    /// What was planned last: windows, storage and pages of it.
    step: Option<PlannedLast>,
    /// The words that the device holds, or will when the stream has come so far.
    sent: Vec<u32>,
    /// Are these of a step that has not come yet?
    foreseen: bool,
}

/// What a step was planned for.
struct PlannedLast {
    windows: Windows,
    storage: Storage,
    /// Serial number of the pages, as long as they are there.
    pages: Weak<u64>,
}

impl PlannedLast {
    fn of(pages: &CudaPages) -> Self {
        Self { windows: *pages.layout().windows(), storage: pages.storage(), pages: pages.living() }
    }

    /// Pages that are gone are like no others.
    fn is_of(&self, pages: &CudaPages) -> bool {
        self.pages.upgrade().is_some_and(|serial| *serial == pages.serial())
    }
}

/// The tables of a step.
pub struct PlannedStep {
    /// What every layer is given.
    pub tables: StepTables,
    /// The same with tiles that are to be coded in all layers before the first; of a foreseen step they are coded already.
    pub ahead: Option<StepTables>,
    /// They are those that were foreseen, and whatever was made of them then still holds.
    pub foreseen: bool,
}

impl StepPlanner {
    pub fn summary(&self) -> &StepSummary {
        &self.summary
    }

    /// Plans a step over `pages` and sends its tables through `uploads`.
    pub fn plan(
        &mut self,
        device: &Device,
        uploads: &mut Uploads,
        pages: &CudaPages,
        sequences: &[SequenceRows<'_>],
    ) -> Result<PlannedStep> {
        let (windows, storage) = (*pages.layout().windows(), pages.storage());
        let last = self.step.take();
        let foreseen = std::mem::take(&mut self.foreseen) && last.is_some_and(|last| last.is_of(pages));
        self.summary = fill(&mut self.words, &windows, storage, sequences)?;
        let foreseen = foreseen && self.words.words == self.sent;
        if !foreseen {
            self.send(device, uploads)?;
        }
        self.step = Some(PlannedLast::of(pages));
        let all = self.tables(&windows);
        let tables = StepTables { demoted_count: self.summary.coded_by_layer() as u32, ..all };
        Ok(PlannedStep { tables, ahead: self.summary.codes_ahead.then_some(all), foreseen })
    }

    /// If the next step can be foreseen, all sequences one token on and no page more, sends its tables, and returns them with the tiles
    /// that are to be coded in all layers. They are of no use to the step that was planned last, whose launches must all have been
    /// made.
    pub fn foresee(&mut self, device: &Device, uploads: &mut Uploads) -> Result<Option<StepTables>> {
        let Some(last) = self.step.as_ref().filter(|last| !self.foreseen && last.pages.strong_count() > 0)
        else {
            return Ok(None);
        };
        let windows = last.windows;
        let Some(tiles) = self.words.advance(&self.summary, &windows, last.storage) else {
            return Ok(None);
        };
        // The plan that is made again, and the launches after it, know these tables by their address.
        if self.device_tables.as_ref().is_none_or(|b| b.bytes() < 4 * self.words.words.len()) {
            return Ok(None);
        }
        self.send(device, uploads)?;
        self.foreseen = true;
        Ok(Some(StepTables { demoted_count: tiles as u32, ..self.tables(&windows) }))
    }

    /// What was made of foreseen tables is of no use.
    pub fn forget(&mut self) {
        self.foreseen = false;
    }

    /// Plans the coding of rows outside of a step: there are tiles, and no rows.
    pub fn plan_demotion(
        &mut self,
        device: &Device,
        uploads: &mut Uploads,
        windows: &Windows,
        sequences: &[SequenceRows<'_>],
    ) -> Result<StepTables> {
        self.words = Words::default();
        self.summary = StepSummary::default();
        (self.step, self.foreseen) = (None, false);
        add_tiles(&mut self.words, &mut self.summary, sequences)?;
        self.send(device, uploads)?;
        Ok(self.tables(windows))
    }

    /// Sends what the device does not hold yet.
    fn send(&mut self, device: &Device, uploads: &mut Uploads) -> Result<()> {
        let bytes = 4 * self.words.words.len();
        if self.device_tables.as_ref().is_none_or(|b| b.bytes() < bytes) {
            self.device_tables = None;
            self.sent.clear();
            self.device_tables = Some(device.alloc(bytes.next_power_of_two().max(1 << 16), "page tables")?);
        }
        let base = self.device_tables.as_ref().map_or(0, Buffer::address);
        let w = &self.words;
        // After a failure nothing is known of what the device holds.
        let mut sent = std::mem::take(&mut self.sent);
        // Page ids, by far the most of it, hardly change.
        for part in [0..w.full, w.full..w.demoted, w.demoted..w.words.len()] {
            if let Some(changed) = changed(&sent, &w.words, part) {
                let to = base + 4 * changed.start as u64;
                uploads.enqueue(bytemuck::cast_slice(&w.words[changed]), to)?;
            }
        }
        sent.clone_from(&w.words);
        self.sent = sent;
        Ok(())
    }

    fn tables(&self, windows: &Windows) -> StepTables {
        let base = self.device_tables.as_ref().map_or(0, Buffer::address);
        let at = |words: usize| base + 4 * words as u64;
        let w = &self.words;
        StepTables {
            sequences: base,
            row_sequence: at(w.row_sequence),
            row_position: at(w.row_position),
            full: at(w.full),
            coded: at(w.coded),
            demoted: at(w.demoted),
            sequence_count: self.summary.sequences.len() as u32,
            rows: self.summary.rows as u32,
            demoted_count: self.summary.demoted_tiles as u32,
            sink: window(windows.sink()),
            recent: window(windows.recent()),
            unit: window(windows.tail(Side::Key).unit),
        }
    }
}

/// The smallest range of `part` outside of which nothing changed.
fn changed(old: &[u32], new: &[u32], part: Range<usize>) -> Option<Range<usize>> {
    // Words that are the same are passed over many at a time.
    const STRIDE: usize = 256;
    let stride = |start: usize| start..(start + STRIDE).min(part.end);
    let changes = |start: &usize| old.get(stride(*start)) != Some(&new[stride(*start)]);
    let differs = |at: &usize| old.get(*at) != Some(&new[*at]);
    let mut starts = part.clone().step_by(STRIDE);
    let first = starts.clone().find(changes)?;
    let last = starts.rfind(changes)?;
    let (first, last) = (stride(first).find(differs)?, stride(last).rfind(differs)?);
    Some(first..last + 1)
}

/// A size of the windows as kernels take it: positions end far below the limit.
pub(crate) fn window(tokens: usize) -> u32 {
    tokens.min(u32::MAX as usize / 2) as u32
}

fn fill(
    w: &mut Words,
    windows: &Windows,
    storage: Storage,
    sequences: &[SequenceRows<'_>],
) -> Result<StepSummary> {
    let rows = sequences.iter().map(|s| s.rows.end).max().unwrap_or(0);
    let mut summary = StepSummary { rows, decode: true, ..StepSummary::default() };
    summary.codes_ahead = storage == Storage::Codes && only_earlier_rows_are_coded(sequences);
    let mut table = 0;
    // Rows of each entry, and the sequence whose pages they read.
    let mut entries: Vec<(Range<usize>, usize)> = Vec::with_capacity(sequences.len());
    for (index, s) in sequences.iter().enumerate() {
        let end = s.first_position + s.rows.len();
        if s.rows.is_empty() || end > u32::MAX as usize / 2 || s.full.len() < end.div_ceil(PAGE_TOKENS) {
            let detail =
                format!("{} rows from position {} on {} pages", s.rows.len(), s.first_position, s.full.len());
            return Err(CudaError::Shape { what: "a sequence of the step", detail });
        }
        let blocks = end.div_ceil(PAGE_TOKENS);
        summary.decode &= s.rows.len() == 1;
        summary.longest = summary.longest.max(end);
        let coded_until = if storage == Storage::Codes { s.coded_until() } else { 0 };
        for rows in parts(s, windows, coded_until) {
            let first = s.first_position + (rows.start - s.rows.start);
            let end = first + rows.len();
            let boundary = match storage {
                Storage::Plain => windows.sink(),
                Storage::Codes => windows.boundary(end - 1).max(coded_until).min(end),
                Storage::Decoded => windows.boundary(end - 1).min(end),
            };
            summary.sequences.push(SequenceInfo {
                first_row: rows.start as u32,
                rows: rows.len() as u32,
                first_position: first as u32,
                table,
                old_codes: old_codes(s, rows.len(), boundary, summary.codes_ahead) as u32,
                boundary: boundary as u32,
            });
            entries.push((rows, index));
        }
        table += blocks as u32;
    }
    if storage == Storage::Codes && !summary.codes_ahead {
        codes_of_others_are_new(&mut summary.sequences, &entries, sequences);
    }
    // Tables begin at places that depend on rounded-up sizes alone, so that most steps have the same addresses and
    // recorded launches stay the same.
    let room = |count: usize| count.next_power_of_two().max(16);
    let table = table as usize;
    w.words.clear();
    w.words.extend_from_slice(bytemuck::cast_slice(&summary.sequences));
    w.row_sequence = room(entries.len()) * SEQUENCE_WORDS;
    w.row_position = w.row_sequence + room(rows);
    w.full = w.row_position + room(rows);
    w.coded = w.full + room(table);
    w.demoted = w.coded + room(table);
    w.words.resize(w.full, 0);
    for (entry, ((rows, _), info)) in entries.iter().zip(&summary.sequences).enumerate() {
        for (i, row) in rows.clone().enumerate() {
            w.words[w.row_sequence + row] = entry as u32;
            w.words[w.row_position + row] = info.first_position + i as u32;
        }
    }
    // A sequence has one table, however many of its rows are attended alone. This is most of what the host does in a step.
    let blocks_of = |s: &SequenceRows<'_>| (s.first_position + s.rows.len()).div_ceil(PAGE_TOKENS);
    for s in sequences {
        let blocks = blocks_of(s);
        w.words.extend(s.full[..blocks].iter().map(|id| id.map_or(NO_PAGE, |id| id.0)));
    }
    w.words.resize(w.coded, 0);
    for s in sequences {
        let blocks = blocks_of(s);
        let held = &s.coded[..blocks.min(s.coded.len())];
        w.words.extend(held.iter().map(|id| id.map_or(NO_PAGE, |id| id.0)));
        w.words.extend(std::iter::repeat_n(NO_PAGE, blocks - held.len()));
    }
    w.words.resize(w.demoted, 0);
    // One more than the largest id; `NO_PAGE` comes to nothing.
    let count = |ids: &[u32]| ids.iter().map(|id| id.wrapping_add(1)).max().unwrap_or(0) as usize;
    summary.full_pages = count(&w.words[w.full..][..table]);
    summary.coded_pages = count(&w.words[w.coded..][..table]);
    // Decoded history is made on the host: its positions need not be whole tiles.
    if storage == Storage::Codes {
        add_tiles(w, &mut summary, sequences)?;
    }
    Ok(summary)
}

/// Is something coded, and nothing of it among the rows that the step brings?
fn only_earlier_rows_are_coded(sequences: &[SequenceRows<'_>]) -> bool {
    let earlier = |s: &SequenceRows<'_>| s.demote.is_empty() || s.demote.end <= s.first_position;
    sequences.iter().any(|s| !s.demote.is_empty()) && sequences.iter().all(earlier)
}

/// Up to where the codes that these `rows` of a sequence read, up to their boundary, were made before this step's first layer: the
/// boundary itself only if all that they read was there before but their own tokens.
fn old_codes(s: &SequenceRows<'_>, rows: usize, boundary: usize, codes_ahead: bool) -> usize {
    if rows < s.rows.len() {
        // A row that is attended alone reads what the rows before it bring.
        0
    } else if codes_ahead || s.demote.is_empty() {
        boundary
    } else {
        boundary.min(s.demote.start)
    }
}

/// Where sequences share a coded page and one of them codes a tile of it in this step, none may read it before. Shared
/// pages lie at the same place of every table: they hold a common beginning.
fn codes_of_others_are_new(
    infos: &mut [SequenceInfo],
    entries: &[(Range<usize>, usize)],
    sequences: &[SequenceRows<'_>],
) {
    for writer in sequences.iter().filter(|s| !s.demote.is_empty()) {
        for block in writer.demote.start / PAGE_TOKENS..writer.demote.end.div_ceil(PAGE_TOKENS) {
            let page = writer.coded.get(block).copied().flatten();
            for ((_, index), info) in entries.iter().zip(&mut *infos) {
                if page.is_some() && sequences[*index].coded.get(block).copied().flatten() == page {
                    info.old_codes = info.old_codes.min((block * PAGE_TOKENS) as u32);
                }
            }
        }
    }
}

/// The rows of a sequence by how they are attended: those whose own boundary lies before a demoted tail's end one by
/// one, the others together.
fn parts(s: &SequenceRows<'_>, windows: &Windows, coded_until: usize) -> Vec<Range<usize>> {
    let alone =
        (0..s.rows.len()).take_while(|i| windows.boundary(s.first_position + i) < coded_until).count();
    let mut parts: Vec<Range<usize>> = (s.rows.start..s.rows.start + alone).map(|row| row..row + 1).collect();
    parts.extend((alone < s.rows.len()).then_some(s.rows.start + alone..s.rows.end));
    parts
}

/// Appends the tiles that are coded, and counts their pages.
fn add_tiles(w: &mut Words, summary: &mut StepSummary, sequences: &[SequenceRows<'_>]) -> Result<()> {
    for s in sequences {
        for position in s.demote.clone().step_by(TILE_TOKENS) {
            let block = position / PAGE_TOKENS;
            let (Some(Some(full)), Some(Some(coded))) = (s.full.get(block), s.coded.get(block)) else {
                let detail = format!("block {block} is to be coded but lacks one of its pages");
                return Err(CudaError::Shape { what: "a sequence of the step", detail });
            };
            w.words.extend(tile_words(full.0, coded.0, position));
            summary.demoted_tiles += 1;
            summary.full_pages = summary.full_pages.max(full.0 as usize + 1);
            summary.coded_pages = summary.coded_pages.max(coded.0 as usize + 1);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_cache::{PagePool, SequencePages};
    use oscar_codec::{CacheLayout, CodeLayout, CodedPageId, FullPageId, KvFormat};

    #[test]
    fn tables_name_rows_pages_and_tiles() {
        let full = [Some(FullPageId(4)), None, Some(FullPageId(7)), Some(FullPageId(8)), Some(FullPageId(2))];
        let coded = [None, Some(CodedPageId(3)), Some(CodedPageId(0))];
        let short = [Some(FullPageId(9))];
        let windows = Windows::new(64, 64).unwrap();
        let sequences = [
            SequenceRows {
                rows: 1..3,
                first_position: 270,
                full: &full,
                coded: &coded,
                demote: 176..208,
                demote_values: 176..208,
            },
            SequenceRows {
                rows: 0..1,
                first_position: 5,
                full: &short,
                coded: &[],
                demote: 0..0,
                demote_values: 0..0,
            },
        ];
        // Tile 176 lies in block 2, tile 192 in block 3, which has no coded page.
        let mut words = Words::default();
        assert!(
            fill(&mut words, &windows, Storage::Codes, &sequences)
                .unwrap_err()
                .to_string()
                .contains("block 3")
        );
        let sequences = [SequenceRows { demote: 176..192, ..sequences[0].clone() }, sequences[1].clone()];
        let summary = fill(&mut words, &windows, Storage::Codes, &sequences).unwrap();
        assert_eq!((summary.rows, summary.full_pages, summary.coded_pages), (3, 10, 4));
        assert!(!summary.decode && summary.longest == 272 && summary.demoted_tiles == 1);
        assert_eq!(summary.sequences[0].boundary as usize, windows.boundary(271));
        // What it codes was there before, and is coded before its first layer: then all codes are old.
        assert!(summary.codes_ahead && summary.coded_by_layer() == 0);
        let old_codes = |s: &StepSummary| s.sequences.iter().map(|s| s.old_codes).collect::<Vec<_>>();
        assert_eq!(old_codes(&summary), [windows.boundary(271) as u32, 6]);
        // Rows that the step itself brings are coded when a layer has made them, and so is everything else.
        let prompt = SequenceRows { rows: 1..82, first_position: 191, ..sequences[0].clone() };
        let by_layer = [prompt, sequences[1].clone()];
        let summary_by_layer = fill(&mut Words::default(), &windows, Storage::Codes, &by_layer).unwrap();
        assert!(!summary_by_layer.codes_ahead && summary_by_layer.coded_by_layer() == 1);
        assert_eq!(old_codes(&summary_by_layer), [128, 6], "the page of tile 176 begins at 128");
        // Another sequence that reads the page is told, one that has another page there is not.
        let reader = SequenceRows { rows: 82..83, demote: 0..0, ..sequences[0].clone() };
        let elsewhere = [None, Some(CodedPageId(3)), Some(CodedPageId(1))];
        let other = SequenceRows { rows: 83..84, coded: &elsewhere, ..reader.clone() };
        let all = [by_layer[0].clone(), by_layer[1].clone(), reader, other];
        let shared = fill(&mut Words::default(), &windows, Storage::Codes, &all).unwrap();
        assert_eq!(old_codes(&shared)[2..], [128, windows.boundary(270) as u32]);
        let w = &words.words;
        assert_eq!(w[words.row_sequence..][..3], [1, 0, 0]);
        assert_eq!(w[words.row_position..][..3], [5, 270, 271]);
        assert_eq!(w[words.full..][..6], [4, NO_PAGE, 7, 8, 2, 9]);
        assert_eq!(w[words.coded..][..6], [NO_PAGE, 3, 0, NO_PAGE, NO_PAGE, NO_PAGE]);
        assert_eq!(w[words.demoted..], [7, 0, 3]);
    }
    /// 400 tokens are stored; blocks 1 to 3 were demoted although the windows would keep 240 and later in BF16.
    #[test]
    fn queries_over_a_demoted_tail_go_one_by_one() {
        let full: Vec<_> = (0..9).map(|b| (!(1..4).contains(&b)).then_some(FullPageId(b))).collect();
        let coded: Vec<_> = (0..9).map(|b| (1..4).contains(&b).then_some(CodedPageId(b))).collect();
        let windows = Windows::new(64, 160).unwrap();
        let rows = SequenceRows {
            rows: 2..52,
            first_position: 400,
            full: &full,
            coded: &coded,
            demote: 0..0,
            demote_values: 0..0,
        };
        assert_eq!((rows.coded_until(), windows.boundary(400), windows.boundary(415)), (256, 240, 256));
        let mut words = Words::default();
        let sequences = [SequenceRows { rows: 0..2, first_position: 20, ..rows.clone() }, rows];
        let summary = fill(&mut words, &windows, Storage::Codes, &sequences).unwrap();
        // Its own boundary is the sink until far later, so both of the first sequence's rows go alone.
        assert_eq!(summary.sequences.len(), 2 + 15 + 1);
        for (i, info) in summary.sequences[2..17].iter().enumerate() {
            let wanted = SequenceInfo {
                first_row: 2 + i as u32,
                rows: 1,
                first_position: 400 + i as u32,
                table: 1,
                old_codes: 0, // it reads tokens of this step beside its own
                boundary: 256,
            };
            assert_eq!(*info, wanted);
        }
        let rest = summary.sequences[17];
        assert_eq!((rest.first_row, rest.rows, rest.first_position, rest.table), (17, 35, 415, 1));
        assert_eq!(rest.boundary as usize, windows.boundary(449));
        assert_eq!(summary.sequences[0].boundary, 21, "never beyond the query itself");
        let w = &words.words;
        assert_eq!(
            w[words.row_sequence..][..20],
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 17, 17]
        );
        assert_eq!(
            w[words.row_position..][..20],
            [
                20, 21, 400, 401, 402, 403, 404, 405, 406, 407, 408, 409, 410, 411, 412, 413, 414, 415, 416,
                417
            ]
        );
        assert_eq!(w[words.full..][..5], [0, 0, NO_PAGE, NO_PAGE, NO_PAGE]);
        // A decoded history is never read by this rule.
        let summary = fill(&mut words, &windows, Storage::Decoded, &sequences).unwrap();
        assert_eq!((summary.sequences.len(), summary.demoted_tiles), (2, 0));
    }

    #[test]
    fn only_the_step_that_was_foreseen_is_taken_for_it() {
        let windows = Windows::new(64, 64).unwrap();
        let full = [Some(FullPageId(4)), None, None, Some(FullPageId(8)), Some(FullPageId(2))];
        let coded = [None, Some(CodedPageId(3)), Some(CodedPageId(0)), Some(CodedPageId(7))];
        let short = [Some(FullPageId(9)), Some(FullPageId(1))];
        fn row<'a>(
            row: usize,
            first_position: usize,
            full: &'a [Option<FullPageId>],
            coded: &'a [Option<CodedPageId>],
        ) -> SequenceRows<'a> {
            let rows = row..row + 1;
            SequenceRows { rows, first_position, full, coded, demote: 0..0, demote_values: 0..0 }
        }
        for storage in [Storage::Codes, Storage::Plain] {
            let mut words = Words::default();
            let before = [row(0, 260, &full, &coded), row(1, 80, &short, &[])];
            let last = fill(&mut words, &windows, storage, &before).unwrap();
            assert_eq!(words.advance(&last, &windows, storage), Some(0));
            let holds = |sequences: &[SequenceRows<'_>]| {
                let mut made = Words::default();
                fill(&mut made, &windows, storage, sequences).unwrap();
                made.words == words.words
            };
            let next = || [row(0, 261, &full, &coded), row(1, 81, &short, &[])];
            assert!(holds(&next()));
            // What was foreseen is also what would have been made.
            let mut made = Words::default();
            fill(&mut made, &windows, storage, &next()).unwrap();
            assert_eq!(words.words, made.words);

            assert!(!holds(&before), "the same step again");
            assert!(!holds(&next()[..1]), "a sequence less");
            let [a, b] = next();
            assert!(!holds(&[a, b, row(2, 5, &short, &[])]), "a sequence more");
            assert!(!holds(&[row(0, 81, &short, &[]), row(1, 261, &full, &coded)]), "another order");
            assert!(!holds(&[row(0, 262, &full, &coded), row(1, 81, &short, &[])]), "further on");
            let [a, mut b] = next();
            b.rows = 1..3;
            assert!(!holds(&[a, b]), "two tokens");
            for changed in 0..full.len() {
                let mut pages = full;
                pages[changed] = Some(FullPageId(77));
                assert!(
                    !holds(&[row(0, 261, &pages, &coded), row(1, 81, &short, &[])]),
                    "full page {changed}"
                );
            }
            for changed in 0..coded.len() {
                let mut pages = coded;
                pages[changed] = Some(CodedPageId(77));
                assert!(!holds(&[row(0, 261, &full, &pages), row(1, 81, &short, &[])]), "code {changed}");
            }
            let beyond = [coded[0], coded[1], coded[2], coded[3], Some(CodedPageId(5))];
            assert!(!holds(&[row(0, 261, &full, &beyond), row(1, 81, &short, &[])]), "one more coded page");
            let [mut a, b] = next();
            (a.demote, a.demote_values) = (192..208, 192..208);
            // Plain pages have no codes, and a range to code means nothing to them.
            assert_eq!(holds(&[a, b]), storage == Storage::Plain, "something to code");
        }
    }

    /// Steps of two sequences as the cache prepares them, foreseen from one to the next.
    #[test]
    fn steps_are_foreseen_to_the_word_unless_they_need_a_page() {
        for (windows, format) in [
            (Windows::new(64, 64).unwrap(), KvFormat::OSCAR2),
            (Windows::new(16, 48).unwrap(), KvFormat::OSCAR2),
            (Windows::unlimited(), KvFormat::Bf16),
        ] {
            let layout = CacheLayout::new(format, 1, 1, 64, windows, CodeLayout::GpuTile).unwrap();
            let storage = Storage::of(&layout).unwrap();
            let pool = PagePool::new(&layout, 1 << 24);
            let mut pages = [SequencePages::new(), SequencePages::new()];
            let mut step = |tokens: [usize; 2]| {
                let mut prepared = Vec::new();
                for (pages, tokens) in pages.iter_mut().zip(tokens) {
                    prepared.push(pages.prepare(&layout, &pool, tokens).unwrap());
                }
                let firsts = [0, tokens[0]];
                let rows: Vec<_> = pages
                    .iter()
                    .zip(&prepared)
                    .zip(firsts)
                    .map(|((pages, step), first)| SequenceRows {
                        rows: first..first + step.positions.len(),
                        first_position: step.positions.start,
                        full: pages.full(),
                        coded: pages.coded(),
                        demote: step.demote.clone(),
                        demote_values: step.demote_values.clone(),
                    })
                    .collect();
                let mut words = Words::default();
                let summary = fill(&mut words, &windows, storage, &rows).unwrap();
                for (pages, step) in pages.iter_mut().zip(&prepared) {
                    pages.commit(&layout, step);
                }
                let takes_a_page = prepared.iter().any(|step| {
                    let coded = &step.demote;
                    let begins = coded.start == windows.sink() || coded.start.is_multiple_of(PAGE_TOKENS);
                    step.positions.start.is_multiple_of(PAGE_TOKENS) || !coded.is_empty() && begins
                });
                (words, summary, takes_a_page)
            };
            let (mut before, mut last, _) = step([200, 71]);
            let (mut foreseen, mut coding) = (0, 0);
            for _ in 0..300 {
                let advanced = before.advance(&last, &windows, storage);
                let (words, summary, takes_a_page) = step([1, 1]);
                // A step behind a prompt is not foreseen.
                assert_eq!(advanced.is_some(), last.decode && !takes_a_page, "{:?}", summary.sequences);
                if let Some(tiles) = advanced {
                    assert_eq!(before.words, words.words, "{:?}", summary.sequences);
                    assert_eq!((tiles, tiles > 0), (summary.demoted_tiles, summary.codes_ahead));
                    (foreseen, coding) = (foreseen + 1, coding + tiles);
                }
                (before, last) = (words, summary);
            }
            // Of 64 steps a sequence takes a full page in one and a coded one in another, and codes tiles in three more.
            let codes = storage == Storage::Codes;
            assert!(
                foreseen > if codes { 270 } else { 285 } && (coding > 20) == codes,
                "{foreseen} {coding}"
            );
        }
    }

    #[test]
    fn short_and_decoded_contexts_are_not_foreseen() {
        let windows = Windows::new(64, 64).unwrap();
        let full = [Some(FullPageId(9))];
        let rows = SequenceRows {
            rows: 0..1,
            first_position: 20,
            full: &full,
            coded: &[],
            demote: 0..0,
            demote_values: 0..0,
        };
        // The boundary of a short context moves with its end; its new token is read in BF16 all the same.
        for (storage, advances) in
            [(Storage::Codes, None), (Storage::Decoded, None), (Storage::Plain, Some(0))]
        {
            let mut words = Words::default();
            let summary = fill(&mut words, &windows, storage, std::slice::from_ref(&rows)).unwrap();
            assert!(summary.only_new_tokens(&windows));
            let made = words.words.clone();
            assert_eq!(words.advance(&summary, &windows, storage), advances);
            assert_eq!(words.words == made, advances.is_none());
        }
    }

    #[test]
    fn what_changed_is_sent() {
        let old = [1, 2, 3, 4, 5];
        assert_eq!(changed(&old, &[1, 2, 3, 4, 5], 0..5), None);
        assert_eq!(changed(&old, &[1, 0, 3, 0, 5], 0..5), Some(1..4));
        assert_eq!(changed(&old, &[1, 0, 3, 0, 5], 2..5), Some(3..4));
        assert_eq!(changed(&old, &[1, 2], 0..2), None, "whatever lies behind them");
        assert_eq!(changed(&old, &[1, 0, 3, 4, 5, 6, 7], 1..7), Some(1..7));
        assert_eq!(changed(&old, &[1, 0, 3, 4, 5, 6, 7], 2..7), Some(5..7));
        assert_eq!(changed(&old, &[], 0..0), None);
        // Over many strides, from any place.
        let old: Vec<u32> = (0..3000).collect();
        for part in [0..3000, 7..2999, 256..512, 2900..3000] {
            for (a, b) in [(300, 300), (256, 511), (7, 2998), (2999, 2999), (0, 1), (2899, 2950)] {
                let mut new = old.clone();
                (new[a], new[b]) = (u32::MAX, u32::MAX);
                let inside: Vec<usize> = [a, b].into_iter().filter(|at| part.contains(at)).collect();
                let expected = inside.first().map(|&first| first..inside[inside.len() - 1] + 1);
                assert_eq!(changed(&old, &new, part.clone()), expected, "{part:?} {a} {b}");
            }
        }
    }

    #[test]
    fn demotions_outside_a_step_bring_tiles_alone() {
        let (full, coded) = ([None, Some(FullPageId(11))], [None, Some(CodedPageId(6))]);
        let tail = SequenceRows {
            rows: 0..0,
            first_position: 128,
            full: &full,
            coded: &coded,
            demote: 80..128,
            demote_values: 80..128,
        };
        let (mut words, mut summary) = (Words::default(), StepSummary::default());
        add_tiles(&mut words, &mut summary, &[tail]).unwrap();
        assert_eq!(words.words, [11, 6, 1, 11, 6, 2, 11, 6, 3]);
        assert_eq!((summary.demoted_tiles, summary.full_pages, summary.coded_pages), (3, 12, 7));
    }
}
