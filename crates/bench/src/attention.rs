//! Attention of one layer on the CPU, cold caches, random pages.

use oscar_codec::attention::PagedContext;
use oscar_codec::random::SplitMix64;
use oscar_codec::{CacheLayout, PAGE_TOKENS, RowPageCodec, Side, Survivors};
use oscar_kernels_cpu::attention::{AttendTask, Scratch, attend};
use oscar_kernels_cpu::bench::{Timing, time_median};
use oscar_kernels_cpu::{Kernels, ThreadPool};
use std::ops::Range;

/// Copies of the cache are cycled through until this much memory lies between two uses of a page,
/// so that no repetition finds its data in a cache.
const COLD_BYTES: usize = 256 << 20;
/// Distinct random pages; the rest repeat their bytes at other addresses.
const DISTINCT_PAGES: usize = 64;

/// The work of one repetition.
pub struct Shape {
    /// Query heads of a KV head.
    pub group: usize,
    pub kv_heads: usize,
    /// Tokens of a sequence, those of this step included.
    pub context: usize,
    /// New tokens of a sequence: one in decode, a chunk in prefill.
    pub tokens: usize,
    pub batch: usize,
    /// Rows of the quantized history that a view keeps for every head; all if absent.
    pub rows: Option<usize>,
    pub repetitions: usize,
}

/// Which blocks of a sequence have a full page and which a quantized one.
struct Blocks {
    full: Vec<bool>,
    coded: Range<usize>,
}

impl Blocks {
    /// The first of the new tokens reads the most in BF16, the last one the most codes.
    fn of(layout: &CacheLayout, context: usize, tokens: usize) -> Self {
        let windows = layout.windows();
        let (boundary, frontier) = (windows.boundary(context - tokens), windows.frontier(context - 1));
        let coded = match layout.coded() {
            Some(_) => windows.sink() / PAGE_TOKENS..frontier.div_ceil(PAGE_TOKENS),
            None => 0..0,
        };
        let blocks = 0..context.div_ceil(PAGE_TOKENS);
        Self { full: blocks.map(|b| layout.keeps_full_page(b, boundary)).collect(), coded }
    }

    /// The pages of a view that keeps `rows` rows of the history, and what attention knows of it.
    fn viewed(mut self, layout: &CacheLayout, context: usize, rows: usize) -> (Self, Option<Survivors>) {
        let sink = layout.windows().sink();
        let end = (layout.windows().boundary(context - 1) / PAGE_TOKENS * PAGE_TOKENS).max(sink);
        let view = Survivors { end, rows: rows.min(end - sink) };
        let first = sink / PAGE_TOKENS;
        let dropped = (end - sink) / PAGE_TOKENS - view.pages();
        self.full.drain(first..first + dropped);
        self.coded.end -= dropped;
        (self, Some(view))
    }

    fn full_count(&self) -> usize {
        self.full.iter().filter(|&&full| full).count()
    }

    /// The pages of one sequence and head: those of two memories, one after the other.
    fn pages<'a>(&self, full: &'a [u8], full_bytes: usize, coded: &'a [u8], coded_bytes: usize) -> Pages<'a> {
        let (mut full, mut coded) = (full.chunks_exact(full_bytes), coded.chunks_exact(coded_bytes));
        (0..self.full.len())
            .map(|b| {
                let full = if self.full[b] { full.next() } else { None };
                (full, if self.coded.contains(&b) { coded.next() } else { None })
            })
            .unzip()
    }
}

type Pages<'a> = (Vec<Option<&'a [u8]>>, Vec<Option<&'a [u8]>>);

/// `count` pages that repeat a few random ones.
fn random_pages(codec: &RowPageCodec, head_dim: usize, count: usize) -> Vec<u8> {
    let mut random = SplitMix64::new(1);
    let pages: Vec<Vec<u8>> = (0..DISTINCT_PAGES)
        .map(|_| {
            let mut page = vec![0; codec.page_bytes()];
            for side in [Side::Key, Side::Value] {
                let rows: Vec<f32> = (0..PAGE_TOKENS * head_dim).map(|_| random.symmetric() * 2.0).collect();
                // The sizes are the codec's own. Keys in groups of tokens stay zero: reading them
                // costs the same.
                let _ = codec.quantize_side_rows(side, 0, &rows, &mut page);
            }
            page
        })
        .collect();
    (0..count).flat_map(|i| pages[i % DISTINCT_PAGES].iter().copied()).collect()
}

/// Pairs of a query token and a position that it reads, for `tokens` new tokens of a sequence of
/// `context`.
pub fn visible_pairs(context: usize, tokens: usize) -> f64 {
    let (start, n) = ((context - tokens) as f64, tokens as f64);
    n * start + n * (n + 1.0) / 2.0
}

/// Median time of the attention of all heads and sequences, and the page bytes it reads.
///
/// # Panics
/// If the context is zero.
pub fn measure(kernels: &Kernels, pool: &ThreadPool, layout: &CacheLayout, shape: &Shape) -> (Timing, usize) {
    let d = layout.head_dim();
    let full_codec = layout.full().codec(0, 0);
    let coded_codec = layout.coded().unwrap_or(layout.full()).codec(0, 0);
    let (full_bytes, coded_bytes) = (full_codec.page_bytes(), coded_codec.page_bytes());
    let tokens = shape.tokens.clamp(1, shape.context);
    let blocks = Blocks::of(layout, shape.context, tokens);
    let (blocks, view) = match shape.rows {
        Some(rows) => blocks.viewed(layout, shape.context, rows),
        None => (blocks, None),
    };
    let (full_memory, coded_memory) = (blocks.full_count() * full_bytes, blocks.coded.len() * coded_bytes);
    let per_copy = shape.kv_heads * shape.batch;
    let copy_bytes = (full_memory + coded_memory) * per_copy;
    let copies = COLD_BYTES.div_ceil(copy_bytes) + 1;

    let streams = per_copy * copies;
    let full = random_pages(full_codec, d, blocks.full_count() * streams);
    let coded = random_pages(coded_codec, d, blocks.coded.len() * streams);
    let pages: Vec<Pages<'_>> = (0..streams)
        .map(|s| blocks.pages(&full[s * full_memory..], full_bytes, &coded[s * coded_memory..], coded_bytes))
        .collect();
    let contexts: Vec<PagedContext<'_>> = pages
        .iter()
        .map(|(full, coded)| PagedContext { full_codec, coded_codec, full, coded, view })
        .collect();

    let rows = tokens * shape.group;
    let queries: Vec<f32> = (0..rows * d).map(|i| ((i * 37 % 101) as f32 - 50.0) / 40.0).collect();
    let new = shape.context - tokens..shape.context;
    let positions: Vec<u32> = new.flat_map(|p| std::iter::repeat_n(p as u32, shape.group)).collect();
    let mut outputs = vec![0.0; per_copy * rows * d];
    let mut scratch = Scratch::default();
    let mut copy = 0;
    let timing = time_median(2, shape.repetitions, || {
        let mut tasks: Vec<AttendTask<'_>> = contexts[copy * per_copy..(copy + 1) * per_copy]
            .iter()
            .zip(outputs.chunks_exact_mut(rows * d))
            .map(|(context, out)| AttendTask {
                queries: &queries,
                positions: &positions,
                scale: 1.0 / (d as f32).sqrt(),
                windows: layout.windows(),
                context,
                sinks: None,
                out,
            })
            .collect();
        attend(kernels.variant(), pool, &mut tasks, &mut scratch);
        copy = (copy + 1) % copies;
    });
    (timing, copy_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_codec::{CodeLayout, KvFormat, Windows};

    #[test]
    fn a_view_has_the_pages_of_its_rows() {
        let windows = Windows::default();
        let layout = CacheLayout::new(KvFormat::OSCAR2, 1, 1, 64, windows, CodeLayout::CpuTile).unwrap();
        let whole = Blocks::of(&layout, 8192, 1);
        let (full, coded) = (whole.full_count(), whole.coded.len());
        let (blocks, view) = whole.viewed(&layout, 8192, 1000);
        let view = view.unwrap();
        assert_eq!((view.rows, view.pages(), blocks.full_count()), (1000, 16, full));
        assert_eq!(coded - blocks.coded.len(), (view.end - 64) / 64 - 16);
        let (all, view) = Blocks::of(&layout, 8192, 1).viewed(&layout, 8192, usize::MAX);
        assert_eq!((all.coded.len(), view.unwrap().shift(64)), (coded, 0));
    }

    #[test]
    fn pairs_are_counted_row_by_row() {
        for (context, tokens) in [(1, 1), (10, 1), (10, 10), (1000, 37)] {
            let counted: usize = (context - tokens..context).map(|position| position + 1).sum();
            assert_eq!(visible_pairs(context, tokens), counted as f64);
        }
    }
}
