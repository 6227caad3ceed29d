//! The tables of a step: which rows belong to which sequence, where their pages lie, and which
//! tiles are quantized.
//!
//! The host makes them once for all layers ([`plan`]) and sends what changed since the last step
//! ([`upload`]). All kernels read them through [`StepTables`].
//!
//! A step mostly quantizes tiles that earlier steps wrote: a generated token is the oldest of its
//! window when its turn comes. Then one launch quantizes the tiles of all layers before the first
//! layer ([`PlannedStep::ahead`]). A prompt that quantizes its own rows does it layer by layer.

mod hazards;
mod layout;
mod plan;
mod required;
mod upload;
mod views;

pub(crate) use layout::{LAYOUTS, window};
pub use layout::{SequenceInfo, StepTables};
pub use plan::StepSummary;

use crate::device::Device;
use crate::error::Result;
use crate::pages::CudaPages;
use crate::transfers::Transfers;
use oscar_backend::SequenceRows;
use oscar_codec::Windows;
use plan::Words;
use upload::TableUpload;
use views::ViewTables;

/// Makes the tables; kept from step to step, with the memory they lie in.
#[derive(Default)]
pub struct StepPlanner {
    words: Words,
    upload: TableUpload,
    views: ViewTables,
}

/// A step whose tables are on their way to the device.
pub struct PlannedStep {
    /// Tables for the launches of each layer.
    pub tables: StepTables,
    /// Tables for sliding layers, whose `full` names the pages of their group.
    pub sliding: Option<StepTables>,
    /// The same tables with the tiles that are quantized in all layers before the first one.
    pub ahead: Option<StepTables>,
    pub summary: StepSummary,
}

impl StepPlanner {
    /// Plans a step over `pages` and sends its tables.
    pub fn plan(
        &mut self,
        device: &Device,
        transfers: &mut Transfers,
        pages: &CudaPages,
        sequences: &[SequenceRows<'_>],
    ) -> Result<PlannedStep> {
        let windows = pages.layout().windows();
        sequences.iter().try_for_each(|s| required::check_pages(s, windows, pages.storage()))?;
        if let Some(group) = pages.layout().sliding() {
            sequences.iter().try_for_each(|s| required::check_sliding_pages(s, group.window()))?;
        }
        self.words.views = self.views.send(device, transfers, sequences)?;
        let summary = self.words.fill(windows, pages.storage(), sequences)?;
        let all = self.send(device, transfers, windows, &summary)?;
        let by_layer = if summary.quantizes_ahead { 0 } else { summary.tiles };
        let tables = StepTables { demoted_count: by_layer as u32, ..all };
        let sliding = self.words.of_sliding(&tables);
        Ok(PlannedStep { tables, sliding, ahead: summary.quantizes_ahead.then_some(all), summary })
    }

    fn send(
        &mut self,
        device: &Device,
        transfers: &mut Transfers,
        windows: &Windows,
        summary: &StepSummary,
    ) -> Result<StepTables> {
        let base = self.upload.send(device, transfers, &self.words)?;
        Ok(self.words.tables(base, self.views.start(), windows, summary))
    }
}
