//! Which codes a kernel may read before the kernels of its own layer are done.
//!
//! Decode attention starts to fetch codes while the kernels before it still run. That is safe only
//! for codes that were complete before the step's first layer. `SequenceInfo::old_codes` tells the
//! kernel how far they reach.

use super::layout::SequenceInfo;
use oscar_backend::SequenceRows;
use oscar_codec::PAGE_TOKENS;
use std::ops::Range;

/// Whether the step quantizes something, and only rows that earlier steps wrote.
pub fn quantizes_only_earlier_rows(sequences: &[SequenceRows<'_>]) -> bool {
    let earlier = |s: &SequenceRows<'_>| s.demote.is_empty() || s.demote.end <= s.first_position;
    sequences.iter().any(|s| !s.demote.is_empty()) && sequences.iter().all(earlier)
}

/// End of the codes, among those that these `rows` of a sequence read, that exist before the step's
/// first layer. It equals `boundary` only if the rows read nothing else that this step writes
/// except their own tokens.
pub fn old_codes(s: &SequenceRows<'_>, rows: usize, boundary: usize, quantized_ahead: bool) -> usize {
    if rows < s.rows.len() {
        // A row that attends alone reads the rows before it, which this step writes.
        0
    } else if quantized_ahead || s.demote.is_empty() {
        boundary
    } else {
        boundary.min(s.demote.start)
    }
}

/// Sequences may share a coded page. If one of them quantizes a tile of it layer by layer, none may
/// read the page early. Shared pages hold a common beginning, so they have the same index in every
/// table. `entries` holds the rows of each entry of `infos` and the index of its sequence.
pub fn delay_shared_codes(
    infos: &mut [SequenceInfo],
    entries: &[(Range<usize>, usize)],
    sequences: &[SequenceRows<'_>],
) {
    for writer in sequences.iter().filter(|s| !s.demote.is_empty()) {
        for block in writer.demote.start / PAGE_TOKENS..writer.demote.end.div_ceil(PAGE_TOKENS) {
            let page = writer.coded.get(block).copied().flatten();
            for ((_, index), info) in entries.iter().zip(&mut *infos) {
                if page.is_some() && sequences[*index].coded.get(block).copied().flatten() == page {
                    info.old_codes = info.old_codes.min((block * PAGE_TOKENS) as u32);
                }
            }
        }
    }
}
