//! The tables as kernels see them.
//!
//! **Invariant:** the structs here have the layout of those in `kernels/common.cuh`.

use oscar_codec::{PAGE_TOKENS, TILE_TOKENS};

/// The entry of a page table where there is no page.
pub const NO_PAGE: u32 = u32::MAX;

/// `SequenceInfo` of the kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct SequenceInfo {
    pub first_row: u32,
    pub rows: u32,
    pub first_position: u32,
    pub table: u32,
    /// See [`old_codes`](super::hazards::old_codes).
    pub old_codes: u32,
    /// Of the last row: positions `sink..boundary` are read as code.
    pub boundary: u32,
}

/// `StepTables` of the kernels: device addresses and counts.
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

/// Words of a [`SequenceInfo`], and of a tile: its two pages and its place in them.
pub const SEQUENCE_WORDS: usize = size_of::<SequenceInfo>() / 4;
pub const TILE_WORDS: usize = 3;

/// `DemotedTile` of the kernels: the tile of a position in these pages.
pub fn tile_words(full: u32, coded: u32, position: usize) -> [u32; TILE_WORDS] {
    [full, coded, (position % PAGE_TOKENS / TILE_TOKENS) as u32]
}

/// A size of the windows as kernels take it: positions end far below the limit.
pub fn window(tokens: usize) -> u32 {
    tokens.min(u32::MAX as usize / 2) as u32
}
