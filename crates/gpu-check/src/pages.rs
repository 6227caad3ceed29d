//! Checks of blocks that are copied to the host and back: their bytes are those of their pages, and
//! attention over copies, at other places of another pool, gives the same bits.

use crate::growing::{Inspected, rows_of};
use crate::{Extent, Numbers, Report, read_all, upload};
use anyhow::{Result, ensure};
use oscar_backend::{Backend, BlockId, CacheHead, HeadShape, LayerHeads, SequenceRows, Step};
use oscar_cache::{PagePool, SequencePages};
use oscar_codec::{CacheLayout, CodeLayout, CodedPageId, FormatTable, FullPageId, KvFormat, SlidingPageId};

const COPIED: &str = "copied blocks";
const ATTENTION: &str = "attention over copied blocks";
const GROUP: usize = 4;
const LAYERS: usize = 3;
const KV_HEADS: usize = 2;

/// Formats of every storage; `widths` has other widths in each head, and one that keeps nothing. In
/// `sliding` two of the layers slide.
const FORMATS: [&str; 9] =
    ["bf16", "oscar2", "oscar3", "int4", "widths", "kivi2", "int8", "turboquant3", "sliding"];

pub fn check<B: Backend<Pool: Inspected>>(gpu: &B, extent: Extent, report: &mut Report) -> Result<()> {
    let mut seed = 1300;
    for format in FORMATS {
        for head_dim in [64, 128, 256] {
            seed += 1;
            if extent.takes(seed) || (extent.small && head_dim == 64) {
                let what = format!("{format}, head {head_dim}");
                if let Err(error) = restore(gpu, layout(format, head_dim)?, seed, &what, report) {
                    report.case(COPIED, f64::INFINITY, 0.0, || format!("{what}: {error:#}"));
                }
            }
        }
    }
    if !extent.small {
        large(gpu, report)?;
    }
    Ok(())
}

fn layout(name: &str, head_dim: usize) -> Result<CacheLayout> {
    let order = CodeLayout::GpuTile;
    let format = if matches!(name, "widths" | "sliding") { KvFormat::OSCAR2 } else { name.parse()? };
    let own = format.windows(None, None)?;
    // Narrow windows, unless the format has its own, so that a short context has history.
    let windows = if own.sides_agree() { format.windows(Some(16), Some(48))? } else { own };
    let layout = CacheLayout::new(format, LAYERS, KV_HEADS, head_dim, windows, order)?;
    match name {
        "widths" => {}
        "sliding" => return Ok(layout.with_sliding_layers(100, &[0, 2])?),
        _ => return Ok(layout),
    }
    let widths = [(2, 2), (3, 1), (0, 0), (4, 4), (1, 2), (2, 3)];
    let table = FormatTable::from_widths(LAYERS, KV_HEADS, head_dim, &widths, order)?;
    Ok(layout.with_coded_table(table))
}

/// Pages of two sequences, and copies of them in another pool in the opposite order.
struct Twins<'a, B: Backend> {
    gpu: &'a B,
    layout: CacheLayout,
    shape: HeadShape,
    ids: PagePool,
    pools: [B::Pool; 2],
    pages: Vec<SequencePages>,
    rope: B::Rope,
    /// Ids of the second pool are these numbers less the ids of the first.
    mirror: Mirror,
}

/// Of full, coded and sliding pages.
type Mirror = [u32; 3];

fn restore<B: Backend<Pool: Inspected>>(
    gpu: &B,
    layout: CacheLayout,
    seed: u64,
    what: &str,
    report: &mut Report,
) -> Result<()> {
    let (layout, d) = (gpu.held_layout(&layout), layout.head_dim());
    let scale = 1.0 / (d as f32).sqrt();
    let shape = HeadShape {
        query_heads: GROUP * KV_HEADS,
        kv_heads: KV_HEADS,
        head_dim: d,
        rms_norm_eps: 1e-6,
        scale,
    };
    let block = layout.full_block_bytes() + layout.coded_block_bytes() + layout.sliding_block_bytes();
    let budget = 60 * block;
    let mut twins = Twins {
        gpu,
        shape,
        ids: PagePool::new(&layout, budget),
        pools: [gpu.pool(&layout, &shape, budget)?, gpu.pool(&layout, &shape, budget)?],
        pages: (0..2).map(|_| SequencePages::new()).collect(),
        rope: gpu.rope(&vec![1.0; 1024 * d / 2], &vec![0.0; 1024 * d / 2], d)?,
        layout,
        mirror: [0; 3],
    };
    let mut numbers = Numbers::new(seed);
    // The second sequence ends in the middle of a block and of a tile.
    for rows in [[400, 273], [1, 1], [30, 1]] {
        twins.step(&rows, &mut numbers, false)?;
    }
    twins.copy(what, report)?;
    for rows in [[1, 1], [1, 90], [1, 1], [70, 1], [1, 1]] {
        let [found, expected] = twins.step(&rows, &mut numbers, true)?;
        let differing = found.iter().zip(&expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        let same_length = found.len() == expected.len() && !found.is_empty();
        let differing = if same_length { differing as f64 } else { f64::INFINITY };
        report.case(ATTENTION, differing, 0.0, || format!("{what}, {rows:?} rows more"));
    }
    Ok(())
}

impl<B: Backend<Pool: Inspected>> Twins<'_, B> {
    /// Appends rows to the sequences in the first pool, or in both; returns what attention gave.
    fn step(&mut self, counts: &[usize], numbers: &mut Numbers, both: bool) -> Result<[Vec<f32>; 2]> {
        let HeadShape { query_heads, kv_heads, head_dim: d, .. } = self.shape;
        let (count, width) = (counts.iter().sum::<usize>(), (query_heads + 2 * kv_heads) * d);
        let values: Vec<Vec<f32>> = (0..LAYERS).map(|_| numbers.vector(count * width)).collect();
        let mut plans = Vec::new();
        for (pages, &rows) in self.pages.iter_mut().zip(counts) {
            plans.push(pages.prepare(&self.layout, &self.ids, rows)?);
        }
        let own = rows_of(&self.pages, &plans);
        let mirrored = |s: &SequenceRows<'_>| {
            let [full, coded, sliding] = self.mirror;
            (
                s.full.iter().map(|id| id.map(|id| FullPageId(full - id.0))).collect::<Vec<_>>(),
                s.coded.iter().map(|id| id.map(|id| CodedPageId(coded - id.0))).collect::<Vec<_>>(),
                s.sliding.iter().map(|id| id.map(|id| SlidingPageId(sliding - id.0))).collect::<Vec<_>>(),
            )
        };
        let tables: Vec<_> = if both { own.iter().map(mirrored).collect() } else { Vec::new() };
        let other: Vec<SequenceRows<'_>> = own
            .iter()
            .zip(&tables)
            .map(|(s, (full, coded, sliding))| SequenceRows {
                rows: s.rows.clone(),
                first_position: s.first_position,
                full,
                coded,
                sliding,
                demote: s.demote.clone(),
                demote_values: s.demote_values.clone(),
                view: None,
                states: None,
            })
            .collect();
        let mut found = [Vec::new(), Vec::new()];
        let pools = self.pools.iter_mut().take(if both { 2 } else { 1 });
        for ((pool, rows), found) in pools.zip([&own, &other]).zip(&mut found) {
            let mut projected = Vec::new();
            for values in &values {
                projected.push(upload(self.gpu, values, width)?);
            }
            let mut attended = self.gpu.rows(query_heads * d);
            let mut step = self.gpu.step(rows, pool)?;
            for (layer, qkv) in projected.iter_mut().enumerate() {
                let rope = &self.rope;
                let window = self.layout.sliding().filter(|_| self.layout.slides(layer)).map(|s| s.window());
                let heads = LayerHeads { layer, qk_norm: None, rope, rotation: None, window, sinks: None };
                step.attend(heads, qkv, &mut attended, None)?;
                found.extend(read_all::<B>(&mut step, &attended, count)?);
            }
            step.finish()?;
        }
        for (pages, plan) in self.pages.iter_mut().zip(&plans) {
            pages.commit(&self.layout, plan);
        }
        Ok(found)
    }

    /// Copies all blocks to the second pool and compares their bytes on the way.
    fn copy(&mut self, what: &str, report: &mut Report) -> Result<()> {
        let full = self.pages.iter().flat_map(|pages| pages.full().iter().flatten());
        let coded = self.pages.iter().flat_map(|pages| pages.coded().iter().flatten());
        let sliding = self.pages.iter().flat_map(|pages| pages.sliding().iter().flatten());
        // Kinds alternate, so that batches are cut.
        let mut blocks: Vec<BlockId> =
            full.map(|id| BlockId::Full(*id)).chain(coded.map(|id| BlockId::Coded(*id))).collect();
        blocks.extend(sliding.map(|id| BlockId::Sliding(*id)));
        blocks.sort_by_key(|block| number(*block) % 5);
        // Rows that come later take more pages.
        self.mirror = [0, 1, 2].map(|wanted| {
            let of_kind = blocks.iter().filter(|block| kind(**block) == wanted);
            of_kind.map(|block| number(*block)).max().unwrap_or(0) + 9
        });
        let mut copies = vec![Vec::new(); blocks.len()];
        let mut wanted: Vec<_> = blocks.iter().copied().zip(&mut copies).collect();
        self.gpu.read_blocks(&self.pools[0], &mut wanted)?;
        for (block, bytes) in blocks.iter().zip(&copies) {
            let expected = self.pages_of(&self.pools[0], *block)?;
            let differs = bytes.len() != block.bytes(&self.layout)
                || expected.is_some_and(|expected| expected != *bytes);
            report.case(COPIED, f64::from(u8::from(differs)), 0.0, || format!("{what}, {block:?} read"));
        }
        // Everything in the other pool is the same byte before, so that a wrong place is seen.
        let places: Vec<BlockId> = blocks.iter().map(|block| mirrored(*block, self.mirror)).collect();
        let has = |wanted: usize| places.iter().any(|place| kind(*place) == wanted);
        let every =
            |kind: usize| (0..=self.mirror[kind]).filter(move |id| *id < 50 && (kind == 0 || has(kind)));
        let all: Vec<BlockId> = every(0)
            .map(|id| BlockId::Full(FullPageId(id)))
            .chain(every(1).map(|id| BlockId::Coded(CodedPageId(id))))
            .chain(every(2).map(|id| BlockId::Sliding(SlidingPageId(id))))
            .collect();
        let plain: Vec<Vec<u8>> = all.iter().map(|block| vec![0x5a; block.bytes(&self.layout)]).collect();
        let filled: Vec<_> = all.iter().copied().zip(plain.iter().map(Vec::as_slice)).collect();
        self.gpu.write_blocks(&mut self.pools[1], &filled)?;
        let written: Vec<_> = places.iter().copied().zip(copies.iter().map(Vec::as_slice)).collect();
        self.gpu.write_blocks(&mut self.pools[1], &written)?;
        for block in all {
            let mut bytes = Vec::new();
            self.gpu.read_blocks(&self.pools[1], &mut [(block, &mut bytes)])?;
            let differs = match places.iter().position(|place| *place == block) {
                Some(copy) => bytes != copies[copy],
                None => bytes.iter().any(|byte| *byte != 0x5a),
            };
            report.case(COPIED, f64::from(u8::from(differs)), 0.0, || format!("{what}, {block:?} written"));
        }
        let short = self.gpu.write_blocks(&mut self.pools[1], &[(places[0], &copies[0][1..])]);
        ensure!(short.is_err(), "a block with a byte too few was accepted");
        Ok(())
    }

    /// The bytes of a block, page by page; `None` where pages cannot be read so.
    fn pages_of(&self, pool: &B::Pool, block: BlockId) -> Result<Option<Vec<u8>>> {
        let mut all = Vec::new();
        for index in 0..LAYERS * KV_HEADS {
            let head = CacheHead { layer: index / KV_HEADS, kv_head: index % KV_HEADS };
            if self.layout.slides(head.layer) != matches!(block, BlockId::Sliding(_)) {
                continue;
            }
            let page = match block {
                BlockId::Full(id) => Some(pool.full_page(head, id)?),
                // In sliding layers the full pages are those of their group.
                BlockId::Sliding(id) => Some(pool.full_page(head, FullPageId(id.0))?),
                _ => pool.history_page(head, number(block))?,
            };
            let Some(page) = page else { return Ok(None) };
            all.extend(page);
        }
        Ok(Some(all))
    }
}

fn number(block: BlockId) -> u32 {
    match block {
        BlockId::Full(id) => id.0,
        BlockId::Coded(id) => id.0,
        BlockId::Sliding(id) => id.0,
        BlockId::State(id) => id.0,
    }
}

/// The place of a block's kind in a [`Mirror`].
fn kind(block: BlockId) -> usize {
    match block {
        BlockId::Full(_) | BlockId::State(_) => 0,
        BlockId::Coded(_) => 1,
        BlockId::Sliding(_) => 2,
    }
}

fn mirrored(block: BlockId, [full, coded, sliding]: Mirror) -> BlockId {
    match block {
        BlockId::Full(id) => BlockId::Full(FullPageId(full - id.0)),
        BlockId::Coded(id) => BlockId::Coded(CodedPageId(coded - id.0)),
        BlockId::Sliding(id) => BlockId::Sliding(SlidingPageId(sliding - id.0)),
        BlockId::State(_) => block,
    }
}

/// Blocks that are larger than a buffer on their way.
fn large<B: Backend>(gpu: &B, report: &mut Report) -> Result<()> {
    let windows = KvFormat::Bf16.windows(None, None)?;
    let layout = CacheLayout::new(KvFormat::Bf16, 41, 8, 256, windows, CodeLayout::GpuTile)?;
    let layout = gpu.held_layout(&layout);
    let shape = HeadShape { query_heads: 8, kv_heads: 8, head_dim: 256, rms_norm_eps: 1e-6, scale: 1.0 };
    let mut pool = gpu.pool(&layout, &shape, 5 * layout.full_block_bytes())?;
    let bytes = |id: u32| -> Vec<u8> {
        (0..layout.full_block_bytes() as u32).map(|i| (i.wrapping_mul(2654435761 + id) >> 13) as u8).collect()
    };
    let copies: Vec<Vec<u8>> = (0..4).map(bytes).collect();
    let ids: Vec<BlockId> = [2, 0, 3, 1].into_iter().map(|id| BlockId::Full(FullPageId(id))).collect();
    let blocks: Vec<_> = ids.iter().copied().zip(copies.iter().map(Vec::as_slice)).collect();
    gpu.write_blocks(&mut pool, &blocks)?;
    let mut read = vec![Vec::new(); ids.len()];
    let mut wanted: Vec<_> = ids.iter().copied().zip(&mut read).collect();
    gpu.read_blocks(&pool, &mut wanted)?;
    for (block, (read, copy)) in ids.iter().zip(read.iter().zip(&copies)) {
        report.case(COPIED, f64::from(u8::from(read != copy)), 0.0, || format!("a large block, {block:?}"));
    }
    Ok(())
}
