//! The shape of a whole model's cache: which codec holds full-precision tokens, which holds
//! quantized ones, and which positions belong to which. Every byte count of the program comes from
//! here.
//!
//! Layers with a sliding window form a group with pages of their own ([`sliding`](crate::sliding)).
//! Everything else here, quantization above all, is about the layers that see the whole context.

use crate::error::{CodecError, Result};
use crate::format::KvFormat;
use crate::format_table::FormatTable;
use crate::layout::CodeLayout;
use crate::page::{PAGE_TOKENS, RowPageCodec, Side, SideSpec};
use crate::sliding::{BlockCounts, SlidingGroup};
use crate::window::{Tail, Windows};
use std::ops::Range;

/// A full-precision block: 64 tokens of every head of the layers that see the whole context. Handed
/// out by the cache, resolved by a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FullPageId(pub u32);

/// A quantized block: the same tokens and heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CodedPageId(pub u32);

#[derive(Clone, Debug, PartialEq)]
pub struct CacheLayout {
    format: KvFormat,
    full: FormatTable,
    coded: Option<FormatTable>,
    windows: Windows,
    /// Bytes of a quantized block on a device that stores it in another form than the codecs.
    held_block_bytes: Option<usize>,
    /// See [`CacheLayout::with_views_in_blocks`].
    views_in_blocks: bool,
    /// Layers with pages of their own, which hold a window only.
    pub(crate) sliding: Option<SlidingGroup>,
    /// Bytes of a sequence's recurrent state.
    pub(crate) state_bytes: usize,
}

impl CacheLayout {
    /// The layout of a named format with all layers in one group. Unquantized formats keep every
    /// token in full precision and ignore the windows.
    pub fn new(
        format: KvFormat,
        layers: usize,
        kv_heads: usize,
        head_dim: usize,
        windows: Windows,
        layout: CodeLayout,
    ) -> Result<Self> {
        let table = |format| FormatTable::uniform(format, layers, kv_heads, head_dim, layout);
        if format.is_coded() {
            Ok(Self::of(format, table(KvFormat::Bf16)?, Some(table(format)?), windows))
        } else {
            Ok(Self::of(format, table(format)?, None, Windows::unlimited()))
        }
    }

    fn of(format: KvFormat, full: FormatTable, coded: Option<FormatTable>, windows: Windows) -> Self {
        Self {
            format,
            full,
            coded,
            windows,
            held_block_bytes: None,
            views_in_blocks: false,
            sliding: None,
            state_bytes: 0,
        }
    }

    /// The layout of latent attention: one row a token and layer, which is key and value of all heads.
    ///
    /// # Errors
    /// If the format quantizes, or the row has a size that no kernel reads.
    pub fn latent(format: KvFormat, layers: usize, row: usize, order: CodeLayout) -> Result<Self> {
        if format.is_coded() {
            return Err(CodecError::LatentFormat(format.to_string()));
        }
        let codec = RowPageCodec::new(row, format.side_spec(Side::Key), SideSpec::SHARED, order)?;
        let full = FormatTable::new(layers, 1, vec![codec; layers])?;
        Ok(Self::of(format, full, None, Windows::unlimited()))
    }

    /// The same cache with another table of codecs for quantized pages (widths or clip ratios by
    /// layer and head).
    pub fn with_coded_table(mut self, table: FormatTable) -> Self {
        self.coded = Some(table);
        self
    }

    /// The same cache with the bytes of its pages in another order.
    pub fn with_order(&self, order: CodeLayout) -> Result<Self> {
        Ok(Self {
            full: self.full.with_order(order)?,
            coded: self.coded.as_ref().map(|table| table.with_order(order)).transpose()?,
            ..self.clone()
        })
    }

    /// The same cache on a device whose quantized blocks have another form, of this size. All
    /// memory counts use this size. The bits of the method ([`Self::page_bits`],
    /// [`Self::method_bits`]) do not change.
    pub fn with_held_block_bytes(mut self, bytes: usize) -> Self {
        self.held_block_bytes = Some(bytes);
        self
    }

    pub fn format(&self) -> KvFormat {
        self.format
    }

    pub fn full(&self) -> &FormatTable {
        &self.full
    }

    pub fn coded(&self) -> Option<&FormatTable> {
        self.coded.as_ref()
    }

    pub fn windows(&self) -> &Windows {
        &self.windows
    }

    pub fn layers(&self) -> usize {
        self.full.layers()
    }

    pub fn kv_heads(&self) -> usize {
        self.full.kv_heads()
    }

    pub fn head_dim(&self) -> usize {
        self.full.head_dim()
    }

    pub fn full_block_bytes(&self) -> usize {
        self.grown(&self.full).map(RowPageCodec::page_bytes).sum()
    }

    /// Bytes of a quantized block in the codecs' own form.
    fn codec_block_bytes(&self, table: &FormatTable) -> usize {
        self.grown(table).map(RowPageCodec::page_bytes).sum()
    }

    /// Codecs of the layers whose history grows: all but the sliding ones.
    pub fn grown<'t>(&'t self, table: &'t FormatTable) -> impl Iterator<Item = &'t RowPageCodec> {
        self.group(table, false)
    }

    /// Bytes of a quantized block as the device stores it.
    pub fn coded_block_bytes(&self) -> usize {
        let own = |table| self.held_block_bytes.unwrap_or_else(|| self.codec_block_bytes(table));
        self.coded.as_ref().map_or(0, own)
    }

    /// Ids of the pages that views hold of each head, in a cache of `budget` bytes. They follow the
    /// ids of quantized blocks; a view may give some heads several times as many rows as others.
    pub fn view_page_ids(&self, budget: usize) -> Range<u32> {
        const MOST: usize = u32::MAX as usize / 16;
        let blocks = |table| budget / self.codec_block_bytes(table).max(1) + 1;
        let blocks = self.coded.as_ref().map_or(0, blocks).min(MOST);
        blocks as u32..(9 * blocks) as u32
    }

    /// The same cache on a device where pages of views come from quantized blocks: the id of a page
    /// is then that of its block.
    pub fn with_views_in_blocks(self) -> Self {
        Self { views_in_blocks: true, ..self }
    }

    pub fn views_in_blocks(&self) -> bool {
        self.views_in_blocks
    }

    /// Whether rows of quantized history can be evicted one by one, and why not.
    pub fn evicts_rows(&self) -> std::result::Result<(), &'static str> {
        let Some(table) = &self.coded else {
            return Err("this cache keeps every token in full precision: choose a quantized --kv format");
        };
        if self.sliding.is_some() {
            return Err("some layers have a sliding window, whose rows are not evicted");
        }
        if self.has_states() {
            return Err("some layers have a recurrent state, which cannot forget single rows");
        }
        if !table.codecs().iter().all(RowPageCodec::copies_rows) {
            return Err(
                "this cache format groups tokens, whose rows cannot be separated without quantizing again",
            );
        }
        let unit = self.windows.tail(Side::Key).unit;
        if !self.windows.sides_agree() || !PAGE_TOKENS.is_multiple_of(unit) {
            return Err("this cache format quantizes keys and values at different times");
        }
        if !self.windows.sink().is_multiple_of(PAGE_TOKENS) {
            return Err("the sink must be a multiple of 64 tokens: change --sink");
        }
        Ok(())
    }

    /// Whether `block` keeps its full page once everything before `boundary` except the sink is
    /// quantized.
    pub fn keeps_full_page(&self, block: usize, boundary: usize) -> bool {
        let (start, end) = (block * PAGE_TOKENS, (block + 1) * PAGE_TOKENS);
        self.coded.is_none() || start < self.windows.sink() || end > boundary
    }

    /// Blocks that a sequence of `tokens` holds between two steps.
    pub fn blocks(&self, tokens: usize) -> BlockCounts {
        let (full, coded) = self.grown_blocks(tokens);
        BlockCounts { full, coded, sliding: self.sliding_blocks(tokens).len(), states: self.states(tokens) }
    }

    /// Full and quantized blocks of the layers whose history grows.
    fn grown_blocks(&self, tokens: usize) -> (usize, usize) {
        let all = tokens.div_ceil(PAGE_TOKENS);
        if self.coded.is_none() || tokens == 0 {
            return (all, 0);
        }
        let (sink, boundary) = (self.windows.sink(), self.windows.boundary(tokens - 1));
        let frontier = self.windows.frontier(tokens - 1);
        if frontier <= sink {
            return (all, 0);
        }
        let coded = frontier.div_ceil(PAGE_TOKENS) - sink / PAGE_TOKENS;
        // Blocks wholly inside sink..boundary, quantized on both sides, have no full page left.
        let gone = (boundary / PAGE_TOKENS).saturating_sub(sink.div_ceil(PAGE_TOKENS));
        (all - gone, coded)
    }

    /// Bytes that a sequence of `tokens` occupies between two steps, windows and metadata included.
    pub fn sequence_bytes(&self, tokens: usize) -> usize {
        self.bytes_of(self.blocks(tokens))
    }

    /// Bytes of so many blocks.
    pub fn bytes_of(&self, blocks: BlockCounts) -> usize {
        blocks.full * self.full_block_bytes()
            + blocks.coded * self.coded_block_bytes()
            + blocks.sliding * self.sliding_block_bytes()
            + blocks.states * self.state_bytes()
    }

    /// Bytes of one block of all layers in full precision.
    pub fn unquantized_block_bytes(&self) -> usize {
        self.full_block_bytes() + self.sliding_block_bytes()
    }

    /// The largest size of a sequence up to the time it has `tokens`. Its size falls when a block
    /// loses its full page or leaves a sliding window, and this repeats with the period of the windows.
    pub fn peak_bytes(&self, tokens: usize) -> usize {
        (tokens.saturating_sub(self.windows.period() - 1)..=tokens)
            .map(|n| self.sequence_bytes(n))
            .max()
            .unwrap_or(0)
    }

    /// Stored bits an element of the pages that hold history: the quantized ones, or the full ones
    /// if the format does not quantize.
    pub fn page_bits(&self) -> f64 {
        let table = self.coded.as_ref().unwrap_or(&self.full);
        let elements: usize = self.grown(table).map(RowPageCodec::page_elements).sum();
        self.codec_block_bytes(table) as f64 * 8.0 / elements as f64
    }

    /// Whether keys and values are one row, as in latent attention.
    pub fn shares_rows(&self) -> bool {
        self.full.codecs().first().is_some_and(RowPageCodec::shares_rows)
    }

    /// Stored elements of one token in one layer.
    fn layer_elements(&self) -> usize {
        let sides = if self.shares_rows() { 1 } else { 2 };
        sides * self.head_dim() * self.kv_heads()
    }

    /// Elements (key and value channels over all layers and heads) of the rows that a sequence of
    /// `tokens` has in the cache. Sliding layers have those of their window.
    pub fn elements(&self, tokens: usize) -> usize {
        let (layers, window) = self.sliding.as_ref().map_or((0, 0), |s| (s.layers(), s.window()));
        let sliding = self.layer_elements() * layers * tokens.min(window);
        self.grown_elements() * tokens + sliding
    }

    /// Elements of one token in the layers whose history grows.
    pub fn grown_elements(&self) -> usize {
        let sliding = self.sliding.as_ref().map_or(0, SlidingGroup::layers);
        self.layer_elements() * (self.layers() - sliding)
    }

    /// Stored bits an element of a sequence of `tokens`: windows, metadata and unfilled pages
    /// included. States have no elements and do not count.
    pub fn bits_per_element(&self, tokens: usize) -> f64 {
        if tokens == 0 {
            0.0
        } else {
            let rows = self.bytes_of(BlockCounts { states: 0, ..self.blocks(tokens) });
            rows as f64 * 8.0 / self.elements(tokens) as f64
        }
    }

    /// Bits an element of the method itself for a sequence of `tokens`, without unfilled pages:
    /// each side of each token has its width, or 16 bits while a query at the end still reads it in
    /// BF16. For a table of `b` bits and `S` BF16 tokens on both sides this is `b + (16 −
    /// b)·S/tokens`.
    pub fn method_bits(&self, tokens: usize) -> f64 {
        let Some(table) = self.coded.as_ref().filter(|_| tokens > 0) else { return self.page_bits() };
        let coded = |side| {
            (self.windows.side_boundary(side, tokens - 1).min(tokens)).saturating_sub(self.windows.sink())
        };
        let heads = self.grown(table).count();
        let sum: f64 = self
            .grown(table)
            .map(|codec| {
                [Side::Key, Side::Value]
                    .map(|side| {
                        let n = coded(side) as f64;
                        n * codec.side_bits(side) + (tokens as f64 - n) * 16.0
                    })
                    .iter()
                    .sum::<f64>()
            })
            .sum();
        sum / (2 * heads * tokens) as f64
    }

    /// Whether every head stores its history. A zero-width head has nothing but its BF16 sink and
    /// recent tokens.
    pub fn keeps_all_history(&self) -> bool {
        self.coded.as_ref().is_none_or(|table| self.grown(table).all(RowPageCodec::keeps_history))
    }

    /// Whether codes of a page depend on tokens of later pages. Then sequences that diverge after a
    /// page cannot share it.
    pub fn codes_span_pages(&self) -> bool {
        let spans = |codec: &RowPageCodec| codec.spans_pages(self.windows.sink());
        self.coded.as_ref().is_some_and(|table| self.grown(table).any(spans))
    }

    /// Names of the codecs by layer, for people. A uniform table gives one name.
    pub fn describe(&self) -> String {
        let grown = match &self.coded {
            Some(_) => {
                let tail = |side| {
                    let Tail { recent, unit } = self.windows.tail(side);
                    // A flush empties the tail except for the token being written.
                    if recent == 1 { format!("up to {unit}") } else { recent.to_string() }
                };
                let recent = if self.windows.sides_agree() {
                    tail(Side::Key)
                } else {
                    format!("{} (keys) and {} (values)", tail(Side::Key), tail(Side::Value))
                };
                let name = format!("{} ({:.2} bits)", self.format, self.page_bits());
                format!("{name}, {} sink and {recent} recent tokens in BF16", self.windows.sink())
            }
            None => {
                let name = format!("{} ({} bits)", self.format, self.full.codec(0, 0).bits_per_element());
                match self.shares_rows() {
                    true => format!("{name}, one latent row of {} a token and layer", self.head_dim()),
                    false => name,
                }
            }
        };
        let grown = match self.state_bytes {
            0 => grown,
            bytes => format!("{grown}; a state of {:.1} MiB a sequence", bytes as f64 / 1_048_576.0),
        };
        match &self.sliding {
            None => grown,
            Some(group) => {
                let form = if self.coded.is_some() { " in BF16" } else { "" };
                format!(
                    "{grown}; {} sliding layers: the last {} tokens{form}",
                    group.layers(),
                    group.window()
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(format: KvFormat) -> CacheLayout {
        CacheLayout::new(format, 6, 2, 128, Windows::default(), CodeLayout::CpuTile).unwrap()
    }

    #[test]
    fn blocks_follow_the_boundary() {
        let oscar = layout(KvFormat::OSCAR2);
        let blocks = |tokens| (oscar.blocks(tokens).full, oscar.blocks(tokens).coded);
        assert_eq!(blocks(0), (0, 0));
        assert_eq!(blocks(335), (6, 0));
        assert_eq!(blocks(336), (6, 1), "the first tile is coded, its block keeps both pages");
        // 16384 tokens: boundary 16128 = 252 blocks, one of them the sink.
        assert_eq!(blocks(16384), (1 + 4, 251));
        assert_eq!(layout(KvFormat::Bf16).blocks(16384), BlockCounts { full: 256, ..BlockCounts::default() });
    }

    #[test]
    fn two_bits_save_more_than_six_times_at_16k() {
        let (bf16, oscar) = (layout(KvFormat::Bf16), layout(KvFormat::OSCAR2));
        for tokens in 16384..16384 + 64 {
            let ratio = bf16.sequence_bytes(tokens) as f64 / oscar.sequence_bytes(tokens) as f64;
            assert!(ratio >= 6.0, "{ratio} at {tokens}");
        }
        assert_eq!(bf16.bits_per_element(64), 16.0);
    }

    #[test]
    fn another_order_keeps_sizes_and_specs() {
        let cpu =
            CacheLayout::new(KvFormat::OSCAR2, 2, 2, 128, Windows::default(), CodeLayout::CpuTile).unwrap();
        let gpu = cpu.with_order(CodeLayout::GpuTile).unwrap();
        assert_eq!(gpu.coded().unwrap().codec(1, 1).layout(), CodeLayout::GpuTile);
        assert_eq!(gpu.sequence_bytes(5000), cpu.sequence_bytes(5000));
        assert_eq!(gpu.with_order(CodeLayout::CpuTile).unwrap(), cpu);
    }

    #[test]
    fn blocks_kept_in_another_form_are_counted_as_kept() {
        let own = layout(KvFormat::OSCAR2);
        let held = own.clone().with_held_block_bytes(own.full_block_bytes());
        let BlockCounts { full, coded, .. } = own.blocks(16384);
        assert_eq!(held.sequence_bytes(16384), (full + coded) * own.full_block_bytes());
        assert_eq!((held.page_bits(), held.method_bits(16384)), (own.page_bits(), own.method_bits(16384)));
        assert_eq!(held.with_order(CodeLayout::GpuTile).unwrap().coded_block_bytes(), own.full_block_bytes());
        let plain = layout(KvFormat::Bf16).with_held_block_bytes(7);
        assert_eq!(plain.coded_block_bytes(), 0, "nothing is coded");
    }

    #[test]
    fn a_latent_row_is_stored_once() {
        // GLM-4.7-Flash: 54,144 bytes a token in 47 layers.
        let layout = CacheLayout::latent(KvFormat::Bf16, 47, 576, CodeLayout::CpuTile).unwrap();
        assert_eq!(layout.sequence_bytes(64), 64 * 54_144);
        assert_eq!(
            (layout.page_bits(), layout.bits_per_element(64), layout.method_bits(9)),
            (16.0, 16.0, 16.0)
        );
        assert_eq!(layout.with_order(CodeLayout::Logical).unwrap().sequence_bytes(64), 64 * 54_144);
        assert!(layout.describe().contains("one latent row of 576"), "{}", layout.describe());
        let codec = layout.full().codec(3, 0);
        let rows: Vec<f32> = (0..64 * 576).map(|i| (i % 251) as f32 - 125.0).collect();
        let mut page = vec![0; codec.page_bytes()];
        codec.quantize(&rows, &rows, &mut page).unwrap();
        for side in [Side::Key, Side::Value] {
            let mut row = vec![0.0; 576];
            codec.dequantize_row(side, &page, 41, &mut row);
            assert_eq!(row, rows[41 * 576..][..576], "{side:?}");
        }
    }

    #[test]
    fn quantized_and_odd_latent_rows_are_refused_by_name() {
        for format in KvFormat::all().into_iter().filter(|format| format.is_coded()) {
            let error = CacheLayout::latent(format, 2, 576, CodeLayout::CpuTile).unwrap_err().to_string();
            assert!(error.contains(&format!("--kv {format}")) && error.contains("--kv bf16"), "{error}");
        }
        for row in [0, 16, 570, 592] {
            let error = CacheLayout::latent(KvFormat::Bf16, 2, row, CodeLayout::CpuTile).unwrap_err();
            assert_eq!(error, CodecError::LatentRow(row));
        }
        let key = SideSpec::affine(2, 0.0);
        let shared = RowPageCodec::new(64, key, SideSpec::SHARED, CodeLayout::CpuTile);
        assert_eq!(shared.unwrap_err(), CodecError::SharedRows);
    }

    #[test]
    fn peak_is_what_growing_one_token_at_a_time_needs() {
        let oscar = layout(KvFormat::OSCAR2);
        let mut peak = 0;
        for tokens in 0..2000 {
            peak = peak.max(oscar.sequence_bytes(tokens));
            assert_eq!(oscar.peak_bytes(tokens), peak, "at {tokens}");
        }
    }
}
