//! Demotion: BF16 rows become codes, a 16-token tile at a time or, if groups run along tokens or
//! the sides have different windows, side by side.
//!
//! Invariant: the bytes are those that the codec gives for the BF16 rows, bit for bit, on every
//! path, so a token has the same codes however it reached the cache.

use oscar_codec::page::Scheme;
use oscar_codec::{CodeLayout, CodecError, PAGE_TOKENS, RowPageCodec, Side, TILE_TOKENS};

use crate::cpu::Variant;
use std::ops::Range;

/// Reads the 16 rows of `tile` of a full page and writes their codes to the same tile of a coded
/// page. Other tiles are untouched.
///
/// # Errors
/// When the tile does not exist, or a page or head size is not that of its codec.
pub fn demote_tile(
    variant: Variant,
    full: &RowPageCodec,
    full_page: &[u8],
    coded: &RowPageCodec,
    coded_page: &mut [u8],
    tile: usize,
) -> Result<(), CodecError> {
    let d = full.head_dim();
    let max = PAGE_TOKENS / TILE_TOKENS;
    if tile >= max {
        return Err(CodecError::Tile { tile, max });
    }
    let check = |what, got, expected| {
        if got == expected { Ok(()) } else { Err(CodecError::Length { what, got, expected }) }
    };
    check("full page", full_page.len(), full.page_bytes())?;
    check("coded page", coded_page.len(), coded.page_bytes())?;
    check("head size of the coded codec", coded.head_dim(), d)?;
    if !coded.keeps_history() {
        return Ok(());
    }
    if is_copy(full, coded) {
        for side in [Side::Key, Side::Value] {
            // Both layouts of unquantized pages keep a tile's rows together.
            let bytes = full.codes_range(side).len() / max;
            let start = full.codes_range(side).start + tile * bytes;
            coded_page[start..start + bytes].copy_from_slice(&full_page[start..start + bytes]);
        }
        return Ok(());
    }
    #[cfg(target_arch = "x86_64")]
    if has_fast_path(variant, full, coded) {
        // SAFETY: the variant is available, which `has_fast_path` asked.
        let done = unsafe { super::avx512::demote::demote(full, full_page, coded, coded_page, tile) };
        if done {
            return Ok(());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = variant;
    let (mut keys, mut values) = (vec![0.0; TILE_TOKENS * d], vec![0.0; TILE_TOKENS * d]);
    full.dequantize_rows(tile * TILE_TOKENS, full_page, &mut keys, &mut values)?;
    coded.quantize_tile(tile, &keys, &values, coded_page)
}

/// Whether pages keep their bytes when they are demoted (layers that stay in BF16).
fn is_copy(full: &RowPageCodec, coded: &RowPageCodec) -> bool {
    full == coded && !full.spec(Side::Key).is_coded() && !full.spec(Side::Value).is_coded()
}

/// One head's codecs for [`demote_side`].
#[derive(Clone, Copy)]
pub struct DemotionCodecs<'a> {
    pub full: &'a RowPageCodec,
    pub coded: &'a RowPageCodec,
}

/// Quantizes one side of `positions`: whole groups where the side groups along tokens, single rows
/// otherwise.
/// `full_page` gives the BF16 page of a block, `coded_page` the one to write to.
///
/// # Errors
/// When a page or head size is not that of its codec, or the positions are no whole groups.
pub fn demote_side<'a>(
    codecs: DemotionCodecs<'_>,
    side: Side,
    positions: Range<usize>,
    full_page: impl Fn(usize) -> &'a [u8],
    mut coded_page: impl FnMut(usize, &mut dyn FnMut(&mut [u8])),
) -> Result<(), CodecError> {
    let DemotionCodecs { full, coded } = codecs;
    let d = full.head_dim();
    let read = |positions: Range<usize>, rows: &mut Vec<f32>| {
        rows.resize(positions.len() * d, 0.0);
        for (position, row) in positions.zip(rows.chunks_exact_mut(d)) {
            full.dequantize_row(side, full_page(position / PAGE_TOKENS), position % PAGE_TOKENS, row);
        }
    };
    let mut rows = Vec::new();
    if let Some(groups) = coded.token_groups(side) {
        for first in positions.clone().step_by(groups.tokens()) {
            read(first..positions.end.min(first + groups.tokens()), &mut rows);
            coded.quantize_group(side, first, &rows, |at, range, bytes| {
                coded_page(at.block, &mut |page| page[range.clone()].copy_from_slice(bytes));
            })?;
        }
        return Ok(());
    }
    let mut first = positions.start;
    while first < positions.end {
        let (block, token) = (first / PAGE_TOKENS, first % PAGE_TOKENS);
        let end = positions.end.min((block + 1) * PAGE_TOKENS);
        read(first..end, &mut rows);
        let mut outcome = Ok(());
        coded_page(block, &mut |page| outcome = coded.quantize_side_rows(side, token, &rows, page));
        outcome?;
        first = end;
    }
    Ok(())
}

/// Whether [`demote_tile`] has a kernel for these codecs.
pub(super) fn has_fast_path(variant: Variant, full: &RowPageCodec, coded: &RowPageCodec) -> bool {
    let side = |side: Side| {
        full.spec(side).scheme == Scheme::Bf16
            && coded.spec(side).scheme == Scheme::Affine
            && coded.groups(side) == 1
    };
    cfg!(target_arch = "x86_64")
        && matches!(variant, Variant::Avx512 | Variant::Amx)
        && variant.is_available()
        && full.layout() == CodeLayout::CpuTile
        && coded.layout() == CodeLayout::CpuTile
        && side(Side::Key)
        && side(Side::Value)
}
