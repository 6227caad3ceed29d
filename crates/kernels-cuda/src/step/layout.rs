//! The tables as kernels see them (`kernels/common.cuh`).

use crate::layout::{Layout, shared_struct};
use crate::memory::DevicePtr;
use oscar_codec::{PAGE_TOKENS, TILE_TOKENS};

/// The entry of a page table where there is no page.
pub const NO_PAGE: u32 = u32::MAX;
/// The view of a sequence that reads its whole history.
pub const NO_VIEW: u32 = u32::MAX;

shared_struct! {
    /// The rows that a view keeps of one layer and KV head, and where the ids of their pages begin.
    #[derive(PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
    pub struct ViewHead {
        pub rows: u32,
        pub pages: u32,
    }
}

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
        /// Index of its first [`ViewHead`], or [`NO_VIEW`].
        pub view: u32,
        /// The view stands for the positions `sink..view_end`.
        pub view_end: u32,
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
        /// Of the layer whose launch this is.
        pub view_heads: Option<DevicePtr<ViewHead>>,
        pub view_pages: Option<DevicePtr<u32>>,
        pub sequence_count: u32,
        pub rows: u32,
        pub demoted_count: u32,
        pub sink: u32,
        pub recent: u32,
        pub unit: u32,
    }
}

pub const LAYOUTS: &[Layout] =
    &[SequenceInfo::LAYOUT, ViewHead::LAYOUT, DemotedTile::LAYOUT, StepTables::LAYOUT];

/// Words of a [`SequenceInfo`].
pub const SEQUENCE_WORDS: usize = size_of::<SequenceInfo>() / 4;

impl StepTables {
    /// The tables for a launch of one layer.
    pub fn of_layer(self, layer: usize, kv_heads: usize) -> Self {
        Self { view_heads: self.view_heads.map(|heads| heads.add(layer * kv_heads)), ..self }
    }
}

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
