//! Sides whose groups run along tokens, and therefore across pages.
//!
//! Groups begin at the sink (`origin`) and follow one another. The tiles of a group lie in the
//! pages of its tokens.

use crate::channel_groups::{ChannelGroups, GroupHeader};
use crate::error::{CodecError, Result, check_len};
use crate::page::{Body, PAGE_TOKENS, RowPageCodec, Side, TILE_TOKENS};
use crate::record::RecordCodec;
use std::ops::Range;

/// One side of one tile of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TilePlace {
    pub block: usize,
    pub tile: usize,
}

impl RowPageCodec {
    /// The groups of a side that is quantized along tokens.
    pub fn token_groups(&self, side: Side) -> Option<&ChannelGroups> {
        match &self.side(side).body {
            Body::TokenGroups(groups) => Some(groups),
            _ => None,
        }
    }

    /// The rows of a side that stores records.
    pub fn records(&self, side: Side) -> Option<&RecordCodec> {
        match &self.side(side).body {
            Body::Records(records) => Some(records),
            _ => None,
        }
    }

    /// Whether the side stores elements or codes in the order of the layout.
    pub fn is_mapped(&self, side: Side) -> bool {
        self.side(side).body == Body::Mapped
    }

    /// Whether codes of a page depend on tokens of other pages, if groups begin at `origin`.
    pub fn spans_pages(&self, origin: usize) -> bool {
        self.token_groups(Side::Key).is_some_and(|groups| {
            !PAGE_TOKENS.is_multiple_of(groups.tokens()) || !origin.is_multiple_of(groups.tokens())
        })
    }

    /// Bytes of a side's tile in a page; only for sides that are quantized along tokens.
    pub fn tile_range(&self, side: Side, groups: &ChannelGroups, tile: usize) -> Range<usize> {
        let start = self.codes_range(side).start + tile * groups.tile_bytes();
        start..start + groups.tile_bytes()
    }

    /// The tiles of the group that begins at position `first`, in order.
    pub fn group_tiles(groups: &ChannelGroups, first: usize) -> impl Iterator<Item = TilePlace> + use<> {
        (0..groups.tiles()).map(move |i| {
            let position = first + i * TILE_TOKENS;
            TilePlace { block: position / PAGE_TOKENS, tile: position % PAGE_TOKENS / TILE_TOKENS }
        })
    }

    /// Quantizes the rows of the group that begins at position `first` and passes each of its tiles
    /// to `store`.
    pub fn quantize_group(
        &self,
        side: Side,
        first: usize,
        rows: &[f32],
        mut store: impl FnMut(TilePlace, Range<usize>, &[u8]),
    ) -> Result<()> {
        let Some(groups) = self.token_groups(side) else {
            return Err(CodecError::Windows("this side is coded row by row, not by groups of tokens".into()));
        };
        let mut tiles = vec![0; groups.tiles() * groups.tile_bytes()];
        groups.quantize(rows, &mut tiles)?;
        for (place, bytes) in Self::group_tiles(groups, first).zip(tiles.chunks_exact(groups.tile_bytes())) {
            store(place, self.tile_range(side, groups, place.tile), bytes);
        }
        Ok(())
    }

    /// The tiles of the group around `position`, in order (`None` for a tile whose page is absent),
    /// and the position where the group begins.
    pub fn tiles_of_group<'a>(
        &self,
        side: Side,
        pages: &'a [Option<&'a [u8]>],
        origin: usize,
        position: usize,
    ) -> Option<(usize, impl Iterator<Item = Option<&'a [u8]>>)> {
        let groups = self.token_groups(side)?;
        let first = origin + position.checked_sub(origin)? / groups.tokens() * groups.tokens();
        let tiles = Self::group_tiles(groups, first).map(move |at| {
            Some(&pages.get(at.block).copied().flatten()?[self.tile_range(side, groups, at.tile)])
        });
        Some((first, tiles))
    }

    /// The parameters of the group around `position`, and where it begins; `None` if one of its
    /// pages is absent.
    pub fn group_header(
        &self,
        side: Side,
        pages: &[Option<&[u8]>],
        origin: usize,
        position: usize,
    ) -> Option<(usize, GroupHeader)> {
        let (first, tiles) = self.tiles_of_group(side, pages, origin, position)?;
        let tiles: Option<Vec<&[u8]>> = tiles.collect();
        Some((first, self.token_groups(side)?.header(tiles?.into_iter())))
    }

    /// Dequantizes one side of the token at `position`, for every kind of side. `pages` are the
    /// quantized pages of the sequence; groups begin at `origin`.
    ///
    /// # Errors
    /// If a page that the token needs is absent or `row` has the wrong size.
    pub fn dequantize_token(
        &self,
        side: Side,
        pages: &[Option<&[u8]>],
        origin: usize,
        position: usize,
        row: &mut [f32],
    ) -> Result<()> {
        check_len("row", row.len(), self.head_dim())?;
        let block = position / PAGE_TOKENS;
        let absent = CodecError::Index { what: "page of block", index: block, count: pages.len() };
        let page = pages.get(block).copied().flatten().ok_or(absent.clone())?;
        let token = position % PAGE_TOKENS;
        let Some(groups) = self.token_groups(side) else {
            self.dequantize_row(side, page, token, row);
            return Ok(());
        };
        let (_, header) = self.group_header(side, pages, origin, position).ok_or(absent)?;
        let tile = &page[self.tile_range(side, groups, token / TILE_TOKENS)];
        groups.dequantize_row(&header, tile, token % TILE_TOKENS, row);
        Ok(())
    }
}
