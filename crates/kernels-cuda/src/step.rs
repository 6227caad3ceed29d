//! The tables of a step: which rows belong to which sequence, where their pages lie, what is demoted. Made on the host
//! once for all layers and sent to the device in one copy.
//!
//! **Invariant:** the structs here have the layout of those in `kernels/common.cuh`.

use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::memory::{Buffer, PinnedBuffer};
use oscar_backend::SequenceRows;
use oscar_codec::{PAGE_TOKENS, Side, TILE_TOKENS, Windows};

const NO_PAGE: u32 = u32::MAX;

/// `SequenceInfo` of the kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct SequenceInfo {
    pub first_row: u32,
    pub rows: u32,
    pub first_position: u32,
    pub table: u32,
    pub blocks: u32,
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
    /// Longest context of the step, in tokens.
    pub longest: usize,
    /// Does every sequence bring one row?
    pub decode: bool,
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
#[derive(Default)]
pub struct StepPlanner {
    device_tables: Option<Buffer>,
    words: Words,
    summary: StepSummary,
}

impl StepPlanner {
    pub fn summary(&self) -> &StepSummary {
        &self.summary
    }

    /// Plans a step and sends its tables through `uploads`.
    pub fn plan(
        &mut self,
        device: &Device,
        uploads: &mut Uploads,
        windows: &Windows,
        has_codes: bool,
        sequences: &[SequenceRows<'_>],
    ) -> Result<StepTables> {
        self.summary = fill(&mut self.words, windows, has_codes, sequences)?;
        let bytes: &[u8] = bytemuck::cast_slice(&self.words.words);
        if self.device_tables.as_ref().is_none_or(|b| b.bytes() < bytes.len()) {
            self.device_tables = None;
            self.device_tables =
                Some(device.alloc(bytes.len().next_power_of_two().max(1 << 16), "page tables")?);
        }
        let base = self.device_tables.as_ref().map_or(0, Buffer::address);
        uploads.enqueue(bytes, base)?;
        let at = |words: usize| base + 4 * words as u64;
        let clamp = |n: usize| n.min(u32::MAX as usize / 2) as u32;
        let w = &self.words;
        Ok(StepTables {
            sequences: base,
            row_sequence: at(w.row_sequence),
            row_position: at(w.row_position),
            full: at(w.full),
            coded: at(w.coded),
            demoted: at(w.demoted),
            sequence_count: self.summary.sequences.len() as u32,
            rows: self.summary.rows as u32,
            demoted_count: self.summary.demoted_tiles as u32,
            sink: clamp(windows.sink()),
            recent: clamp(windows.recent()),
            unit: clamp(windows.tail(Side::Key).unit),
        })
    }
}

fn fill(
    w: &mut Words,
    windows: &Windows,
    has_codes: bool,
    sequences: &[SequenceRows<'_>],
) -> Result<StepSummary> {
    let rows = sequences.iter().map(|s| s.rows.end).max().unwrap_or(0);
    let mut summary = StepSummary { rows, decode: true, ..StepSummary::default() };
    let mut table = 0;
    for s in sequences {
        let end = s.first_position + s.rows.len();
        if s.rows.is_empty() || end > u32::MAX as usize / 2 || s.full.len() < end.div_ceil(PAGE_TOKENS) {
            let detail =
                format!("{} rows from position {} on {} pages", s.rows.len(), s.first_position, s.full.len());
            return Err(CudaError::Shape { what: "a sequence of the step", detail });
        }
        let blocks = end.div_ceil(PAGE_TOKENS);
        summary.decode &= s.rows.len() == 1;
        summary.longest = summary.longest.max(end);
        summary.sequences.push(SequenceInfo {
            first_row: s.rows.start as u32,
            rows: s.rows.len() as u32,
            first_position: s.first_position as u32,
            table,
            blocks: blocks as u32,
            boundary: if has_codes {
                windows.boundary(end - 1).min(end) as u32
            } else {
                windows.sink() as u32
            },
        });
        table += blocks as u32;
    }
    // Tables begin at places that depend on rounded-up sizes alone, so that most steps have the same addresses and
    // recorded launches stay the same.
    let room = |count: usize| count.next_power_of_two().max(16);
    let table = table as usize;
    w.words.clear();
    w.words.extend_from_slice(bytemuck::cast_slice(&summary.sequences));
    w.row_sequence = room(sequences.len()) * (size_of::<SequenceInfo>() / 4);
    w.row_position = w.row_sequence + room(rows);
    w.full = w.row_position + room(rows);
    w.coded = w.full + room(table);
    w.demoted = w.coded + room(table);
    w.words.resize(w.demoted, 0);
    for (index, s) in sequences.iter().enumerate() {
        for (i, row) in s.rows.clone().enumerate() {
            w.words[w.row_sequence + row] = index as u32;
            w.words[w.row_position + row] = (s.first_position + i) as u32;
        }
    }
    for (s, info) in sequences.iter().zip(&summary.sequences) {
        let (at, blocks) = (info.table as usize, info.blocks as usize);
        for (to, id) in w.words[w.full + at..][..blocks].iter_mut().zip(s.full) {
            *to = id.map_or(NO_PAGE, |id| id.0);
        }
        for (b, to) in w.words[w.coded + at..][..blocks].iter_mut().enumerate() {
            *to = s.coded.get(b).copied().flatten().map_or(NO_PAGE, |id| id.0);
        }
    }
    let largest =
        |ids: &[u32]| ids.iter().filter(|&&id| id != NO_PAGE).max().map_or(0, |&id| id as usize + 1);
    summary.full_pages = largest(&w.words[w.full..][..table]);
    summary.coded_pages = largest(&w.words[w.coded..][..table]);
    for s in sequences {
        for position in s.demote.clone().step_by(TILE_TOKENS) {
            let block = position / PAGE_TOKENS;
            let (Some(Some(full)), Some(Some(coded))) = (s.full.get(block), s.coded.get(block)) else {
                let detail = format!("block {block} is to be coded but lacks one of its pages");
                return Err(CudaError::Shape { what: "a sequence of the step", detail });
            };
            w.words.extend([full.0, coded.0, (position % PAGE_TOKENS / TILE_TOKENS) as u32]);
            summary.demoted_tiles += 1;
        }
    }
    Ok(summary)
}

/// Page-locked memory through which small host data reaches the device without anyone waiting (a ring), and through
/// which results come back.
pub struct Uploads {
    device: Device,
    ring: PinnedBuffer,
    next: usize,
    landing: Option<PinnedBuffer>,
}

impl Uploads {
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            device: device.clone(),
            ring: PinnedBuffer::new(device, 16 << 20)?,
            next: 0,
            landing: None,
        })
    }

    /// Enqueues a copy of `bytes` to the device address `to`, which must have room for them.
    pub fn enqueue(&mut self, bytes: &[u8], to: u64) -> Result<()> {
        let mut to = to;
        for part in bytes.chunks(self.ring.bytes()) {
            if self.next + part.len() > self.ring.bytes() {
                // Once around: what lies at the start may still be on its way.
                self.device.synchronize()?;
                self.next = 0;
            }
            self.ring.slice_mut()[self.next..self.next + part.len()].copy_from_slice(part);
            self.ring.enqueue_copy(self.next, part.len(), to)?;
            self.next = (self.next + part.len()).next_multiple_of(16);
            to += part.len() as u64;
        }
        Ok(())
    }

    /// Waits for the stream and appends `count` f32 at the device address `from` to `out`.
    pub fn download(&mut self, from: u64, count: usize, out: &mut Vec<f32>) -> Result<()> {
        const MOST: usize = 64 << 20;
        for first in (0..count).step_by(MOST / 4) {
            let bytes = (count - first).min(MOST / 4) * 4;
            if self.landing.as_ref().is_none_or(|b| b.bytes() < bytes) {
                self.landing = None;
                self.landing = Some(PinnedBuffer::new(&self.device, bytes.next_power_of_two())?);
            }
            let Some(landing) = &mut self.landing else { continue };
            let part = &mut landing.slice_mut()[..bytes];
            self.device.download_raw(from + 4 * first as u64, part)?;
            out.extend_from_slice(bytemuck::cast_slice(part));
        }
        if count == 0 {
            self.device.synchronize()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_codec::{CodedPageId, FullPageId};

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
        assert!(fill(&mut words, &windows, true, &sequences).unwrap_err().to_string().contains("block 3"));
        let sequences = [SequenceRows { demote: 176..192, ..sequences[0].clone() }, sequences[1].clone()];
        let summary = fill(&mut words, &windows, true, &sequences).unwrap();
        assert_eq!((summary.rows, summary.full_pages, summary.coded_pages), (3, 10, 4));
        assert!(!summary.decode && summary.longest == 272 && summary.demoted_tiles == 1);
        assert_eq!(summary.sequences[0].boundary as usize, windows.boundary(271));
        let w = &words.words;
        assert_eq!(w[words.row_sequence..][..3], [1, 0, 0]);
        assert_eq!(w[words.row_position..][..3], [5, 270, 271]);
        assert_eq!(w[words.full..][..6], [4, NO_PAGE, 7, 8, 2, 9]);
        assert_eq!(w[words.coded..][..6], [NO_PAGE, 3, 0, NO_PAGE, NO_PAGE, NO_PAGE]);
        assert_eq!(w[words.demoted..], [7, 0, 3]);
    }
}
