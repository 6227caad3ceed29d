//! From scores to rows: the best within a budget.

use crate::budget::apportion;
use crate::policy::{HeadSplit, Policy};
use crate::scorers::Scores;
use oscar_codec::CacheLayout;
use std::ops::Range;

/// Rows that a view keeps.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    /// Positions by layer and head, ascending.
    pub kept: Vec<Vec<u32>>,
    /// Rows of all heads kept by their score.
    pub chosen: usize,
    /// Rows of all heads kept because their positions are protected.
    pub protected: usize,
    /// Rows of all heads that there were to choose from, protected ones included.
    pub all: usize,
}

impl Selection {
    /// Share of the history that is kept.
    pub fn share(&self) -> f64 {
        (self.chosen + self.protected) as f64 / self.all.max(1) as f64
    }
}

/// At least this share of an equal division goes to each head of an adaptive one.
const FLOOR: f64 = 0.2;

/// A row that may be kept.
#[derive(Clone, Copy)]
struct Candidate {
    score: f64,
    position: u32,
    head: usize,
}

impl Candidate {
    /// The better first; ties go to the lower position, then to the lower head.
    fn order(&self, other: &Self) -> std::cmp::Ordering {
        let by_score = other.score.total_cmp(&self.score);
        by_score.then(self.position.cmp(&other.position)).then(self.head.cmp(&other.head))
    }
}

/// Keeps the best rows of every layer and head, and those at protected positions beside them.
pub fn select(
    layout: &CacheLayout,
    scores: &Scores,
    policy: &Policy,
    protected: &[Range<usize>],
) -> Selection {
    let is_protected = |position: u32| protected.iter().any(|range| range.contains(&(position as usize)));
    let stores = |head: usize| {
        let heads = layout.kv_heads();
        layout.coded().is_some_and(|table| table.codec(head / heads, head % heads).keeps_history())
    };
    let heads = scores.rows.len();
    let mut kept: Vec<Vec<u32>> = vec![Vec::new(); heads];
    let mut candidates: Vec<Vec<Candidate>> = vec![Vec::new(); heads];
    let mut all = 0;
    for head in (0..heads).filter(|&head| stores(head)) {
        for (&position, &score) in scores.positions[head].iter().zip(&scores.rows[head]) {
            all += 1;
            match is_protected(position) {
                true => kept[head].push(position),
                false => candidates[head].push(Candidate { score, position, head }),
            }
        }
        candidates[head].sort_by(Candidate::order);
    }
    let protected = kept.iter().map(Vec::len).sum();
    let caps: Vec<usize> = candidates.iter().map(Vec::len).collect();
    let largest = caps.iter().copied().max().unwrap_or(0);
    let total = policy.budget.total(layout, largest).min(caps.iter().sum());
    let weights: Vec<f64> = caps.iter().map(|&cap| f64::from(u8::from(cap > 0))).collect();
    let shares = apportion(total, &weights, &caps);
    let take = |kept: &mut Vec<Vec<u32>>, rows: &[Candidate]| {
        rows.iter().for_each(|row| kept[row.head].push(row.position));
    };
    match policy.heads {
        HeadSplit::Uniform => {
            (0..heads).for_each(|head| take(&mut kept, &candidates[head][..shares[head]]));
        }
        HeadSplit::Adaptive => {
            for layer in 0..layout.layers() {
                let range = layer * layout.kv_heads()..(layer + 1) * layout.kv_heads();
                best_of(&candidates[range.clone()], &shares[range], FLOOR)
                    .iter()
                    .for_each(|row| kept[row.head].push(row.position));
            }
        }
        HeadSplit::Global => {
            best_of(&candidates, &shares, 0.0).iter().for_each(|row| kept[row.head].push(row.position));
        }
    }
    kept.iter_mut().for_each(|rows| rows.sort_unstable());
    let chosen = kept.iter().map(Vec::len).sum::<usize>() - protected;
    Selection { kept, chosen, protected, all }
}

/// The best rows of some heads, as many as their shares together, each head at least `floor` of its
/// own share.
fn best_of(candidates: &[Vec<Candidate>], shares: &[usize], floor: f64) -> Vec<Candidate> {
    let total: usize = shares.iter().sum();
    let (mut best, mut rest) = (Vec::with_capacity(total), Vec::new());
    for (rows, &share) in candidates.iter().zip(shares) {
        let (sure, others) = rows.split_at((share as f64 * floor) as usize);
        best.extend_from_slice(sure);
        rest.extend_from_slice(others);
    }
    rest.sort_by(Candidate::order);
    rest.truncate(total - best.len());
    best.extend(rest);
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Budget, Evict};
    use oscar_codec::{CodeLayout, KvFormat, Windows};
    use proptest::prelude::*;

    fn layout() -> CacheLayout {
        CacheLayout::new(KvFormat::OSCAR2, 2, 2, 64, Windows::default(), CodeLayout::CpuTile).unwrap()
    }

    fn policy(budget: &str, heads: HeadSplit) -> Policy {
        Policy { evict: Evict::SnapKv, budget: budget.parse().unwrap(), heads }
    }

    fn scores(rows: Vec<Vec<f64>>) -> Scores {
        let positions = rows.iter().map(|rows| (64..64 + rows.len() as u32).collect()).collect();
        Scores { positions, rows, probe_tokens: 0 }
    }

    #[test]
    fn ties_go_to_the_lower_position_and_protected_rows_come_on_top() {
        let scores = scores(vec![vec![1.0, 5.0, 1.0, 1.0, 0.0]; 4]);
        let selected =
            select(&layout(), &scores, &policy("2", HeadSplit::Uniform), std::slice::from_ref(&(68..200)));
        assert_eq!(selected.kept, vec![vec![64, 65, 68]; 4]);
        assert_eq!((selected.chosen, selected.protected, selected.all), (8, 4, 20));
        // All four heads tie, so the lower position wins in every head before the next one does.
        let selected = select(&layout(), &scores, &policy("2", HeadSplit::Global), &[]);
        assert_eq!(selected.kept, vec![vec![64, 65]; 4]);
    }

    #[test]
    fn adaptive_heads_share_their_layer_and_keep_a_floor() {
        let rows = vec![vec![9.0; 100], vec![1.0; 100], vec![3.0; 100], vec![2.0; 100]];
        let lens = |heads| {
            let selected = select(&layout(), &scores(rows.clone()), &policy("50", heads), &[]);
            selected.kept.iter().map(Vec::len).collect::<Vec<_>>()
        };
        assert_eq!(lens(HeadSplit::Uniform), [50, 50, 50, 50]);
        assert_eq!(lens(HeadSplit::Adaptive), [90, 10, 90, 10]);
        assert_eq!(lens(HeadSplit::Global), [100, 0, 100, 0]);
    }

    proptest! {
        #[test]
        fn the_sum_is_exact_for_every_division(
            rows in 1usize..300, budget in 1usize..400, seed in 0u64..1000, split in 0usize..3,
        ) {
            let mut state = seed;
            let mut next = || { state = state.wrapping_mul(6364136223846793005).wrapping_add(1); (state >> 40) as f64 };
            let scores = scores((0..4).map(|_| (0..rows).map(|_| next()).collect()).collect());
            let selected = select(&layout(), &scores, &policy(&budget.to_string(), HeadSplit::NAMES[split].0), &[]);
            prop_assert_eq!(selected.chosen, 4 * budget.min(rows));
            prop_assert!(selected.kept.iter().all(|rows| rows.is_sorted_by(|a, b| a < b)));
        }
    }

    #[test]
    fn percent_and_bytes_are_rows() {
        let page = layout().coded().unwrap().codec(0, 0).page_bytes();
        assert_eq!(Budget::Percent(25.0).total(&layout(), 1000), 1000);
        assert_eq!(Budget::Bytes(4 * page * 3 + 5).total(&layout(), 1000), 4 * 3 * 64);
        assert_eq!(Budget::Rows(5000).total(&layout(), 1000), 4000);
    }
}
