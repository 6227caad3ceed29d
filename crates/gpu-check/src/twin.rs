//! The scalar twin of one sequence and KV head.

use crate::Report;
use crate::inspected::Inspected;
use anyhow::{Context, Result};
use oscar_backend::{CacheHead, SequenceRows, View};
use oscar_codec::{CacheLayout, PAGE_TOKENS, RowPageCodec, Side, TILE_TOKENS};
use oscar_kernels_cuda::Storage;
use std::collections::BTreeMap;
use std::ops::Range;

/// The rows of one sequence and KV head: as stored in BF16, as codes, and dequantized.
#[derive(Default, Clone)]
pub struct HeadTwin {
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
    pub(crate) coded_pages: BTreeMap<usize, Vec<u8>>,
    pub coded_keys: Vec<f32>,
    pub coded_values: Vec<f32>,
}

impl HeadTwin {
    /// Drops everything from a position on.
    pub fn truncate(&mut self, tokens: usize, head_dim: usize) {
        for rows in [&mut self.keys, &mut self.values, &mut self.coded_keys, &mut self.coded_values] {
            rows.truncate(tokens * head_dim);
        }
    }

    /// The rows that a sequence with this view reads, as the compact sequence has them.
    pub fn seen(&self, view: &View, head: usize, layout: &CacheLayout) -> Self {
        let (d, sink, kept) = (layout.head_dim(), layout.windows().sink(), view.survivors(head));
        let compact = |rows: &Vec<f32>| -> Vec<f32> {
            let mut seen = rows[..sink * d].to_vec();
            view.kept(head).iter().for_each(|&p| seen.extend_from_slice(&rows[p as usize * d..][..d]));
            seen.resize((sink + kept.pages() * PAGE_TOKENS) * d, 0.0);
            seen.extend_from_slice(&rows[view.end() * d..]);
            seen
        };
        let [keys, values] = [&self.keys, &self.values].map(compact);
        let [coded_keys, coded_values] = [&self.coded_keys, &self.coded_values].map(compact);
        Self { keys, values, coded_keys, coded_values, coded_pages: BTreeMap::new() }
    }

    /// A row as its codes dequantize it; zeros in a head without history.
    pub fn coded_row(&self, side: Side, position: usize, codec: &RowPageCodec) -> Vec<f32> {
        let rows = if side == Side::Key { &self.coded_keys } else { &self.coded_values };
        let d = codec.head_dim();
        if codec.keeps_history() { rows[position * d..][..d].to_vec() } else { vec![0.0; d] }
    }

    /// Counts the codes and parameters in which row `row` of a page differs from those of a position.
    pub fn differing_row(&self, codec: &RowPageCodec, position: usize, page: &[u8], row: usize) -> usize {
        let Some(expected) = self.coded_pages.get(&(position / PAGE_TOKENS)) else { return usize::MAX };
        let token = position % PAGE_TOKENS;
        let differs = |side| {
            let params =
                codec.group_params(side, expected, token, 0) != codec.group_params(side, page, row, 0);
            let code = |&c: &usize| codec.code(side, expected, token, c) != codec.code(side, page, row, c);
            usize::from(params) + (0..codec.head_dim()).filter(code).count()
        };
        differs(Side::Key) + differs(Side::Value)
    }

    /// Quantizes positions of keys and values as the codec does, and dequantizes them.
    pub fn demote(
        &mut self,
        layout: &CacheLayout,
        storage: Storage,
        head: CacheHead,
        positions: [&Range<usize>; 2],
    ) -> Result<()> {
        let Some(table) = layout.coded() else { return Ok(()) };
        let (codec, d, origin) =
            (table.codec(head.layer, head.kv_head), layout.head_dim(), layout.windows().sink());
        self.coded_keys.resize(self.keys.len(), 0.0);
        self.coded_values.resize(self.values.len(), 0.0);
        for (side, positions) in [Side::Key, Side::Value].into_iter().zip(positions) {
            let (rows, decoded) = match side {
                Side::Key => (&self.keys, &mut self.coded_keys),
                Side::Value => (&self.values, &mut self.coded_values),
            };
            let pages = &mut self.coded_pages;
            for block in positions.start / PAGE_TOKENS..positions.end.div_ceil(PAGE_TOKENS) {
                pages.entry(block).or_insert_with(|| vec![0; codec.page_bytes()]);
            }
            let page = |block: usize| format!("page of block {block}");
            if let Some(groups) = codec.token_groups(side) {
                for first in positions.clone().step_by(groups.tokens()) {
                    let rows = &rows[first * d..(first + groups.tokens()) * d];
                    codec.quantize_group(side, first, rows, |at, bytes, tile| {
                        if let Some(page) = pages.get_mut(&at.block) {
                            page[bytes].copy_from_slice(tile);
                        }
                    })?;
                }
            } else {
                for position in positions.clone() {
                    let block = position / PAGE_TOKENS;
                    let into = pages.get_mut(&block).with_context(|| page(block))?;
                    let row = &rows[position * d..(position + 1) * d];
                    codec.quantize_side_rows(side, position % PAGE_TOKENS, row, into)?;
                }
            }
            let last = pages.keys().next_back().map_or(0, |block| block + 1);
            let held: Vec<Option<&[u8]>> = (0..last).map(|b| pages.get(&b).map(Vec::as_slice)).collect();
            for position in positions.clone() {
                let row = &mut decoded[position * d..(position + 1) * d];
                codec.dequantize_token(side, &held, origin, position, row)?;
                if storage == Storage::Dequantized {
                    row.iter_mut().for_each(|v| *v = half::bf16::from_f32(*v).to_f32());
                }
            }
        }
        Ok(())
    }

    /// Compares the rows that this step demoted with the device's pages.
    pub fn compare_history(
        &self,
        layout: &CacheLayout,
        pool: &impl Inspected,
        head: CacheHead,
        s: &SequenceRows<'_>,
        name: &str,
        what: &str,
        report: &mut Report,
    ) -> Result<()> {
        let Some(table) = layout.coded() else { return Ok(()) };
        for (side, positions) in [(Side::Key, &s.demote), (Side::Value, &s.demote_values)] {
            for position in positions.clone().step_by(TILE_TOKENS) {
                let block = position / PAGE_TOKENS;
                let id = s.coded.get(block).copied().flatten().context("a coded page")?;
                let Some(page) = pool.history_page(head, id.0)? else { continue };
                // A sliding window may demote only a part of a tile.
                let end = positions.end.min(position + TILE_TOKENS).min((block + 1) * PAGE_TOKENS);
                let differing = match pool.storage() {
                    Storage::Dequantized => {
                        let full = layout.full().codec(head.layer, head.kv_head);
                        (position..end).filter(|&p| !self.holds(full, side, p, &page)).count()
                    }
                    _ => self.differing(table.codec(head.layer, head.kv_head), side, position..end, &page),
                };
                report.case(name, differing as f64, 0.0, || {
                    format!("{what}, {side:?} of positions {position}..{end}, {head:?}")
                });
            }
        }
        Ok(())
    }

    /// Counts the codes and parameters in which a page differs from the codec's.
    fn differing(&self, codec: &RowPageCodec, side: Side, positions: Range<usize>, page: &[u8]) -> usize {
        let Some(expected) = self.coded_pages.get(&(positions.start / PAGE_TOKENS)) else {
            return usize::MAX;
        };
        if !codec.keeps_history() {
            return page.len();
        }
        let mut count = 0;
        for token in positions.map(|p| p % PAGE_TOKENS) {
            let params = |page| codec.group_params(side, page, token, 0);
            count += usize::from(params(expected) != params(page));
            let code = |page, c| codec.code(side, page, token, c);
            count += (0..codec.head_dim()).filter(|&c| code(expected, c) != code(page, c)).count();
        }
        count
    }

    /// Whether a page of dequantized history holds the dequantized row of a position.
    fn holds(&self, full: &RowPageCodec, side: Side, position: usize, page: &[u8]) -> bool {
        let mut row = vec![0.0; full.head_dim()];
        full.dequantize_row(side, page, position % PAGE_TOKENS, &mut row);
        let expected = if side == Side::Key { &self.coded_keys } else { &self.coded_values };
        let expected = &expected[position * full.head_dim()..][..full.head_dim()];
        row.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits())
    }
}
