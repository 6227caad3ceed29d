//! From scores to rows: the best within a budget.

use crate::budget::{Budget, apportion};
use crate::policy::HeadSplit;
use crate::scorers::Scores;
use oscar_codec::{CacheLayout, PAGE_TOKENS};
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

    /// Bytes of the pages of a view with these rows.
    pub fn bytes(&self, layout: &CacheLayout) -> usize {
        page_bytes(layout, &self.kept)
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

/// Keeps the best rows of every layer and head, and those at protected positions (ascending) beside
/// them.
pub fn select(
    layout: &CacheLayout,
    scores: &Scores,
    budget: Budget,
    heads: HeadSplit,
    protected: &[Range<usize>],
) -> Selection {
    let is_protected = |position: u32| {
        let position = position as usize;
        let next = protected.partition_point(|range| range.end <= position);
        protected.get(next).is_some_and(|range| range.start <= position)
    };
    let stores = |head: usize| {
        let heads = layout.kv_heads();
        layout.coded().is_some_and(|table| table.codec(head / heads, head % heads).keeps_history())
    };
    let count = scores.rows.len();
    let mut ranking =
        Ranking { layout, protected: vec![Vec::new(); count], candidates: vec![Vec::new(); count] };
    let mut all = 0;
    for head in (0..count).filter(|&head| stores(head)) {
        for (&position, &score) in scores.positions[head].iter().zip(&scores.rows[head]) {
            all += 1;
            match is_protected(position) {
                true => ranking.protected[head].push(position),
                false => ranking.candidates[head].push(Candidate { score, position, head }),
            }
        }
        ranking.candidates[head].sort_by(Candidate::order);
    }
    let caps: Vec<usize> = ranking.candidates.iter().map(Vec::len).collect();
    let (largest, most) = (caps.iter().copied().max().unwrap_or(0), caps.iter().sum::<usize>());
    let kept = match budget {
        Budget::Bytes(bytes) => ranking.within(heads, &caps, bytes),
        budget => ranking.best(heads, &caps, budget.total(layout, largest).min(most)),
    };
    let protected = ranking.protected.iter().map(Vec::len).sum();
    let chosen = kept.iter().map(Vec::len).sum::<usize>() - protected;
    Selection { kept, chosen, protected, all }
}

/// Bytes of the pages that hold these rows of each layer and head.
fn page_bytes(layout: &CacheLayout, kept: &[Vec<u32>]) -> usize {
    let Some(table) = layout.coded() else { return 0 };
    kept.iter()
        .zip(table.codecs())
        .map(|(rows, codec)| rows.len().div_ceil(PAGE_TOKENS) * codec.page_bytes())
        .sum()
}

/// Rows by layer and head: the protected ones, and the others from the best to the worst.
struct Ranking<'a> {
    layout: &'a CacheLayout,
    protected: Vec<Vec<u32>>,
    candidates: Vec<Vec<Candidate>>,
}

impl Ranking<'_> {
    /// Positions of the best `total` rows and of the protected ones, ascending.
    fn best(&self, split: HeadSplit, caps: &[usize], total: usize) -> Vec<Vec<u32>> {
        let weights: Vec<f64> = caps.iter().map(|&cap| f64::from(u8::from(cap > 0))).collect();
        let shares = apportion(total, &weights, caps);
        let heads = caps.len();
        let per_layer = self.layout.kv_heads();
        let best: Vec<Candidate> = match split {
            HeadSplit::Uniform => {
                (0..heads).flat_map(|head| &self.candidates[head][..shares[head]]).copied().collect()
            }
            HeadSplit::Adaptive => (0..heads)
                .step_by(per_layer)
                .flat_map(|first| {
                    let layer = first..first + per_layer;
                    best_of(&self.candidates[layer.clone()], &shares[layer], FLOOR)
                })
                .collect(),
            HeadSplit::Global => best_of(&self.candidates, &shares, 0.0),
        };
        let mut kept = self.protected.clone();
        best.iter().for_each(|row| kept[row.head].push(row.position));
        kept.iter_mut().for_each(|rows| rows.sort_unstable());
        kept
    }

    /// As many of the best rows as fit in pages of `bytes`, beside those of the protected rows.
    fn within(&self, split: HeadSplit, caps: &[usize], bytes: usize) -> Vec<Vec<u32>> {
        let limit = bytes + page_bytes(self.layout, &self.protected);
        let (mut fits, mut beyond) = (0, caps.iter().sum::<usize>() + 1);
        while fits + 1 < beyond {
            let middle = fits + (beyond - fits) / 2;
            match page_bytes(self.layout, &self.best(split, caps, middle)) <= limit {
                true => fits = middle,
                false => beyond = middle,
            }
        }
        self.best(split, caps, fits)
    }
}

/// The best rows of some heads. Their number is the sum of the heads' shares; each head gets at least
/// `floor` of its own share.
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
    use oscar_codec::{CodeLayout, KvFormat, Windows};
    use proptest::prelude::*;

    fn layout() -> CacheLayout {
        CacheLayout::new(KvFormat::OSCAR2, 2, 2, 64, Windows::default(), CodeLayout::CpuTile).unwrap()
    }

    fn keep(scores: &Scores, budget: &str, heads: HeadSplit, protected: Range<usize>) -> Selection {
        select(&layout(), scores, budget.parse().unwrap(), heads, std::slice::from_ref(&protected))
    }

    fn scores(rows: Vec<Vec<f64>>) -> Scores {
        let positions = rows.iter().map(|rows| (64..64 + rows.len() as u32).collect()).collect();
        Scores { positions, rows, probe_tokens: 0 }
    }

    #[test]
    fn ties_go_to_the_lower_position_and_protected_rows_come_on_top() {
        let scores = scores(vec![vec![1.0, 5.0, 1.0, 1.0, 0.0]; 4]);
        let selected = keep(&scores, "2", HeadSplit::Uniform, 68..200);
        assert_eq!(selected.kept, vec![vec![64, 65, 68]; 4]);
        assert_eq!((selected.chosen, selected.protected, selected.all), (8, 4, 20));
        // All four heads tie, so the lower position wins in every head before the next one does.
        let selected = keep(&scores, "2", HeadSplit::Global, 0..0);
        assert_eq!(selected.kept, vec![vec![64, 65]; 4]);
    }

    #[test]
    fn adaptive_heads_share_their_layer_and_keep_a_floor() {
        let rows = vec![vec![9.0; 100], vec![1.0; 100], vec![3.0; 100], vec![2.0; 100]];
        let lens = |heads| {
            let selected = keep(&scores(rows.clone()), "50", heads, 0..0);
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
            let selected = keep(&scores, &budget.to_string(), HeadSplit::NAMES[split].0, 0..0);
            prop_assert_eq!(selected.chosen, 4 * budget.min(rows));
            prop_assert!(selected.kept.iter().all(|rows| rows.is_sorted_by(|a, b| a < b)));
        }
    }

    #[test]
    fn bytes_bound_the_pages_of_every_division() {
        let layout = layout();
        let page = layout.coded().unwrap().codec(0, 0).page_bytes();
        let rows: Vec<Vec<f64>> = (0..4)
            .map(|head| (0..500).map(|i| f64::from((i * 37 + head * 11) % 101 + head * 40)).collect())
            .collect();
        for (split, name) in HeadSplit::NAMES {
            let scores = scores(rows.clone());
            let protected = std::slice::from_ref(&(70..80));
            let selected = select(&layout, &scores, Budget::Bytes(11 * page), split, protected);
            // Ten protected rows fill a page of each head; they come on top.
            let bytes = selected.bytes(&layout);
            assert!(bytes <= 15 * page && bytes >= 13 * page, "{name}: {} pages", bytes / page);
            let more = Budget::Rows(selected.chosen / 4 + 20);
            let more = select(&layout, &scores, more, split, protected);
            assert!(more.bytes(&layout) > bytes, "{name} could keep more");
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
