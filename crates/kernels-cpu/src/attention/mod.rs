//! Attention over pages: quantized, BF16, or both, by the one rule of [`Windows`].
//!
//! [`attend`] computes, for each query row, what `oscar_codec::attention::attend_context` defines.
//! The context is cut at fixed positions into spans of [`SPAN_TOKENS`]; each span gives a softmax
//! state, and the states of a row are merged in order. Rows go over a page in blocks of eight, and
//! may be handed to different threads span by span.
//!
//! Invariant: a row's output depends on its query, its position and the pages alone. Rows beside
//! it, other tasks and the number of threads do not show in a single bit, so decode, prefill in any
//! chunks and any batch agree. That holds within a variant; variants differ by rounding:
//!
//! - Quantized pages with one affine group for each head use fixed-point queries (16 bits of the
//!   row's largest magnitude) and weights (16 bits of the page's largest), and exact integer sums.
//!   Codes of one and two bits need but 8 bits of both, see [`AttentionPrecision`]. AMX gives the
//!   bits of AVX-512: it multiplies the same integers in tiles where many rows read a page.
//! - BF16 pages round queries and weights to BF16 on AVX-512 and AMX; AVX2 keeps both in f32.
//! - Latent rows, which are keys and values in one, are read as BF16 pages; their values are put in
//!   order first, once for all rows of a work item.
//! - Everything else is dequantized to BF16 first, once for all rows of a work item, and read like
//!   BF16 pages ([`kernel_name`] says so): through f32 rows (`dequantize`), on AVX-512 straight to
//!   the tile (`avx512::dequantize`). Pages of f32, and everything in the scalar variant, are read
//!   in f32 (`dequantized`).

/// Calls an inlined body, compiled once for each instruction set, in the form for a variant.
macro_rules! compiled_for {
    ($variant:expr, $body:ident($($argument:ident: $kind:ty),*)) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2")]
        fn avx2($($argument: $kind),*) {
            $body($($argument),*);
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq")]
        fn avx512($($argument: $kind),*) {
            $body($($argument),*);
        }
        match $variant {
            // SAFETY: a variant is only passed on by `attend`, which found it available.
            #[cfg(target_arch = "x86_64")]
            Variant::Avx2 => unsafe { avx2($($argument),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Variant::Avx512 | Variant::Amx => unsafe { avx512($($argument),*) },
            _ => $body($($argument),*),
        }
    }};
}

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_codes;
mod append;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod block;
mod demote;
mod dequantize;
mod dequantized;
mod page;
mod precision;
mod scores;
mod span;
mod tile;

#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, TryLockError};

use oscar_codec::Windows;
use oscar_codec::attention::PagedContext;

pub use append::append_rows;
pub use demote::{DemotionCodecs, demote_side, demote_tile};
pub use page::{has_kernel, kernel_name, kernel_name_with};
pub use precision::{AttentionPrecision, OVERRIDE as PRECISION_OVERRIDE, PrecisionError};
pub use scores::{ScoreTask, add_scores};

use crate::cpu::Variant;
use crate::disjoint::Disjoint;
use crate::pool::ThreadPool;
use block::{MAX_DIM, MAX_ROW, ROWS, RowBlock, add_sink, finish_state, merge_state, state_len};
use page::{PageReader, PageScratch};
use span::{ItemRows, read_span};

/// Tokens of a span: the unit of parallel work along the context, and the order of merging. Part of
/// the definition of the results, so never a tuning knob.
pub const SPAN_TOKENS: usize = 2048;

/// Blocks of rows a work item carries over each page.
const ITEM_BLOCKS: usize = 8;
/// The same where AMX tiles read codes: unpacking a page and configuring tiles are shared.
const TILE_ITEM_BLOCKS: usize = 16;
/// The same where a page is dequantized before it is read: the more rows share it, the better.
const DEQUANTIZING_ITEM_BLOCKS: usize = 64;

/// The queries of one sequence and KV head: in decode the heads of the group, in prefill those of
/// every token of the chunk.
pub struct AttendTask<'a> {
    /// Rows × head size, rotated, not yet scaled.
    pub queries: &'a [f32],
    /// One position a row, non-decreasing.
    pub positions: &'a [u32],
    /// Factor of the scores, usually `1/√d`.
    pub scale: f32,
    pub windows: &'a Windows,
    pub context: &'a PagedContext<'a>,
    /// Attention sinks, a score for each row: see `AttentionState::add_sink`.
    pub sinks: Option<&'a [f32]>,
    /// Rows × head size.
    pub out: &'a mut [f32],
}

/// State of [`attend`] from call to call: memory, and the precision of its integers. The default
/// has the precision of [`AttentionPrecision::chosen`].
pub struct Scratch {
    precision: AttentionPrecision,
    calls: u64,
    workers: Vec<Mutex<Worker>>,
    states: Vec<f32>,
    items: Vec<Item>,
}

impl Scratch {
    pub fn new(precision: AttentionPrecision) -> Self {
        Self { precision, calls: 0, workers: Vec::new(), states: Vec::new(), items: Vec::new() }
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new(AttentionPrecision::chosen().unwrap_or_default())
    }
}

/// The memory of one thread while it reads spans.
#[derive(Default)]
struct Worker {
    blocks: Vec<Box<RowBlock>>,
    /// Call and item the blocks hold the queries of.
    loaded: Option<(u64, usize)>,
    page: PageScratch,
    /// State of one row, twice: the running one and the next.
    state: Vec<f32>,
}

/// Some rows of a task over some spans.
#[derive(Clone, Copy, Debug)]
struct Item {
    task: usize,
    first_row: usize,
    rows: usize,
    /// Spans of all rows of the item; a row's own may end earlier.
    spans: usize,
    /// Position of the item's states, if its spans are handed out one by one.
    states: Option<usize>,
}

/// Computes the outputs of all tasks. Results do not depend on the pool or on what else is in the
/// call.
///
/// # Panics
/// If slices do not have the stated sizes, positions decrease, the variant cannot run here, or a
/// page that the windows call for is absent: bugs of the caller's bookkeeping, never of user input.
pub fn attend(variant: Variant, pool: &ThreadPool, tasks: &mut [AttendTask<'_>], scratch: &mut Scratch) {
    assert!(variant.is_available(), "variant {variant} cannot run on this machine");
    tasks.iter().for_each(check);
    while scratch.workers.len() < pool.threads() {
        scratch.workers.push(Mutex::default());
    }
    scratch.calls += 1;
    let Scratch { precision, calls, workers, states, items } = scratch;
    let (precision, call) = (*precision, *calls);
    items.clear();
    plan(variant, precision, tasks, pool.threads(), items, states);

    // Split items: every span of every item is a piece of work. Whole items: the item is.
    let pieces: Vec<(usize, usize)> = items
        .iter()
        .enumerate()
        .flat_map(|(i, item)| (0..if item.states.is_some() { item.spans } else { 1 }).map(move |s| (i, s)))
        .collect();
    let inputs: Vec<TaskInput<'_>> = tasks.iter().map(TaskInput::new).collect();
    let outs: Vec<Disjoint<'_, f32>> = tasks.iter_mut().map(|task| Disjoint::new(task.out)).collect();
    let shared_states = Disjoint::new(states);
    pool.run(pieces.len(), &|index| {
        // Late rows have the most to read: they go first.
        let (item_index, span) = pieces[pieces.len() - 1 - index];
        let item = items[item_index];
        let input = &inputs[item.task];
        let d = input.head_dim;
        let mut worker = free_worker(workers);
        let mut rows = worker.load(variant, precision, input, item, (call, item_index));
        if let Some(start) = item.states {
            let size = item.rows * state_len(d);
            // SAFETY: the states of an item's spans do not overlap, and each span is one piece, run
            // once.
            let states = unsafe { shared_states.part(start + span * size..start + (span + 1) * size) };
            read_span(&mut rows, span, |row, block, r| {
                block.state(r, &mut states[row * state_len(d)..(row + 1) * state_len(d)]);
            });
        } else {
            // SAFETY: each row belongs to one item, and this item to one piece.
            let out = unsafe { outs[item.task].part(item.first_row * d..(item.first_row + item.rows) * d) };
            whole_item(&mut rows, item, out);
        }
    });
    pool.run(items.len(), &|index| {
        let item = items[index];
        let Some(start) = item.states else { return };
        let d = inputs[item.task].head_dim;
        let len = state_len(d);
        for row in 0..item.rows {
            let row_state = |span: usize| {
                let at = start + (span * item.rows + row) * len;
                at..at + len
            };
            // SAFETY: the states and the output of a row are reached by this item alone, one range
            // at a time or ranges of different spans.
            unsafe {
                let total = shared_states.part(row_state(0));
                for span in 1..item.spans {
                    merge_state(total, shared_states.part(row_state(span)));
                }
                if let Some(sink) = inputs[item.task].sink(item.first_row + row) {
                    add_sink(total, sink);
                }
                let at = (item.first_row + row) * d;
                finish_state(total, outs[item.task].part(at..at + d));
            }
        }
    });
}

/// A task without its output.
struct TaskInput<'a> {
    queries: &'a [f32],
    positions: &'a [u32],
    scale: f32,
    windows: &'a Windows,
    context: &'a PagedContext<'a>,
    sinks: Option<&'a [f32]>,
    coded_until: usize,
    /// How far positions move in the compact sequence of a view, and its places without a row.
    shift: usize,
    hole: Range<usize>,
    head_dim: usize,
}

impl<'a> TaskInput<'a> {
    fn new(task: &AttendTask<'a>) -> Self {
        let AttendTask { queries, positions, scale, windows, context, sinks, .. } = *task;
        let head_dim = context.full_codec.head_dim();
        let (shift, hole) = context.compaction(windows.sink());
        let coded_until = context.coded_until();
        Self { queries, positions, scale, windows, context, sinks, coded_until, shift, hole, head_dim }
    }

    fn sink(&self, row: usize) -> Option<f32> {
        self.sinks.map(|sinks| sinks[row])
    }
}

fn check(task: &AttendTask<'_>) {
    let (full, coded) = (task.context.full_codec, task.context.coded_codec);
    let (d, rows) = (full.head_dim(), task.positions.len());
    assert_eq!(coded.head_dim(), d, "head sizes of the two codecs");
    assert!(d <= if full.shares_rows() { MAX_ROW } else { MAX_DIM });
    assert_eq!(task.queries.len(), rows * d, "queries: {rows} rows of {d}");
    assert_eq!(task.out.len(), rows * d, "output: {rows} rows of {d}");
    assert!(task.positions.is_sorted(), "positions must not decrease");
    assert!(task.sinks.is_none_or(|sinks| sinks.len() == rows), "a sink for each row");
    let slides = task.positions.last().is_some_and(|&t| task.windows.first_visible(t as usize) > 0);
    assert!(!slides || task.context.view.is_none(), "a sliding window over a view");
}

/// Cuts the tasks into items. Whether an item's spans are handed out one by one decides who does
/// the work, never what is computed.
fn plan(
    variant: Variant,
    precision: AttentionPrecision,
    tasks: &[AttendTask<'_>],
    threads: usize,
    items: &mut Vec<Item>,
    states: &mut Vec<f32>,
) {
    for (task, input) in tasks.iter().enumerate() {
        let total = input.positions.len();
        let reader = PageReader::new(variant, precision, input.context.coded_codec);
        let most = ROWS
            * match reader.dequantizes() {
                true => DEQUANTIZING_ITEM_BLOCKS,
                false if variant == Variant::Amx => TILE_ITEM_BLOCKS,
                false => ITEM_BLOCKS,
            };
        for first_row in (0..total).step_by(most) {
            let rows = most.min(total - first_row);
            let (shift, _) = input.context.compaction(input.windows.sink());
            let last = input.positions[first_row + rows - 1] as usize - shift;
            items.push(Item { task, first_row, rows, spans: last / SPAN_TOKENS + 1, states: None });
        }
    }
    // Enough items to keep all threads busy: no need to store states.
    if items.len() >= 4 * threads {
        return;
    }
    let mut floats = 0;
    for item in items.iter_mut().filter(|item| item.spans > 1) {
        item.states = Some(floats);
        floats += item.spans * item.rows * state_len(tasks[item.task].context.full_codec.head_dim());
    }
    if states.len() < floats {
        states.resize(floats, 0.0);
    }
}

/// All spans of an item one after another, with the same merges in the same order as if they had
/// been split.
fn whole_item(rows: &mut ItemRows<'_>, item: Item, out: &mut [f32]) {
    let d = rows.input.head_dim;
    let len = state_len(d);
    let mut totals = std::mem::take(rows.state);
    totals.clear();
    totals.resize((item.rows + 1) * len, 0.0);
    let (next, totals_by_row) = totals.split_at_mut(len);
    for span in 0..item.spans {
        read_span(rows, span, |row, block, r| {
            let total = &mut totals_by_row[row * len..(row + 1) * len];
            if span == 0 {
                block.state(r, total);
            } else {
                block.state(r, next);
                merge_state(total, next);
            }
        });
    }
    let states = totals_by_row.chunks_exact_mut(len).zip(out.chunks_exact_mut(d));
    for ((total, out), row) in states.zip(item.first_row..) {
        if let Some(sink) = rows.input.sink(row) {
            add_sink(total, sink);
        }
        finish_state(total, out);
    }
    *rows.state = totals;
}

/// There is a worker for each thread, so one is free whenever a thread asks.
fn free_worker(workers: &[Mutex<Worker>]) -> MutexGuard<'_, Worker> {
    loop {
        for worker in workers {
            match worker.try_lock() {
                Ok(worker) => return worker,
                // A panic of another call left it; its content is rewritten before use.
                Err(TryLockError::Poisoned(worker)) => return worker.into_inner(),
                Err(TryLockError::WouldBlock) => {}
            }
        }
        std::hint::spin_loop();
    }
}
