//! Demotion: 16 BF16 rows become a tile of codes.
//!
//! Invariant: the bytes are those of `coded.encode_tile` of the decoded rows, bit for bit, whichever path runs, so
//! a token has the same codes however it reached the cache.

use oscar_codec::page::Scheme;
use oscar_codec::{CodeLayout, CodecError, PAGE_TOKENS, PageCodec, RowPageCodec, Side, TILE_TOKENS};

use crate::cpu::Variant;

/// Reads the 16 rows of `tile` of a full page and writes their codes to the same tile of a coded page. Other
/// tiles are untouched.
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
    #[cfg(target_arch = "x86_64")]
    if has_fast_path(variant, full, coded) {
        // SAFETY: the variant is available, which `has_fast_path` asked.
        let done = unsafe { super::demote512::demote(full, full_page, coded, coded_page, tile) };
        if done {
            return Ok(());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = variant;
    let (mut keys, mut values) = (vec![0.0; TILE_TOKENS * d], vec![0.0; TILE_TOKENS * d]);
    full.decode_rows(tile * TILE_TOKENS, full_page, &mut keys, &mut values)?;
    coded.encode_tile(tile, &keys, &values, coded_page)
}

/// Which path [`demote_tile`] takes, for the start banner.
pub fn demote_kernel_name(variant: Variant, full: &RowPageCodec, coded: &RowPageCodec) -> &'static str {
    if has_fast_path(variant, full, coded) { "avx512 demote" } else { "generic demote" }
}

fn has_fast_path(variant: Variant, full: &RowPageCodec, coded: &RowPageCodec) -> bool {
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
