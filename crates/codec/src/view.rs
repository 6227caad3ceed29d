//! Views: what is left of a history after some of its rows were evicted.
//!
//! A view replaces the positions `sink..end` of a sequence by some of their rows. The rows of a
//! head are copied, in order, into pages of their own: the bytes of a row do not change, and since
//! keys carry their positions (RoPE), nothing else has to. Every query lies behind the view, so it
//! reads all rows of it.
//!
//! Attention sees a *compact* sequence: the blocks of the sink, the pages of the view, and then the
//! blocks from `end` on. [`Survivors`] says how positions move. Heads may keep different numbers
//! of rows, also none.

use crate::error::{CodecError, Result, check_len};
use crate::page::{Body, PAGE_TOKENS, RowPageCodec, Scheme, Side};
use std::ops::Range;

/// The rows of one head in a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Survivors {
    /// The view stands for the positions between the sink and this one. Both are multiples of 64.
    pub end: usize,
    /// Rows kept of them.
    pub rows: usize,
}

impl Survivors {
    /// Pages that hold the rows; the last may be partly filled.
    pub fn pages(&self) -> usize {
        self.rows.div_ceil(PAGE_TOKENS)
    }

    /// A position `p ≥ end` has the place `p − shift` in the compact sequence.
    pub fn shift(&self, sink: usize) -> usize {
        (self.end - sink).saturating_sub(self.pages() * PAGE_TOKENS)
    }

    /// Places of the compact sequence that hold no row: the rest of the view's last page.
    pub fn hole(&self, sink: usize) -> Range<usize> {
        sink + self.rows..sink + self.pages() * PAGE_TOKENS
    }
}

impl RowPageCodec {
    /// Whether rows can be copied from page to page. Codes in groups of tokens cannot: a group
    /// shares its parameters.
    pub fn copies_rows(&self) -> bool {
        [Side::Key, Side::Value].iter().all(|&side| self.token_groups(side).is_none())
    }

    /// Copies key and value of row `from.1` of a page to row `to.1` of another page of this codec,
    /// bit for bit.
    ///
    /// # Errors
    /// If a page has the wrong size, a row does not exist, or rows share parameters.
    pub fn copy_row(&self, from: (&[u8], usize), to: (&mut [u8], usize)) -> Result<()> {
        let ((source, row), (target, place)) = (from, to);
        check_len("page", source.len(), self.page_bytes())?;
        check_len("page", target.len(), self.page_bytes())?;
        if row.max(place) >= PAGE_TOKENS {
            return Err(CodecError::Tokens { tokens: row.max(place) + 1, max: PAGE_TOKENS });
        }
        for side in [Side::Key, Side::Value] {
            let codec = self.side(side);
            let (codes, params) = (self.codes_range(side), self.params_range(side));
            let mut copy = |start: usize, bytes: usize, from: usize, to: usize| {
                let from = start + from * bytes;
                target[start + to * bytes..][..bytes].copy_from_slice(&source[from..from + bytes]);
            };
            match (&codec.body, codec.spec.scheme) {
                (Body::Nothing, _) => continue,
                (Body::TokenGroups(groups), _) => return Err(CodecError::GroupSpansPages(groups.tokens())),
                (Body::Records(records), _) => copy(codes.start, records.row_bytes(), row, place),
                (Body::Mapped, Scheme::F32 | Scheme::Bf16) => {
                    let bytes = codec.code_bytes / (PAGE_TOKENS * self.head_dim());
                    for channel in 0..self.head_dim() {
                        let at = |token| codec.map.element_index(token, channel);
                        copy(codes.start, bytes, at(row), at(place));
                    }
                }
                (Body::Mapped, _) => {
                    let bytes = codec.param_bytes / (PAGE_TOKENS * codec.groups * 2);
                    for group in 0..codec.groups {
                        for which in 0..2 {
                            let at = |token| codec.map.param_index(codec.groups, token, group, which);
                            copy(params.start, bytes, at(row), at(place));
                        }
                    }
                    codec.map.copy_row(&source[codes.clone()], row, &mut target[codes], place);
                }
            }
        }
        Ok(())
    }
}
