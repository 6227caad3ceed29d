//! The tables as kernels see them (`kernels/common.cuh`).

use crate::layout::{Layout, shared_struct};
use crate::memory::DevicePtr;
use oscar_codec::{PAGE_TOKENS, TILE_TOKENS};

/// The entry of a page table where there is no page.
pub const NO_PAGE: u32 = u32::MAX;

shared_struct! {
    /// The rows and pages of one sequence.
    #[derive(PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
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
}

shared_struct! {
    /// A tile that the step quantizes: its two pages and its place in them.
    #[derive(PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
    pub struct DemotedTile {
        pub full: u32,
        pub coded: u32,
        pub tile: u32,
    }
}

shared_struct! {
    /// Where the tables of a step lie, and their sizes.
    pub struct StepTables {
        pub sequences: DevicePtr<SequenceInfo>,
        pub row_sequence: DevicePtr<u32>,
        pub row_position: DevicePtr<u32>,
        pub full: DevicePtr<u32>,
        pub coded: DevicePtr<u32>,
        pub demoted: DevicePtr<DemotedTile>,
        pub sequence_count: u32,
        pub rows: u32,
        pub demoted_count: u32,
        pub sink: u32,
        pub recent: u32,
        pub unit: u32,
    }
}

pub const LAYOUTS: &[Layout] = &[SequenceInfo::LAYOUT, DemotedTile::LAYOUT, StepTables::LAYOUT];

/// Words of a [`SequenceInfo`].
pub const SEQUENCE_WORDS: usize = size_of::<SequenceInfo>() / 4;

impl DemotedTile {
    /// The tile of a position in these pages.
    pub fn new(full: u32, coded: u32, position: usize) -> Self {
        Self { full, coded, tile: (position % PAGE_TOKENS / TILE_TOKENS) as u32 }
    }
}

/// A size of the windows as kernels take it: positions end far below the limit.
pub fn window(tokens: usize) -> u32 {
    tokens.min(u32::MAX as usize / 2) as u32
}
