//! The pages that a step requires. Kernels trust the page tables, so a step that lacks a page is
//! refused.

use crate::error::{CudaError, Result};
use crate::storage::Storage;
use oscar_backend::SequenceRows;
use oscar_codec::{PAGE_TOKENS, Side, Windows};
use std::ops::Range;

/// Refuses a sequence that lacks a page which its rows write or read, by the rule of [`Windows`].
pub fn check_pages(s: &SequenceRows<'_>, windows: &Windows, storage: Storage) -> Result<()> {
    let refuse = |block: usize, kind: &str| {
        let detail = format!("block {block} has no {kind} page, position {}", s.first_position);
        Err(CudaError::Shape { what: "a sequence of the step", detail })
    };
    let end = s.first_position + s.rows.len();
    if s.view.is_some_and(|view| storage != Storage::Codes || view.end() > s.first_position) {
        let detail = format!("a view before position {} of a cache kept as {storage:?}", s.first_position);
        return Err(CudaError::Shape { what: "a sequence of the step", detail });
    }
    let sink = windows.sink().min(end);
    let boundaries = |t| [Side::Key, Side::Value].map(|side| windows.side_boundary(side, t));
    let coded_until = if storage == Storage::Codes { s.coded_until() } else { 0 };
    let (first, last) = match storage {
        Storage::Bf16 => (sink, sink),
        Storage::Codes | Storage::Dequantized => {
            let ([key, value], [last_key, last_value]) =
                (boundaries(s.first_position), boundaries(end.saturating_sub(1)));
            (key.min(value).max(coded_until), last_key.max(last_value).max(coded_until))
        }
    };
    // In BF16: the sink, the recent window of the first row, and the new rows.
    for positions in [0..sink, first.min(s.first_position)..end] {
        if let Some(block) = blocks(positions).find(|&b| s.full.get(b).copied().flatten().is_none()) {
            return refuse(block, "full");
        }
    }
    // As codes: the history of the last row.
    let first = s.view.map_or(sink, |view| view.end().max(sink));
    if let Some(block) =
        blocks(first..last.min(end).max(first)).find(|&b| s.coded.get(b).copied().flatten().is_none())
    {
        return refuse(block, "coded");
    }
    Ok(())
}

/// Refuses a sequence that lacks a page which its rows write or read in layers with a sliding window.
pub fn check_sliding_pages(s: &SequenceRows<'_>, window: usize) -> Result<()> {
    let end = s.first_position + s.rows.len();
    let first = (s.first_position + 1).saturating_sub(window);
    match blocks(first..end).find(|&b| s.sliding.get(b).copied().flatten().is_none()) {
        Some(block) => {
            let detail = format!("block {block} has no sliding page, position {}", s.first_position);
            Err(CudaError::Shape { what: "a sequence of the step", detail })
        }
        None => Ok(()),
    }
}

fn blocks(positions: Range<usize>) -> Range<usize> {
    match positions.is_empty() {
        true => 0..0,
        false => positions.start / PAGE_TOKENS..positions.end.div_ceil(PAGE_TOKENS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_codec::{CodedPageId, FullPageId, SlidingPageId};

    /// A window of 100: the query at 270 sees 171 and later.
    #[test]
    fn a_missing_sliding_page_is_named() {
        let sliding: Vec<_> = (0..5).map(|b| (b > 1).then_some(SlidingPageId(b))).collect();
        let rows = SequenceRows {
            rows: 0..2,
            first_position: 270,
            full: &[],
            coded: &[],
            sliding: &sliding,
            demote: 0..0,
            demote_values: 0..0,
            view: None,
            states: None,
        };
        check_sliding_pages(&rows, 100).unwrap();
        let missing = |window, rows: SequenceRows<'_>| {
            check_sliding_pages(&rows, window).unwrap_err().to_string().contains("has no sliding page")
        };
        assert!(missing(144, rows.clone()), "position 127 is in block 1");
        assert!(missing(100, SequenceRows { rows: 0..60, ..rows.clone() }), "block 5 is not there");
        assert!(missing(1, SequenceRows { sliding: &[], ..rows }));
    }

    /// Sink 64, recent 64: the query at 271 reads 64..208 as codes, the one at 270 likewise.
    #[test]
    fn a_missing_page_is_named() {
        let windows = Windows::new(64, 64).unwrap();
        let full: Vec<_> = (0..5).map(|b| (b != 1 && b != 2).then_some(FullPageId(b))).collect();
        let coded: Vec<_> = (0..4).map(|b| (b > 0).then_some(CodedPageId(b))).collect();
        let rows = SequenceRows {
            rows: 0..2,
            first_position: 270,
            full: &full,
            coded: &coded,
            sliding: &[],
            demote: 0..0,
            demote_values: 0..0,
            view: None,
            states: None,
        };
        check_pages(&rows, &windows, Storage::Codes).unwrap();
        let error =
            |rows: SequenceRows<'_>, storage| check_pages(&rows, &windows, storage).unwrap_err().to_string();
        assert!(error(rows.clone(), Storage::Bf16).contains("block 1 has no full page"));
        for missing in [0, 3, 4] {
            let mut full = full.clone();
            full[missing] = None;
            let error = error(SequenceRows { full: &full, ..rows.clone() }, Storage::Dequantized);
            assert!(error.contains(&format!("block {missing} has no full page")), "{error}");
        }
        for missing in [1, 2, 3] {
            let mut coded = coded.clone();
            coded[missing] = None;
            let error = error(SequenceRows { coded: &coded, ..rows.clone() }, Storage::Codes);
            assert!(error.contains(&format!("block {missing} has no")), "{error}");
        }
    }
}
