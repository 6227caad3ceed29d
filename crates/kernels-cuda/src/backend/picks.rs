//! The most likely tokens of rows of logits, found on the device.

use super::launches::{PickParams, PickedRow};
use super::rows::{CudaRows, grow};
use super::{CudaBackend, Index, State};
use crate::error::{CudaError, Result};
use crate::memory::DevicePtr;
use oscar_backend::{Candidate, MOST_CANDIDATES, Pick, candidate_of};

/// Elements of a row that one block of the greedy search takes.
const SLICE: usize = 4096;
/// Most blocks for a row.
const MOST_PARTS: usize = 64;

/// The order of results: greedy ones first, a key each, then the lists, [`MOST_CANDIDATES`] keys
/// each.
#[derive(Debug, Default, PartialEq)]
struct Order {
    /// One for each block of the kernels.
    rows: Vec<PickedRow>,
    greedy: usize,
    lists: usize,
    masks: u32,
    /// First key and number of keys of each pick, in the order asked.
    places: Vec<(usize, usize)>,
}

impl Order {
    fn of(picks: &[(usize, Pick)], row_count: usize) -> Result<Self> {
        let refuse = |detail: String| Err(CudaError::Shape { what: "a pick", detail });
        let mut order = Self::default();
        let (mut greedy, mut lists) = (Vec::new(), Vec::new());
        for &(row, what) in picks {
            if row >= row_count {
                return refuse(format!("row {row} of {row_count}"));
            }
            order.masks += u32::from(what.mask().is_some());
            let mask = if what.mask().is_some() { order.masks } else { 0 };
            let picked = |count: usize| PickedRow { row: row as u32, count: count as u32, mask };
            match what.count() {
                None => greedy.push(picked(1)),
                Some(count) if (1..=MOST_CANDIDATES).contains(&count) => lists.push(picked(count)),
                Some(count) => {
                    return refuse(format!("{count} candidates: 1 to {MOST_CANDIDATES} can be listed"));
                }
            }
        }
        (order.greedy, order.lists) = (greedy.len(), lists.len());
        let (mut next_greedy, mut next_list) = (0, order.greedy);
        for (_, what) in picks {
            match what.count() {
                None => {
                    order.places.push((next_greedy, 1));
                    next_greedy += 1;
                }
                Some(count) => {
                    order.places.push((next_list, count));
                    next_list += MOST_CANDIDATES;
                }
            }
        }
        order.rows = greedy;
        order.rows.append(&mut lists);
        Ok(order)
    }

    /// Keys that come back.
    fn keys(&self) -> usize {
        self.greedy + self.lists * MOST_CANDIDATES
    }

    /// The candidates of each pick.
    fn deal(&self, keys: &[u64], out: &mut Vec<Vec<Candidate>>) {
        for &(first, count) in &self.places {
            let list = keys[first..first + count].iter().take_while(|&&key| key != 0);
            out.push(list.map(|&key| candidate_of(key)).collect());
        }
    }
}

/// Picks whose kernels are launched and whose answer is awaited.
pub(super) struct Picks {
    order: Order,
}

impl CudaBackend {
    /// Launches the search for `picks`.
    pub(super) fn launch_picks(
        &self,
        state: &mut State,
        logits: &CudaRows,
        picks: &[(usize, Pick)],
    ) -> Result<Picks> {
        let order = Order::of(picks, logits.count())?;
        let parts = logits.width().div_ceil(SLICE).min(MOST_PARTS);
        let bytes = 8 * (order.greedy * parts).max(1);
        let best = grow(&self.device, &mut state.picked, bytes, "likely tokens")?.0.ptr();
        let out = state.transfers.expect_answer(order.keys())?;
        let rows = self.send_indices(state, Index::Picks, bytemuck::cast_slice(&order.rows))?.cast();
        let mask_words = logits.width().div_ceil(32);
        let masks = match order.masks {
            0 => None,
            _ => Some(self.send_masks(state, picks, mask_words)?),
        };
        let p = PickParams {
            logits: logits.held_values("a pick")?.ptr(),
            rows,
            parts: best,
            out,
            masks,
            width: logits.width() as u32,
            part_count: parts as u32,
            mask_words: mask_words as u32,
        };
        let lists = PickParams { rows: rows.add(order.greedy), out: out.add(order.greedy), ..p };
        // SAFETY: picked rows lie inside of the logits and counts are at most `MOST_CANDIDATES`
        // (checked by `Order::of`); every mask has a bit for each token; `parts` has room for the slices of each greedy row; the answer
        // has room for all keys and is read, or awaited, before it is reused.
        unsafe {
            self.launches.greedy(order.greedy, p)?;
            self.launches.top_candidates(order.lists, lists)?;
        }
        state.transfers.answer_is_launched()?;
        Ok(Picks { order })
    }

    /// Sends the masks of `picks`, in their order. Waits until they are known, while the device works.
    fn send_masks(&self, state: &mut State, picks: &[(usize, Pick)], words: usize) -> Result<DevicePtr<u32>> {
        self.device.flush()?;
        let mut masks = Vec::new();
        for mask in picks.iter().filter_map(|(_, what)| what.mask()) {
            let end = masks.len() + words;
            masks.extend(mask.words().iter().take(words));
            masks.resize(end, 0);
        }
        self.send_indices(state, Index::Masks, &masks)
    }

    /// Waits for the answer of the picks that were launched last.
    pub(super) fn read_picks(
        &self,
        state: &mut State,
        picks: &Picks,
        out: &mut Vec<Vec<Candidate>>,
    ) -> Result<()> {
        let mut keys = vec![0u64; picks.order.keys()];
        state.transfers.read_answer(&mut keys)?;
        picks.order.deal(&keys, out);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_backend::candidate_key;

    #[test]
    fn results_find_their_way_back() {
        let mask = oscar_backend::TokenMask::default();
        let picks = [
            (4, Pick::TopAmong(2, &mask)),
            (0, Pick::Greedy),
            (2, Pick::Top(256)),
            (3, Pick::GreedyAmong(&mask)),
        ];
        let order = Order::of(&picks, 5).unwrap();
        let rows: Vec<(u32, u32, u32)> = order.rows.iter().map(|r| (r.row, r.count, r.mask)).collect();
        assert_eq!(rows, [(0, 1, 0), (3, 1, 2), (4, 2, 1), (2, 256, 0)]);
        assert_eq!((order.greedy, order.lists, order.keys()), (2, 2, 514));
        let mut keys = vec![0; 514];
        keys[0] = candidate_key(1.0, 7);
        // Row 3 has nothing to choose from; row 4 has two candidates, row 2 one.
        keys[2] = candidate_key(3.0, 1);
        keys[3] = candidate_key(-2.0, 9);
        keys[258] = candidate_key(0.5, 4);
        let mut out = vec![vec![(9.0, 9)]];
        order.deal(&keys, &mut out);
        assert_eq!(out, [vec![(9.0, 9)], vec![(3.0, 1), (-2.0, 9)], vec![(1.0, 7)], vec![(0.5, 4)], vec![]]);
    }

    #[test]
    fn impossible_picks_are_refused() {
        for (bad, says) in [
            ((5, Pick::Greedy), "row 5 of 5"),
            ((0, Pick::Top(0)), "0 candidates"),
            ((0, Pick::Top(257)), "1 to 256"),
        ] {
            let error = Order::of(&[(1, Pick::Greedy), bad], 5).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
