//! Recoded history and compared predictions, for calibration.

use super::launches::DivergenceParams;
use super::{CudaBackend, CudaRows, CudaStep, Index, grow};
use crate::attention::demote::{RecodeArgs, RecodedHead, RecodedPage};
use crate::device::LaunchShape;
use crate::error::{CudaError, Result};
use crate::pages::CudaPages;
use crate::sources::{DEMOTE, DIVERGENCE};
use crate::storage::Storage;
use oscar_backend::{Calibrates, Divergence, Result as BackendResult};
use oscar_codec::clip::order_index;
use oscar_codec::format::default_clip;
use oscar_codec::{FullPageId, PAGE_TOKENS, Side, TILE_TOKENS};
use std::ops::Range;

/// Threads of a block that compares two rows; `divergence.cu` has the same number.
const DIVERGENCE_THREADS: u32 = 512;

impl Calibrates for CudaBackend {
    fn recode(
        &self,
        layer: usize,
        positions: Range<usize>,
        from: &[Option<FullPageId>],
        to: &[Option<FullPageId>],
        widths: &[(u32, u32)],
        pool: &mut CudaPages,
    ) -> BackendResult<()> {
        let refuse = |detail: String| CudaError::Shape { what: "history to recode", detail };
        let (kv_heads, d) = (pool.layout().kv_heads(), pool.layout().head_dim());
        let known = |bits: u32| matches!(bits, 0..=4 | 8);
        if pool.storage() != Storage::Codes
            || layer >= pool.layout().layers()
            || widths.len() != kv_heads
            || !widths.iter().all(|&(key, value)| known(key) && known(value))
        {
            let detail = format!(
                "layer {layer}, widths {widths:?} of {kv_heads} heads; the GPU knows 0 to 4 bits: leave wider codes \
                 out of --widths, or use --device cpu"
            );
            return Err(refuse(detail).into());
        }
        let held = |pages: &[Option<FullPageId>], block: usize| {
            let id = pages.get(block).copied().flatten().map(|id| id.0);
            id.ok_or_else(|| refuse(format!("block {block} has no full page")))
        };
        let blocks = positions.start / PAGE_TOKENS..positions.end.div_ceil(PAGE_TOKENS);
        let pages = blocks
            .map(|block| {
                let start = (block * PAGE_TOKENS).max(positions.start) - block * PAGE_TOKENS;
                let end = ((block + 1) * PAGE_TOKENS).min(positions.end) - block * PAGE_TOKENS;
                let (from, to) = (held(from, block)?, held(to, block)?);
                Ok(RecodedPage { from, to, first: start as u32, end: end as u32 })
            })
            .collect::<Result<Vec<_>>>()?;
        if pages.is_empty() {
            return Ok(());
        }
        let clip = |side, bits| order_index(default_clip(side, bits), d).map_or(u32::MAX, |i| i as u32);
        let heads: Vec<RecodedHead> = widths
            .iter()
            .map(|&(key_bits, value_bits)| RecodedHead {
                key_bits,
                value_bits,
                key_clip: clip(Side::Key, key_bits),
                value_clip: clip(Side::Value, value_bits),
            })
            .collect();
        let last = pages.iter().map(|page| page.from.max(page.to)).max().unwrap_or(0);
        pool.ensure(last as usize + 1, 0, 0)?;
        let mut words: Vec<u32> = bytemuck::cast_slice(&heads).to_vec();
        words.extend_from_slice(bytemuck::cast_slice(&pages));
        let function = self.kernels.function(&DEMOTE, &vec![("HEAD_DIM", d)], c"recode", 0)?;
        let words = self.send_indices(&mut self.state(), Index::Recoded, &words)?;
        let args = RecodeArgs {
            heads: pool.layer(layer),
            roundings: pool.layer_roundings(layer),
            widths: words.cast(),
            pages: words.add(heads.len() * size_of::<RecodedHead>() / 4).cast(),
        };
        let tiles = (pages.len() * PAGE_TOKENS / TILE_TOKENS) as u32;
        let shape = LaunchShape {
            grid: (tiles, kv_heads as u32, 2),
            block: 32 * TILE_TOKENS as u32,
            shared: 0,
            overlap: false,
        };
        // SAFETY: all pages have memory (ensured); heads and pages of the tables are those of the
        // grid; the layer exists.
        Ok(unsafe { self.device.launch(function, shape, args) }?)
    }

    fn divergences(
        &self,
        step: &mut CudaStep<'_>,
        exact: &CudaRows,
        other: &CudaRows,
        out: &mut Vec<Divergence>,
    ) -> BackendResult<()> {
        let (width, count, rows) = (exact.width(), exact.count(), other.count());
        if other.width() != width || count == 0 || !rows.is_multiple_of(count) {
            let detail = format!("{rows} rows of {} beside {count} of {width}", other.width());
            return Err(CudaError::Shape { what: "rows to compare", detail }.into());
        }
        if rows == 0 {
            return Ok(());
        }
        let function = self.kernels.function(&DIVERGENCE, &Vec::new(), c"divergence", 0)?;
        let state = step.state();
        let found = grow(&self.device, &mut state.compared, 8 * rows, "divergences")?.0.slice::<f32>();
        let found = found.part(0..2 * rows)?;
        let params = DivergenceParams {
            exact: exact.held_values("exact logits")?.ptr(),
            other: other.held_values("logits")?.ptr(),
            out: found.ptr(),
            width: width as u32,
            exact_rows: count as u32,
        };
        let shape = LaunchShape::new(rows, DIVERGENCE_THREADS).overlapping();
        // SAFETY: both have rows of `width`, `out` has two values for each row, and `exact` has the
        // rows that the kernel reads.
        unsafe { self.device.launch(function, shape, params) }?;
        let mut values = Vec::with_capacity(2 * rows);
        state.transfers.download(found, &mut values)?;
        let pair = |pair: &[f32]| Divergence { kl: f64::from(pair[0]), agrees: pair[1] > 0.5 };
        out.extend(values.chunks_exact(2).map(pair));
        Ok(())
    }
}
