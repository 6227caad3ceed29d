//! Demotion for formats without kernels: rows are copied to the host, quantized and dequantized by
//! `oscar-codec`, and copied back in BF16.
//!
//! The codes are not kept. Groups along tokens may span pages, so a whole demotion range is
//! quantized at once; the windows demote whole groups.

use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::memory::{download_all, upload_all};
use crate::pages::CudaPages;
use oscar_backend::SequenceRows;
use oscar_codec::{CodecError, PAGE_TOKENS, RowPageCodec, Side};
use std::collections::BTreeMap;
use std::ops::Range;

/// Pages of one head by id. Two sequences may share a page and demote different parts of it.
type Pages = BTreeMap<u32, Vec<u8>>;

/// Rows times heads from which on several threads pay off.
const ROWS_FOR_THREADS: usize = 128;

/// Quantizes and dequantizes the demoted rows of one layer.
pub fn demote(
    device: &Device,
    layer: usize,
    sequences: &[SequenceRows<'_>],
    pool: &mut CudaPages,
) -> Result<()> {
    let (full_ids, decoded_ids) = touched(sequences)?;
    if decoded_ids.is_empty() {
        return Ok(());
    }
    let layout = pool.layout().clone();
    let Some(table) = layout.coded() else { return Ok(()) };
    let mut heads: Vec<HeadWork<'_>> = Vec::with_capacity(layout.kv_heads());
    for head in 0..layout.kv_heads() {
        let room = |ids: &[u32]| ids.iter().map(|&id| (id, Vec::new())).collect();
        heads.push(HeadWork {
            recoder: Recoder {
                full: layout.full().codec(layer, head),
                coded: table.codec(layer, head),
                origin: layout.windows().sink(),
            },
            full: room(&full_ids),
            decoded: room(&decoded_ids),
        });
    }
    let mut copies = Vec::new();
    for (head, work) in heads.iter_mut().enumerate() {
        for (pages, coded) in [(&mut work.full, false), (&mut work.decoded, true)] {
            for (&id, page) in pages {
                if let Some(at) = pool.page_at(layer, head, id, coded)? {
                    page.resize(at.len(), 0);
                    copies.push((at, page.as_mut_slice()));
                }
            }
        }
    }
    download_all(device, &mut copies)?;
    drop(copies);
    recode_heads(&mut heads, sequences)?;
    let mut copies = Vec::new();
    for (head, work) in heads.iter().enumerate() {
        for (&id, page) in &work.decoded {
            copies.extend(pool.page_at(layer, head, id, true)?.map(|at| (at, page.as_slice())));
        }
    }
    upload_all(device, &copies)
}

/// One head's pages on the host.
struct HeadWork<'a> {
    recoder: Recoder<'a>,
    full: Pages,
    decoded: Pages,
}

/// Ids of the full pages that are read, and of the pages of history that change.
fn touched(sequences: &[SequenceRows<'_>]) -> Result<(Vec<u32>, Vec<u32>)> {
    let (mut full, mut decoded) = (Vec::new(), Vec::new());
    for s in sequences {
        for positions in [&s.demote, &s.demote_values] {
            for block in blocks_of(positions) {
                let (from, to) = pages_of(s, block)?;
                full.push(from);
                decoded.push(to);
            }
        }
    }
    for ids in [&mut full, &mut decoded] {
        ids.sort_unstable();
        ids.dedup();
    }
    Ok((full, decoded))
}

fn blocks_of(positions: &Range<usize>) -> Range<usize> {
    match positions.is_empty() {
        true => 0..0,
        false => positions.start / PAGE_TOKENS..positions.end.div_ceil(PAGE_TOKENS),
    }
}

/// The two pages of a block that is demoted.
fn pages_of(s: &SequenceRows<'_>, block: usize) -> Result<(u32, u32)> {
    match (s.full.get(block).copied().flatten(), s.coded.get(block).copied().flatten()) {
        (Some(full), Some(coded)) => Ok((full.0, coded.0)),
        _ => {
            let detail = format!("block {block} is to be coded but lacks one of its pages");
            Err(CudaError::Shape { what: "a sequence of the step", detail })
        }
    }
}

fn recode_heads(heads: &mut [HeadWork<'_>], sequences: &[SequenceRows<'_>]) -> Result<()> {
    let recode = |work: &mut HeadWork<'_>| {
        sequences.iter().try_for_each(|s| work.recoder.recode(s, &work.full, &mut work.decoded))
    };
    let rows: usize = sequences.iter().map(|s| s.demote.len() + s.demote_values.len()).sum();
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(heads.len());
    if threads < 2 || rows * heads.len() < ROWS_FOR_THREADS {
        return heads.iter_mut().try_for_each(recode);
    }
    let share = heads.len().div_ceil(threads);
    std::thread::scope(|scope| {
        let workers: Vec<_> = heads
            .chunks_mut(share)
            .map(|part| scope.spawn(|| part.iter_mut().try_for_each(recode)))
            .collect();
        // A panic of the codec continues in this thread.
        workers
            .into_iter()
            .try_for_each(|w| w.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// Quantizes and dequantizes rows of one layer and head.
struct Recoder<'a> {
    full: &'a RowPageCodec,
    coded: &'a RowPageCodec,
    /// First position of the groups along tokens.
    origin: usize,
}

impl Recoder<'_> {
    /// Writes the dequantized form of a sequence's demoted rows into the pages of its history.
    fn recode(&self, s: &SequenceRows<'_>, full: &Pages, decoded: &mut Pages) -> Result<()> {
        let d = self.full.head_dim();
        let absent = || CudaError::Shape { what: "a demotion", detail: "a page was not fetched".into() };
        for (side, positions) in [(Side::Key, &s.demote), (Side::Value, &s.demote_values)] {
            let mut rows = vec![0.0; positions.len() * d];
            for (position, row) in positions.clone().zip(rows.chunks_exact_mut(d)) {
                let page = full.get(&pages_of(s, position / PAGE_TOKENS)?.0).ok_or_else(absent)?;
                self.full.dequantize_row(side, page, position % PAGE_TOKENS, row);
            }
            self.through_codec(side, positions, &mut rows).map_err(shape)?;
            for (token, block, range) in runs(positions) {
                let page = decoded.get_mut(&pages_of(s, block)?.1).ok_or_else(absent)?;
                self.full
                    .quantize_side_rows(side, token, &rows[range.start * d..range.end * d], page)
                    .map_err(shape)?;
            }
        }
        Ok(())
    }

    /// Quantizes and dequantizes rows in place.
    fn through_codec(
        &self,
        side: Side,
        positions: &Range<usize>,
        rows: &mut [f32],
    ) -> std::result::Result<(), CodecError> {
        let d = self.full.head_dim();
        let blocks = blocks_of(positions);
        let mut codes = vec![vec![0; self.coded.page_bytes()]; blocks.len()];
        match self.coded.token_groups(side) {
            Some(groups) => {
                for (first, rows) in
                    positions.clone().step_by(groups.tokens()).zip(rows.chunks(groups.tokens() * d))
                {
                    self.coded.quantize_group(side, first, rows, |at, bytes, tile| {
                        codes[at.block - blocks.start][bytes].copy_from_slice(tile);
                    })?;
                }
            }
            None => {
                for (token, block, range) in runs(positions) {
                    let rows = &rows[range.start * d..range.end * d];
                    self.coded.quantize_side_rows(side, token, rows, &mut codes[block - blocks.start])?;
                }
            }
        }
        let mut pages: Vec<Option<&[u8]>> = vec![None; blocks.end];
        for (page, codes) in pages[blocks].iter_mut().zip(&codes) {
            *page = Some(codes);
        }
        for (position, row) in positions.clone().zip(rows.chunks_exact_mut(d)) {
            self.coded.dequantize_token(side, &pages, self.origin, position, row)?;
        }
        Ok(())
    }
}

/// Positions by block: first token within the block, the block, and the rows relative to the first
/// position.
fn runs(positions: &Range<usize>) -> impl Iterator<Item = (usize, usize, Range<usize>)> {
    let Range { start, end } = *positions;
    blocks_of(positions).map(move |block| {
        let (from, to) = (start.max(block * PAGE_TOKENS), end.min((block + 1) * PAGE_TOKENS));
        (from % PAGE_TOKENS, block, from - start..to - start)
    })
}

fn shape(error: CodecError) -> CudaError {
    CudaError::Shape { what: "rows of the cache", detail: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use oscar_codec::random::SeededGaussian;
    use oscar_codec::{CacheLayout, CodeLayout, CodedPageId, FullPageId, KvFormat, Windows};

    const D: usize = 64;

    /// A sequence's rows, and its pages as a device would hold them.
    struct Twin {
        layout: CacheLayout,
        rows: [Vec<f32>; 2],
        full: Pages,
        full_ids: Vec<Option<FullPageId>>,
        coded_ids: Vec<Option<CodedPageId>>,
    }

    impl Twin {
        fn new(format: &str, tokens: usize, seed: u64) -> Self {
            let format: KvFormat = format.parse().unwrap();
            let windows = format.windows(None, None).unwrap();
            let layout = CacheLayout::new(format, 5, 1, D, windows, CodeLayout::GpuTile).unwrap();
            let mut random = SeededGaussian::new(seed);
            let mut side = || -> Vec<f32> {
                (0..tokens * D).map(|_| bf16::from_f32(random.normal() as f32).to_f32()).collect()
            };
            let rows = [side(), side()];
            let codec = layout.full().codec(2, 0);
            let mut full = Pages::new();
            for block in 0..tokens.div_ceil(PAGE_TOKENS) {
                let mut page = vec![0; codec.page_bytes()];
                let part = block * PAGE_TOKENS * D..tokens.min((block + 1) * PAGE_TOKENS) * D;
                codec.quantize_rows(0, &rows[0][part.clone()], &rows[1][part], &mut page).unwrap();
                // Ids that are not block numbers.
                full.insert(3 + 2 * block as u32, page);
            }
            let blocks = tokens.div_ceil(PAGE_TOKENS) as u32;
            let full_ids = (0..blocks).map(|b| Some(FullPageId(3 + 2 * b))).collect();
            let coded_ids = (0..blocks).map(|b| Some(CodedPageId(40 - b))).collect();
            Self { layout, rows, full, full_ids, coded_ids }
        }

        fn demotion(&self, keys: Range<usize>, values: Range<usize>) -> SequenceRows<'_> {
            SequenceRows {
                rows: 0..0,
                first_position: 0,
                full: &self.full_ids,
                coded: &self.coded_ids,
                sliding: &[],
                demote: keys,
                demote_values: values,
                view: None,
                states: None,
            }
        }

        /// One side, quantized and dequantized by the codec in one go.
        fn expected(&self, side: Side, end: usize) -> Vec<f32> {
            let codec = self.layout.coded().unwrap().codec(2, 0);
            let sink = self.layout.windows().sink();
            let rows = &self.rows[side as usize];
            let mut pages = vec![vec![0; codec.page_bytes()]; end.div_ceil(PAGE_TOKENS)];
            if let Some(groups) = codec.token_groups(side) {
                for first in (sink..end).step_by(groups.tokens()) {
                    let part = &rows[first * D..(first + groups.tokens()) * D];
                    codec
                        .quantize_group(side, first, part, |at, bytes, tile| {
                            pages[at.block][bytes].copy_from_slice(tile);
                        })
                        .unwrap();
                }
            } else {
                for position in sink..end {
                    let row = &rows[position * D..(position + 1) * D];
                    let page = &mut pages[position / PAGE_TOKENS];
                    codec.quantize_side_rows(side, position % PAGE_TOKENS, row, page).unwrap();
                }
            }
            let pages: Vec<Option<&[u8]>> = pages.iter().map(|p| Some(p.as_slice())).collect();
            let mut decoded = vec![0.0; (end - sink) * D];
            for (position, row) in (sink..end).zip(decoded.chunks_exact_mut(D)) {
                codec.dequantize_token(side, &pages, sink, position, row).unwrap();
                row.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32());
            }
            decoded
        }
    }

    /// The history does not depend on the steps in which a sequence grows.
    #[test]
    fn history_is_the_dequantized_rows() {
        let formats = [
            "int8",
            "int4-g32",
            "quarot2",
            "kivi2-g32",
            "kivi2",
            "kitty",
            "turboquant3",
            "turboquant2.5-prod",
            "turboquant-k3v4",
            "fp8",
            "oscar2-official",
            "oscar2-lloyd",
        ];
        for format in formats {
            let tokens = 700;
            let twin = Twin::new(format, tokens, 7);
            let windows: Windows = *twin.layout.windows();
            let full = twin.layout.full().codec(2, 0);
            let recoder =
                Recoder { full, coded: twin.layout.coded().unwrap().codec(2, 0), origin: windows.sink() };
            let garbage = vec![0xA5; full.page_bytes()];
            let mut decoded: Pages =
                twin.coded_ids.iter().flatten().map(|id| (id.0, garbage.clone())).collect();
            let mut before = [windows.sink(); 2];
            let mut length = 0;
            for chunk in [1, 299, 1, 1, 130, 7, 1, 200, 60] {
                length += chunk;
                let now = [Side::Key, Side::Value].map(|side| windows.side_boundary(side, length - 1));
                let s = twin.demotion(before[0]..now[0], before[1]..now[1]);
                recoder.recode(&s, &twin.full, &mut decoded).unwrap();
                before = now;
            }
            assert_eq!(length, tokens);
            for (side, end) in [(Side::Key, before[0]), (Side::Value, before[1])] {
                assert!(end > windows.sink() + 128, "{format} has history");
                let expected = twin.expected(side, end);
                let mut row = vec![0.0; D];
                for (position, expected) in (windows.sink()..end).zip(expected.chunks_exact(D)) {
                    let id = twin.coded_ids[position / PAGE_TOKENS].unwrap().0;
                    full.dequantize_row(side, &decoded[&id], position % PAGE_TOKENS, &mut row);
                    assert_eq!(row, expected, "{format}, {side:?} of {position}");
                }
                // Rows that were not demoted are untouched.
                let id = twin.coded_ids[(tokens - 1) / PAGE_TOKENS].unwrap().0;
                full.dequantize_row(side, &decoded[&id], (tokens - 1) % PAGE_TOKENS, &mut row);
                let untouched = bf16::from_bits(0xA5A5).to_f32();
                assert!(end >= tokens || row.iter().all(|&v| v == untouched), "{format}");
            }
        }
    }

    #[test]
    fn shared_pages_are_fetched_once_and_missing_ones_named() {
        let mut twin = Twin::new("kivi2-g32", 400, 3);
        let (a, b) = (twin.demotion(0..128, 0..70), twin.demotion(0..256, 0..0));
        let (full, decoded) = touched(&[a, b]).unwrap();
        assert_eq!((full, decoded), (vec![3, 5, 7, 9], vec![37, 38, 39, 40]));
        assert!(touched(&[twin.demotion(0..0, 5..5)]).unwrap().1.is_empty());
        twin.coded_ids[1] = None;
        let error = touched(&[twin.demotion(0..128, 0..0)]).unwrap_err().to_string();
        assert!(error.contains("block 1"), "{error}");
    }

    /// Two sequences of a step share their pages: neither undoes the other's rows.
    #[test]
    fn sequences_that_share_pages_add_up() {
        let twin = Twin::new("int8", 400, 5);
        let full = twin.layout.full().codec(2, 0);
        let coded = twin.layout.coded().unwrap().codec(2, 0);
        let room = || twin.coded_ids.iter().flatten().map(|id| (id.0, vec![0; full.page_bytes()])).collect();
        let mut heads = [0; 3].map(|_| HeadWork {
            recoder: Recoder { full, coded, origin: 64 },
            full: twin.full.clone(),
            decoded: room(),
        });
        // Enough rows for several threads, were there as many.
        let steps = [twin.demotion(64..160, 64..160), twin.demotion(96..112, 96..112)];
        recode_heads(&mut heads, &steps).unwrap();
        let expected: [Vec<f32>; 2] = [Side::Key, Side::Value].map(|side| twin.expected(side, 160));
        for work in &heads {
            for (side, expected) in [Side::Key, Side::Value].into_iter().zip(&expected) {
                let mut row = vec![0.0; D];
                for (position, expected) in (64..160).zip(expected.chunks_exact(D)) {
                    let id = twin.coded_ids[position / PAGE_TOKENS].unwrap().0;
                    full.dequantize_row(side, &work.decoded[&id], position % PAGE_TOKENS, &mut row);
                    assert_eq!(row, expected, "{side:?} of {position}");
                }
            }
        }
    }

    #[test]
    fn half_a_group_is_refused() {
        let twin = Twin::new("kivi2-g32", 400, 3);
        let full = twin.layout.full().codec(2, 0);
        let recoder = Recoder { full, coded: twin.layout.coded().unwrap().codec(2, 0), origin: 0 };
        let mut decoded: Pages =
            twin.coded_ids.iter().flatten().map(|id| (id.0, vec![0; full.page_bytes()])).collect();
        assert!(recoder.recode(&twin.demotion(0..40, 0..0), &twin.full, &mut decoded).is_err());
    }
}
