//! Walking the pages of a span with the rows of a work item.

use std::ops::Range;

use oscar_codec::{PAGE_TOKENS, RowPageCodec, Side, Windows};

use super::block::{QueryForms, ROWS, RowBlock};
use super::dequantize::SidePage;
use super::page::{PageReader, PageScratch, PageView, Stages};
use super::precision::AttentionPrecision;
use super::{Item, SPAN_TOKENS, TaskInput, Worker};
use crate::cpu::Variant;

/// The rows of an item, loaded into blocks.
pub(super) struct ItemRows<'a> {
    pub input: &'a TaskInput<'a>,
    pub state: &'a mut Vec<f32>,
    blocks: &'a mut [Box<RowBlock>],
    page: &'a mut PageScratch,
    reaches: Vec<Reach>,
    full: PageReader,
    coded: PageReader,
}

/// The ranges that a row reads on each side: BF16 below `sink`, quantized up to the side's
/// boundary, BF16 up to `end`; nothing before `first`.
#[derive(Clone, Copy, Debug)]
struct Reach {
    first: usize,
    sink: usize,
    keys: usize,
    values: usize,
    end: usize,
}

impl Reach {
    /// In places of the compact sequence: positions behind a view move by `shift`.
    fn new(windows: &Windows, position: usize, coded_until: usize, shift: usize) -> Self {
        let boundary = |side| (windows.side_boundary(side, position) - shift).max(coded_until);
        Self {
            first: windows.first_visible(position),
            sink: windows.sink(),
            keys: boundary(Side::Key),
            values: boundary(Side::Value),
            end: position + 1 - shift,
        }
    }

    /// Code on both sides.
    fn coded(self, base: usize) -> u64 {
        self.visible(base, self.sink..self.keys.min(self.values))
    }

    /// BF16 on both sides.
    fn full(self, base: usize) -> u64 {
        let recent = self.keys.max(self.values)..self.end;
        self.visible(base, 0..self.sink.min(self.end)) | self.visible(base, recent)
    }

    /// Keys quantized beside values in BF16.
    fn coded_keys(self, base: usize) -> u64 {
        self.visible(base, self.values..self.keys.max(self.values))
    }

    /// Values quantized beside keys in BF16.
    fn coded_values(self, base: usize) -> u64 {
        self.visible(base, self.keys..self.values.max(self.keys))
    }

    fn visible(self, base: usize, range: Range<usize>) -> u64 {
        token_mask(base, range.start.max(self.first)..range.end)
    }
}

/// Tokens of the page starting at position `base` that are in `range`.
fn token_mask(base: usize, range: Range<usize>) -> u64 {
    let start = range.start.saturating_sub(base).min(PAGE_TOKENS);
    let end = range.end.saturating_sub(base).min(PAGE_TOKENS);
    let below = |n: usize| if n == PAGE_TOKENS { u64::MAX } else { (1 << n) - 1 };
    below(end) & !below(start)
}

impl Worker {
    /// Prepares the queries of an item, unless it is the one prepared last: `number` is that of the
    /// call and of the item.
    pub(super) fn load<'a>(
        &'a mut self,
        variant: Variant,
        precision: AttentionPrecision,
        input: &'a TaskInput<'a>,
        item: Item,
        number: (u64, usize),
    ) -> ItemRows<'a> {
        let d = input.head_dim;
        let full = PageReader::new(variant, precision, input.context.full_codec);
        let coded = PageReader::new(variant, precision, input.context.coded_codec);
        let (a, b) = (full.forms(), coded.forms());
        let forms = QueryForms { fixed_point: a.fixed_point || b.fixed_point, bf16: a.bf16 || b.bf16 };
        let count = item.rows.div_ceil(ROWS);
        while self.blocks.len() < count {
            self.blocks.push(RowBlock::new());
        }
        if self.loaded.take() != Some(number) {
            let queries = &input.queries[item.first_row * d..(item.first_row + item.rows) * d];
            for (block, queries) in self.blocks.iter_mut().zip(queries.chunks(ROWS * d)) {
                block.load(queries, d, input.scale, forms);
            }
        }
        self.loaded = Some(number);
        let reaches = input.positions[item.first_row..][..item.rows]
            .iter()
            .map(|&position| Reach::new(input.windows, position as usize, input.coded_until, input.shift))
            .collect();
        ItemRows {
            input,
            state: &mut self.state,
            blocks: &mut self.blocks[..count],
            page: &mut self.page,
            reaches,
            full,
            coded,
        }
    }
}

/// Reads span number `span` from an empty state and hands each row's result to `done(row, block,
/// row in block)`.
pub(super) fn read_span(rows: &mut ItemRows<'_>, span: usize, mut done: impl FnMut(usize, &RowBlock, usize)) {
    rows.blocks.iter_mut().for_each(|block| block.reset());
    let end = rows.reaches.last().map_or(0, |reach| reach.end);
    let context = rows.input.context;
    let full_stages = stages_of(rows.full, rows.blocks);
    let coded_stages = stages_of(rows.coded, rows.blocks);
    let coded = Pages {
        codec: context.coded_codec,
        pages: context.coded,
        reader: rows.coded,
        stages: &coded_stages,
        what: "coded",
    };
    let full = Pages {
        codec: context.full_codec,
        pages: context.full,
        reader: rows.full,
        stages: &full_stages,
        what: "full",
    };
    // Windows of their own for each side: some tokens are read from both kinds of pages.
    let across = PageReader::across(rows.full, rows.coded);
    let across_stages = (!rows.input.windows.sides_agree()).then(|| stages_of(across, rows.blocks));
    // Positions do not decrease: no row sees anything before the first one's window.
    let unseen = rows.reaches.first().map_or(0, |reach| reach.first / PAGE_TOKENS);
    let first_page = unseen.max(span * SPAN_TOKENS / PAGE_TOKENS);
    let last_page = end.div_ceil(PAGE_TOKENS).min((span + 1) * SPAN_TOKENS / PAGE_TOKENS);
    // What every row reads quantized: nearly everything, so masks are worth making only outside.
    let all_coded = rows.reaches.iter().fold(0..usize::MAX, |all, reach| {
        all.start.max(reach.sink).max(reach.first)..all.end.min(reach.keys.min(reach.values))
    });
    let has_history = context.coded_codec.keeps_history();
    let hole = rows.input.hole.clone();
    let mut due = None;
    for page in first_page..last_page {
        let base = page * PAGE_TOKENS;
        let missing = token_mask(base, hole.clone());
        if !has_history {
            let used = rows.set_masks(|reach| reach.full(base));
            read_page(rows, &full, page, used, &mut due);
        } else if all_coded.start <= base && base + PAGE_TOKENS <= all_coded.end && missing == 0 {
            rows.blocks.iter_mut().for_each(|block| block.masks[..block.rows].fill(u64::MAX));
            read_page(rows, &coded, page, u64::MAX, &mut due);
        } else {
            let used = rows.set_masks(|reach| reach.coded(base) & !missing);
            read_page(rows, &coded, page, used, &mut due);
            if let Some(stages) = &across_stages {
                let used = rows.set_masks(|reach| reach.coded_keys(base));
                read_across(rows, [&coded, &full], (across, stages), page, used, &mut due);
                let used = rows.set_masks(|reach| reach.coded_values(base));
                read_across(rows, [&full, &coded], (across, stages), page, used, &mut due);
            }
            let used = rows.set_masks(|reach| reach.full(base));
            read_page(rows, &full, page, used, &mut due);
        }
    }
    add_due_values(rows.blocks, due.take());
    for row in 0..rows.reaches.len() {
        done(row, &rows.blocks[row / ROWS], row % ROWS);
    }
}

fn stages_of(reader: PageReader, blocks: &[Box<RowBlock>]) -> Vec<Stages> {
    blocks.iter().map(|block| reader.stages(block.rows)).collect()
}

/// The pages of one kind of a context, and the kernels of each block for them.
struct Pages<'a> {
    codec: &'a RowPageCodec,
    pages: &'a [Option<&'a [u8]>],
    reader: PageReader,
    stages: &'a [Stages],
    what: &'static str,
}

impl<'a> Pages<'a> {
    fn side(&self, side: Side, block: usize, origin: usize) -> SidePage<'a> {
        SidePage { codec: self.codec, side, pages: self.pages, block, origin }
    }
}

/// A page whose values some blocks have still to add.
struct Due<'a> {
    view: PageView<'a>,
    stages: &'a [Stages],
}

impl ItemRows<'_> {
    /// Sets the tokens each row reads of a page, and returns those that any row reads.
    fn set_masks(&mut self, mask: impl Fn(Reach) -> u64) -> u64 {
        let mut used = 0;
        for (block, reaches) in self.blocks.iter_mut().zip(self.reaches.chunks(ROWS)) {
            for (slot, &reach) in block.masks.iter_mut().zip(reaches) {
                *slot = mask(reach);
                used |= *slot;
            }
        }
        used
    }
}

fn read_page<'a>(
    rows: &mut ItemRows<'_>,
    source: &Pages<'a>,
    index: usize,
    used: u64,
    due: &mut Option<Due<'a>>,
) {
    if used == 0 {
        return;
    }
    let page = source.pages.get(index).copied().flatten();
    let page = page.unwrap_or_else(|| panic!("{} page of block {index} is absent", source.what));
    let next = source.pages.get(index + 1).copied().flatten().unwrap_or(page);
    // Distance of unrelated allocations: only ever used to form prefetch addresses.
    let ahead = (next.as_ptr() as isize).wrapping_sub(page.as_ptr() as isize);
    let reads = |block: &RowBlock| block.masks[..block.rows].iter().any(|&mask| mask != 0);
    #[cfg(target_arch = "x86_64")]
    if let Some(tiles) = source.reader.code_tiles(rows.blocks.len(), source.codec.head_dim()) {
        let view = PageView::in_place(source.codec, page, ahead);
        // SAFETY: tiles are chosen for a variant that `attend` found available.
        unsafe { tiles.read(rows.blocks, source.stages, &view, &mut rows.page.unpacked) };
        return;
    }
    if source.stages.iter().all(|stages| stages.find_maxima.is_some()) {
        let view = PageView::in_place(source.codec, page, ahead);
        for (i, (block, stages)) in rows.blocks.iter_mut().zip(source.stages).enumerate() {
            let reads = reads(block);
            // SAFETY: the stages belong to the variant of the call, which `attend` found available.
            unsafe {
                if reads {
                    (stages.score)(block, &view);
                    stages.find_maxima.inspect(|find_maxima| find_maxima(block, &view));
                }
                add_block_values(block, i, due.as_ref());
                if reads && block.any_weight {
                    (stages.weigh)(block, &view);
                    block.values_due = true;
                }
            }
        }
        *due = Some(Due { view, stages: source.stages });
        return;
    }
    add_due_values(rows.blocks, due.take());
    let origin = rows.input.windows.sink();
    let (keys, values) = (source.side(Side::Key, index, origin), source.side(Side::Value, index, origin));
    let view = rows.page.view(source.reader, keys, values, used, ahead);
    run_stages(rows.blocks, source.reader, source.stages, &view);
}

/// Reads tokens whose keys lie in the first source's page and whose values in the second's.
fn read_across<'a>(
    rows: &mut ItemRows<'_>,
    [keys, values]: [&Pages<'a>; 2],
    (reader, stages): (PageReader, &[Stages]),
    index: usize,
    used: u64,
    due: &mut Option<Due<'a>>,
) {
    if used == 0 {
        return;
    }
    add_due_values(rows.blocks, due.take());
    let origin = rows.input.windows.sink();
    let (keys, values) = (keys.side(Side::Key, index, origin), values.side(Side::Value, index, origin));
    let view = rows.page.view(reader, keys, values, used, 0);
    run_stages(rows.blocks, reader, stages, &view);
}

fn run_stages(blocks: &mut [Box<RowBlock>], reader: PageReader, stages: &[Stages], view: &PageView<'_>) {
    // SAFETY: the reader belongs to the variant of the call, which `attend` found available.
    #[cfg(target_arch = "x86_64")]
    let _tiles = unsafe { reader.configure_tiles() };
    let reads = |block: &RowBlock| block.masks[..block.rows].iter().any(|&mask| mask != 0);
    for (block, stages) in blocks.iter_mut().zip(stages).filter(|(block, _)| reads(block)) {
        // SAFETY: the stages belong to the variant of the call, which `attend` found available.
        unsafe {
            (stages.score)(block, view);
            (stages.weigh)(block, view);
            if block.any_weight {
                (stages.add_values)(block, view);
            }
        }
    }
}

fn add_due_values(blocks: &mut [Box<RowBlock>], due: Option<Due<'_>>) {
    for (i, block) in blocks.iter_mut().enumerate() {
        add_block_values(block, i, due.as_ref());
    }
}

/// Adds the values of the page before to block `i`, if it has weights for them.
fn add_block_values(block: &mut RowBlock, i: usize, due: Option<&Due<'_>>) {
    if let (true, Some(due)) = (block.values_due, due) {
        // SAFETY: the stages belong to the variant of the call, which `attend` found available.
        unsafe { (due.stages[i].add_values)(block, &due.view) };
        block.values_due = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_codec::Tail;

    #[test]
    fn masks_of_sides_with_windows_of_their_own_cover_every_token_once() {
        for (sink, key, value) in
            [(0, (1, 128), (129, 1)), (32, (1, 128), (129, 128)), (16, (40, 16), (7, 3))]
        {
            let tail = |(recent, unit)| Tail { recent, unit };
            let windows = Windows::by_side(sink, tail(key), tail(value)).unwrap();
            for position in [0, 15, 100, 127, 128, 129, 300, 511, 777] {
                let reach = Reach::new(&windows, position, 0, 0);
                for page in 0..=position / PAGE_TOKENS {
                    let base = page * PAGE_TOKENS;
                    let masks = [
                        reach.coded(base),
                        reach.coded_keys(base),
                        reach.coded_values(base),
                        reach.full(base),
                    ];
                    for t in (0..PAGE_TOKENS).filter(|t| base + t <= position) {
                        let side = |side| windows.reads_side_as_code(side, position, base + t);
                        let which = match (side(Side::Key), side(Side::Value)) {
                            (true, true) => 0,
                            (true, false) => 1,
                            (false, true) => 2,
                            (false, false) => 3,
                        };
                        let read: Vec<usize> = (0..4).filter(|&i| masks[i] >> t & 1 == 1).collect();
                        assert_eq!(read, [which], "{windows:?}, query {position}, token {}", base + t);
                    }
                }
            }
        }
    }

    #[test]
    fn masks_follow_the_window_rule() {
        for (sink, recent) in [(64, 256), (0, 1), (16, 7), (80, 40)] {
            let windows = Windows::new(sink, recent).unwrap();
            for position in [0, 15, 16, 63, 64, 79, 80, 100, 320, 335, 336, 1000] {
                let reach = Reach::new(&windows, position, 0, 0);
                for page in 0..=position / PAGE_TOKENS + 1 {
                    let base = page * PAGE_TOKENS;
                    let (coded, full) = (reach.coded(base), reach.full(base));
                    for t in 0..PAGE_TOKENS {
                        let j = base + t;
                        let code = j <= position && windows.reads_code(position, j);
                        assert_eq!(coded >> t & 1 == 1, code, "{sink} {recent} {position} {j}");
                        assert_eq!(full >> t & 1 == 1, j <= position && !code);
                    }
                    assert_eq!(reach.coded_keys(base) | reach.coded_values(base), 0);
                }
            }
        }
    }
}
