//! The most likely tokens of rows of logits, found on the device.

use super::launches::PickParams;
use super::rows::{CudaRows, grow};
use super::{CudaBackend, Index, State};
use crate::error::{CudaError, Result};
use crate::memory::Buffer;
use oscar_backend::{Candidate, MOST_CANDIDATES, Pick, candidate_of};

/// Elements of a row that one block of the greedy search takes.
const SLICE: usize = 4096;
/// Most blocks for a row.
const MOST_PARTS: usize = 64;

/// The order of results: greedy ones first, a key each, then the lists, [`MOST_CANDIDATES`] keys each.
#[derive(Debug, Default, PartialEq)]
struct Order {
    /// `row, count` for each block, as the kernels take them.
    rows: Vec<u32>,
    greedy: usize,
    lists: usize,
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
            match what {
                Pick::Greedy => greedy.extend([row as u32, 1]),
                Pick::Top(count) if (1..=MOST_CANDIDATES).contains(&count) => {
                    lists.extend([row as u32, count as u32]);
                }
                Pick::Top(count) => {
                    return refuse(format!("{count} candidates: 1 to {MOST_CANDIDATES} can be listed"));
                }
            }
        }
        (order.greedy, order.lists) = (greedy.len() / 2, lists.len() / 2);
        let (mut next_greedy, mut next_list) = (0, order.greedy);
        for (_, what) in picks {
            match what {
                Pick::Greedy => {
                    order.places.push((next_greedy, 1));
                    next_greedy += 1;
                }
                Pick::Top(count) => {
                    order.places.push((next_list, *count));
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
        if logits.values() == 0 || logits.width() == 0 {
            let detail = "there are no logits in f32".into();
            return Err(CudaError::Shape { what: "a pick", detail });
        }
        let order = Order::of(picks, logits.count())?;
        let parts = logits.width().div_ceil(SLICE).min(MOST_PARTS);
        grow(&self.device, &mut state.picked, 8 * (order.greedy * parts).max(1), "likely tokens")?;
        let answer = state.transfers.expect_answer(order.keys())?;
        let rows = self.send_indices(state, Index::Picks, &order.rows)?;
        let p = PickParams {
            logits: logits.values(),
            rows,
            parts: state.picked.as_ref().map_or(0, Buffer::address),
            out: answer,
            width: logits.width() as u32,
            part_count: parts as u32,
        };
        self.launches.greedy(order.greedy, &p)?;
        let lists =
            PickParams { rows: rows + 8 * order.greedy as u64, out: answer + 8 * order.greedy as u64, ..p };
        self.launches.top_candidates(order.lists, &lists)?;
        state.transfers.answer_is_launched()?;
        Ok(Picks { order })
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
        let picks = [(4, Pick::Top(2)), (0, Pick::Greedy), (2, Pick::Top(256)), (3, Pick::Greedy)];
        let order = Order::of(&picks, 5).unwrap();
        assert_eq!(order.rows, [0, 1, 3, 1, 4, 2, 2, 256]);
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
